"""Measures against enumeration, closed forms and their bounds."""

import itertools
import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toy_tasks import measures
from toy_tasks.measures import (
    distinct_at_k,
    effective_modes,
    interval,
    maj_at_k,
    maj_at_k_from_counts,
    pass_at_k,
    pass_at_k_exact,
    pcmd,
    retained_mass,
    share_gained,
    support,
    tail_miss,
    worst_drop,
)

ROUNDING = 1e-9


@st.composite
def mode_rows(draw, modes=None):
    """One row of mode probabilities, some of them zero or tiny, summing to at most 1."""
    modes = modes or draw(st.integers(1, 8))
    sizes = st.sampled_from([0.0, 1e-300, 1e-12, 1.0]) | st.floats(1e-300, 1)
    row = np.array(draw(st.lists(sizes, min_size=modes, max_size=modes)))
    return row / max(row.sum(), 1.0) * draw(st.sampled_from([0.1, 1.0]))


@st.composite
def row_pairs(draw):
    """(now, reference): two rows over the same modes."""
    modes = draw(st.integers(1, 8))
    return draw(mode_rows(modes)), draw(mode_rows(modes))


def draws(probabilities, k):
    """All sequences of k draws, each with its probability."""
    for sequence in itertools.product(range(len(probabilities)), repeat=k):
        yield sequence, math.prod(probabilities[i] for i in sequence)


def vote_won(sequence, correct):
    """Chance that the plurality of one sequence is right, ties broken evenly."""
    most = max(sequence.count(a) for a in set(sequence))
    tied = [a for a in set(sequence) if sequence.count(a) == most]
    return sum(correct[a] for a in tied) / len(tied)


# --- pass@k ---------------------------------------------------------------------------------------------------------


def test_pass_at_k_equals_enumeration():
    """The share of k-subsets that hold a right answer, for all n <= 6, c, k <= n."""
    for n in range(1, 7):
        for c, k in itertools.product(range(n + 1), range(1, n + 1)):
            subsets = list(itertools.combinations([True] * c + [False] * (n - c), k))
            assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-15), (n, c, k)


@pytest.mark.parametrize(
    ("n", "c", "k", "says"),
    [
        (4, 1, 5, "k must not exceed n"),
        (4, 5, 2, "c must not exceed n"),
        (4, 1, 0, "k must be at least 1"),
        (4, -1, 2, "c must be at least 0"),
        (0, 0, 1, "n must be at least 1"),
        (4.0, 1, 2, "n must be a whole number"),
        (4, 1.5, 2, "c must be a whole number"),
        (4, 1, "2", "k must be a whole number"),
    ],
)
def test_pass_at_k_refuses_what_it_cannot_estimate(n, c, k, says):
    """k > n above all: the formula would return a number, and it would be wrong."""
    with pytest.raises(ValueError, match=says):
        pass_at_k(n, c, k)


def test_pass_at_k_takes_numpy_integers_and_large_n():
    """Counts come out of arrays, and 10,000 samples do not overflow."""
    assert pass_at_k(np.int64(4), np.int32(2), np.int64(1)) == 0.5
    assert pass_at_k(10_000, 5_000, 1) == pytest.approx(0.5)


def test_pass_at_k_is_unbiased_for_the_exact_value():
    """Averaged over how many of n answers are right, the estimate is 1 - (1-p)^k."""
    n, p = 6, 0.3
    for k in range(1, n + 1):
        mean = sum(math.comb(n, c) * p**c * (1 - p) ** (n - c) * pass_at_k(n, c, k) for c in range(n + 1))
        assert mean == pytest.approx(pass_at_k_exact(p, k))


@given(n=st.integers(1, 300), data=st.data())
def test_pass_at_k_keeps_its_bounds(n, data):
    """In [0, 1], never falling in k or in c."""
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    assert 0 <= pass_at_k(n, max(c - 1, 0), k) <= pass_at_k(n, c, k) <= 1
    assert pass_at_k(n, c, max(k - 1, 1)) <= pass_at_k(n, c, k)


@given(p=st.floats(0, 1), k=st.integers(1, 10_000))
def test_exact_pass_at_k_keeps_its_bounds(p, k):
    """In [0, 1]; at least p, at most k p."""
    value = pass_at_k_exact(p, k)
    assert 0 <= value <= 1
    assert p * (1 - ROUNDING) <= value <= k * p * (1 + ROUNDING)


