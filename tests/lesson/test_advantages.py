"""Advantages: each estimator against a plain loop written from its formula, and what must hold for every row."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minirlvr import (
    CALIBRATIONS,
    ESTIMATORS,
    Calibration,
    Rollout,
    Update,
    dapo_advantages,
    f_grpo_advantages,
    grpo_advantages,
    inverse_success_calibration,
    reinforce_pp_advantages,
    rloo_advantages,
    unlikeliness_rewards,
    weigh_positive,
)

EPSILON = 1e-6  # GRPO's, beside the standard deviation
TABLE = [18.5, 10.4, 6.46, 4.0, 2.32, 1.15, 0.378]  # IAC on GRPO, G = 8, |S+| = 1..7: papers.md


def some_rewards(Q=5, G=6, seed=0):
    """Rewards in [0, 1] without ties."""
    return torch.rand(Q, G, generator=torch.Generator().manual_seed(seed))


def a_batch(Q, G, T=5, seed=0):
    """A batch of which only lengths and log-probabilities matter."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, T + 1, (Q, G, 1), generator=g)
    return of_lengths(lengths, -torch.rand(Q, G, T, generator=g))


def of_lengths(lengths, logprobs):
    """The batch with completions of these lengths (Q, G, 1) and, inside them, these log-probabilities (Q, G, T)."""
    mask = torch.arange(logprobs.shape[-1]) < lengths
    logprobs, tokens = logprobs * mask, torch.full(mask.shape, 2)
    return Rollout(tokens[:, 0], mask[:, 0] | True, tokens, mask, logprobs, logprobs, -logprobs)


def estimate(name, rewards, penalty=None, batch=None, **dials):
    """Advantages of the table's row, with a batch where all completions are equally long and likely, unless given."""
    Q, G = rewards.shape
    if batch is None:
        batch = of_lengths(torch.full((Q, G, 1), 3), torch.full((Q, G, 5), -1.0))
    penalty = torch.zeros(Q, G) if penalty is None else penalty
    return ESTIMATORS[name].advantages(rewards, penalty, batch, Update(**dials))


# --- plain loops ----------------------------------------------------------------------------------------------------


def mean_and_std(values):
    mean = sum(values) / len(values)
    return mean, math.sqrt(sum((v - mean) ** 2 for v in values) / len(values))


def plain_grpo(groups):
    found = []
    for group in groups:
        mean, std = mean_and_std(group)
        found.append([(r - mean) / (std + EPSILON) for r in group])
    return found


def plain_dr_grpo(groups):
    return [[r - sum(group) / len(group) for r in group] for group in groups]


def plain_rloo(groups):
    return [[r - (sum(group) - r) / (len(group) - 1) for r in group] for group in groups]


def plain_reinforce_pp(groups):
    mean, std = mean_and_std([r for group in groups for r in group])
    return [[(r - mean) / (std + EPSILON) for r in group] for group in groups]


def plain_f_grpo(groups, gamma=1.0):
    found = []
    for group, advantages in zip(groups, plain_grpo(groups), strict=True):
        share = sum(r > 0 for r in group) / len(group)
        found.append([a * (1 - share) ** gamma for a in advantages])
    return found


def plain_iac(advantages, groups, alpha, divide=False):
    found = []
    for row, group in zip(advantages, groups, strict=True):
        failures = len(group) - sum(r > 0 for r in group)
        factor = (failures / len(group) if divide else failures) ** alpha
        found.append([a * factor if a > 0 else a for a in row])
    return found


PLAIN = {
    "grpo": (grpo_advantages, plain_grpo),
    "dr_grpo": (lambda r: grpo_advantages(r, normalize_std=False), plain_dr_grpo),
    "rloo": (rloo_advantages, plain_rloo),
    "reinforce++": (reinforce_pp_advantages, plain_reinforce_pp),
    "f_grpo": (f_grpo_advantages, plain_f_grpo),
}
SAMPLING = [name for name, estimator in ESTIMATORS.items() if estimator.samples]
WITHIN_A_GROUP = [name for name in SAMPLING if ESTIMATORS[name].needs_group]
BENDING = [name for name, calibration in CALIBRATIONS.items() if calibration.advantages]


