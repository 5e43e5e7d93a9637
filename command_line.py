"""The command line around minirlvr.py: read and check the flags, train the runs side by side, keep the run folder.

Nothing here decides what is learned; that is all in minirlvr.py.
"""

import dataclasses
import hashlib
import inspect
import itertools
import json
import multiprocessing
import os
import platform
import shlex
import signal
import sys
import threading
import time
import typing
from collections.abc import Callable, Collection
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, redirect_stderr
from importlib import metadata
from io import StringIO
from pathlib import Path
from typing import Literal, NamedTuple

import torch

import minirlvr
import report
from minirlvr import (
    ESTIMATORS,
    HEAD,
    LOG,
    Method,
    Run,
    Settings,
    UserError,
    parse_method,
    pretrain_reference,
    resolve_update,
    train,
)
from toy_tasks import TASKS, Task
from toy_tasks import task as task_module
from toy_tasks.exact import MEASURES, Listing

FORMAT = ("minirlvr checkpoint", 1)  # the second number changes when older files no longer load
FREE_ON_RESUME = ("steps", "jobs", "device")


# === Reading the flags ===


def parse_settings(argv: list[str] | None) -> Settings:
    """Settings from the command line; with --resume, those of the folder, which only a few flags may change."""
    settings = read_flags(argv, default_settings(sys.argv[1:] if argv is None else argv))
    folder = settings.files.resume
    if not folder:
        return settings
    saved = read_config(Path(folder))
    settings = read_flags(argv, saved)
    given = {name: getattr(settings.experiment, name) for name in FREE_ON_RESUME}
    allowed = dataclasses.replace(
        saved, experiment=dataclasses.replace(saved.experiment, **given), files=minirlvr.Files(resume=folder)
    )
    if settings != allowed:
        flags = ", ".join(f"--{name}" for name in FREE_ON_RESUME)
        raise UserError(f"--resume {folder} goes on with its own settings: beside it only {flags} may be given")
    return settings


def default_settings(argv: list[str]) -> Settings:
    """The defaults: a language model is a thousand times larger than the toy, and learns in smaller steps.

    >>> default_settings(["--policy", "hf:FOLDER"]).update.learning_rate
    1e-05
    """
    values = {flag: value for flag, _, value in (arg.partition("=") for arg in argv)}
    values |= {flag: value for flag, value in itertools.pairwise(argv) if flag.startswith("--")}
    if not values.get("--policy", "").startswith("hf:"):
        return Settings()
    adapters = values.get("--lora-rank", values.get("--lora_rank", "0")) != "0"
    return Settings(
        experiment=minirlvr.Experiment(methods=("grpo", "grpo+iac+dlc"), seeds=1, steps=50),
        sampling=minirlvr.Sampling(prompts=8),
        update=minirlvr.Update(learning_rate=1e-4 if adapters else 1e-5),
    )


def read_flags(argv: list[str] | None, default: Settings) -> Settings:
    """tyro's reading of the flags; what it prints of a mistake is folded into one line. Raises UserError."""
    import tyro

    printed = StringIO()
    try:
        with redirect_stderr(printed):
            return tyro.cli(
                tyro.conf.OmitArgPrefixes[Settings],
                args=argv,
                default=default,
                prog="minirlvr.py",
                description=(minirlvr.__doc__ or "").split("\n\nOne letter")[0],
            )
    except SystemExit as stopped:
        if not stopped.code:  # --help
            raise
        lines = [line.strip("│ \t") for line in printed.getvalue().splitlines()[1:]]  # without the title
        lines = lines[1:] if lines and is_rule(lines[0]) else lines  # old terminals get one below the title
        end = next((i for i, line in enumerate(lines) if is_rule(line)), len(lines))
        raise UserError(f"{' '.join(lines[:end])} (--help lists every flag)") from None


def is_rule(line: str) -> bool:
    """Is this one of the lines that tyro draws between parts of a message?"""
    return set(line) <= set("─╯╰-")


