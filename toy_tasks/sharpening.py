"""P2's rewards, and what each aims at, exactly: the best distribution over the completions of a reference.

P2 (arXiv 2604.16259) gives one objective and four regimes. With l_ref and l the summed log-probabilities of a
completion under the reference and the policy, r its reward and b = 1 / beta, a completion is worth

    task     r                                        best: anything on what is right
    sharpen  alpha l_ref                              best: the single most likely completion
    temper   (alpha - 1) l_ref + l_ref - l            best: pi_ref^alpha / Z
    tilt     r + ((alpha - 1) l_ref + l_ref - l) / b  best: pi_ref^alpha exp(b r) / Z

No policy is trained here. `sharpening_reward` is the table's middle column. Its right one, a target, is arithmetic on
the outcomes of an `exact.Tree` of the reference: what the tree left out is missing from the target too, and
`missing_share` bounds it. For alpha < 1 that is often nearly all: there `sampled_temper_summary` estimates the target
with an error instead.

Axes: Q prompts, O outcomes of all prompts together; `owner` (O,) holds the prompt index of each, as `Tree.owner` does.
Log-probabilities are natural, lengths are tokens with the stop. Everything is float64.
"""

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from toy_tasks.exact import ExactPolicy, device_of, followed_by
from toy_tasks.task import PAD, STOP, Task

REGIMES = ("task", "sharpen", "temper", "tilt")
Normalize = Literal["sum", "mean", "weighted"]


# --- sums over the outcomes of each prompt --------------------------------------------------------------------------


def _sum(values: Tensor, owner: Tensor) -> Tensor:
    """(O,) -> (Q,)."""
    return values.new_zeros(int(owner.max()) + 1).index_add(0, owner, values)


def _max(values: Tensor, owner: Tensor) -> Tensor:
    """(O,) -> (Q,)."""
    return values.new_full((int(owner.max()) + 1,), -math.inf).scatter_reduce(0, owner, values, "amax")


def _log_sum_exp(log_values: Tensor, owner: Tensor) -> Tensor:
    """(O,) -> (Q,)."""
    top = _max(log_values, owner)
    return top + _sum((log_values - top[owner]).exp(), owner).log()


def _check(regime: str, alpha: float, beta_inverse: float) -> None:
    if regime not in REGIMES:
        raise ValueError(f"unknown regime {regime!r}; choose one of {', '.join(REGIMES)}")
    if not 0 <= alpha < math.inf or (regime == "sharpen" and alpha == 0):
        raise ValueError(f"alpha is {alpha!r}: it must be finite and not below 0, and above 0 for sharpen")
    if not 0 <= beta_inverse < math.inf:
        raise ValueError(f"beta_inverse is {beta_inverse!r}: it must be finite and not below 0; its limit is task")


def _likelihood(
    log_probs: Tensor | float, lengths: Tensor | float | None, normalize: Normalize, length_power: float
) -> Tensor | float:
    """The reference's summed log-probability as alpha multiplies it: a sum, per token or per token^length_power."""
    powers = {"sum": 0.0, "mean": 1.0, "weighted": length_power}
    if normalize not in powers:
        raise ValueError(f"unknown normalize {normalize!r}; choose one of {', '.join(powers)}")
    if normalize == "sum":
        return log_probs
    if lengths is None:
        raise ValueError(f"normalize {normalize!r} divides by a power of the lengths: give them")
    if not length_power >= 0:
        raise ValueError(f"length_power is {length_power!r}: it must not be below 0 (sum); 1 is mean")
    return log_probs / lengths ** powers[normalize]


def _target_likelihood(log_probs, lengths, normalize: Normalize, length_power: float) -> Tensor | float:
    """The same for targets, whose bounds hold between sum and mean only."""
    if not 0 <= length_power <= 1:
        raise ValueError(f"length_power is {length_power!r}: it must be from 0 (sum) to 1 (mean)")
    return _likelihood(log_probs, lengths, normalize, length_power)


