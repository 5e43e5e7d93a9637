"""Everything that can be chosen: the dials of a step and what stands around it, in the groups that --help prints.

Whatever ran is in config.json; nothing is set anywhere else. What is refused is refused here, before anything runs.
"""

import dataclasses
from dataclasses import dataclass, field
from typing import Annotated, Literal, NamedTuple

from minirlvr import CALIBRATIONS, ESTIMATORS, Calibration, Sampling, Update
from toy_tasks import TASKS, Task, UserError
from toy_tasks.exact import Listing
from toy_tasks.ranges import Count, Range, Rate, first_fault
from toy_tasks.sharpening import REGIMES


@dataclass(frozen=True)
class Experiment:
    """What is compared. One run is one method and one seed."""

    task: str = "sums"  # Toy world, one of those above.
    # What is compared, such as rloo, grpo+iac+dlc, tilt, dapo@temper, exact: see above.
    methods: tuple[str, ...] = ("grpo", "grpo+iac", "grpo+dlc", "grpo+iac+dlc")
    seeds: Count = 3  # Runs per method; intervals are over these.
    first_seed: Annotated[int, Range(0, 2**31)] = 0  # The seeds are first_seed, first_seed + 1, ...
    # Batches sampled in a run; equal steps are equal numbers of sampled completions, for every method.
    steps: Count = 120
    # Steps between two evaluations, each a row of metrics.csv for each split, and a checkpoint.
    evaluate_every: Count = 10
    # toy: the small transformer of minirlvr.py; or hf:FOLDER_OR_ID, a Hugging Face model, asked in plain language.
    policy: str = "toy"
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"  # auto takes CUDA where there is one, else the processor.
    # Processes side by side, which share the cores; 0 means one per core for the toy policy, and one in all on a GPU or
    # for a language model. The numbers do not change.
    jobs: Annotated[int, Range(0, 1024)] = 0
    # torch.compile the toy policy: fewer, larger kernels, for long runs and GPUs; costs a minute at the start of each.
    compile: bool = False


@dataclass(frozen=True)
class Files:
    """Where results go."""

    out: str = ""  # New folder for the results; runs/TASK-DATE-TIME if not given.
    resume: str = ""  # Folder of a stopped run to go on with; only --steps, --jobs and --device may differ from it.


@dataclass(frozen=True)
class Sharpening:
    """P2's rewards, for methods that name one: sharpen, temper, tilt (with RLOO), or ESTIMATOR@REGIME."""

    # Weight of the reference's log-probability; the optimum of temper is reference^alpha.
    sharpen_alpha: Annotated[float, Range(0, 100)] = 2.0
    beta_inverse: Rate = 10.0  # tilt's optimum is reference^alpha * exp(beta_inverse * reward).
    # How that log-probability counts: summed, per token, or per token^length_power.
    normalize: Literal["sum", "mean", "weighted"] = "sum"
    # The power of the length that `--normalize weighted` divides by.
    length_power: Annotated[float, Range(0, 10)] = 0.5


@dataclass(frozen=True)
class Shape:
    """Size of the toy policy."""

    layers: Annotated[int, Range(1, 100)] = 2  # Transformer blocks.
    width: Annotated[int, Range(1, 10**5)] = 64  # Size of the residual stream (D).
    heads: Annotated[int, Range(1, 1000)] = 4  # Attention heads (H), in the policy and in a fresh memory network.


@dataclass(frozen=True)
class LanguageModel:
    """Only with --policy hf:FOLDER_OR_ID, whose own defaults `--policy hf:... --help` lists."""

    dataset: str = ""  # Your own questions instead of --task: a .jsonl file, `prompt` and `answer` in each row.
    heldout: Count | None = None  # Rows at its end that are never trained; a quarter, at most 64, if not given.
    # Written under every prompt; if not given, nothing for a toy task, and for --dataset to put the answer in a box.
    instruction: str | None = None
    # Completions are cut here (T); if not given, a little above the longest answer, or 256 for --dataset.
    max_new_tokens: Annotated[int, Range(1, 10**5)] | None = None
    # Completions per prompt that each evaluation's estimates come from.
    evaluation_samples: Annotated[int, Range(8, 10**5)] = 32
    evaluation_prompts: Count = 64  # At most so many prompts of each split are evaluated, the first ones.
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"  # Of the weights; adapters are always float32.
    lora_rank: Annotated[int, Range(0, 1024)] = (
        0  # Train adapters of this rank and freeze the model; 0 trains all weights.
    )
    gradient_checkpointing: bool = False  # Less memory for activations, and prompts read again for each completion.


@dataclass(frozen=True)
class Settings:
    """Everything that can be chosen, in the groups that --help prints."""

    experiment: Experiment = field(default_factory=Experiment)
    files: Files = field(default_factory=Files)
    sampling: Sampling = field(default_factory=Sampling)
    update: Update = field(default_factory=Update)
    calibration: Calibration = field(default_factory=Calibration)
    sharpening: Sharpening = field(default_factory=Sharpening)
    shape: Shape = field(default_factory=Shape)
    language_model: LanguageModel = field(default_factory=LanguageModel)


# === What a method's name means ===


class Method(NamedTuple):
    """An estimator, the reward of P2 that it climbs, and calibrations, as written on the command line."""

    name: str
    estimator: str
    regime: str
    calibrations: tuple[str, ...]

    @property
    def has_memory(self) -> bool:
        return any(CALIBRATIONS[name].memory for name in self.calibrations)

    @property
    def needs_group(self) -> bool:
        rows = (ESTIMATORS[self.estimator], *(CALIBRATIONS[name] for name in self.calibrations))
        return any(row.needs_group for row in rows)


