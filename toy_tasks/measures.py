"""What can be said about a policy from the probabilities of its correct answers. Arithmetic only: no policy, no torch.

Axes: M correct modes of one prompt (rows padded with zeros), "..." any batch in front, A distinct answers of a vote.
A mode's probability is absolute: the M of one prompt sum to P, the probability of being right, at most 1.
With q_m = probability of mode m / P, its share.

Every measure has bounds, given in its docstring, and every ill-formed input is a ValueError.
"""

import math
import operator
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

SLACK = 1e-6  # how far rounding may carry a sum of probabilities above 1

MOST_VOTES = 256  # the exact vote takes a time that grows with k^3, and probabilities that underflow far above this

# --- input checks ---------------------------------------------------------------------------------------------------


def _whole(name: str, value: int, least: int) -> int:
    """`value` as an int of at least `least`."""
    try:
        number = operator.index(value)
    except TypeError:
        raise ValueError(f"{name} must be a whole number, got {value!r}") from None
    if number < least:
        raise ValueError(f"{name} must be at least {least}, got {number}")
    return number


def _probabilities(name: str, values: ArrayLike) -> np.ndarray:
    """`values` as float64, each in [0, 1]; rounding above 1 is cut off."""
    array = np.asarray(values, dtype=np.float64)
    wrong = array[~((array >= 0) & (array <= 1 + SLACK))]  # written so that NaN counts as wrong
    if wrong.size:
        raise ValueError(f"{name} must hold probabilities in [0, 1] and no NaN, got {wrong[0]}")
    return np.minimum(array, 1.0)


def _modes(name: str, values: ArrayLike) -> np.ndarray:
    """`values` (..., M) as float64 probabilities whose sum over M is at most 1."""
    array = _probabilities(name, values)
    if array.ndim == 0:
        raise ValueError(f"{name} needs an axis of modes, got a single number")
    if np.any(array.sum(-1) > 1 + SLACK):
        raise ValueError(f"{name} sums to {array.sum(-1).max()} over its modes, more than 1")
    return array


