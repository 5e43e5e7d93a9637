"""The loss: ratio and clip, three ways to average, KL estimators; against enumeration and a plain loop."""

import math

import pytest
import torch
from conftest import Pairs, generator
from torch import nn

from minirlvr import (
    Learner,
    Rollout,
    Update,
    batch_loss,
    clipped_objective,
    entropy,
    importance_ratio,
    kl_estimate,
    memory_loss,
    policy_loss,
    token_logprobs,
    token_weights,
)

AGGREGATES = pytest.mark.parametrize("aggregate", ["sequence", "token", "constant"])


def lengths_to_mask(*lengths, T=None):
    return torch.arange(T or max(lengths)) < torch.tensor(lengths)[:, None]


def a_case(Q=3, G=4, T=6, seed=0, spread=0.3):
    """(logprobs that want a gradient, old, advantages (Q, G), mask): lengths 1..T, ratios on both sides of the clip."""
    g = generator(seed)
    old = -3 * torch.rand(Q * G, T, generator=g)
    new = (old + spread * torch.randn(Q * G, T, generator=g)).requires_grad_()
    mask = lengths_to_mask(*torch.randint(1, T + 1, (Q * G,), generator=g).tolist(), T=T)
    return new, old, torch.randn(Q, G, generator=g), mask


def gradient(logprobs, *rest, **more):
    """d policy_loss / d logprobs."""
    logprobs = logprobs.detach().clone().requires_grad_()
    policy_loss(logprobs, *rest, **more).backward()
    return logprobs.grad


# --- ratio and clip -------------------------------------------------------------------------------------------------


def test_clip_cuts_the_gradient_on_the_right_side():
    """At ratio 1.5: none for A > 0, all of it for A < 0. At ratio 0.5 the other way round."""
    old, mask, advantages = torch.zeros(4, 1), torch.ones(4, 1), torch.tensor([1.0, -1.0, 1.0, -1.0])
    ratios = torch.tensor([[1.5], [1.5], [0.5], [0.5]])
    found = gradient(ratios.log(), old, advantages, mask)
    torch.testing.assert_close(found, torch.tensor([[0.0], [1.5], [-0.5], [0.0]]) / 4)


def test_clip_low_and_clip_high_are_two_numbers():
    """DAPO's clip-higher: 1.25 is inside for 0.28 and outside for 0.2; 0.75 is inside for 0.3, outside for 0.2."""
    one, mask = torch.tensor([1.0]), torch.ones(1, 1)
    high, low, old = torch.tensor([[1.25]]).log(), torch.tensor([[0.75]]).log(), torch.zeros(1, 1)
    assert gradient(high, old, one, mask).item() == 0
    assert gradient(high, old, one, mask, clip_high=0.28).item() == pytest.approx(-1.25)
    assert gradient(low, old, -one, mask).item() == 0
    assert gradient(low, old, -one, mask, clip_low=0.3).item() == pytest.approx(0.75)


class Table(nn.Module):
    """Logits (Q, G, T, V) of its own for every token, whatever is read."""

    def __init__(self, logits):
        super().__init__()
        self.logits = nn.Parameter(logits.clone())

    def completion_logits(self, prompts, completions):
        return self.logits


def loss_of_a_table(ratios, advantages, mask, **dials):
    """`batch_loss` where each token has such a ratio (Q, G, T) -> what it logs, and where the logits' gradient is 0."""
    Q, G, T = ratios.shape
    policy, tokens = Table(torch.randn(Q, G, T, 5, generator=generator())), torch.full((Q, G, T), 2)
    new = token_logprobs(policy.logits, tokens).detach()
    prompts = tokens[:, 0, :1]
    batch = Rollout(prompts, prompts > 0, tokens, mask, new - ratios.log(), new, new)
    learner = Learner(Pairs(), policy, "grpo", update=Update(**dials))
    loss, log = batch_loss(learner, batch, advantages, token_weights(mask, "token"), None)
    loss.backward()
    return log, (policy.logits.grad == 0).all(-1) & mask


def test_clip_fraction_sees_the_sign_of_the_advantage():
    """At ratio 1.5 with A = +1 and -1 the fraction is one half; at 0.5 the other half; an advantage of 0 never."""
    advantages, mask = torch.tensor([[1.0, -1.0]]), torch.ones(1, 2, 3, dtype=torch.bool)
    for ratio, gone in ((1.5, [True, False]), (0.5, [False, True]), (1.1, [False, False])):
        log, without_gradient = loss_of_a_table(torch.full((1, 2, 3), ratio), advantages, mask)
        assert without_gradient.all(-1).tolist() == without_gradient.any(-1).tolist() == [gone]
        assert log["clipped"] == 3 * sum(gone)
    for ratio in (9.0, 0.01):
        assert loss_of_a_table(torch.full((1, 2, 3), ratio), advantages * 0, mask)[0]["clipped"] == 0


