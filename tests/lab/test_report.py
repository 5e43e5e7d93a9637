"""From rows to tables and pictures: intervals, the closing table, the sentences, a folder drawn again."""

import json

import pytest

from lab import report
from tests.lab.commands import METHODS, on_pairs, said
from toy_tasks import TASKS


def test_one_seed_has_no_interval(cli, tmp_path):
    """The mean alone; low and high are null, and the file is JSON without NaN."""
    assert cli(*on_pairs(tmp_path / "x", steps=2, seeds=1))[0] == 0
    text = (tmp_path / "x" / "summary.json").read_text()
    summary = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    value = summary["grpo"]["train"]["pass@1"]
    assert value["mean"] is not None
    assert value["low"] is value["high"] is None


def test_over_seeds_is_a_mean_and_what_is_known_of_it():
    """Blank values are not known; one seed has the interval of its own estimate, or none."""
    rows = [{"pass@1": value} for value in ("", 0.25, 0.75)]
    assert report.over_seeds(rows, "pass@1")["mean"] == 0.5
    assert report.over_seeds(rows[:1], "pass@1") == {"mean": None, "low": None, "high": None}
    assert report.over_seeds(rows[1:2], "pass@1") == {"mean": 0.25, "low": None, "high": None}
    estimate = {"pass@1": "0.5", "pass@1_low": "0.4", "pass@1_high": "nan"}
    assert report.over_seeds([estimate], "pass@1") == {"mean": 0.5, "low": 0.4, "high": None}


def test_flat_and_cut_groups_are_explained(cli, monkeypatch, tmp_path):
    """Nothing right anywhere: the output says that every group was flat."""

    class Wrong(TASKS["pairs"]):
        def verify(self, prompt, completion):
            return False

    monkeypatch.setitem(TASKS, "pairs", Wrong)
    code, out, _ = cli(*on_pairs(tmp_path / "x", seeds=1, methods=["grpo"]))
    assert code == 0
    assert "every group was flat" in out


def test_flat_groups_are_blamed_only_where_nothing_was_learned():
    """REINFORCE++ learns from flat groups: the sentence needs a gradient of 0 as well."""
    row = {"method": "reinforce++", "step": 10, "reward": 0.5, "flat_groups": 1.0, "cut_answers": 0.0, "entropy": 1.0}
    assert report.explain([row | {"grad_norm": 0.7}]) == []
    assert "flat" in report.explain([row | {"grad_norm": 0.0}])[0]


def test_report_draws_a_folder_again(folder, capsys):
    """From metrics.csv and config.json alone, with the table that the run printed."""
    (folder / "collapse.png").unlink()
    assert report.main([str(folder)]) == 0
    out = capsys.readouterr().out
    assert (folder / "collapse.png").read_bytes().startswith(b"\x89PNG")
    for method in METHODS:
        assert out.count(f"\n{method} ") == 2


@pytest.mark.parametrize("missing", ["metrics.csv", "config.json", "both"])
def test_report_on_no_run_is_one_line(folder, capsys, missing):
    """A folder that no run made: exit code 2 and one line, no traceback."""
    for name in ("metrics.csv", "config.json") if missing == "both" else (missing,):
        (folder / name).unlink()
    try:
        code = report.main([str(folder)])
    except OSError as error:
        pytest.fail(f"traceback: {error}")
    assert code == 2
    assert len(said(capsys.readouterr().err)) == 1


def test_report_without_a_folder_says_how_it_is_called(capsys):
    """Exit code 2 and one line."""
    assert report.main([]) == 2
    assert "python -m lab.report runs/NAME" in capsys.readouterr().err


def test_the_law_is_told_where_modes_are_lost():
    """R below 1 at the last step, mean over seeds, with what raises it; nothing above 1 or where R is not known."""
    rows = []
    for method, ends in {
        "grpo": (0.1, 0.3),
        "rloo+dlc": (0.5, 0.8),
        "dapo+iac+dlc": (0.9, 0.8),
        "grpo+dlc": (1.4, 1.2),
        "tilt": ("", ""),
    }.items():
        for seed, R in enumerate(ends):
            rows.append({"method": method, "seed": seed, "step": 0, "split": "train", "R": 0.0})
            rows.append({"method": method, "seed": seed, "step": 20, "split": "train", "R": R})
    assert report.tell_law(rows, "grpo") == (
        "grpo: at step 20, R is 0.20: below 1 the settings lose modes (without +dlc it cannot reach 1)."
    )
    assert "R is 0.65" in report.tell_law(rows, "rloo+dlc") and "+iac or +pos" in report.tell_law(rows, "rloo+dlc")
    assert "--mu" in report.tell_law(rows, "dapo+iac+dlc")
    assert report.tell_law(rows, "grpo+dlc") == report.tell_law(rows, "tilt") == ""