def test_exact_pass_at_k_equals_its_formula_and_keeps_small_p():
    """1 - (1-p)^k in any shape, and k p where p is too small for 1 - p to feel it."""
    p = np.array([[0.0, 0.1], [0.5, 1.0]])
    np.testing.assert_allclose(pass_at_k_exact(p, 3), 1 - (1 - p) ** 3, atol=1e-15)
    assert pass_at_k_exact(1e-30, 1000) == pytest.approx(1e-27, rel=1e-12)
    assert not np.signbit(pass_at_k_exact(0.0, 1))


# --- how many modes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_distinct_at_k_equals_enumeration(k):
    """The mean number of different correct modes over all sequences of k answers."""
    modes = [0.4, 0.2, 0.1, 0.0]
    wrong = len(modes)
    seen = sum(chance * len(set(s) - {wrong}) for s, chance in draws([*modes, 0.3], k))
    assert distinct_at_k(modes, k) == pytest.approx(seen)


@given(row=mode_rows(), k=st.integers(1, 64))
def test_distinct_at_k_keeps_its_bounds(row, k):
    """At least pass@k, at most k and at most the number of modes that have any mass."""
    value = distinct_at_k(row, k)
    assert pass_at_k_exact(min(row.sum(), 1), k) - ROUNDING <= value
    assert value <= min(k, np.count_nonzero(row)) + ROUNDING


@pytest.mark.parametrize("mass", [1.0, 0.3, 1e-12])
@pytest.mark.parametrize("modes", [1, 2, 3, 10])
def test_equal_modes_have_closed_forms(modes, mass):
    """Uniform over M: effective modes M, PCMD 1 - 1/M, whatever P is and however wide the padding."""
    row = [mass / modes] * modes + [0.0, 0.0]
    assert effective_modes(row) == pytest.approx(modes)
    assert pcmd(row) == pytest.approx(1 - 1 / modes)


def test_effective_modes_of_uneven_modes():
    """exp(H) by hand: shares (1/2, 1/4, 1/4) have H = 1.5 ln 2; and sum of q^2 = 3/8."""
    assert effective_modes([0.2, 0.1, 0.1]) == pytest.approx(2**1.5)
    assert pcmd([0.2, 0.1, 0.1]) == pytest.approx(5 / 8)


def test_no_correct_mass_is_no_modes():
    """Nothing right: zero modes, zero diversity, no NaN."""
    assert effective_modes([0.0, 0.0]) == pcmd([0.0, 0.0]) == distinct_at_k([0.0, 0.0], 8) == 0


@given(row=mode_rows())
def test_diversity_keeps_its_bounds(row):
    """Effective modes in [1, M], PCMD in [0, 1 - 1/M], both 0 without mass; 1 / (1 - PCMD) <= effective modes."""
    modes, diversity = effective_modes(row), pcmd(row)
    if not row.any():
        assert modes == diversity == 0
        return
    assert 1 <= modes <= np.count_nonzero(row) + ROUNDING
    assert 0 <= diversity <= 1 - 1 / np.count_nonzero(row) + ROUNDING
    assert 1 / (1 - diversity) <= modes + ROUNDING  # Renyi entropies fall with their order


@given(row=mode_rows(), scale=st.floats(0.01, 1))
def test_diversity_depends_on_shares_alone(row, scale):
    """Less correct mass at the same shares: the same diversity."""
    assert effective_modes(row * scale) == pytest.approx(effective_modes(row))
    assert pcmd(row * scale) == pytest.approx(pcmd(row), abs=ROUNDING)


# --- against the reference ------------------------------------------------------------------------------------------


def test_measures_against_the_reference_by_hand():
    """Mode 0 wins .3, modes 1 and 2 lose .1 and .05 of the reference's .5; the last is padding."""
    reference, now = [0.25, 0.15, 0.1, 0.0], [0.55, 0.05, 0.05, 0.0]
    assert retained_mass(now, reference) == pytest.approx(1 - 0.15 / 0.5)
    assert share_gained(now, reference) == pytest.approx(1 / 3)
    assert worst_drop(now, reference) == pytest.approx(0.1)


def test_an_unchanged_policy_lost_nothing():
    """Step 0 of every run: all retained, no drop, support as it was."""
    row = [0.3, 0.2, 0.005, 0.0]
    assert (retained_mass(row, row), share_gained(row, row), worst_drop(row, row)) == (1, 1, 0)
    assert support(row, row) == (2, 0, 0, 1.0, 0.0)