@pytest.mark.parametrize("dials", [{}, {"clip_low": 0.1, "clip_high": 0.5}, {"ratio": "sequence"}], ids=str)
def test_the_clipped_tokens_that_are_logged_have_lost_their_gradient(dials):
    """The logged fraction and the loss speak of the same tokens, and of none behind the stop."""
    g = generator()
    mask = lengths_to_mask(*torch.randint(1, 7, (12,), generator=g).tolist(), T=6).view(3, 4, 6)
    ratios = (0.6 * torch.randn(3, 4, 6, generator=g)).exp()
    log, gone = loss_of_a_table(ratios, torch.randn(3, 4, generator=g), mask, **dials)
    assert 0 < gone.sum() < mask.sum()
    assert log["clipped"] == gone.sum().item()


def test_the_ratio_is_one_of_each_token():
    """40 tokens at +0.1 each: the largest ratio is 1.105, not e^4; nothing is clipped."""
    old, mask = torch.zeros(1, 40), torch.ones(1, 40)
    ratio = importance_ratio(old + 0.1, old, mask)
    assert ratio.max() < 1.2
    assert (gradient(old + 0.1, old, torch.tensor([1.0]), mask) != 0).all()


def test_the_sequence_ratio_is_the_geometric_mean_over_the_real_tokens():
    """GSPO: exp(mean log-ratio) up to the stop, the same for every token; what is masked does not count."""
    new, old, _, mask = a_case()
    new.data[~mask] = 7.0
    ratio = importance_ratio(new, old, mask, "sequence")
    for n, length in enumerate(mask.sum(-1).tolist()):
        mean = sum((new[n, t] - old[n, t]).item() for t in range(length)) / length
        assert ratio[n].tolist() == pytest.approx([math.exp(mean)] * 6, rel=1e-5)


def test_the_sequence_ratio_of_no_tokens_is_1():
    """A completion without tokens divides by nothing."""
    assert importance_ratio(torch.ones(1, 3), torch.zeros(1, 3), torch.zeros(1, 3), "sequence").tolist() == [[1.0] * 3]


def test_without_an_update_loss_is_0_and_the_gradient_is_not():
    """Ratio 1 and advantages that sum to 0: loss 0, and each token still pulls with -A times its weight."""
    new, _, _, mask = a_case()
    advantages = torch.tensor([[1.0, -1.0, 3.0, -3.0]] * 3)
    assert policy_loss(new, new.detach(), advantages, mask).item() == pytest.approx(0, abs=1e-6)
    found = gradient(new, new.detach(), advantages, mask)
    torch.testing.assert_close(found, -advantages.reshape(-1, 1) * token_weights(mask, "sequence"))


