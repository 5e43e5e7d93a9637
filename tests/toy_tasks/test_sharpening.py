"""P2's targets: that they are the best of their objectives, what they are like, and what pruning can hide of them."""

import itertools
import math

import pytest
import torch
from conftest import ConstantPolicy, generator, tiny_policy

from toy_tasks import STOP, Scratchpad, Task
from toy_tasks.exact import Tree
from toy_tasks.sharpening import (
    REGIMES,
    condition,
    count_strings,
    covariance_identity,
    geometric_length,
    geometric_length_temperature,
    kl,
    missing_share,
    sampled_temper_summary,
    target_log_probs,
    target_summary,
    total_variation,
)

ALPHAS = (0.5, 1, 1.25, 2, 4)  # the grid of P2's code
EVERY_ALPHA = pytest.mark.parametrize("alpha", ALPHAS)
EVERY_NORMALIZE = pytest.mark.parametrize("normalize", ["sum", "mean", "weighted"])
MOST_RIGHT = {"direct": 0.4, "forget_skew": 0.3, "order_skew": 1.0}


class Letters(Task):
    """Texts of a, b and c (and padding: four tokens in all, beside the stop); right with two letters or more."""

    name = "letters"
    characters = "abc"
    max_new_tokens = 6
    pretraining_steps = 0
    train = ("a", "bc")
    heldout = ("cab",)

    def modes(self, prompt):
        raise NotImplementedError("never listed here")

    def verify(self, prompt, completion):
        return len(completion) >= 2 and completion[0] == prompt[0]

    def sample(self, prompt, rng):
        return "ab"

    def plain_language(self, prompt):
        return "Write two letters or more."


def outcomes(task, prompts):
    """(log-probabilities, rewards, lengths, owner), each (O,), of the pretraining data itself: a perfect reference."""
    rows = [
        (math.log(p), task.verify(prompt, text), len(text) + 1, q)
        for q, prompt in enumerate(prompts)
        for text, p in task.sampling_probs(prompt).items()
    ]
    log_probs, rewards, lengths, owner = zip(*rows, strict=True)
    return torch.tensor(log_probs).double(), torch.tensor(rewards), torch.tensor(lengths), torch.tensor(owner)


def tree_outcomes(tree, policy):
    """The same of a tree."""
    rewards = [tree.task.verify(tree.prompts[q], text) for q, text in zip(tree.owner.tolist(), tree.texts, strict=True)]
    return tree.outcome_log_probs(policy).detach(), torch.tensor(rewards), tree.lengths, tree.owner


@pytest.fixture(scope="module")
def scratchpad():
    """Outcomes of the default dials, for all prompts."""
    return outcomes(Scratchpad(), Scratchpad().prompts)


@pytest.fixture(scope="module")
def random_policy():
    """An untrained policy for Letters, its logits spread a little more than they come."""
    policy = tiny_policy(Letters().vocab_size)
    return lambda texts: 1.5 * policy(texts).detach()


@pytest.fixture(scope="module")
def whole_tree(random_policy):
    """All completions of a random policy."""
    tree = Tree(random_policy, Letters(), Letters.train, min_mass=1e-30)
    assert len(tree.texts) == len(Letters.train) * count_strings(5, 6)
    return tree


@pytest.fixture(scope="module")
def whole(random_policy, whole_tree):
    """Their outcomes."""
    return tree_outcomes(whole_tree, random_policy)


# --- the objectives -------------------------------------------------------------------------------------------------


def objective(regime, log_probs, reference, rewards, owner, alpha, b, likelihood):
    """E_pi of the regime's reward, l being that of pi itself: (Q,)."""
    probs = log_probs.exp()
    kl_part = torch.where(probs > 0, reference - log_probs, 0.0)
    worth = {
        "task": rewards.double(),
        "sharpen": alpha * likelihood,
        "temper": (alpha - 1) * likelihood + kl_part,
        "tilt": rewards + ((alpha - 1) * likelihood + kl_part) / b,
    }[regime]
    return torch.zeros(int(owner.max()) + 1).double().index_add(0, owner, probs * worth)