def test_a_reference_without_modes_can_lose_nothing():
    """Nothing known: nothing lost, no NaN."""
    nothing, row = [0.0, 0.0], [0.3, 0.1]
    assert (retained_mass(row, nothing), share_gained(row, nothing), worst_drop(row, nothing)) == (1, 1, 0)
    assert support(row, nothing) == (0, 2, 0, 1.0, 1.0)
    assert support(nothing, nothing) == (0, 0, 0, 1.0, 0.0)


@given(pair=row_pairs())
def test_measures_against_the_reference_keep_their_bounds(pair):
    """Ratios and drops in [0, 1], the drop no larger than the largest mode; all agree on whether anything fell."""
    now, reference = pair
    retained, share, drop = retained_mass(now, reference), share_gained(now, reference), worst_drop(now, reference)
    assert 0 <= retained <= 1
    assert 0 <= share <= 1
    assert 0 <= drop <= reference.max()
    assert (share == 1) == (drop == 0) == bool(np.all(now >= reference))
    assert (1 - retained) * reference.sum() >= drop - ROUNDING


def test_retained_mass_is_0_when_every_mode_is_gone():
    """All of the mass lost is 0, not below."""
    assert retained_mass([0.0, 0.0], [0.3, 0.1]) == 0


def test_support_counts_by_hand():
    """Kept, gained, lost at the default threshold of 1 %: exactly 1 % is not above it."""
    found = support([0.5, 0.2, 0.005, 0.01, 0.0], [0.3, 0.001, 0.2, 0.1, 0.0])
    assert (found.kept, found.gained, found.lost) == (1, 1, 2)
    assert found.retention == pytest.approx(1 / 3)
    assert found.discovery == pytest.approx(1 / 2)
    assert support([0.5, 0.2, 0.005], [0.3, 0.001, 0.2], threshold=0.1) == (1, 1, 1, 0.5, 0.5)


@given(pair=row_pairs(), threshold=st.floats(0, 0.99))
def test_support_keeps_its_bounds(pair, threshold):
    """Counts add up to what is above the threshold; ratios in [0, 1]."""
    now, reference = pair
    found = support(now, reference, threshold)
    assert found.kept + found.lost == (reference > threshold).sum()
    assert found.kept + found.gained == (now > threshold).sum()
    assert 0 <= found.retention <= 1
    assert 0 <= found.discovery <= 1


BY_ROW = {
    "distinct": lambda now, reference: distinct_at_k(now, 4),
    "effective": lambda now, reference: effective_modes(now),
    "pcmd": lambda now, reference: pcmd(now),
    "retained": retained_mass,
    "gained": share_gained,
    "drop": worst_drop,
    "kept": lambda now, reference: support(now, reference).kept,
    "retention": lambda now, reference: support(now, reference).retention,
}


@pytest.mark.parametrize("measure", BY_ROW.values(), ids=list(BY_ROW))
def test_a_batch_is_its_rows(measure):
    """(T, Q, M) against (Q, M) gives (T, Q): each number is that of its row alone, so no mean leaks across."""
    rng = np.random.default_rng(0)
    now, reference = rng.dirichlet([0.3] * 5, size=(3, 2))[..., :4], rng.dirichlet([0.3] * 5, size=2)[..., :4]
    batch = measure(now, reference)
    assert batch.shape == (3, 2)
    for t, q in np.ndindex(3, 2):
        assert batch[t, q] == pytest.approx(measure(now[t, q].tolist(), reference[q].tolist()))


@pytest.mark.parametrize("bad", [[0.5, -0.1], [0.5, math.nan], [0.6, 0.5], [1.5, 0.0], 0.5], ids=str)
@pytest.mark.parametrize("measure", BY_ROW.values(), ids=list(BY_ROW))
def test_what_is_no_distribution_is_refused(measure, bad):
    """Negative, NaN, a sum above 1, no axis of modes: an error, never a number."""
    with pytest.raises(ValueError, match="mode_probs"):
        measure(bad, [0.5, 0.1])


@pytest.mark.parametrize("measure", [retained_mass, share_gained, worst_drop, support])
def test_a_reference_over_other_modes_is_refused(measure):
    """Rows of different length, or one mode that numpy would silently stretch: an error."""
    with pytest.raises(ValueError, match="modes"):
        measure([0.5, 0.1], [0.5])


def test_rounding_above_1_is_forgiven():
    """float32 sums end a little above 1; the bounds hold all the same."""
    row = np.full(10, 0.1 + 5e-8, dtype=np.float32)
    assert pcmd(row) == pytest.approx(0.9)
    assert pass_at_k_exact(1 + 1e-7, 2) == 1


