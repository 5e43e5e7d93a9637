"""A run: seeds, resume bit for bit, rows, the infinite batch; on a task and a reference that take milliseconds."""

import copy
import dataclasses
import math

import pytest
import torch
from conftest import ConstantPolicy

from lab.checkpoint import LOG
from lab.run import train
from tests.runs import EVERY_METHOD, moved, same_tree, use_sgd, weights
from toy_tasks import UserError
from toy_tasks.exact import exact_objective


def logged(run):
    """The last row that carries the log."""
    return [row for row in run.rows if row["split"] == "train"][-1]


# --- seeds and resume -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["grpo", "dapo+iac+dlc"])
def test_one_seed_repeats_and_two_seeds_differ(trained, method):
    """The same seed gives the same rows and weights, bit for bit; another seed gives others."""
    one, again, other = (trained(method, seed=seed, steps=3, evaluate_every=1) for seed in (0, 0, 1))
    assert one.rows == again.rows
    assert torch.equal(weights(one), weights(again))
    assert [row["pass@1"] for row in one.rows[2:]] != [row["pass@1"] for row in other.rows[2:]]
    assert not torch.equal(weights(one), weights(other))


def test_a_run_depends_on_its_seed_alone(trained):
    """The global random state is not used: whatever it is, the run is the same."""
    before, found = torch.get_rng_state(), []
    for seed in (1, 2):
        torch.manual_seed(seed)
        found.append(weights(trained("grpo+dlc")))
    torch.set_rng_state(before)
    assert torch.equal(*found)


RESUMED = [(method, {"prompts": 2, "group_size": 2} if "dapo" in method else {}) for method in EVERY_METHOD]
RESUMED += [
    ("exact", {"beta": 0.1}),
    ("grpo@tilt+dlc", {"beta": 0.1, "memory_start": "reference"}),
    ("grpo+dlc", {"importance": "exact", "epochs": 2, "beta": 0.1, "evaluate_every": 3}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("method", "changed"), RESUMED)
def test_ten_steps_are_five_a_resume_and_five(start, tmp_path, method, changed):
    """Bit for bit: weights, optimisers, memory, random stream, log, rows and DAPO's waiting groups."""
    changed = {"steps": 10, "evaluate_every": 10} | changed
    whole, first, second = (start(method, **changed) for _ in range(3))
    train(whole)
    train(first, stopped=lambda: first.step == 5)
    assert first.step == 5
    first.save(tmp_path / "half.pt")
    assert [path.name for path in tmp_path.iterdir()] == ["half.pt"]
    second.load(tmp_path / "half.pt")
    assert same_tree(first.contents(), second.contents())
    train(second)
    assert second.step == 10
    assert same_tree(whole.contents(), second.contents())
    assert "waiting" in whole.contents()
    assert not torch.equal(weights(second), weights(first))


def test_resume_holds_what_dapo_set_aside(start, tmp_path):
    """Groups that wait for others are in the file too."""
    run = start("dapo", prompts=3, group_size=2, steps=1)
    for _ in range(20):
        train(run)
        if run.waiting and sum(len(held["rewards"]) for held in run.waiting):
            break
        run.settings = dataclasses.replace(
            run.settings, experiment=dataclasses.replace(run.settings.experiment, steps=run.step + 1)
        )
    else:
        pytest.fail("no group ever waited")
    run.save(tmp_path / "waiting.pt")
    other = start("dapo", prompts=3, group_size=2, steps=20)
    other.load(tmp_path / "waiting.pt")
    assert same_tree(other.waiting, run.waiting)


def test_a_checkpoint_holds_full_precision(trained):
    """No weight is saved in half precision, and both optimisers are there."""
    contents = trained("grpo+dlc").contents()
    for name in ("policy", "memory"):
        assert all(tensor.dtype == torch.float32 for tensor in contents[name].values())
    for name in ("optimizer", "memory_optimizer"):
        assert contents[name]["state"]


def test_a_resumed_run_does_not_share_its_state(start):
    """Going on with one run moves neither the other nor the contents both came from."""
    one, other = start("grpo+dlc", steps=4), start("grpo+dlc", steps=4)
    train(one, stopped=lambda: one.step == 2)
    contents = copy.deepcopy(one.contents())
    other.take(contents)
    before, of_one = copy.deepcopy(contents), copy.deepcopy(one.contents())
    train(other)
    assert same_tree(contents, before)
    assert same_tree(one.contents(), of_one)


# --- what a run starts from -----------------------------------------------------------------------------------------


def test_a_run_does_not_touch_the_policy_it_was_given(start, pairs_reference):
    """Many runs start from one reference: none moves it."""
    before = copy.deepcopy(pairs_reference.state_dict())
    train(start("grpo+dlc", memory_start="reference", beta=0.1))
    assert same_tree(dict(pairs_reference.state_dict()), dict(before))


def test_memory_may_start_from_the_reference(start):
    """fresh: a small network of its own shape, by the seed; reference: a copy of the reference, not the same object."""
    copied = start("grpo+dlc", memory_start="reference")
    assert same_tree(dict(copied.memory.state_dict()), dict(copied.reference.state_dict()))
    assert copied.memory is not copied.reference
    assert copied.memory is not copied.policy
    one, again, other = (start("grpo+dlc", seed=seed).memory.head.weight for seed in (0, 0, 1))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)