@EVERY_ALPHA
@EVERY_NORMALIZE
@pytest.mark.parametrize("regime", REGIMES)
def test_no_other_distribution_has_a_higher_objective(regime, normalize, alpha, scratchpad):
    """Small and large random changes of the target, mixtures with random distributions, and its neighbours in alpha."""
    reference, rewards, lengths, owner = scratchpad
    b, settings = 3.0, {"lengths": lengths, "normalize": normalize}
    likelihood = reference / lengths ** {"sum": 0.0, "mean": 1.0, "weighted": 0.5}[normalize]
    target = target_log_probs(regime, reference, rewards, owner, alpha, b, **settings)
    given = (reference, rewards, owner, alpha, b, likelihood)
    best, noise = objective(regime, target, *given), generator()
    others = [reference, *(target_log_probs("temper", reference, rewards, owner, a) for a in ALPHAS)]
    for size in (0.01, 0.1, 1.0, 10.0):
        others.append(condition(target + size * torch.randn(len(target), generator=noise).double(), owner))
        other = condition(size * torch.randn(len(target), generator=noise).double(), owner)
        others.append(torch.logaddexp(target + math.log(0.99), other + math.log(0.01)))
    for other in others:
        assert (objective(regime, other, *given) <= best + 1e-9).all()


@EVERY_ALPHA
def test_kl_to_the_target_is_what_the_objective_lacks(alpha, scratchpad):
    """temper: J(target) - J(pi) = KL(pi || target); tilt: b times the difference."""
    reference, rewards, _, owner = scratchpad
    policy = condition(torch.randn(len(reference), generator=generator()).double(), owner)
    for regime, b in (("temper", 1.0), ("tilt", 2.5)):
        target = target_log_probs(regime, reference, rewards, owner, alpha, b)
        given = (reference, rewards, owner, alpha, b, reference)
        lacking = objective(regime, target, *given) - objective(regime, policy, *given)
        torch.testing.assert_close(b * lacking, kl(policy, target, owner))


@pytest.mark.parametrize("regime", REGIMES)
def test_targets_sum_to_one_for_each_prompt(regime, whole):
    """Whatever the reference summed to."""
    reference, rewards, lengths, owner = whole
    for alpha, normalize in itertools.product(ALPHAS, ("sum", "mean")):
        target = target_log_probs(regime, reference - 1, rewards, owner, alpha, 2.0, lengths, normalize)
        total = torch.zeros(2).double().index_add(0, owner, target.exp())
        torch.testing.assert_close(total, torch.ones(2).double())


def test_special_cases_agree(scratchpad):
    """alpha = 1 is the reference; tilt without a bonus is temper; large b is task; large alpha is sharpen."""
    reference, rewards, lengths, owner = scratchpad

    def target(*args, **settings):
        return target_log_probs(*args[:1], reference, rewards, owner, *args[1:], **settings).exp()

    torch.testing.assert_close(target("temper", 1.0), reference.exp())
    torch.testing.assert_close(target("tilt", 2.0, 0.0), target("temper", 2.0))
    torch.testing.assert_close(target("tilt", 1.0, 60.0), target("task"))
    for normalize in ("sum", "mean", "weighted"):
        settings = {"lengths": lengths, "normalize": normalize}
        torch.testing.assert_close(target("temper", 5000.0, **settings), target("sharpen", **settings))
    torch.testing.assert_close(
        target("temper", 2.0, lengths=lengths, normalize="weighted", length_power=1.0),
        target("temper", 2.0, lengths=lengths, normalize="mean"),
    )


def test_tilted_accuracy_has_a_closed_form(scratchpad):
    """alpha = 1: p e^b / (p e^b + 1 - p), ordinary KL-regularised RL."""
    reference, rewards, lengths, owner = scratchpad
    p, gain = 0.391, math.exp(2.0)
    summary = target_summary(target_log_probs("tilt", reference, rewards, owner, 1.0, 2.0), rewards, lengths, owner)
    torch.testing.assert_close(summary["accuracy"], torch.full((56,), p * gain / (p * gain + 1 - p)).double())


def test_task_without_a_right_answer_stays_at_the_reference():
    """A prompt whose rewards are all equal has no preference: the limit of tilt is the reference."""
    reference = torch.tensor([0.5, 0.5, 0.3, 0.7]).double().log()
    rewards, owner = torch.tensor([1, 0, 0, 0]).bool(), torch.tensor([0, 0, 1, 1])
    target = target_log_probs("task", reference, rewards, owner).exp()
    torch.testing.assert_close(target, torch.tensor([1.0, 0.0, 0.3, 0.7]).double())


