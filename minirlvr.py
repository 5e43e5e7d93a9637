"""Reinforcement learning with verifiable rewards, measured exactly: one lesson, read from top to bottom.

GRPO makes a policy right more often and, often, right in only one way: its other correct answers (modes) die out. Here
are a small policy, one training step of GRPO and its relatives, and P1's two calibrations against that loss: IAC on the
advantages, DLC on the sampling, with the memory network that DLC samples against.

    >>> import torch
    >>> from minirlvr import Learner, Policy, sampled_step
    >>> from toy_tasks import Sums, pretrain
    >>> policy = Policy(Sums().vocab_size, torch.Generator().manual_seed(0))
    >>> pretrain(policy, Sums(), steps=100)  # "12=" -> "5+7": a third of its answers are right now, in many ways
    >>> learner = Learner(Sums(), policy, "grpo", calibrations=("iac", "dlc"))
    >>> for _ in range(30):
    ...     sampled_step(learner)
    >>> learner.logged["reward"][0] < 0.4 < 0.5 < learner.logged["reward"][-1]  # the share that the verifier took
    True

What GRPO has elsewhere and this file leaves out, and why:
- a critic and GAE: that a group is its own baseline is the point of GRPO;
- a reward model and rewards for format: a verifier says right or wrong, and the toy worlds have one format;
- other engines and machines for sampling, stale weights, mixed precision: with 100,000 parameters they would only hide
  the lesson, and without them the ratio of the first update is 1, but for rounding;
- schedules, warm-up, weight decay: one constant rate makes methods comparable and lets a run be lengthened.
KL, entropy bonus and several epochs are dials, off by default. What stands around a step is in other rooms: the worlds
and sums over their modes in `toy_tasks/`, flags, files and measuring in `lab/`, real models in `language_models/`.

Sources: P1 is arXiv 2601.15609 (over-sharpening, IAC, DLC), P2 is arXiv 2604.16259 (sharpening against task reward).

One letter per axis, everywhere: Q prompts of a batch, G completions of one prompt, N = Q * G, P prompt tokens (left
padded), S tokens in a cache, T new tokens, V vocabulary, D width, H heads; K rows of B = G / K completions of a prompt.
"""

import copy
import dataclasses
import math
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from toy_tasks import PAD, STOP, Padded, Task, UserError
from toy_tasks.exact import finite_batch_optimum
from toy_tasks.measures import pass_at_k
from toy_tasks.ranges import Count, Range, Rate, Share, Weight, checked, choose
from toy_tasks.sharpening import sharpening_reward

__version__ = "0.2"


# === The dials of a step. The command line has a flag for each; here they are plain arguments of a Learner. ===


@dataclass(frozen=True)
class Sampling:
    """The batch of one step."""

    prompts: Count = 16  # Prompts a step (Q); all training prompts if there are fewer.
    group_size: Count = 8  # Completions per prompt (G).
    fixed_length: bool = False  # Sample on after the stop token, to the longest length: P2's control for length.
    temperature: Rate = 1.0  # Divides the logits when sampling, when scoring and when evaluating.


@dataclass(frozen=True)
class Update:
    """The policy's gradient step."""

    learning_rate: Rate = 3e-4  # AdamW's step size, constant, no weight decay.
    max_grad_norm: Rate = 1.0  # The gradient is scaled down to this norm.
    epochs: Count = 1  # Optimiser steps on one batch; from the second on the ratio differs from 1 and clipping binds.
    micro_batches: Count = 1  # Parts that a batch is pushed through in, to save memory; the gradient is the same.
    # Mean over each completion's tokens, over all tokens, or a sum over a constant; estimator: as its paper has it.
    aggregate: Literal["estimator", "sequence", "token", "constant"] = "estimator"
    clip_low: Share | None = None  # Ratios below 1 - clip_low stop pulling; if not given, as the paper has it.
    clip_high: Weight | None = None  # Ratios above 1 + clip_high stop pulling; if not given, as the paper has it.
    ratio: Literal["token", "sequence"] = "token"  # Importance ratio of each token, or the completion's mean (GSPO).
    beta: Weight = 0.0  # Weight of the KL to the reference; above 0 flat groups move the policy too, towards it.
    kl_kind: Literal["k1", "k2", "k3"] = "k3"  # Its estimator; k1 as a loss has an expected gradient of 0.
    kl_in: Literal["loss", "reward"] = "loss"  # Where the KL term enters.
    entropy_bonus: Weight = 0.0  # Weight of the policy's entropy per token in the objective.
    f_grpo_gamma: Weight = 1.0  # f_grpo multiplies all advantages by (1 - |S+|/G)^gamma.
    exact_std: bool = True  # exact divides each prompt's gradient by its reward's standard deviation, as GRPO does.
    unlikeliness_beta: Share = 0.25  # unlikeliness takes up to this share off the reward of likely completions.


@dataclass(frozen=True)
class Calibration:
    """IAC and DLC. What the paper leaves open is an option here, and its default is our choice."""

    alpha: Annotated[float, Range(0, 10)] = 1.0  # IAC multiplies positive advantages by (G - |S+|)^alpha.
    iac_divide: bool = False  # IAC multiplies by ((G - |S+|) / G)^alpha instead.
    kappa: Annotated[float, Range(0, math.inf)] = math.inf  # pos multiplies positive advantages; inf: without negative.
    mu: Annotated[float, Range(0, 100)] = 0.5  # DLC samples from softmax(policy logits - mu * memory logits).
    memory_data: Literal["correct", "all"] = "correct"  # Completions that the memory network learns.
    # fresh: a new small network; reference: a copy of the reference; for a language model also hf:FOLDER_OR_ID.
    memory_start: str = "fresh"
    memory_layers: Annotated[int, Range(1, 100)] = 1  # Layers of a fresh memory network.
    memory_width: Annotated[int, Range(1, 10**5)] = 32  # Width of a fresh memory network.
    memory_learning_rate: Rate = 3e-3  # AdamW's step size for the memory network.
    # DLC's sampler is not the policy. none: take no notice (the paper's ordinary update); exact: weight each completion
    # by policy / sampler; clipped: the clipped ratio is policy / sampler, token by token.
    importance: Literal["none", "exact", "clipped"] = "none"