def read_config(folder: Path) -> Settings:
    """The settings in a run folder's config.json. Raises UserError where there are none that this version knows."""
    try:
        saved = json.loads((folder / "config.json").read_text())["settings"]
        groups = {part.name: read_group(saved[part.name], part.type) for part in dataclasses.fields(Settings)}
        settings = Settings(**groups)
        check(settings)
    except OSError:
        raise UserError(f"--resume {folder}: no config.json can be read there; name a folder that a run made") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = " ".join(str(error).split())[:120]
        raise UserError(f"--resume {folder}: its config.json is damaged or of another version ({reason})") from None
    return settings


def read_group(saved: dict, group: type):
    """One group of settings from JSON, every value of its declared type. Raises ValueError or TypeError."""
    hints = typing.get_type_hints(group)
    if not isinstance(saved, dict) or set(saved) != set(hints):
        raise ValueError(f"{group.__name__} has other fields")
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in saved.items()}
    for name, value in values.items():
        if not fits(value, hints[name]):
            raise ValueError(f"{name} is {value!r:.40}")
    return group(**values)


def fits(value, hint) -> bool:
    """Is a value from JSON of a declared type?

    >>> fits(1, float), fits(True, int), fits("k4", Literal["k1", "k2"]), fits(None, float | None)
    (True, False, False, True)
    """
    origin, options = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return value in options
    if origin is tuple:
        return isinstance(value, tuple) and all(isinstance(item, str) for item in value)
    if options:  # float | None
        return any(fits(value, option) for option in options)
    return type(value) in ((int, float) if hint is float else (hint,))


def check(settings: Settings) -> list[Method]:
    """The methods of valid settings. Raises UserError, one line that says what is allowed, for any others."""
    e = settings.experiment
    if e.task not in TASKS:
        raise UserError(f"unknown task {e.task!r}: choose one of {', '.join(TASKS)}")
    check_policy(settings)
    check_numbers(settings)
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
        if G < 2 and (ESTIMATORS[method.estimator].needs_group or method.iac):
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
    elif model.dataset and settings.experiment.task != minirlvr.Experiment().task:
        raise UserError(f"--task {settings.experiment.task} and --dataset {model.dataset!r:.80}: give one of them")
    elif not model.dataset and model.heldout is not None:
        raise UserError("--heldout is for --dataset: a toy task holds out its own prompts; leave it out")
    elif model.dtype == "float16" and not model.lora_rank:
        raise UserError("--dtype float16 is too narrow to train in: give --lora-rank too, or take bfloat16 or float32")
    elif settings.experiment.compile:
        raise UserError("--compile is for the toy policy: leave it out with --policy hf:...")
    elif settings.shape != minirlvr.Shape(heads=settings.shape.heads):
        raise UserError("--layers and --width are the toy policy's; a language model has its own: leave them out")
    if start not in ("fresh", "reference") and (policy == "toy" or not start.startswith("hf:")):
        more = "" if policy == "toy" else " or hf:FOLDER_OR_ID"
        raise UserError(f"--memory-start is {start!r:.80}: it must be fresh or reference{more}")


def check_numbers(settings: Settings) -> None:
    """Every number within its range; NaN and infinity are in none."""
    count, rate, weight, share = (1, 10**6), (1e-12, 1e6), (0, 1e6), (0, 1)
    ranges = {
        "experiment": {"steps": count, "seeds": count, "evaluate_every": count, "jobs": (0, 1024)},
        "sampling": {"prompts": count, "group_size": count, "temperature": rate},
        "update": {"learning_rate": rate, "max_grad_norm": rate, "epochs": count, "micro_batches": count}
        | {"clip_low": share, "clip_high": weight, "beta": weight, "entropy_bonus": weight}
        | {"f_grpo_gamma": weight, "unlikeliness_beta": share},
        "calibration": {"alpha": (0, 10), "mu": (0, 100), "memory_learning_rate": rate}
        | {"memory_layers": (1, 100), "memory_width": (1, 10**5)},
        "sharpening": {"sharpen_alpha": (0, 100), "beta_inverse": rate, "length_power": (0, 10)},
        "shape": {"layers": (1, 100), "width": (1, 10**5), "heads": (1, 1000)},
        "language_model": {"heldout": count, "max_new_tokens": (1, 10**5), "evaluation_samples": (8, 10**5)}
        | {"evaluation_prompts": count, "lora_rank": (0, 1024)},
    }
    ranges["experiment"]["first_seed"] = (0, 2**31)
    for group, names in ranges.items():
        for name, (least, most) in names.items():
            value = getattr(getattr(settings, group), name)
            if value is not None and not least <= value <= most:
                raise UserError(f"--{name.replace('_', '-')} is {value!s:.40}: it must be from {least:g} to {most:g}")