def test_sharpen_shares_ties():
    """Two equally likely completions are both the most likely."""
    reference = torch.tensor([0.4, 0.4, 0.2]).double().log()
    target = target_log_probs("sharpen", reference, torch.zeros(3), torch.zeros(3, dtype=torch.long))
    torch.testing.assert_close(target.exp(), torch.tensor([0.5, 0.5, 0.0]).double())


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"regime": "polish"}, "task, sharpen, temper, tilt"),
        ({"alpha": -0.5}, "alpha"),
        ({"alpha": math.nan}, "alpha"),
        ({"alpha": math.inf}, "alpha"),
        ({"regime": "sharpen", "alpha": 0.0}, "alpha"),
        ({"beta_inverse": -1.0}, "beta_inverse"),
        ({"beta_inverse": math.inf}, "task"),
        ({"normalize": "median"}, "sum, mean, weighted"),
        ({"normalize": "mean"}, "lengths"),
        ({"normalize": "weighted", "length_power": 2.0}, "length_power"),
    ],
)
def test_wrong_settings_are_named(settings, match):
    """One line that says what is allowed."""
    settings = {"regime": "temper"} | settings
    with pytest.raises(ValueError, match=match):
        one = torch.zeros(1)
        target_log_probs(
            reference_log_probs=one.double(), rewards=one, owner=torch.zeros(1, dtype=torch.long), **settings
        )


# --- what the targets are like: P2's claim --------------------------------------------------------------------------


@pytest.mark.parametrize("dials", [{}, MOST_RIGHT], ids=str)
def test_sharpening_ends_short_and_wrong_and_task_long_and_right(dials):
    """Also where most of the reference's mass, 56 %, is right."""
    task = Scratchpad(**dials)
    reference, rewards, lengths, owner = outcomes(task, task.prompts)
    base, sharpen, best = (
        target_summary(log_probs, rewards, lengths, owner)
        for log_probs in (
            reference,
            target_log_probs("sharpen", reference, rewards, owner),
            target_log_probs("task", reference, rewards, owner),
        )
    )
    assert (sharpen["accuracy"] == 0).all() and (sharpen["length"] == 3).all() and (sharpen["entropy"] == 0).all()
    assert (best["accuracy"] == 1).all() and (best["length"] > 7).all() and (best["entropy"] > 0.9).all()
    assert (base["accuracy"] > (0.55 if dials else 0.38)).all()


def test_a_mean_over_tokens_turns_it_round(scratchpad):
    """Divided by the length, or by its root, the likelihood favours a long right answer: the bias was one of length."""
    reference, rewards, lengths, owner = scratchpad
    for normalize in ("mean", "weighted"):
        target = target_log_probs("sharpen", reference, rewards, owner, lengths=lengths, normalize=normalize)
        summary = target_summary(target, rewards, lengths, owner)
        assert (summary["accuracy"] == 1).all() and (summary["length"] == 8).all()


def test_tempered_targets_of_the_pilot():
    """papers.md, P2: .36 for the reference, .25 for alpha = 2 and .10 for 4; more alpha, shorter and less spread."""
    task = Scratchpad(step_error=0.1)
    reference, rewards, lengths, owner = outcomes(task, task.prompts)
    rows = [
        target_summary(target_log_probs("temper", reference, rewards, owner, alpha), rewards, lengths, owner)
        for alpha in ALPHAS
    ]
    accuracy = {alpha: row["accuracy"].mean().item() for alpha, row in zip(ALPHAS, rows, strict=True)}
    assert (accuracy[1], accuracy[2], accuracy[4]) == pytest.approx((0.36, 0.25, 0.10), abs=0.01)
    for name in ("length", "entropy"):
        values = [row[name].mean().item() for row in rows]
        assert values == sorted(values, reverse=True), name