@pytest.mark.parametrize("name", list(PLAIN))
@pytest.mark.parametrize("binary", [True, False])
def test_estimators_equal_a_plain_loop(name, binary):
    """Each estimator is its formula, group by group, for rewards of 0 and 1 and for rewards in between."""
    ours, plain = PLAIN[name]
    rewards = (some_rewards() > 0.5).float() if binary else some_rewards()
    expected = torch.tensor(plain(rewards.tolist()))
    torch.testing.assert_close(ours(rewards), expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(estimate(name, rewards), expected, atol=1e-4, rtol=1e-4)


def test_dapo_is_grpo_on_rewards_less_the_overlong_penalty():
    """DAPO's advantages are GRPO's; the one token before the cut costs up to 1 of the reward."""
    rewards, batch = (some_rewards() > 0.5).float(), a_batch(5, 6)
    lengths = batch.mask.sum(-1).tolist()
    shaped = [
        [r - (length == 5) for r, length in zip(*rows, strict=True)]
        for rows in zip(rewards.tolist(), lengths, strict=True)
    ]
    found = estimate("dapo", rewards, batch=batch)
    torch.testing.assert_close(found, torch.tensor(plain_grpo(shaped)), atol=1e-4, rtol=1e-4)


def test_unlikeliness_equals_a_plain_loop():
    """r (1 - beta rank / G), rank 0 the least likely of its group; then GRPO."""
    rewards, batch = (some_rewards() > 0.5).float(), a_batch(5, 6)
    summed = batch.logprobs.sum(-1)
    shaped = [
        [r * (1 - 0.25 * sum(other < own for other in row) / 6) for r, own in zip(group, row, strict=True)]
        for group, row in zip(rewards.tolist(), summed.tolist(), strict=True)
    ]
    torch.testing.assert_close(unlikeliness_rewards(rewards, summed), torch.tensor(shaped))
    found = estimate("unlikeliness", rewards, batch=batch)
    torch.testing.assert_close(found, torch.tensor(plain_grpo(shaped)), atol=1e-4, rtol=1e-4)


def test_unlikeliness_favours_the_unlikely():
    """Of two right answers the less likely one gets more; a wrong one gets nothing."""
    found = unlikeliness_rewards(torch.tensor([[1.0, 1.0, 0.0]]), torch.tensor([[-1.0, -5.0, -9.0]]), beta=0.3)
    torch.testing.assert_close(found, torch.tensor([[0.8, 0.9, 0.0]]))


@pytest.mark.parametrize("gamma", [0.0, 0.5, 1.0])
def test_f_grpo_scales_all_advantages_of_a_group(gamma):
    """(1 - |S+|/G)^gamma on positive and negative ones alike; gamma 0 is GRPO."""
    rewards = (some_rewards() > 0.5).float()
    expected = torch.tensor(plain_f_grpo(rewards.tolist(), gamma))
    torch.testing.assert_close(f_grpo_advantages(rewards, gamma), expected, atol=1e-4, rtol=1e-4)
    if not gamma:
        assert torch.equal(f_grpo_advantages(rewards, gamma), grpo_advantages(rewards))


def test_f_grpo_counts_right_answers_by_the_verifier():
    """A penalty that takes a right answer below 0 does not make it wrong."""
    rewards, penalty = torch.tensor([[1.0, 1.0, 0.0, 0.0]]), torch.tensor([[2.0, 0.0, 0.0, 0.0]])
    torch.testing.assert_close(estimate("f_grpo", rewards, penalty), grpo_advantages(rewards - penalty) * 0.5)


def equation_13(length, longest, slack):
    """DAPO's soft overlong punishment: 0 up to longest - slack, then linear to -1 at the longest, and no further."""
    if length <= longest - slack:
        return 0.0
    return (longest - slack - length) / slack if length <= longest else -1.0


def test_the_overlong_penalty_is_a_ramp_over_one_token():
    """Equation 13 with a slack of one: 0 for all lengths but the longest, 1 less there; its own numbers by hand."""
    assert [equation_13(n, 10, 4) for n in (0, 6, 7, 8, 9, 10, 11)] == [0, 0, -0.25, -0.5, -0.75, -1, -1]
    lengths, rewards = torch.arange(1, 11), some_rewards(2, 10)
    shaped = rewards + torch.tensor([equation_13(n, 10, 1) for n in lengths.tolist()])
    mask = (torch.arange(10) < lengths[:, None]).expand(2, 10, 10)
    torch.testing.assert_close(dapo_advantages(rewards, mask), grpo_advantages(shaped))
    assert not torch.allclose(shaped, rewards)


def test_the_dials_of_an_update_reach_their_estimators():
    """f_grpo's power and unlikeliness's share are read from the update, not left at their defaults."""
    rewards, batch = (some_rewards() > 0.5).float(), a_batch(5, 6)
    for gamma in (0.0, 0.5, 2.0):
        torch.testing.assert_close(estimate("f_grpo", rewards, f_grpo_gamma=gamma), f_grpo_advantages(rewards, gamma))
    for beta in (0.0, 0.25, 0.7):
        shaped = unlikeliness_rewards(rewards, batch.logprobs.sum(-1), beta)
        found = estimate("unlikeliness", rewards, batch=batch, unlikeliness_beta=beta)
        torch.testing.assert_close(found, grpo_advantages(shaped))


@pytest.mark.parametrize("name", SAMPLING)
def test_a_penalty_is_taken_off_the_reward(name):
    """The KL in the reward: a completion that is penalised more has a lower advantage than its equal."""
    rewards, penalty = torch.tensor([[1.0, 1.0, 0.0, 0.0]]), torch.tensor([[0.3, 0.0, 0.3, 0.0]])
    plain, penalised = estimate(name, rewards), estimate(name, rewards, penalty)
    assert penalised[0, 0] - penalised[0, 1] < plain[0, 0] - plain[0, 1] - 0.1
    assert penalised[0, 2] < penalised[0, 3]


# --- groups ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in WITHIN_A_GROUP if name != "unlikeliness"])
def test_a_solved_and_a_hopeless_group_say_nothing(name):
    """Group A all right, group B all wrong: every advantage is exactly 0, no mean is taken over the batch."""
    assert not estimate(name, torch.tensor([[1.0] * 4, [0.0] * 4])).any()


def test_unlikeliness_still_parts_a_solved_group_by_rank():
    """Its own way with a group that is all right: the least likely is pushed up; a hopeless group says nothing."""
    advantages = estimate("unlikeliness", torch.tensor([[1.0] * 6, [0.0] * 6]), batch=a_batch(2, 6))
    assert advantages[0].argmax() == a_batch(2, 6).logprobs.sum(-1)[0].argmin()
    assert not advantages[1].any()


@pytest.mark.parametrize("name", WITHIN_A_GROUP)
def test_a_group_does_not_see_the_others(name):
    """Advantages of a group are the same alone and in a batch."""
    rewards = (some_rewards() > 0.5).float()
    torch.testing.assert_close(estimate(name, rewards)[2:3], estimate(name, rewards[2:3]))


@pytest.mark.parametrize("name", WITHIN_A_GROUP)
def test_advantages_of_a_group_sum_to_0(name):
    """One baseline for the group, not one for each sample; and they are not all 0."""
    advantages = estimate(name, (some_rewards() > 0.5).float())
    assert advantages.sum(-1).abs().max() < 1e-5
    assert advantages.abs().max() > 0.1


@pytest.mark.parametrize("name", SAMPLING)
def test_every_row_says_whether_it_has_a_baseline_of_its_own_group(name):
    """Right in one group, wrong in the other: only an estimator over the whole batch gives both groups a push."""
    sums = estimate(name, torch.tensor([[1.0, 1.0], [0.0, 0.0]])).sum(-1)
    assert (sums.abs() < 1e-5).all() if ESTIMATORS[name].needs_group else (sums.abs() > 1).all()


def test_only_the_infinite_batch_draws_nothing():
    """Every row but one has advantages, and that one says that it samples nothing."""
    assert [name for name, row in ESTIMATORS.items() if row.advantages is None] == ["exact"]
    assert [name for name, row in ESTIMATORS.items() if not row.samples] == ["exact"]


def test_reinforce_pp_sums_to_0_over_the_batch_only():
    """Whitened over the whole batch: a solved group is pushed up, a hopeless one down."""
    advantages = reinforce_pp_advantages(torch.tensor([[1.0, 1.0], [0.0, 0.0]]))
    torch.testing.assert_close(advantages, torch.tensor([[1.0, 1.0], [-1.0, -1.0]]), atol=1e-4, rtol=0)
    whitened = reinforce_pp_advantages(some_rewards())
    assert whitened.mean().abs() < 1e-6
    assert whitened.std(correction=0).item() == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("name", [name for name in SAMPLING if name != "unlikeliness"])
@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, 1 / 3, -0.7, 1e-3, 123.456])
def test_flat_groups_have_advantage_exactly_0(name, value):
    """Also where the mean of equal float32 rewards is not that reward: rounding is no signal."""
    for G in (2, 3, 7, 8, 10):
        assert not estimate(name, torch.full((2, G), value)).any(), G