def check_task(task: Task) -> None:
    """Refuse a task with a prompt that has no correct answer, before anything is trained."""
    try:
        Listing(task, task.prompts)
    except ValueError as error:
        raise UserError(str(error)) from None


def choose_device(name: str) -> str:
    """auto becomes cuda or cpu; a device that is not there is a UserError."""
    there = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if name == "auto":
        return "cuda" if there["cuda"] else "cpu"
    if not there[name]:
        raise UserError(
            f"--device {name}: PyTorch finds none here; take one of {', '.join(n for n in there if there[n])}"
        )
    return name


# === The run folder ===


def open_folder(settings: Settings, methods: list[Method], device: str, task: Task) -> Path:
    """Make the run folder, or open the one to resume; either way config.json then says what runs."""
    files = settings.files
    folder = Path(files.resume or files.out or Path("runs") / f"{task.name}-{time.strftime('%Y%m%d-%H%M%S')}")
    versions = {"minirlvr": minirlvr.__version__, "python": platform.python_version(), "torch": torch.__version__}
    if settings.experiment.policy != "toy":
        installed = {part.name for part in metadata.distributions()}
        extras = {"transformers", "tokenizers", "safetensors", "peft", "math-verify"} & installed
        versions |= {name: metadata.version(name) for name in sorted(extras)}
    now = {
        "device": device,
        "versions": versions | {"platform": platform.platform()},
        "command": shlex.join(["python", *sys.argv]),
    }
    config = {
        "settings": dataclasses.asdict(dataclasses.replace(settings, files=minirlvr.Files())),
        "methods": {m.name: resolve_update(settings.update, ESTIMATORS[m.estimator]) for m in methods},
        "ceilings": ceilings(task),
        "dataset_sha256": fingerprint(settings.language_model.dataset),
    }
    try:
        if files.resume:  # what made the folder stays; what went on with it is added
            saved = json.loads((folder / "config.json").read_text())
            if saved.get("dataset_sha256") != config["dataset_sha256"]:
                raise UserError(
                    f"--resume {folder}: its dataset {settings.language_model.dataset!r:.80} has changed since"
                )
            config = saved | config | {"resumed": [*saved.get("resumed", []), now]}
        elif folder.exists() and (not folder.is_dir() or any(path.name != "config.json" for path in folder.iterdir())):
            raise UserError(f"--out {folder} exists and is not empty: name a new one, or go on with --resume {folder}")
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(now | config, indent=2, default=dataclasses.asdict) + "\n"
        report.replace_file(folder / "config.json", text)
    except OSError as error:
        flag = "--resume" if files.resume else "--out"
        raise UserError(f"{flag} {folder!s:.200} cannot be written: {error.strerror}") from None
    return folder


def fingerprint(dataset: str) -> str | None:
    """SHA-256 of a dataset's file; None without one."""
    return hashlib.sha256(Path(dataset).read_bytes()).hexdigest() if dataset else None


def ceilings(task: Task) -> dict[str, dict[str, float]]:
    """The best that can be reached: split -> measure -> value; all modes of a prompt equally likely."""
    return {
        split: {"pass@1": 1.0, "effective_modes": sum(len(task.modes(prompt)) for prompt in prompts) / len(prompts)}
        for split, prompts in (("train", task.train), ("heldout", task.heldout))
    }