def test_old_log_probabilities_are_another_tensor():
    """On reused data the ratio is new / old, not new / itself: it is not 1, and old gets no gradient from us."""
    new, old, advantages, mask = a_case()
    assert (importance_ratio(new, old, mask)[mask] - 1).abs().max() > 0.2
    assert policy_loss(new, old, advantages, mask).item() != pytest.approx(
        policy_loss(new, new.detach(), advantages, mask).item(), abs=1e-3
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_log_ratio_of_20_stays_finite(dtype):
    """exp(20) is beyond float16: ratio, loss, gradient and every KL estimator stay finite, both ways."""
    new = torch.tensor([[-1.0, -21.0]], dtype=dtype, requires_grad=True)
    old, mask = torch.tensor([[-21.0, -1.0]], dtype=dtype), torch.ones(1, 2)
    ratio = importance_ratio(new, old, mask)
    assert ratio[0].tolist() == pytest.approx([math.exp(20), math.exp(-20)], rel=1e-4)
    for sign in (1.0, -1.0):
        assert policy_loss(new, old, torch.tensor([sign]), mask).isfinite()
    for kind in ("k1", "k2", "k3"):
        assert kl_estimate(new, old, kind).isfinite().all()
    policy_loss(new, old, torch.tensor([1.0]), mask).backward()
    assert new.grad.isfinite().all()


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_a_log_ratio_of_thousands_stays_finite(kind):
    """A policy that ran away gives large numbers, not infinities."""
    far, near = torch.tensor([-5000.0]), torch.tensor([0.0])
    for one, other in ((far, near), (near, far)):
        assert kl_estimate(one, other, kind).isfinite().all()
        assert importance_ratio(one[None], other[None], torch.ones(1, 1)).isfinite().all()


def test_unknown_names_are_refused():
    """A misspelt ratio, aggregate or estimator is an error that lists the known ones."""
    x, mask = torch.zeros(1, 1), torch.ones(1, 1)
    with pytest.raises(ValueError, match="token or sequence"):
        importance_ratio(x, x, mask, "tokens")
    with pytest.raises(ValueError, match=r"aggregate .mean.; choose one of sequence, token, constant"):
        policy_loss(x, x, torch.zeros(1), mask, aggregate="mean")
    with pytest.raises(ValueError, match=r"KL estimator .*; choose one of k1, k2, k3"):
        kl_estimate(x, x, "k4")


# --- averages -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("aggregate", "short", "long"),
    [("sequence", 1 / 2 / 2, 1 / 8 / 2), ("token", 1 / 10, 1 / 10), ("constant", 1 / 8 / 2, 1 / 8 / 2)],
)
def test_weight_of_a_token_is_as_its_formula_says(aggregate, short, long):
    """Lengths 2 and 8: the gradient weight of one token of each, per aggregation."""
    mask, zeros = lengths_to_mask(2, 8), torch.zeros(2, 8)
    found = gradient(zeros, zeros, torch.tensor([[-1.0, -1.0]]), mask, aggregate=aggregate)
    torch.testing.assert_close(found, torch.tensor([[short], [long]]) * mask)


def test_the_constant_of_dr_grpo_is_the_longest_possible_length():
    """1 / (N * T) for every token, however short the completions are."""
    for mask, T in ((lengths_to_mask(2, 4), 4), (lengths_to_mask(2, 4, T=10), 10)):
        torch.testing.assert_close(token_weights(mask, "constant"), mask / (2 * T))
        zeros = torch.zeros(2, T)
        loss = policy_loss(zeros, zeros, torch.tensor([-1.0, -1.0]), mask, aggregate="constant")
        assert loss.item() == pytest.approx(6 / (2 * T))


@AGGREGATES
def test_everything_masked_is_loss_0_and_finite(aggregate):
    """No token at all: loss 0, gradient 0, no NaN."""
    new, old, advantages, mask = a_case()
    loss = policy_loss(new, old, advantages, mask & False, aggregate=aggregate)
    assert loss.item() == 0
    assert not gradient(new, old, advantages, mask & False, aggregate=aggregate).any()
    assert policy_loss(new, old, advantages, mask & False, aggregate=aggregate, ratio="sequence").item() == 0


@pytest.mark.parametrize("aggregate", ["sequence", "token"])
def test_a_cut_row_is_in_neither_numerator_nor_denominator(aggregate):
    """With one of two rows cut, the mean of ones is 1."""
    mask, zeros = torch.tensor([[True, True], [False, False]]), torch.zeros(2, 2)
    assert token_weights(mask, aggregate).sum().item() == pytest.approx(1)
    loss = policy_loss(zeros, zeros, torch.tensor([-1.0, -1.0]), mask, aggregate=aggregate)
    assert loss.item() == pytest.approx(1)


@pytest.mark.parametrize("value", [5.0, -1e9, -math.inf, math.nan])
@pytest.mark.parametrize("ratio", ["token", "sequence"])
def test_masked_values_move_nothing(ratio, value):
    """Whatever stands behind the stop: the same loss, the same gradient at every token, none behind the mask."""
    new, old, advantages, mask = a_case()
    changed = torch.where(mask, new.detach(), value)
    for aggregate in ("sequence", "token", "constant"):
        same = {"aggregate": aggregate, "ratio": ratio}
        one, other = (policy_loss(x, old, advantages, mask, **same) for x in (new, changed))
        torch.testing.assert_close(one, other)
        found = gradient(changed, old, advantages, mask, **same)
        torch.testing.assert_close(found, gradient(new, old, advantages, mask, **same))
        assert not found[~mask].any()