def test_where_right_is_likely_sharpening_helps():
    """The other outcome: a reference that seldom forgets. The sign of the covariance says which one it is."""
    for forget, sign in ((0.95, -1), (0.05, 1)):
        task = Scratchpad(forget=forget)
        reference, rewards, lengths, owner = outcomes(task, task.prompts)
        _, covariance = covariance_identity(reference, rewards, owner, alpha=1.5)
        target = target_log_probs("temper", reference, rewards, owner, alpha=2.0)
        gain = target_summary(target, rewards, lengths, owner)["accuracy"] - target_summary(
            target_log_probs("temper", reference, rewards, owner, alpha=1.0), rewards, lengths, owner
        )["accuracy"]  # fmt: skip
        assert (covariance.sign() == sign).all() and (gain.sign() == sign).all()


# --- the identity ---------------------------------------------------------------------------------------------------


@EVERY_ALPHA
def test_accuracy_changes_by_the_covariance(alpha, scratchpad, whole):
    """d/d alpha E[r] = Cov(r, l_ref), to 1e-6, on the data's own distribution and on a whole tree; any reward."""
    for reference, rewards, lengths, owner in (scratchpad, whole):
        for reward in (rewards, lengths.double().sqrt()):
            derivative, covariance = covariance_identity(reference, reward, owner, alpha)
            torch.testing.assert_close(derivative, covariance, atol=1e-6, rtol=0)
            assert covariance.abs().max() > 1e-4


@pytest.mark.parametrize(("alpha", "step"), [(0.0, 1e-5), (1.0, 0.0), (1.0, 2.0), (math.inf, 1e-5)])
def test_the_identity_needs_room_for_its_step(alpha, step):
    """alpha - step must not be negative."""
    with pytest.raises(ValueError, match="alpha"):
        covariance_identity(torch.zeros(1), torch.zeros(1), torch.zeros(1, dtype=torch.long), alpha, step)


# --- what pruning leaves out ----------------------------------------------------------------------------------------


def test_count_strings_counts():
    """Against a list of all that can be said in three tokens of 0, 1 (stop) and 2."""
    said = set()
    for tokens in itertools.product(range(3), repeat=3):
        said.add(tokens[: tokens.index(STOP) + 1] if STOP in tokens else tokens)
    assert count_strings(3, 3) == len(said)


@pytest.mark.parametrize("min_mass", [3e-2, 1e-2, 1e-3, 1e-4])
@pytest.mark.parametrize("regime", REGIMES)
def test_missing_share_bounds_the_error_of_a_pruned_target(regime, min_mass, random_policy, whole_tree, whole):
    """The target of a pruned tree against that of everything: within the bound (and float32's error)."""
    tree = Tree(random_policy, Letters(), Letters.train, min_mass)
    reference, rewards, lengths, owner = tree_outcomes(tree, random_policy)
    place = {key: i for i, key in enumerate(zip(whole_tree.owner.tolist(), whole_tree.texts, strict=True))}
    kept = torch.tensor([place[key] for key in zip(owner.tolist(), tree.texts, strict=True)])
    left_out, bounds = tree.left_out(random_policy), []
    for alpha, normalize in itertools.product(ALPHAS, ("sum", "mean", "weighted")):
        given = {"alpha": alpha, "beta_inverse": 2.0, "normalize": normalize}
        pruned = target_log_probs(regime, reference, rewards, owner, lengths=lengths, **given)
        true = target_log_probs(regime, whole[0], whole[1], whole[3], lengths=whole[2], **given)
        bound = missing_share(regime, reference, rewards, owner, left_out, min_mass, 5, 6, lengths=lengths, **given)
        spread = torch.full_like(true, -math.inf).index_copy(0, kept, pruned)
        assert (total_variation(spread, true, whole[3]) <= bound + 1e-6).all(), (alpha, normalize)
        error = (
            target_summary(pruned, rewards, lengths, owner)["accuracy"] - target_summary(true, *whole[1:])["accuracy"]
        )
        assert (error.abs() <= bound + 1e-6).all(), (alpha, normalize)
        bounds.append(bound.max().item())
    if min_mass == 1e-4:  # and it says something, for alpha >= 1
        assert sum(bound < 0.5 for bound in bounds) >= 12, bounds


def test_a_tree_without_a_right_completion_says_nothing_of_task():
    """What is right may all have been pruned."""
    kept, owner = torch.tensor([0.7, 0.2]).double(), torch.tensor([0, 0])
    for left_out, bound in ((0.1, 1.0), (0.0, 0.0)):
        found = missing_share("task", kept.log(), torch.zeros(2), owner, torch.tensor([left_out]), 0.05, 5, 3)
        assert found.tolist() == [bound]


