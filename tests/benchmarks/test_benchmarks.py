"""The benchmarks run, at tiny sizes and without peers, and their tables add up. No time is asserted."""

import dataclasses
import re

import pytest
import torch
from conftest import short_settings

import minirlvr
from benchmarks import bench_scale, bench_step, profile_default, profile_step, timing
from benchmarks.floor import Net, Product, Speeds, flops, learn_products, rollout_products, step_products
from benchmarks.workload import Checksum, Work, make_learner, step

TINY = Work(prompts=4, group_size=4, prompt_tokens=3, new_tokens=3, layers=1, width=16, heads=2, memory_width=16)


@pytest.mark.slow
def test_every_step_makes_the_same_tokens_and_mixed_groups():
    learner = make_learner(TINY, "grpo")
    for _ in range(20):
        step(learner)
    assert learner.logged["length"] == [3.0] * 20  # nothing stops early, not even on the stop token
    assert sum(learner.logged["flat_groups"]) / 20 < 0.3  # 1/8 expected of 4 completions, each right half the time


def test_flat_prompts_are_flat():
    work = dataclasses.replace(TINY, flat_prompts=4)
    learner = make_learner(work, "grpo")
    step(learner)
    assert learner.logged["flat_groups"] == [1.0]


def test_half_of_all_completions_are_right():
    task = Checksum(TINY)
    right = [task.verify(task.train[0], a + b) for a in task.characters for b in task.characters]
    assert sum(right) * 2 == len(right)
    assert all(task.verify(prompt, mode) for prompt in task.prompts for mode in task.modes(prompt))


def test_parameters_are_the_policys():
    policy = minirlvr.Policy(16, torch.Generator().manual_seed(0), layers=3, width=32, heads=4)
    assert Net(3, 32, 4).parameters == sum(p.numel() for p in policy.parameters())


def test_arithmetic_of_a_step_by_hand():
    """With one layer of width 8, one prompt, one completion of two tokens: every product can be counted."""
    net, work = Net(1, 8, 1, vocabulary=4), Work(1, 1, prompt_tokens=2, new_tokens=2, layers=1, width=8, heads=1)
    token = 2 * (8 * 24 + 8 * 8 + 8 * 44 + 22 * 8)  # the linear layers, hidden width 22
    attention = 2 * (2 * 2 * 1 * 8) + 2 * (2 * 1 * 3 * 8)  # two prompt tokens see one key each, the new one three
    forward = 3 * token + attention + 2 * (2 * 8 * 4)  # two prompt tokens and one new are read, two tokens scored
    assert flops(rollout_products(net, work)) == forward
    assert flops(learn_products(net, work, branches=1)) == 3 * forward


def test_backward_is_twice_forward_and_dlc_adds_work():
    assert flops(step_products(TINY, dlc=True)) > flops(step_products(TINY)) > 0


def test_floors_are_of_what_was_measured():
    products = step_products(TINY)
    speeds = Speeds(set(products), side=64)
    speeds.measure(repeats=1)
    at_rate, own = speeds.floors(products)
    assert at_rate == pytest.approx(flops(products) / speeds.rate) and own > 0
    assert speeds.rate == pytest.approx(Product(1, 64, 64, 64).flops / speeds.best[speeds.square])


def test_parts_add_up_to_the_whole_and_the_inner_part_is_charged(monkeypatch):
    now = iter(range(100))
    monkeypatch.setattr(timing, "clock", lambda device: next(now))  # every look at the clock takes one second
    parts = timing.Parts()
    with parts.measure("outer"):
        with parts.measure("inner"):
            pass
        with parts.measure("inner"):
            pass
    assert parts.seconds == {"outer": 3, "inner": 2}


def test_timed_parts_leaves_the_module_as_it_was():
    before = minirlvr.rollout
    with timing.timed_parts((minirlvr, timing.STEP_PARTS)) as measured:
        step(make_learner(TINY, "grpo+iac+dlc"))
    assert minirlvr.rollout is before
    assert measured.missing == [], "a part of the step has another name now: mend STEP_PARTS"
    assert set(measured.seconds) == {*timing.STEP_PARTS, "rest"} and min(measured.seconds.values()) > 0


def test_unequal_contestants_are_refused():
    contestants, _ = bench_step.make_contestants(TINY, [], "cpu", compiled=False)
    bench_step.check_equal(contestants, TINY)
    with pytest.raises(ValueError, match="48 tokens"):
        bench_step.check_equal(contestants, dataclasses.replace(TINY, new_tokens=4))