def test_compile_compiles_the_policy_alone(start):
    """--compile is one call of torch.compile; a memory that starts from the reference stays a network of its own."""
    plain, run = (start("grpo+dlc", compile=compile, memory_start="reference") for compile in (False, True))
    assert hasattr(run.policy.extend, "_torchdynamo_orig_callable"), "it was not compiled"
    assert not hasattr(plain.policy.extend, "_torchdynamo_orig_callable")
    for network in (run.memory, run.reference):
        bound = getattr(network.extend, "_torchdynamo_orig_callable", network.extend)
        assert bound.__self__ is network
    assert same_tree(list(run.contents()["policy"]), list(plain.contents()["policy"]))


def test_exact_moves_the_policy_and_not_the_reference(start):
    """Two steps change the weights, and the reference's bytes are what they were."""
    run = start("exact")
    before = copy.deepcopy(run.reference.state_dict())
    train(run)
    assert run.step == 2
    assert moved(run) > 1e-4
    assert same_tree(dict(run.reference.state_dict()), dict(before))
    assert all(p.grad is None for p in run.reference.parameters())
    assert run.memory is None


# --- the infinite batch ---------------------------------------------------------------------------------------------


def test_exact_climbs_the_summed_probability_of_the_modes(start):
    """Its gradient is that of the mean over prompts of P / sqrt(P (1 - P)), the deviation held fixed; nothing drawn."""
    run = use_sgd(start("exact", steps=1, evaluate_every=1, max_grad_norm=1e6), rate=1.0)
    twin = copy.deepcopy(run.policy)
    success = run.listing.log_probs(twin).exp().sum(-1)[:3]
    (success / (success * (1 - success)).sqrt().detach()).mean().backward()
    train(run)
    for p, q in zip(run.policy.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q.detach() + q.grad, atol=1e-5, rtol=1e-4)
    assert run.rows[-1]["completions"] == 0


def test_exact_is_grpo_with_very_many_completions(start):
    """The sampled gradient of GRPO at G = 400 points where the exact one does, and is as long."""
    found = []
    for method, changed in (("exact", {}), ("grpo", {"group_size": 400, "aggregate": "constant"})):
        run = use_sgd(start(method, steps=1, max_grad_norm=1e6, **changed), rate=1.0)
        before = weights(run)
        train(run)
        found.append(weights(run) - before)
    exact, sampled = found
    sampled = sampled * 4  # "constant" divides by T
    assert torch.cosine_similarity(exact, sampled, dim=0) > 0.9
    assert (sampled.norm() / exact.norm()).item() == pytest.approx(1, abs=0.1)


