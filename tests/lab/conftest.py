"""Runs of milliseconds on `pairs`: made directly, and by the command line in this process."""

import os
import shutil
from pathlib import Path

import pytest
from conftest import InThisProcess, Pairs, short_settings

from lab import command_line, reference, report, run, workers
from lab.settings import parse_method
from tests.lab.commands import on_pairs, said
from toy_tasks import TASKS


@pytest.fixture
def start(pairs, pairs_reference):
    """Make a run: start("grpo", seed=1, steps=4, ...)."""

    def make(method="grpo", seed=0, reference=None, **changed):
        return run.Run(short_settings(**changed), parse_method(method), seed, reference or pairs_reference)

    return make


@pytest.fixture
def trained(start):
    """Make a run and train it to its end."""

    def make(*args, **changed):
        made = start(*args, **changed)
        run.train(made)
        return made

    return make


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    """References are made once for all tests of the lab, and not in the working copy."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MINIRLVR_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield Path(os.environ["MINIRLVR_CACHE"])


@pytest.fixture(scope="session")
def kept_reference():
    """`load_reference`, once for each task and shape: it takes two steps to find the reference's name."""
    kept, ours = {}, reference.load_reference

    def load(task, shape):
        if (task.name, shape) not in kept:
            kept[task.name, shape] = ours(task, shape)
        return kept[task.name, shape]

    return load


@pytest.fixture
def here(cache, kept_reference, monkeypatch, tmp_path):
    """Run in this process, in an empty folder, with `pairs` among the tasks and no picture drawn."""
    monkeypatch.setattr(workers, "ProcessPoolExecutor", InThisProcess)
    monkeypatch.setattr(report, "draw", lambda *_: None)
    monkeypatch.setattr(run, "load_reference", kept_reference)
    monkeypatch.setitem(TASKS, "pairs", Pairs)
    empty = tmp_path / "cwd"
    empty.mkdir()
    monkeypatch.chdir(empty)


@pytest.fixture
def cli(here, capsys):
    """cli("--steps", 4) -> (exit code, stdout, lines on stderr without the progress bar)."""

    def ask(*argv):
        code = command_line.main([str(value) for value in argv])
        out, err = capsys.readouterr()
        return code, out, said(err)

    return ask


@pytest.fixture(scope="session")
def made(cache, tmp_path_factory):
    """A finished folder of four runs on `pairs`, four steps each; copy it before touching it."""
    folder = tmp_path_factory.mktemp("made") / "four"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workers, "ProcessPoolExecutor", InThisProcess)
        patch.setitem(TASKS, "pairs", Pairs)
        assert command_line.main(list(map(str, on_pairs(folder)))) == 0
    return folder


@pytest.fixture
def folder(made, tmp_path):
    """A copy of `made`."""
    return Path(shutil.copytree(made, tmp_path / "run"))