# --- the reward that a policy climbs --------------------------------------------------------------------------------


def sharpening_reward(
    regime: str,
    rewards: Tensor,
    logprobs: Tensor,
    reference_logprobs: Tensor,
    lengths: Tensor,
    alpha: float = 1.0,
    beta_inverse: float = 0.0,
    normalize: Normalize = "sum",
    length_power: float = 0.5,
) -> Tensor:
    """P2's reward of each completion, (Q, G): what climbing it on average ends in is `target_log_probs`.

    rewards (bool or float), logprobs and reference_logprobs (l and l_ref, *summed* over a completion's tokens) and
    lengths (tokens) are (Q, G). l is detached. Only the l_ref that alpha multiplies is normalised: "mean" divides it
    by the length, "weighted" by length^length_power. Raises ValueError for an unknown regime or normalisation, alpha or
    length_power out of range, and, with tilt, beta_inverse <= 0.

    >>> r, l = torch.tensor([[1.0, 0.0]]), torch.tensor([[-4.0, -2.0]])
    >>> sharpening_reward("tilt", r, l, l, torch.tensor([[4, 2]]), alpha=2.0, beta_inverse=2.0)
    tensor([[-1., -1.]])
    """
    _check(regime, alpha, beta_inverse)
    if regime == "task":
        return rewards.float()
    likelihood = _likelihood(reference_logprobs, lengths.clamp(min=1), normalize, length_power)
    if regime == "sharpen":
        return alpha * likelihood
    temper = (alpha - 1) * likelihood + reference_logprobs - logprobs.detach()
    if regime == "temper":
        return temper
    if not beta_inverse > 0:
        raise ValueError(f"beta_inverse is {beta_inverse}: tilt divides by it, so it must be above 0")
    return rewards + temper / beta_inverse


# --- targets --------------------------------------------------------------------------------------------------------


def condition(log_probs: Tensor, owner: Tensor, keep: Tensor | None = None) -> Tensor:
    """log-probabilities (O,) given that the outcome is one of `keep` (O,) bool (all unless given), for each prompt.

    A prompt of which nothing is kept becomes NaN.

    >>> half = torch.tensor([0.5, 0.25, 0.25]).double()
    >>> condition(half.log(), torch.tensor([0, 0, 0]), torch.tensor([False, True, True])).exp()
    tensor([0.0000, 0.5000, 0.5000], dtype=torch.float64)
    """
    log_probs = log_probs.double()
    kept = log_probs if keep is None else log_probs.masked_fill(~keep, -math.inf)
    return kept - _log_sum_exp(kept, owner)[owner]


def target_log_probs(
    regime: str,
    reference_log_probs: Tensor,
    rewards: Tensor,
    owner: Tensor,
    alpha: float = 1.0,
    beta_inverse: float = 0.0,
    lengths: Tensor | None = None,
    normalize: Normalize = "sum",
    length_power: float = 0.5,
) -> Tensor:
    """log of the distribution (O,) that a regime's reward is best served by; it sums to 1 for each prompt.

    reference_log_probs, rewards (bool or float), owner, lengths: (O,). `normalize` is for the l_ref that alpha
    multiplies: the sum, the mean (divided by the length T) or weighted (by T^length_power); the l_ref beside -l stays
    a sum, so that temper is pi_ref exp((alpha - 1) l_ref / T^w) / Z. alpha = 1 with tilt is ordinary KL-regularised RL.

    Two regimes have no entropy term and need a choice (ours): of all that is best, the reference's own shares. For
    `task` *any* policy on the best-rewarded completions is optimal; this one is the limit of tilt with alpha = 1 for
    b to infinity (and stays at the reference where all rewards are equal). For `sharpen` it is the single most likely
    completion, ties shared.

    Source: P2's rewards; the optima are derived here. Raises ValueError for an unknown regime or normalisation, a
    missing `lengths`, alpha or beta_inverse below 0 or not finite, alpha = 0 for sharpen.

    >>> reference = torch.tensor([0.6, 0.3, 0.1]).double().log()
    >>> rewards, owner = torch.tensor([0.0, 1.0, 1.0]), torch.tensor([0, 0, 0])
    >>> for regime in REGIMES:
    ...     target = target_log_probs(regime, reference, rewards, owner, alpha=2.0, beta_inverse=math.log(4))
    ...     print(regime, [round(p, 3) for p in target.exp().tolist()])
    task [0.0, 0.75, 0.25]
    sharpen [1.0, 0.0, 0.0]
    temper [0.783, 0.196, 0.022]
    tilt [0.474, 0.474, 0.053]
    """
    _check(regime, alpha, beta_inverse)
    reference, rewards = reference_log_probs.double(), rewards.double()
    likelihood = _target_likelihood(reference, lengths, normalize, length_power)
    if regime in ("task", "sharpen"):
        worth = rewards if regime == "task" else likelihood
        return condition(reference, owner, keep=worth == _max(worth, owner)[owner])
    bonus = beta_inverse * rewards if regime == "tilt" else 0.0
    power = (alpha - 1) * likelihood if alpha != 1 else 0.0  # 0 * -inf is nan
    return condition(reference + power + bonus, owner)