def save(state: dict, path: Path) -> None:
    """torch.save that never leaves half a file under the final name. Raises UserError where it cannot write."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        torch.save(state, partial)
        partial.replace(path)
    except (OSError, RuntimeError) as error:  # PyTorch reports a full disk as a RuntimeError
        partial.unlink(missing_ok=True)
        raise UserError(f"{path} cannot be written ({' '.join(str(error).split())[:80]})") from None


def load_checkpoint(path: Path, method: str, seed: int, measures: Collection[str] = MEASURES) -> dict:
    """What `Run.state` gave, with rows of those measures.

    Raises UserError for a file cut short, not ours, of another version or of another run.

    Tensors and plain values only (weights_only): a file from a stranger runs no code.
    """
    try:
        state = torch.load(path, weights_only=True, map_location="cpu")
    except Exception as error:  # a damaged file may fail anywhere inside torch.load
        reason = " ".join(str(error).split())[:80]
        raise UserError(f"checkpoint {path} cannot be read ({reason}); delete it to train that run again") from None
    if not isinstance(state, dict) or state.get("format") != FORMAT[0]:
        raise UserError(f"checkpoint {path} was not written by minirlvr; take it out of the folder")
    if state.get("version") != FORMAT[1]:
        theirs = f"{state.get('version')!r:.20}"
        raise UserError(f"checkpoint {path} has format version {theirs}, this is {FORMAT[1]}: use its own minirlvr")
    if (state.get("method"), state.get("seed")) != (method, seed):
        theirs = f"{state.get('method')!s:.40} seed {state.get('seed')!s:.20}"
        raise UserError(f"checkpoint {path} holds {theirs}; give it back its name")
    rows, step, window = state.get("rows"), state.get("step"), state.get("window")
    sound = type(step) is int and 0 <= step <= 10**6 and type(rows) is list and len(rows) > 0
    sound = sound and all(is_row(row, method, seed, measures) for row in rows) and is_window(window)
    if not sound:
        raise UserError(f"checkpoint {path} is damaged (its rows, log or step); delete it to train that run again")
    return state


def is_row(row, method: str, seed: int, measures: Collection[str]) -> bool:
    """Is this a row of metrics.csv, of this run? An estimate may be blank, where nothing is known of it."""
    numbers = (*measures, "completions", *LOG)
    if not isinstance(row, dict) or set(row) != {*HEAD, *numbers}:
        return False
    head = (row["method"], row["seed"]) == (method, seed) and row["split"] in report.TITLES
    blank = {*LOG, *(measures if "samples" in measures else ())}
    logged = all(type(row[name]) in (int, float) or (name in blank and row[name] == "") for name in numbers)
    return head and type(row["step"]) is int and logged


def is_window(window) -> bool:
    """Is this what a run logs between two evaluations?"""
    if not isinstance(window, dict) or set(window) != set(LOG):
        return False
    return all(type(values) is list and all(type(v) is float for v in values) for values in window.values())


def restore_run(run: Run, path: Path) -> None:
    """Put a run where its checkpoint was. Raises UserError where that holds another run or another shape."""
    state = load_checkpoint(path, run.method.name, run.seed, run.measures)
    if state["step"] > run.settings.experiment.steps:
        raise UserError(f"checkpoint {path} is at step {state['step']} already: give --steps of at least that")
    try:
        run.restore(state)
        run.load_weights(path)
    except (KeyError, IndexError, RuntimeError, ValueError, TypeError, AttributeError) as error:
        reason = " ".join(str(error).split())[:120]
        raise UserError(f"checkpoint {path} does not fit these settings ({reason}); delete it to train anew") from None


def load_reference(task: Task, shape: minirlvr.Shape) -> minirlvr.Policy:
    """The reference from the cache, or pretrained now and put there under a name that hashes all that made it."""
    code = [inspect.getsource(part) for part in (minirlvr, task_module, inspect.getmodule(type(task)))]
    recipe = [*code, vars(task), dataclasses.asdict(shape), torch.__version__, platform.machine()]
    name = f"reference-{task.name}-{hashlib.sha256(json.dumps(recipe, default=str).encode()).hexdigest()[:12]}.pt"
    path = Path(os.environ.get("MINIRLVR_CACHE", Path(__file__).parent / ".cache")) / name
    policy = minirlvr.Policy(task.vocab_size, torch.Generator(), shape.layers, shape.width, shape.heads)
    try:
        policy.load_state_dict(torch.load(path, weights_only=True))
        if all(weight.isfinite().all() for weight in policy.parameters()):
            return policy
    except Exception:  # not there yet, or damaged, which may fail anywhere inside torch.load
        pass
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        policy = pretrain_reference(task, shape)
        save(policy.state_dict(), path)
    except (OSError, UserError) as error:
        reason = f"the reference cannot be kept in {path.parent} ({error})"
        raise UserError(f"{reason}; name a folder in the environment variable MINIRLVR_CACHE") from None
    return policy


# === The runs, side by side ===


class Job(NamedTuple):
    """One method and one seed."""

    settings: Settings
    method: Method
    seed: int
    folder: Path
    device: str

    @property
    def checkpoint(self) -> Path:
        return self.folder / f"checkpoint-{self.method.name}-seed{self.seed}.pt"

    def run(self, tick: Callable[[int], None], stopped: Callable[[], bool]) -> None:
        """From the checkpoint, or from the reference, to the last step or to `stopped()`."""
        with advice():
            run = self.start()
            if self.checkpoint.exists():
                restore_run(run, self.checkpoint)
            tick(run.step)
            train(run, lambda: tick(1), self.save, stopped)

    def start(self) -> Run:
        """The run at its first step."""
        if self.settings.experiment.policy != "toy":
            return text_runs().start_run(self.settings, self.method, self.seed, self.device)
        reference = load_reference(TASKS[self.settings.experiment.task](), self.settings.shape)
        return Run(self.settings, self.method, self.seed, reference, self.device)

    def save(self, run: Run) -> None:
        """Write the checkpoint: weights in files of their own first, so that it never names any that are not there."""
        run.save_weights(self.checkpoint)
        save({"format": FORMAT[0], "version": FORMAT[1]} | run.state(), self.checkpoint)
        run.forget_weights(self.checkpoint)


def text_runs():
    """The module that trains language models. Raises UserError where what it needs is not installed."""
    try:
        import text_runs
    except ImportError as error:
        raise UserError(f"--policy hf:... needs {error.name}: pip install -r requirements-hf.txt") from None
    return text_runs


@contextmanager
def advice():
    """Running out of memory, or of a compiler, becomes a UserError that says what to do."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:  # PyTorch's are RuntimeErrors
        if type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
            reason = "it needs a C++ compiler, or Triton on a GPU"
            raise UserError(f"--compile failed ({reason}): leave it out to train without") from None
        if not isinstance(error, MemoryError | torch.OutOfMemoryError) and "allocate memory" not in str(error):
            raise
        flags = "--prompts, --group-size or --max-new-tokens (of the toy policy --width)"
        raise UserError(
            f"out of memory: turn down {flags}, or raise --micro-batches, which changes no result"
        ) from None