def parse_method(name: str) -> Method:
    """ESTIMATOR, REGIME (P2's estimator is RLOO) or ESTIMATOR@REGIME, then calibrations in any order; `exact` bare.

    Raises UserError for any other name.
    >>> parse_method("tilt+dlc+iac")
    Method(name='tilt+dlc+iac', estimator='rloo', regime='tilt', calibrations=('iac', 'dlc'))
    """
    stem, *written = split_name(name)
    estimator, at, regime = ("rloo", "@", stem) if stem in REGIMES else stem.partition("@")
    known = estimator in ESTIMATORS and (regime in REGIMES if at else True)
    known = known and set(written) <= set(CALIBRATIONS) and len(set(written)) == len(written)
    if known and (ESTIMATORS[estimator].samples or not (written or at)):
        return Method(name, estimator, regime or "task", tuple(c for c in CALIBRATIONS if c in written))
    choices = ", ".join((*(name for name in ESTIMATORS if ESTIMATORS[name].samples), *REGIMES[1:]))
    endings = ", ".join(f"+{name}" for name in CALIBRATIONS)
    raise UserError(f"unknown method {name!r:.60}: choose from {choices}, each with any of {endings}, or exact")


def split_name(name: str) -> list[str]:
    """The stem of a method's name, then its calibrations; an estimator may have a + of its own.

    >>> split_name("reinforce+++iac"), split_name("grpo")
    (['reinforce++', 'iac'], ['grpo'])
    """
    stem = max((known for known in (*ESTIMATORS, *REGIMES) if name.startswith(known)), key=len, default="")
    rest = name[len(stem) :].split("+")
    return [stem + rest[0], *rest[1:]]


# === What is refused ===


def check(settings: Settings) -> list[Method]:
    """The methods of valid settings. Raises UserError, one line that says what is allowed, for any others."""
    e = settings.experiment
    if e.task not in TASKS:
        raise UserError(f"unknown task {e.task!r}: choose one of {', '.join(TASKS)}")
    check_policy(settings)
    check_dials(settings)
    u, shape = settings.update, settings.shape
    for flag, width in (("width", shape.width), ("memory-width", settings.calibration.memory_width)):
        if width % (2 * shape.heads):
            raise UserError(f"--{flag} is {width}: it must be a multiple of twice --heads, which is {shape.heads}")
    if u.beta and u.kl_kind == "k1" and u.kl_in == "loss":
        raise UserError("--kl-kind k1 as a loss has an expected gradient of 0: take k2 or k3, or --kl-in reward")
    methods = [parse_method(name) for name in e.methods]
    if not methods or len({method[1:] for method in methods}) < len(methods):
        raise UserError(f"--methods {' '.join(e.methods)}: name at least one method, and each once")
    if "exact" in e.methods and (u.epochs, u.micro_batches, u.entropy_bonus) != (1, 1, 0.0):
        raise UserError("exact takes one step at a time: run it without --epochs, --micro-batches and --entropy-bonus")
    G = settings.sampling.group_size
    for method in methods:
        if G < 2 and method.needs_group:
            raise UserError(f"--group-size is {G}: {method.name} compares within a group; give 2 or more")
    check_task(TASKS[e.task]())
    return methods


def check_policy(settings: Settings) -> None:
    """The flags that belong to --policy hf:... alone, and what a language model cannot do."""
    policy, start, model = settings.experiment.policy, settings.calibration.memory_start, settings.language_model
    if policy == "toy":
        changed = [part.name for part in dataclasses.fields(model) if getattr(model, part.name) != part.default]
        if changed:
            flag = changed[0].replace("_", "-")
            raise UserError(f"--{flag} is for a language model: give --policy hf:FOLDER_OR_ID too, or leave it out")
    elif not policy.removeprefix("hf:") or not policy.startswith("hf:"):
        raise UserError(f"--policy is {policy!r:.80}: it must be toy or hf:FOLDER_OR_ID")
    elif model.dataset and settings.experiment.task != Experiment().task:
        raise UserError(f"--task {settings.experiment.task} and --dataset {model.dataset!r:.80}: give one of them")
    elif not model.dataset and model.heldout is not None:
        raise UserError("--heldout is for --dataset: a toy task holds out its own prompts; leave it out")
    elif model.dtype == "float16" and not model.lora_rank:
        raise UserError("--dtype float16 is too narrow to train in: give --lora-rank too, or take bfloat16 or float32")
    elif settings.experiment.compile:
        raise UserError("--compile is for the toy policy: leave it out with --policy hf:...")
    elif settings.shape != Shape(heads=settings.shape.heads):
        raise UserError("--layers and --width are the toy policy's; a language model has its own: leave them out")
    if start not in ("fresh", "reference") and (policy == "toy" or not start.startswith("hf:")):
        more = "" if policy == "toy" else " or hf:FOLDER_OR_ID"
        raise UserError(f"--memory-start is {start!r:.80}: it must be fresh or reference{more}")


def check_dials(settings: Settings) -> None:
    """Every number within the range that stands beside its default, every word among those that it may be."""
    for part in dataclasses.fields(Settings):
        fault = first_fault(getattr(settings, part.name))
        if fault:
            name, told = fault
            raise UserError(f"--{name.replace('_', '-')} {told}")


def check_task(task: Task) -> None:
    """Refuse a task with a prompt that has no correct answer, before anything is trained."""
    try:
        Listing(task, task.prompts)
    except ValueError as error:
        raise UserError(str(error)) from None
