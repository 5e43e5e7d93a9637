"""Reinforcement learning with verifiable rewards, measured exactly: one file, read from top to bottom.

GRPO makes a policy right more often and, often, right in only one way. On tasks whose correct answers (modes) can be
listed, that loss is a sum, not an estimate; two calibrations, IAC on the advantages and DLC on the sampling, act on it.

    python minirlvr.py                         the headline comparison, in under a minute
    python minirlvr.py --help                  every setting
    python minirlvr.py --resume runs/NAME      go on after Ctrl-C

Sources: P1 is arXiv 2601.15609 (over-sharpening, IAC, DLC), P2 is arXiv 2604.16259 (sharpening against task reward).

One letter per axis, everywhere: Q prompts of a batch, G completions of one prompt, N = Q * G, P prompt tokens (left
padded), S tokens already in a cache, T new tokens, V vocabulary, M listed modes of a prompt, D width, H heads.
"""

import copy
import dataclasses
import math
import random
import sys
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from toy_tasks import PAD, STOP, TASKS, Task
from toy_tasks.exact import MEASURES, Listing, Tree, encode_prompts, finite_batch_optimum, mode_measures
from toy_tasks.measures import pass_at_k

__version__ = "0.1"
__all__ = ["finite_batch_optimum", "pass_at_k"]  # part of the public names, made in toy_tasks


class UserError(ValueError):
    """A mistake of the user's: printed as one line, exit code 2."""


# === Settings. Whatever ran is in config.json; nothing is set anywhere else. ===


@dataclass(frozen=True)
class Experiment:
    """What is compared. One run is one method and one seed."""

    task: str = "sums"  # Toy world: sums, countdown or scratchpad.
    # grpo, dr_grpo, dapo, rloo, reinforce++, f_grpo, unlikeliness, or P2's sharpen, temper, tilt (those with RLOO;
    # grpo@tilt and the like with another), each with +iac, +dlc or +iac+dlc behind it; and exact, the infinite batch.
    methods: tuple[str, ...] = ("grpo", "grpo+iac", "grpo+dlc", "grpo+iac+dlc")
    seeds: int = 3  # Runs per method; intervals are over these.
    first_seed: int = 0  # The seeds are first_seed, first_seed + 1, ...
    # Batches sampled in a run; equal steps are equal numbers of sampled completions, for every method.
    steps: int = 120
    evaluate_every: int = (
        10  # Steps between two evaluations, each a row of metrics.csv for each split, and a checkpoint.
    )
    # toy: the small transformer of this file; or hf:FOLDER_OR_ID, a Hugging Face model, asked in plain language.
    policy: str = "toy"
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"  # auto takes CUDA where there is one, else the processor.
    # Processes side by side, which share the cores; 0 means one per core for the toy policy, and one in all on a GPU or
    # for a language model. The numbers do not change.
    jobs: int = 0
    # torch.compile the toy policy: fewer, larger kernels, for long runs and GPUs; costs a minute at the start of each.
    compile: bool = False


@dataclass(frozen=True)
class Files:
    """Where results go."""

    out: str = ""  # New folder for the results; runs/TASK-DATE-TIME if not given.
    resume: str = ""  # Folder of a stopped run to go on with; only --steps, --jobs and --device may differ from it.


@dataclass(frozen=True)
class Sampling:
    """The batch of one step."""

    prompts: int = 16  # Prompts a step (Q); all training prompts if there are fewer.
    group_size: int = 8  # Completions per prompt (G).
    fixed_length: bool = False  # Sample on after the stop token, to the longest length: P2's control for length.
    temperature: float = 1.0  # Divides the logits when sampling, when scoring and when evaluating.


@dataclass(frozen=True)
class Update:
    """The policy's gradient step."""

    learning_rate: float = 3e-4  # AdamW's step size, constant, no weight decay.
    max_grad_norm: float = 1.0  # The gradient is scaled down to this norm.
    epochs: int = 1  # Optimiser steps on one batch; from the second on the ratio differs from 1 and clipping binds.
    micro_batches: int = 1  # Parts that a batch is pushed through in, to save memory; the gradient is the same.
    # Mean over each completion's tokens, over all tokens, or a sum over a constant; estimator: as its paper has it.
    aggregate: Literal["estimator", "sequence", "token", "constant"] = "estimator"
    # Ratios below 1 - clip_low stop pulling; as the estimator's paper has it if not given.
    clip_low: float | None = None
    # Ratios above 1 + clip_high stop pulling; as the estimator's paper has it if not given.
    clip_high: float | None = None
    # Importance ratio of each token, or the geometric mean over the completion (GSPO).
    ratio: Literal["token", "sequence"] = "token"
    # Weight of the KL divergence to the reference; above 0 flat groups move the policy too, towards the reference.
    beta: float = 0.0
    # Estimator of that divergence; k1 only works in the reward, since its expected gradient as a loss is 0.
    kl_kind: Literal["k1", "k2", "k3"] = "k3"
    kl_in: Literal["loss", "reward"] = "loss"  # Where the KL term enters.
    entropy_bonus: float = 0.0  # Weight of the policy's entropy per token in the objective.
    f_grpo_gamma: float = 1.0  # f_grpo multiplies all advantages by (1 - |S+|/G)^gamma.
    exact_std: bool = True  # exact divides each prompt's gradient by its reward's standard deviation, as GRPO does.
    unlikeliness_beta: float = 0.25  # unlikeliness takes up to this share off the reward of likely completions.


@dataclass(frozen=True)
class Calibration:
    """IAC and DLC. What the paper leaves open is an option here, and its default is our choice."""

    alpha: float = 1.0  # IAC multiplies positive advantages by (G - |S+|)^alpha.
    iac_divide: bool = False  # IAC multiplies by ((G - |S+|) / G)^alpha instead.
    mu: float = 0.5  # DLC samples from softmax(policy logits - mu * memory logits).
    memory_data: Literal["correct", "all"] = "correct"  # Completions that the memory network learns.
    # fresh: a new small network; reference: a copy of the reference policy; with --policy hf: also hf:FOLDER_OR_ID, a
    # model with the same vocabulary.
    memory_start: str = "fresh"
    memory_layers: int = 1  # Layers of a fresh memory network.
    memory_width: int = 32  # Width of a fresh memory network.
    memory_learning_rate: float = 3e-3  # AdamW's step size for the memory network.
    # With DLC the sampler is not the policy. none: take no notice (the paper's ordinary update); exact: weight each
    # completion by policy / sampler; clipped: the clipped ratio is policy / sampler, token by token.
    importance: Literal["none", "exact", "clipped"] = "none"


@dataclass(frozen=True)
class Sharpening:
    """P2's rewards, for methods that name one: sharpen, temper, tilt (with RLOO), or ESTIMATOR@REGIME."""

    sharpen_alpha: float = 2.0  # Weight of the reference's log-probability; the optimum of temper is reference^alpha.
    beta_inverse: float = 10.0  # tilt's optimum is reference^alpha * exp(beta_inverse * reward).
    # How that log-probability counts: summed, per token, or per token^length_power.
    normalize: Literal["sum", "mean", "weighted"] = "sum"
    length_power: float = 0.5  # The power of the length that `--normalize weighted` divides by.


@dataclass(frozen=True)
class Shape:
    """Size of the toy policy."""

    layers: int = 2  # Transformer blocks.
    width: int = 64  # Size of the residual stream (D).
    heads: int = 4  # Attention heads (H), in the policy and in a fresh memory network.