SHARED: dict = {}  # in a worker process: the stop sign that Ctrl-C raises, and the counter of steps done


def start_worker(stop, steps, threads: int) -> None:
    """Prepare a worker process: its number of threads, and no life without its parent."""
    SHARED.update(stop=stop, steps=steps)
    torch.set_num_threads(threads)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def in_worker(job: Job) -> None:
    def tick(steps: int) -> None:
        with SHARED["steps"].get_lock():
            SHARED["steps"].value += steps

    job.run(tick, SHARED["stop"].is_set)


def run_all(
    jobs: list[Job], side_by_side: int, threads: int, stop, steps, first: Callable[[], object]
) -> tuple[list[str], BaseException | None]:
    """Train them all, after `first` is done; the numbers do not depend on how many side by side.

    Returns the users' mistakes, for which the others go on, and a fault of ours, if any, for which they stop. A
    KeyboardInterrupt during `first` is the caller's.
    """
    from tqdm import tqdm

    total = len(jobs) * jobs[0].settings.experiment.steps
    context = multiprocessing.get_context("spawn")  # the one that works with CUDA, and the same on every system
    mistakes: list[str] = []
    fault = None
    pace = 0.1 if sys.stderr.isatty() else 10  # seconds between two updates of the bar: a log file wants few
    with (
        tqdm(total=total, unit="step", desc=f"{len(jobs)} runs, {side_by_side} at a time", mininterval=pace) as bar,
        ProcessPoolExecutor(side_by_side, context, start_worker, (stop, steps, threads)) as pool,
    ):
        with signals_go_to(signal.SIG_IGN):  # the workers are born deaf: Ctrl-C is the parent's to hear
            for _ in range(side_by_side):
                pool.submit(int)  # the workers import PyTorch while `first` runs here
        with signals_go_to(signal.default_int_handler):  # nothing is lost yet, so Ctrl-C need not wait
            first()
        pending: set[Future] = {pool.submit(in_worker, job) for job in jobs}
        while pending:
            done, pending = wait(pending, timeout=0.2)
            bar.update(steps.value - bar.n)
            for error in [future.exception() for future in done if not future.cancelled() and future.exception()]:
                if isinstance(error, BrokenProcessPool):
                    mistakes.append("a worker process died (out of memory?); go on with --resume and fewer --jobs")
                elif isinstance(error, UserError):
                    mistakes.append(str(error))
                else:
                    fault = error
                    stop.set()
            if stop.is_set():
                pending -= {future for future in pending if future.cancel()}
    return mistakes, fault


