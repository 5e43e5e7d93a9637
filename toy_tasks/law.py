"""What keeps modes: the expected update of a softmax policy, and when two calibrations hold its correct modes apart.

Ours, derived here; what is known elsewhere stands at the end. `table.py` holds the law against a simulated table.

**Setting.** One prompt; N answers, M of them correct (the modes); logits z, policy pi = softmax(z); a group of G
answers drawn independently from a sampler s; answer i of the group has an advantage A_i, held fixed, and the step
climbs (1/G) sum_i A_i log pi(o_i). P and S are the probabilities of being right under pi and s, q = pi/P and ŝ = s/S
the shares of the modes. Plain gradient steps on z: no importance ratio, no KL, no entropy bonus.

**1. General form.** d log pi(o') / dz_o = [o = o'] - pi_o. With A_o = E[A_i | o_i = o] the expected step is

    dz_o = s_o A_o - pi_o C,    C = sum_o s_o A_o,

and for two correct modes d(z_a - z_b) = (s_a A_a - s_b A_b) - C (pi_a - pi_b). The whole policy rests where s_o A_o /
pi_o = C for every answer; the modes rest among themselves where s_m A_m - C pi_m is one number for all of them. (One
number for s_m A_m / pi_m is not enough: on-policy with one A it is A everywhere, see step 3.) A method bends s, C or A.

**2. Rewards alone.** Let A_i depend on the group's 0/1 rewards alone. Then A_o is one number for all correct answers
and one for all wrong ones. B+ = E[sum of the correct ones' advantages] / G and B- = -E[sum of the wrong ones'] / G are
the two sides (`sides`), C = B+ - B-, and, divided by B+ (the natural step: its unit is one expected positive side),

    d log(q_a/q_b) = (ŝ_a - ŝ_b) - rho (q_a - q_b),    rho = P (1 - 1/kappa),    kappa = B+ / B-.

Only the ratio kappa of the sides counts, whichever of them a calibration changes. If the advantages sum to zero before
the calibration, B- is what B+ was; a calibration of the positive side alone then gives kappa = E[sum of calibrated
positive advantages] / E[sum of uncalibrated ones], and one that scales both sides alike (F-GRPO) gives 1. kappa is
taken at S: the groups are drawn from s. kappa = inf: no negative side.

**3. The class.** Advantages that sum to zero in every group and depend on its rewards alone: C = 0, kappa = 1, R = 0,
so the richer *in the sampler* grows, and on-policy the richer. On-policy it does not even need the zero sum: ŝ = q
gives (pi_a - pi_b)(A+ - C), and A+ - C = (1 - P)(A+ - A-) >= 0 wherever right is not worth less than wrong. So no
advantage that depends on rewards alone restores modes on-policy, whatever its kappa: gamma = 1, R = rho <= P.

**4. R.** Let ŝ follow q^gamma. To first order around equal shares, ŝ_a - ŝ_b = gamma (q_a - q_b), so

    d log(q_a/q_b) = gamma (1 - R)/M * log(q_a/q_b),    R = rho/gamma = P (1 - 1/kappa) / gamma.

Equal shares attract where R > 1 and repel where R < 1. gamma: 1 without DLC; temperature t, s ~ pi^(1/t): 1/t; an ideal
memory that has learned the sampler, s ~ pi/s^mu, so log s = log pi / (1 + mu): 1/(1 + mu); one that has learned the
policy: 1 - mu; one that never moves only biases the modes: 1. The exact ratio pi/s puts q in the place of ŝ, gamma = 1,
but the sides keep the sampler's group statistics: kappa is multiplied by P(1-S)/(S(1-P)) (`ratio_kappa`). R <= P < 1
all the same; without IAC R = (P-S)/(1-S), not 0.

**5. Far from equal shares R > 1 is not enough, unless rho = 1.** With rates divided by B+, and P and kappa held, the
modes climb F(u) = log(sum_m b_m e^(gamma u_m))/gamma - rho log(sum_m e^u_m) - (1-rho) mean(u), u = log q, since dF/du_m
= ŝ_m - rho q_m - (1-rho)/M (b = 1 until step 6). For rho = 1 and gamma < 1 it has one summit; for rho < 1 it also rises
without bound towards the corners. For M = 2 and gamma < 1 all is exact: with x = log(q_a/q_b)/2 the modes draw together
where tanh(gamma x) < rho tanh(x). R < 1: nowhere. R > 1 and rho < 1: only below some x; past it the richer wins. A lone
mode below `critical_share` dies although R > 1, so R just above 1 ends with a few equal modes, those that were common.
What decides at any shares, with any sampler, is gamma measured there: the entropy of q grows at the rate
Cov_q(log q, rho q - ŝ), so exactly where rho / `gamma_now` > 1.

**6. Unequal modes.** ŝ_m ~ b_m q_m^gamma (DLC token by token has such a b). At rest ŝ_m = rho q_m + (1 - rho)/M. Where
rho = 1 (kappa = inf *and* P = 1) q* ~ b^(1/(1-gamma)); else, for small biases, q* ~ b^(1/(rho-gamma)), an exponent
1/(gamma (R-1)) that is larger and grows without bound as R falls to 1; in general `rest_point` solves it, or finds that
no point holds all the modes.

**7. IAC.** A = r - mean, factor (G - |S+|): kappa = 1 + (G-2)(1-S) exactly, so R > 1 only while 1 - S >
1/((G-2)(P/gamma - 1)), then no more: its effect must end. Divided by G, kappa < 1 and R < 0. DAPO's filter divides both
sides by the chance of a mixed group and leaves kappa as it is.

**8. Inverse probability.** Rewards r/pi, A = r/pi - b, on-policy: s_m A_m = 1 - b pi_m, C = M - b, and d(z_a - z_b) =
-M (pi_a - pi_b): a restoring force at every accuracy, whatever b. The group's mean for b costs a factor (G-1)/G, the
mean of the others none. Divided by the group's *deviation* this holds for large groups or high accuracy only: a lone
success gets sqrt(G-1) however rare it is, so at low P the rich get richer there. With the clamp min(1/pi, c) modes
below 1/c compete with each other as on-policy: d(z_a - z_b) = (c - E[reward]) (pi_a - pi_b).

**Where it stops holding.** A KL or an entropy bonus adds forces of its own. Rewards that differ between correct modes
(unlikeliness, UCPO, length penalties) leave step 2, not step 1. Finite groups add noise of variance ~ 1/G a step
(`update_moments`), which wanders out of any basin in the end. Weights shared between answers and prompts, Adam's
division, gradient and ratio clipping and repeated epochs mix the z_o. Several tokens an answer: "softmax over answers"
is then an approximation. So the law is an identity for a table, and for a network a prediction to be tested.

**Known elsewhere** (as told: found by search, not read in full): the general form for a *fixed* sampler and a constant
baseline, with its change of regime at C = 0, AsymRE (2506.20520): here the case gamma = 0, where R > 1 means kappa > 1;
expected reward alone collapses, and inverse probability mends it, IPS-GRPO (2601.21669); replicator flow among correct
modes, Rad et al. (2601.04411), and winner-take-all under GRPO mended by a bonus ~ 1/probability, G2RPO (ICML 2026);
how correct-only objectives lose diversity, 2601.00747; indifference between correct modes, UCPO (2605.00365); forward
KL to a group target, DMPO (2605.19461); positive and negative gradient mass, FADE (2607.01490); asymmetric advantages,
A-GRAE (2602.05548); F-GRPO (2602.06717). P1 (2601.15609) gives no such condition that we know of.
2026-12-01: a search of public papers, documentation, code and threads found parts of steps 1, 3 and 8 in those, and no
statement of R, of kappa by groups, of gamma of a sampler that follows the policy, or of steps 5 to 7.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from toy_tasks.exact import multiset_probability

Advantages = Callable[[Tensor], Tensor]  # rewards (..., G) -> (..., G), each row a group by itself, in any order
Calibrate = Callable[[Tensor, Tensor], Tensor]  # (advantages, rewards), both (..., G) -> (..., G)


# === kappa: the two sides of the update. ===


def side_sums(advantages: Advantages, group_size: int, calibrate: Calibrate | None = None) -> tuple[Tensor, Tensor]:
    """The two sides of a group with k correct, k = 0..G: sum of the correct ones' advantages, minus that of the wrong.

    Per completion, so divided by G: two (G+1,). Raises ValueError for G < 1.
    >>> side_sums(lambda r: r - r.mean(-1, keepdim=True), 2)
    (tensor([0.0000, 0.2500, 0.0000], dtype=torch.float64), tensor([-0.0000, 0.2500, -0.0000], dtype=torch.float64))
    """
    if group_size < 1:
        raise ValueError(f"a group has at least 1 completion, got {group_size}")
    rewards = (torch.arange(group_size) < torch.arange(group_size + 1)[:, None]).double()  # (G+1, G)
    worth = advantages(rewards)
    worth = (worth if calibrate is None else calibrate(worth, rewards)).double()
    return (worth * rewards).mean(-1), -(worth * (1 - rewards)).mean(-1)


def group_weights(group_size: int, S: float | Tensor, mixed: bool = False) -> Tensor:
    """Chance that k of G draws are right, k = 0..G, |S+| ~ Binomial(G, S): (...) -> (..., G+1) float64.

    `mixed`: given that a right and a wrong one are among them (DAPO's filter); at S = 0 and 1, the limit.
    Raises ValueError for S outside [0, 1], and for `mixed` with G < 2.
    >>> group_weights(2, 0.5), group_weights(2, 0.9, mixed=True)
    (tensor([0.2500, 0.5000, 0.2500], dtype=torch.float64), tensor([0., 1., 0.], dtype=torch.float64))
    """
    G, S = group_size, torch.as_tensor(S, dtype=torch.float64)[..., None]
    if not ((S >= 0) & (S <= 1)).all():
        raise ValueError(f"S is a probability, got {S.flatten().tolist()}")
    if mixed and G < 2:
        raise ValueError(f"a group of {G} is never mixed")
    k, away = torch.arange(G + 1), int(mixed)  # all weights of mixed groups have a factor S (1 - S), left out there
    ways = torch.tensor([math.comb(G, i) for i in range(G + 1)], dtype=torch.float64)
    weights = ways * S ** (k - away).clamp(min=0) * (1 - S) ** (G - k - away).clamp(min=0)
    if not mixed:
        return weights
    weights = torch.where((k > 0) & (k < G), weights, 0.0)
    return weights / weights.sum(-1, keepdim=True)


def sides(
    advantages: Advantages, group_size: int, S: float | Tensor, calibrate: Calibrate | None = None, mixed: bool = False
) -> tuple[Tensor, Tensor]:
    """(B+, B-), expected over groups; S (...) -> two (...). Step 2; `mixed` and what it raises as `group_weights`.

    >>> sides(lambda r: r - r.mean(-1, keepdim=True), 8, 0.5)  # S (1 - S) (G - 1)/G
    (tensor(0.2188, dtype=torch.float64), tensor(0.2188, dtype=torch.float64))
    """
    weights = group_weights(group_size, S, mixed)
    positive, negative = side_sums(advantages, group_size, calibrate)
    return weights @ positive, weights @ negative


def kappa(
    advantages: Advantages, group_size: int, S: float, calibrate: Calibrate | None = None, mixed: bool = False
) -> float:
    """kappa = B+/B-, exactly: how much the positive side outweighs the negative one. Step 2; `mixed` as in `sides`.

    inf without a negative side, below 0 where wrong answers are pushed up, NaN where nothing is pushed. At S = 0 and 1
    it is the limit, if groups of one kind have no advantages. Raises as `group_weights`.
    >>> centred = lambda r: r - r.mean(-1, keepdim=True)
    >>> iac = lambda a, r: torch.where(a > 0, a * (1 - r).sum(-1, keepdim=True), a)  # P1, alpha = 1
    >>> [round(kappa(centred, 8, S, iac), 3) for S in (0, 0.5, 0.9, 1)]  # 1 + (G - 2)(1 - S)
    [7.0, 4.0, 1.6, 1.0]
    """
    positive, negative = side_sums(advantages, group_size, calibrate)
    flat = abs(positive[-1].item()) + abs(negative[0].item())  # what groups of one kind add
    positive, negative = sides(advantages, group_size, S, calibrate, mixed or (flat < 1e-12 and group_size > 1))
    if abs(negative) <= 1e-12 * abs(positive) or positive == negative == 0:
        return math.copysign(math.inf, positive) if positive != 0 else math.nan
    return (positive / negative).item()


def ratio_kappa(kappa: float | Tensor, P: float | Tensor, S: float | Tensor):
    """kappa where each completion is weighted by the exact importance ratio pi/s. Step 4; gamma is then 1.

    >>> round(law_R(0.9, ratio_kappa(1.0, P=0.9, S=0.8), gamma=1.0), 6)  # (P - S)/(1 - S)
    0.5
    """
    return kappa * P * (1 - S) / (S * (1 - P))


# === gamma: how the sampler's shares follow the policy's. ===


def gamma_ideal_memory(mu: float | Tensor):
    """1/(1 + mu): DLC against a memory that has learned the sampler itself, s ~ pi/s^mu. Raises ValueError, mu <= -1.

    >>> gamma_ideal_memory(0.25)
    0.8
    """
    if not torch.as_tensor(mu > -1).all():
        raise ValueError(f"mu must be above -1, got {mu}")
    return 1 / (1 + mu)


def gamma_temperature(temperature: float | Tensor):
    """1/t: answers drawn from pi^(1/t) while pi is trained; hotter than 1 spreads. Raises ValueError for t <= 0.

    >>> gamma_temperature(2.0)
    0.5
    """
    if not torch.as_tensor(temperature > 0).all():
        raise ValueError(f"the temperature must be above 0, got {temperature}")
    return 1 / temperature


def fitted_gamma(shares: Tensor, sampler_shares: Tensor) -> Tensor:
    """Slope of log ŝ on log q over modes, least squares, each mode weighted by its share q: (..., M) twice -> (...).

    Weighted so that a mode that is all but lost does not decide. NaN where fewer than two modes have different shares.
    >>> fitted_gamma(torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.5, 0.3, 0.2]) ** 0.8)
    tensor(0.8000)
    """
    known = (shares > 0) & (sampler_shares > 0)
    weights = torch.where(known, shares, 0.0)
    weights = weights / weights.sum(-1, keepdim=True)
    x, y = (torch.where(known, values, 1.0).log() for values in (shares, sampler_shares))
    off = x - (weights * x).sum(-1, keepdim=True)
    spread = (weights * off**2).sum(-1)
    return torch.where(spread > 1e-12, (weights * off * y).sum(-1) / spread, math.nan)


def gamma_now(shares: Tensor, sampler_shares: Tensor) -> Tensor:
    """Cov_q(log q, ŝ) / Cov_q(log q, q): the gamma that decides whether the effective modes grow here. Step 5.

    Whatever the shares and the sampler: they grow exactly where `law_R` with this gamma is above 1. (..., M) twice ->
    (...). NaN where all living modes have one share.
    >>> q = torch.tensor([0.9, 0.1]).double()
    >>> s = q**0.8 / (q**0.8).sum()  # the slope is 0.8, but so far out it counts for more
    >>> round(gamma_now(q, s).item(), 3)
    0.882
    """
    log_q = torch.where(shares > 0, shares, 1.0).log()
    pull = shares * (log_q - (shares * log_q).sum(-1, keepdim=True))  # sums to 0
    below = (pull * shares).sum(-1)
    return torch.where(below > 1e-12, (pull * sampler_shares).sum(-1) / below, math.nan)


# === The law. ===


def excess(kappa: float | Tensor):
    """1 - 1/kappa, the share of the positive side that no negative side cancels. Raises ValueError for kappa <= 0.

    >>> excess(2.0), excess(math.inf)
    (0.5, 1.0)
    """
    if torch.as_tensor(kappa <= 0).any():  # NaN, where nothing is pushed, passes
        raise ValueError(f"kappa must be above 0, got {kappa}")
    return 1 - 1 / kappa


def law_R(P: float | Tensor, kappa: float | Tensor, gamma: float | Tensor):
    """R = P (1 - 1/kappa) / gamma. Equal shares attract where R > 1, repel where R < 1. Step 4.

    P in [0, 1], kappa in (0, inf], gamma > 0; numbers or tensors that broadcast. Raises ValueError for kappa <= 0.
    >>> [round(law_R(1.0, kappa, gamma_ideal_memory(0.5)), 2) for kappa in (1, 2, 5, math.inf)]
    [0.0, 0.75, 1.2, 1.5]
    """
    return P * excess(kappa) / gamma


def growth_rate(modes: int, P: float | Tensor, kappa: float | Tensor, gamma: float | Tensor):
    """At what rate a small log(q_a/q_b) grows, per natural step: gamma (1 - R)/M. Below 0 it shrinks. Step 4.

    >>> round(growth_rate(5, P=1.0, kappa=1.0, gamma=1.0), 3)
    0.2
    """
    return gamma * (1 - law_R(P, kappa, gamma)) / modes


def mode_ratio_drift(shares: Tensor, sampler_shares: Tensor, P: float | Tensor, kappa: float | Tensor) -> Tensor:
    """d log(q_a/q_b) per natural step for every pair of modes: (..., M) twice -> (..., M, M), at [a, b]. Step 2.

    Times the learning rate and B+ it is the expected change in one step. P and kappa are numbers or (...).
    >>> q = torch.tensor([0.75, 0.25])
    >>> mode_ratio_drift(q, q, P=1.0, kappa=2.0)  # on-policy: the richer grows, more slowly for a kappa above 1
    tensor([[ 0.0000,  0.2500],
            [-0.2500,  0.0000]])
    """
    rho = torch.as_tensor(P * excess(kappa), dtype=shares.dtype)
    push = sampler_shares - rho[..., None] * shares  # (..., M)
    return push[..., :, None] - push[..., None, :]


def critical_share(modes: int, P: float, kappa: float, gamma: float) -> float:
    """Below this share a mode dies beside M - 1 equal ones, although R > 1. Step 5, for gamma < 1.

    1/M where R <= 1 (a mode below the others falls), 0 where rho = 1 (none is lost). Raises ValueError for M < 2.
    >>> [round(critical_share(5, 0.99, kappa, gamma=2 / 3), 4) for kappa in (4, 8, math.inf)]
    [0.0865, 0.0186, 0.0002]
    """
    if modes < 2:
        raise ValueError(f"one mode alone has nothing to compete with, got {modes}")
    rho = P * excess(kappa)
    if rho <= gamma:
        return 1 / modes
    low, high = -700.0, math.log(1 / modes) - 1e-6  # of log q; just below 1/M such a mode grows

    def falls(log_q: float) -> bool:
        odds = gamma * (math.log((modes - 1) / -math.expm1(log_q)) + log_q) - math.log(modes - 1)  # log of ŝ/(1 - ŝ)
        return 1 / (1 + math.exp(-odds)) < rho * math.exp(log_q) + (1 - rho) / modes

    if not falls(low):
        return 0.0
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if falls(middle) else (low, middle)
    return math.exp(high)


# === The expected update, by enumeration and in closed form. ===


def update_moments(
    policy: Tensor, sampler: Tensor, rewards: Tensor, advantages: Advantages, group_size: int,
    calibrate: Calibrate | None = None, importance: bool = False
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Mean (N,) and covariance (N, N) of dz = (1/G) sum_i A_i (onehot(o_i) - pi) over all groups, as multisets.

    policy, sampler (N,) probabilities of the answers, rewards (N,) of each: 0/1, or any number, such as correct/policy.
    `importance` weights each completion by policy/sampler. N = 8 and G = 6 make 1,716 groups.
    >>> half = torch.tensor([0.5, 0.5]).double()
    >>> mean, covariance = update_moments(half, half, torch.tensor([1.0, 0.0]), lambda r: r, 2)
    >>> mean, covariance[0, 0]
    (tensor([ 0.2500, -0.2500], dtype=torch.float64), tensor(0.0312, dtype=torch.float64))
    """
    rows = torch.combinations(torch.arange(len(policy)), group_size, with_replacement=True)  # (groups, G)
    chance = torch.tensor([multiset_probability(row, sampler) for row in rows], dtype=torch.float64)
    worth = advantages(rewards[rows])
    worth = (worth if calibrate is None else calibrate(worth, rewards[rows])).double()
    if importance:
        worth = worth * (policy / sampler)[rows]
    pull = torch.zeros(len(rows), len(policy), dtype=torch.float64).scatter_add(1, rows, worth) / group_size
    step = pull - policy * pull.sum(-1, keepdim=True)
    mean = chance @ step
    return mean, (step - mean).T @ (chance[:, None] * (step - mean))


