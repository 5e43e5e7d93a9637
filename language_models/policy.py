"""Causal language models of transformers as policies, read like the toy policy.

minirlvr.py asks a policy for `start`, `step` and `completion_logits`, toy_tasks.exact calls it: `HFPolicy` gives those
four, with the same logits as the toy policy for the same weights (see llama.py).

Axes as there: Q prompts, G completions of one prompt, N = Q * G, P prompt tokens (left padded), S tokens already in a
cache, T new tokens, V vocabulary; B rows of any kind.
"""

import contextlib
import inspect
from typing import NamedTuple

import torch
import transformers
from torch import Tensor, nn

from toy_tasks import Padded, UserError


@contextlib.contextmanager
def one_line(what: str):
    """Turn whatever goes wrong inside into a UserError of one line: `what`, then the first line of the reason.

    Every exception, because a damaged file can raise any of them inside transformers, tokenizers and safetensors.
    >>> with one_line("cannot read 'model'"):
    ...     raise KeyError("weights")
    Traceback (most recent call last):
    toy_tasks.task.UserError: cannot read 'model' (KeyError: 'weights')
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        reason = (str(error).strip().splitlines() or [""])[0]
        raise UserError(f"{what} ({type(error).__name__}: {reason[:200]})") from error


class HFCache(NamedTuple):
    """Keys and values of N rows. Reading on changes `layers` in place, so a cache can be continued only once."""

    layers: transformers.Cache
    real: Tensor  # (N, S) bool: text, not left padding


class HFPolicy(nn.Module):
    """A causal language model of transformers, asked like the toy policy. Works with LoRA adapters (peft) on it.

    The model is changed in one way: all its dropout is set to 0, so that tokens are scored by the distribution they
    were drawn from. Its own generation settings are never used. `gradient_checkpointing` saves memory when training and
    costs time, see `completion_logits`.
    Raises UserError for a model that cannot be read this way (recurrent ones, encoders, very old ones).

    >>> config = transformers.GPT2Config(vocab_size=14, n_embd=8, n_layer=1, n_head=2, n_positions=16)
    >>> policy = HFPolicy(transformers.GPT2LMHeadModel(config))
    >>> policy(Padded.of(torch.tensor([[3, 4, 13]]))).shape, policy.vocab_size
    (torch.Size([1, 3, 14]), 14)
    """

    def __init__(self, model: nn.Module, gradient_checkpointing: bool = False):
        super().__init__()
        check_readable(model)
        turn_off_dropout(model)
        self.model, self.gradient_checkpointing = model, gradient_checkpointing
        if gradient_checkpointing:
            with one_line(f"no gradient checkpointing for this {model.config.model_type} model; train it without"):
                # Not reentrant: that kind needs inputs with a gradient, which a model with a frozen base has not.
                model.activation_checkpointing_enable({"use_reentrant": False})

    @property
    def vocab_size(self) -> int:
        """Width of the logits (V). Often more than the tokenizer has tokens: rows are added to a round number."""
        return self.model.get_output_embeddings().weight.shape[0]

    @contextlib.contextmanager
    def _mode(self, training: bool):
        """Put the model in a mode and back. Without dropout that moves no logits; but transformers checkpoints
        gradients in training mode only, and then drops the key/value cache, which generation needs."""
        before = self.model.training
        if before != training:
            self.model.train(training)
        try:
            yield
        finally:
            if before != training:
                self.model.train(before)

    def _read(self, tokens: Tensor, real: Tensor, keep: int, cache: transformers.Cache | None, use_cache: bool):
        """tokens (B, T) after S cached ones, real (B, S+T) -> logits (B, keep, V) of the last tokens, the cache.

        A token's position is the number of real tokens before it, so that left padding shifts nothing.
        """
        position = (real.cumsum(1) - 1).clamp(min=0)[:, -tokens.shape[1] :]  # (B, T)
        self._check_length(real, position)
        output = self.model(
            input_ids=tokens, attention_mask=real.long(), position_ids=position, cache=cache, use_cache=use_cache,
            logits_to_keep=keep,
        )  # fmt: skip
        return output.logits, output.cache

    def _check_length(self, real: Tensor, position: Tensor) -> None:
        limit = getattr(self.model.config, "max_position_embeddings", None)
        if limit and real.shape[1] > limit and position.max() >= limit:  # padding may be wide, text may not
            raise UserError(f"a text of {int(position.max()) + 1} tokens; this model reads {limit}: shorten it")

    def forward(self, texts: Padded) -> Tensor:
        """Whole texts (B, T) -> logits (B, T, V). Differentiable."""
        tokens, real = never_empty(texts)
        return self._rows(tokens, real, keep=tokens.shape[1])

    def _rows(self, tokens: Tensor, real: Tensor, keep: int) -> Tensor:
        """Whole rows (B, T), no cache -> logits (B, keep, V)."""
        with self._mode(training=self.gradient_checkpointing):
            return self._read(tokens, real, keep, None, use_cache=False)[0]

    def start(self, prompts: Padded, group_size: int, length: int = 1) -> tuple[Tensor, HFCache]:
        """Read prompts (Q, P) once -> logits (Q, G, V) of the first token of G completions, and a cache.

        `length`, the most tokens of each to come, changes nothing here: every completion has a row of its own.
        """
        tokens, real = never_empty(prompts)
        with self._mode(training=False):
            logits, layers = self._read(tokens, real, 1, None, use_cache=True)  # (Q, 1, V)
        layers.batch_repeat_interleave(group_size)  # (Q, ...) -> (N, ...): the completions of a prompt side by side
        return logits.expand(-1, group_size, -1), HFCache(layers, real.repeat_interleave(group_size, 0))

    def step(self, tokens: Tensor, cache: HFCache) -> tuple[Tensor, HFCache]:
        """Read one more token (Q, G) of each completion -> logits (Q, G, V) of the next, and the longer cache.

        The cache that is handed in is used up.
        """
        logits, cache = self._extend(tokens.reshape(-1, 1), cache)  # (N, 1, V)
        return logits.view(*tokens.shape, -1), cache

    def _extend(self, tokens: Tensor, cache: HFCache) -> tuple[Tensor, HFCache]:
        """Read T more tokens (N, T) of each completion -> logits (N, T, V), and the longer cache."""
        real = torch.cat((cache.real, torch.ones_like(tokens, dtype=torch.bool)), 1)  # (N, S+T)
        with self._mode(training=False):
            logits, layers = self._read(tokens, real, tokens.shape[1], cache.layers, use_cache=True)
        return logits, HFCache(layers, real)

    def completion_logits(self, prompts: Padded, completions: Tensor) -> Tensor:
        """The logits (Q, G, T, V) that each token of completions (Q, G, T) was drawn from; prompts (Q, P).

        Each prompt is read once for its G completions, forward and backward: its keys and values carry the gradient.
        With gradient checkpointing, which cannot keep a cache, each of the N rows reads its prompt again.
        """
        if self.gradient_checkpointing:
            return self._completion_logits_by_row(prompts, completions)
        Q, G, T = completions.shape
        first, cache = self.start(prompts, G)  # (Q, G, V)
        if T == 1:
            return first[:, :, None]
        rest, _ = self._extend(completions[..., :-1].flatten(0, 1), cache)  # (N, T-1, V)
        return torch.cat((first[:, :, None], rest.view(Q, G, T - 1, -1)), 2)

    def _completion_logits_by_row(self, prompts: Padded, completions: Tensor) -> Tensor:
        Q, G, T = completions.shape
        read = Padded.of(completions[..., :-1].flatten(0, 1))  # (N, T-1)
        prompts = (part.repeat_interleave(G, 0) for part in never_empty(prompts))  # each (N, P)
        rows, real = (torch.cat(both, 1) for both in zip(prompts, read, strict=True))  # (N, P+T-1)
        return self._rows(rows, real, keep=T).view(Q, G, T, -1)

    def reference(self) -> "AdaptersOff":
        """The policy before training, without a second copy of it: this model with its LoRA adapters switched off.

        Raises UserError where there are none: then copy.deepcopy(policy) before training is the reference.
        """
        if not is_lora(self):
            raise UserError("this policy has no LoRA adapters to switch off; copy it before training instead")
        return AdaptersOff(self)


class AdaptersOff(nn.Module):
    """A policy's base model, read in the same four ways, without gradient. Shares every weight with the policy."""

    def __init__(self, policy: HFPolicy):
        super().__init__()
        self.policy = policy

    @torch.no_grad()
    def forward(self, texts: Padded) -> Tensor:
        """Whole texts (B, T) -> logits (B, T, V)."""
        with self.policy.model.disable_adapter():
            return self.policy(texts)

    @torch.no_grad()
    def start(self, prompts: Padded, group_size: int, length: int = 1) -> tuple[Tensor, HFCache]:
        """Prompts (Q, P) -> logits (Q, G, V) of the first token of G completions, and a cache."""
        with self.policy.model.disable_adapter():
            return self.policy.start(prompts, group_size, length)

    @torch.no_grad()
    def step(self, tokens: Tensor, cache: HFCache) -> tuple[Tensor, HFCache]:
        """One more token (Q, G) -> logits (Q, G, V) of the next, and the longer cache."""
        with self.policy.model.disable_adapter():
            return self.policy.step(tokens, cache)

    @torch.no_grad()
    def completion_logits(self, prompts: Padded, completions: Tensor) -> Tensor:
        """prompts (Q, P), completions (Q, G, T) -> logits (Q, G, T, V)."""
        with self.policy.model.disable_adapter():
            return self.policy.completion_logits(prompts, completions)