def test_exact_objective_by_hand():
    """P over its deviation; the KL inside the reward is divided too, in the loss it is not; solved is finite."""
    success, kl = torch.tensor([0.2, 0.5]), torch.tensor([0.1, 0.3])
    torch.testing.assert_close(exact_objective(success), torch.tensor([0.5, 1.0]))
    torch.testing.assert_close(exact_objective(success, normalize_std=False), success)
    torch.testing.assert_close(exact_objective(success, kl, 0.5), torch.tensor([0.15 / 0.4, 0.35 / 0.5]))
    torch.testing.assert_close(exact_objective(success, kl, 0.5, kl_in="loss"), torch.tensor([0.45, 0.85]))
    assert exact_objective(torch.tensor([1.0, 0.0])).isfinite().all()


def test_exact_kl_holds_the_policy_back(trained):
    """With beta the exact run stays nearer to the reference, and logs a KL above 0."""
    many = {"steps": 30, "evaluate_every": 30, "learning_rate": 5e-3}
    free, held = trained("exact", **many), trained("exact", beta=1.0, **many)
    assert logged(free)["kl"] == ""
    assert 0 < logged(held)["kl"] < 1
    assert held.rows[-2]["pass@1"] < free.rows[-2]["pass@1"] - 0.02


def test_exact_learns(trained):
    """Forty steps make the policy right more often."""
    run = trained("exact", steps=40, evaluate_every=40, learning_rate=5e-3)
    assert run.rows[-2]["pass@1"] > run.rows[0]["pass@1"] + 0.1


# --- limits ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["grpo", "exact"])
@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_is_a_users_mistake(start, method, broken):
    """One line that names the run and says what to do, before any weight has moved."""
    run = start(method, seed=3)
    run.policy.head.weight.register_hook(lambda gradient: gradient * broken)
    with pytest.raises(UserError, match=rf"{method} seed 3, step 1.*--learning-rate") as error:
        train(run)
    assert "\n" not in str(error.value)
    assert moved(run) == 0


@pytest.mark.parametrize("method", ["grpo", "grpo+iac+dlc", "exact"])
def test_any_learning_rate_that_is_allowed_ends_in_numbers_or_a_users_mistake(start, method):
    """However large the step: rows of finite numbers, or a UserError; never another exception."""
    for changed in ({"learning_rate": 1e6}, {"learning_rate": 1e3, "beta": 0.1}, {"memory_learning_rate": 1e6}):
        run = start(method, **{"steps": 10, "evaluate_every": 5} | changed)
        try:
            train(run)
        except UserError as error:
            assert "--learning-rate" in str(error)
        for row in run.rows:
            assert all(math.isfinite(v) for v in row.values() if isinstance(v, float))


def test_dapo_counts_what_it_samples(trained):
    """Steps and completions are counted for every batch drawn, whether or not it was trained on."""
    for method in ("grpo", "dapo"):
        run = trained(method, steps=6, evaluate_every=3, group_size=2)
        assert [row["completions"] for row in run.rows if row["split"] == "train"] == [0, 18, 36]


def test_group_of_two_and_all_prompts_at_once(trained):
    """G = 2 is enough, and more prompts than there are means all."""
    run = trained(group_size=2, prompts=1000)
    assert run.rows[-1]["completions"] == 2 * 3 * 2


# --- rows -----------------------------------------------------------------------------------------------------------


