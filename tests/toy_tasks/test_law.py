"""The law of what keeps modes: against enumeration of all groups, automatic differentiation, and a simulated table."""

import itertools
import math

import pytest
import torch
from conftest import generator
from hypothesis import given, settings
from hypothesis import strategies as st

from minirlvr import (
    ESTIMATORS,
    Rollout,
    Update,
    f_grpo_advantages,
    grpo_advantages,
    inverse_success_calibration,
    rloo_advantages,
)
from toy_tasks.law import (
    closed_update,
    critical_share,
    expected_update,
    fitted_gamma,
    gamma_ideal_memory,
    gamma_now,
    gamma_temperature,
    group_weights,
    growth_rate,
    inverse_probability_drift,
    kappa,
    law_R,
    mode_bias,
    mode_ratio_drift,
    ratio_kappa,
    rest_point,
    side_sums,
    sides,
    update_moments,
)
from toy_tasks.table import law_map, simulate_table

inf = math.inf


def centred(rewards):
    """r - mean, in the precision of the rewards."""
    return rewards - rewards.mean(-1, keepdim=True)


def iac(alpha=1.0, divide=False):
    return lambda a, r: inverse_success_calibration(a, r, alpha, divide)


def times(factor):
    """The positive side times a constant."""
    return lambda a, r: torch.where(a > 0, a * factor, a)


def positives_only(a, r):
    return a.clamp(min=0)


def by_count(right, wrong):
    """Any advantages that depend on rewards alone: `right` and `wrong` by the number of correct ones, (G+1,) each."""

    def advantages(rewards):
        k = rewards.sum(-1, keepdim=True).long()
        return torch.where(rewards > 0, right[k], wrong[k])

    return advantages


def zero_sum(right):
    """`by_count` with the `wrong` that makes every group sum to zero; right (G+1,) >= 0."""
    k = torch.arange(len(right)).double()
    mixed = (k > 0) & (k < k[-1])
    return by_count(torch.where(mixed, right, 0.0), torch.where(mixed, -k * right / (k[-1] - k).clamp(min=1), 0.0))


def distributions(size):
    """Probabilities (size,), none tiny."""
    return st.lists(st.floats(0.05, 1), min_size=size, max_size=size).map(
        lambda values: torch.tensor(values, dtype=torch.float64) / sum(values)
    )


def numbers(size, low=-2.0, high=2.0):
    """(size,) between the two, to three digits: nothing is all but zero."""
    whole = st.integers(round(1000 * low), round(1000 * high))
    return st.lists(whole, min_size=size, max_size=size).map(lambda x: torch.tensor(x).double() / 1000)


CORRECT = torch.tensor([True, True, False, False])  # two modes of four answers, in most tests
probability = st.floats(0.02, 0.98)


# --- the expected update --------------------------------------------------------------------------------------------


@given(distributions(3), distributions(3), numbers(4), numbers(4), st.booleans())
@settings(max_examples=20, deadline=None)
def test_enumeration_is_the_gradient_of_the_expected_objective(policy, sampler, right, wrong, importance):
    """All 27 ordered groups, by automatic differentiation: the mean, and the covariance of the groups' gradients."""
    correct, advantages = torch.tensor([True, True, False]), by_count(right, wrong)
    gradients, chances = [], []
    for group in itertools.product(range(3), repeat=3):
        logits = policy.log().requires_grad_()
        row = torch.tensor(group)
        worth = advantages(correct[row].double())
        if importance:
            worth = worth * policy[row] / sampler[row]
        (worth * logits.log_softmax(-1)[row]).mean().backward()
        gradients.append(logits.grad)
        chances.append(sampler[row].prod())
    gradients, chances = torch.stack(gradients), torch.stack(chances)
    mean, covariance = update_moments(policy, sampler, correct.double(), advantages, 3, importance=importance)
    torch.testing.assert_close(mean, chances @ gradients)
    off = gradients - mean
    torch.testing.assert_close(covariance, (chances[:, None, None] * off[:, :, None] * off[:, None, :]).sum(0))
    torch.testing.assert_close(
        mean, expected_update(policy, sampler, correct.double(), advantages, 3, importance=importance)
    )


@given(distributions(4), distributions(4), numbers(5), numbers(5), st.booleans())
@settings(max_examples=40, deadline=None)
def test_the_closed_form_is_the_enumeration(policy, sampler, right, wrong, importance):
    """dz_o = s_o A_o - pi_o C from the two sides, for whatever depends on rewards alone, zero-sum or not."""
    advantages, S = by_count(right, wrong), sampler[CORRECT].sum()
    found = closed_update(policy, sampler, CORRECT, *sides(advantages, 4, S), importance=importance)
    expected = expected_update(policy, sampler, CORRECT.double(), advantages, 4, importance=importance)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("estimator", [grpo_advantages, rloo_advantages, f_grpo_advantages], ids=lambda f: f.__name__)
