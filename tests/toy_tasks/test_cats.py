"""P1's controlled example: the closed form of one step, what the overlap may and may not do, chance and its mean."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minirlvr import grpo_advantages, rloo_advantages
from toy_tasks import cats, measures

CAT, PERSIAN, SIAMESE = range(3)
OVERLAPS = (0.0, 0.5, 0.9, 1.0)
SKEWED = torch.tensor([20, 9, 4, 10, 5, 2, 12, 12, 11, 5, 5, 5], dtype=torch.float64) / 100  # no ties at the top


def short_run(overlaps=OVERLAPS, seeds=range(4), steps=40, G=8, **changed):
    return cats.train(overlaps, cats.draw_noise(seeds, steps, G), grpo_advantages, **changed)


@st.composite
def situations(draw):
    """(weights (O, D), phi (Q, D), sampled (G,), advantages (G,), learning rate): any policy, any embeddings."""
    g = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))
    answers, G = draw(st.integers(2, 12)), draw(st.integers(1, 16))
    weights, phi = (torch.randn(n, 4, generator=g, dtype=torch.float64) for n in (answers, 3))
    advantages = torch.randn(G, generator=g, dtype=torch.float64)
    return weights, phi, torch.randint(answers, (G,), generator=g), advantages, draw(st.floats(0.01, 3))


def really(weights, phi, sampled, advantages, learning_rate):
    """The change of (z, log pi), both (Q, O), by autograd: one step up on (1/G) sum_j A_j log pi(o_j | Persian)."""
    parameter = weights.clone().requires_grad_()
    (advantages * cats.log_probs(parameter, phi)[PERSIAN, sampled]).mean().backward()
    after = weights + learning_rate * parameter.grad
    return phi @ (after - weights).mT, cats.log_probs(after, phi) - cats.log_probs(weights, phi)


# --- one step -------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=60)
@given(situations())
def test_the_prediction_of_the_logits_is_exact(case):
    """dz_o(q') in closed form is what SGD does to every query, trained or not, whatever the step size."""
    weights, phi, sampled, advantages, learning_rate = case
    predicted, _ = cats.one_step_prediction(cats.log_probs(weights, phi), phi, sampled, advantages, learning_rate)
    moved, _ = really(*case)
    torch.testing.assert_close(predicted, moved, rtol=0, atol=1e-12)


@settings(deadline=None, max_examples=60)
@given(situations())
def test_the_prediction_is_the_plain_sum_over_the_group(case):
    """eta (1/G) sum_j A_j (1[o = o_j] - pi(o | q)) phi(q) . phi(q'), one answer and one completion at a time."""
    weights, phi, sampled, advantages, learning_rate = case
    log_pi = cats.log_probs(weights, phi)
    predicted, _ = cats.one_step_prediction(log_pi, phi, sampled, advantages, learning_rate)
    for q, o in itertools.product(range(3), range(len(weights))):
        pulls = sum(
            a * ((o == drawn) - log_pi[PERSIAN, o].exp().item())
            for a, drawn in zip(advantages.tolist(), sampled.tolist(), strict=True)
        )
        expected = learning_rate / len(sampled) * pulls * (phi[PERSIAN] @ phi[q]).item()
        assert predicted[q, o].item() == pytest.approx(expected, abs=1e-12)


@settings(deadline=None, max_examples=60)
@given(situations())
def test_the_first_order_error_is_jensens_gap(case):
    """Prediction - measurement is one number >= 0 for all answers of a query: log E[exp dz] - E[dz]."""
    weights, phi, sampled, advantages, learning_rate = case
    log_pi = cats.log_probs(weights, phi)
    z, predicted = cats.one_step_prediction(log_pi, phi, sampled, advantages, learning_rate)
    _, measured = really(*case)
    gap = (log_pi.exp() * z.exp()).sum(-1).log() - (log_pi.exp() * z).sum(-1)  # (Q,)
    assert (gap >= -1e-12).all()
    torch.testing.assert_close(predicted - measured, gap[:, None].expand_as(measured), rtol=0, atol=1e-10)


def test_the_first_order_error_grows_with_the_square_of_the_step():
    """A step ten times smaller, an error a hundred times smaller; and it is there: at a large step one can see it."""
    phi, weights = cats.embeddings(0.9), cats.start_weights(0.9)
    log_pi, sampled = cats.log_probs(weights, phi), torch.tensor([0, 3, 9, 10])
    advantages, errors = grpo_advantages(torch.tensor([1.0, 1, 0, 0])).double(), []
    for learning_rate in (1.0, 0.1, 0.01):
        _, predicted = cats.one_step_prediction(log_pi, phi, sampled, advantages, learning_rate)
        _, measured = really(weights, phi, sampled, advantages, learning_rate)
        errors.append((predicted - measured).abs().max().item())
    assert errors[0] > 0.01
    assert errors[0] / errors[1] == pytest.approx(100, rel=0.1)
    assert errors[1] / errors[2] == pytest.approx(100, rel=0.01)


def test_the_run_takes_the_steps_that_sgd_takes():
    """`train` against autograd, step by step with the same groups."""
    noise = cats.draw_noise([3], 5, 8)
    history = cats.train([0.6], noise, grpo_advantages, learning_rate=0.7)[:, 0, 0]  # (steps+1, Q, O)
    weights, phi = cats.start_weights(0.6), cats.embeddings(0.6)
    for t in range(5):
        sampled = cats.draw_group(history[t, PERSIAN].exp(), noise[0, t])
        advantages = grpo_advantages(torch.isin(sampled, torch.tensor(cats.RIGHT[PERSIAN]))).double()
        parameter = weights.clone().requires_grad_()
        (advantages * cats.log_probs(parameter, phi)[PERSIAN, sampled]).mean().backward()
        weights = weights + 0.7 * parameter.grad
        torch.testing.assert_close(cats.log_probs(weights, phi), history[t + 1], rtol=0, atol=1e-12)


# --- overlap --------------------------------------------------------------------------------------------------------


@given(st.floats(0, 1))
def test_embeddings_have_length_1_and_the_stated_cosine(overlap):
    phi = cats.embeddings(overlap)
    expected = torch.eye(3, dtype=torch.float64)
    expected[PERSIAN, [CAT, SIAMESE]] = expected[[CAT, SIAMESE], PERSIAN] = overlap
    expected[CAT, SIAMESE] = expected[SIAMESE, CAT] = overlap**2
    torch.testing.assert_close(phi @ phi.mT, expected, rtol=0, atol=1e-12)


@given(st.floats(0, 1), st.sampled_from([cats.REFERENCE, SKEWED]))
def test_all_queries_start_from_the_reference_at_every_overlap(overlap, reference):
    """So every difference between queries and overlaps comes from training."""
    start = cats.log_probs(cats.start_weights(overlap, reference), cats.embeddings(overlap))
    torch.testing.assert_close(start.exp(), reference.expand(3, -1), rtol=0, atol=1e-12)


@pytest.mark.parametrize("overlap", [-0.1, 1.1, math.nan])
def test_an_overlap_outside_0_and_1_is_refused(overlap):
    with pytest.raises(ValueError, match="overlap"):
        cats.embeddings(overlap)


@pytest.mark.parametrize("reference", [[1.0, 0.0], [0.5, math.nan]])
def test_a_start_without_some_answer_is_refused(reference):
    """log 0 would make every later number NaN."""
    with pytest.raises(ValueError, match="reference"):
        cats.start_weights(0.5, torch.tensor(reference))


def test_orthogonal_queries_do_not_move_by_a_bit():
    """Overlap 0: Cat and Siamese stay bit for bit, while Persian learns."""
    history = short_run()[:, 0]  # (steps+1, R, Q, O)
    assert (history[:, :, [CAT, SIAMESE]] == history[:1, :, [CAT, SIAMESE]]).all()
    assert (history[-1, :, PERSIAN] - history[0, :, PERSIAN]).abs().min() > 0.01


def test_equal_embeddings_make_one_query():
    """Overlap 1: all three are Persian, bit for bit; so Siamese is right about Persian, not about itself."""
    history = short_run()[:, -1]
    assert (history == history[:, :, [PERSIAN]]).all()
    found = cats.query_measures(history)
    assert (found["retained_mass"][..., CAT] == found["retained_mass"][..., PERSIAN]).all()
    assert (found["pass@1"][-1, :, SIAMESE] < found["pass@1"][-1, :, PERSIAN]).all()


def test_persians_run_does_not_depend_on_the_overlap():
    """The same noise, the same run, whatever is beside it."""
    history = short_run()[..., PERSIAN, :]
    assert (history == history[:, :1]).all()


def test_a_neighbours_logits_move_by_overlap_times_persians():
    """Over a whole run, not only one step: z(q) - z_0(q) = overlap * (z(Persian) - z_0(Persian)), up to a constant."""
    history = short_run()
    moved = history - history[:1]  # up to a number per query: log pi, not z
    moved = moved - moved.mean(-1, keepdim=True)
    overlaps = torch.tensor(OVERLAPS, dtype=torch.float64)[:, None, None]
    for q in (CAT, SIAMESE):
        torch.testing.assert_close(moved[..., q, :], overlaps * moved[..., PERSIAN, :], rtol=0, atol=1e-10)


def test_more_overlap_costs_cat_more_modes():
    """Retained mass of Cat falls with the overlap in the mean over seeds; pass@1 rises all the same."""
    found = cats.query_measures(short_run(overlaps=(0, 0.25, 0.5, 0.75, 1), seeds=range(16), steps=100)[-1])
    assert (np.diff(found["retained_mass"][..., CAT].mean(1)) < 0).all()
    assert (np.diff(found["pass@1"][..., CAT].mean(1)) > 0).all()


# --- chance and its mean --------------------------------------------------------------------------------------------


def test_a_seed_gives_the_same_run_alone_and_in_company():
    """Reproducible, and independent of the runs beside it; another seed gives another run."""
    together, again, alone = short_run(), short_run(), short_run(seeds=[2])
    assert (together == again).all()
    assert (together[:, :, 2] == alone[:, :, 0]).all()
    assert (together[-1, :, 1] != together[-1, :, 2]).any()


def test_groups_are_drawn_with_the_policys_probabilities():
    noise = cats.draw_noise([0], 1, 100_000)[0, 0]
    counts = torch.bincount(cats.draw_group(SKEWED, noise), minlength=12) / len(noise)
    assert (counts - SKEWED).abs().max() < 4.5 * 0.5 / len(noise) ** 0.5
    assert cats.draw_group(torch.tensor([0.0, 0.5, 0.5]), torch.tensor([0.0, 0.5])).tolist() == [
        1,
        2,
    ]  # never of mass 0
    assert cats.draw_group(torch.full((3,), 1 / 3.0001), torch.tensor([1 - 1e-7])).item() == 2  # never beyond the last


def mean_update(probs, right, G, advantages):
    """E[sampled_gradient] over all O^G groups, with their probabilities."""
    groups = torch.tensor(list(itertools.product(range(len(probs)), repeat=G)))  # (O^G, G)
    gradients = cats.sampled_gradient(probs.expand(len(groups), -1), groups, advantages(right[groups].double()))
    return (probs[groups].prod(-1)[:, None] * gradients).sum(0)


@pytest.mark.parametrize("G", [1, 2, 3, 5])
def test_the_mean_update_of_a_group_is_the_exact_one_at_another_speed(G):
    """GRPO's bias is one of speed: enumerated over all groups, its mean is group_speed * exact_gradient."""
    probs, right = torch.tensor([0.4, 0.15, 0.25, 0.2]).double(), torch.tensor([True, True, False, False])
    expected = cats.group_speed(0.55, G) * cats.exact_gradient(probs, right)
    torch.testing.assert_close(mean_update(probs, right, G, grpo_advantages), expected, rtol=1e-5, atol=1e-6)
    assert (expected.abs().max() > 0.01) == (G > 1)


def test_without_the_standard_deviation_the_mean_update_has_no_speed_of_its_own():
    """RLOO's mean is the policy gradient for every G: d P / dz = sqrt(P (1 - P)) * exact_gradient."""
    probs, right = torch.tensor([0.4, 0.15, 0.25, 0.2]).double(), torch.tensor([True, True, False, False])
    expected = (0.55 * 0.45) ** 0.5 * cats.exact_gradient(probs, right)
    for G in (2, 4):
        torch.testing.assert_close(mean_update(probs, right, G, rloo_advantages), expected, rtol=1e-5, atol=1e-6)


def test_the_exact_gradient_is_that_of_the_probability_of_being_right():
    z = SKEWED.log().requires_grad_()
    P = z.softmax(-1)[cats.right_answers()].sum()
    (gradient,) = torch.autograd.grad(P, z)
    ours = cats.exact_gradient(SKEWED, cats.right_answers())
    torch.testing.assert_close(ours, gradient / (P * (1 - P)).sqrt().detach())


@given(st.floats(0.02, 0.98))
@settings(deadline=None)
def test_speed_rises_with_the_group_to_1(p):
    speeds = [cats.group_speed(p, G) for G in (1, 2, 4, 8, 64, 4096)]
    assert speeds == sorted(speeds)
    assert speeds[0] == pytest.approx(0)
    assert speeds[1] == pytest.approx((p * (1 - p)) ** 0.5)  # half of S = 1 of two
    assert 0.95 < speeds[-1] <= 1


def test_a_very_large_group_runs_like_an_infinite_batch():
    """G = 65,536 against no sampling at all; G = 4 is far from it, so the test could fail."""
    exact = cats.train_exact([0.9], steps=15)[:, :, 0]
    distance = {G: (short_run([0.9], [0], 15, G)[:, :, 0].exp() - exact.exp()).abs().max() for G in (4, 65_536)}
    assert distance[65_536] < 0.01
    assert distance[4] > 0.1


def test_flat_groups_do_not_move_anything():
    """All right or all wrong: advantage 0, not a bit of change."""
    for right in (True, False):
        always = torch.where(cats.right_answers() == right, 1 / 6, 1e-30).double()
        history = short_run(reference=always)
        assert history.isfinite().all()
        assert (history == history[:1]).all()


# --- what is lost ---------------------------------------------------------------------------------------------------


def test_the_start_is_what_the_docstring_says():
    """Right half of the time, 5.4 effective modes of 6, all alike; Cat has Persian's modes, Siamese half of them."""
    assert cats.REFERENCE.sum().item() == pytest.approx(1)
    found = cats.query_measures(cats.log_probs(cats.start_weights(0.3), cats.embeddings(0.3)))
    assert found["pass@1"] == pytest.approx([0.5] * 3)
    assert found["effective_modes"] == pytest.approx([5.43] * 3, abs=0.01)
    assert found["retained_mass"] == pytest.approx([1] * 3)
    assert cats.RIGHT[CAT] == cats.RIGHT[PERSIAN]
    assert len(set(cats.RIGHT[SIAMESE]) & set(cats.RIGHT[PERSIAN])) == 3


def test_measures_are_those_of_each_querys_own_right_answers():
    """One policy, three queries: Siamese is measured on its own list."""
    log_pi = SKEWED.log().expand(2, 3, -1)
    found = cats.query_measures(log_pi)
    for q, right in enumerate(cats.RIGHT):
        probs, start = SKEWED[list(right)].numpy(), cats.REFERENCE[list(right)].numpy()
        assert found["pass@1"][:, q] == pytest.approx(probs.sum())
        assert found["effective_modes"][:, q] == pytest.approx(measures.effective_modes(probs))
        assert found["retained_mass"][:, q] == pytest.approx(measures.retained_mass(probs, start))
    assert (cats.query_measures(log_pi, reference=SKEWED)["retained_mass"] == 1).all()


def test_an_infinite_batch_keeps_ties_and_a_finite_one_breaks_them():
    """The start has two likeliest right modes, alike. No sampling: both stay. Groups of 8: one of them wins."""
    exact = cats.train_exact([0.9])[:, 0, 0, PERSIAN]
    torch.testing.assert_close(exact[:, 0], exact[:, 3], rtol=0, atol=1e-9)
    effective = cats.query_measures(short_run([0.9], range(16), 500)[-1])["effective_modes"][0, :, PERSIAN]
    assert cats.query_measures(cats.train_exact([0.9])[-1])["effective_modes"][0, 0, PERSIAN] > 2
    assert (effective < 1.8).mean() > 0.8


def test_sampling_is_not_the_only_cause():
    """Where one mode starts ahead, the exact gradient collapses on it too, and takes Cat along."""
    found = cats.query_measures(cats.train_exact([0.9], reference=SKEWED)[-1], SKEWED)
    assert (found["effective_modes"][0, 0, [PERSIAN, CAT]] < 1.1).all()
    assert (found["pass@1"][0, 0, [PERSIAN, CAT]] > 0.99).all()


def test_small_groups_cost_more_modes_for_the_same_success():
    """At the step where each run's Persian is right 95 % of the time, Cat has kept more with G = 64 than with G = 4."""
    kept = {}
    for G in (4, 64):
        found = cats.query_measures(short_run([0.9], range(24), 150, G))
        first = (found["pass@1"][:, 0, :, PERSIAN] >= 0.95).argmax(0)  # (R,)
        assert (first > 0).all()
        kept[G] = measures.interval(found["retained_mass"][first, 0, range(24), CAT])
    assert kept[4][2] < kept[64][1]  # the intervals do not touch
