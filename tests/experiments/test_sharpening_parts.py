"""The sharpening experiment: its world sums to what a policy says, and its runs are the same in any order."""

import csv
import math

import numpy as np
import pytest
import torch
from conftest import tiny_policy

from experiments.shared import RESULTS, pick
from experiments.sharpening import dials, instability, principles, regimes, training
from experiments.sharpening.world import CORE, GOALS, Goal, Recipe, World, by_prompt
from toy_tasks import Scratchpad
from toy_tasks.measures import maj_at_k

PROMPTS = 2  # of each split


@pytest.fixture(scope="module")
def task():
    return Scratchpad()


@pytest.fixture(scope="module")
def reference(task):
    """A policy that prefers what a scratchpad's answers are made of, so that few completions hold much of its mass."""
    policy = tiny_policy(task.vocab_size)
    with torch.no_grad():
        for parameter in policy.head.parameters():
            parameter.mul_(3)
    return policy


@pytest.fixture(scope="module", params=[False, True], ids=["with the stop", "fixed length"])
def world(request, task, reference):
    return World(task, reference, task.train[:PROMPTS] + task.heldout[:PROMPTS], 1e-3, fixed=request.param)


def test_outcomes_and_what_is_left_out_are_everything(world, reference):
    assert (by_prompt(world.score(reference).exp(), world.owner) + world.left_out).allclose(torch.tensor(1.0).double())
    assert len(world.owner) == len(world.lengths) == len(world.rewards) == len(world.total_of)
    assert world.lengths.min() >= 1 and world.lengths.max() <= world.task.max_new_tokens


def test_a_policy_at_its_goal_has_no_distance(world):
    for goal in GOALS[1:4]:  # tilt and temper, which have one optimum
        target = world.target(goal)
        found = world.distance(target, by_prompt(target.exp() * world.rewards, world.owner), goal)
        assert found["kl"].abs().max() < 1e-9 and found["tv"].abs().max() < 1e-6
    sharp = next(goal for goal in GOALS if goal.name == "sharpen")
    target = world.target(sharp)
    assert world.distance(target, torch.zeros(2 * PROMPTS), sharp)["tv"].abs().max() < 1e-9


def test_splits_are_means_of_their_prompts(world):
    values = torch.arange(2.0 * PROMPTS)
    means = {"train": values[:PROMPTS].mean().item(), "heldout": values[PROMPTS:].mean().item()}
    assert world.splits(values) == means
    assert [row["x"] for row in world.rows(x=values)] == list(means.values())


def test_votes_by_hand(world, reference):
    """One prompt: every right total and every likely wrong one a class of its own, all else one wrong answer."""
    log_probs = world.score(reference)
    mass = {}
    for q, total, p in zip(world.owner.tolist(), world.total_of.tolist(), log_probs.exp().tolist(), strict=True):
        mass.setdefault(q, {}).setdefault(total, 0.0)
        mass[q][total] += p
    for q, found in mass.items():
        right = {total: bool(world.total_right[total]) for total in found}
        kept = [total for total, p in found.items() if right[total] or p >= 0.01]
        weights = [*(found[total] for total in kept), 1 - sum(found[total] for total in kept)]
        expected = maj_at_k(np.array(weights), np.array([*(right[total] for total in kept), False]), 4)
        assert world.votes(log_probs, 4)[q].item() == pytest.approx(expected)


@pytest.fixture
def small_world(monkeypatch, task, reference):
    """What `make_world` gives, whatever the recipe."""
    made = World(task, reference, task.train[:PROMPTS] + task.heldout[:PROMPTS], 1e-3)
    for module in (training, regimes, instability, dials):
        monkeypatch.setattr(module, "make_world", lambda recipe: made)
    return made


def trainings(seeds=(1, 2)):
    temper = Goal("temper α=2", "temper", 2.0)
    return [training.Training(temper, seed, 1e-3, 2, (0, 2), 2, Recipe(), voting=True) for seed in seeds]


def test_training_measures_the_same_in_any_order(written, small_world, reference):
    found, turned = training.train_all(trainings()), training.train_all(trainings()[::-1])
    assert [row["step"] for row in found["curve"]] == [0, 0, 2, 2] * 2
    assert found["curve"] == turned["curve"][4:] + turned["curve"][:4]
    half = len(found["votes"]) // 2
    assert found["votes"] == turned["votes"][half:] + turned["votes"][:half]
    at_start = small_world.measure(reference, trainings()[0].goal)
    head = ("goal", "learning_rate", "seed", "step")
    assert [{k: v for k, v in row.items() if k not in head} for row in found["curve"][:2]] == at_start
    assert found["curve"][0]["accuracy"] != found["curve"][2]["accuracy"]  # it learns