@pytest.mark.parametrize("calibrate", [None, iac(), iac(0.5), iac(2.0, divide=True), positives_only])
def test_the_drift_between_modes_needs_kappa_alone(estimator, calibrate):
    """B+ times `mode_ratio_drift` is what enumeration says of z_a - z_b, off-policy."""
    policy, sampler = torch.tensor([0.3, 0.1, 0.4, 0.2]).double(), torch.tensor([0.2, 0.3, 0.1, 0.4]).double()
    dz = expected_update(policy, sampler, CORRECT.double(), estimator, 4, calibrate)
    P, S = policy[:2].sum(), sampler[:2].sum()
    ratio = kappa(estimator, 4, S.item(), calibrate)
    drift = mode_ratio_drift(policy[:2] / P, sampler[:2] / S, P, ratio)
    positive = sides(estimator, 4, S, calibrate)[0]
    torch.testing.assert_close(positive * drift[0, 1], dz[0] - dz[1], atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(drift, -drift.T)


def test_where_one_ratio_for_all_modes_is_no_rest():
    """On-policy s A / pi is A for both modes, and they move apart: rest is s A - C pi, or C for the ratio."""
    policy = torch.tensor([0.3, 0.1, 0.6]).double()
    dz = expected_update(policy, policy, torch.tensor([1.0, 1, 0]), centred, 4)
    assert dz[0] - dz[1] > 0.01


# --- kappa ----------------------------------------------------------------------------------------------------------


@given(probability, numbers(5), numbers(5))
@settings(max_examples=30, deadline=None)
def test_sides_are_sums_over_all_groups(S, right, wrong):
    """Every one of the 16 reward vectors, by its probability."""
    advantages, expected = by_count(right, wrong), torch.zeros(2, dtype=torch.float64)
    for rewards in itertools.product((0.0, 1.0), repeat=4):
        r = torch.tensor(rewards).double()
        a = advantages(r)
        chance = S ** r.sum() * (1 - S) ** (1 - r).sum()
        expected += chance * torch.stack(((a * r).sum(), -(a * (1 - r)).sum())) / 4
    torch.testing.assert_close(torch.stack(sides(advantages, 4, S)), expected)
    assert kappa(advantages, 4, S) == pytest.approx((expected[0] / expected[1]).item(), rel=1e-6, nan_ok=True)


@given(st.integers(2, 12), probability)
@settings(deadline=None)
def test_kappa_of_iac_without_std(G, S):
    """1 + (G - 2)(1 - S), falling to 1; divided by G a G-th of it, below 1. At S = 0 and 1 the limits."""
    assert kappa(centred, G, S, iac()) == pytest.approx(1 + (G - 2) * (1 - S), rel=1e-6)
    assert kappa(centred, G, S, iac(divide=True)) == pytest.approx((1 + (G - 2) * (1 - S)) / G, rel=1e-6)
    assert kappa(centred, G, 0.0, iac()) == pytest.approx(G - 1)
    assert kappa(centred, G, 1.0, iac()) == pytest.approx(1)


@given(st.integers(2, 10), probability, st.floats(0, 3), st.booleans())
@settings(deadline=None)
def test_kappa_is_the_growth_of_the_positive_side(G, S, alpha, divide):
    """P1's IAC, any alpha, with std: E[sum of calibrated positive advantages] / E[sum of uncalibrated ones]."""
    k = torch.arange(G + 1).double()
    chance = torch.distributions.Binomial(G, torch.tensor(S).double()).log_prob(k).exp()
    plain = (k * (G - k)).sqrt()  # k successes of sqrt((G - k) / k) each
    factor = ((G - k) / G if divide else G - k) ** alpha
    expected = (chance * plain * factor).sum() / (chance * plain).sum()
    assert kappa(grpo_advantages, G, S, iac(alpha, divide)) == pytest.approx(expected.item(), rel=1e-4)


@given(st.integers(2, 10), probability, st.floats(0.1, 9))
@settings(deadline=None)
def test_kappa_of_the_plain_cases(G, S, factor):
    """A constant is itself, positives alone are inf, both sides scaled alike (F-GRPO) stay 1, with and without std."""
    for advantages in (grpo_advantages, centred, rloo_advantages):
        assert kappa(advantages, G, S) == pytest.approx(1, rel=1e-5)
        assert kappa(advantages, G, S, times(factor)) == pytest.approx(factor, rel=1e-5)
        assert kappa(advantages, G, S, positives_only) == inf
        assert kappa(advantages, G, S, lambda a, r: a * (1 - r.mean(-1, keepdim=True))) == pytest.approx(1, rel=1e-5)
    assert kappa(lambda r: f_grpo_advantages(r, factor), G, S) == pytest.approx(1, rel=1e-5)
    assert math.isnan(kappa(torch.zeros_like, G, S))
    assert kappa(torch.ones_like, G, S) == pytest.approx(-S / (1 - S))  # wrong answers are pushed up


@given(st.integers(2, 8), probability)
@settings(deadline=None)
def test_daposs_filter_changes_kappa_only_where_flat_groups_teach(G, S):
    """Mixed groups alone: the same for group-relative advantages; not for r - 1/2, which flat groups move."""
    for calibrate in (None, iac(), times(3.0)):
        whole = kappa(grpo_advantages, G, S, calibrate)
        assert kappa(grpo_advantages, G, S, calibrate, mixed=True) == pytest.approx(whole, rel=1e-5)
    assert kappa(lambda r: r - 0.5, G, S) == pytest.approx(S / (1 - S), rel=1e-6)
    weights = torch.tensor([math.comb(G, k) * S**k * (1 - S) ** (G - k) for k in range(G + 1)]).double()
    weights[[0, -1]] = 0
    torch.testing.assert_close(group_weights(G, S, mixed=True), weights / weights.sum())
    mean = (weights * torch.arange(G + 1)).sum() / weights.sum() / G
    assert kappa(lambda r: r - 0.5, G, S, mixed=True) == pytest.approx((mean / (1 - mean)).item(), rel=1e-6)


def test_sides_of_many_samplers_at_once():
    """S (...) -> (...), as one by one."""
    S = torch.tensor([[0.1, 0.5], [0.9, 1.0]])
    positive, negative = sides(grpo_advantages, 8, S, iac())
    for at in itertools.product(range(2), repeat=2):
        one = sides(grpo_advantages, 8, S[at].item(), iac())
        torch.testing.assert_close((positive[at], negative[at]), one, atol=1e-6, rtol=1e-6)


@given(distributions(4), distributions(4), st.floats(0.2, 9))
@settings(max_examples=20, deadline=None)
def test_the_exact_ratio_moves_kappa_by_the_odds(policy, sampler, factor):
    """With weights pi/s the modes drift by gamma = 1 and `ratio_kappa`, R <= P: no restoring at any setting."""
    P, S = policy[:2].sum(), sampler[:2].sum()
    dz = expected_update(policy, sampler, CORRECT.double(), centred, 4, times(factor), importance=True)
    ratio = ratio_kappa(kappa(centred, 4, S.item(), times(factor)), P, S)
    drift = mode_ratio_drift(policy[:2] / P, policy[:2] / P, P, ratio)[0, 1]
    positive = sides(centred, 4, S, times(factor))[0] * P / S
    torch.testing.assert_close(positive * drift, dz[0] - dz[1], atol=1e-12, rtol=1e-6)
    assert law_R(P, ratio, 1.0) < P
    assert law_R(P, ratio_kappa(1.0, P, S), 1.0) == pytest.approx(((P - S) / (1 - S)).item(), abs=1e-9)


# --- the class ------------------------------------------------------------------------------------------------------


def batch_of(rewards, seed, cut):
    """A batch whose lengths and log-probabilities are drawn; without `cut` every completion stops before the limit."""
    draw, shape = generator(seed), (*rewards.shape, 6)
    lengths = torch.randint(1, 7 if cut else 6, rewards.shape, generator=draw)
    mask = torch.arange(6) < lengths[..., None]
    logprobs = -torch.rand(shape, generator=draw) * mask
    nothing = torch.zeros(len(rewards), 1)
    return Rollout(nothing.long(), nothing.bool(), torch.zeros(shape).long(), mask, logprobs, logprobs, -logprobs)


def advantages_of(estimator, rewards, seed=0, cut=True):
    return estimator.advantages(rewards, torch.zeros_like(rewards), batch_of(rewards, seed, cut), Update())


def in_the_class(estimator, cut=True):
    """Zero in sum over every group, and the same for the same rewards, whatever else the batch holds."""
    rewards = (torch.rand(40, 6, generator=generator(3)) < torch.linspace(0.05, 0.95, 40)[:, None]).float()
    first, second = (advantages_of(estimator, rewards, seed, cut) for seed in (0, 1))
    alone = torch.cat([advantages_of(estimator, row[None], cut=cut) for row in rewards])
    return all(
        torch.allclose(first, other, atol=1e-5) for other in (second, alone, first - first.mean(-1, keepdim=True))
    )


SAMPLING = {name: estimator for name, estimator in ESTIMATORS.items() if estimator.advantages is not None}


@pytest.mark.parametrize("cut", [True, False], ids=["any length", "no answer cut"])
def test_every_zero_sum_reward_only_estimator_has_R_0_on_policy(cut):
    """Found by looking at what they compute: kappa = 1, R = 0, and the richer of two modes gains, for each of them."""
    members = {name: estimator for name, estimator in SAMPLING.items() if in_the_class(estimator, cut)}
    assert len(members) >= 3
    policy = torch.tensor([0.3, 0.1, 0.6]).double()
    for name, estimator in members.items():

        def advantages(rewards, estimator=estimator):
            return advantages_of(estimator, rewards.reshape(-1, rewards.shape[-1]), cut=cut).view_as(rewards)

        for S in (0.05, 0.4, 0.95):
            assert kappa(advantages, 6, S) == pytest.approx(1, rel=1e-4), name
            assert law_R(S, kappa(advantages, 6, S), 1.0) == pytest.approx(0, abs=1e-4), name
        dz = expected_update(policy, policy, torch.tensor([1.0, 1, 0]), advantages, 6)
        positive = sides(advantages, 6, 0.4)[0].item()
        assert positive > 0
        assert (dz[0] - dz[1]).item() == pytest.approx(positive * 0.5, rel=1e-4), name  # B+ (q_a - q_b)


def test_the_class_is_told_from_its_neighbours():
    """Whitening over the batch and rewards by likelihood are outside; DAPO is where its length penalty bites."""
    names = {cut: {name for name, row in SAMPLING.items() if in_the_class(row, cut)} for cut in (True, False)}
    assert names[False] - names[True] == {"dapo"}
    assert set(SAMPLING) - names[False] == {"reinforce++", "unlikeliness"}


@given(numbers(5, 0.0, 3.0), distributions(4), distributions(4))
@settings(max_examples=30, deadline=None)
def test_any_zero_sum_reward_only_advantages_follow_the_sampler(right, policy, sampler):
    """Random members of the class: C = 0, the drift is B+ (ŝ_a - ŝ_b), and on-policy it has the sign of pi_a - pi_b."""
    advantages = zero_sum(right)
    S = sampler[:2].sum()
    dz = expected_update(policy, sampler, CORRECT.double(), advantages, 4)
    positive, negative = sides(advantages, 4, S)
    torch.testing.assert_close(positive, negative)
    torch.testing.assert_close(dz[0] - dz[1], positive * (sampler[0] - sampler[1]) / S)
    on = expected_update(policy, policy, CORRECT.double(), advantages, 4)
    assert (on[0] - on[1]) * (policy[0] - policy[1]) >= -1e-12


@given(distributions(4), numbers(5), numbers(5))
@settings(max_examples=30, deadline=None)
def test_on_policy_no_reward_only_advantages_restore(policy, right, wrong):
    """Zero-sum or not, calibrated or not: (pi_a - pi_b)(A+ - C) with A+ - C = (1 - P)(A+ - A-)."""
    P = policy[:2].sum()
    advantages = by_count(right, wrong)
    dz = expected_update(policy, policy, CORRECT.double(), advantages, 4)
    positive, negative = sides(advantages, 4, P)
    gap = positive / P + negative / (1 - P)  # A+ - A-
    torch.testing.assert_close(dz[0] - dz[1], (policy[0] - policy[1]) * (1 - P) * gap)


# --- gamma ----------------------------------------------------------------------------------------------------------


@given(distributions(4), st.floats(0, 2.5))
@settings(max_examples=20, deadline=None)
def test_gamma_of_an_ideal_memory(policy, mu):
    """s ~ pi / s^mu, found by iterating half-way in logs, follows the policy with exponent 1 / (1 + mu)."""
    sampler = policy
    for _ in range(200):
        sampler = ((1 - mu) / 2 * sampler.log() + policy.log() / 2).softmax(-1)
    expected = (policy.log() / (1 + mu)).softmax(-1)
    torch.testing.assert_close(sampler, expected, atol=1e-6, rtol=1e-5)
    if policy.log().std() > 0.1:
        assert fitted_gamma(policy, sampler).item() == pytest.approx(gamma_ideal_memory(mu), abs=1e-5)


@given(distributions(5), st.floats(-0.5, 2), numbers(5, 0.0, 1.0))
@settings(deadline=None)
def test_fitted_gamma_and_mode_bias_take_a_sampler_apart(q, gamma, noise):
    """A power law is found again; what is left is the bias, centred."""
    sampler = (gamma * q.log()).softmax(-1)
    if q.log().std() > 0.05:
        assert fitted_gamma(q, sampler).item() == pytest.approx(gamma, abs=1e-6)
    biased = (noise + gamma * q.log()).softmax(-1)
    torch.testing.assert_close(mode_bias(q, biased, gamma), noise - noise.mean())


def test_a_mode_all_but_lost_does_not_decide_gamma():
    """Two modes say .5; a third, with a share of 1e-7, is drawn as if it had a half."""
    q = torch.tensor([0.8, 0.2, 1e-7]).double()
    drawn = torch.cat((q[:2] ** 0.5, torch.tensor([1.0])))
    assert fitted_gamma(q, drawn / drawn.sum()).item() == pytest.approx(0.5, abs=0.01)


def test_gamma_is_unknown_where_nothing_differs():
    """Equal shares, or one living mode: NaN, in a batch too; a dead mode is left out of fit and bias."""
    q = torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0], [0.6, 0.4, 0.0]]).double()
    for measure in (fitted_gamma, gamma_now):
        assert measure(q, q).isnan().tolist() == [True, True, False]
        assert measure(q, q)[2].item() == pytest.approx(1)
    assert mode_bias(q, q, 0.5)[2].isnan().tolist() == [False, False, True]
    assert mode_bias(q, q, 0.5)[2, :2].sum().item() == pytest.approx(0, abs=1e-12)