@contextmanager
def signals_go_to(handler):
    """Ctrl-C and a polite kill are handled by `handler` inside the block, and as before after it."""
    before = [(number, signal.signal(number, handler)) for number in (signal.SIGINT, signal.SIGTERM)]
    try:
        yield
    finally:
        for number, old in before:
            signal.signal(number, old)


def prepare(settings: Settings, methods: list[Method], device: str) -> tuple[Task, Collection[str], str]:
    """The task, the names of its measures, and what there is to say before the first step."""
    if settings.experiment.policy != "toy":
        return text_runs().prepare(settings, methods, device)
    return TASKS[settings.experiment.task](), MEASURES, ""


def compare(settings: Settings) -> int:
    """Run what the settings ask for and write the folder. Returns the exit code: 0, 2 for a mistake, 130 for Ctrl-C."""
    began = time.time()
    methods, device = check(settings), choose_device(settings.experiment.device)
    e, is_toy = settings.experiment, settings.experiment.policy == "toy"
    task, measures, description = prepare(settings, methods, device)
    folder = open_folder(settings, methods, device, task)
    print(f"{task.name}: {len(task.train)} prompts to train on, {len(task.heldout)} held out; writing to {folder}/")
    if description:
        print(description)
    all_threads = torch.get_num_threads()  # as many as there are cores, or as OMP_NUM_THREADS says
    torch.set_num_threads(1)
    seeds = range(e.first_seed, e.first_seed + e.seeds)
    jobs = [Job(settings, method, seed, folder, device) for seed in seeds for method in methods]
    side_by_side = min(e.jobs or (available_cores() if device == "cpu" and is_toy else 1), len(jobs))
    threads = 1 if is_toy else max(min(all_threads, available_cores()) // side_by_side, 1)
    context = multiprocessing.get_context("spawn")
    stop, steps = context.Event(), context.Value("q", 0)

    def first() -> None:  # the reference is made here once, before the workers look for it
        if is_toy:
            load_reference(task, settings.shape)

    try:
        with signals_go_to(lambda *_: stop.set()):
            mistakes, fault = run_all(jobs, side_by_side, threads, stop, steps, first)
    except KeyboardInterrupt:
        return say_stopped(folder)
    rows = []
    for job in sorted(jobs, key=lambda job: (methods.index(job.method), job.seed)):
        try:
            if job.checkpoint.exists():
                rows += load_checkpoint(job.checkpoint, job.method.name, job.seed, measures)["rows"]
        except UserError as error:  # the others are reported all the same
            mistakes.append(str(error))
    if rows:
        try:
            print(report.write(folder, rows))
        except OSError as error:
            mistakes.append(f"the results in {folder} cannot be written: {error.strerror}")
    print(f"{time.time() - began:.0f} s; everything is in {folder}/")
    for mistake in sorted(set(mistakes)):
        print(f"minirlvr: {mistake}", file=sys.stderr)
    if fault is not None:
        raise fault
    if stop.is_set():
        say_stopped(folder)
    return 2 if mistakes else 130 if stop.is_set() else 0


def say_stopped(folder: Path) -> int:
    print(f"stopped and saved; go on with: python minirlvr.py --resume {folder}", file=sys.stderr)
    return 130


def available_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def main(argv: list[str] | None = None) -> int:
    """The command line. Returns the exit code; a user's mistake is one line and exit code 2."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # an old terminal without the sign ± is no reason to lose a table
    try:
        return compare(parse_settings(argv))
    except UserError as error:
        print(f"minirlvr: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # whoever read our output has gone; the files are written
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