@dataclass(frozen=True)
class LanguageModel:
    """Only with --policy hf:FOLDER_OR_ID, whose own defaults `--policy hf:... --help` lists."""

    dataset: str = ""  # Your own questions instead of --task: a .jsonl file, `prompt` and `answer` in each row.
    heldout: int | None = None  # Rows at its end that are never trained; a quarter, at most 64, if not given.
    # Written under every prompt; if not given, nothing for a toy task, and for --dataset to put the answer in a box.
    instruction: str | None = None
    # Completions are cut here (T); if not given, a little above the longest answer, or 256 for --dataset.
    max_new_tokens: int | None = None
    evaluation_samples: int = 32  # Completions per prompt that each evaluation's estimates come from.
    evaluation_prompts: int = 64  # At most so many prompts of each split are evaluated, the first ones.
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"  # Of the weights; adapters are always float32.
    lora_rank: int = 0  # Train adapters of this rank and freeze the model; 0 trains all weights.
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


# === Policy: a small Llama (RMSNorm, rotary positions, SwiGLU, no biases). ===


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions: turn each pair of a head's numbers by its angle. x (..., T, D/H); cos, sin (..., T, D/H/2)."""
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


class Block(nn.Module):
    """Attention, then a gated MLP, each added to the residual stream."""

    def __init__(self, width: int, heads: int, hidden: int):
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.RMSNorm(width, eps=1e-5)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.RMSNorm(width, eps=1e-5)
        self.gate_up = nn.Linear(width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, allowed: Tensor, past: tuple[Tensor, Tensor] | None):
        """x (Q, T, D) -> the same shape, and this layer's keys and values (Q, H, S+T, D/H), `past` included."""
        Q, T, D = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(Q, T, 3, self.heads, D // self.heads).permute(2, 0, 3, 1, 4)
        qk, v = qkv.split((2, 1))  # split: its backward pass writes one tensor, that of two slices fills two with zeros
        (q, k), v = rotate(qk, cos, sin).unbind(), v.squeeze(0)  # each (Q, H, T, D/H)
        if past is not None:
            k, v = torch.cat((past[0], k), 2), torch.cat((past[1], v), 2)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)  # (Q, H, T, D/H)
        x = x + self.attention_out(mixed.transpose(1, 2).reshape(Q, T, D))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up), (k, v)


class Cache(NamedTuple):
    """Keys and values of what was read. A prompt is the trunk of a tree, its G completions are the branches."""

    layers: list[tuple[Tensor, Tensor]]  # per layer, each (Q, H, S, D/H)
    real: Tensor  # (Q, S) bool: text, not left padding
    branch: Tensor  # (S,) int: TRUNK, or the completion that the token belongs to


TRUNK = -1