@given(distributions(4), distributions(4), st.floats(0.1, 1), st.floats(1, 20))
@settings(deadline=None)
def test_gamma_now_decides_the_entropy(q, sampler_shares, P, factor):
    """d entropy / dt by automatic differentiation along the law's drift is Cov(log q, q) (rho - gamma_now)."""
    rho = P * (1 - 1 / factor)
    logits = q.log().requires_grad_()
    shares = logits.softmax(-1)
    (-(shares * shares.log()).sum()).backward()
    speed = (logits.grad * (sampler_shares - rho * q)).sum()
    log_q = q.log()
    spread = (q * (log_q - (q * log_q).sum()) * q).sum()
    if spread > 1e-6:
        torch.testing.assert_close(speed, spread * (rho - gamma_now(q, sampler_shares)), atol=1e-9, rtol=1e-6)


@given(numbers(4, -1.0, 1.0), st.floats(0.2, 1.5))
@settings(deadline=None)
def test_near_equal_shares_both_gammas_are_the_exponent(tilt, gamma):
    """gamma_now -> gamma as the shares become equal."""
    q = (1e-3 * tilt).softmax(-1)
    if q.log().std() > 1e-4:
        assert gamma_now(q, (gamma * q.log()).softmax(-1)).item() == pytest.approx(gamma, rel=0.01)


