"""Every variant's flags are valid; a folder of results holds all variants, and a second call trains nothing again."""

import csv
import json
import math

import pytest
from conftest import short_settings

from experiments import runs, three_causes
from lab import report
from lab.flags import parse_settings
from lab.run import Run
from lab.settings import check, parse_method
from minirlvr import sampled_step

SHORT = ["--task", "pairs", "--steps", "2", "--evaluate-every", "1", "--seeds", "2", "--group-size", "4"]
SHORT += ["--layers", "1", "--width", "16", "--heads", "2", "--memory-width", "16"]


@pytest.mark.parametrize("name", runs.EXPERIMENTS)
def test_the_flags_of_every_variant_are_valid(name, monkeypatch):
    monkeypatch.setattr(runs, "path_length", {"grpo": 1, "grpo+iac": 2, "grpo+dlc": 1, "grpo+iac+dlc": 3}.get)
    variants = runs.EXPERIMENTS[name]()
    assert len({label for label, _ in variants}) == len(variants)
    for _, flags in variants:
        check(parse_settings(flags))
    if name == "iac_control":  # twice the path, twice the rate
        assert [parse_settings(flags).update.learning_rate for _, flags in variants[2:]] == [6e-4, 9e-4]


@pytest.mark.parametrize("task", three_causes.STEPS)
def test_every_group_size_sees_as_many_samples(task):
    found = three_causes.runs(task)
    for budget, _, G, _, flags in found:
        settings = parse_settings(flags)
        check(settings)
        if budget == "samples":
            assert settings.experiment.steps == pytest.approx(three_causes.STEPS[task] * 8 / G, rel=0.1)
    assert len(found) == len(three_causes.BETAS) * (2 * len(three_causes.GROUPS) + 1)


@pytest.mark.slow
def test_results_hold_every_variant_and_are_made_once(written, capsys):
    variants = [("", [*SHORT, "--methods", "grpo", "rloo"]), ("lr 1e-3", [*SHORT, "--methods", "grpo"])]
    runs.make("both", variants, pictured=["grpo"])
    out = written / "both"
    names = ("collapse.png", "config.json", "metrics.csv", "summary.json", "table.txt")
    assert sorted(path.name for path in out.iterdir()) == sorted(names)
    with open(out / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["method"] for row in rows} == {"grpo", "rloo", "grpo (lr 1e-3)"}
    assert set(json.loads((out / "config.json").read_text())["variants"]) == {"", "lr 1e-3"}
    before = (out / "metrics.csv").read_bytes()
    runs.make("both", variants)
    assert (out / "metrics.csv").read_bytes() == before
    assert "grpo (lr 1e-3)" in capsys.readouterr().out


@pytest.mark.slow
def test_three_causes_are_written(written, monkeypatch):
    monkeypatch.setattr(report, "draw", lambda *_: None)  # of each run folder
    monkeypatch.setattr(three_causes, "GROUPS", (4, 8))
    monkeypatch.setattr(three_causes, "BETAS", (0.2,))
    monkeypatch.setattr(three_causes, "SEEDS", 2)
    monkeypatch.setitem(three_causes.STEPS, "pairs", 24)
    monkeypatch.setitem(three_causes.LEVELS, "pairs", 0.5)
    three_causes.make("pairs")
    with open(written / "three_causes_pairs" / "table.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    seen = {(row["budget"], row["beta"], row["G"]) for row in rows}
    assert len(seen) == 2 * 2 + 1 and ("exact", "0.2", "0") in seen
    assert len(rows) == len(seen) * (2 * 3 + 2)
    assert (written / "three_causes_pairs" / "three_causes.png").stat().st_size > 10_000


def test_the_path_is_as_long_as_its_steps(pairs, pairs_reference):
    def start():
        return Run(short_settings(steps=2), parse_method("grpo"), 0, pairs_reference)

    by_hand, run = 0.0, start()
    for _ in range(2):
        before = [p.detach().clone() for p in run.policy.parameters()]
        sampled_step(run)
        moved = [p.detach() - old for p, old in zip(run.policy.parameters(), before, strict=True)]
        by_hand += math.sqrt(sum(change.square().sum().item() for change in moved))
    assert runs.length_of_path(start()) == pytest.approx(by_hand, rel=1e-4) and by_hand > 0


def test_modes_at_a_level_are_on_the_line_between():
    rows = [{"pass@1": "0.5", "modes": "4"}, {"pass@1": "0.7", "modes": "3"}, {"pass@1": "0.9", "modes": "1"}]
    assert three_causes.at_level(rows, "modes", 0.6) == pytest.approx(3.5)
    assert three_causes.at_level(rows, "modes", 0.4) == 4.0  # already there
    assert math.isnan(three_causes.at_level(rows, "modes", 0.95))
