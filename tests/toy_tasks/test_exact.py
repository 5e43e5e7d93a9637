"""Enumeration: probabilities of listed modes, and the optimum of a finite batch."""

import itertools
import math

import numpy as np
import pytest
import torch
from conftest import ConstantPolicy, Pairs, generator, tiny_policy
from hypothesis import given, settings
from hypothesis import strategies as st

from minirlvr import rollout, token_logprobs
from toy_tasks import STOP, Countdown, Padded, Sums, Task
from toy_tasks.exact import Listing, finite_batch_optimum, mode_measures

# --- probabilities of modes -----------------------------------------------------------------------------------------


class Everything(Task):
    """Every text of a and b up to two letters is right: all that can be said in three tokens, but for padding."""

    name = "everything"
    characters = "ab"
    max_new_tokens = 3
    train = ("a", "ab")
    heldout = ("bab",)

    def modes(self, prompt):
        return ["".join(text) for length in range(3) for text in itertools.product("ab", repeat=length)]

    def verify(self, prompt, completion):
        return len(completion) <= 2 and set(completion) <= set("ab")

    def sample(self, prompt, rng):
        return "a"

    def plain_language(self, prompt):
        return "Say anything."


@pytest.mark.parametrize("temperature", [0.6, 1.0])
@pytest.mark.parametrize("task", [Sums(), Countdown(), Everything()], ids=lambda task: task.name)
def test_log_probs_of_a_constant_policy_are_products(task, temperature):
    """log pi(mode) is the sum over its characters and its stop; -inf in slots beyond a prompt's modes."""
    logits = torch.randn(task.vocab_size, generator=generator())
    share = (logits.double() / temperature).softmax(-1)
    found = Listing(task, task.prompts).log_probs(ConstantPolicy(logits), temperature).detach()
    assert found.dtype == torch.float64
    for q, prompt in enumerate(task.prompts):
        modes = task.modes(prompt)
        expected = [math.prod(share[i].item() for i in [*task.encode(mode), STOP]) for mode in modes]
        assert found[q].exp().tolist() == pytest.approx(expected + [0] * (found.shape[1] - len(modes)), rel=1e-5)


@pytest.mark.parametrize("task", [Sums(), Everything()], ids=lambda task: task.name)
def test_log_probs_equal_one_text_at_a_time(task):
    """The batched pass against one plain forward pass for each mode, without padding."""
    policy = tiny_policy(task.vocab_size)
    found = Listing(task, task.prompts).log_probs(policy).detach()
    for q, prompt in enumerate(task.prompts):
        for m, mode in enumerate(task.modes(prompt)):
            before, answer = task.encode(prompt), [*task.encode(mode), STOP]
            logits = policy(Padded.of(torch.tensor([before + answer])))[0, len(before) - 1 : -1]
            assert found[q, m].item() == pytest.approx(
                token_logprobs(logits, torch.tensor(answer)).sum().item(), abs=1e-4
            )


def test_log_probs_are_differentiable():
    """The infinite-batch objective: the gradient of the summed probability is that of finite differences."""
    task = Everything()
    listing, policy = Listing(task, task.prompts), ConstantPolicy([0.1, 0.2, 0.3, -0.1])
    listing.log_probs(policy).exp().sum().backward()
    for i in range(4):
        step = torch.zeros(4)
        step[i] = 1e-2
        up, down = (listing.log_probs(ConstantPolicy(policy.logits.detach() + s)).exp().sum() for s in (step, -step))
        assert policy.logits.grad[i].item() == pytest.approx((up - down).item() / 2e-2, rel=1e-2, abs=1e-4)


def test_all_completions_sum_to_at_most_1_and_match_sampling():
    """Everything that can be said: the listed mass is the share of draws that stop without padding."""
    task = Everything()
    policy = tiny_policy(task.vocab_size)
    probs = Listing(task, task.prompts).log_probs(policy).exp()
    rows = torch.arange(len(task.prompts)).repeat_interleave(200)
    batch = rollout(policy, task.encode_prompts(task.prompts).pick(rows), 10, 3, generator())
    drawn = [task.decode(ids) for ids in batch.completions.flatten(0, 1).tolist()]
    stopped = (batch.completions == STOP).any(-1).flatten().tolist()
    for q, prompt in enumerate(task.prompts):
        assert probs[q].sum() <= 1 + 1e-6
        mine = [text for text, stop in zip(drawn[2000 * q : 2000 * (q + 1)], stopped[2000 * q :], strict=False) if stop]
        for m, mode in enumerate(task.modes(prompt)):
            p = probs[q, m].item()
            assert mine.count(mode) / 2000 == pytest.approx(p, abs=4.5 * (p * (1 - p) / 2000) ** 0.5 + 1e-3)