def test_a_missing_share_of_half_power_is_met():
    """alpha < 1, where Hoelder is tight: N strings of equal probability were pruned, all but one."""
    N = count_strings(3, 2)
    one, owner = torch.tensor([1 / N]).double(), torch.tensor([0])
    left_out = torch.tensor([1 - 1 / N]).double()
    bound = missing_share("temper", one.log(), torch.zeros(1), owner, left_out, 0.2, 3, 2, alpha=0.5)
    assert bound.item() == pytest.approx(1 - 1 / N, abs=0.01)
    assert bound >= 1 - 1 / N


@pytest.mark.parametrize("alpha", [0.5, 2])
def test_sampling_agrees_with_the_whole_tree(alpha, random_policy, whole):
    """Weighted samples against the sum over everything: accuracy within 4 standard errors, the rest within 5 %."""
    found = sampled_temper_summary(random_policy, Letters(), Letters.train, alpha, samples=4000)
    true = target_summary(target_log_probs("temper", whole[0], whole[1], whole[3], alpha), *whole[1:])
    assert ((found["accuracy"] - true["accuracy"]).abs() <= 4 * found["error"] + 1e-6).all()
    assert (found["effective_samples"] > 100).all()
    for name in ("length", "entropy"):
        torch.testing.assert_close(found[name], true[name], rtol=0.05, atol=0.05)


@pytest.mark.parametrize(("alpha", "samples"), [(0.0, 8), (math.nan, 8), (0.5, 1)])
def test_sampling_needs_a_power_and_two_samples(alpha, samples, random_policy):
    """Else there is nothing to weight, or no error to tell."""
    with pytest.raises(ValueError, match="samples"):
        sampled_temper_summary(random_policy, Letters(), ["a"], alpha, samples)


# --- distances ------------------------------------------------------------------------------------------------------


def test_distances_of_two_small_distributions():
    """By hand, for two prompts; what lies outside counts in the total variation and is left aside in the divergence."""
    owner = torch.tensor([0, 0, 1, 1])
    one, other = torch.tensor([0.5, 0.5, 0.4, 0.4]).double(), torch.tensor([0.25, 0.75, 1.0, 0.0]).double()
    torch.testing.assert_close(total_variation(one.log(), other.log(), owner), torch.tensor([0.25, 0.6]).double())
    found = kl(one.log(), other.log(), owner)
    assert found[0].item() == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(2 / 3)) and found[1] == math.inf
    back = kl(other.log(), one.log(), owner)
    assert back[1].item() == pytest.approx(math.log(2))  # one is (.5, .5) there
    assert (kl(one.log(), one.log(), owner) == 0).all() and (
        total_variation(other.log(), other.log(), owner) == 0
    ).all()


def test_kl_is_differentiable():
    """A trained policy's distance may be a loss, also where the target is 0."""
    logits = torch.zeros(3, requires_grad=True)
    owner, target = torch.zeros(3, dtype=torch.long), torch.tensor([0.5, 0.5, 0.0]).double().log()
    kl(target, logits.log_softmax(0), owner).sum().backward()
    torch.testing.assert_close(logits.grad, torch.tensor([1 / 3 - 0.5, 1 / 3 - 0.5, 1 / 3]))


# --- length alone ---------------------------------------------------------------------------------------------------


def test_lengths_of_the_paper_notes():
    """V = 4, e = .1: sequence power shortens (9, 1.63, .25, .01), token temperature lengthens (9, 11, 20, 102)."""
    alphas = (1, 1.25, 2, 4)
    assert [geometric_length(4, 0.1, a) for a in alphas] == pytest.approx([9, 1.63, 0.25, 0.01], abs=0.005)
    warm = [geometric_length_temperature(4, 0.1, a) for a in alphas]
    assert warm == pytest.approx([9, 11, 20, 102], abs=0.55)  # the last is 102.5