@AGGREGATES
@pytest.mark.parametrize("ratio", ["token", "sequence"])
@pytest.mark.parametrize("parts", [1, 2, 4, 12])
def test_micro_batches_sum_to_the_whole(aggregate, ratio, parts):
    """With weights made for the whole batch the parts add up to it, uneven lengths and all: value and gradient."""
    new, old, advantages, mask = a_case()
    whole = policy_loss(new, old, advantages, mask, aggregate=aggregate, ratio=ratio)
    expected = gradient(new, old, advantages, mask, aggregate=aggregate, ratio=ratio)
    weights, flat = token_weights(mask, aggregate), advantages.flatten()
    total = 0.0
    for rows in torch.arange(12).chunk(parts):
        r = importance_ratio(new[rows], old[rows], mask[rows], ratio)
        total = total - (weights[rows] * clipped_objective(r, flat[rows])).sum()
    total.backward()
    torch.testing.assert_close(total, whole)
    torch.testing.assert_close(new.grad, expected)


@AGGREGATES
def test_the_loss_of_a_group_twice_is_the_loss_of_it_once(aggregate):
    """A mean, not a sum: the same batch twice over gives the same loss and half the gradient for each copy."""
    new, old, advantages, mask = a_case()
    once = policy_loss(new, old, advantages, mask, aggregate=aggregate)
    pairs = (torch.cat((x, x)) for x in (new, old, advantages, mask))
    torch.testing.assert_close(policy_loss(*pairs, aggregate=aggregate), once)


@AGGREGATES
def test_advantages_may_be_groups_or_rows(aggregate):
    """(Q, G) and (N,) are the same numbers in the same order."""
    new, old, advantages, mask = a_case()
    one = policy_loss(new, old, advantages, mask, aggregate=aggregate)
    torch.testing.assert_close(policy_loss(new, old, advantages.flatten(), mask, aggregate=aggregate), one)


@AGGREGATES
@pytest.mark.parametrize("empty", [False, True])
def test_weights_of_groups_are_those_of_their_rows(aggregate, empty):
    """Over (Q, G, T) as over (N, T), a completion without tokens among them: the batch is the batch however it lies."""
    mask = a_case()[3]
    mask[2] &= not empty
    found = token_weights(mask.view(3, 4, 6), aggregate)
    torch.testing.assert_close(found.view(12, 6), token_weights(mask, aggregate), atol=0, rtol=0)
    assert found.sum() > 0


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_ratios_and_objectives_of_groups_are_those_of_their_rows(level):
    """Over (Q, G, T) as over (N, T), bit for bit."""
    new, old, advantages, mask = a_case()
    parts = (x.view(3, 4, 6) for x in (new, old, mask))
    ratio = importance_ratio(new, old, mask, level)
    assert torch.equal(importance_ratio(*parts, level).view(12, 6), ratio)
    found = clipped_objective(ratio.view(3, 4, 6), advantages).view(12, 6)
    assert torch.equal(found, clipped_objective(ratio, advantages.flatten()))


def test_a_mask_of_numbers_is_a_mask():
    """Ones and zeros instead of booleans give the same loss."""
    new, old, advantages, mask = a_case()
    torch.testing.assert_close(policy_loss(new, old, advantages, mask.float()), policy_loss(new, old, advantages, mask))


def plain_loss(new, old, advantages, mask, aggregate, low, high):
    """GRPO's loss as larger libraries (TRL's loss types grpo, dapo, dr_grpo) spell it: one token at a time."""
    N, T, per_row, tokens = len(new), len(new[0]), [], 0
    for n in range(N):
        terms = []
        for t in range(T):
            if mask[n][t]:
                ratio = math.exp(new[n][t] - old[n][t])
                bounded = min(max(ratio, 1 - low), 1 + high)
                terms.append(-min(ratio * advantages[n], bounded * advantages[n]))
        per_row.append(terms)
        tokens += len(terms)
    if aggregate == "sequence":
        return sum(sum(terms) / len(terms) for terms in per_row) / N
    return sum(map(sum, per_row)) / (tokens if aggregate == "token" else N * T)


@AGGREGATES
@pytest.mark.parametrize(("low", "high"), [(0.2, 0.2), (0.2, 0.28), (0.1, 0.5)])
def test_policy_loss_equals_a_plain_loop(aggregate, low, high):
    """A second implementation, in plain Python, on ten random batches."""
    for seed in range(10):
        new, old, advantages, mask = a_case(seed=seed)
        plain = (x.tolist() for x in (new.double(), old.double(), advantages.double().flatten(), mask))
        expected = plain_loss(*plain, aggregate, low, high)
        found = policy_loss(new, old, advantages, mask, low, high, aggregate)
        assert found.item() == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_defaults_are_ppos_clip_and_grpos_average():
    """clip 0.2 and 0.2, mean over each completion, ratio of each token."""
    new, old, advantages, mask = a_case(spread=0.6)
    spelled = policy_loss(new, old, advantages, mask, 0.2, 0.2, "sequence", ratio="token")
    assert torch.equal(policy_loss(new, old, advantages, mask), spelled)


