"""A run of a language model: minirlvr.py's loop, with measures estimated from samples and weights in safetensors.

Answers of a language model cannot be summed: the same answer has any number of wordings. So each evaluation draws
completions, counts the answers that they state and puts an interval around every estimate (columns `..._low` and
`..._high`). Beside them stand the *exact* probabilities of the listed answers' bare texts, for toy tasks.
"""

import copy
import json
import math
import re
import shutil
import time
import warnings
from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np
import torch
import transformers
from torch import Tensor, nn

from huggingface import (
    DTYPES,
    HFPolicy,
    check_vocabulary,
    is_lora,
    load_model,
    load_tokenizer,
    load_weights,
    one_line,
    read_config,
    save_model,
    stop_ids,
)
from minirlvr import ESTIMATORS, LanguageModel, Method, Run, Settings, UserError, rollout, token_logprobs
from report import replace_file
from text_tasks import BOXED, DatasetTask, LanguageTask, TextTask, read_dataset
from toy_tasks import TASKS, Task
from toy_tasks.exact import MEASURES, batched, encode_prompts
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
    """All that changes while a language model trains. What is not here is the toy policy's."""

    def __init__(
        self, settings: Settings, method: Method, seed: int, policy: HFPolicy, device: str, task: LanguageTask
    ):
        self.measures = measure_names(task)
        self.saved_step = -1  # the step whose weights this process wrote or read last
        super().__init__(settings, method, seed, policy, device, task)

    def make_policies(self, policy: HFPolicy) -> tuple[HFPolicy, nn.Module | None]:
        """The policy itself, and a reference only where one is asked: its base without adapters, or a copy."""
        policy.pad = self.task.pad
        if is_lora(policy):
            return policy, policy.reference()
        asked = self.update.beta or self.method.regime != "task"
        return policy, copy.deepcopy(policy).requires_grad_(False) if asked else None

    def make_memory(self) -> nn.Module:
        start = self.settings.calibration.memory_start
        if start == "fresh":
            memory = super().make_memory()
        elif start == "reference":
            memory = copy.deepcopy(self.policy)
        else:
            dtype = self.settings.language_model.dtype
            dtype = "float32" if dtype == "float16" else dtype  # AdamW's squares of gradients underflow in float16
            memory = load_model(start.removeprefix("hf:"), dtype, str(self.device))[0]
            check_vocabulary(self.policy.vocab_size, memory.vocab_size)
        memory.pad = self.task.pad
        return memory

    def prepare_measures(self) -> None:
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
            tokens = encode_prompts(self.task, asked).to(self.device)
            batch = rollout(self.policy, tokens, n, self.task.max_new_tokens, generator, **options)
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

    def parts(self) -> dict:
        """All but the policy, whose weights are in files of their own."""
        return {name: part for name, part in super().parts().items() if name != "policy"}

    def state(self) -> dict:
        return super().state() | {"reference_counts": dict(self.reference_counts)}

    def restore(self, state: dict) -> None:
        super().restore(state)
        for split, prompts in self.evaluated.items():
            if state["reference_counts"][split].shape[0] != len(prompts):
                raise ValueError("its reference was measured on other prompts")
        self.reference_counts = state["reference_counts"]

    def save_weights(self, checkpoint: Path) -> None:
        """A folder beside the checkpoint with the step in its name, which transformers loads; whole or not at all.

        And, to be read, one completion of each prompt of the last evaluation: completions-METHOD-seedN.jsonl.
        """
        if self.said:
            path = checkpoint.with_name(f"{checkpoint.stem.replace('checkpoint', 'completions', 1)}.jsonl")
            replace_file(path, "".join(json.dumps(said) + "\n" for said in self.said))
        if self.step == self.saved_step:  # never without the weights that the checkpoint names, not for a moment
            return
        folder, partial = weights_folder(checkpoint, self.step), checkpoint.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        save_model(self.policy, partial)
        with one_line(f"cannot save to {str(partial)!r}"):
            self.task.tokenizer.save_pretrained(partial)
            (partial / "README.md").unlink(missing_ok=True)  # peft's form for a model card, with nothing filled in
            shutil.rmtree(folder, ignore_errors=True)
            partial.rename(folder)
        self.saved_step = self.step

    def forget_weights(self, checkpoint: Path) -> None:
        """Remove the weights of earlier steps, once the checkpoint names the new ones."""
        kept = weights_folder(checkpoint, self.step)
        for folder in checkpoint.parent.glob(f"{checkpoint.stem}-step*"):
            if folder != kept and re.fullmatch(r"\d+", folder.name.removeprefix(f"{checkpoint.stem}-step")):
                shutil.rmtree(folder, ignore_errors=True)

    def load_weights(self, checkpoint: Path) -> None:
        load_weights(self.policy, weights_folder(checkpoint, self.step))
        self.saved_step = self.step


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
    logits = policy.completion_logits(encode_prompts(task, [prompt]).to(device), completions) / temperature
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