@EVERY_ALPHA
@pytest.mark.parametrize("max_length", [0, 1, 6])
def test_closed_forms_are_those_of_an_enumerated_stop_process(alpha, max_length):
    """Every text of a policy that always stops with chance .1, else says one of four tokens, up to the cap."""
    by_power, by_temperature, kept = [], [], 0.9 / 4
    stop_warm = 0.1**alpha / (0.1**alpha + 4 * kept**alpha)
    for length in range(max_length + 1):
        for _ in itertools.product(range(4), repeat=length):
            cut = length == max_length
            by_power.append((length, (kept**length * (1 if cut else 0.1)) ** alpha))
            by_temperature.append((length, ((1 - stop_warm) / 4) ** length * (1 if cut else stop_warm)))
    for texts, closed in ((by_power, geometric_length), (by_temperature, geometric_length_temperature)):
        mean = sum(n * w for n, w in texts) / sum(w for _, w in texts)
        assert closed(4, 0.1, alpha, max_length) == pytest.approx(mean)


@EVERY_ALPHA
def test_closed_forms_are_those_of_a_tree(alpha):
    """The same through `Tree`, its cap and its temperature: three letters and the padding, stop .1, six tokens."""
    logits = torch.full((5,), math.log(0.9 / 4))
    logits[STOP] = math.log(0.1)
    policy = ConstantPolicy(logits)
    tree = Tree(policy, Letters(), ["a"], 1e-30)
    reference, rewards, lengths, owner = tree_outcomes(tree, policy)
    assert tree.left_out(policy).abs() < 1e-6
    without_stop = lengths - tree.ended.long()
    power = target_summary(target_log_probs("temper", reference, rewards, owner, alpha), rewards, without_stop, owner)
    assert power["length"].item() == pytest.approx(geometric_length(4, 0.1, alpha, max_length=6), abs=1e-5)
    warm = Tree(policy, Letters(), ["a"], 1e-30, temperature=1 / alpha)
    token = target_summary(warm.outcome_log_probs(policy).detach(), rewards, without_stop, owner)
    assert token["length"].item() == pytest.approx(geometric_length_temperature(4, 0.1, alpha, max_length=6), abs=1e-5)


def test_a_far_cap_changes_nothing_where_the_sum_is_finite():
    """alpha >= 1 here; for alpha = .5 the mean stays at the cap, however far."""
    for alpha in (1, 1.25, 2, 4):
        assert geometric_length(4, 0.1, alpha, 2000) == pytest.approx(geometric_length(4, 0.1, alpha))
        assert geometric_length_temperature(4, 0.1, alpha, 20_000) == pytest.approx(
            geometric_length_temperature(4, 0.1, alpha)
        )
    for cap in (10, 100, 1000):
        assert cap - 1 < geometric_length(4, 0.1, 0.5, cap) < cap


def test_a_power_that_cannot_be_normalised_is_an_error():
    """alpha = .5 and no cap: rho = 1.9; alpha = 0: every text alike."""
    for alpha in (0.5, 0):
        with pytest.raises(ValueError, match="max_length"):
            geometric_length(4, 0.1, alpha)
    assert geometric_length_temperature(4, 0.1, 0.5) == pytest.approx(6, abs=0.01)  # per token there is always a sum


@pytest.mark.parametrize(
    "numbers", [(0, 0.1, 1), (4, 0.0, 1), (4, 1.0, 1), (4, 0.1, -1), (4, 0.1, math.inf), (4, 0.1, 1, -1)]
)
def test_processes_out_of_range_are_errors(numbers):
    """Both closed forms say what they need."""
    for closed in (geometric_length, geometric_length_temperature):
        with pytest.raises(ValueError, match="needs vocab"):
            closed(*numbers)


def test_extreme_powers_do_not_overflow():
    """Thousands of times the likelihood is still a number, or infinity."""
    assert geometric_length(1000, 0.9, 5000.0) == 0
    assert geometric_length_temperature(4, 0.1, 5000.0) == math.inf
    assert geometric_length_temperature(4, 0.1, 5000.0, max_length=7) == 7
    assert geometric_length_temperature(4, 0.9, 5000.0) == 0


def test_alpha_one_leaves_impossible_outcomes_impossible():
    """-inf in the reference stays -inf at alpha = 1: 0 * -inf must not become nan."""
    reference = torch.tensor([0.0, -math.inf], dtype=torch.float64)
    rewards, owner = torch.tensor([0.0, 1.0]), torch.tensor([0, 0])
    for regime in ("temper", "tilt"):
        target = target_log_probs(regime, reference, rewards, owner, alpha=1.0, beta_inverse=1.0)
        assert target.tolist() == [0.0, -math.inf]