@pytest.mark.parametrize("k", [0, -1, 1.5])
def test_k_is_a_whole_number_of_at_least_1(k):
    """Every @k refuses other k."""
    for call in (
        lambda: pass_at_k_exact(0.5, k),
        lambda: distinct_at_k([0.5], k),
        lambda: maj_at_k([1.0], [True], k),
        lambda: maj_at_k_from_counts([5], [True], k),
    ):
        with pytest.raises(ValueError, match="k must be"):
            call()


# --- the vote -------------------------------------------------------------------------------------------------------

VOTES = [
    ([0.5, 0.3, 0.2], [True, False, False]),
    ([0.2, 0.3, 0.5], [True, False, False]),
    ([0.25, 0.25, 0.25, 0.25], [True, True, False, False]),
    ([0.4, 0.0, 0.35, 0.25], [False, True, True, False]),
    ([1.0, 0.0], [True, False]),
    ([0.6, 0.4], [False, False]),
]


@pytest.mark.parametrize("k", [1, 2, 3, 4, 5, 6])
@pytest.mark.parametrize(("weights", "correct"), VOTES)
def test_maj_at_k_equals_enumeration(weights, correct, k):
    """Over all sequences of k votes, ties broken evenly."""
    expected = sum(chance * vote_won(s, correct) for s, chance in draws(weights, k))
    assert maj_at_k(weights, correct, k) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("counts", [[3, 2, 2], [1, 1, 1, 1, 1], [4, 0, 3], [7], [2, 5]], ids=str)
def test_maj_at_k_from_counts_equals_enumeration(counts):
    """Over all k-subsets of the n answers, for every k <= n and every set of right answers."""
    answers = [a for a, count in enumerate(counts) for _ in range(count)]
    for k in range(1, len(answers) + 1):
        subsets = list(itertools.combinations(answers, k))
        for correct in itertools.product([False, True], repeat=len(counts)):
            expected = sum(vote_won(s, correct) for s in subsets) / len(subsets)
            assert maj_at_k_from_counts(counts, correct, k) == pytest.approx(expected, abs=1e-12), (k, correct)


def test_maj_from_counts_is_unbiased_for_maj_at_k():
    """Averaged over which n answers were drawn, the estimate is the exact vote."""
    weights, correct, n, k = [0.5, 0.3, 0.2], [False, True, True], 5, 3
    mean = 0.0
    for sequence, chance in draws(weights, n):
        mean += chance * maj_at_k_from_counts([sequence.count(a) for a in range(3)], correct, k)
    assert mean == pytest.approx(maj_at_k(weights, correct, k))


@settings(deadline=None, max_examples=50)
@given(sizes=st.lists(st.floats(0.01, 1), min_size=1, max_size=5), k=st.integers(1, 40), data=st.data())
def test_maj_at_k_keeps_its_bounds(sizes, k, data):
    """In [0, 1]; someone always wins: the chances of right and of wrong sum to 1. One or two votes are one draw."""
    weights = np.array(sizes) / sum(sizes)
    correct = np.array(data.draw(st.lists(st.booleans(), min_size=len(sizes), max_size=len(sizes))))
    right, wrong = maj_at_k(weights, correct, k), maj_at_k(weights, ~correct, k)
    assert 0 <= right <= 1
    assert right + wrong == pytest.approx(1)
    if k <= 2:
        assert right == pytest.approx(weights[correct].sum())


def test_maj_at_large_k_is_certain_and_finite():
    """Hundreds of votes neither overflow nor leave [0, 1]: the favourite wins."""
    assert maj_at_k([0.7, 0.3], [True, False], 256) == pytest.approx(1)
    assert maj_at_k_from_counts([700, 300], [False, True], 200) == pytest.approx(0, abs=1e-8)
    assert maj_at_k_from_counts([129, 127], [True, False], 256) == pytest.approx(1)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: maj_at_k([0.5, 0.3], [True, False], 2), "sums to 1"),
        (lambda: maj_at_k([0.5, 0.6], [True, False], 2), "more than 1"),
        (lambda: maj_at_k([[0.5, 0.5]], [True, False], 2), "one row"),
        (lambda: maj_at_k([0.5, 0.5], [True], 2), "booleans"),
        (lambda: maj_at_k([0.5, 0.5], [0, 1], 2), "booleans"),  # indices of the right ones? say so
        (lambda: maj_at_k([0.5, 0.5], [True, False], 257), "must not exceed 256"),
        (lambda: maj_at_k_from_counts([2, 1], [True, False], 4), "k must not exceed n"),
        (lambda: maj_at_k_from_counts([600, 600], [True, False], 4), "n must not exceed 1000"),
        (lambda: maj_at_k_from_counts([2, -1], [True, False], 1), "count must be at least 0"),
        (lambda: maj_at_k_from_counts([2.5, 1], [True, False], 1), "count must be a whole number"),
        (lambda: maj_at_k_from_counts([], [], 1), "k must not exceed n"),
    ],
)
def test_maj_refuses_what_is_no_vote(call, says):
    """Weights that leave something out, shapes that do not match, more votes than answers."""
    with pytest.raises(ValueError, match=says):
        call()