@pytest.mark.parametrize("name", SAMPLING)
def test_right_scores_above_wrong(name):
    """The sign: a right answer has a positive advantage, a wrong one a negative one."""
    advantages = estimate(name, torch.tensor([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 0.0]]))
    assert advantages[0, 0] > 0 > advantages[0, 1:].max()
    assert advantages[1, :3].min() > 0 > advantages[1, 3]


def test_the_std_switch_is_a_switch():
    """On: unit spread. Off: reward minus mean, exactly. The two differ."""
    rewards = some_rewards()
    on, off = grpo_advantages(rewards), grpo_advantages(rewards, normalize_std=False)
    torch.testing.assert_close(off, rewards - rewards.mean(-1, keepdim=True))
    torch.testing.assert_close(on.std(-1, correction=0), torch.ones(5), atol=1e-4, rtol=0)
    assert (on - off).abs().max() > 0.1


def test_rloo_needs_two():
    """One completion has no others: an error that says so, not a division by zero."""
    with pytest.raises(ValueError, match="at least 2"):
        rloo_advantages(torch.ones(3, 1))


@pytest.mark.parametrize("ours", [case[0] for case in PLAIN.values()], ids=list(PLAIN))
def test_contract_functions_take_boolean_and_whole_rewards(ours):
    """The public functions too, also for integers."""
    truth = some_rewards() > 0.5
    torch.testing.assert_close(ours(truth), ours(truth.float()))
    torch.testing.assert_close(ours(truth.long()), ours(truth.float()))


