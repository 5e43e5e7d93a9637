"""The run folder: what config.json says, what is refused in it, and that nothing in it is lost."""

import json
import math
import re
from pathlib import Path

import pytest

from lab.files import replace_file
from lab.folder import read_settings
from lab.settings import Experiment, Files, Shape
from tests.lab.commands import METHODS, contents, is_one_line, on_pairs

# --- a new folder ---------------------------------------------------------------------------------------------------


def test_out_does_not_overwrite_another_run(cli, folder):
    """One line that names the folder and --resume, and not a byte of it is changed."""
    before = contents(folder)
    is_one_line(cli(*on_pairs(folder)), folder, "--resume")
    assert contents(folder) == before


def test_out_may_be_an_empty_folder_and_not_a_file(cli, tmp_path):
    """An empty folder is as good as none; a file is one line."""
    (tmp_path / "file").write_text("mine")
    (tmp_path / "empty").mkdir()
    is_one_line(cli(*on_pairs(tmp_path / "file")), tmp_path / "file")
    is_one_line(cli(*on_pairs(tmp_path / "file" / "below")), tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"
    assert cli(*on_pairs(tmp_path / "empty", steps=1, seeds=1, methods=["grpo"]))[0] == 0


def test_out_unless_given_is_under_runs(cli):
    """runs/TASK-DATE-TIME, and the output says so."""
    flags = on_pairs("", steps=1, seeds=1, methods=["grpo"])
    flags = flags[: flags.index("--out")]
    code, out, _ = cli(*flags)
    (made,) = Path("runs").iterdir()
    assert code == 0
    assert re.fullmatch(r"pairs-\d{8}-\d{6}", made.name)
    assert str(made) in out


def test_a_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    """A full disk leaves the old text; nothing half-written stays behind."""
    replace_file(tmp_path / "a.txt", "one ± two")
    assert (tmp_path / "a.txt").read_bytes() == "one ± two".encode()
    replace_file(tmp_path / "a.txt", b"three")

    def full(path, content):
        path.open("wb").write(content[:2])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space"):
        replace_file(tmp_path / "a.txt", "four")
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]
    assert (tmp_path / "a.txt").read_text() == "three"


# --- read again -----------------------------------------------------------------------------------------------------


def test_the_settings_are_read_as_they_were(made, pairs):
    """Tuples, options and numbers come back as they went; where the files lie is not part of a run."""
    settings = read_settings(made)
    assert settings.experiment == Experiment(task="pairs", methods=METHODS, seeds=2, steps=4, evaluate_every=2)
    assert (settings.files, settings.shape) == (Files(), Shape(layers=1, width=16, heads=2))
    assert (settings.update.clip_low, settings.update.learning_rate) == (None, 0.003)


@pytest.mark.parametrize("what", ["missing", "empty folder", "file"])
def test_resume_of_no_run_is_one_line(cli, tmp_path, what):
    """A folder that is not there, an empty one, a file."""
    path = tmp_path / "nothing"
    if what == "empty folder":
        path.mkdir()
    if what == "file":
        path.write_text("x")
    is_one_line(cli("--resume", path), path)


def setting(group, name, value):
    def damage(config):
        config["settings"][group][name] = value

    return damage


CONFIGS = {
    "steps a string": setting("experiment", "steps", "4"),
    "steps a fraction": setting("experiment", "steps", 4.5),
    "steps null": setting("experiment", "steps", None),
    "steps a list": setting("experiment", "steps", [4]),
    "steps huge": setting("experiment", "steps", 10**400),
    "steps NaN": setting("experiment", "steps", math.nan),
    "methods a string": setting("experiment", "methods", "grpo"),
    "methods null": setting("experiment", "methods", None),
    "methods of numbers": setting("experiment", "methods", [1]),
    "method unknown": setting("experiment", "methods", ["grpp"]),
    "task unknown": setting("experiment", "task", "chess"),
    "task a list": setting("experiment", "task", []),
    "device unknown": setting("experiment", "device", "tpu"),
    "policy unknown": setting("experiment", "policy", 3),
    "temperature null": setting("sampling", "temperature", None),
    "aggregate unknown": setting("update", "aggregate", "mean"),
    "ratio unknown": setting("update", "ratio", "words"),
    "kl kind unknown": setting("update", "kl_kind", "k9"),
    "importance unknown": setting("calibration", "importance", "some"),
    "memory data unknown": setting("calibration", "memory_data", "most"),
    "alpha null": setting("calibration", "alpha", None),
    "a switch a string": setting("calibration", "iac_divide", "no"),
    "heads 0": setting("shape", "heads", 0),
    "width a string": setting("shape", "width", "16"),
    "unknown setting": setting("update", "momentum", 0.9),
    "unknown group": lambda config: config["settings"].update(extras={}) or config["settings"].pop("update"),
    "group a list": lambda config: config["settings"].update(update=[1]),
    "group null": lambda config: config["settings"].update(update=None),
    "no settings": lambda config: config.pop("settings"),
    "settings a string": lambda config: config.update(settings="all"),
}


@pytest.mark.parametrize("damage", CONFIGS.values(), ids=list(CONFIGS))
def test_resume_with_a_wrong_setting_is_one_line(cli, folder, damage):
    """config.json edited into something that never ran: refused before anything is changed."""
    config = json.loads((folder / "config.json").read_text())
    damage(config)
    (folder / "config.json").write_text(json.dumps(config))
    before = contents(folder)
    is_one_line(cli("--resume", folder), folder)
    assert contents(folder) == before


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", "3", '{"settings": 1}', "[" * 100_000, "\x00", "\udcff"],
    ids=lambda text: repr(text)[:20],
)
def test_resume_with_a_config_that_is_none_is_one_line(cli, folder, text):
    """Cut short, not JSON, not UTF-8, not an object."""
    (folder / "config.json").write_bytes(text.encode(errors="surrogateescape"))
    is_one_line(cli("--resume", folder), folder)


# --- written again --------------------------------------------------------------------------------------------------


def test_resume_keeps_the_command_that_made_the_run(folder, cli):
    """config.json names what made the folder; what went on with it is listed beside it."""
    before = json.loads((folder / "config.json").read_text())
    assert cli("--resume", folder, "--steps", 6)[0] == 0
    after = json.loads((folder / "config.json").read_text())
    assert after["command"] == before["command"]
    assert len(after["resumed"]) == 1
    assert after["settings"]["experiment"]["steps"] == 6


def test_a_config_that_cannot_be_rewritten_is_not_lost(folder, cli, monkeypatch):
    """A full disk while resuming leaves config.json as it was."""
    before = (folder / "config.json").read_bytes()

    def full_disk(path, text, **_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full_disk)
    is_one_line(cli("--resume", folder), "--resume", "No space left")
    assert (folder / "config.json").read_bytes() == before


def test_an_infinite_dial_is_strict_json_and_comes_back(cli, tmp_path):
    """config.json can be read by anything that reads JSON, and --resume knows infinity again."""
    for kappa in ("inf", "2.5"):
        folder = tmp_path / kappa
        assert cli(*on_pairs(folder, "--kappa", kappa, methods=["grpo+pos"], seeds=2, steps=2))[0] == 0

        def refuse(name):
            raise AssertionError(f"{name} is no JSON")

        for name in ("config.json", "summary.json"):
            json.loads((folder / name).read_text(), parse_constant=refuse)
        assert read_settings(folder).calibration.kappa == float(kappa)
