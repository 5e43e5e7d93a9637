"""The experiments without runs of the command line: cats and coupling write what they say, at small sizes."""

import csv
import json
import math

import numpy as np
import pytest

from experiments import cats, coupling
from toy_tasks import TASKS


def read(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_the_cats_experiment_at_a_small_size(written, monkeypatch):
    monkeypatch.setattr(cats, "GROUP_SIZES", (8, math.inf))
    monkeypatch.setattr(cats, "OVERLAPS", (0.75, 1.0))
    monkeypatch.setattr(cats, "SEEDS", 3)
    cats.main()
    rows = read(written / "cats" / "cats.csv")
    assert list(rows[0]) == ["group_size", "overlap", "query", "moment", "measure", "mean", "low", "high"]
    by = {(row["group_size"], row["overlap"], row["query"], row["moment"], row["measure"]): row for row in rows}
    for measure in ("pass@1", "retained_mass"):  # at overlap 1 Cat is Persian
        cat, persian = (by["8", "1.0", query, "500", measure]["mean"] for query in ("Cat", "Persian"))
        assert cat == persian
    assert float(by["8", "0.75", "Persian", cats.MATCHED, "pass@1"]["mean"]) >= cats.LEVEL
    assert by["inf", "0.75", "Cat", "500", "pass@1"]["low"] == ""  # no chance, no spread
    assert (written / "cats" / "cats.png").stat().st_size > 10_000
    assert json.loads((written / "cats" / "config.json").read_text())["command"] == "python -m experiments.cats"


def test_spearman_counts_ranks_alone():
    x = np.array([1.0, 2.0, 3.0, 4.0])
    assert coupling.spearman(x, np.exp(x)) == pytest.approx(1) and coupling.spearman(x, -(x**3)) == pytest.approx(-1)
    assert coupling.correlation(x, 2 * x + 1) == pytest.approx(1)


def test_own_means_are_gone_and_holes_stay():
    values = np.array([[np.nan, 3.0, 5.0], [2.0, np.nan, 9.0], [4.0, 1.0, np.nan]])
    left = coupling.without_own_means(values, sets_too=True)
    assert (np.isnan(left) == np.isnan(values)).all()
    assert np.nanmean(left, 0) == pytest.approx([0, 0, 0], abs=1e-9)
    assert np.nanmean(left, 1) == pytest.approx([0, 0, 0], abs=1e-9)


def test_the_first_value_of_a_bootstrap_is_that_of_the_data(monkeypatch):
    monkeypatch.setattr(coupling, "DRAWS", 20)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(4, 5))
    y = np.stack([x + 0.1 * rng.normal(size=(4, 5)) for _ in range(3)])
    values = coupling.bootstrap(coupling.correlation, x, y)
    assert values.shape == (21,) and values[0] == coupling.correlation(x.ravel(), y.mean(0).ravel())
    assert values.std() > 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # correlations of too few numbers
def test_the_coupling_experiment_at_a_small_size(written, monkeypatch, pairs_reference):
    monkeypatch.setitem(coupling.PLANS, "pairs", coupling.Plan(seeds=1, steps=1, halves=3, half_steps=1))
    monkeypatch.setattr(coupling, "DRAWS", 10)
    monkeypatch.setattr(coupling, "load_reference", lambda task, shape: pairs_reference)
    coupling.make("pairs")
    out = written / "coupling_pairs"
    assert len(read(out / "sweep.csv")) == len(coupling.STEP_SIZES)
    modes = sum(len(TASKS["pairs"]().modes(prompt)) for prompt in TASKS["pairs"]().prompts)
    assert len(read(out / "changes.csv")) == modes and len(read(out / "similarity.csv")) == 4 * 4
    assert len(read(out / "losses.csv")) == 4 * 3 + 3 * 2  # each of four alone, three halves: the queries not trained
    assert len(read(out / "relations.csv")) == 2 * len(coupling.OUTCOMES) * 2 * 3
    small = json.loads((out / "config.json").read_text())["r_squared_at"]
    assert small["step_size"] == coupling.SMALL and small["train"] > 0.9
    assert (out / "coupling.png").stat().st_size > 10_000