def _modes_pair(mode_probs: ArrayLike, reference_probs: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    """Both as (..., M) with the same M; leading axes broadcast."""
    now, before = _modes("mode_probs", mode_probs), _modes("reference_probs", reference_probs)
    if now.shape[-1] != before.shape[-1]:
        raise ValueError(f"mode_probs has {now.shape[-1]} modes, reference_probs has {before.shape[-1]}")
    return tuple(np.broadcast_arrays(now, before))


def _ratio(above: np.ndarray, below: np.ndarray, otherwise: float) -> np.ndarray:
    """above / below, and `otherwise` where below is 0."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(below > 0, above / below, otherwise)[()]


# --- right at least once --------------------------------------------------------------------------------------------


def pass_at_k(n: int, c: int, k: int) -> float:
    """Unbiased estimate of the chance that k answers hold a right one, from n answers of which c are right.

    1 - C(n-c, k) / C(n, k), in exact integers (Chen et al., 2107.03374). In [0, 1].
    Raises ValueError unless 0 <= c <= n and 1 <= k <= n, all whole.

    >>> pass_at_k(n=4, c=1, k=2)
    0.5
    """
    n, c, k = _whole("n", n, 1), _whole("c", c, 0), _whole("k", k, 1)
    if c > n:
        raise ValueError(f"{c} right answers out of {n}: c must not exceed n")
    if k > n:
        raise ValueError(f"pass@{k} cannot be estimated from {n} answers: k must not exceed n")
    return 1 - math.comb(n - c, k) / math.comb(n, k)


def pass_at_k_exact(p: ArrayLike, k: int) -> np.ndarray:
    """The chance that k answers hold a right one when each is right with probability p (any shape): 1 - (1-p)^k.

    Keeps its digits for tiny p. In [0, 1], same shape as p.
    Raises ValueError for p outside [0, 1] or NaN, and k < 1.

    >>> print(pass_at_k_exact([0, 0.5, 1], k=2))
    [0.   0.75 1.  ]
    >>> print(pass_at_k_exact(1e-20, k=8))
    8e-20
    """
    p, k = _probabilities("p", p), _whole("k", k, 1)
    with np.errstate(divide="ignore"):  # log1p(-1) is -inf, and expm1 of that is the -1 we want
        return -np.expm1(k * np.log1p(-p)) + 0.0  # + 0.0: no "-0"


# --- how many ways --------------------------------------------------------------------------------------------------


def distinct_at_k(mode_probs: ArrayLike, k: int) -> np.ndarray:
    """Expected number of different correct modes among k answers: sum over m of 1 - (1 - P q_m)^k.

    mode_probs (..., M) -> (...). In modes, in [0, min(k, M)].

    >>> print(distinct_at_k([0.5, 0.5, 0], k=2))  # both alike, or one of each
    1.5
    """
    return pass_at_k_exact(_modes("mode_probs", mode_probs), k).sum(-1)


def _shares(mode_probs: ArrayLike) -> np.ndarray:
    """q (..., M): each mode's part of the correct mass; all zero where that mass is zero."""
    mass = _modes("mode_probs", mode_probs)
    mass = _ratio(mass, mass.max(-1, keepdims=True, initial=0.0), 0.0)  # first by the largest: no underflow
    return _ratio(mass, mass.sum(-1, keepdims=True), 0.0)


def effective_modes(mode_probs: ArrayLike) -> np.ndarray:
    """Effective number of correct modes, exp(-sum of q log q): M when all are equal, 1 when one is left.

    mode_probs (..., M) -> (...). In modes, in [1, M]; 0 where no correct mode has any mass.

    >>> print(effective_modes([[0.2, 0.2, 0.2, 0], [0.9, 0, 0, 0], [0, 0, 0, 0]]).round(6))
    [3. 1. 0.]
    """
    q = _shares(mode_probs)
    entropy = -(q * np.log(np.where(q > 0, q, 1.0))).sum(-1)
    return np.where(q.any(-1), np.clip(np.exp(entropy), 1.0, max(q.shape[-1], 1)), 0.0)[()]


def pcmd(mode_probs: ArrayLike) -> np.ndarray:
    """Chance that two correct answers are of different modes, 1 - sum of q^2: 1 - 1/M when all are equal.

    mode_probs (..., M) -> (...). In [0, 1 - 1/M]; 0 where no correct mode has any mass.

    >>> print(pcmd([0.25, 0.25, 0]))
    0.5
    """
    q = _shares(mode_probs)
    return np.where(q.any(-1), np.maximum(1 - (q**2).sum(-1), 0.0), 0.0)[()]


# --- against the reference ------------------------------------------------------------------------------------------


def retained_mass(mode_probs: ArrayLike, reference_probs: ArrayLike) -> np.ndarray:
    """What is left of the reference's correct mass, gains of other modes not counted (F-GRPO, 2602.06717).

    1 - sum of max(0, reference - now) / sum of reference; (..., M) twice -> (...).
    In [0, 1]: 1 is moderate sharpening. 1 where the reference has no correct mass: nothing could be lost.

    >>> print(retained_mass([0.8, 0.0], [0.3, 0.1]))  # a quarter of the mass is gone, whatever mode 0 won
    0.75
    """
    now, before = _modes_pair(mode_probs, reference_probs)
    lost = np.maximum(before - now, 0.0).sum(-1)
    return np.clip(1 - _ratio(lost, before.sum(-1), 0.0), 0.0, 1.0)


def share_gained(mode_probs: ArrayLike, reference_probs: ArrayLike) -> np.ndarray:
    """Share of correct modes at least as likely as under the reference: 1 is P1's moderate sharpening.

    Counts modes with reference > 0, so padding is left out; a mode that kept its probability exactly counts.
    (..., M) twice -> (...). In [0, 1]; 1 where the reference knows no mode.

    >>> print(share_gained([0.8, 0.0, 0], [0.3, 0.1, 0]))
    0.5
    """
    now, before = _modes_pair(mode_probs, reference_probs)
    real = before > 0
    return _ratio((real & (now >= before)).sum(-1), real.sum(-1), 1.0)


def moderate(mode_probs: ArrayLike, reference_probs: ArrayLike) -> np.ndarray:
    """P1's moderate sharpening: 1 where every correct mode kept or gained probability, else 0. (..., M) twice -> (...).

    >>> print(moderate([[0.5, 0.25], [0.75, 0.0]], [0.25, 0.25]))
    [1. 0.]
    """
    return (share_gained(mode_probs, reference_probs) == 1).astype(float)


def worst_drop(mode_probs: ArrayLike, reference_probs: ArrayLike) -> np.ndarray:
    """Largest fall of one correct mode's probability, reference - now. (..., M) twice -> (...), in [0, 1].

    >>> print(worst_drop([0.75, 0.0, 0.0], [0.25, 0.125, 0.0]))
    0.125
    """
    now, before = _modes_pair(mode_probs, reference_probs)
    return (before - now).max(-1, initial=0.0)


class Support(NamedTuple):
    """Correct modes above the threshold: counts and ratios, each of the batch's shape."""

    kept: np.ndarray  # above it before and now
    gained: np.ndarray  # only now
    lost: np.ndarray  # only before
    retention: np.ndarray  # kept / (kept + lost); 1 where there was nothing to keep
    discovery: np.ndarray  # gained / (kept + gained); 0 where nothing is there now


def support(mode_probs: ArrayLike, reference_probs: ArrayLike, threshold: float = 0.01) -> Support:
    """Which correct modes are within reach, that is strictly above `threshold`, before and now (2507.14843).

    (..., M) twice -> five arrays (...). Raises ValueError unless 0 <= threshold < 1.

    >>> kept, gained, lost, retention, discovery = support([0.5, 0.2, 0], [0.3, 0, 0.2])
    >>> print(kept, gained, lost, retention, discovery)
    1 1 1 0.5 0.5
    """
    now, before = _modes_pair(mode_probs, reference_probs)
    if not 0 <= threshold < 1:
        raise ValueError(f"threshold must be in [0, 1), got {threshold!r}")
    now, before = now > threshold, before > threshold
    kept, gained, lost = (now & before).sum(-1), (now & ~before).sum(-1), (before & ~now).sum(-1)
    return Support(kept, gained, lost, _ratio(kept, kept + lost, 1.0), _ratio(gained, kept + gained, 0.0))


# --- the vote -------------------------------------------------------------------------------------------------------


def _times(polynomial: np.ndarray) -> np.ndarray:
    """The matrix (..., k+1, k+1) that multiplies a row of coefficients by `polynomial` (..., k+1), no power above k."""
    power = np.arange(polynomial.shape[-1])
    shift = power - power[:, None]
    return np.where(shift >= 0, polynomial[..., shift], 0.0)


def _vote(votes: np.ndarray, correct: np.ndarray, total: float) -> float:
    """Probability that a correct answer wins, given votes[a, j], the probability that answer a gets j of k votes.

    The answers count as independent and are then held to k votes together, an event of probability `total`.
    If a wins with c votes, every other answer has fewer, or exactly c: sum_{j<c} v_j x^j + y v_c x^c. The coefficient
    of x^k in the product is a polynomial in y whose power t counts the ties, and a wins 1/(t+1) of those:
    1/(t+1) is the integral of y^t over [0, 1], exact with enough Gauss-Legendre nodes (t < k / c).
    """
    answers, k, winners = len(votes), votes.shape[1] - 1, np.flatnonzero(correct)
    won = 0.0
    for c in range(math.ceil(k / max(answers, 1)), k + 1):  # fewer than k / A votes never win
        nodes, weights = np.polynomial.legendre.leggauss(k // c // 2 + 1)
        y, dy = (nodes[:, None] + 1) / 2, weights / 2
        wins, loses = votes * (np.arange(k + 1) == c), votes * (np.arange(k + 1) < c)  # (A, k+1): c votes, fewer
        product = np.zeros((len(y), len(winners), k + 1))
        product[..., 0] = 1.0
        for a in range(answers):
            as_winner = product[:, winners == a] @ _times(wins[a])
            product = product @ _times(loses[a] + y * wins[a])
            product[:, winners == a] = as_winner
        won += float(dy @ product[..., k].sum(-1))
    return min(won / total, 1.0)


def _votable(correct: ArrayLike, answers: int) -> np.ndarray:
    """`correct` (A,) as booleans."""
    array = np.asarray(correct)
    if array.shape != (answers,) or (array.size and array.dtype != bool):
        raise ValueError(f"correct must be {answers} booleans, one for each answer, got {correct!r}")
    return array


def maj_at_k(weights: ArrayLike, correct: ArrayLike, k: int) -> float:
    """Chance that the most frequent of k independent answers is right, ties broken evenly. Exact. In [0, 1].

    weights (A,): probability of each distinct answer; correct (A,): is it right? Answers, not strings: merge all
    completions that state the same result. Raises ValueError unless the weights sum to 1 and 1 <= k <= 256.

    >>> round(maj_at_k([0.5, 0.3, 0.2], [True, False, False], k=1), 6)
    0.5
    >>> round(maj_at_k([0.6, 0.4], [True, False], k=3), 6)  # .6^3 + 3 * .6^2 * .4
    0.648
    """
    weights, k = _modes("weights", weights), _whole("k", k, 1)
    if weights.ndim != 1 or abs(weights.sum() - 1) > SLACK:
        raise ValueError(f"weights must be one row that sums to 1, got shape {weights.shape}, sum {weights.sum()}")
    if k > MOST_VOTES:
        raise ValueError(f"maj@{k}: k must not exceed {MOST_VOTES}")
    correct = _votable(correct, len(weights))
    # Independent Poisson counts of mean k * weight, held to k in all, are the k votes (and do not overflow).
    mean = k * weights / weights.sum()
    steps = np.concatenate([np.exp(-mean)[:, None], mean[:, None] / np.arange(1, k + 1)], axis=1)
    total = math.exp(k * math.log(k) - k - math.lgamma(k + 1))
    return _vote(np.cumprod(steps, axis=1), correct, total)


def maj_at_k_from_counts(counts: Sequence[int], correct: ArrayLike, k: int) -> float:
    """The same over all sets of k out of n answers that were really drawn: unbiased, as pass_at_k is. In [0, 1].

    counts (A,): how often each distinct answer came; n is their sum, at most 1,000. correct (A,): is it right?
    Raises ValueError for negative or broken counts, and unless 1 <= k <= n and k <= 256.

    >>> [round(maj_at_k_from_counts([2, 1], [True, False], k), 6) for k in (1, 3)]
    [0.666667, 1.0]
    """
    counts, k = [_whole("a count", count, 0) for count in counts], _whole("k", k, 1)
    n, correct = sum(counts), _votable(correct, len(counts))
    if k > min(n, MOST_VOTES) or n > 1000:
        raise ValueError(f"maj@{k} from {n} answers: k must not exceed n nor {MOST_VOTES}, n must not exceed 1000")
    # Keep each of the n answers with chance k / n: held to k in all, that is an even choice among all k-subsets.
    keep = k / n

    def chance(of: int, kept: int) -> float:
        return math.comb(of, kept) * keep**kept * (1 - keep) ** (of - kept) if kept <= of else 0.0

    return _vote(np.array([[chance(m, j) for j in range(k + 1)] for m in counts]), correct, chance(n, k))


# --- over seeds, and what a group does not see -----------------------------------------------------------------------

T_975 = (12.7062, 4.30265, 3.18245, 2.77645, 2.57058, 2.44691, 2.36462, 2.30600, 2.26216, 2.22814)  # df 1..10


def _t_quantile(df: int) -> float:
    """0.975 quantile of Student's t: a table, then the expansion in 1/df around the normal's 1.96 (off by < 2e-4)."""
    if df <= len(T_975):
        return T_975[df - 1]
    return 1.959964 + 2.37231 / df + 2.82259 / df**2 + 2.55597 / df**3


def interval(values: ArrayLike) -> tuple[float, float, float]:
    """(mean, low, high): the 95 % Student-t interval of the mean over seeds.

    values: one number per seed, in any unit. With one seed low and high are NaN: a single run has no spread.
    A NaN among the values makes all three NaN. Raises ValueError for no values or more than one axis.

    >>> [round(x, 3) for x in interval([1.0, 2.0, 3.0])]
    [2.0, -0.484, 4.484]
    """
    values = np.asarray(values, dtype=np.float64)
    if values.ndim != 1 or values.size == 0:
        raise ValueError(f"interval needs one row of at least one value, got shape {values.shape}")
    mean = float(values.mean())
    if values.size == 1:
        return mean, math.nan, math.nan
    half = _t_quantile(values.size - 1) * float(values.std(ddof=1)) / math.sqrt(values.size)
    return mean, mean - half, mean + half


def tail_miss(p: float, tau: float, group_size: int) -> float:
    """Chance that a group of G holds a right and a wrong answer, so that it teaches, but none of a mode of mass tau.

    (1 - tau)^G - (p - tau)^G - (1 - p)^G, with p the chance of being right, tau included (F-GRPO, 2602.06717).
    In [0, 1]. Raises ValueError unless 0 <= tau <= p <= 1 and group_size >= 1.

    >>> round(tail_miss(p=0.5, tau=0.1, group_size=2), 6)  # one wrong, one right of another mode: 2 * .5 * .4
    0.4
    """
    group_size = _whole("group_size", group_size, 1)
    if not 0 <= tau <= p <= 1:
        raise ValueError(f"needs 0 <= tau <= p <= 1, got tau = {tau!r}, p = {p!r}")
    return max((1 - tau) ** group_size - (p - tau) ** group_size - (1 - p) ** group_size, 0.0)


# --- from samples ---------------------------------------------------------------------------------------------------
# Where the answers of a policy cannot be summed, they are drawn: n completions of each prompt, counted by mode.


def _counts(name: str, counts: ArrayLike, n: int) -> np.ndarray:
    """`counts` (..., M) as whole numbers from 0 that sum to at most n."""
    array = np.asarray(counts)
    if array.ndim == 0 or not np.issubdtype(array.dtype, np.integer):
        raise ValueError(f"{name} must be whole numbers with an axis of modes, got {array.dtype} {array.shape}")
    if array.size and (array.min() < 0 or array.sum(-1).max() > n):
        raise ValueError(f"{name} must be at least 0 and sum to at most n = {n} over the modes of a prompt")
    return array


def estimate_measures(
    counts: ArrayLike, n: int, reference_counts: ArrayLike | None = None, reference_n: int | None = None, k: int = 8
) -> dict[str, np.ndarray]:
    """Measures of a policy from n completions of each prompt, of which counts (..., M) were of each correct mode.

    Returns name -> (...), one number a prompt, NaN where the sample says nothing of it:

    - pass@1: c / n, with c the correct ones. Unbiased, in [0, 1].
    - pass@k: 1 - C(n-c, k) / C(n, k). Unbiased, in [0, 1].
    - distinct@k: the sum over modes of 1 - C(n-c_m, k) / C(n, k). Unbiased, in [0, min(k, M)].
    - effective_modes: of the shares c_m / c. Biased low, by about (modes - 1) / 2c of itself, for rare modes are not
      drawn. In [1, M]; NaN where c = 0.
    - retained_mass, with reference_counts (..., M) of reference_n completions (n unless given): of both shares of n.
      Biased low, for noise, too, looks like loss. In [0, 1]; NaN where the reference was never right.

    Raises ValueError for broken counts, and unless 1 <= k <= n.

    >>> for name, value in estimate_measures([[2, 1, 0], [0, 0, 0]], n=4, k=2).items():
    ...     print(name, value.round(3))
    pass@1 [0.75 0.  ]
    pass@2 [1. 0.]
    distinct@2 [1.333 0.   ]
    effective_modes [1.89  nan]
    """
    n = _whole("n", n, 1)
    counts = _counts("counts", counts, n)
    chance = np.array([pass_at_k(n, c, k) for c in range(n + 1)])  # (n + 1,) for each count
    right = counts.sum(-1)
    estimates = {
        "pass@1": right / n,
        f"pass@{k}": chance[right],
        f"distinct@{k}": chance[counts].sum(-1),
        "effective_modes": np.where(right > 0, effective_modes(counts / n), math.nan),
    }
    if reference_counts is not None:
        reference_n = _whole("reference_n", n if reference_n is None else reference_n, 1)
        before = _counts("reference_counts", reference_counts, reference_n)
        kept = retained_mass(counts / n, before / reference_n)
        estimates["retained_mass"] = np.where(before.sum(-1) > 0, kept, math.nan)
    return estimates


def mean_known(values: ArrayLike) -> np.ndarray:
    """Mean over the prompts (..., Q) -> (...) without the NaN among them; NaN where there is nothing else.

    >>> print(mean_known([[1.0, 2.0, math.nan], [math.nan] * 3]))
    [1.5 nan]
    """
    values = np.asarray(values, dtype=np.float64)
    known = ~np.isnan(values)
    return _ratio(np.where(known, values, 0.0).sum(-1), known.sum(-1), math.nan)


def _resample(counts: np.ndarray, n: int, B: int, generator: np.random.Generator) -> np.ndarray:
    """B times n new completions of each prompt, drawn from those that were drawn: counts (Q, M) -> (B, Q, M)."""
    wrong = n - counts.sum(-1, keepdims=True)  # (Q, 1): one more category
    return generator.multinomial(n, np.concatenate([counts, wrong], -1) / n, size=(B, len(counts)))[..., :-1]


def bootstrap_intervals(
    counts: ArrayLike,
    n: int,
    generator: np.random.Generator,
    reference_counts: ArrayLike | None = None,
    reference_n: int | None = None,
    k: int = 8,
    B: int = 200,
) -> dict[str, tuple[float, float, float]]:
    """(mean, low, high) over the prompts of each of `estimate_measures`, with the 95 % interval of its sampling noise.

    It says how far the mean would move if other completions of the *same* prompts were drawn from the same policy (and
    reference): not how it differs over seeds or other prompts, and not the bias that an estimate has.

    counts and reference_counts (Q, M). Completions are resampled B times within each prompt; the spread around the
    resamples' own mean, times sqrt(n / (n - 1)) for drawing from a sample, is put around the mean. Too narrow with few
    prompts and few completions: a prompt that was always or never right adds no width, though n completions show no
    chance below about 1/n. All are NaN where nothing is known, low and high for n = 1. Raises ValueError as
    `estimate_measures` does.

    >>> mean, low, high = bootstrap_intervals([[30, 2], [5, 5]], n=64, generator=np.random.default_rng(0))["pass@1"]
    >>> print(f"{mean:.3f} [{low:.2f}, {high:.2f}]")
    0.328 [0.25, 0.39]
    """
    estimates = estimate_measures(counts, n, reference_counts, reference_n, k)
    again = [_resample(np.asarray(counts), n, B, generator), n]
    if reference_counts is not None:
        reference_n = n if reference_n is None else reference_n
        again += [_resample(np.asarray(reference_counts), reference_n, B, generator), reference_n]
    M = np.shape(counts)[-1]
    most = {f"distinct@{k}": min(k, M), "effective_modes": M}  # the others are at most 1
    resampled, intervals = estimate_measures(*again, k=k), {}
    for name, values in estimates.items():
        mean = float(mean_known(values))
        offsets = mean_known(resampled[name]) - mean_known(mean_known(resampled[name]))  # (B,)
        stretch = math.sqrt(n / (n - 1)) if n > 1 else math.nan
        low, high = mean + stretch * np.nanquantile(offsets, [0.025, 0.975]) if not math.isnan(mean) else (mean, mean)
        least = 1.0 if name == "effective_modes" else 0.0
        intervals[name] = mean, float(np.clip(low, least, mean)), float(np.clip(high, mean, most.get(name, 1)))
    return intervals