# --- R --------------------------------------------------------------------------------------------------------------


def test_R_of_the_known_settings():
    """P (1 - 1/kappa)(1 + mu): GRPO and DLC alone 0, IAC alone below 1, divided below 0, temperature as a memory."""
    assert law_R(1.0, 1.0, gamma_ideal_memory(0.5)) == 0
    assert law_R(0.9, kappa(grpo_advantages, 8, 0.9, iac()), 1.0) < 0.9
    assert law_R(0.5, kappa(grpo_advantages, 8, 0.5, iac(divide=True)), 1.0) < 0
    found = [law_R(1.0, k, gamma_ideal_memory(mu)) for k, mu in ((2, 0.5), (4, 0.5), (8, 0.5), (inf, 0.5), (inf, 0.25))]
    assert found == pytest.approx([0.75, 1.125, 1.3125, 1.5, 1.25])
    assert law_R(0.5, inf, gamma_temperature(4.0)) == pytest.approx(2.0)


@given(st.integers(3, 16), st.floats(0.7, 1), st.floats(0.3, 0.65))
@settings(deadline=None)
def test_iac_holds_modes_only_while_the_sampler_errs(G, P, gamma):
    """R = 1 at 1 - S = 1/((G - 2)(P/gamma - 1)), wherever that is a probability."""
    edge = 1 / ((G - 2) * (P / gamma - 1))
    if edge < 0.99:
        assert law_R(P, kappa(centred, G, 1 - edge, iac()), gamma) == pytest.approx(1, rel=1e-5)
        assert law_R(P, kappa(centred, G, 1 - 0.99 * edge, iac()), gamma) < 1