# === Policy: a small Llama (RMSNorm, rotary positions, SwiGLU, no biases). ===

TRUNK = -1  # the branch of a prompt's tokens: a prompt is the trunk of a tree, its completions are the branches


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
    """Keys and values of what was read."""

    layers: list[tuple[Tensor, Tensor]]  # per layer, each (Q, H, S, D/H)
    real: Tensor  # (Q, S) bool: text, not left padding
    branch: Tensor  # (S,) int: TRUNK, or the completion that the token belongs to

    def repeat(self, K: int) -> "Cache":
        """Each row K times, side by side: (Q * K, ...)."""
        layers = [tuple(tensor.repeat_interleave(K, 0) for tensor in layer) for layer in self.layers]
        return Cache(layers, self.real.repeat_interleave(K, 0), self.branch)


def visible(real: Tensor, branch: Tensor, T: int) -> Tensor:
    """Which of S+T tokens each of the last T sees: real (Q, S+T) bool, branch (S+T,) int -> (Q, T, S+T) bool.
    Itself, and what is real and earlier on the trunk or on its own branch. Here the prompt is two tokens behind one of
    padding; its two completions, 0 and 1, are read side by side:
    >>> branch = torch.tensor([TRUNK, TRUNK, TRUNK, 0, 1, 0, 1])
    >>> visible(torch.tensor([[False, True, True, True, True, True, True]]), branch, T=4)[0].int()
    tensor([[0, 1, 1, 1, 0, 0, 0],
            [0, 1, 1, 0, 1, 0, 0],
            [0, 1, 1, 1, 0, 1, 0],
            [0, 1, 1, 0, 1, 0, 1]], dtype=torch.int32)
    """
    S = len(branch) - T
    order = torch.ones(T, S + T, dtype=torch.bool, device=real.device)
    earlier = order.tril(S - 1) & ((branch == TRUNK) | (branch == branch[S:, None]))  # (T, S+T)
    itself = order.tril(S).triu(S)  # (T, S+T)
    return (earlier & real[:, None]) | itself