# --- invariances ----------------------------------------------------------------------------------------------------

eighths = st.integers(-80, 80).map(lambda i: i / 8)  # exact in float32
groups = st.lists(eighths, min_size=2, max_size=8)


def close(one, other):
    torch.testing.assert_close(one, other, atol=2e-4, rtol=1e-3)


@settings(deadline=None)
@given(group=groups, shift=eighths)
def test_shifting_all_rewards_changes_nothing(group, shift):
    """The baseline takes any constant away."""
    rewards = torch.tensor([group])
    for ours in (grpo_advantages, rloo_advantages, reinforce_pp_advantages, PLAIN["dr_grpo"][0]):
        close(ours(rewards + shift), ours(rewards))


@settings(deadline=None)
@given(group=groups, scale=st.sampled_from([0.5, 2.0, 16.0]))
def test_scaling_rewards_changes_normalised_advantages_not(group, scale):
    """A positive scale is divided out where the std is, and multiplies the others."""
    rewards = torch.tensor([group])
    for ours in (grpo_advantages, reinforce_pp_advantages, f_grpo_advantages):
        close(ours(rewards * scale), ours(rewards))
    for ours in (rloo_advantages, PLAIN["dr_grpo"][0]):
        close(ours(rewards * scale), ours(rewards) * scale)


