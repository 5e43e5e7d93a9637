"""A run of a language model: minirlvr.py's step, with measures estimated from samples and weights in safetensors.

Answers of a language model cannot be summed: the same answer has any number of wordings. So each evaluation draws
completions, counts the answers that they state and puts an interval around every estimate (columns `..._low` and
`..._high`). Beside them stand the *exact* probabilities of the listed answers' bare texts, for toy tasks.
"""

import json
import math
import re
import shutil
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import transformers
from torch import Tensor, nn

from lab.files import replace_file
from lab.run import Run
from lab.settings import LanguageModel, Method, Settings
from language_models.dataset import BOXED, DatasetTask, read_dataset
from language_models.generate import check_vocabulary
from language_models.loading import (
    load_model,
    load_model_weights,
    load_tokenizer,
    read_model_config,
    save_model,
    stop_ids,
)
from language_models.policy import HFPolicy, is_lora, one_line
from language_models.size import describe, longest_text
from language_models.tasks import LanguageTask, TextTask
from minirlvr import ESTIMATORS, rollout, token_logprobs
from toy_tasks import TASKS, Task, UserError
from toy_tasks.exact import batched
from toy_tasks.measures import bootstrap_intervals, effective_modes

ESTIMATED = ("pass@1", "pass@8", "distinct@8", "effective_modes", "retained_mass")
LISTED = ("listed_pass@1", "listed_modes")  # exact: summed over the listed answers' bare texts
ROWS_AT_ONCE = 256  # completions drawn together in an evaluation

transformers.utils.logging.disable_progress_bar()  # the command line has one of its own
warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)  # peft's affair with transformers


def measure_names(task: LanguageTask) -> tuple[str, ...]:
    """The columns that a run on `task` measures; only a toy task's answers can be listed."""
    estimated = tuple(name + end for name in ESTIMATED for end in ("", "_low", "_high"))
    return (*estimated, "samples", *(LISTED if isinstance(task, TextTask) else ()))