@given(st.integers(2, 6), st.floats(0.5, 1), st.floats(1, 30), st.floats(0.3, 1), st.floats(-1, 1))
@settings(deadline=None)
def test_growth_rate_near_equal_shares(modes, P, factor, gamma, tilt):
    """A small log-ratio grows at gamma (1 - R)/M: the drift itself, to first order."""
    tiny = 1e-4 * torch.linspace(-1, 1, modes).double() * tilt
    q, sampler_shares = tiny.softmax(-1), (gamma * tiny).softmax(-1)
    drift = mode_ratio_drift(q, sampler_shares, P, factor)[-1, 0]
    assert drift.item() == pytest.approx(growth_rate(modes, P, factor, gamma) * (tiny[-1] - tiny[0]).item(), abs=1e-8)


@given(numbers(4, -2.0, 2.0), numbers(4, -1.0, 1.0), st.floats(0.2, 1.2), st.floats(0, 1))
@settings(deadline=None)
def test_modes_climb_a_potential(u, log_b, gamma, rho):
    """F of step 5 has the drift as its gradient; b and any rho included."""
    u = u.requires_grad_()
    q, sampler_shares = u.softmax(-1), (log_b + gamma * u).softmax(-1)
    F = (log_b + gamma * u).logsumexp(-1) / gamma - rho * u.logsumexp(-1) - (1 - rho) * u.mean()
    F.backward()
    # kappa = inf and P = rho stand for any P and kappa with this rho
    drift = mode_ratio_drift(q.detach(), sampler_shares.detach(), rho, inf)
    torch.testing.assert_close(u.grad[:, None] - u.grad[None, :], drift, atol=1e-9, rtol=1e-9)


@given(st.floats(0.2, 0.95), st.floats(0.3, 0.999), st.floats(0.01, 4))
@settings(deadline=None)
def test_two_modes_far_from_equal(gamma, rho, x):
    """tanh(gamma x) against rho tanh(x): with R < 1 no start draws together, with R > 1 only a near one."""
    q = torch.tensor([x, -x], dtype=torch.float64).softmax(-1)
    drift = mode_ratio_drift(q, (gamma * q.log()).softmax(-1), rho, inf)[0, 1].item()
    assert drift == pytest.approx(math.tanh(gamma * x) - rho * math.tanh(x), abs=1e-12)
    if rho < gamma:
        assert drift > 0
    edge = critical_share(2, rho, inf, gamma)
    if rho > gamma and abs(q[1].item() / edge - 1) > 0.01:
        assert (drift < 0) == (q[1].item() > edge)


@given(st.integers(2, 8), st.floats(0.6, 0.99), st.floats(2, 50), st.floats(0.3, 0.95))
@settings(deadline=None)
def test_below_the_critical_share_a_mode_dies(modes, P, factor, gamma):
    """Just above it a lone poor mode gains on its equal fellows, just below it loses; for R <= 1 the edge is 1/M."""
    edge = critical_share(modes, P, factor, gamma)
    if law_R(P, factor, gamma) <= 1:
        assert edge == 1 / modes
        return
    assert 0 < edge < 1 / modes
    for share, gains in ((edge * 0.999, False), (min(edge * 1.001, (edge + 1 / modes) / 2), True)):
        q = torch.full((modes,), (1 - share) / (modes - 1), dtype=torch.float64)
        q[0] = share
        drift = mode_ratio_drift(q, (gamma * q.log()).softmax(-1), P, factor)[0, 1].item()
        assert (drift > 0) == gains or abs(drift) < 1e-9


def test_no_mode_is_lost_without_a_negative_side_at_P_1():
    """rho = 1: a critical share of 0; it falls with kappa and with mu."""
    assert critical_share(5, 1.0, inf, 0.5) == 0
    shares = [
        critical_share(5, 0.99, k, gamma_ideal_memory(mu)) for k, mu in ((4, 0.5), (8, 0.5), (8, 1.0), (inf, 1.0))
    ]
    assert shares == sorted(shares, reverse=True)


# --- unequal modes --------------------------------------------------------------------------------------------------


@given(numbers(4, -0.5, 0.5), st.floats(0.2, 0.8))
@settings(max_examples=30, deadline=None)
def test_the_rest_point_without_a_negative_side(log_b, gamma):
    """q* ~ b^(1/(1 - gamma)) at kappa = inf and P = 1."""
    expected = (log_b / (1 - gamma)).softmax(-1)
    torch.testing.assert_close(rest_point(log_b.exp(), 1.0, inf, gamma), expected, atol=1e-9, rtol=1e-6)


@given(numbers(3, -0.3, 0.3), st.floats(0.85, 1), st.floats(5, 50), st.floats(0.3, 0.7))
@settings(max_examples=30, deadline=None)
def test_the_general_rest_point_rests_and_attracts(log_b, P, factor, gamma):
    """No drift there, and steps along the drift come back to it; for a small bias the exponent is 1/(rho - gamma)."""
    rho = P * (1 - 1 / factor)
    q = rest_point(log_b.exp(), P, factor, gamma)
    if q.isnan().any():
        assert log_b.std() > 0 or rho <= gamma
        return
    assert q.sum().item() == pytest.approx(1)
    sampler_shares = (log_b + gamma * q.log()).softmax(-1)
    assert mode_ratio_drift(q, sampler_shares, P, factor).abs().max() < 1e-11
    torch.testing.assert_close(sampler_shares, rho * q + (1 - rho) / 3)
    u = q.log() + torch.tensor([1e-4, -1e-4, 0.0])
    before = (u.softmax(-1).log() - q.log()).std()
    for _ in range(200):
        u = u + 0.5 * ((log_b + gamma * u).softmax(-1) - rho * u.softmax(-1))
    assert (u.softmax(-1).log() - q.log()).std() < before
    small = rest_point((1e-4 * log_b).exp(), P, factor, gamma)
    expected = 1e-4 * (log_b - log_b.mean()) / (rho - gamma)
    torch.testing.assert_close(small.log() - small.log().mean(), expected, atol=2e-7, rtol=1e-2)