def count_strings(vocab_size: int, max_length: int) -> int:
    """How many completions there are: ended ones of 1..max_length tokens with their stop, and those that were cut.

    >>> count_strings(vocab_size=3, max_length=2)  # ".", "a.", "b.", and "aa", "ab", "ba", "bb"
    7
    """
    return sum((vocab_size - 1) ** t for t in range(max_length + 1))


def missing_share(
    regime: str,
    reference_log_probs: Tensor,
    rewards: Tensor,
    owner: Tensor,
    left_out: Tensor,
    min_mass: float,
    vocab_size: int,
    max_length: int,
    alpha: float = 1.0,
    beta_inverse: float = 0.0,
    lengths: Tensor | None = None,
    normalize: Normalize = "sum",
    length_power: float = 0.5,
) -> Tensor:
    """A bound (Q,) on the share of the true target that lies on completions which pruning left out of the tree.

    With e this bound, the true target differs from `target_log_probs` by at most e in total variation, and so does the
    accuracy of any target. left_out (Q,) is the reference's mass outside the tree, `min_mass` what it was pruned at, so
    every pruned completion has p < min_mass; rewards are taken to lie in [0, 1]. Against the kept weight Z stands

        alpha >= 1   the sum of p exp((alpha - 1) l / T^w) <= left_out exp((alpha - 1) log(min_mass) / max_length^w),
                     which is left_out min_mass^(alpha - 1) for the summed likelihood;
        alpha < 1    the sum of p^alpha <= N^(1 - alpha) left_out^alpha (Hoelder), N = `count_strings`. Often useless,
                     and not by accident: alpha < 1 lives on the many unlikely strings, and only the cap keeps them few.

    each times exp(b) for tilt. task: left_out against what is right in the tree, 1 where nothing is. sharpen: 0 where
    no pruned completion can beat the best of the tree, else 1. Derived here. Raises as `target_log_probs` does.

    >>> kept, owner = torch.tensor([0.6, 0.3]).double(), torch.tensor([0, 0])
    >>> share = missing_share("temper", kept.log(), kept * 0, owner, torch.tensor([0.1]), 0.06, 5, 3, alpha=2.0)
    >>> round(share.item(), 4)  # .1 * .06 against .6^2 + .3^2
    0.0132
    """
    _check(regime, alpha, beta_inverse)
    reference, rewards, left_out = reference_log_probs.double(), rewards.double(), left_out.double().clamp(min=0)
    likelihood = _target_likelihood(reference, lengths, normalize, length_power)
    most = _target_likelihood(
        math.log(min_mass), float(max_length), normalize, length_power
    )  # no pruned likelihood is above
    if regime == "sharpen":
        return (_max(likelihood, owner) < most).double() * (left_out > 0)
    if regime == "task":
        best = _max(rewards, owner)
        kept = _sum(reference.exp() * (rewards == best[owner]), owner)
        return torch.where((best < 1) & (left_out > 0), 1.0, left_out / (kept + left_out))
    if alpha >= 1:
        pruned = left_out * math.exp((alpha - 1) * most)
    else:
        pruned = count_strings(vocab_size, max_length) ** (1 - alpha) * left_out**alpha
    bonus = beta_inverse * rewards if regime == "tilt" else torch.zeros_like(rewards)
    pruned = pruned * (math.exp(beta_inverse) if regime == "tilt" else 1.0)
    kept = _log_sum_exp(reference + (alpha - 1) * likelihood + bonus, owner).exp()
    return pruned / (kept + pruned)


