"""Checkpoints: whole or not there, read back without running code, and refused in one line where they do not fit."""

import pickle
import shutil

import pytest
import torch
from conftest import tiny_policy

from lab.checkpoint import FORMAT, HEAD, LOG, is_row, is_window, read_checkpoint
from lab.files import save_tensors
from tests.lab.commands import METHODS, is_one_line, rows_of
from toy_tasks import UserError
from toy_tasks.exact import MEASURES

DAMAGED = "checkpoint-grpo-seed1.pt"


class Evil:
    """A pickle that leaves a file behind when it is loaded the careless way."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


def edited(**changed):
    """The checkpoint with some entries replaced; None takes one out."""

    def damage(path):
        state = torch.load(path, weights_only=True) | changed
        torch.save({key: value for key, value in state.items() if value is not None}, path)

    return damage


def with_rows(change):
    """The checkpoint with each of its rows changed."""

    def damage(path):
        state = torch.load(path, weights_only=True)
        torch.save(state | {"rows": [change(row) for row in state["rows"]]}, path)

    return damage


def without(row, name):
    return {key: value for key, value in row.items() if key != name}


def cut(share):
    return lambda path: path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])


CHECKPOINTS = {
    "empty": cut(0),
    "a few bytes": lambda path: path.write_bytes(path.read_bytes()[:10]),
    "cut in half": cut(0.5),
    "cut at the end": cut(0.999),
    "text": lambda path: path.write_text("hello"),
    "not ours, a list": lambda path: torch.save([1, 2], path),
    "not ours, weights": lambda path: torch.save(tiny_policy(7).state_dict(), path),
    "not ours, code": lambda path: torch.save({"a": Evil(path.with_name("marker"))}, path),
    "other version": edited(version=99),
    "version missing": edited(version=None),
    "other shape": edited(policy=tiny_policy(7, layers=2).state_dict()),
    "other weights": edited(policy=tiny_policy(9, layers=1).state_dict()),
    "no policy": edited(policy=None),
    "no rows": edited(rows=None),
    "rows of none": edited(rows=[]),
    "no log": edited(window=None),
    "no optimiser": edited(optimizer=None),
    "no generator": edited(generator=None),
    "nothing that waits": edited(waiting=None),
    "a number that waits": edited(waiting=[1]),
    "step a string": edited(step="four"),
    "step below 0": edited(step=-1),
    "rows a number": edited(rows=7),
    "rows of other runs": with_rows(lambda row: row | {"seed": 0}),
    "rows of text": with_rows(lambda row: row | {"pass@1": "high"}),
    "log of text": edited(window={"loss": ["low"]}),
    "log of other things": edited(window={"luck": [1.0]}),
    "other seed": lambda path: shutil.copy(path.with_name("checkpoint-grpo-seed0.pt"), path),
    "other method": lambda path: shutil.copy(path.with_name("checkpoint-grpo+iac+dlc-seed1.pt"), path),
    "a folder": lambda path: path.unlink() or path.mkdir(),
}


@pytest.mark.slow
@pytest.mark.parametrize("damage", CHECKPOINTS.values(), ids=list(CHECKPOINTS))
def test_resume_with_a_bad_checkpoint_is_one_line_and_the_others_go_on(cli, folder, damage):
    """It is named, runs no code and lends no rows to metrics.csv; the three other runs reach step 8."""
    damage(folder / DAMAGED)
    is_one_line(cli("--resume", folder, "--steps", 8), DAMAGED)
    assert not (folder / "marker").exists()
    ends = {f"checkpoint-{method}-seed{seed}.pt": 8 for method in METHODS for seed in (0, 1)}
    del ends[DAMAGED]
    for name in ends:
        assert torch.load(folder / name, weights_only=True)["step"] == 8, name
    keys = [(row["method"], row["seed"], row["step"], row["split"]) for row in rows_of(folder)]
    assert len(set(keys)) == len(keys)
    assert ("grpo", "0", "8", "train") in keys
    assert ("grpo+iac+dlc", "1", "8", "heldout") in keys


def test_a_checkpoint_from_a_stranger_runs_no_code(tmp_path):
    """A pickle that would leave a file behind is refused, and leaves none."""
    torch.save({"format": FORMAT[0], "rows": Evil(tmp_path / "marker")}, tmp_path / "evil.pt")
    with pytest.raises(UserError, match=r"evil\.pt"):
        read_checkpoint(tmp_path / "evil.pt", "grpo", 0)
    assert not (tmp_path / "marker").exists()
    (tmp_path / "plain.pt").write_bytes(pickle.dumps({"rows": Evil(tmp_path / "marker")}, protocol=2))
    with pytest.raises(UserError, match=r"plain\.pt"):
        read_checkpoint(tmp_path / "plain.pt", "grpo", 0)
    assert not (tmp_path / "marker").exists()


OTHERS = {
    "an older format": edited(version=1),
    "a newer format": edited(version=FORMAT[1] + 1),
    "no version": edited(version=None),
    "a measure less": with_rows(lambda row: without(row, "pcmd")),
    "a measure more": with_rows(lambda row: row | {"luck": 0.5}),
    "another measure": with_rows(lambda row: without(row, "pcmd") | {"luck": 0.5}),
    "another log": with_rows(lambda row: without(row, "kl")),
}


@pytest.mark.parametrize("damage", OTHERS.values(), ids=list(OTHERS))
def test_a_folder_of_another_version_says_so(cli, folder, damage):
    """An older format, and rows with other columns, are of another version, not damaged: one line for the folder."""
    for path in folder.glob("checkpoint-*.pt"):
        damage(path)
    code, _, lines = cli("--resume", folder, "--steps", 6)
    assert code == 2 and len(lines) == len(METHODS) * 2  # one for each checkpoint
    for line in lines:
        assert line.startswith("minirlvr: checkpoint ") and "of another version" in line
        assert "damaged" not in line


def test_one_of_another_version_is_one_line(cli, folder):
    """The others go on."""
    edited(version=1)(folder / DAMAGED)
    is_one_line(cli("--resume", folder, "--steps", 6), DAMAGED, "of another version (1, not 2)")


def test_a_checkpoint_that_cannot_be_written_is_a_users_mistake(start, tmp_path):
    """A folder that is gone or full: one line, and no half file."""
    with pytest.raises(UserError, match="cannot be written"):
        save_tensors({"a": 1}, tmp_path / "gone" / "checkpoint.pt")
    with pytest.raises(UserError, match="cannot be written"):
        start().save(tmp_path / "gone" / "checkpoint.pt")
    assert not list(tmp_path.iterdir())


def test_a_kill_while_saving_leaves_the_old_checkpoint(start, tmp_path, monkeypatch):
    """The file gets its name when it is whole: whatever interrupts the writing, the one before is still there."""
    run, path = start(), tmp_path / "checkpoint.pt"
    run.evaluate()
    run.save(path)
    before, ours = path.read_bytes(), torch.save

    def killed(state, where):
        ours(state, where)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", killed)
    with pytest.raises(UserError, match="No space left"):
        run.save(path)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint.pt"]
    assert path.read_bytes() == before


def test_fewer_steps_than_done_are_refused(folder, cli):
    """--resume never says that a run of four steps has two."""
    code, _, lines = cli("--resume", folder, "--steps", 2)
    assert code == 2 and all("--steps" in line for line in lines)


def test_moments_of_another_shape_are_refused(folder, cli):
    """The fused optimizer would read past them: the checkpoint is named instead."""
    path = next(folder.glob("checkpoint-grpo-seed0.pt"))
    state = torch.load(path, weights_only=True)
    state["optimizer"]["state"][0]["exp_avg"] = torch.ones(1)
    torch.save(state, path)
    code, _, lines = cli("--resume", folder, "--steps", 6)
    assert code == 2 and any(path.name in line and "moments" in line for line in lines)


def test_rows_and_logs_are_plain_numbers():
    """A row of this run with a number for each measure; the log may be blank, estimates too where they are some."""
    row = dict(zip(HEAD, ("grpo", 0, 4, "train"), strict=True)) | dict.fromkeys((*MEASURES, "completions"), 0.5)
    row |= dict.fromkeys(LOG, "")
    assert is_row(row, "grpo", 0, MEASURES)
    wrongs = {"seed": 1}, {"step": 4.0}, {"split": "test"}, {"pcmd": ""}, {"pcmd": "0.5"}, {"loss": None}, {"x": 1}
    for wrong in wrongs:
        assert not is_row(row | wrong, "grpo", 0, MEASURES), wrong
    assert not is_row(without(row, "pcmd"), "grpo", 0, MEASURES)
    assert not is_row([row], "grpo", 0, MEASURES)
    estimates = (*MEASURES, "samples")
    assert is_row(row | {"samples": 8, "pcmd": ""}, "grpo", 0, estimates)
    assert is_window({"loss": [0.5], "kl": []}) and is_window({})
    for wrong in ([0.5], {"luck": [0.5]}, {"loss": 0.5}, {"loss": [1]}, {"loss": ["0.5"]}):
        assert not is_window(wrong), wrong