def start_run(settings: Settings, method: Method, seed: int, device: str) -> Run:
    """Load the model and put it at the first step of a run. Raises UserError."""
    name, model = settings.experiment.policy.removeprefix("hf:"), settings.language_model
    policy, tokenizer = load_model(name, model.dtype, device, model.lora_rank, model.gradient_checkpointing)
    task = make_task(settings, tokenizer, stop_ids(policy, tokenizer), policy.vocab_size)
    run = TextRun if isinstance(task, LanguageTask) else Run
    return run(settings, method, seed, policy, device, task=task)


def prepare(settings: Settings, methods: list[Method], device: str) -> tuple[Task, Collection[str], str]:
    """What the command line asks before any weight is loaded: the task, its measures, and the size of a step.

    Reads every row of a dataset. Raises UserError for whatever is wrong with it, the tokenizer or the config.
    """
    name = settings.experiment.policy.removeprefix("hf:")
    tokenizer = load_tokenizer(name)
    config = read_config(name)
    with one_line(f"{name!r} is no causal language model"), torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    task = make_task(settings, tokenizer, stop_ids(model, tokenizer), model.get_output_embeddings().weight.shape[0])
    if not isinstance(task, LanguageTask):
        check_toy_flags(settings)
        return task, MEASURES, "the model is an exported toy policy: it is asked as the toy is, and measured exactly"
    longest, limit = max(len(ids) for ids in task.prompt_ids.values()) + task.max_new_tokens, longest_text(config)
    if longest > limit:
        raise UserError(f"a prompt and its completion may take {longest} tokens, the model reads {limit}: shorten them")
    if any(not ESTIMATORS[method.estimator].samples for method in methods):
        raise UserError("--methods exact sums over all answers, which a language model's cannot be: leave it out")
    return task, measure_names(task), describe(settings, methods, model, task, device)


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


def longest_text(config: transformers.PretrainedConfig) -> float:
    """Tokens that a model reads with positions that do not depend on how many follow; infinite where nothing is said.

    Some models stretch their positions once a text is longer than those they were first trained on: what lies in the
    cache then has other positions than the same text read at once, and ratios would be wrong.
    """
    text = config.get_text_config()
    limit = getattr(text, "max_position_embeddings", None) or math.inf
    rope = getattr(text, "rope_parameters", None) or {}
    if rope.get("rope_type") in ("longrope", "dynamic"):
        before = rope.get("original_max_position_embeddings") or getattr(text, "original_max_position_embeddings", None)
        return min(limit, before or limit)
    return limit


def describe(settings: Settings, methods: list[Method], model: nn.Module, task: LanguageTask, device: str) -> str:
    """Parameters, bytes, tokens and seconds of a step, before the first one. `model` may lie on the meta device."""
    m, Q, G = settings.language_model, min(settings.sampling.prompts, len(task.train)), settings.sampling.group_size
    total = sum(parameter.numel() for parameter in model.parameters())
    trained = lora_parameters(model, m.lora_rank) if m.lora_rank else total
    size = torch.empty(0, dtype=DTYPES[m.dtype]).element_size()
    copies = 1 + (not m.lora_rank and (settings.update.beta > 0 or any(x.regime != "task" for x in methods)))
    held = total * size * copies + trained * 3 * (4 if m.lora_rank else size)  # weights, gradient and AdamW's moments
    T, P = task.max_new_tokens, max(len(ids) for ids in task.prompt_ids.values())
    part = -(-Q // settings.update.micro_batches) * G
    logits = part * T * task.vocab_size * (2 * size + 2 * 4)  # with their gradients, log-softmax in float32
    drawn, read = Q * G * T, Q * P
    seconds = total * (2 + 2 + 4) * (drawn + read) / matrix_rate()  # once drawn, once read, twice that backward
    asked = min(m.evaluation_prompts, len(task.train)) + min(m.evaluation_prompts, len(task.heldout))
    evaluation = total * 2 * asked * (P + m.evaluation_samples * T) / matrix_rate()
    lines = [
        f"{type(model).__name__}: {total:,} parameters, {trained:,} of them trained, in {m.dtype}",
        f"memory: {held / 1e6:,.0f} MB for weights, gradients and AdamW, about {logits / 1e6:,.0f} MB for logits",
        f"a step: {Q} prompts of up to {P} tokens, {G} completions of up to {T} tokens each: {drawn:,} tokens drawn",
        f"time: at least {seconds:.2g} s a step and {evaluation:.2g} s an evaluation: the arithmetic alone, at this "
        "processor's measured rate"
        if device == "cpu"
        else "",
        f"measures are estimates from {m.evaluation_samples} completions of each prompt; columns _low and _high: 95 %",
    ]
    return "\n".join(line for line in lines if line)


def lora_parameters(model: nn.Module, rank: int) -> int:
    """Weights of adapters of that rank on every linear layer but the head."""
    head = model.get_output_embeddings()
    layers = (layer for layer in model.modules() if isinstance(layer, nn.Linear) and layer is not head)
    return sum(rank * (layer.in_features + layer.out_features) for layer in layers)


def matrix_rate(size: int = 512, repeats: int = 10) -> float:
    """float32 operations a second of this processor's matrix product, the best of a few tries."""
    a, best = torch.ones(size, size), math.inf
    for _ in range(repeats):
        began = time.perf_counter()
        a @ a
        best = min(best, time.perf_counter() - began)
    return 2 * size**3 / best