def test_peers_that_are_not_installed_are_skipped(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    measured = bench_step.measure(1, 2, ["transformers", "trl"], "cpu", TINY, compiled=False)
    text = bench_step.table(measured)
    assert re.search(r"Hugging Face +skipped\nTRL GRPOTrainer +skipped\n", text)
    assert re.search(r"minirlvr grpo .* 1\.00\n", text) and "nan" not in text and "inf " not in text
    assert all(timed.step.low <= timed.step.median <= timed.step.high for timed in measured.contestants.values())


def test_take_turns_is_fair():
    turns = [name for name, _ in bench_step.take_turns({"a": 1, "b": 2, "c": 3}, rounds=3)]
    assert turns == list("abcbcacab")


@pytest.mark.slow
def test_bench_step_writes_its_table_and_picture(tmp_path):
    assert bench_step.main(["--rounds", "1", "--threads", "1", "--peers", "--no-compile", "--out", str(tmp_path)]) == 0
    text = (tmp_path / "bench_step.txt").read_text()
    assert text.startswith("python -m benchmarks.bench_step --rounds 1 ")
    assert "1 thread\n" in text and "2048 new tokens" in text
    assert (tmp_path / "bench_step.png").stat().st_size > 10_000


def test_the_kinds_of_operations_add_up_to_the_step():
    """Every operation is of one kind, and the ones that must be there were seen."""
    spent, calls = profile_step.profile_steps(steps=1)
    lines = profile_step.table(spent, calls).splitlines()
    shares = [float(line.split()[-2]) for line in lines[1 : 1 + len(spent)]]
    assert sum(shares) == pytest.approx(100, abs=0.5)
    for kind in ("matrix products", "attention", "drawing tokens", "optimiser"):
        assert spent[kind] > 0 and calls[kind] >= 1


@pytest.mark.slow
def test_bench_scale_writes_its_table_and_picture(tmp_path):
    flags = ["--rounds", "1", "--axes", "group_size", "--points", "1", "--out", str(tmp_path)]
    assert bench_scale.main(flags) == 0
    text = (tmp_path / "bench_scale.txt").read_text()
    assert "completions of a prompt (G)" in text and "; default 8\n" in text and re.search(r"\n +2 .* \d+\n", text)
    assert (tmp_path / "bench_scale.png").stat().st_size > 10_000


def test_slopes_say_where_growth_is_linear():
    """Time 10, 12, 24, 96 for sizes 1, 2, 4, 8: nearly free, then linear, then with the square."""
    points = [
        bench_scale.Point(size, timing.Spread(time, time, time), dict.fromkeys(bench_scale.PARTS, 0.0), 1.0, 1.0)
        for size, time in ((1, 10.0), (2, 12.0), (4, 24.0), (8, 96.0))
    ]
    lines = bench_scale.table("layers", points).splitlines()[3:6]
    assert ["less than linear" in lines[0], " linear" in lines[1], "more than linear" in lines[2]] == [True] * 3
    assert " 1.00  linear" in lines[1] and " 2.00  more" in lines[2]


def test_profile_adds_up(monkeypatch, tmp_path, pairs):
    monkeypatch.setenv("MINIRLVR_CACHE", str(tmp_path))
    profiles = {"grpo": profile_default.profile_run(short_settings(), "grpo", "cpu")}
    assert profiles["grpo"].missing == [], "a part of a run has another name now: mend WATCHED"
    assert set(profiles["grpo"].seconds) == set(profile_default.PARTS)
    table = profile_default.run_table(profiles, steps=2)
    shares = [float(line.split()[-1]) for line in table.splitlines()[2 : 2 + len(profile_default.PARTS)]]
    assert sum(shares) == pytest.approx(100, abs=0.5)
    assert re.search(r"\nevaluation's share of the runs' time: \d+\.\d %", table)


def test_profile_says_what_it_cannot_account_for():
    fixed = {"imports": 2.0, "reference, pretrained": 9.0}
    profiles = {"grpo": profile_default.Profile({"rollout": 3.0}, [])}
    whole = profile_default.whole_table(fixed, profiles, seeds=1, uncached=20.0, cached=6.0)
    assert re.search(r"sum of these, the reference cached +5\.00\n", whole)
    assert re.search(r"not accounted for +1\.00\n", whole)