def test_where_no_point_holds_all_modes():
    """R <= 1, a bias too large for a finite kappa, or a saddle; where rho = 1 each of these biases has a rest point."""
    b = torch.tensor([2.0, 1.0, 1.0])
    assert rest_point(torch.ones(3), 1.0, 2.0, 2 / 3).isnan().all()
    assert rest_point(b, 1.0, 8.0, 2 / 3).isnan().all()
    saddle = torch.tensor([1.0, 1.0, 1.284])  # .13, .13 and .74: the two poor ones stay only as long as they are equal
    assert rest_point(saddle, 0.7, inf, 0.53).isnan().all()
    for bias in (b, saddle):
        assert not rest_point(bias, 1.0, inf, 2 / 3).isnan().any()


# --- inverse probability --------------------------------------------------------------------------------------------


@given(distributions(4), probability, st.floats(-3, 3))
@settings(max_examples=30, deadline=None)
def test_inverse_probability_restores_at_every_accuracy(shape, P, baseline):
    """-M (pi_a - pi_b) for a constant baseline and the others' mean, (G - 1)/G of it for the group's mean."""
    policy = torch.cat((shape[:2] / shape[:2].sum() * P, shape[2:] / shape[2:].sum() * (1 - P)))
    force = inverse_probability_drift(policy, CORRECT)[0, 1]
    assert force.item() == pytest.approx(-2 * (policy[0] - policy[1]).item())
    rewards = CORRECT / policy
    for advantages, size in (
        (lambda r: r - baseline, 1.0),
        (centred, 3 / 4),
        (lambda r: centred(r) * 4 / 3, 1.0),
    ):
        dz = expected_update(policy, policy, rewards, advantages, 4)
        torch.testing.assert_close(dz[0] - dz[1], size * force, atol=1e-9, rtol=1e-6)


def test_divided_by_the_deviation_inverse_probability_needs_accuracy():
    """G = 8, shares 3:1: the rich get richer at P = .3, the poor at .5; without the division the poor at both."""
    for P, sign in ((0.1, 1), (0.3, 1), (0.5, -1), (0.9, -1)):
        policy = torch.tensor([0.75 * P, 0.25 * P, 1 - P]).double()
        rewards = torch.tensor([1.0, 1.0, 0.0]) / policy
        dz = expected_update(policy, policy, rewards, grpo_advantages, 8)
        assert (dz[0] - dz[1]) * sign > 0.01, P
        dz = expected_update(policy, policy, rewards, centred, 8)
        assert dz[0] - dz[1] < 0


def test_modes_under_the_clamp_compete_as_on_policy():
    """min(1/pi, c): (c - E[reward])(pi_a - pi_b) for two modes rarer than 1/c."""
    policy, c = torch.tensor([0.03, 0.01, 0.4, 0.56]).double(), 10.0
    rewards = torch.tensor([1.0, 1, 1, 0]) * (1 / policy).clamp(max=c)
    dz = expected_update(policy, policy, rewards, lambda r: r - 0.3, 3)
    expected = (c - (policy * rewards).sum()) * 0.02
    assert (dz[0] - dz[1]).item() == pytest.approx(expected.item(), rel=1e-6)
    assert expected > 0


# --- the table ------------------------------------------------------------------------------------------------------


def table(tilt=0.2, modes=5, wrong=5, P=0.5):
    """Logits (N,) and which answers are correct; each mode e^tilt times as likely as the next."""
    right = P * (-tilt * torch.arange(modes).double()).softmax(-1)
    logits = torch.cat((right, torch.full((wrong,), (1 - P) / wrong).double())).log()
    return logits, torch.arange(modes + wrong) < modes


def test_one_step_of_the_table_is_the_expected_update():
    """Exact groups by enumeration, for a memory of each kind after it has learned something, and for the ratio."""
    logits, correct = table(modes=2, wrong=2)
    for memory, importance in itertools.product(("ideal", "correct", "all"), (False, True)):
        run = simulate_table(
            logits, correct, grpo_advantages, 4, 3, calibrate=iac(), mu=0.7, memory=memory, importance=importance
        )
        policy, sampler = run.policy[2], run.sampler[2]
        dz = expected_update(policy, sampler, correct.double(), grpo_advantages, 4, iac(), importance)
        change = run.policy[3].log() - policy.log()
        torch.testing.assert_close(change - change.mean(), dz - dz.mean(), atol=1e-6, rtol=1e-5)


def test_known_runs_of_the_table():
    """From near-equal modes; mu = .5: kappa 2 falls, 3.2 stands nearly still, 5 rises; mu = .2: 5 falls, 8 rises."""
    logits, correct = table(tilt=0.2)
    factor, mu = torch.tensor([2, 3.2, 5, 5, 8]), torch.tensor([0.5, 0.5, 0.5, 0.2, 0.2])
    run = simulate_table(logits, correct, centred, 8, 2000, 0.1, factor=factor, mu=mu, every=500)
    assert run.R[-1].tolist() == pytest.approx([0.75, 1.02, 1.19, 0.95, 1.04], abs=0.012)
    late = (run.modes[-1] - run.modes[-2]).tolist()
    assert late[0] < -0.1
    assert abs(late[1]) < 0.005
    assert late[2] > 0.005
    assert late[3] < -0.02
    assert late[4] > 0.005
    assert run.modes[-1].tolist() == pytest.approx([3.66, 4.60, 4.94, 3.86, 4.51], abs=0.02)