@settings(deadline=None)
@given(group=groups, data=st.data())
def test_permuting_a_group_permutes_its_advantages(group, data):
    """The slot of a completion is nothing."""
    rewards, order = torch.tensor([group]), data.draw(st.permutations(range(len(group))))
    for ours, _ in PLAIN.values():
        close(ours(rewards[:, order]), ours(rewards)[:, order])


@settings(deadline=None)
@given(group=groups)
def test_rloo_is_dr_grpo_times_g_over_g_minus_1(group):
    """The two baselines are one up to a factor."""
    rewards, G = torch.tensor([group]), len(group)
    close(rloo_advantages(rewards), grpo_advantages(rewards, normalize_std=False) * G / (G - 1))


@st.composite
def drawn_batches(draw):
    """(rewards, penalty, batch): a few groups of one size, lengths and log-probabilities of their own."""
    Q, G, T = draw(st.integers(1, 3)), draw(st.integers(2, 8)), draw(st.integers(1, 4))

    def table(values):
        return torch.tensor(draw(st.lists(values, min_size=Q * G, max_size=Q * G))).view(Q, G)

    small = st.integers(-16, 16).map(lambda i: i / 8)
    lengths = table(st.integers(1, T))[..., None]
    return table(small), table(small), of_lengths(lengths, -torch.rand(Q, G, T, generator=a_generator(draw)))


def a_generator(draw):
    return torch.Generator().manual_seed(draw(st.integers(0, 99)))


@pytest.mark.parametrize("name", WITHIN_A_GROUP)
@settings(deadline=None)
@given(drawn=drawn_batches())
def test_in_every_group_advantages_sum_to_0_whatever_was_drawn(name, drawn):
    """All rows that compare within a group, with any rewards, penalties, lengths and log-probabilities."""
    advantages = estimate(name, *drawn)
    assert advantages.shape == drawn[0].shape and advantages.isfinite().all()
    assert advantages.sum(-1).abs().max() < 1e-3


# --- calibrations ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BENDING)
@settings(deadline=None)
@given(drawn=drawn_batches(), alpha=st.sampled_from([0.0, 0.5, 1.0, 3.0]), divide=st.booleans())
def test_no_calibration_touches_a_negative_advantage(name, drawn, alpha, divide):
    """Bit for bit, for any advantages and rewards; what is positive never turns negative, and 0 stays 0."""
    rewards, advantages, _ = drawn
    before = advantages.clone()
    bent = CALIBRATIONS[name].advantages(advantages, rewards, Calibration(alpha=alpha, iac_divide=divide))
    assert bent.shape == advantages.shape and torch.equal(advantages, before)
    negative = bent[before <= 0]  # as it was, or left out altogether
    assert torch.equal(negative, before[before <= 0]) or not negative.any()
    assert (bent[before > 0] >= 0).all()


@pytest.mark.parametrize("name", list(CALIBRATIONS))
def test_every_calibration_bends_something(name):
    """The advantages, or the sampling by its memory."""
    row = CALIBRATIONS[name]
    assert row.memory or row.advantages
    if row.advantages:
        rewards = torch.tensor([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 0.0]])
        assert not torch.equal(
            row.advantages(grpo_advantages(rewards), rewards, Calibration()), grpo_advantages(rewards)
        )


def test_the_dials_of_iac_reach_it():
    """alpha and the division are read from the calibration, not left at their defaults."""
    rewards = torch.tensor([[1.0, 0.0, 0.0, 0.0]])
    advantages = grpo_advantages(rewards)
    for alpha, divide in ((1.0, False), (2.0, False), (0.5, True)):
        found = CALIBRATIONS["iac"].advantages(advantages, rewards, Calibration(alpha=alpha, iac_divide=divide))
        assert torch.equal(found, inverse_success_calibration(advantages, rewards, alpha, divide))