class Policy(nn.Module):
    """A decoder-only transformer; about 100k parameters at the default size.

    The loop asks a policy for three things: `start`, `step` and `completion_logits`.
    >>> policy = Policy(vocab_size=14, generator=torch.Generator().manual_seed(0))
    >>> policy(torch.tensor([[3, 4, 13]])).shape
    torch.Size([1, 3, 14])
    """

    def __init__(self, vocab_size: int, generator: torch.Generator, layers: int = 2, width: int = 64, heads: int = 4):
        super().__init__()
        self.pad = PAD
        self.embedding = nn.Embedding(vocab_size, width)
        self.blocks = nn.ModuleList(Block(width, heads, hidden=width * 11 // 4) for _ in range(layers))
        self.norm = nn.RMSNorm(width, eps=1e-5)
        self.head = nn.Linear(width, vocab_size, bias=False)
        frequencies = 10000.0 ** -(torch.arange(0, width // heads, 2) / (width // heads))  # (D/H/2,)
        self.register_buffer("frequencies", frequencies, persistent=False)
        with torch.no_grad():
            for weight in (p for p in self.parameters() if p.ndim == 2):
                weight.normal_(0, weight.shape[1] ** -0.5, generator=generator)

    def extend(
        self, tokens: Tensor, branch: Tensor, real: Tensor | None = None, cache: Cache | None = None
    ) -> tuple[Tensor, Cache]:
        """Read more tokens. tokens (Q, T), branch (T,), real (Q, T) -> logits (Q, T, V), a cache of S+T tokens.

        A token sees itself and what is real and earlier, on the trunk or on its own branch. Its position is the number
        of tokens it sees before it, so neither left padding nor the neighbours change a text's logits.
        """
        real = torch.ones_like(tokens, dtype=torch.bool) if real is None else real
        if cache is not None:
            real, branch = torch.cat((cache.real, real), 1), torch.cat((cache.branch, branch))
        T, offset = tokens.shape[1], real.shape[1] - tokens.shape[1]
        own = branch[offset:, None]  # (T, 1)
        order = torch.ones(T, offset + T, dtype=torch.bool, device=tokens.device)
        earlier = order.tril(offset - 1) & ((branch == TRUNK) | (branch == own))  # (T, S+T)
        itself = order.tril(offset).triu(offset)  # (T, S+T)
        allowed = (earlier & real[:, None]) | itself  # (Q, T, S+T)
        position = allowed.sum(-1) - 1  # (Q, T)
        angles = position[:, None, :, None] * self.frequencies  # (Q, 1, T, D/H/2)
        cos, sin = angles.cos(), angles.sin()
        x, layers = self.embedding(tokens), []  # (Q, T, D)
        for i, block in enumerate(self.blocks):
            x, keys_values = block(x, cos, sin, allowed[:, None], None if cache is None else cache.layers[i])
            layers.append(keys_values)
        return self.head(self.norm(x)), Cache(layers, real, branch)

    def forward(self, tokens: Tensor) -> Tensor:
        """Left-padded texts (Q, T) -> logits (Q, T, V)."""
        return self.extend(tokens, torch.full_like(tokens[0], TRUNK), real=text_mask(tokens, self.pad))[0]

    def start(self, prompts: Tensor, group_size: int) -> tuple[Tensor, Cache]:
        """Read left-padded prompts (Q, P) once -> logits (Q, G, V) of the first token of G completions, and a cache."""
        logits, cache = self.extend(prompts, torch.full_like(prompts[0], TRUNK), real=text_mask(prompts, self.pad))
        return logits[:, -1:].expand(-1, group_size, -1), cache

    def step(self, tokens: Tensor, cache: Cache) -> tuple[Tensor, Cache]:
        """Read one more token (Q, G) of each completion -> logits (Q, G, V) of the next, and the longer cache."""
        return self.extend(tokens, torch.arange(tokens.shape[1], device=tokens.device), cache=cache)

    def completion_logits(self, prompts: Tensor, completions: Tensor) -> Tensor:
        """The logits (Q, G, T, V) that each token of completions (Q, G, T) was drawn from; prompts (Q, P).

        One pass reads each prompt once for its G completions, forward and backward. Differentiable.
        """
        Q, G, T = completions.shape
        read = completions[..., :-1].transpose(1, 2).reshape(Q, (T - 1) * G)  # token by token, branches side by side
        trunk = torch.full_like(prompts[0], TRUNK)
        branch = torch.cat((trunk, torch.arange(G, device=trunk.device).repeat(T - 1)))
        real = torch.cat((text_mask(prompts, self.pad), torch.ones_like(read, dtype=torch.bool)), 1)
        logits, _ = self.extend(torch.cat((prompts, read), 1), branch, real)  # (Q, P + (T-1) G, V)
        prompt_end = prompts.shape[1]
        first = logits[:, prompt_end - 1, None, None].expand(-1, G, -1, -1)  # (Q, G, 1, V)
        return torch.cat((first, logits[:, prompt_end:].view(Q, T - 1, G, logits.shape[-1]).transpose(1, 2)), 2)


def text_mask(tokens: Tensor, pad: int = PAD) -> Tensor:
    """(Q, T) bool: False on the padding before the first real token, True from there on, whatever comes.
    >>> text_mask(torch.tensor([[0, 0, 5, 0, 7]]))
    tensor([[False, False,  True,  True,  True]])
    """
    return (tokens != pad).cumsum(1) > 0


# === Rollout: each prompt is read once, then its G completions are drawn token by token. ===


class Rollout(NamedTuple):
    """A batch of sampled completions. Every tensor has the prompt axis Q first, so groups can be picked and joined."""

    prompts: Tensor  # (Q, P) left-padded
    completions: Tensor  # (Q, G, T) padded after the stop
    mask: Tensor  # (Q, G, T) bool: tokens up to and including the first stop
    logprobs: Tensor  # (Q, G, T) of the policy that sampled, at the sampling temperature; 0 outside the mask
    sampler_logprobs: Tensor  # (Q, G, T) of the distribution the tokens were drawn from; equal unless DLC bends it
    entropies: Tensor  # (Q, G, T) of the policy that sampled, in nats; 0 outside the mask

    def pick(self, rows) -> "Rollout":
        """The groups `rows` (a slice, indices or a (Q,) bool)."""
        return Rollout(*(tensor[rows] for tensor in self))

    @property
    def length(self) -> int:
        """Tokens of the longest completion. What lies behind is padding for all, and is not computed."""
        return int(self.mask.any(0).any(0).sum())


def rollout(
    policy: Policy, prompts: Tensor, group_size: int, max_new_tokens: int, generator: torch.Generator,
    temperature: float = 1.0, memory: Policy | None = None, mu: float = 0.0, fixed_length: bool = False,
    stops: tuple[int, ...] = (STOP,), pad: int = PAD
) -> Rollout:  # fmt: skip
    """Draw G completions for each of the prompts (Q, P), from softmax((policy - mu * memory) / temperature).

    A completion ends with the first of the token ids `stops` (with `fixed_length` at T alone); behind it is `pad`.
    >>> g = torch.Generator().manual_seed(0)
    >>> batch = rollout(Policy(14, g), torch.tensor([[3, 4, 13]]), group_size=2, max_new_tokens=5, generator=g)
    >>> batch.completions.shape, bool((batch.logprobs <= 0).all())
    (torch.Size([1, 2, 5]), True)
    """
    with torch.inference_mode():  # a tenth faster than no_grad; its tensors cannot be trained on, hence the copies
        shape = (len(prompts), group_size, max_new_tokens)
        completions = torch.full(shape, pad, device=prompts.device)
        mask = torch.zeros(shape, dtype=torch.bool, device=prompts.device)
        logprobs, sampler_logprobs, entropies = torch.zeros(3, *shape, device=prompts.device)
        going = torch.ones(shape[:2], dtype=torch.bool, device=prompts.device)
        stop_ids = torch.tensor(stops, device=prompts.device)
        logits, cache = policy.start(prompts, group_size)  # (Q, G, V)
        memory_logits, memory_cache = memory.start(prompts, group_size) if memory else (None, None)
        for t in range(max_new_tokens):
            own = (logits.float() / temperature).log_softmax(-1)  # float32 whatever the weights are
            bent = calibrated_logits(logits, memory_logits, mu).float() if memory else None
            drawn_from = own if bent is None else (bent / temperature).log_softmax(-1)
            if not drawn_from.isfinite().all():
                cure = "take a smaller --learning-rate or --mu (at the first step: the model's own weights are broken)"
                raise UserError(f"the logits to sample from are not finite; {cure}")
            token = torch.multinomial(drawn_from.exp().flatten(0, 1), 1, generator=generator).view(shape[:2])
            mask[..., t] = going
            completions[..., t] = torch.where(going, token, pad)
            logprobs[..., t] = own.gather(-1, token[..., None])[..., 0] * going
            sampler_logprobs[..., t] = drawn_from.gather(-1, token[..., None])[..., 0] * going
            entropies[..., t] = entropy(own) * going
            if not fixed_length:
                going = going & ~torch.isin(token, stop_ids)
            if t + 1 == max_new_tokens or not going.any():
                break
            logits, cache = policy.step(token, cache)
            if memory:
                memory_logits, memory_cache = memory.step(token, memory_cache)
    drawn = completions, mask, logprobs, sampler_logprobs, entropies
    return Rollout(prompts, *(tensor.clone() for tensor in drawn))


def token_logprobs(logits: Tensor, tokens: Tensor) -> Tensor:
    """log-probability of each token under its logits, in float32. logits (..., V), tokens (...) -> (...).
    >>> token_logprobs(torch.tensor([0.0, 0.0]), torch.tensor(1))
    tensor(-0.6931)
    """
    return logits.float().log_softmax(-1).gather(-1, tokens[..., None]).squeeze(-1)


def verify(task: Task, prompts: list[str], batch: Rollout) -> Tensor:
    """Rewards (Q, G) of a batch: what the verifier of the task says of each completion."""
    groups = zip(prompts, batch.completions.tolist(), batch.mask.sum(-1).tolist(), strict=True)
    rewards = torch.tensor(
        [
            [float(task.verify(prompt, task.decode(ids[:length]))) for ids, length in zip(group, lengths, strict=True)]
            for prompt, group, lengths in groups
        ]
    )
    check_rewards(rewards, prompts)
    return rewards.to(batch.prompts.device)


def check_rewards(rewards: Tensor, prompts: list[str]) -> None:
    """Refuse rewards (Q, G) that are NaN or infinite, before they reach a mean; names the prompt.
    >>> check_rewards(torch.tensor([[1.0, float("nan")]]), ["12="])
    Traceback (most recent call last):
    ValueError: prompt '12=' has the rewards [1.0, nan]; a reward must be a finite number
    """
    for prompt, row in zip(prompts, rewards, strict=True):
        if not row.isfinite().all():
            raise ValueError(f"prompt {prompt!r} has the rewards {row.tolist()}; a reward must be a finite number")


REGIMES = ("task", "sharpen", "temper", "tilt")


def sharpening_reward(
    regime: str, rewards: Tensor, logprobs: Tensor, reference_logprobs: Tensor, lengths: Tensor,
    alpha: float = 1.0, beta_inverse: float = 0.0, normalize: str = "sum", length_power: float = 0.5
) -> Tensor:  # fmt: skip
    """P2's reward of each completion, (Q, G): what climbing it on average ends in.

    task: r. sharpen: alpha l_ref, the most likely completion. temper: (alpha - 1) l_ref + l_ref - l, reference^alpha.
    tilt: r + temper / beta_inverse, reference^alpha exp(beta_inverse r). l_ref and l are *summed* log-probabilities
    (Q, G) under the reference and the policy; only the first term's l_ref is divided by the length ("mean") or by
    length^length_power ("weighted"). Raises ValueError for an unknown regime or, with tilt, beta_inverse <= 0.
    >>> r, l = torch.tensor([[1.0, 0.0]]), torch.tensor([[-4.0, -2.0]])
    >>> sharpening_reward("tilt", r, l, l, torch.tensor([[4, 2]]), alpha=2.0, beta_inverse=2.0)
    tensor([[-1., -1.]])
    """
    if regime == "task":
        return rewards.float()
    if regime not in REGIMES:
        raise ValueError(f"unknown regime {regime!r}; choose one of {', '.join(REGIMES)}")
    powers = {"sum": 0.0, "mean": 1.0, "weighted": length_power}
    if normalize not in powers:
        raise ValueError(f"unknown normalize {normalize!r}; choose one of {', '.join(powers)}")
    likelihood = reference_logprobs / lengths.clamp(min=1) ** powers[normalize]
    if regime == "sharpen":
        return alpha * likelihood
    temper = (alpha - 1) * likelihood + reference_logprobs - logprobs.detach()
    if regime == "temper":
        return temper
    if not beta_inverse > 0:
        raise ValueError(f"beta_inverse is {beta_inverse}: tilt divides by it, so it must be above 0")
    return rewards + temper / beta_inverse


# === Advantages: rewards (Q, G) -> advantages (Q, G). A group with one reward for all has advantage 0. ===


def grpo_advantages(rewards: Tensor, normalize_std: bool = True) -> Tensor:
    """GRPO: (r - mean) / std over the group (population std). Dr.GRPO (2503.20783): r - mean, normalize_std=False.
    >>> grpo_advantages(torch.tensor([[1.0, 0, 0, 0]]))
    tensor([[ 1.7320, -0.5773, -0.5773, -0.5773]])
    """
    rewards = rewards.float()
    centred = rewards - rewards.mean(-1, keepdim=True)
    centred = centred * (rewards != rewards[..., :1]).any(-1, keepdim=True)  # rounding in the mean is no signal
    if not normalize_std:
        return centred
    return centred / (rewards.std(-1, correction=0, keepdim=True) + 1e-6)


def rloo_advantages(rewards: Tensor) -> Tensor:
    """RLOO (2402.14740): r_i minus the mean of the others of its group. Raises ValueError for G < 2.
    >>> rloo_advantages(torch.tensor([[1.0, 0, 0, 0]]))
    tensor([[ 1.0000, -0.3333, -0.3333, -0.3333]])
    """
    G = rewards.shape[-1]
    if G < 2:
        raise ValueError(f"a group of {G} has no others to compare with; RLOO needs at least 2 completions")
    return grpo_advantages(rewards, normalize_std=False) * (G / (G - 1))


def reinforce_pp_advantages(rewards: Tensor) -> Tensor:
    """REINFORCE++ (2501.03262): whitened over the whole batch, no group. Its KL term is --kl-in reward, summed over a
    completion's tokens (the paper takes it from each token on).
    >>> reinforce_pp_advantages(torch.tensor([[1.0, 1], [0, 0]])).round()
    tensor([[ 1.,  1.],
            [-1., -1.]])
    """
    return grpo_advantages(rewards.reshape(1, -1)).view_as(rewards)


def f_grpo_advantages(rewards: Tensor, gamma: float = 1.0, verified: Tensor | None = None) -> Tensor:
    """F-GRPO (2602.06717): GRPO's advantages, all of them, times (1 - |S+|/G)^gamma.

    `verified` holds the verifier's rewards, from which S+ is counted, where `rewards` carry a penalty.
    >>> f_grpo_advantages(torch.tensor([[1.0, 0, 0, 0]]))
    tensor([[ 1.2990, -0.4330, -0.4330, -0.4330]])
    """
    correct = correct_share(rewards if verified is None else verified)
    return grpo_advantages(rewards) * (1 - correct) ** gamma


def unlikeliness_rewards(rewards: Tensor, sequence_logprobs: Tensor, beta: float = 0.25) -> Tensor:
    """Unlikeliness (2506.02355): r_i (1 - beta rank_i / G), rank 0 the least likely of its group.
    >>> unlikeliness_rewards(torch.tensor([[1.0, 1, 0, 1]]), torch.tensor([[-1.0, -9, -5, -3]]))
    tensor([[0.8125, 1.0000, 0.0000, 0.8750]])
    """
    rank = sequence_logprobs.argsort(dim=-1, stable=True).argsort(dim=-1)
    return rewards * (1 - beta * rank / rewards.shape[-1])


def overlong_penalty(lengths: Tensor, max_length: int, slack: int) -> Tensor:
    """DAPO (2503.14476, eq. 13): 0 up to max_length - slack tokens, then falling linearly to -1 at max_length.
    >>> overlong_penalty(torch.tensor([3, 4, 5]), max_length=5, slack=2)
    tensor([-0.0000, -0.5000, -1.0000])
    """
    return -((lengths - (max_length - slack)) / slack).clamp(0, 1)


def correct_share(rewards: Tensor) -> Tensor:
    """|S+| / G, the share of a group with a reward above 0: (Q, G) -> (Q, 1)."""
    return (rewards > 0).float().mean(-1, keepdim=True)


class Estimator(NamedTuple):
    """How an estimator's paper turns advantages into a loss."""

    aggregate: Literal["sequence", "token", "constant"]
    clip_low: float = 0.2
    clip_high: float = 0.2
    needs_group: bool = True
    samples: bool = True


ESTIMATORS = {
    "grpo": Estimator("sequence"),
    "dr_grpo": Estimator("constant"),
    "dapo": Estimator("token", clip_high=0.28),
    "rloo": Estimator("token"),
    "reinforce++": Estimator("token", needs_group=False),
    "f_grpo": Estimator("sequence"),
    "unlikeliness": Estimator("sequence"),
    "exact": Estimator("constant", needs_group=False, samples=False),  # the infinite batch: see `exact_objective`
}


def estimate_advantages(
    name: str, rewards: Tensor, penalty: Tensor, batch: Rollout, gamma: float = 1.0, beta: float = 0.25
) -> Tensor:
    """The advantages (Q, G) of estimator `name` for the verifier's `rewards` less a `penalty` (the KL; 0 without)."""
    rewards = rewards.float()
    match name:
        case "grpo":
            return grpo_advantages(rewards - penalty)
        case "dr_grpo":
            return grpo_advantages(rewards - penalty, normalize_std=False)
        case "dapo":
            overlong = overlong_penalty(batch.mask.sum(-1), batch.mask.shape[-1], slack=1)
            return grpo_advantages(rewards - penalty + overlong)
        case "rloo":
            return rloo_advantages(rewards - penalty)
        case "reinforce++":
            return reinforce_pp_advantages(rewards - penalty)
        case "f_grpo":
            return f_grpo_advantages(rewards - penalty, gamma, verified=rewards)
        case "unlikeliness":
            return grpo_advantages(unlikeliness_rewards(rewards, batch.logprobs.sum(-1), beta) - penalty)
    raise ValueError(f"unknown estimator {name!r}; choose one of {', '.join(ESTIMATORS)}")


# === Calibrations: IAC bends the advantages, DLC bends the sampling. ===


def inverse_success_calibration(
    advantages: Tensor, rewards: Tensor, alpha: float = 1.0, divide_by_group: bool = False
) -> Tensor:
    """IAC (P1): positive advantages times (G - |S+|)^alpha, or ((G - |S+|)/G)^alpha. All tensors (Q, G).

    Rare successes pull hard, an almost solved prompt hardly pulls; negative advantages stay. A larger step, too:
    with G = 8 a lone success gets 7 times its advantage, so a control with a matched learning rate belongs beside it.
    >>> rewards = torch.tensor([[1.0, 0, 0, 0]])
    >>> inverse_success_calibration(grpo_advantages(rewards), rewards)
    tensor([[ 5.1961, -0.5773, -0.5773, -0.5773]])
    """
    if advantages.shape != rewards.shape:
        raise ValueError(f"advantages {tuple(advantages.shape)} and rewards {tuple(rewards.shape)} must have one shape")
    G = rewards.shape[-1]
    failures = (G * (1 - correct_share(rewards))).round()  # (Q, 1): G - |S+|
    factor = (failures / G if divide_by_group else failures) ** alpha
    return torch.where(advantages > 0, advantages * factor, advantages)


def calibrated_logits(policy_logits: Tensor, memory_logits: Tensor, mu: float) -> Tensor:
    """DLC (P1): what is sampled is softmax(policy logits - mu * memory logits). (..., V) -> (..., V).

    The memory network knows what was drawn before; taking it away draws what was forgotten.
    >>> calibrated_logits(torch.tensor([2.0, 0.0]), torch.tensor([4.0, 0.0]), mu=0.5).softmax(-1)
    tensor([0.5000, 0.5000])
    """
    return policy_logits - mu * memory_logits


def memory_loss(logprobs: Tensor, mask: Tensor, keep: Tensor) -> Tensor:
    """The memory's cross-entropy on what was drawn: mean over the tokens of the kept completions, 0 if none is kept.

    logprobs and mask (N, T), keep (N,) bool.
    >>> logprobs, mask = torch.tensor([[-1.0, -3.0], [-9.0, -9.0]]), torch.ones(2, 2, dtype=torch.bool)
    >>> memory_loss(logprobs, mask, keep=torch.tensor([True, False]))
    tensor(2.)
    """
    return -(logprobs * token_weights(mask & keep[:, None], "token")).sum()


# === Loss: clipped ratio, three ways to average, KL, entropy. Token tensors are (N, T). ===


def token_weights(
    mask: Tensor, aggregate: Literal["sequence", "token", "constant"] = "sequence", constant: int | None = None
) -> Tensor:
    """What each token of mask (N, T) weighs in the batch's mean; (N, T), 0 outside the mask.

    sequence: 1/length within each completion, then the mean over completions (GRPO). token: all tokens alike (DAPO).
    constant: 1/(N * constant), the constant being T unless given (Dr.GRPO). Made for the whole batch, then cut into
    micro-batches: the sum over the parts is then the whole, whatever the lengths.
    >>> token_weights(torch.tensor([[True, True], [True, False]]), "sequence")
    tensor([[0.2500, 0.2500],
            [0.5000, 0.0000]])
    """
    mask = mask.float()
    match aggregate:
        case "sequence":
            lengths = mask.sum(-1, keepdim=True)
            return mask / lengths.clamp(min=1) / (lengths > 0).sum().clamp(min=1)
        case "token":
            return mask / mask.sum().clamp(min=1)
        case "constant":
            return mask / (constant or mask.shape[-1]) / max(len(mask), 1)
    raise ValueError(f"unknown aggregate {aggregate!r}; choose sequence, token or constant")


def importance_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor, level: str = "token") -> Tensor:
    """policy / old policy, (N, T): of each token, or its geometric mean over the completion (GSPO, 2507.18071).
    >>> old, new, mask = torch.zeros(1, 2), torch.tensor([[0.2, 0.0]]), torch.ones(1, 2)
    >>> importance_ratio(new, old, mask), importance_ratio(new, old, mask, "sequence")
    (tensor([[1.2214, 1.0000]]), tensor([[1.1052, 1.1052]]))
    """
    log_ratio = (logprobs - old_logprobs).float().where(mask.bool(), 0.0)  # where, not times: 0 * inf is nan
    log_ratio = log_ratio.clamp(-20, 20)  # exp(20) is finite, and clipped anyway
    if level == "sequence":
        mean = log_ratio.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
        log_ratio = mean.expand_as(log_ratio)
    elif level != "token":
        raise ValueError(f"unknown ratio {level!r}; choose token or sequence")
    return log_ratio.exp()


def policy_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor,
    clip_low: float = 0.2, clip_high: float = 0.2, aggregate: Literal["sequence", "token", "constant"] = "sequence",
    constant: int | None = None, ratio: Literal["token", "sequence"] = "token", weights: Tensor | None = None
) -> Tensor:  # fmt: skip
    """PPO's clipped loss (1707.06347) as GRPO uses it; a scalar. advantages (Q, G) or (N,), the others (N, T).

    `weights` (N, T) replaces `aggregate` where this is one part of a larger batch. On the first update the ratio is 1,
    so with advantages that sum to 0 the loss is about 0; its gradient is not.
    >>> logprobs = torch.tensor([[-1.0], [-1.0]], requires_grad=True)
    >>> loss = policy_loss(logprobs, logprobs.detach(), torch.tensor([[1.0, -1.0]]), torch.ones(2, 1))
    >>> loss.backward()
    >>> abs(loss.item()), logprobs.grad.tolist()
    (0.0, [[-0.5], [0.5]])
    """
    if weights is None:
        weights = token_weights(mask, aggregate, constant)
    advantage = advantages.reshape(-1, 1)  # (N, 1)
    if len(advantage) != len(logprobs):
        raise ValueError(f"{len(advantage)} advantages for {len(logprobs)} completions: one for each is needed")
    r = importance_ratio(logprobs, old_logprobs, mask, ratio)
    objective = torch.minimum(r * advantage, r.clamp(1 - clip_low, 1 + clip_high) * advantage)
    return -(weights * objective).sum()


def is_clipped(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """Where the clip takes the gradient: too high with A > 0, too low with A < 0. ratio (N, T) -> bool (N, T).
    >>> is_clipped(torch.tensor([[1.5], [1.5]]), torch.tensor([1.0, -1.0]), 0.2, 0.2).tolist()
    [[True], [False]]
    """
    advantage = advantages.reshape(-1, 1)
    return (advantage > 0) & (ratio > 1 + clip_high) | (advantage < 0) & (ratio < 1 - clip_low)


def kl_estimate(logprobs: Tensor, reference_logprobs: Tensor, kind: Literal["k1", "k2", "k3"] = "k3") -> Tensor:
    """Schulman's estimators of KL(policy || reference) from the policy's own samples, per token, in float32.

    With d = log policy - log reference: k1 = d, k2 = d^2/2, k3 = exp(-d) - 1 + d. In expectation k1 and k3 *are* the
    KL; as a loss, differentiated with the samples held fixed, only k2 has the KL's gradient, k3 that of the reverse
    KL(reference || policy), and k1 none at all: it belongs in the reward.
    >>> kl_estimate(torch.tensor([0.5]), torch.tensor([0.0]), "k2")
    tensor([0.1250])
    """
    d = (logprobs.float() - reference_logprobs.float()).clamp(-60, 60)
    match kind:
        case "k1":
            return d
        case "k2":
            return d**2 / 2
        case "k3":
            return torch.expm1(-d) + d
    raise ValueError(f"unknown KL estimator {kind!r}; choose k1, k2 or k3")


def entropy(logits: Tensor) -> Tensor:
    """Entropy in nats of softmax(logits): (..., V) -> (...).
    >>> entropy(torch.zeros(4))
    tensor(1.3863)
    """
    logprobs = logits.float().log_softmax(-1)
    return -(logprobs.exp() * logprobs).sum(-1)


# === Training: one run is one method and one seed. First the reference, then what changes in a run, then the loop. ===


def pretrain_reference(task: Task, shape: Shape) -> Policy:
    """A fresh policy trained on the task's skewed, half-wrong data; always on the processor: the same on any device."""
    generator, rng = torch.Generator().manual_seed(0), random.Random(0)
    policy = Policy(task.vocab_size, generator, shape.layers, shape.width, shape.heads)
    optimizer = make_optimizer(policy, learning_rate=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=4e-3, total_steps=task.pretraining_steps)
    Q = min(len(task.prompts), 32)
    G = 256 // Q
    for _ in range(task.pretraining_steps):
        prompts = rng.sample(task.prompts, Q)
        texts = [[*task.encode(task.sample(prompt, rng)), STOP] for prompt in prompts for _ in range(G)]
        T = max(map(len, texts))
        completions = torch.tensor([text + [PAD] * (T - len(text)) for text in texts])  # (N, T)
        mask = torch.tensor([[t < len(text) for t in range(T)] for text in texts])  # (N, T)
        logits = policy.completion_logits(encode_prompts(task, prompts), completions.view(Q, G, T)).flatten(0, 1)
        loss = memory_loss(token_logprobs(logits, completions), mask, keep=mask.any(-1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return policy


def make_optimizer(policy: Policy, learning_rate: float) -> torch.optim.Optimizer:
    """AdamW over what can learn: all of a policy, or its adapters."""
    learning = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(learning, lr=learning_rate, weight_decay=0.0, fused=True)


def check_moments(optimizer: torch.optim.Optimizer) -> None:
    """Refuse moments of another shape than their parameters, which the fused kernel would read past. ValueError."""
    for parameter in optimizer.param_groups[0]["params"]:
        state = optimizer.state.get(parameter, {})
        if any(state[name].shape != parameter.shape for name in ("exp_avg", "exp_avg_sq") if name in state):
            raise ValueError("the optimizer's moments do not fit its parameters")


class Method(NamedTuple):
    """An estimator with its calibrations, as written on the command line."""

    name: str
    estimator: str
    regime: str
    iac: bool
    dlc: bool


def parse_method(name: str) -> Method:
    """ESTIMATOR, REGIME (P2's estimator is RLOO) or ESTIMATOR@REGIME, then +iac, +dlc or +iac+dlc; `exact` only bare.

    Raises UserError for any other name.
    >>> parse_method("tilt+iac")
    Method(name='tilt+iac', estimator='rloo', regime='tilt', iac=True, dlc=False)
    """
    for ending in ("+iac+dlc", "+iac", "+dlc", ""):
        stem = name.removesuffix(ending) if name.endswith(ending) else ""
        estimator, at, regime = ("rloo", "@", stem) if stem in REGIMES else stem.partition("@")
        known = estimator in ESTIMATORS and (regime in REGIMES if at else True)
        if known and (ESTIMATORS[estimator].samples or not (ending or at)):
            return Method(name, estimator, regime or "task", "+iac" in ending, "+dlc" in ending)
    choices = ", ".join((*(name for name in ESTIMATORS if ESTIMATORS[name].samples), *REGIMES[1:]))
    raise UserError(f"unknown method {name!r:.60}: choose from {choices}, each with +iac, +dlc or +iac+dlc, or exact")


def resolve_update(update: Update, estimator: Estimator) -> Update:
    """The update's settings with "as the estimator's paper has it" filled in: what really runs.
    >>> resolve_update(Update(), ESTIMATORS["dapo"]).clip_high
    0.28
    """
    given = {name: getattr(update, name) for name in ("clip_low", "clip_high", "aggregate")}
    filled = {name: getattr(estimator, name) if v in (None, "estimator") else v for name, v in given.items()}
    return dataclasses.replace(update, **filled)


HEAD = ("method", "seed", "step", "split")
LOG = ("reward", "flat_groups", "cut_answers", "length", "loss", "grad_norm", "entropy", "first_ratio", "clip_fraction")
LOG += ("kl", "memory_loss")  # README's glossary says what each means; "" where a run has none


class Run:
    """All that changes while one method trains with one seed; `state` and `restore` lose nothing of it.

    For a language model TextRun (text_runs.py) puts other policies, measures and files in the place of these.
    """

    measures: Collection[str] = MEASURES  # the names that `measure` gives

    def __init__(self, settings: Settings, method: Method, seed: int, reference: Policy, device="cpu", task=None):
        self.settings, self.method, self.seed, self.device = settings, method, seed, device
        self.task: Task = task or TASKS[settings.experiment.task]()
        self.update = resolve_update(settings.update, ESTIMATORS[method.estimator])
        self.temperature = settings.sampling.temperature
        self.prompts_a_step = min(settings.sampling.prompts, len(self.task.train))
        self.policy, self.reference = self.make_policies(reference)
        self.optimizer = make_optimizer(self.policy, settings.update.learning_rate)
        self.generator = torch.Generator(device).manual_seed(seed)
        self.memory = self.make_memory() if method.dlc else None
        self.memory_optimizer = self.memory and make_optimizer(self.memory, settings.calibration.memory_learning_rate)
        self.prepare_measures()
        self.step = 0
        self.rows: list[dict] = []  # evaluations so far
        self.window: dict[str, list[float]] = {name: [] for name in LOG}  # logged since the last evaluation
        self.waiting: list[dict] = []  # DAPO: groups with a spread, sampled and not yet trained on

    def make_policies(self, reference: Policy) -> tuple[Policy, Policy]:
        """The policy that will move, and the reference that will not."""
        frozen = copy.deepcopy(reference).to(self.device)
        policy = copy.deepcopy(frozen)
        if self.settings.experiment.compile:
            policy.extend = torch.compile(policy.extend, dynamic=True)
        return policy, frozen

    def make_memory(self) -> Policy:
        c = self.settings.calibration
        if c.memory_start == "reference":
            return copy.deepcopy(self.reference)
        generator, heads = torch.Generator().manual_seed(self.seed), self.settings.shape.heads
        return Policy(self.task.vocab_size, generator, c.memory_layers, c.memory_width, heads).to(self.device)

    @torch.no_grad()
    def mode_probs(self, policy: Policy):
        """Exact probability of every listed mode, as a NumPy array (Q, M)."""
        return self.listing.log_probs(policy, self.temperature).exp().numpy()

    def prepare_measures(self) -> None:
        """List all correct answers once, and sum what the reference gives them."""
        self.listing = Listing(self.task, self.task.prompts)
        self.reference_probs = self.mode_probs(self.reference)  # (Q, M)
        self.train_listing = Listing(self.task, self.task.train)
        self.tree = None  # all completions, where an exact KL is summed over them
        if self.method.estimator == "exact" and self.update.beta:
            self.tree = Tree(self.reference, self.task, self.task.train, min_mass=1e-4, temperature=self.temperature)

    def measure(self) -> dict[str, dict[str, float]]:
        """split -> measure -> its exact value for the policy now, the mean over the prompts of the split."""
        measured = mode_measures(self.listing, self.mode_probs(self.policy), self.reference_probs)  # name -> (Q,)
        splits = {"train": slice(len(self.task.train)), "heldout": slice(len(self.task.train), None)}
        return {
            split: {name: float(values[rows].mean()) for name, values in measured.items()}
            for split, rows in splits.items()
        }

    def log(self, **values: float) -> None:
        for name, value in values.items():
            self.window[name].append(value)

    def parts(self) -> dict:
        """What PyTorch saves and restores by itself."""
        parts = {"policy": self.policy, "optimizer": self.optimizer}
        return parts | ({"memory": self.memory, "memory_optimizer": self.memory_optimizer} if self.memory else {})

    def state(self) -> dict:
        """Tensors and plain values only, so that loading it runs no code."""
        plain = {name: copy.deepcopy(getattr(self, name)) for name in ("seed", "step", "rows", "window", "waiting")}
        parts = {name: part.state_dict() for name, part in self.parts().items()}
        return plain | parts | {"method": self.method.name, "generator": self.generator.get_state()}

    def save_weights(self, checkpoint: Path) -> None:
        """Write what is too large for `state` beside the file it goes to: nothing here."""

    def forget_weights(self, checkpoint: Path) -> None:
        """Remove what `save_weights` wrote at earlier steps: nothing here."""

    def load_weights(self, checkpoint: Path) -> None:
        """Read what `save_weights` wrote at the step that was restored: nothing here."""

    def restore(self, state: dict) -> None:
        state = copy.deepcopy(state)  # an optimiser goes on with the very tensors it is given
        for name, part in self.parts().items():
            if isinstance(part, torch.optim.Optimizer):  # its rates are the settings', only its memory is the file's
                state[name]["param_groups"] = part.state_dict()["param_groups"]
            part.load_state_dict(state[name])
            if isinstance(part, torch.optim.Optimizer):
                check_moments(part)
        self.generator.set_state(state["generator"].cpu())
        self.step, self.rows, self.window, self.waiting = (state[k] for k in ("step", "rows", "window", "waiting"))


def train(run: Run, tick=lambda: None, checkpoint=lambda run: None, stopped=lambda: False) -> None:
    """Train until the last step or until `stopped()`. Calls `tick` each step, `checkpoint` each evaluation and last."""
    steps, every = run.settings.experiment.steps, run.settings.experiment.evaluate_every
    if not run.rows:
        evaluate(run)
    while run.step < steps and not stopped():
        take = sampled_step if ESTIMATORS[run.method.estimator].samples else exact_step
        take(run)
        run.step += 1
        tick()
        if run.step % every == 0 or run.step == steps:
            evaluate(run)
            checkpoint(run)
    checkpoint(run)


def sampled_step(run: Run) -> None:
    """One batch: sample, verify, learn. The whole of GRPO with its calibrations, in order."""
    sampling, calibration = run.settings.sampling, run.settings.calibration
    # 1. Choose prompts and draw a group of completions for each, from policy - mu * memory where DLC is on.
    order = torch.randperm(len(run.task.train), generator=run.generator, device=run.device).tolist()
    prompts = [run.task.train[i] for i in order[: run.prompts_a_step]]
    tokens = encode_prompts(run.task, prompts).to(run.device)
    length, options = run.task.max_new_tokens, {"memory": run.memory, "mu": calibration.mu}
    options |= {"temperature": run.temperature, "fixed_length": sampling.fixed_length}
    options |= {"stops": run.task.stops, "pad": run.task.pad}
    batch = rollout(run.policy, tokens, sampling.group_size, length, run.generator, **options)
    if next(run.policy.parameters()).dtype != torch.float32:
        # In half precision drawing and scoring round apart, so the old log-probabilities are scored anew, too.
        batch = batch._replace(logprobs=score(run.policy, batch, run.temperature, run.update.micro_batches))
    # 2. The verifier says what is right.
    rewards = verify(run.task, prompts, batch)  # (Q, G)
    log_batch(run, rewards, batch)
    # 3. The memory learns what was drawn.
    if run.memory is not None:
        train_memory(run, batch, rewards)
    # 4. DAPO sets mixed groups aside until they fill a batch; what it drew counts all the same.
    if run.method.estimator == "dapo":
        batch, rewards = wait_for_spread(run, batch, rewards, run.prompts_a_step)
        if batch is None:
            return
    # 5. Rewards become advantages, calibrated by IAC.
    reference_logprobs = score_reference(run, batch)
    penalty = kl_penalty(run, batch, reference_logprobs) + regime_penalty(run, batch, rewards, reference_logprobs)
    gamma, beta = run.update.f_grpo_gamma, run.update.unlikeliness_beta
    advantages = estimate_advantages(run.method.estimator, rewards, penalty, batch, gamma, beta)  # (Q, G)
    if run.method.iac:
        advantages = inverse_success_calibration(advantages, rewards, calibration.alpha, calibration.iac_divide)
    batch, advantages = apply_importance(batch, advantages, calibration.importance)
    # 6. The policy's step.
    update_policy(run, batch, advantages, reference_logprobs)


def exact_step(run: Run) -> None:
    """The infinite batch: one step up the summed probability of the listed modes, less beta times the exact KL."""
    run.optimizer.zero_grad()
    success = run.train_listing.log_probs(run.policy, run.temperature).exp().sum(-1)  # (Q,)
    kl = run.tree.kl(run.policy) if run.tree else None
    loss = -exact_objective(success, kl, run.update.beta, run.update.exact_std, run.update.kl_in).mean()
    loss.backward()
    take_step(run, loss=loss.item(), reward=success.mean().item())
    if kl is not None:
        run.log(kl=kl.mean().item())


def exact_objective(
    success: Tensor, kl: Tensor | None = None, beta: float = 0.0, normalize_std: bool = True, kl_in: str = "reward"
) -> Tensor:
    """What GRPO climbs with infinitely many completions, per prompt; `success` and `kl` (Q,) -> (Q,). Differentiable.

    GRPO's expected update is the gradient of the success probability P over sqrt(P (1 - P)), the root held fixed. A KL
    in the reward is divided with it (its own variance is left out of the root: our choice), a KL in the loss is not.
    >>> exact_objective(torch.tensor([0.5, 0.5]), kl=torch.tensor([0.0, 0.1]), beta=1.0)
    tensor([1.0000, 0.8000])
    """
    deviation = (success * (1 - success)).clamp(min=0).sqrt().detach() + 1e-6 if normalize_std else 1.0
    if kl is None:
        return success / deviation
    return (success - beta * kl) / deviation if kl_in == "reward" else success / deviation - beta * kl


def wait_for_spread(run: Run, batch: Rollout, rewards: Tensor, needed: int) -> tuple[Rollout | None, Tensor]:
    """DAPO's dynamic sampling: hold groups until `needed` have right *and* wrong answers; (None, rewards) before that.

    The policy does not move meanwhile, so what waits stays on-policy; groups left over when it does move are dropped.
    """
    share = correct_share(rewards)[:, 0]
    mixed = (share > 0) & (share < 1)  # (Q,)
    if mixed.any():
        run.waiting.append({"batch": batch.pick(mixed)._asdict(), "rewards": rewards[mixed]})
    if sum(len(held["rewards"]) for held in run.waiting) < needed:
        return None, rewards
    held, run.waiting = run.waiting, []
    width = max(h["batch"]["prompts"].shape[1] for h in held)
    for h in held:
        prompts = h["batch"]["prompts"]
        h["batch"]["prompts"] = F.pad(prompts, (width - prompts.shape[1], 0), value=run.task.pad)
    joined = Rollout(*(torch.cat([h["batch"][name] for h in held])[:needed] for name in Rollout._fields))
    return joined, torch.cat([h["rewards"] for h in held])[:needed]


def apply_importance(batch: Rollout, advantages: Tensor, kind: str) -> tuple[Rollout, Tensor]:
    """What the update makes of DLC's sampler not being the policy; see Calibration.importance. advantages (Q, G).

    Without DLC the two are one, and nothing changes.
    """
    if kind == "exact":
        return batch, advantages * (batch.logprobs - batch.sampler_logprobs).sum(-1).clamp(max=20).exp()
    return (batch._replace(logprobs=batch.sampler_logprobs) if kind == "clipped" else batch), advantages


@torch.no_grad()
def score(policy: Policy, batch: Rollout, temperature: float = 1.0, parts: int = 1) -> Tensor:
    """log-probabilities (Q, G, T) of a batch under any policy, in `parts` passes; 0 outside the mask."""
    scored = torch.zeros_like(batch.logprobs)  # (Q, G, T)
    for rows in torch.arange(len(batch.prompts), device=batch.prompts.device).chunk(parts):
        completions = batch.completions[rows, :, : batch.length]  # (Q, G, T)
        logits = policy.completion_logits(batch.prompts[rows], completions) / temperature  # (Q, G, T, V)
        scored[rows, :, : batch.length] = token_logprobs(logits, completions)
    return scored.where(batch.mask, 0.0)


def score_reference(run: Run, batch: Rollout) -> Tensor | None:
    """log-probabilities (Q, G, T) of a batch under the reference; None where no KL term asks for them."""
    if not run.update.beta and run.method.regime == "task":
        return None
    return score(run.reference, batch, run.temperature, run.update.micro_batches)


def kl_penalty(run: Run, batch: Rollout, reference_logprobs: Tensor | None) -> Tensor:
    """beta times the KL of each completion, (Q, G), where the KL is in the reward; 0 elsewhere. Logs the KL."""
    if not run.update.beta:
        return torch.zeros_like(batch.logprobs[..., 0])
    kl = kl_estimate(batch.logprobs, reference_logprobs, run.update.kl_kind) * batch.mask  # (Q, G, T)
    run.log(kl=(kl.sum() / batch.mask.sum()).item())
    return run.update.beta * kl.sum(-1) * (run.update.kl_in == "reward")


def regime_penalty(run: Run, batch: Rollout, rewards: Tensor, reference_logprobs: Tensor | None) -> Tensor:
    """What to take off the verifier's reward so that P2's regime remains, (Q, G); 0 for the task reward."""
    if run.method.regime == "task":
        return torch.zeros_like(rewards)
    s, lengths = run.settings.sharpening, batch.mask.sum(-1)
    likelihoods = batch.logprobs.sum(-1), (reference_logprobs * batch.mask).sum(-1)
    options = s.sharpen_alpha, s.beta_inverse, s.normalize, s.length_power
    return rewards - sharpening_reward(run.method.regime, rewards, *likelihoods, lengths, *options)


def update_policy(run: Run, batch: Rollout, advantages: Tensor, reference_logprobs: Tensor | None) -> None:
    """`epochs` optimiser steps on one batch, the gradient of each summed over micro-batches."""
    u = run.update
    weights = token_weights(batch.mask.flatten(0, 1), u.aggregate).view_as(batch.logprobs)  # (Q, G, T)
    teaching = teaching_groups(advantages, bool(u.entropy_bonus or (u.beta and u.kl_in == "loss")))
    for epoch in range(u.epochs):
        run.optimizer.zero_grad()
        logged = []
        for part in teaching.chunk(u.micro_batches):
            reference = None if reference_logprobs is None else reference_logprobs[part]
            loss, log = batch_loss(run, batch.pick(part), advantages[part], weights[part], reference)
            loss.backward()
            logged.append(log)
        loss, clipped = sum(log["loss"] for log in logged), sum(log["clipped"] for log in logged)
        take_step(run, loss=loss, clip_fraction=clipped / batch.mask.sum().item())
        if epoch == 0:
            run.log(first_ratio=max(log["first_ratio"] for log in logged))


def teaching_groups(advantages: Tensor, all_teach: bool) -> Tensor:
    """Indices of the groups that can move the policy: advantages (Q, G) that are not all 0, or every group.

    The others have a gradient of exactly 0, so they are not computed; one stays where there is no other, since Adam's
    momentum moves on.
    >>> teaching_groups(torch.tensor([[0.0, 0.0], [1.0, -1.0]]), all_teach=False)
    tensor([1])
    """
    moves = advantages.ne(0).any(-1) | all_teach  # (Q,)
    return moves.nonzero()[:, 0] if moves.any() else moves.nonzero().new_zeros(1)


def take_step(run: Run, **logged: float) -> None:
    """Clip the gradient, step, log. Raises UserError where the gradient is not finite, before anything moves."""
    norm = nn.utils.clip_grad_norm_(run.policy.parameters(), run.update.max_grad_norm).item()
    if not math.isfinite(norm):
        where = f"{run.method.name} seed {run.seed}, step {run.step + 1}"
        raise UserError(f"the gradient is {norm} ({where}); take a smaller --learning-rate")
    run.optimizer.step()
    run.log(grad_norm=norm, **logged)


def batch_loss(
    run: Run, batch: Rollout, advantages: Tensor, weights: Tensor, reference: Tensor | None
) -> tuple[Tensor, dict[str, float]]:
    """Loss of one micro-batch, and what is logged of it; advantages (Q, G), the other tensors (Q, G, T).

    The weights are those of the whole batch, so losses and numbers of clipped tokens add up over its micro-batches.
    """
    u = run.update
    T = batch.length
    completions, mask, old, weights = (
        tensor[..., :T].flatten(0, 1) for tensor in (batch.completions, batch.mask, batch.logprobs, weights)
    )  # each (N, T)
    logits = run.policy.completion_logits(batch.prompts, batch.completions[..., :T]).flatten(0, 1)  # (N, T, V)
    logits = logits / run.temperature
    logprobs = token_logprobs(logits, completions)
    loss = policy_loss(logprobs, old, advantages, mask, u.clip_low, u.clip_high, ratio=u.ratio, weights=weights)
    if u.entropy_bonus:
        loss = loss - u.entropy_bonus * (weights * entropy(logits)).sum()
    if u.beta and u.kl_in == "loss":
        loss = loss + u.beta * (weights * kl_estimate(logprobs, reference[..., :T].flatten(0, 1), u.kl_kind)).sum()
    ratio = importance_ratio(logprobs.detach(), old, mask, u.ratio)
    clipped = is_clipped(ratio, advantages, u.clip_low, u.clip_high) & mask
    first_ratio = ((ratio - 1).abs() * mask).max()
    return loss, {"loss": loss.item(), "clipped": clipped.sum().item(), "first_ratio": first_ratio.item()}


def train_memory(run: Run, batch: Rollout, rewards: Tensor) -> None:
    """One cross-entropy step of the memory network on what was drawn: the correct completions, or all."""
    keep = torch.ones_like(rewards, dtype=torch.bool) if run.settings.calibration.memory_data == "all" else rewards > 0
    if not keep.any():
        return
    some = keep.any(-1)  # (Q,): a group without any is not computed
    batch, keep = batch.pick(some), keep[some]
    T, kept_tokens = batch.length, (batch.mask & keep[..., None]).sum((1, 2))  # (Q,)
    run.memory_optimizer.zero_grad()
    total = 0.0
    for part in torch.arange(len(keep), device=keep.device).chunk(run.update.micro_batches):
        completions, mask = batch.completions[part, :, :T], batch.mask[part, :, :T]  # (Q, G, T)
        logprobs = token_logprobs(run.memory.completion_logits(batch.prompts[part], completions), completions)
        loss = memory_loss(logprobs.flatten(0, 1), mask.flatten(0, 1), keep[part].flatten())
        loss = loss * (kept_tokens[part].sum() / kept_tokens.sum())  # the parts' means add up to that of the batch
        loss.backward()
        total += loss.item()
    run.memory_optimizer.step()
    run.log(memory_loss=total)


def log_batch(run: Run, rewards: Tensor, batch: Rollout) -> None:
    """Log what a batch says before anything is learned from it."""
    flat = (rewards == rewards[:, :1]).all(1).float().mean()
    stop_ids = torch.tensor(run.task.stops, device=rewards.device)
    stopped = (torch.isin(batch.completions, stop_ids) & batch.mask).any(-1).float().mean()
    length = batch.mask.sum(-1).float().mean()
    run.log(reward=rewards.mean().item(), flat_groups=flat.item(), cut_answers=1 - stopped.item(), length=length.item())
    run.log(entropy=(batch.entropies.sum() / batch.mask.sum()).item())


def evaluate(run: Run) -> None:
    """Add one row for the trained and one for the held-out prompts: the measures, then the means of the log."""
    drawn = run.prompts_a_step * run.settings.sampling.group_size * ESTIMATORS[run.method.estimator].samples
    logged = {name: sum(values) / len(values) if values else "" for name, values in run.window.items()}
    for split, means in run.measure().items():
        head = dict(zip(HEAD, (run.method.name, run.seed, run.step, split), strict=True))
        tail = logged if split == "train" else dict.fromkeys(LOG, "")
        run.rows.append(head | means | {"completions": run.step * drawn} | tail)
    run.window = {name: [] for name in LOG}


if __name__ == "__main__":
    from command_line import main  # reads the flags, trains the runs side by side and writes the folder

    sys.exit(main())