# --- over seeds -----------------------------------------------------------------------------------------------------


def test_interval_of_three_seeds():
    """1, 2, 3: mean 2, standard deviation 1, half-width 4.303 / sqrt 3."""
    assert interval([1.0, 2.0, 3.0]) == pytest.approx((2, 2 - 4.302653 / 3**0.5, 2 + 4.302653 / 3**0.5), abs=1e-4)


@pytest.mark.parametrize(
    ("df", "quantile"),
    [(1, 12.7062), (4, 2.7764), (10, 2.2281), (11, 2.2010), (15, 2.1314), (30, 2.0423), (120, 1.9799), (10**6, 1.96)],
)
def test_t_quantile_is_that_of_the_tables(df, quantile):
    """0.975 quantiles as every table prints them."""
    assert measures._t_quantile(df) == pytest.approx(quantile, abs=2e-4)


def test_t_interval_covers_the_mean_95_times_in_100():
    """What an interval is for: 4,000 experiments of 4 seeds each, 95 % of the intervals hold the true mean."""
    rng = random.Random(0)
    found = [interval([rng.gauss(5, 2) for _ in range(4)]) for _ in range(4000)]
    assert sum(low <= 5 <= high for _, low, high in found) / 4000 == pytest.approx(0.95, abs=0.012)


def test_one_seed_has_no_interval():
    """The mean is there, the spread is not known: NaN, not 0."""
    mean, low, high = interval([0.7])
    assert mean == 0.7
    assert math.isnan(low)
    assert math.isnan(high)


def test_interval_shows_a_nan():
    """A broken seed is not averaged away."""
    assert all(map(math.isnan, interval([0.5, math.nan])))


@pytest.mark.parametrize("values", [[], [[1.0, 2.0]], 1.0])
def test_interval_wants_one_row(values):
    """No values, or a table: an error."""
    with pytest.raises(ValueError, match="one row"):
        interval(values)


@given(values=st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=50))
def test_interval_keeps_its_bounds(values):
    """low <= mean <= high, the mean among the values, equal seeds no width."""
    mean, low, high = interval(values)
    assert low <= mean <= high
    assert min(values) - 1e-6 <= mean <= max(values) + 1e-6
    assert interval([mean, mean])[1:] == (mean, mean)


# --- tail miss ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("group_size", [1, 2, 3, 4, 5])
@pytest.mark.parametrize(("p", "tau"), [(0.5, 0.1), (0.3, 0.3), (0.9, 0.05), (1.0, 0.2), (0.4, 0.0), (0.0, 0.0)])
def test_tail_miss_equals_enumeration(p, tau, group_size):
    """Over all groups of {the rare mode, another right answer, a wrong one}: mixed, and without the rare mode."""
    rare, other, wrong = 0, 1, 2
    missed = 0.0
    for group, chance in draws([tau, p - tau, 1 - p], group_size):
        missed += chance * (other in group and wrong in group and rare not in group)
    assert tail_miss(p, tau, group_size) == pytest.approx(missed, abs=1e-12)


@given(p=st.floats(0, 1), share=st.floats(0, 1), group_size=st.integers(1, 512))
def test_tail_miss_keeps_its_bounds(p, share, group_size):
    """In [0, 1], at most the chance of a mixed group, and never for a single answer."""
    value = tail_miss(p, p * share, group_size)
    assert 0 <= value <= max(1 - p**group_size - (1 - p) ** group_size, 0) + ROUNDING
    assert tail_miss(p, p * share, 1) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize(
    ("p", "tau", "group_size"), [(0.3, 0.4, 8), (1.1, 0.4, 8), (0.3, -0.1, 8), (math.nan, 0.1, 8), (0.3, 0.1, 0)]
)
def test_tail_miss_refuses_masses_that_cannot_be(p, tau, group_size):
    """The mode is part of the correct mass, and a group holds someone."""
    with pytest.raises(ValueError, match=r"tau|group_size"):
        tail_miss(p, tau, group_size)