class Policy(nn.Module):
    """A decoder-only transformer; about 100k parameters at the default size.
    A step asks a policy for three things: `start`, `step` and `completion_logits`. Neither padding nor its neighbours
    in the batch change a text's logits.
    >>> policy = Policy(vocab_size=14, generator=torch.Generator().manual_seed(0))
    >>> policy(Padded.of(torch.tensor([[3, 4, 13]]))).shape
    torch.Size([1, 3, 14])
    """

    def __init__(self, vocab_size: int, generator: torch.Generator, layers: int = 2, width: int = 64, heads: int = 4):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)
        self.blocks = nn.ModuleList(Block(width, heads, hidden=width * 11 // 4) for _ in range(layers))
        self.norm = nn.RMSNorm(width, eps=1e-5)
        self.head = nn.Linear(width, vocab_size, bias=False)
        frequencies = 10000.0 ** -(torch.arange(0, width // heads, 2) / (width // heads))  # (D/H/2,)
        self.register_buffer("frequencies", frequencies, persistent=False)
        with torch.no_grad():
            for weight in (p for p in self.parameters() if p.ndim == 2):
                weight.normal_(0, weight.shape[1] ** -0.5, generator=generator)

    def extend(self, texts: Padded, branch: Tensor | None = None, cache: Cache | None = None) -> tuple[Tensor, Cache]:
        """Read more tokens. texts (Q, T), branch (T,), or all trunk -> logits (Q, T, V), a cache of S+T tokens.
        A token's position is the number of tokens that it sees before it.
        """
        tokens, real = texts
        branch = torch.full_like(tokens[0], TRUNK) if branch is None else branch
        if cache is not None:
            real, branch = torch.cat((cache.real, real), 1), torch.cat((cache.branch, branch))
        allowed = visible(real, branch, tokens.shape[1])  # (Q, T, S+T)
        position = allowed.sum(-1) - 1  # (Q, T)
        angles = position[:, None, :, None] * self.frequencies  # (Q, 1, T, D/H/2)
        cos, sin = angles.cos(), angles.sin()
        x, layers = self.embedding(tokens), []  # (Q, T, D)
        for i, block in enumerate(self.blocks):
            x, keys_values = block(x, cos, sin, allowed[:, None], None if cache is None else cache.layers[i])
            layers.append(keys_values)
        return self.head(self.norm(x)), Cache(layers, real, branch)

    def forward(self, texts: Padded) -> Tensor:
        """Whole texts (Q, T) -> logits (Q, T, V)."""
        return self.extend(texts)[0]

    def start(self, prompts: Padded, group_size: int, length: int = 1) -> tuple[Tensor, Cache]:
        """Read prompts (Q, P) once -> logits (Q, G, V) of the first token of G completions, and a cache.
        `length` is how many tokens of each will be read, at most: it decides how many trees they grow in.
        """
        logits, cache = self.extend(prompts)
        return logits[:, -1:].expand(-1, group_size, -1), cache.repeat(rows_of(group_size, length))

    def step(self, tokens: Tensor, cache: Cache) -> tuple[Tensor, Cache]:
        """Read one more token (Q, G) of each completion -> logits (Q, G, V) of the next, and the longer cache."""
        rows = tokens.view(len(cache.real), -1)  # (Q * K, B)
        logits, cache = self.extend(Padded.of(rows), torch.arange(rows.shape[1], device=rows.device), cache)
        return logits.view(*tokens.shape, -1), cache

    def completion_logits(self, prompts: Padded, completions: Tensor) -> Tensor:
        """The logits (Q, G, T, V) that each token of completions (Q, G, T) was drawn from; prompts (Q, P).
        Each prompt is read once for its G completions, forward and backward: in one tree, or, where that would be large
        (its attention costs the square), as a trunk that several smaller trees share. Differentiable.
        """
        Q, G, T = completions.shape
        K = rows_of(G, T - 1)
        B = G // K
        read = completions[..., :-1].reshape(Q * K, B, T - 1).transpose(1, 2).reshape(Q * K, -1)  # (Q * K, (T-1) B)
        branches, branch = Padded.of(read), torch.arange(B, device=read.device).repeat(T - 1)  # token by token
        if K == 1:
            trunk = torch.full_like(prompts.tokens[0], TRUNK)
            tree = Padded(*(torch.cat(both, 1) for both in zip(prompts, branches, strict=True)))
            logits = self.extend(tree, torch.cat((trunk, branch)))[0]  # (Q, P + (T-1) G, V)
            first, rest = logits.split((prompts.tokens.shape[1], (T - 1) * B), 1)
        else:
            first, cache = self.extend(prompts)
            rest = self.extend(branches, branch, cache.repeat(K))[0]  # (Q * K, (T-1) B, V)
        rest = rest.view(Q * K, T - 1, B, rest.shape[-1]).transpose(1, 2).reshape(Q, G, T - 1, rest.shape[-1])
        return torch.cat((first[:, -1:, None].expand(-1, G, -1, -1), rest), 2)


def rows_of(G: int, length: int, largest: int = 96) -> int:
    """In how many rows (K) the completions of a prompt are read: the fewest of at most `largest` tokens, alike in size.
    >>> rows_of(8, length=8), rows_of(64, length=8), rows_of(8, length=64)
    (1, 8, 8)
    """
    return next(K for K in range(1, G + 1) if G % K == 0 and (G // K * length <= largest or K == G))


# === Rollout: each prompt is read once, then its G completions are drawn token by token. ===


class Rollout(NamedTuple):
    """A batch of sampled completions. Every tensor has the prompt axis Q first, so groups can be picked and joined."""

    prompts: Tensor  # (Q, P) left-padded
    real: Tensor  # (Q, P) bool: text, not padding
    completions: Tensor  # (Q, G, T) padded after the stop
    mask: Tensor  # (Q, G, T) bool: tokens up to and including the first stop
    logprobs: Tensor  # (Q, G, T) of the policy that sampled, at the sampling temperature; 0 outside the mask
    sampler_logprobs: Tensor  # (Q, G, T) of the distribution drawn from; in float32 equal unless DLC bends it
    entropies: Tensor  # (Q, G, T) of the policy that sampled, in nats; 0 outside the mask

    def pick(self, rows) -> "Rollout":
        """The groups `rows` (a slice, indices or a (Q,) bool)."""
        return Rollout(*(tensor[rows] for tensor in self))

    @property
    def padded(self) -> Padded:
        """The prompts as a policy reads them."""
        return Padded(self.prompts, self.real)

    @property
    def length(self) -> int:
        """Tokens of the longest completion. What lies behind is padding for all, and is not computed."""
        return int(self.mask.any(0).any(0).sum())


def rollout(
    policy: Policy, prompts: Padded, group_size: int, max_new_tokens: int, generator: torch.Generator,
    temperature: float = 1.0, memory: Policy | None = None, mu: float = 0.0, fixed_length: bool = False,
    stops: tuple[int, ...] = (STOP,), pad: int = PAD
) -> Rollout:  # fmt: skip
    """Draw G completions for each of the prompts (Q, P), from softmax((policy - mu * memory) / temperature).
    A completion ends with the first of the token ids `stops` (with `fixed_length` at T alone); behind it is `pad`.
    >>> g = torch.Generator().manual_seed(0)
    >>> prompts = Padded.of(torch.tensor([[3, 4, 13]]))
    >>> batch = rollout(Policy(14, g), prompts, group_size=2, max_new_tokens=5, generator=g)
    >>> batch.completions.shape, bool((batch.logprobs <= 0).all())
    (torch.Size([1, 2, 5]), True)
    """
    with torch.inference_mode():  # a tenth faster than no_grad; its tensors cannot be trained on, hence the copies
        shape, device = (len(prompts.tokens), group_size, max_new_tokens), prompts.tokens.device
        completions = torch.full(shape, pad, device=device)
        mask = torch.zeros(shape, dtype=torch.bool, device=device)
        logprobs, sampler_logprobs, entropies = torch.zeros(3, *shape, device=device)
        going = torch.ones(shape[:2], dtype=torch.bool, device=device)
        stop_ids = torch.tensor(stops, device=device)
        begin = prompts, group_size, max_new_tokens - 1
        logits, cache = policy.start(*begin)  # (Q, G, V)
        memory_logits, memory_cache = memory.start(*begin) if memory else (None, None)
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
    return Rollout(*prompts, *(x.clone() for x in (completions, mask, logprobs, sampler_logprobs, entropies)))


def token_logprobs(logits: Tensor, tokens: Tensor) -> Tensor:
    """log-probability of each token under its logits, in float32. logits (..., V), tokens (...) -> (...).
    >>> token_logprobs(torch.tensor([0.0, 0.0]), torch.tensor(1))
    tensor(-0.6931)
    """
    return logits.float().log_softmax(-1).gather(-1, tokens[..., None]).squeeze(-1)


def verify(task: Task, prompts: list[str], batch: Rollout) -> Tensor:
    """Rewards (Q, G) of a batch: what the verifier of the task says of each completion."""
    texts = batch.completions.tolist(), batch.mask.sum(-1).tolist()
    return task.rewards(prompts, *texts).to(batch.prompts.device)


# === Advantages: rewards (Q, G) -> advantages (Q, G). A group with one reward for all has advantage 0. ===


def grpo_advantages(rewards: Tensor, normalize_std: bool = True) -> Tensor:
    """GRPO: (r - mean) / std over the group (population std). Dr.GRPO (2503.20783): r - mean, normalize_std=False.
    >>> grpo_advantages(torch.tensor([[1.0, 0, 0, 0]]))
    tensor([[ 1.7320, -0.5773, -0.5773, -0.5773]])
    """
    rewards = rewards.float()
    centred = rewards - rewards.mean(-1, keepdim=True)
    centred = centred * (rewards != rewards[..., :1]).any(-1, keepdim=True)  # rounding in the mean is no signal
    return centred / (rewards.std(-1, correction=0, keepdim=True) + 1e-6) if normalize_std else centred


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
    """REINFORCE++ (2501.03262): whitened over the whole batch, no group. (Its KL, summed here, is from each token on.)
    >>> reinforce_pp_advantages(torch.tensor([[1.0, 1], [0, 0]])).flatten().round()
    tensor([ 1.,  1., -1., -1.])
    """
    return grpo_advantages(rewards.reshape(1, -1)).view_as(rewards)


def f_grpo_advantages(rewards: Tensor, gamma: float = 1.0, verified: Tensor | None = None) -> Tensor:
    """F-GRPO (2602.06717): GRPO's advantages, all of them, times (1 - |S+|/G)^gamma; |S+| is counted in `verified`.
    >>> f_grpo_advantages(torch.tensor([[1.0, 0, 0, 0]]))
    tensor([[ 1.2990, -0.4330, -0.4330, -0.4330]])
    """
    return grpo_advantages(rewards) * (1 - correct_share(rewards if verified is None else verified)) ** gamma


def unlikeliness_rewards(rewards: Tensor, sequence_logprobs: Tensor, beta: float = 0.25) -> Tensor:
    """Unlikeliness (2506.02355): r_i (1 - beta rank_i / G), rank 0 the least likely of its group.
    >>> unlikeliness_rewards(torch.tensor([[1.0, 1, 0, 1]]), torch.tensor([[-1.0, -9, -5, -3]]))
    tensor([[0.8125, 1.0000, 0.0000, 0.8750]])
    """
    rank = sequence_logprobs.argsort(dim=-1, stable=True).argsort(dim=-1)
    return rewards * (1 - beta * rank / rewards.shape[-1])


def dapo_advantages(rewards: Tensor, mask: Tensor) -> Tensor:
    """DAPO (2503.14476): GRPO's, less 1 for a completion cut at T (eq. 13 with one token of slack). mask (Q, G, T).
    >>> dapo_advantages(torch.tensor([[1.0, 1]]), torch.tensor([[[True, False], [True, True]]])).round()
    tensor([[ 1., -1.]])
    """
    return grpo_advantages(rewards - mask.all(-1).float())


def correct_share(rewards: Tensor) -> Tensor:
    """|S+| / G, the share of a group with a reward above 0: (Q, G) -> (Q, 1)."""
    return (rewards > 0).float().mean(-1, keepdim=True)


class Estimator(NamedTuple):
    """An estimator: its advantages, and how its paper turns them into a loss."""

    advantages: Callable[[Tensor, Tensor, Rollout, Update], Tensor] | None
    aggregate: Literal["sequence", "token", "constant"]
    clip_low: float = 0.2
    clip_high: float = 0.2
    needs_group: bool = True  # it compares within a group, where its advantages sum to 0
    resamples: bool = False  # flat groups are drawn again: see `wait_for_spread`
    samples: bool = True


# r: the verifier's rewards; p: the penalty to take off them (KL, P2's regime; 0 without); b: the batch; u: the dials.
ESTIMATORS = {
    "grpo": Estimator(lambda r, p, b, u: grpo_advantages(r - p), "sequence"),
    "dr_grpo": Estimator(lambda r, p, b, u: grpo_advantages(r - p, normalize_std=False), "constant"),
    "dapo": Estimator(lambda r, p, b, u: dapo_advantages(r - p, b.mask), "token", clip_high=0.28, resamples=True),
    "rloo": Estimator(lambda r, p, b, u: rloo_advantages(r - p), "token"),
    "reinforce++": Estimator(lambda r, p, b, u: reinforce_pp_advantages(r - p), "token", needs_group=False),
    "f_grpo": Estimator(lambda r, p, b, u: f_grpo_advantages(r - p, u.f_grpo_gamma, verified=r), "sequence"),
    "unlikeliness": Estimator(
        lambda r, p, b, u: grpo_advantages(unlikeliness_rewards(r, b.logprobs.sum(-1), u.unlikeliness_beta) - p),
        "sequence",
    ),
    "exact": Estimator(None, "constant", needs_group=False, samples=False),  # sums all modes: see lab/run.py
}


def resolve_update(update: Update, estimator: Estimator) -> Update:
    """The update's settings with "as the estimator's paper has it" filled in: what really runs.
    >>> resolve_update(Update(), ESTIMATORS["dapo"]).clip_high
    0.28
    """
    given = {name: getattr(update, name) for name in ("clip_low", "clip_high", "aggregate")}
    filled = {name: getattr(estimator, name) if v in (None, "estimator") else v for name, v in given.items()}
    return dataclasses.replace(update, **filled)


# === Calibrations: IAC bends the advantages, DLC bends the sampling. ===


def inverse_success_calibration(
    advantages: Tensor, rewards: Tensor, alpha: float = 1.0, divide_by_group: bool = False
) -> Tensor:
    """IAC (P1): positive advantages times (G - |S+|)^alpha, or ((G - |S+|)/G)^alpha. All tensors (Q, G).
    Rare successes pull hard, an almost solved prompt hardly pulls. A larger step, too: with G = 8 a lone success gets 7
    times its advantage, so a control with a matched learning rate belongs beside it.
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


def weigh_positive(advantages: Tensor, kappa: float) -> Tensor:
    """Ours, from the law in toy_tasks/law.py: positive advantages times kappa; infinite leaves out the negative ones.
    >>> weigh_positive(torch.tensor([1.0, -1.0]), 3.0), weigh_positive(torch.tensor([1.0, -1.0]), math.inf)
    (tensor([ 3., -1.]), tensor([1., 0.]))
    """
    return advantages.clamp(min=0) if kappa == math.inf else torch.where(advantages > 0, advantages * kappa, advantages)


def calibrated_logits(policy_logits: Tensor, memory_logits: Tensor, mu: float) -> Tensor:
    """DLC (P1): what is sampled is softmax(policy logits - mu * memory logits): what was drawn before counts less.
    >>> calibrated_logits(torch.tensor([2.0, 0.0]), torch.tensor([4.0, 0.0]), mu=0.5).softmax(-1)
    tensor([0.5000, 0.5000])
    """
    return policy_logits - mu * memory_logits


def memory_loss(logprobs: Tensor, mask: Tensor, keep: Tensor) -> Tensor:
    """The memory's cross-entropy: mean over the tokens of the kept completions. logprobs, mask (..., T), keep (...).
    >>> logprobs, mask = torch.tensor([[-1.0, -3.0], [-9.0, -9.0]]), torch.ones(2, 2, dtype=torch.bool)
    >>> memory_loss(logprobs, mask, keep=torch.tensor([True, False]))
    tensor(2.)
    """
    return -(logprobs * token_weights(mask & keep[..., None], "token")).sum()


class Bend(NamedTuple):
    """What a calibration bends: the advantages, or by a memory network the sampling, or both."""

    advantages: Callable[[Tensor, Tensor, Calibration], Tensor] | None = None  # (advantages, rewards, dials)
    memory: bool = False
    needs_group: bool = False


CALIBRATIONS = {
    "iac": Bend(lambda a, r, dials: inverse_success_calibration(a, r, dials.alpha, dials.iac_divide), needs_group=True),
    "pos": Bend(lambda a, r, dials: weigh_positive(a, dials.kappa), needs_group=True),
    "dlc": Bend(memory=True),
}


# === Loss: clipped ratio, three ways to average, KL, entropy. ===


def token_weights(mask: Tensor, aggregate: Literal["sequence", "token", "constant"] = "sequence") -> Tensor:
    """What each token of mask (..., T) weighs in the batch's mean; the same shape, 0 outside the mask.

    sequence: 1/length within each completion, then the mean over completions (GRPO). token: all tokens alike (DAPO).
    constant: 1/(N * T), T the longest possible completion (Dr.GRPO). Of the whole batch, so that parts add up to it.
    >>> token_weights(torch.tensor([[True, True], [True, False]]), "sequence")
    tensor([[0.2500, 0.2500],
            [0.5000, 0.0000]])
    """
    mask = mask.float()
    lengths = mask.sum(-1, keepdim=True)
    weights = {
        "sequence": mask / lengths.clamp(min=1) / (lengths > 0).sum().clamp(min=1),
        "token": mask / mask.sum().clamp(min=1),
        "constant": mask / mask.shape[-1] / max(lengths.numel(), 1),
    }
    return choose("aggregate", aggregate, weights)


def importance_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor, level: str = "token") -> Tensor:
    """policy / old policy, (..., T): of each token, or its geometric mean over the completion (GSPO, 2507.18071).
    >>> old, new, mask = torch.zeros(2), torch.tensor([0.2, 0.0]), torch.ones(2)
    >>> importance_ratio(new, old, mask), importance_ratio(new, old, mask, "sequence")
    (tensor([1.2214, 1.0000]), tensor([1.1052, 1.1052]))
    """
    log_ratio = (logprobs - old_logprobs).float().where(mask.bool(), 0.0)  # where, not times: 0 * inf is nan
    log_ratio = log_ratio.clamp(-20, 20)  # exp(20) is finite; beyond it there is no gradient, whatever the advantage
    if level == "sequence":
        log_ratio = (log_ratio.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)).expand_as(log_ratio)
    elif level != "token":
        raise ValueError(f"unknown ratio {level!r}; choose token or sequence")
    return log_ratio.exp()


def clipped_objective(ratio: Tensor, advantages: Tensor, clip_low: float = 0.2, clip_high: float = 0.2) -> Tensor:
    """What each token adds to PPO's objective (1707.06347). ratio (..., T), advantages (...) -> (..., T).
    >>> clipped_objective(torch.tensor([[1.5], [1.5]]), torch.tensor([1.0, -1.0])).flatten()
    tensor([ 1.2000, -1.5000])
    """
    advantage = advantages[..., None]
    return torch.minimum(ratio * advantage, ratio.clamp(1 - clip_low, 1 + clip_high) * advantage)


def policy_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor,
    clip_low: float = 0.2, clip_high: float = 0.2, aggregate: Literal["sequence", "token", "constant"] = "sequence",
    ratio: Literal["token", "sequence"] = "token"
) -> Tensor:  # fmt: skip
    """PPO's clipped loss as GRPO uses it, of a whole batch; a scalar. advantages (Q, G) or (N,), the others (N, T).
    On the first update the ratio is 1, so with advantages that sum to 0 the loss is about 0; its gradient is not.
    >>> logprobs = torch.tensor([[-1.0], [-1.0]], requires_grad=True)
    >>> loss = policy_loss(logprobs, logprobs.detach(), torch.tensor([[1.0, -1.0]]), torch.ones(2, 1))
    >>> loss.backward()
    >>> abs(loss.item()), logprobs.grad.tolist()
    (0.0, [[-0.5], [0.5]])
    """
    if advantages.numel() != mask[..., 0].numel():
        raise ValueError(f"{advantages.numel()} advantages for {len(logprobs)} completions: one for each is needed")
    r = importance_ratio(logprobs, old_logprobs, mask, ratio)
    objective = clipped_objective(r, advantages.reshape(mask.shape[:-1]), clip_low, clip_high)
    return -(token_weights(mask, aggregate) * objective).sum()


def kl_estimate(logprobs: Tensor, reference_logprobs: Tensor, kind: Literal["k1", "k2", "k3"] = "k3") -> Tensor:
    """Schulman's estimators of KL(policy || reference) from the policy's own samples, per token, in float32.

    With d = log policy - log reference: k1 = d, k2 = d^2/2, k3 = exp(-d) - 1 + d. In expectation k1 and k3 *are* the
    KL; as a loss only k2 has its gradient, k3 that of KL(reference || policy), and k1 none: it belongs in the reward.
    >>> kl_estimate(torch.tensor([0.5]), torch.tensor([0.0]), "k2")
    tensor([0.1250])
    """
    d = (logprobs.float() - reference_logprobs.float()).clamp(-60, 60)
    return choose("KL estimator", kind, {"k1": d, "k2": d**2 / 2, "k3": torch.expm1(-d) + d})


def entropy(logits: Tensor) -> Tensor:
    """Entropy in nats of softmax(logits): (..., V) -> (...).
    >>> entropy(torch.zeros(4))
    tensor(1.3863)
    """
    logprobs = logits.float().log_softmax(-1)
    return -(logprobs.exp() * logprobs).sum(-1)


# === Learner: what a step reads and changes. ===


def make_optimizer(policy: Policy, learning_rate: float) -> torch.optim.Optimizer:
    """AdamW over what can learn: all of a policy, or its adapters."""
    learning = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(learning, lr=learning_rate, weight_decay=0.0, fused=True)


def fresh_memory(vocab_size: int, dials: Calibration, seed: int, heads: int = 4) -> Policy:
    """A small untrained network for DLC: it knows nothing yet, so at first the sampler is nearly the policy."""
    return Policy(vocab_size, torch.Generator().manual_seed(seed), dials.memory_layers, dials.memory_width, heads)


class Learner:
    """One method training one policy: everything that `sampled_step` reads and changes, and nothing else.
    The policy is trained in place; all that is random comes from `seed`. Where one is needed and not given, a frozen
    copy of the policy is the `reference`, a fresh network the `memory`. `climb(rewards, batch, reference_logprobs)`
    gives another reward (Q, G) than the verifier's, such as P2's. `logged`: name -> what each step said of itself.
    """

    def __init__(
        self, task: Task, policy: Policy, estimator: str = "grpo", calibrations: tuple[str, ...] = (),
        sampling: Sampling | None = None, update: Update | None = None, dials: Calibration | None = None, seed: int = 0,
        reference: Policy | None = None, memory: Policy | None = None,
        climb: Callable[[Tensor, Rollout, Tensor], Tensor] | None = None
    ):  # fmt: skip
        self.task, self.policy, self.climb, self.seed = task, policy, climb, seed
        self.name = "+".join((estimator, *calibrations))
        self.estimator = choose("estimator", estimator, ESTIMATORS)
        self.calibrations = [choose("calibration", name, CALIBRATIONS) for name in calibrations]
        self.sampling, self.dials = checked(sampling or Sampling()), checked(dials or Calibration())
        self.update = resolve_update(checked(update or Update()), self.estimator)
        self.device = next(policy.parameters()).device
        self.generator = torch.Generator(self.device).manual_seed(seed)
        self.optimizer = make_optimizer(policy, self.update.learning_rate)
        if (self.update.beta or climb) and reference is None:
            reference = copy.deepcopy(policy).requires_grad_(False)
        self.reference, self.memory, self.memory_optimizer = reference, None, None
        if any(bend.memory for bend in self.calibrations):
            start = copy.deepcopy(policy) if self.dials.memory_start == "reference" else None
            self.memory = memory or start or fresh_memory(task.vocab_size, self.dials, seed).to(self.device)
            self.memory_optimizer = make_optimizer(self.memory, self.dials.memory_learning_rate)
        self.step = 0  # batches drawn
        self.waiting: list[dict] = []  # DAPO: groups with a spread, sampled and not yet trained on
        self.logged: dict[str, list[float]] = defaultdict(list)

    def log(self, **values: float) -> None:
        for name, value in values.items():
            self.logged[name].append(value)


# === One step. ===


def sampled_step(learner: Learner) -> None:
    """One step of GRPO with its calibrations. The numbers are those of README's seven sentences."""
    # 1. Draw prompts, and for each a group of G completions, keeping the log-probability of every token.
    # 2. With DLC, draw them from softmax(policy logits - mu * memory logits), so that what was drawn often comes less.
    prompts, batch = draw(learner)
    # 3. Let the verifier give each completion a reward: 1 if it is right, else 0. The memory learns what was right.
    rewards = verify(learner.task, prompts, batch)  # (Q, G)
    log_batch(learner, rewards, batch)
    train_memory(learner, batch, rewards)
    if learner.estimator.resamples:
        batch, rewards = wait_for_spread(learner, batch, rewards)
        if batch is None:
            return
    # 4. Turn rewards into advantages inside each group: what counts is being better than one's siblings.
    penalty, reference_logprobs = penalise(learner, batch, rewards)
    advantages = learner.estimator.advantages(rewards, penalty, batch, learner.update)  # (Q, G)
    # 5. With IAC, multiply the positive advantages of a group by its number of failures, (G - |S+|)^alpha.
    for bend in (calibration.advantages for calibration in learner.calibrations if calibration.advantages):
        advantages = bend(advantages, rewards, learner.dials)
    # 6. Raise the log-probability of each token by its completion's advantage, through a clipped ratio to what it was.
    batch, advantages = apply_importance(batch, advantages, learner.dials.importance)
    update_policy(learner, batch, advantages, reference_logprobs)
    # 7. Repeat; and beside it, never in it, sum the exact probability of every listed correct answer (lab/run.py).


def draw(learner: Learner) -> tuple[list[str], Rollout]:
    """The prompts of a batch, and G completions of each from the policy or, with a memory, from DLC's sampler."""
    learner.step += 1
    task, sampling, device = learner.task, learner.sampling, learner.device
    order = torch.randperm(len(task.train), generator=learner.generator, device=device).tolist()
    prompts = [task.train[i] for i in order[: sampling.prompts]]
    batch = rollout(
        learner.policy, task.encode_prompts(prompts).to(device), sampling.group_size, task.max_new_tokens,
        learner.generator, sampling.temperature, learner.memory, learner.dials.mu, sampling.fixed_length,
        task.stops, task.pad,
    )  # fmt: skip
    if next(learner.policy.parameters()).dtype == torch.float32:
        return prompts, batch
    # In half precision drawing and scoring round apart, so the old log-probabilities are scored anew, too.
    old = score(learner.policy, batch, sampling.temperature, learner.update.micro_batches)
    return prompts, batch._replace(logprobs=old)


def wait_for_spread(learner: Learner, batch: Rollout, rewards: Tensor) -> tuple[Rollout | None, Tensor]:
    """DAPO's dynamic sampling: hold groups until a batch of them has right *and* wrong answers; else (None, rewards).
    The policy does not move meanwhile, so what waits stays on-policy; groups left over when it does move are dropped.
    """
    needed, share = len(rewards), correct_share(rewards)[:, 0]
    mixed = (share > 0) & (share < 1)  # (Q,)
    if mixed.any():
        learner.waiting.append({"batch": batch.pick(mixed)._asdict(), "rewards": rewards[mixed]})
    if sum(len(held["rewards"]) for held in learner.waiting) < needed:
        return None, rewards
    held, learner.waiting = learner.waiting, []
    width = max(h["batch"]["prompts"].shape[1] for h in held)
    for h in held:  # prompts of different batches to one width; False is 0, so one padding serves tokens and mask
        for name in ("prompts", "real"):
            h["batch"][name] = F.pad(h["batch"][name], (width - h["batch"][name].shape[1], 0))
    joined = Rollout(*(torch.cat([h["batch"][name] for h in held])[:needed] for name in Rollout._fields))
    return joined, torch.cat([h["rewards"] for h in held])[:needed]


def apply_importance(batch: Rollout, advantages: Tensor, kind: str) -> tuple[Rollout, Tensor]:
    """What the update makes of DLC's sampler not being the policy: see Calibration.importance. advantages (Q, G)."""
    if kind == "exact":
        return batch, advantages * (batch.logprobs - batch.sampler_logprobs).sum(-1).clamp(max=20).exp()
    return (batch._replace(logprobs=batch.sampler_logprobs) if kind == "clipped" else batch), advantages


@torch.no_grad()
def score(policy: Policy, batch: Rollout, temperature: float = 1.0, parts: int = 1) -> Tensor:
    """log-probabilities (Q, G, T) of a batch under any policy, in `parts` passes; 0 outside the mask."""
    scored = torch.zeros_like(batch.logprobs)  # (Q, G, T)
    for rows in torch.arange(len(batch.prompts), device=batch.prompts.device).chunk(parts):
        completions = batch.completions[rows, :, : batch.length]  # (Q, G, T)
        logits = policy.completion_logits(batch.padded.pick(rows), completions) / temperature  # (Q, G, T, V)
        scored[rows, :, : batch.length] = token_logprobs(logits, completions)
    return scored.where(batch.mask, 0.0)


def penalise(learner: Learner, batch: Rollout, rewards: Tensor) -> tuple[Tensor, Tensor | None]:
    """What to take off the verifier's rewards, (Q, G), and the reference's log-probabilities (Q, G, T), or None."""
    u, penalty = learner.update, torch.zeros_like(rewards)
    if not (u.beta or learner.climb):
        return penalty, None
    reference = score(learner.reference, batch, learner.sampling.temperature, u.micro_batches)  # (Q, G, T)
    if u.beta:
        kl = kl_estimate(batch.logprobs, reference, u.kl_kind) * batch.mask  # (Q, G, T)
        learner.log(kl=(kl.sum() / batch.mask.sum()).item())
        penalty = u.beta * kl.sum(-1) * (u.kl_in == "reward")
    if learner.climb:
        penalty = penalty + (rewards - learner.climb(rewards, batch, reference))
    return penalty, reference


def update_policy(learner: Learner, batch: Rollout, advantages: Tensor, reference_logprobs: Tensor | None) -> None:
    """`epochs` optimiser steps on one batch, the gradient of each summed over micro-batches."""
    u = learner.update
    weights = token_weights(batch.mask, u.aggregate)  # (Q, G, T)
    teaching = teaching_groups(advantages, bool(u.entropy_bonus or (u.beta and u.kl_in == "loss")))
    for epoch in range(u.epochs):
        learner.optimizer.zero_grad()
        logged = []
        for part in teaching.chunk(u.micro_batches):
            reference = None if reference_logprobs is None else reference_logprobs[part]
            loss, log = batch_loss(learner, batch.pick(part), advantages[part], weights[part], reference)
            loss.backward()
            logged.append(log)
        loss, clipped = sum(log["loss"] for log in logged), sum(log["clipped"] for log in logged)
        take_step(learner, loss=loss, clip_fraction=clipped / batch.mask.sum().item())
        if epoch == 0:
            learner.log(first_ratio=max(log["first_ratio"] for log in logged))


def teaching_groups(advantages: Tensor, all_teach: bool) -> Tensor:
    """Indices of the groups that can move the policy: advantages (Q, G) that are not all 0, or every group.
    The others' gradient is 0, so they are left out; one stays where there is no other, as Adam's momentum moves on.
    >>> teaching_groups(torch.tensor([[0.0, 0.0], [1.0, -1.0]]), all_teach=False)
    tensor([1])
    """
    moves = advantages.ne(0).any(-1) | all_teach  # (Q,)
    return moves.nonzero()[:, 0] if moves.any() else moves.nonzero().new_zeros(1)


def take_step(learner: Learner, **logged: float) -> None:
    """Clip the gradient, step, log. Raises UserError where the gradient is not finite, before the policy moves."""
    norm = nn.utils.clip_grad_norm_(learner.policy.parameters(), learner.update.max_grad_norm).item()
    if not math.isfinite(norm):
        where = f"{learner.name} seed {learner.seed}, step {learner.step}"
        raise UserError(f"the gradient is {norm} ({where}); take a smaller --learning-rate")
    learner.optimizer.step()
    learner.log(grad_norm=norm, **logged)


def batch_loss(
    learner: Learner, batch: Rollout, advantages: Tensor, weights: Tensor, reference: Tensor | None
) -> tuple[Tensor, dict[str, float]]:
    """Loss of one micro-batch, and its log; advantages (Q, G), the others (Q, G, T), weights as in the whole batch."""
    u, T = learner.update, batch.length
    completions, mask, old, weights = (x[..., :T] for x in (batch.completions, batch.mask, batch.logprobs, weights))
    logits = learner.policy.completion_logits(batch.padded, completions) / learner.sampling.temperature  # (Q, G, T, V)
    logprobs = token_logprobs(logits, completions)  # (Q, G, T)
    ratio = importance_ratio(logprobs, old, mask, u.ratio)
    objective = clipped_objective(ratio, advantages, u.clip_low, u.clip_high)
    loss = -(weights * objective).sum()
    if u.entropy_bonus:
        loss = loss - u.entropy_bonus * (weights * entropy(logits)).sum()
    if u.beta and u.kl_in == "loss":
        loss = loss + u.beta * (weights * kl_estimate(logprobs, reference[..., :T], u.kl_kind)).sum()
    clipped = (objective < ratio * advantages[..., None]) & mask  # where the clip takes the gradient
    off = ((ratio - 1).abs() * mask).max()
    return loss, {"loss": loss.item(), "clipped": clipped.sum().item(), "first_ratio": off.item()}


def train_memory(learner: Learner, batch: Rollout, rewards: Tensor) -> None:
    """One cross-entropy step of the memory network on what was drawn: the correct completions, or all."""
    keep = (rewards > 0) | (learner.dials.memory_data == "all")  # (Q, G)
    if learner.memory is None or not keep.any():
        return
    batch, keep = batch.pick(keep.any(-1)), keep[keep.any(-1)]  # a group without any is not computed
    T, kept_tokens = batch.length, (batch.mask & keep[..., None]).sum((1, 2))  # (Q,)
    learner.memory_optimizer.zero_grad()
    total = 0.0
    for part in torch.arange(len(keep), device=keep.device).chunk(learner.update.micro_batches):
        completions, mask = batch.completions[part, :, :T], batch.mask[part, :, :T]  # (Q, G, T)
        logprobs = token_logprobs(learner.memory.completion_logits(batch.padded.pick(part), completions), completions)
        loss = memory_loss(logprobs, mask, keep[part])
        loss = loss * (kept_tokens[part].sum() / kept_tokens.sum())  # the parts' means add up to that of the batch
        loss.backward()
        total += loss.item()
    learner.memory_optimizer.step()
    learner.log(memory_loss=total)


def log_batch(learner: Learner, rewards: Tensor, batch: Rollout) -> None:
    """Log what a batch says before anything is learned from it."""
    flat = (rewards == rewards[:, :1]).all(1).float().mean()
    is_stop = torch.isin(batch.completions, torch.tensor(learner.task.stops, device=rewards.device))
    stopped = (is_stop & batch.mask).any(-1).float().mean()
    learner.log(reward=rewards.mean().item(), flat_groups=flat.item(), cut_answers=1 - stopped.item())
    tokens = batch.mask.sum()
    learner.log(length=(tokens / rewards.numel()).item(), entropy=(batch.entropies.sum() / tokens).item())


__all__ = [name for name, thing in globals().items() if getattr(thing, "__module__", None) == __name__]
__all__ += ["finite_batch_optimum", "pass_at_k", "sharpening_reward"]  # part of the public names, made in toy_tasks

if __name__ in ("__main__", "__mp_main__") and vars(sys.modules[__name__]) is globals():  # the second: in a worker
    sys.modules["minirlvr"] = sys.modules[__name__]  # one module, whoever imports it (not where a profiler is main)
if __name__ == "__main__":
    from lab.command_line import main  # reads the flags, trains the runs side by side and writes the folder

    sys.exit(main())