class TextRun(Run):
    """A run whose policy is a language model, trained in place. What is not here is the toy policy's."""

    def __init__(
        self, settings: Settings, method: Method, seed: int, policy: HFPolicy, device: str, task: LanguageTask
    ):
        self.measures = measure_names(task)
        self.saved_step = -1  # the step whose weights this process wrote or read last
        super().__init__(settings, method, seed, policy, device, task)

    def make_policies(self, policy: HFPolicy, task: Task, device: str) -> tuple[HFPolicy, nn.Module | None]:
        """The policy itself, and its base without adapters as the reference; else a copy, where one is asked for."""
        return policy, policy.reference() if is_lora(policy) else None  # Learner copies where something asks for one

    def make_memory(self, policy: HFPolicy, task: Task, seed: int, device: str) -> nn.Module | None:
        """As the toy's, or another model with the same vocabulary."""
        start = self.settings.calibration.memory_start
        if not self.method.has_memory or not start.startswith("hf:"):
            return super().make_memory(policy, task, seed, device)
        dtype = self.settings.language_model.dtype
        dtype = "float32" if dtype == "float16" else dtype  # AdamW's squares of gradients underflow in float16
        memory = load_model(start.removeprefix("hf:"), dtype, device)[0]
        check_vocabulary(policy.vocab_size, memory.vocab_size)
        return memory

    # --- measures ---

    def prepare_measures(self) -> None:
        """Choose the prompts to evaluate; what the reference says of them is counted at the first evaluation."""
        most = self.settings.language_model.evaluation_prompts
        self.evaluated = {"train": list(self.task.train[:most]), "heldout": list(self.task.heldout[:most])}
        self.reference_counts: dict[str, Tensor] = {}  # split -> (Q, M): what the policy answered before it learned
        self.said: list[dict] = []  # one completion of each prompt, as of the last evaluation

    def measure(self) -> dict[str, dict[str, float | str]]:
        """split -> measure -> value: estimates with their intervals; `samples` says from how many completions each.

        An estimate of which nothing is known, such as the effective modes where nothing was right, is "".
        """
        self.said = []
        n = self.settings.language_model.evaluation_samples
        counts = {split: self.count_answers(prompts) for split, prompts in self.evaluated.items()}
        self.reference_counts = self.reference_counts or counts
        measured = {}
        for split, found in counts.items():
            rng = np.random.default_rng([self.seed, self.step])
            before = self.reference_counts[split].numpy()
            values = {}
            for name, (mean, low, high) in bootstrap_intervals(found.numpy(), n, rng, before).items():
                values |= {name: mean, f"{name}_low": low, f"{name}_high": high}
            values |= {"samples": float(n)} | self.listed_measures(self.evaluated[split])
            measured[split] = {name: "" if math.isnan(value) else value for name, value in values.items()}
        return measured

    def count_answers(self, prompts: list[str]) -> Tensor:
        """How many of `evaluation_samples` completions stated each correct answer of each prompt, (Q, M)."""
        n = self.settings.language_model.evaluation_samples
        modes = [self.task.modes(prompt) for prompt in prompts]
        counts = torch.zeros(len(prompts), max(map(len, modes)), dtype=torch.long)
        generator = torch.Generator(self.device).manual_seed(self.seed)  # of its own: measuring changes no run
        options = {"temperature": self.temperature, "stops": self.task.stops, "pad": self.task.pad}
        for rows in batched(list(range(len(prompts))), max(ROWS_AT_ONCE // n, 1)):
            asked = [prompts[q] for q in rows]
            padded = self.task.encode_prompts(asked).to(self.device)
            batch = rollout(self.policy, padded, n, self.task.max_new_tokens, generator, **options)
            lengths = batch.mask.sum(-1)  # (Q, G)
            for row, q in enumerate(rows):
                ids = zip(batch.completions[row].tolist(), lengths[row].tolist(), strict=True)
                texts = [self.task.decode(tokens[:length]) for tokens, length in ids]
                found = [self.task.mode_of(prompts[q], text) for text in texts]
                for mode in found:
                    if mode is not None:
                        counts[q, modes[q].index(mode)] += 1
                right = found[0] is not None
                self.said.append({"step": self.step, "prompt": prompts[q], "completion": texts[0], "right": right})
        return counts

    def listed_measures(self, prompts: list[str]) -> dict[str, float]:
        """pass@1 and effective modes of the bare answers, summed exactly: a lower bound on what is right."""
        if not isinstance(self.task, TextTask):
            return {}
        probs = [answer_probs(self.policy, self.task, prompt, self.temperature).numpy() for prompt in prompts]
        values = [(p.sum(), effective_modes(p)) for p in probs]
        return dict(zip(LISTED, np.mean(values, 0).tolist(), strict=True))

    # --- kept and taken up again ---

    def parts(self) -> dict:
        """All but the policy, whose weights are in files of their own."""
        return {name: part for name, part in super().parts().items() if name != "policy"}

    def contents(self) -> dict:
        """With what the reference was measured at, which nothing could count again."""
        return super().contents() | {"reference_counts": dict(self.reference_counts)}

    def take(self, contents: dict) -> None:
        """Become what `contents` says, but for the weights of the policy."""
        super().take(contents)
        for split, prompts in self.evaluated.items():
            if contents["reference_counts"][split].shape[0] != len(prompts):
                raise ValueError("its reference was measured on other prompts")
        self.reference_counts = contents["reference_counts"]

    def save(self, path: Path) -> None:
        """Write a checkpoint that at no moment names weights that are not there: they come first, the old go last."""
        self.save_completions(path)
        self.save_weights(path)
        super().save(path)
        self.forget_weights(path)

    def load(self, path: Path) -> None:
        """Go on where `save` stopped. Raises UserError for files that are damaged, or another run's, or do not fit."""
        super().load(path)
        with one_line(f"checkpoint {path} does not fit these settings"):
            load_model_weights(self.policy, weights_folder(path, self.step))
        self.saved_step = self.step

    def save_completions(self, path: Path) -> None:
        """To be read: one completion of each prompt of the last evaluation, completions-METHOD-seedN.jsonl."""
        if self.said:
            name = f"{path.stem.replace('checkpoint', 'completions', 1)}.jsonl"
            replace_file(path.with_name(name), "".join(json.dumps(said) + "\n" for said in self.said))

    def save_weights(self, path: Path) -> None:
        """A folder beside the checkpoint with the step in its name, which transformers loads; whole or not at all."""
        if self.step == self.saved_step:  # never without the weights that the checkpoint names, not for a moment
            return
        folder, partial = weights_folder(path, self.step), path.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        save_model(self.policy, partial)
        with one_line(f"cannot save to {str(partial)!r}"):
            self.task.tokenizer.save_pretrained(partial)
            (partial / "README.md").unlink(missing_ok=True)  # peft's form for a model card, with nothing filled in
            shutil.rmtree(folder, ignore_errors=True)
            partial.rename(folder)
        self.saved_step = self.step

    def forget_weights(self, path: Path) -> None:
        """Remove the weights of earlier steps, once the checkpoint names the new ones."""
        kept = weights_folder(path, self.step)
        for folder in path.parent.glob(f"{path.stem}-step*"):
            if folder != kept and re.fullmatch(r"\d+", folder.name.removeprefix(f"{path.stem}-step")):
                shutil.rmtree(folder, ignore_errors=True)


def weights_folder(checkpoint: Path, step: int) -> Path:
    """
    >>> weights_folder(Path("runs/a/checkpoint-grpo-seed0.pt"), 20).name
    'checkpoint-grpo-seed0-step20'
    """
    return checkpoint.with_name(f"{checkpoint.stem}-step{step}")


@torch.no_grad()
def answer_probs(policy: HFPolicy, task: TextTask, prompt: str, temperature: float = 1.0) -> Tensor:
    """Probability (M,) that the completion is the bare text of each listed answer, then the stop; float64.

    One pass over the prompt and its M answers. A lower bound on the answers' probability: see `answer_ids` of the task.
    """
    device = next(policy.parameters()).device
    answers = [task.answer_ids(mode) for mode in task.modes(prompt)]
    lengths = torch.tensor([len(ids) for ids in answers], device=device)  # (M,)
    T = int(lengths.max())
    completions = torch.tensor([[ids + [task.pad] * (T - len(ids)) for ids in answers]], device=device)  # (1, M, T)
    logits = policy.completion_logits(task.encode_prompts([prompt]).to(device), completions) / temperature
    logprobs = token_logprobs(logits, completions)[0].double()  # (M, T)
    return logprobs.where(torch.arange(T, device=device) < lengths[:, None], 0.0).sum(-1).exp().cpu()


# === From the settings to a run ===


def make_task(settings: Settings, tokenizer, stops: Sequence[int], vocab_size: int) -> Task:
    """The task as this tokenizer speaks it; for the tokenizer of an exported toy policy the toy task itself."""
    model, name = settings.language_model, settings.experiment.task
    options = {"vocab_size": vocab_size}
    if model.dataset:
        instruction = BOXED if model.instruction is None else model.instruction
        options |= {"heldout": model.heldout, "max_new_tokens": model.max_new_tokens or 256}
        return DatasetTask(read_dataset(model.dataset), tokenizer, stops, instruction=instruction, **options)
    toy = TASKS[name]()
    if toy.vocab_size == vocab_size and all(tokenizer.encode(prompt) == toy.encode(prompt) for prompt in toy.prompts):
        return toy
    return TextTask(toy, tokenizer, stops, model.max_new_tokens, model.instruction or "", **options)


class TextRuns:
    """How the command line makes runs of a language model; `ToyRuns` (lab/run.py) makes the toy policy's."""

    extras = ("transformers", "tokenizers", "safetensors", "peft", "math-verify")  # whose versions config.json names
    shares_processor = False  # one after the other, all threads for each

    def __init__(self, settings: Settings):
        self.settings, self.name = settings, settings.experiment.policy.removeprefix("hf:")

    def prepare(self, methods: list[Method], device: str) -> None:
        """Sets the task, its measures and, to be said, the size of a step; no weight is loaded.

        Reads every row of a dataset. Raises UserError for whatever is wrong with it, the tokenizer or the config.
        """
        tokenizer, config = load_tokenizer(self.name), read_model_config(self.name)
        with one_line(f"{self.name!r} is no causal language model"), torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
        vocab_size = model.get_output_embeddings().weight.shape[0]
        self.task = make_task(self.settings, tokenizer, stop_ids(model, tokenizer), vocab_size)
        if isinstance(self.task, LanguageTask):
            check_language_task(self.task, config, methods)
            self.measures = measure_names(self.task)
            self.description = describe(self.settings, methods, model, self.task, device)
        else:
            check_toy_flags(self.settings)
            self.measures = Run.measures
            how = "it is asked as the toy is, and measured exactly"
            self.description = f"the model is an exported toy policy: {how}"

    def make_reference(self) -> None:
        """Nothing: each run loads the model itself."""

    def start(self, method: Method, seed: int, device: str) -> Run:
        """Load the model and put it at the first step of a run. Raises UserError."""
        m = self.settings.language_model
        policy, tokenizer = load_model(self.name, m.dtype, device, m.lora_rank, m.gradient_checkpointing)
        task = make_task(self.settings, tokenizer, stop_ids(policy, tokenizer), policy.vocab_size)
        run = TextRun if isinstance(task, LanguageTask) else Run
        return run(self.settings, method, seed, policy, device, task=task)


def check_language_task(task: LanguageTask, config: transformers.PretrainedConfig, methods: Sequence[Method]) -> None:
    """Refuse texts longer than the model reads, and methods that sum over all answers. Raises UserError."""
    longest, limit = max(len(ids) for ids in task.prompt_ids.values()) + task.max_new_tokens, longest_text(config)
    if longest > limit:
        raise UserError(f"a prompt and its completion may take {longest} tokens, the model reads {limit}: shorten them")
    if any(not ESTIMATORS[method.estimator].samples for method in methods):
        raise UserError("--methods exact sums over all answers, which a language model's cannot be: leave it out")


def check_toy_flags(settings: Settings) -> None:
    """An exported toy policy is trained as the toy is: refuse what would have no effect. Raises UserError."""
    model, default = settings.language_model, LanguageModel()
    for name in ("instruction", "max_new_tokens", "evaluation_samples", "evaluation_prompts"):
        if getattr(model, name) != getattr(default, name):
            flag = name.replace("_", "-")
            raise UserError(
                f"--{flag} has no effect on an exported toy policy, which is measured exactly: leave it out"
            )
    if settings.calibration.memory_start.startswith("hf:"):
        raise UserError("an exported toy policy has the toy's memory network: give --memory-start fresh or reference")