def test_rows_are_within_bounds(trained):
    """Every number of every row: shares in [0, 1], modes within their counts, the log where it belongs."""
    shares = ("pass@1", "pass@8", "retained_mass", "share_gained", "worst_drop", "pcmd")
    for method in ("grpo", "dapo+iac+dlc"):
        run = trained(method, steps=6, beta=0.1, evaluate_every=2)
        assert [(row["step"], row["split"]) for row in run.rows] == [
            (s, p) for s in (0, 2, 4, 6) for p in ("train", "heldout")
        ]
        columns = list(run.rows[0])
        assert columns[:4] == ["method", "seed", "step", "split"]
        for row in run.rows:
            assert list(row) == columns
            for name in shares:
                assert 0 <= row[name] <= 1, name
            assert row["pass@1"] <= row["pass@8"]
            assert 1 <= row["effective_modes"] <= 7
            assert row["effective_classes"] <= row["effective_modes"] + 1e-9
            assert 0 <= row["distinct@8"] <= 7
            if row["split"] == "train" and row["step"]:
                for name in ("reward", "flat_groups", "cut_answers"):
                    assert 0 <= row[name] <= 1, name
                assert 1 <= row["length"] <= 4
                assert 0 <= row["entropy"] <= math.log(7)
        start = run.rows[0]
        assert (start["retained_mass"], start["worst_drop"], start["support_lost"]) == (1, 0, 0)


def test_rows_are_the_exact_measures_of_the_policy_now(trained):
    """pass@1 of the last row is the listed mass of the final weights, by an independent sum over the prompts."""
    run = trained(steps=3)
    with torch.no_grad():
        mass = run.listing.log_probs(run.policy).exp().sum(-1)
    for row, rows in zip(run.rows[-2:], (slice(3), slice(3, None)), strict=True):
        assert row["pass@1"] == pytest.approx(mass[rows].mean().item(), abs=1e-6)


class Sure(ConstantPolicy):
    """A policy that always answers "ab." after any prompt of `pairs`; a prompt is two tokens."""

    def __init__(self):
        table = torch.full((4, 7), -200.0)
        for t, token in enumerate((2, 3, 1, 1)):
            table[t, token] = 0
        super().__init__(table)

    def forward(self, texts):
        Q, L = texts.tokens.shape
        return self.logits[[0, 0, 1, 2, 3, 0, 0][:L]].expand(Q, -1, -1)


def test_a_row_says_what_the_batch_was(trained):
    """Always "ab.": reward 2/3, all groups flat, none cut, length 3; and the exact sum says 2/3 too."""
    row = logged(trained(reference=Sure(), steps=1))
    assert row["reward"] == pytest.approx(2 / 3)
    assert (row["flat_groups"], row["cut_answers"], row["length"]) == (1, 0, 3)
    assert row["entropy"] == pytest.approx(0, abs=1e-6)
    assert row["pass@1"] == pytest.approx(2 / 3)


def test_the_log_is_in_the_trained_rows_alone(trained):
    """What a run has none of is blank, as the held-out prompts' log is, and that of step 0."""
    run = trained(steps=1, evaluate_every=1)
    for row in run.rows:
        blank = {name for name in LOG if row[name] == ""}
        all_blank = row["split"] == "heldout" or row["step"] == 0
        assert blank == (set(LOG) if all_blank else {"kl", "memory_loss"})


def test_the_log_is_the_mean_since_the_last_row(trained):
    """One row a step, against rows every two steps: the mean of each pair."""
    fine, coarse = trained(steps=4, evaluate_every=1), trained(steps=4, evaluate_every=2)
    assert torch.equal(weights(fine), weights(coarse))
    one = [row for row in fine.rows if row["split"] == "train"]
    two = [row for row in coarse.rows if row["split"] == "train"]
    for name in ("reward", "grad_norm", "length", "entropy"):
        assert two[1][name] == pytest.approx((one[1][name] + one[2][name]) / 2), name
        assert two[2][name] == pytest.approx((one[3][name] + one[4][name]) / 2), name


def test_evaluating_does_not_change_the_run(trained):
    """Measures draw no random numbers and leave the policy's mode as it was."""
    run = trained(steps=3, evaluate_every=1)
    assert torch.equal(weights(run), weights(trained(steps=3, evaluate_every=3)))
    assert run.policy.training