def test_a_stopped_training_writes_nothing(written, small_world, tmp_path):
    trainings()[0]._replace(path=tmp_path / "rows.json").run(lambda steps: None, lambda: True)
    assert not (tmp_path / "rows.json").exists()


def test_the_peak_is_a_copy():
    policy, peak = tiny_policy(), training.Peak()
    peak.see(0.5, policy)
    with torch.no_grad():
        policy.head.weight.zero_()
    peak.see(0.4, policy)
    assert peak.best == 0.5 and peak.policy.head.weight.abs().sum() > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["regimes", "instability", "dials"])
def test_a_part_writes_its_folder(name, written, small_world, monkeypatch):
    monkeypatch.setattr(regimes, "SEEDS", (3, 4))
    monkeypatch.setattr(regimes, "PROMPTS_A_STEP", 2)
    monkeypatch.setattr(regimes, "GOALS", CORE[:2])
    monkeypatch.setattr(instability, "CORE", CORE[:2])
    for module, steps in ((regimes, 2), (instability, 1), (dials, 1)):
        monkeypatch.setattr(module, "STEPS", steps)
    monkeypatch.setattr(regimes, "MEASURED", (0, 2))
    monkeypatch.setattr(instability, "MEASURED", (0, 1))
    for module in (instability, dials):
        monkeypatch.setattr(module, "SEEDS", 2)
    monkeypatch.setattr(dials, "GRID", {"direct": (0.3, 0.9), "forget": (0.0, 0.95)})
    {"regimes": regimes.regimes, "instability": instability.instability, "dials": dials.dials}[name]()
    tables = {
        "regimes": ["curves", "targets", "votes"],
        "instability": ["curves", "runs"],
        "dials": ["dials", "trained"],
    }
    found = {path.name for path in (written / f"sharpening_{name}").iterdir()}
    assert {"config.json", "table.txt", *(f"{table}.csv" for table in tables[name])} <= found
    assert any(file.endswith(".png") for file in found)


# --- beside what is committed ---------------------------------------------------------------------------------------


def committed(part: str, table: str) -> list[dict]:
    with open(RESULTS / f"sharpening_{part}" / f"{table}.csv", newline="") as file:
        return list(csv.DictReader(file))


def test_lengths_and_likeliest_completions_are_the_committed_ones():
    for row, ours in zip(committed("principles", "lengths"), principles.length_rows(), strict=True):
        assert [float(row[name]) for name in ours] == pytest.approx(list(ours.values()), rel=1e-5)
    for row, ours in zip(committed("principles", "most_likely"), principles.misled_rows(), strict=True):
        assert float(row["probability"]) == pytest.approx(ours["probability"], rel=1e-5)
        assert (row["completion"], row["right"]) == (ours["completion"], str(ours["right"]))
    assert math.isinf(principles.power_length(4, 0.1, 0.9))


def test_the_sign_of_the_covariance_is_that_of_the_committed_rows():
    rows = committed("dials", "dials")
    for row in rows[:: len(rows) // 3]:
        setting = {name: float(row[name]) for name in dials.GRID}
        ours = dials.covariance_row(*dials.analytic_outcomes(Scratchpad(**setting)))
        assert [float(row[name]) for name in ours] == pytest.approx(list(ours.values()), rel=1e-4, abs=1e-9)


def test_a_fall_is_from_the_highest_step():
    one = trainings(seeds=[1])[0]
    curve = [
        one.head() | {"step": step, "split": split, "accuracy": accuracy, "length": 8.0, "tv": 0.5 - step, "kl": 1.0}
        for step, accuracy in ((0, 0.4), (1, 0.9), (2, 0.3))
        for split in ("train", "heldout")
    ]
    for row in instability.run_rows(curve, one):
        assert (row["peak"], row["last"], row["closest"]) == (0.9, 0.3, -1.5)
        assert row["fall"] == pytest.approx(0.6)


def test_agreement_counts_what_moves():
    rows = [{"covariance": c, "reference": 0.5, "x": x} for c, x in ((0.1, 0.6), (-0.1, 0.6), (0.1, 0.5), (-0.1, 0.4))]
    assert dials.agreement(rows, "x") == (2, 3)
    assert pick(rows, x=0.5) == [rows[2]]
