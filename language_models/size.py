"""How large a step of a language model will be, said before the first one; and how long a text it reads."""

import math
import time

import torch
import transformers
from torch import nn

from lab.settings import Method, Settings
from language_models.loading import DTYPES
from language_models.tasks import LanguageTask


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