def test_memory_loss_is_the_mean_over_the_kept_tokens():
    """Cross-entropy of what was drawn: kept rows, real tokens; 0 where nothing is kept."""
    logprobs, mask = torch.tensor([[-1.0, -2.0], [-6.0, -9.0], [-50.0, -50.0]]), lengths_to_mask(2, 1, 2)
    assert memory_loss(logprobs, mask, torch.tensor([True, True, False])).item() == pytest.approx(3)
    assert memory_loss(logprobs, mask, torch.zeros(3, dtype=torch.bool)).item() == 0


# --- KL and entropy: enumeration of a small softmax -----------------------------------------------------------------


def two_policies():
    """Logits that want a gradient, and a reference; six tokens."""
    logits = torch.randn(6, generator=generator(1), dtype=torch.float64).requires_grad_()
    return logits, torch.randn(6, generator=generator(2), dtype=torch.float64).log_softmax(-1)


def kl(p_log, q_log):
    return (p_log.exp() * (p_log - q_log)).sum()


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_k1_and_k3_have_the_kl_as_expectation(kind):
    """Summed over all six tokens with their probabilities: KL(policy || reference), sign and all."""
    logits, reference = two_policies()
    policy = logits.log_softmax(-1).detach()
    expectation = (policy.exp() * kl_estimate(policy, reference, kind)).sum()
    assert expectation.item() == pytest.approx(kl(policy, reference).item(), abs=1e-6)
    assert expectation > 0.05


def test_k2_is_half_the_squared_log_ratio_and_near_the_kl_close_by():
    """Its expectation is not the KL, but within 10 % of it for a small step."""
    logits, _ = two_policies()
    policy = logits.log_softmax(-1).detach()
    near = (logits.detach() + 0.05 * torch.randn(6, generator=generator(3), dtype=torch.float64)).log_softmax(-1)
    expectation = (policy.exp() * kl_estimate(policy, near, "k2")).sum()
    assert expectation.item() == pytest.approx(kl(policy, near).item(), rel=0.1)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_gradient_of_each_estimator_with_the_samples_fixed(kind):
    """As a loss: k1 pulls nowhere, k2 down the KL, k3 down the reverse KL. Exact, by enumeration."""
    logits, reference = two_policies()
    policy = logits.log_softmax(-1)
    true = {
        "k1": torch.zeros(6, dtype=torch.float64),
        "k2": torch.autograd.grad(kl(policy, reference), logits, retain_graph=True)[0],
        "k3": torch.autograd.grad(kl(reference, policy), logits, retain_graph=True)[0],
    }
    loss = (policy.exp().detach() * kl_estimate(policy, reference, kind)).sum()
    found = torch.autograd.grad(loss, logits)[0]
    torch.testing.assert_close(found, true[kind], atol=1e-6, rtol=1e-5)
    assert (true["k2"] - true["k3"]).abs().max() > 0.01


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_equal_policies_have_no_kl(kind):
    """Every estimator is 0 at the reference itself; k2 and k3 are never negative elsewhere."""
    x = -3 * torch.rand(100, generator=generator())
    assert not kl_estimate(x, x, kind).any()
    if kind != "k1":
        assert kl_estimate(x, x.flip(0), kind).min() >= 0


def test_a_reference_elsewhere_does_not_enter_the_ratio():
    """old = new, reference different: the ratio is 1, the KL is not 0."""
    new, old, _, mask = a_case(spread=0.0)
    assert (importance_ratio(new, old, mask) - 1).abs().max() == 0
    assert kl_estimate(new, old - 0.5).abs().min() > 0.1


def test_entropy_by_hand():
    """In nats: log V where all are alike, 0 where one is certain, and the sum -p log p in between."""
    p = torch.tensor([0.5, 0.25, 0.25])
    assert entropy(p.log()).item() == pytest.approx(1.5 * math.log(2))
    assert entropy(torch.zeros(2, 3, 7)).flatten().tolist() == pytest.approx([math.log(7)] * 6)
    assert entropy(torch.tensor([1e4, 0.0, 0.0])).item() == 0


def test_advantages_never_broadcast():
    """One advantage for each completion: three for one completion, or one for two, are an error."""
    for completions, advantages in ((1, 3), (2, 1)):
        zeros = torch.zeros(completions, 3)
        with pytest.raises(ValueError, match="advantages"):
            policy_loss(zeros, zeros, torch.ones(1, advantages), torch.ones(completions, 3))
