"""What the experiments share: usage lines, tables in files, bands, and a style that does not stay."""

import importlib

import matplotlib.pyplot as plt
import numpy as np
import pytest

from experiments import drawing, shared

COMMANDS = ("runs", "three_causes", "coupling")


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_says_what_it_knows(name, monkeypatch):
    monkeypatch.setattr("sys.argv", [name, "no_such_name"])
    with pytest.raises(SystemExit, match=rf"^usage: python -m experiments.{name} NAME .* one of \w+, \w+"):
        importlib.import_module(f"experiments.{name}").main()


def test_names_are_asked_for_unless_there_is_a_default(monkeypatch):
    monkeypatch.setattr("sys.argv", ["a command"])
    assert shared.chosen_names("coupling", ["sums", "countdown"], default=["sums"]) == ["sums"]
    with pytest.raises(SystemExit, match="usage"):
        shared.chosen_names("runs", ["sums", "countdown"])


def test_a_table_of_numbers(tmp_path):
    rows = [{"goal": "task", "step": 5, "accuracy": 1 / 3}, {"goal": "tilt", "step": 10, "accuracy": 1e-9}]
    shared.write_csv(tmp_path / "a.csv", rows)
    assert (tmp_path / "a.csv").read_bytes() == b"goal,step,accuracy\r\ntask,5,0.333333\r\ntilt,10,1e-09\r\n"
    shared.write_csv(tmp_path / "a.csv", rows, digits=None)
    assert (tmp_path / "a.csv").read_bytes().splitlines()[1] == b"task,5,0.3333333333333333"
    assert [path.name for path in tmp_path.iterdir()] == ["a.csv"]


def test_a_band_is_cut_at_what_can_be(tmp_path):
    figure, axes = drawing.canvas(1, 1, (3, 3), titles=20)
    drawing.band(axes[0, 0], [0, 1], [(0.5, -0.5, 1.5), (0.5, 0.25, 0.75)], drawing.RED, "both", 0, 1)
    corners = axes[0, 0].collections[0].get_paths()[0].vertices[:, 1]
    assert (corners.min(), corners.max()) == (0, 1) and np.isclose(corners, 0.25).any()
    drawing.save(figure, tmp_path / "band.png")
    assert (tmp_path / "band.png").stat().st_size > 1000
    assert not plt.get_fignums() and plt.rcParams["axes.titlesize"] == "large"  # nothing is left for the next figure