def test_a_policy_that_cannot_do_otherwise_has_mass_1():
    """Over a vocabulary of only a, b and stop (no padding, no third letter) the texts up to T tokens sum to 1."""
    policy = ConstantPolicy([-200.0, 1.0, 0.0, 0.5])
    probs = Listing(Everything(), ["a"]).log_probs(policy).exp().detach()
    share = policy.logits.softmax(-1)[STOP].item()
    assert probs.sum().item() == pytest.approx(1 - (1 - share) ** 3, rel=1e-5)


def test_a_prompt_without_modes_is_refused_by_name():
    """Nothing to measure is an error that names the task and the prompt."""

    class Hopeless(Pairs):
        def modes(self, prompt):
            return [] if prompt == "c=" else super().modes(prompt)

    with pytest.raises(ValueError, match=r"pairs.*'c='"):
        Listing(Hopeless(), Hopeless.train)


def test_mode_measures_are_one_number_a_prompt_within_bounds():
    """Every measure (Q,), finite; the reference against itself lost nothing; classes never outnumber modes."""
    task = Countdown()
    listing = Listing(task, task.prompts)
    reference = listing.log_probs(tiny_policy(task.vocab_size)).exp().detach().numpy()
    now = listing.log_probs(tiny_policy(task.vocab_size, seed=1)).exp().detach().numpy()
    same, other = mode_measures(listing, reference, reference), mode_measures(listing, now, reference)
    for name, values in other.items():
        assert values.shape == (len(task.prompts),), name
        assert np.isfinite(values).all(), name
        assert (values >= 0).all(), name
    for name in ("pass@1", "pass@8", "retained_mass", "share_gained", "worst_drop", "pcmd"):
        assert (other[name] <= 1).all(), name
    assert (other["effective_modes"] <= listing.counts + 1e-9).all()
    assert (other["effective_classes"] <= np.minimum(listing.class_counts, other["effective_modes"]) + 1e-9).all()
    assert (same["retained_mass"] == 1).all()
    assert (same["worst_drop"] == 0).all()
    np.testing.assert_allclose(other["pass@1"], now.sum(-1))


def test_what_is_listed_is_scored_behind_its_own_prompt():
    """The prompt's padding is no text, the completion's is: it lies behind the stop, where nothing is scored."""
    task = Everything()
    listing = Listing(task, task.prompts)
    for r, (q, m) in enumerate(listing.slots.tolist()):
        ids, real, scored = listing.padded.tokens[r], listing.padded.real[r], listing.scored[r]
        prompt, mode = task.prompts[q], task.modes(task.prompts[q])[m]
        assert real.tolist() == [False] * (3 - len(prompt)) + [True] * (len(prompt) + 3)
        assert task.decode(ids[real].tolist()) == prompt + mode
        assert ids[scored].tolist() == [*task.encode(mode), STOP]


# --- the optimum of a finite batch ----------------------------------------------------------------------------------


@st.composite
def batches(draw, centred=False):
    """(reference (M,), old (M,), sampled (G,), advantages (G,), beta), in float64."""
    M, G = draw(st.integers(2, 6)), draw(st.integers(2, 8))
    reference, old = (
        torch.tensor(draw(st.lists(st.floats(0.05, 1), min_size=M, max_size=M)), dtype=torch.float64) for _ in range(2)
    )
    sampled = torch.tensor(draw(st.lists(st.integers(0, M - 1), min_size=G, max_size=G)))
    values = draw(st.lists(st.floats(-2, 2), min_size=G, max_size=G))
    advantages = torch.tensor(values, dtype=torch.float64)
    if centred:
        advantages = advantages - advantages.mean()
    return reference / reference.sum(), old / old.sum(), sampled, advantages, draw(st.floats(0.3, 5))


def surrogate(policy, reference, old, sampled, advantages, beta):
    """(1/G) sum_j A_j pi(o_j) / pi_old(o_j) - beta KL(pi || pi_ref): a plain loop over the group."""
    gain = sum(a * policy[o] / old[o] for o, a in zip(sampled.tolist(), advantages, strict=True)) / len(sampled)
    inside = policy > 0
    return gain - beta * (policy[inside] * (policy[inside] / reference[inside]).log()).sum()


@settings(deadline=None, max_examples=60)
@given(case=batches(), data=st.data())
def test_the_optimum_is_one(case, data):
    """No other distribution has a larger surrogate: not a mixture with any other, not a vertex, not the reference."""
    reference, old, sampled, advantages, beta = case
    best = finite_batch_optimum(reference, sampled, advantages, beta, old)
    assert best.sum().item() == pytest.approx(1)
    top = surrogate(best, reference, old, sampled, advantages, beta)
    others = [reference, old, *torch.eye(len(reference), dtype=torch.float64)]
    random = torch.rand(8, len(reference), generator=generator(data.draw(st.integers(0, 99))), dtype=torch.float64)
    others += list(random / random.sum(-1, keepdim=True))
    for other in others:
        for share in (1e-3, 0.1, 1.0):
            mixed = (1 - share) * best + share * other
            assert surrogate(mixed, reference, old, sampled, advantages, beta) <= top + 1e-9