# --- what a distribution over outcomes is like ----------------------------------------------------------------------


def target_summary(log_probs: Tensor, rewards: Tensor, lengths: Tensor, owner: Tensor) -> dict[str, Tensor]:
    """Accuracy (mean reward), mean length (tokens, with the stop) and entropy (nats) of each prompt: name -> (Q,).

    For a target, for the reference or for a trained policy: log_probs, rewards, lengths, owner (O,). Probability that
    is not on these outcomes is left aside (the rest counts as 1).

    >>> two = torch.tensor([0.5, 0.5]).double().log()
    >>> summary = target_summary(two, torch.tensor([True, False]), torch.tensor([8, 3]), torch.tensor([0, 0]))
    >>> {name: round(value.item(), 3) for name, value in summary.items()}
    {'accuracy': 0.5, 'length': 5.5, 'entropy': 0.693}
    """
    log_probs = condition(log_probs, owner)
    probs = log_probs.exp()
    return {
        "accuracy": _sum(probs * rewards, owner),
        "length": _sum(probs * lengths, owner),
        "entropy": -_sum(torch.xlogy(probs, probs), owner),
    }


@torch.no_grad()
def sampled_temper_summary(
    policy: ExactPolicy,
    task: Task,
    prompts: Sequence[str],
    alpha: float,
    samples: int = 256,
    seed: int = 0,
) -> dict[str, Tensor]:
    """`target_summary` of temper, estimated without a tree, for alpha < 1, where pruning hides what matters.

    Completions are drawn with every token at temperature 1 / alpha and weighted by the product over their tokens of
    sum_v p(v | prefix)^alpha, which turns that distribution into pi_ref^alpha / Z under the cap `max_new_tokens`: name
    -> (Q,). Beside accuracy, length and entropy there are `error`, the standard error of the accuracy, and
    `effective_samples`, 1 / sum w^2. Self-normalised importance sampling, so biased by order 1 / samples; derived here.
    Raises ValueError for alpha <= 0 or not finite and for samples < 2.

    >>> from toy_tasks import Sums
    >>> even = lambda texts: torch.zeros(*texts.tokens.shape, 14)
    >>> summary = sampled_temper_summary(even, Sums(), ["12="], alpha=1.0, samples=8)
    >>> round(summary["effective_samples"].item(), 6)  # nothing to correct
    8.0
    """
    if not 0 < alpha < math.inf or samples < 2:
        raise ValueError(f"needs 0 < alpha < infinity and samples >= 2, got alpha = {alpha!r}, samples = {samples!r}")
    generator, shape = torch.Generator().manual_seed(seed), (len(prompts), samples)
    rows = torch.arange(len(prompts)).repeat_interleave(samples)  # (N,)
    texts = task.encode_prompts(prompts).pick(rows)  # (N, P)
    going, (log_weights, log_probs, lengths) = torch.ones(len(rows)).bool(), torch.zeros(3, len(rows)).double()
    for _ in range(task.max_new_tokens):
        logits = policy(texts.to(device_of(policy)))[:, -1].log_softmax(-1).cpu().double()  # (N, V)
        drawn = torch.multinomial((alpha * logits).softmax(-1), 1, generator=generator)  # (N, 1)
        log_weights += going * (alpha * logits).logsumexp(-1)
        log_probs += going * logits.gather(-1, drawn)[:, 0]
        lengths += going
        texts = followed_by(texts, drawn.masked_fill(~going[:, None], PAD))
        going &= drawn[:, 0] != STOP
    said = [task.decode(ids) for ids in texts.tokens[:, -task.max_new_tokens :].tolist()]
    rewards = (
        torch.tensor([task.verify(prompts[i // samples], text) for i, text in enumerate(said)]).double().view(shape)
    )
    log_weights = log_weights.view(shape)
    weights, log_z = log_weights.softmax(1), log_weights.logsumexp(1) - math.log(samples)
    accuracy = (weights * rewards).sum(1)
    return {
        "accuracy": accuracy,
        "length": (weights * lengths.view(shape)).sum(1),
        "entropy": log_z - alpha * (weights * log_probs.view(shape)).sum(1),
        "error": (weights * (rewards - accuracy[:, None])).square().sum(1).sqrt(),
        "effective_samples": 1 / weights.square().sum(1),
    }


def total_variation(log_probs: Tensor, other_log_probs: Tensor, owner: Tensor) -> Tensor:
    """Half the summed differences of two distributions, per prompt: (Q,) in [0, 1]. Arguments (O,).

    What either has outside these outcomes counts as a difference: exact where one of the two, such as a target, has
    nothing there, else an upper bound.

    >>> policy, target = torch.tensor([0.5, 0.4]).log(), torch.tensor([1.0, 0.0]).log()
    >>> round(total_variation(policy, target, torch.tensor([0, 0])).item(), 4)
    0.5
    """
    one, other = log_probs.double().exp(), other_log_probs.double().exp()
    outside = (1 - _sum(one, owner)).clamp(min=0) + (1 - _sum(other, owner)).clamp(min=0)
    return (_sum((one - other).abs(), owner) + outside) / 2


def kl(log_probs: Tensor, other_log_probs: Tensor, owner: Tensor) -> Tensor:
    """KL(one || other) per prompt, in nats, both conditioned on these outcomes: (Q,). Arguments (O,).

    Infinite where the other is 0 and the one is not, as a `task` or `sharpen` target is to any softmax policy; ask for
    KL(target || policy) there. For temper, KL(policy || target) is what the objective lacks to its maximum; for tilt,
    b times that.

    >>> one, other = torch.tensor([0.5, 0.5]).log(), torch.tensor([0.9, 0.1]).log()
    >>> round(kl(one, other, torch.tensor([0, 0])).item(), 4)
    0.5108
    """
    one, other = condition(log_probs, owner), condition(other_log_probs, owner)
    return _sum(torch.where(one > -math.inf, one.exp() * (one - other), 0.0), owner)


def covariance_identity(
    reference_log_probs: Tensor, rewards: Tensor, owner: Tensor, alpha: float = 1.0, step: float = 1e-5
) -> tuple[Tensor, Tensor]:
    """Both sides of d/d alpha E[r] = Cov(r, l_ref), E and Cov under pi_ref^alpha / Z: (derivative, covariance), (Q,).

    Sharpening a little helps exactly where likelihood and correctness go together. The derivative is a central
    finite difference of width `step`, its error of order step^2; covariance in nats. reference_log_probs, rewards,
    owner: (O,). Derived here (papers.md, P2). Raises ValueError unless 0 < step <= alpha < infinity.

    >>> reference = torch.tensor([0.6, 0.3, 0.1]).double().log()
    >>> sides = covariance_identity(reference, torch.tensor([0.0, 1.0, 1.0]), torch.tensor([0, 0, 0]))
    >>> [round(side.item(), 6) for side in sides]  # what is right is unlikely here
    [-0.232272, -0.232272]
    """
    if not 0 < step <= alpha < math.inf:
        raise ValueError(f"needs 0 < step <= alpha < infinity, got step = {step!r}, alpha = {alpha!r}")
    reference, rewards = reference_log_probs.double(), rewards.double()

    def mean(values: Tensor, at: float) -> Tensor:
        return _sum(condition(at * reference, owner).exp() * values, owner)

    derivative = (mean(rewards, alpha + step) - mean(rewards, alpha - step)) / (2 * step)
    centred = reference - mean(reference, alpha)[owner]
    return derivative, mean(rewards * centred, alpha)


# --- the stop process: length alone ---------------------------------------------------------------------------------


def _check_process(vocab: int, stop: float, alpha: float, max_length: int | None) -> None:
    if vocab < 1 or not 0 < stop < 1 or not 0 <= alpha < math.inf or (max_length is not None and max_length < 0):
        raise ValueError(
            "needs vocab >= 1, 0 < stop < 1, 0 <= alpha < infinity and max_length >= 0 or None, got "
            f"vocab = {vocab!r}, stop = {stop!r}, alpha = {alpha!r}, max_length = {max_length!r}"
        )


def geometric_length(vocab: int, stop: float, alpha: float, max_length: int | None = None) -> float:
    """Mean length of p^alpha / Z where p, at each step, stops with chance `stop` or says one of `vocab` like tokens.

    In tokens, *without* the stop. There are V^n texts of n tokens, each with probability stop ((1 - stop) / V)^n, so
    their length is geometric with the ratio rho = V^(1 - alpha) (1 - stop)^alpha and the mean rho / (1 - rho): raising
    alpha shortens, and for alpha > 1 the more so the larger the vocabulary. With `max_length` a text of that many
    tokens ends without a stop, as `Tree` cuts it: the weights are stop^alpha rho^n, and rho^n for the longest.
    P2's bias to short completions; the closed form is derived here (papers.md).

    Raises ValueError where rho >= 1 and nothing caps the length: p^alpha has no finite sum.

    >>> [round(geometric_length(4, 0.1, alpha), 2) for alpha in (1, 1.25, 2, 4)]
    [9.0, 1.63, 0.25, 0.01]
    >>> round(geometric_length(4, 0.1, 0.5, max_length=20), 1)
    19.4
    """
    _check_process(vocab, stop, alpha, max_length)
    log_ratio = (1 - alpha) * math.log(vocab) + alpha * math.log1p(-stop)
    if max_length is None:
        if log_ratio >= 0:
            raise ValueError(f"alpha = {alpha!r}: p^alpha cannot be normalised over all lengths; give max_length")
        return math.exp(log_ratio) / -math.expm1(log_ratio)
    logs = torch.arange(max_length + 1, dtype=torch.float64) * log_ratio
    logs[:-1] += alpha * math.log(stop)
    return float(logs.softmax(0) @ torch.arange(max_length + 1, dtype=torch.float64))


def geometric_length_temperature(vocab: int, stop: float, alpha: float, max_length: int | None = None) -> float:
    """Mean length, in tokens without the stop, if each *token* of the same process is drawn at temperature 1 / alpha.

    The stop's chance becomes stop^alpha / (stop^alpha + V ((1 - stop) / V)^alpha): a stop that is less likely than a
    token is drawn still less often, so length moves the other way than under `geometric_length`. With `max_length` m
    and s that chance it is the sum of (1 - s)^n over n = 1..m. Derived here (papers.md). Raises ValueError for numbers
    out of range.

    >>> [round(geometric_length_temperature(4, 0.1, alpha), 1) for alpha in (1, 1.25, 2, 4)]
    [9.0, 11.0, 20.2, 102.5]
    """
    _check_process(vocab, stop, alpha, max_length)
    log_mean = (1 - alpha) * math.log(vocab) + alpha * (math.log1p(-stop) - math.log(stop))  # of (1 - s) / s
    log_mean = torch.tensor(log_mean, dtype=torch.float64)
    if max_length is None:
        return float(log_mean.exp())
    at_least = torch.arange(1, max_length + 1) * torch.nn.functional.logsigmoid(log_mean)  # n log(1 - s)
    return float(at_least.exp().sum())
