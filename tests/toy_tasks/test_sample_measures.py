"""Measures from samples: unbiased where they say so, biased as they say, in their bounds, right as n grows."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toy_tasks.measures import (
    bootstrap_intervals,
    distinct_at_k,
    effective_modes,
    estimate_measures,
    mean_known,
    pass_at_k_exact,
    retained_mass,
)

PROBS = np.array([[0.5, 0.2, 0.1], [0.05, 0.05, 0.0], [1 / 3, 1 / 3, 1 / 3]])  # (Q, M)


def draw(probs, n, rng, size=None):
    """Counts (..., Q, M) of the correct modes among n completions of each prompt."""
    wrong = np.maximum(1 - probs.sum(-1, keepdims=True), 0)
    every = np.concatenate([probs, wrong], -1)
    return rng.multinomial(n, every / every.sum(-1, keepdims=True), size=size)[..., :-1]


def expectations(probs, n, k, reference=None):
    """Expected value of each estimate, over all (M+1)^n samples of one prompt with their probabilities."""
    every = [*probs, 1 - sum(probs)]
    samples = list(itertools.product(range(len(every)), repeat=n))
    chances = np.array([math.prod(every[outcome] for outcome in sample) for sample in samples])
    counts = np.array([[sample.count(m) for m in range(len(probs))] for sample in samples])
    before = None if reference is None else np.broadcast_to(reference, counts.shape)
    estimates = estimate_measures(counts, n, before, reference_n=10, k=k)
    known = {name: ~np.isnan(values) for name, values in estimates.items()}
    return {name: chances[known[name]] @ v[known[name]] / chances[known[name]].sum() for name, v in estimates.items()}


@pytest.mark.parametrize("probs", [(0.5, 0.25), (0.1, 0.0), (0.6, 0.4), (0.2, 0.3, 0.1)])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (3, 2), (4, 2), (4, 4), (5, 3)])
def test_pass_and_distinct_are_unbiased(probs, n, k):
    """Over all samples of n, the mean of the estimate is the value itself."""
    expected = expectations(probs, n, k)
    assert expected["pass@1"] == pytest.approx(sum(probs), abs=1e-12)
    assert expected[f"pass@{k}"] == pytest.approx(float(pass_at_k_exact(min(sum(probs), 1), k)), abs=1e-12)
    assert expected[f"distinct@{k}"] == pytest.approx(float(distinct_at_k(probs, k)), abs=1e-12)


def test_effective_modes_and_retained_mass_are_biased_low():
    """As their docstring says, and less so with more completions."""
    probs, before = (0.4, 0.2, 0.2), np.array([4, 2, 2])  # of ten: the reference is the policy, nothing was lost
    few, more = expectations(probs, 3, 1, before), expectations(probs, 6, 1, before)
    assert few["effective_modes"] < more["effective_modes"] < effective_modes(probs)
    assert few["retained_mass"] < more["retained_mass"] < 1


def test_estimates_approach_the_exact_measures():
    """Half a million completions: within 1 % of what is summed from the probabilities."""
    rng, n, reference = np.random.default_rng(0), 500_000, PROBS[:, ::-1]
    estimates = {
        "pass@1": PROBS.sum(-1),
        "pass@2": pass_at_k_exact(PROBS.sum(-1), 2),
        "distinct@2": distinct_at_k(PROBS, 2),
        "effective_modes": effective_modes(PROBS),
        "retained_mass": retained_mass(PROBS, reference),
    }
    counts = np.round(PROBS * 4000).astype(int)  # the ideal sample first: no noise, only the difference of formulas
    ideal = estimate_measures(counts, 4000, np.round(reference * 4000).astype(int), k=2)
    # comb(n, k) for each count is slow at half a million: measures without a k are enough there
    drawn = estimate_measures(draw(PROBS, n, rng), n, draw(reference, n, rng), k=1)
    for name, exact in estimates.items():
        np.testing.assert_allclose(ideal[name], exact, rtol=1e-2)
        if name in drawn:
            np.testing.assert_allclose(drawn[name], exact, rtol=1e-2)


@settings(max_examples=100, deadline=None)
@given(data=st.data(), n=st.integers(1, 40), modes=st.integers(1, 5))
def test_estimates_and_intervals_keep_their_bounds(data, n, modes):
    """Whatever was counted; and low <= mean <= high."""
    seed, k = data.draw(st.integers(0, 2**32 - 1)), data.draw(st.integers(1, n))
    rng = np.random.default_rng(seed)
    counts, before = (draw(rng.dirichlet(np.full(modes + 1, 0.4), 3)[:, :-1], n, rng) for _ in range(2))
    top = {f"distinct@{k}": min(k, modes), "effective_modes": modes}
    for name, values in estimate_measures(counts, n, before, k=k).items():
        known = values[~np.isnan(values)]
        least = 1 if name == "effective_modes" else 0
        assert ((known >= least) & (known <= top.get(name, 1) + 1e-9)).all(), name
    for name, (mean, low, high) in bootstrap_intervals(counts, n, rng, before, k=k, B=20).items():
        if not math.isnan(mean) and n > 1:
            assert (1 if name == "effective_modes" else 0) <= low <= mean <= high <= top.get(name, 1) + 1e-9, name


def test_what_is_not_known_is_nan_and_left_out():
    """Never right: no effective modes. Reference never right: no retained mass. Both prompts count in pass@1."""
    counts, before = [[2, 2], [0, 0]], [[0, 0], [1, 1]]
    estimates = estimate_measures(counts, 4, before, k=2)
    np.testing.assert_array_equal(np.isnan(estimates["effective_modes"]), [False, True])
    np.testing.assert_array_equal(np.isnan(estimates["retained_mass"]), [True, False])
    assert mean_known(estimates["effective_modes"]) == pytest.approx(2)
    assert mean_known(estimates["pass@1"]) == 0.5
    assert math.isnan(mean_known([math.nan]))
    nothing = bootstrap_intervals([[0, 0]], 4, np.random.default_rng(0), k=2)
    assert all(map(math.isnan, nothing["effective_modes"]))


def test_padding_of_short_rows_changes_nothing():
    """A prompt with fewer modes has columns of zeros."""
    counts = np.array([[3, 1], [0, 2]])
    padded = np.concatenate([counts, np.zeros((2, 2), int)], 1)
    for one, other in zip(estimate_measures(counts, 8).values(), estimate_measures(padded, 8).values(), strict=True):
        np.testing.assert_allclose(one, other)


@pytest.mark.parametrize(("name", "n"), [("pass@1", 16), ("distinct@4", 64)])
def test_intervals_hold_the_truth_about_95_percent_of_the_time(name, n):
    """400 samples of twelve prompts; both estimates are unbiased, so the interval is one of the value itself."""
    rng = np.random.default_rng(0)
    probs = rng.dirichlet(np.ones(5), 12)[:, :-1]  # (Q, M)
    exact = {"pass@1": probs.sum(-1), "distinct@4": distinct_at_k(probs, 4)}[name].mean()
    samples = draw(probs, n, rng, size=(400, 12))
    intervals = [bootstrap_intervals(counts, n, rng, k=4, B=100)[name] for counts in samples]
    assert 0.90 <= np.mean([low <= exact <= high for _, low, high in intervals]) <= 0.98


def test_intervals_shrink_with_the_square_root_of_n():
    """Four times the completions, half the width."""

    def width(n):
        _, low, high = bootstrap_intervals(np.round(PROBS * n).astype(int), n, np.random.default_rng(0), B=2000)[
            "pass@1"
        ]
        return high - low

    assert width(60) / width(240) == pytest.approx(2, rel=0.1)


def test_intervals_follow_their_generator():
    """One seed repeats; two differ."""
    one, again, other = (bootstrap_intervals([[9, 3]], 16, np.random.default_rng(s)) for s in (0, 0, 1))
    assert one == again != other


@pytest.mark.parametrize(
    ("counts", "n", "k", "says"),
    [
        ([[3, 2]], 4, 1, "sum to at most n = 4"),
        ([[-1, 2]], 4, 1, "at least 0"),
        ([[0.5, 0.5]], 4, 1, "whole numbers"),
        (3, 4, 1, "axis of modes"),
        ([[1, 2]], 4, 5, "k must not exceed n"),
        ([[0, 0]], 0, 1, "n must be at least 1"),
    ],
)
def test_broken_counts_are_refused(counts, n, k, says):
    """An error that says which."""
    with pytest.raises(ValueError, match=says):
        estimate_measures(counts, n, k=k)


def test_reference_counts_are_checked_too():
    """Against their own n."""
    with pytest.raises(ValueError, match="reference_counts"):
        estimate_measures([[1, 0]], 4, [[5, 0]], reference_n=4, k=1)
    assert estimate_measures([[2, 0]], 4, [[5, 0]], reference_n=10, k=1)["retained_mass"] == 1