@settings(deadline=None, max_examples=60)
@given(case=batches())
def test_the_surrogate_is_flat_at_the_optimum(case):
    """Its gradient is the same for every mode: nothing is won by moving mass."""
    reference, old, sampled, advantages, beta = case
    best = finite_batch_optimum(reference, sampled, advantages, beta, old).requires_grad_()
    (gradient,) = torch.autograd.grad(surrogate(best, reference, old, sampled, advantages, beta), best)
    assert gradient.max().item() == pytest.approx(gradient.min().item(), abs=1e-6)


@settings(deadline=None, max_examples=100)
@given(case=batches(centred=True))
def test_every_mode_that_was_not_sampled_is_multiplied_by_1_over_z(case):
    """pi_old = pi_ref and advantages that sum to 0: one factor 1/Z <= 1 for all of them, the sampling bias."""
    reference, _, sampled, advantages, beta = case
    best = finite_batch_optimum(reference, sampled, advantages, beta)
    c = torch.zeros_like(reference)
    for o, a in zip(sampled.tolist(), advantages, strict=True):
        c[o] += a / reference[o] / len(sampled)
    z = (reference * (c / beta).exp()).sum()
    assert z >= 1 - 1e-12
    unsampled = [m for m in range(len(reference)) if m not in sampled.tolist()]
    for m in unsampled:
        assert (best[m] / reference[m]).item() == pytest.approx(1 / z.item())
    if unsampled and c.abs().max() > 1e-3:
        assert best[unsampled[0]] < reference[unsampled[0]]


def test_the_log_form_has_another_optimum():
    """P1's theorem is for the log form, where it fails: 0.782; ours is the linear form: e / (1 + e) = 0.731."""
    half = torch.tensor([0.5, 0.5], dtype=torch.float64)
    grid = torch.linspace(1e-4, 1 - 1e-4, 100_001, dtype=torch.float64)
    log_form = grid.log() - grid * (2 * grid).log() - (1 - grid) * (2 * (1 - grid)).log()
    assert grid[log_form.argmax()].item() == pytest.approx(0.782, abs=1e-3)
    ours = finite_batch_optimum(half, torch.tensor([0]), torch.tensor([0.5]), beta=1.0)  # c = (1, 0)
    assert ours[0].item() == pytest.approx(math.e / (1 + math.e))
    assert ours[0].item() == pytest.approx(0.731, abs=1e-3)


def test_the_old_policy_is_the_reference_unless_given():
    """pi_old divides the advantages, and its default is pi_ref."""
    reference, sampled = torch.tensor([0.2, 0.3, 0.5]), torch.tensor([0, 2])
    advantages = torch.tensor([1.0, -1.0])
    ours = finite_batch_optimum(reference, sampled, advantages, 1.0)
    torch.testing.assert_close(finite_batch_optimum(reference, sampled, advantages, 1.0, reference), ours)
    other = finite_batch_optimum(reference, sampled, advantages, 1.0, torch.tensor([0.6, 0.2, 0.2]))
    assert (other - ours).abs().max() > 0.01


def test_a_mode_sampled_twice_counts_twice():
    """The advantages of equal completions add up."""
    reference, both = torch.tensor([0.25, 0.75]), torch.tensor([0, 0])
    twice = finite_batch_optimum(reference, both, torch.tensor([0.2, 0.3]), 1.0)
    once = finite_batch_optimum(reference, both[:1], torch.tensor([0.25]), 1.0)
    torch.testing.assert_close(twice, once)


def test_a_large_beta_stays_at_the_reference_and_zero_advantages_too():
    """The KL holds: beta large, or nothing to gain."""
    reference, sampled = torch.tensor([0.2, 0.3, 0.5]), torch.tensor([0, 2])
    far = finite_batch_optimum(reference, sampled, torch.tensor([1.0, -1.0]), 1e6)
    torch.testing.assert_close(far, reference, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(finite_batch_optimum(reference, sampled, torch.zeros(2), 0.1), reference)


@pytest.mark.parametrize("beta", [0.0, -1.0, math.nan])
def test_without_a_kl_term_there_is_no_closed_form(beta):
    """beta must be above 0, and the error says it."""
    with pytest.raises(ValueError, match="beta"):
        finite_batch_optimum(torch.tensor([0.5, 0.5]), torch.tensor([0]), torch.tensor([1.0]), beta)


@pytest.mark.parametrize(("sampled", "advantages"), [([0, 1], [1.0]), ([[0], [1]], [[1.0], [1.0]])])
def test_sampled_and_advantages_are_one_group(sampled, advantages):
    """(G,) both."""
    with pytest.raises(ValueError, match=r"\(G,\)"):
        finite_batch_optimum(torch.tensor([0.5, 0.5]), torch.tensor(sampled), torch.tensor(advantages), 1.0)