def expected_update(
    policy: Tensor, sampler: Tensor, rewards: Tensor, advantages: Advantages, group_size: int,
    calibrate: Calibrate | None = None, importance: bool = False
) -> Tensor:  # fmt: skip
    """The expected dz (N,), by enumeration: the mean of `update_moments`.

    With rewards r/pi the rarer of two modes gains, on-policy and at whatever accuracy (step 8):
    >>> policy, correct = torch.tensor([0.06, 0.02, 0.92]).double(), torch.tensor([1.0, 1.0, 0.0])
    >>> centred = lambda r: r - r.mean(-1, keepdim=True)
    >>> dz = expected_update(policy, policy, correct / policy, centred, 4)
    >>> round((dz[0] - dz[1]).item(), 6)  # -M (pi_a - pi_b) times (G - 1)/G
    -0.06
    """
    return update_moments(policy, sampler, rewards, advantages, group_size, calibrate, importance)[0]


def closed_update(
    policy: Tensor, sampler: Tensor, correct: Tensor, positive: Tensor, negative: Tensor, importance: bool = False
) -> Tensor:
    """The expected dz (..., N) of advantages that depend on rewards alone, from their two `sides` (...). Step 2.

    policy, sampler (..., N), correct (N,) bool.
    >>> half = torch.tensor([0.5, 0.5]).double()
    >>> closed_update(half, half, torch.tensor([True, False]), *sides(lambda r: r, 2, 0.5))
    tensor([ 0.2500, -0.2500], dtype=torch.float64)
    """
    right, wrong = sampler * correct, sampler * ~correct
    share = torch.where(right.sum(-1, keepdim=True) > 0, right / right.sum(-1, keepdim=True), 0.0)
    fault = torch.where(wrong.sum(-1, keepdim=True) > 0, wrong / wrong.sum(-1, keepdim=True), 0.0)
    pull = positive[..., None] * share - negative[..., None] * fault
    if importance:
        pull = pull * policy / sampler
    return pull - policy * pull.sum(-1, keepdim=True)