def test_from_lopsided_modes_R_above_1_holds_those_above_the_critical_share():
    """Shares .52 to .03: kappa = 8 and mu = .2 (R = 1.04) keep three modes, mu = .5 or kappa = inf all."""
    logits, correct = table(tilt=0.7, P=0.99)
    factor, mu = torch.tensor([8, 8, inf]), torch.tensor([0.2, 0.5, 0.2])
    run = simulate_table(logits, correct, centred, 8, 1000, 0.5, factor=factor, mu=mu, natural=True, every=1000)
    assert (run.R[0] > 1).all()
    assert run.modes[-1].tolist() == pytest.approx([3, 5, 5], abs=0.02)
    for cell, k in enumerate(factor.tolist()):
        edge = critical_share(5, run.P[-1, cell].item(), k, gamma_ideal_memory(mu[cell].item()))
        rarest = run.shares[:, cell, -1]
        assert (rarest[-1] > rarest[0]) == (rarest[0] > edge)


def test_the_map_agrees_with_the_law():
    """Every cell more than 5 % away from R = 1; both outcomes are on the map."""
    found = law_map(torch.linspace(0, 1, 9), torch.tensor([1, 1.5, 2, 3, 4, 6, 8, 12, 32, inf]))
    far = (found.R - 1).abs() > 0.05
    assert found.R.shape == (9, 10)
    assert (found.law == found.simulated)[far].all()
    assert found.law[far].float().mean() > 0.25
    assert (~found.law)[far].float().mean() > 0.25
    assert far.float().mean() > 0.85


def test_from_a_tilted_start_the_law_errs_on_one_side_alone():
    """R < 1 always falls. Some cells fall although R > 1: rare modes are lost. `R_now` tells each next step."""
    mus, kappas = torch.linspace(0, 1, 6), torch.tensor([1, 2, 3, 5, 8, 16, inf])
    found = law_map(mus, kappas, tilt=0.8)
    wrong = found.law != found.simulated
    assert wrong.any()
    assert found.law[wrong].all()
    logits, correct = table(tilt=0.8, P=0.999)
    kappas[2] = 3.55  # R = 1.005 at mu = .4
    run = simulate_table(logits, correct, centred, 8, 1, 1e-3, factor=kappas, mu=mus[:, None], natural=True)
    rises = run.modes[1] > run.modes[0]
    assert ((run.R_now[0] > 1) == rises).all()
    assert ((run.R[0] > 1) & ~rises).any()


@pytest.mark.parametrize("memory", ["ideal", "correct", "all"])
def test_R_now_tells_every_step(memory):
    """Whatever the memory has learned: the effective modes grow in the next small step exactly where R_now > 1."""
    logits, correct = table(tilt=0.6, P=0.7)
    run = simulate_table(
        logits, correct, centred, 8, 150, 0.2, factor=torch.tensor([1, 3, 10, inf]), mu=0.8, memory=memory, natural=True
    )
    clear = (run.R_now[:-1] - 1).abs() > 0.02
    rises = run.modes[1:] > run.modes[:-1]
    assert ((run.R_now[:-1] > 1) == rises)[clear].all()
    assert 0.1 < rises[clear].float().mean() < 0.9


def test_a_memory_that_keeps_up_is_nearly_ideal():
    """Learned from all that is drawn: gamma falls from 1 to 1/(1 + mu); a slow memory stays above."""
    logits, correct = table(tilt=0.4)
    fast, slow = (
        simulate_table(logits, correct, centred, 8, 300, 0.02, mu=0.5, memory="all", memory_rate=rate, every=300)
        for rate in (2.0, 0.02)
    )
    gammas = [fitted_gamma(run.shares, run.sampler_shares) for run in (fast, slow)]
    assert gammas[0].tolist() == pytest.approx([1.0, gamma_ideal_memory(0.5)], abs=0.01)
    assert 0.72 < gammas[1][-1] < 0.98


def test_a_memory_of_right_answers_drives_the_sampler_from_them():
    """S falls below P, which keeps IAC's kappa, and so R, up; a memory of all answers does not."""
    logits, correct = table(P=0.8)
    right, everything = (
        simulate_table(logits, correct, centred, 8, 200, 0.1, calibrate=iac(), mu=1.0, memory=memory, every=200)
        for memory in ("correct", "all")
    )
    assert right.P[-1] - right.S[-1] > 0.5
    assert everything.P[-1] - everything.S[-1] < 0.2
    assert right.R[-1] > everything.R[-1] + 0.3


def test_iac_with_dlc_ends_and_a_constant_does_not():
    """IAC's kappa falls to 1 as the sampler gets all right, R with it, and the modes go; at kappa = 8 they stay."""
    logits, correct = table(P=0.5)
    late = simulate_table(logits, correct, centred, 8, 500, 0.5, calibrate=iac(), mu=0.5, natural=True, every=50)
    assert late.R[:3].tolist() == pytest.approx([0.56, 0.08, 0.0], abs=0.01)
    assert late.kappa[-1] == pytest.approx(1, abs=1e-6)
    assert late.modes[-1] < 1.1
    kept = simulate_table(logits, correct, centred, 8, 500, 0.5, factor=8.0, mu=0.5, natural=True, every=500)
    assert kept.modes[-1] > 4.99


def test_the_exact_ratio_takes_the_effect_away():
    """Positives only with DLC keeps all modes; with pi/s one is left, R = P, though (P - S)/(1 - S) > 0 without IAC."""
    logits, correct = table(P=0.5)
    with_it, without = (
        simulate_table(
            logits, correct, centred, 8, 1500, 1.0, factor=inf, mu=0.5, importance=importance, natural=True, every=1500
        )
        for importance in (True, False)
    )
    torch.testing.assert_close(with_it.R[-1], with_it.P[-1])
    assert with_it.modes[-1] < with_it.modes[0] < without.modes[-1]
    plain = simulate_table(logits, correct, centred, 8, 1, mu=0.5, importance=True, memory="correct")
    torch.testing.assert_close(plain.R, (plain.P - plain.S) / (1 - plain.S))