@pytest.mark.parametrize("kappa", [0.5, 2.0, 8.0, math.inf])
def test_pos_multiplies_what_is_positive_and_at_infinity_leaves_it_alone(kappa):
    """Positive over negative advantages of a group is kappa, whatever the group; at infinity no negative is left."""
    rewards = torch.tensor([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 0.0]])
    advantages = grpo_advantages(rewards)
    bent = CALIBRATIONS["pos"].advantages(advantages, rewards, Calibration(kappa=kappa))
    assert torch.equal(bent, weigh_positive(advantages, kappa))
    if kappa == math.inf:
        assert torch.equal(bent, advantages.clamp(min=0))
    else:
        torch.testing.assert_close(bent.clamp(min=0).sum(1) / -bent.clamp(max=0).sum(1), torch.full((2,), kappa))


# --- IAC ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("right", range(1, 8))
def test_iac_table(right):
    """Positive advantage after IAC on std-normalised GRPO, G = 8, |S+| = 1..7, as papers.md lists it."""
    rewards = torch.tensor([[1.0] * right + [0.0] * (8 - right)])
    found = inverse_success_calibration(grpo_advantages(rewards), rewards)
    assert found[0, 0].item() == pytest.approx(TABLE[right - 1], rel=5e-3)


@pytest.mark.parametrize("divide", [False, True])
@pytest.mark.parametrize("alpha", [0.5, 1.0, 2.0])
def test_iac_equals_a_plain_loop(alpha, divide):
    """(G - |S+|)^alpha, or ((G - |S+|) / G)^alpha, group by group."""
    rewards = (some_rewards(8) > 0.6).float()
    advantages = grpo_advantages(rewards)
    expected = torch.tensor(plain_iac(advantages.tolist(), rewards.tolist(), alpha, divide))
    torch.testing.assert_close(inverse_success_calibration(advantages, rewards, alpha, divide), expected)


@pytest.mark.parametrize("divide", [False, True])
def test_iac_with_alpha_0_is_nothing(divide):
    """alpha = 0: the advantages, bit for bit, also for a group without a failure."""
    rewards = (some_rewards() > 0.5).float()
    rewards[0] = 1
    advantages = reinforce_pp_advantages(rewards)
    assert torch.equal(inverse_success_calibration(advantages, rewards, 0.0, divide), advantages)


def test_iac_touches_positive_advantages_only():
    """Negative ones and zeros stay, bit for bit; positive ones grow when failures are many."""
    rewards = torch.tensor([[1.0, 1.0, 0.0, 0.0, 0.0]])
    advantages = torch.tensor([[1.0, -1.0, 0.5, 0.0, -2.0]])
    expected = torch.tensor([[3.0, -1.0, 1.5, 0.0, -2.0]])
    assert torch.equal(inverse_success_calibration(advantages, rewards), expected)


def test_iac_with_boolean_rewards():
    """A completion counts as correct when its reward is above 0, boolean or float."""
    rewards = some_rewards() > 0.5
    advantages = grpo_advantages(rewards)
    found = inverse_success_calibration(advantages, rewards)
    assert torch.equal(found, inverse_success_calibration(advantages, rewards.float()))
    assert torch.equal(found, inverse_success_calibration(advantages, rewards * 0.3))


def test_iac_leaves_its_input_alone():
    """Advantages that were handed over are not changed in place."""
    rewards = torch.tensor([[1.0, 0.0, 0.0]])
    advantages = grpo_advantages(rewards)
    before = advantages.clone()
    inverse_success_calibration(advantages, rewards)
    assert torch.equal(advantages, before)


def test_iac_takes_advantages_and_rewards_of_one_shape():
    """Two groups of advantages and one of rewards are a mistake, not a broadcast."""
    with pytest.raises(ValueError, match="shape"):
        inverse_success_calibration(torch.ones(2, 4), torch.ones(1, 4))
