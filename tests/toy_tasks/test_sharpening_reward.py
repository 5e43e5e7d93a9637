"""P2's rewards: their formulas, and that climbing each of them ends where P2 says."""

import math

import pytest
import torch

from toy_tasks.sharpening import REGIMES, sharpening_reward, target_log_probs

R = torch.tensor([[1.0, 0.0, 1.0]])
L = torch.tensor([[-2.0, -3.0, -8.0]])  # summed log-probabilities of the policy
REFERENCE = torch.tensor([[-4.0, -1.0, -6.0]])
LENGTHS = torch.tensor([[4, 1, 9]])


def reward(regime, **options):
    return sharpening_reward(regime, R, L, REFERENCE, LENGTHS, **options)


def test_rewards_are_papers_formulas():
    """The four rows of P2's table, number by number, at alpha = 2 and beta_inverse = 5."""
    for i, (r, own, ref) in enumerate(zip(R[0].tolist(), L[0].tolist(), REFERENCE[0].tolist(), strict=True)):
        options = {"alpha": 2.0, "beta_inverse": 5.0}
        assert reward("task", **options)[0, i] == r
        assert reward("sharpen", **options)[0, i] == 2 * ref
        assert reward("temper", **options)[0, i] == pytest.approx(ref + ref - own)
        assert reward("tilt", **options)[0, i] == pytest.approx(r + (ref + ref - own) / 5)


def test_length_normalisation_touches_the_first_term_only():
    """mean divides alpha's log-likelihood by the length, weighted by its power; the entropy part stays a sum."""
    for name, power in (("sum", 0.0), ("mean", 1.0), ("weighted", 0.5)):
        scaled = REFERENCE / LENGTHS**power
        torch.testing.assert_close(reward("sharpen", alpha=3.0, normalize=name), 3 * scaled)
        torch.testing.assert_close(reward("temper", alpha=3.0, normalize=name), 2 * scaled + REFERENCE - L)
    torch.testing.assert_close(reward("sharpen", normalize="weighted", length_power=2.0), REFERENCE / LENGTHS**2)


def test_alpha_one_tilt_is_kl_regularised_rl():
    """tilt at alpha = 1 is r - beta (l - l_ref), with beta = 1 / beta_inverse."""
    torch.testing.assert_close(reward("tilt", alpha=1.0, beta_inverse=4.0), R - (L - REFERENCE) / 4)


def test_the_policys_likelihood_is_a_constant():
    """The reward is no path for a gradient: the policy's log-probabilities are detached."""
    own = L.clone().requires_grad_()
    assert not sharpening_reward("temper", R, own, REFERENCE, LENGTHS, alpha=2.0).requires_grad


@pytest.mark.parametrize(
    ("regime", "options", "says"),
    [
        ("sharper", {}, "sharper"),
        ("tilt", {"beta_inverse": 0.0}, "beta_inverse"),
        ("temper", {"normalize": "median"}, "median"),
        ("temper", {"normalize": "weighted", "length_power": -0.5}, "length_power"),
        ("temper", {"alpha": -0.5}, "alpha"),
        ("temper", {"alpha": math.nan}, "alpha"),
        ("sharpen", {"alpha": 0.0}, "alpha"),
    ],
)
def test_bad_options_are_named(regime, options, says):
    """One clear error for an unknown regime or normalisation, and for a division by zero."""
    with pytest.raises(ValueError, match=says):
        reward(regime, **options)


@pytest.mark.parametrize("regime", ["temper", "tilt"])
def test_expected_gradient_vanishes_at_the_papers_optimum(regime):
    """On a softmax over listed answers: E[reward * grad log pi] is 0 at reference^alpha (exp(b r)), and only there."""
    alpha, b = 2.0, 3.0
    reference = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
    r = torch.tensor([0.0, 1.0, 0.0, 1.0], dtype=torch.float64)
    lengths = torch.ones(1, 4)

    def gradient(policy):
        value = sharpening_reward(regime, r[None], policy.log()[None], reference.log()[None], lengths, alpha, b)[0]
        return policy * (value - (policy * value).sum())  # of the logits, by the policy gradient theorem

    target = (alpha * reference.log() + (b * r if regime == "tilt" else 0)).softmax(0)
    assert gradient(target).abs().max() < 1e-12
    assert gradient(reference).abs().max() > 1e-3


@pytest.mark.parametrize("normalize", ["sum", "mean", "weighted"])
@pytest.mark.parametrize("regime", REGIMES)
def test_no_gradient_is_left_at_the_target(regime, normalize):
    """The reward and the target are of one table: climbing the first on average ends in the second, or at its limit."""
    reference = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64).log()
    rewards, lengths = torch.tensor([0.0, 1.0, 0.0, 1.0]).double(), torch.tensor([4, 1, 2, 6])
    given = {"alpha": 2.0, "beta_inverse": 3.0, "normalize": normalize}

    def gradient(log_policy):
        parts = (part[None] for part in (rewards, log_policy, reference, lengths))
        value = sharpening_reward(regime, *parts, **given)[0].nan_to_num()  # where the policy says nothing
        policy = log_policy.exp()
        return policy * (value - (policy * value).sum())

    target = target_log_probs(regime, reference, rewards, torch.zeros(4).long(), lengths=lengths, **given)
    assert gradient(target).abs().max() < 1e-12
    assert gradient(reference).abs().max() > 1e-3


def test_sharpen_climbs_to_the_most_likely_answer():
    """Its gradient favours the reference's most likely answer from any policy with full support."""
    reference = torch.tensor([0.5, 0.3, 0.2])
    policy = torch.full((3,), 1 / 3)
    value = sharpening_reward("sharpen", torch.zeros(1, 3), policy.log()[None], reference.log()[None], torch.ones(1, 3))
    gradient = policy * (value[0] - (policy * value[0]).sum())
    assert gradient.argmax() == 0
    assert gradient[0] > 0 > gradient[2]


def test_task_reward_is_the_verifiers():
    """Whatever the likelihoods, task is r; and NaN-free for certain answers (log-probability 0)."""
    certain = torch.zeros(1, 3)
    torch.testing.assert_close(sharpening_reward("task", R, certain, certain, LENGTHS), R)
    assert math.isfinite(sharpening_reward("tilt", R, certain, certain, LENGTHS, beta_inverse=1.0).sum())