def inverse_probability_drift(policy: Tensor, correct: Tensor) -> Tensor:
    """d(z_a - z_b) for rewards r/pi, whatever the baseline, on-policy: (..., N), correct (N,) -> (..., M, M). Step 8.

    Per unit of the learning rate: -M (pi_a - pi_b) at [a, b].
    >>> inverse_probability_drift(torch.tensor([0.75, 0.25]), torch.tensor([True, True]))
    tensor([[-0., -1.],
            [ 1., -0.]])
    """
    modes = policy[..., correct]
    return -modes.shape[-1] * (modes[..., :, None] - modes[..., None, :])


# === Unequal modes. ===


def mode_bias(shares: Tensor, sampler_shares: Tensor, gamma: float | Tensor) -> Tensor:
    """log b_m = log ŝ_m - gamma log q_m, less its mean over the living modes; NaN for a dead one. (..., M) -> (..., M).

    Above 0: the sampler draws this mode more often than its share under the policy explains. Step 6.
    >>> q = torch.tensor([0.5, 0.5])
    >>> mode_bias(q, torch.tensor([0.8, 0.2]), gamma=0.5)
    tensor([ 0.6931, -0.6931])
    """
    alive = (shares > 0) & (sampler_shares > 0)
    gamma = torch.as_tensor(gamma, dtype=shares.dtype)[..., None]
    bias = torch.where(alive, sampler_shares.log() - gamma * shares.log(), math.nan)
    return bias - bias.nanmean(-1, keepdim=True)