def test_unequal_modes_settle_at_the_rest_point():
    """ŝ ~ b q^gamma, stepped to the end, for a rho below 1."""
    log_b, gamma, rate = torch.tensor([0.2, 0.0, -0.1]).double(), 0.5, 0.5
    u = torch.zeros(3, dtype=torch.float64)
    for _ in range(4000):
        q = u.softmax(-1)
        u = u + rate * ((log_b + gamma * u).softmax(-1) - 0.95 * q)
    torch.testing.assert_close(u.softmax(-1), rest_point(log_b.exp(), 0.95, inf, gamma), atol=1e-8, rtol=1e-6)


# --- sampled groups -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("memory", ["ideal", "correct", "all"])
def test_sampled_steps_have_the_moments_of_all_groups(memory):
    """20,000 tables side by side: mean and variance of one step, at the policy that one exact step leads to."""
    logits, correct = table(modes=2, wrong=2)
    tables = logits.expand(20_000, -1)
    run = simulate_table(
        tables, correct, centred, 4, 1, calibrate=iac(), factor=2.0, mu=0.6, memory=memory, generator=generator()
    )
    change = run.policy[1].log() - run.policy[0].log()
    drift = change[:, 0] - change[:, 1]

    def calibrate(a, r):
        return times(2.0)(iac()(a, r), r)

    mean, covariance = update_moments(run.policy[0, 0], run.sampler[0, 0], correct.double(), centred, 4, calibrate)
    c = torch.tensor([1.0, -1.0, 0, 0]).double()
    variance = (c @ covariance @ c).item()
    assert drift.mean().item() == pytest.approx((c @ mean).item(), abs=4 * (variance / 20_000) ** 0.5)
    assert drift.var().item() == pytest.approx(variance, rel=0.05)


def test_sampled_tables_are_reproducible_and_their_memory_learns():
    """Same generator, same run, each table its own; a memory of right answers learns nothing from groups without."""
    logits, correct = table(P=0.2)

    def run():
        return simulate_table(
            logits.expand(3, -1), correct, centred, 2, 40, 0.3, mu=0.5, memory="correct", generator=generator(1)
        )

    first = run()
    assert torch.equal(first.policy, run().policy)
    assert not torch.equal(first.policy[-1, 0], first.policy[-1, 1])
    memory = ((first.policy / first.sampler).log() / 0.5).softmax(-1)  # from sampler ~ policy / memory^mu
    same = torch.isclose(memory[1:], memory[:-1], rtol=1e-9).all(-1)
    assert 0.5 < same.double().mean() < 0.95


@pytest.mark.slow
def test_noise_is_held_where_R_is_above_1_and_grows_where_it_is_1():
    """All answers right, A = 1, so P = 1 and rho = 1: with DLC (R = 1 + mu) the variance of a log-ratio settles at
    rate v / (2 L), v ~ 1/G; on-policy (R = 1) it grows by v rate^2 a step.
    """
    logits, correct = torch.zeros(3).double(), torch.ones(3).bool()
    c, third = torch.tensor([1.0, -1.0, 0]).double(), torch.full((3,), 1 / 3).double()
    rate, steps, spread = 0.1, 300, {}
    for G, mu in itertools.product((4, 16), (0.0, 1.0)):
        run = simulate_table(
            logits.expand(1500, -1), correct, torch.ones_like, G, steps, rate, mu=mu, generator=generator(), every=steps
        )
        spread[G, mu] = (run.policy[-1, :, 0] / run.policy[-1, :, 1]).log().var().item()
        noise = 2 / 3 / G  # exactly c V c: by enumeration too
        if G == 4:
            V = update_moments(third, third, torch.ones(3), torch.ones_like, G)[1]
            assert (c @ V @ c).item() == pytest.approx(noise)
        back = -growth_rate(3, 1.0, inf, gamma_ideal_memory(mu)) * rate
        expected = noise * rate**2 * (steps if mu == 0 else 1 / (1 - (1 - back) ** 2))
        assert spread[G, mu] == pytest.approx(expected, rel=0.2), (G, mu)
    assert spread[4, 1.0] < spread[4, 0.0] / 3


def test_noise_alone_loses_modes_in_a_time_that_goes_as_G_over_rate_squared():
    """R = 1: after 3 G/rate^2 steps three equal modes are 2.4, whatever G and the rate."""
    for G, rate in ((4, 0.4), (16, 0.8)):
        steps = int(3 * G / rate**2)
        start, all_right = torch.zeros(1000, 3), torch.ones(3)
        run = simulate_table(start, all_right, torch.ones_like, G, steps, rate, generator=generator(), every=steps)
        assert run.modes[-1].mean().item() == pytest.approx(2.4, abs=0.06)


# --- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: side_sums(centred, 0), "at least 1"),
        (lambda: kappa(centred, 4, 1.1), "probability"),
        (lambda: kappa(centred, 4, math.nan), "probability"),
        (lambda: group_weights(1, 0.5, mixed=True), "never mixed"),
        (lambda: gamma_ideal_memory(-1.0), "mu"),
        (lambda: gamma_temperature(0.0), "temperature"),
        (lambda: law_R(1.0, 0.0, 1.0), "kappa"),
        (lambda: critical_share(1, 1.0, 2.0, 1.0), "alone"),
        (lambda: simulate_table(*table(), centred, 4, 1, natural=True, generator=generator()), "natural"),
    ],
)
def test_what_makes_no_sense_is_refused(call, message):
    """Each with a sentence that names it."""
    with pytest.raises(ValueError, match=message):
        call()