def never_empty(texts: Padded) -> Padded:
    """The same texts (B, T), but the last token of each counts in any case: an empty text has a next token too.

    >>> never_empty(Padded(torch.tensor([[0, 0]]), torch.tensor([[False, False]]))).real
    tensor([[False,  True]])
    """
    real = texts.real.clone()
    real[:, -1] = True
    return Padded(texts.tokens, real)


def is_lora(policy: HFPolicy) -> bool:
    """Are there adapters that alone are trained?"""
    return hasattr(policy.model, "peft_config")


def check_readable(model: nn.Module) -> None:
    """Refuse a model that positions, cache and padding cannot be handed to. Raises UserError."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    accepted = inspect.signature(base.forward).parameters
    missing = [name for name in ("position_ids", "cache", "logits_to_keep") if name not in accepted]
    if missing or base.config.is_encoder_decoder or getattr(base, "_is_stateful", False):
        why = f"does not take {', '.join(missing)}" if missing else "is recurrent or has an encoder"
        raise UserError(f"{type(base).__name__} {why}; take a decoder with attention, such as llama, qwen2 or gpt2")


def turn_off_dropout(model: nn.Module) -> None:
    """Set every dropout probability to 0: in modules, in what attention keeps as a number, and in the config."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        set_dropout_to_0(module)
    set_dropout_to_0(model.config.get_text_config())


def set_dropout_to_0(owner: object) -> None:
    """Set to 0 the plain numbers of `owner` that are named like a dropout (gpt2 says attn_pdrop, opt layerdrop)."""
    for name, value in list(vars(owner).items()):
        if type(value) in (int, float) and name.endswith(("dropout", "pdrop", "drop")):
            setattr(owner, name, 0.0)