def rest_point(bias: Tensor, P: float, kappa: float, gamma: float, most: int = 100_000) -> Tensor:
    """Shares (M,) that attract under ŝ_m ~ b_m q_m^gamma and hold all modes; NaN where there are none. Step 6.

    bias (M,) > 0 is b. It iterates q <- (ŝ - (1 - rho)/M)/rho from equal shares, at most `most` times; where that ends,
    the update's linear part gamma Cov_ŝ - rho Cov_q, Cov_p = diag(p) - p p', must point back. Not so where R <= 1.
    >>> b = torch.tensor([1.1, 1.0]).double()
    >>> rest_point(b, P=1.0, kappa=math.inf, gamma=2 / 3), b**3 / (b**3).sum()
    (tensor([0.5710, 0.4290], dtype=torch.float64), tensor([0.5710, 0.4290], dtype=torch.float64))
    """
    rho, M, bias = P * excess(kappa), len(bias), bias.double()
    none = torch.full_like(bias, math.nan)
    if rho <= gamma:
        return none
    shares = torch.full_like(bias, 1 / M)
    for _ in range(most):
        new = ((bias.log() + gamma * shares.log()).softmax(-1) - (1 - rho) / M) / rho
        if not (new > 0).all():
            return none
        if (new - shares).abs().max() < 1e-13:
            break
        shares = new
    else:
        return none
    drawn = rho * new + (1 - rho) / M
    slope = gamma * (drawn.diag() - drawn.outer(drawn)) - rho * (new.diag() - new.outer(new))  # 0 along (1, ..., 1)
    return new if torch.linalg.eigvalsh(slope - 1 / M).max() < 0 else none
