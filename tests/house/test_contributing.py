"""CONTRIBUTING.md's walks, taken literally in a copy of the repository."""

import csv
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text()
ROOMS = ("toy_tasks", "lab", "language_models", "benchmarks", "experiments", "notebooks", "tests")
pytestmark = pytest.mark.slow


def walks():
    """Title of a walk -> what it says."""
    parts = re.split(r"^### ", TEXT, flags=re.MULTILINE)[1:]
    return {part.partition(":")[0]: part.partition("\n")[2].split("\n## ")[0] for part in parts}


def change(path: Path, diff: str):
    """Replace what the - and the blank lines of a diff say by what its + and blank lines say, in the one place."""
    lines = diff.splitlines()
    before = "\n".join(line[1:] for line in lines if line[0] in "- ")
    after = "\n".join(line[1:] for line in lines if line[0] in "+ ")
    text = path.read_text()
    assert text.count(before) == 1, f"{path}: {before!r} stands there {text.count(before)} times"
    path.write_text(text.replace(before, after))


def take(root: Path, walk: str):
    """Do what a walk says: new files as they stand, changes in the file named last before them."""
    named = None
    for name, kind, block in re.findall(r"`([a-z_/]+\.py)`|```(\w+)\n(.*?)```", walk, re.DOTALL):
        named = root / name if name else named
        if kind == "python":
            named.write_text(block)
        elif kind == "diff":
            change(named, block)


def run(root: Path, *arguments):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MINIRLVR_CACHE": str(root / "cache")}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """The repository with all four walks taken."""
    root = tmp_path_factory.mktemp("house") / "copy"
    root.mkdir()
    for room in ROOMS:
        shutil.copytree(ROOT / room, root / room, ignore=shutil.ignore_patterns("__pycache__", "results"))
    for name in ("minirlvr.py", "README.md", "CONTRIBUTING.md", "pyproject.toml"):
        shutil.copy(ROOT / name, root / name)
    found = walks()
    assert list(found) == ["A new task", "A new estimator", "A new calibration", "A new measure"]
    for walk in found.values():
        take(root, walk)
    return root


def test_all_of_it_shows_in_help(copy):
    """Names and dials appear without another line of code."""
    shown = run(copy, "minirlvr.py", "--help").stdout
    for name in ("products", "max_rl", "--max-rl-power", "+cap", "--cap"):
        assert name in shown


def test_all_of_it_runs_at_once(copy):
    """The commands that the text names, in one, and the new column in its rows."""
    methods = ["max_rl+dlc", "grpo+dlc+cap"]
    dials = ["--max-rl-power", "0.5", "--cap", "0.5", "--seeds", "1", "--steps", "2", "--evaluate-every", "1"]
    ended = run(copy, "minirlvr.py", "--task", "products", "--methods", *methods, *dials, "--out", "runs/new")
    assert ended.returncode == 0, ended.stderr
    with open(copy / "runs/new/metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["method"] for row in rows} == set(methods)
    assert all(0 < float(row["top_mode"]) <= float(row["pass@1"]) + 1e-9 for row in rows)


def test_a_dial_out_of_its_range_is_refused(copy):
    """The range that stands beside the default is the one that is checked."""
    ended = run(copy, "minirlvr.py", "--methods", "max_rl", "--max-rl-power", "1.5")
    assert ended.returncode == 2
    assert ended.stderr == "minirlvr: --max-rl-power is 1.5: it must be from 0 to 1\n"


def test_the_rooms_hold_it_against_their_rules(copy):
    """Doctests, and the tests that run over all tasks, estimators and calibrations."""
    plain = ("-m", "pytest", "-o", "addopts=--doctest-modules -v --import-mode=importlib", "-p", "no:cacheprovider")
    named = "products or max_rl or cap_advantages or cap"
    spoken = "tests/language_models/test_language_tasks.py"
    ended = run(copy, *plain, "-m", "not slow", "-k", named, "minirlvr.py", "tests/toy_tasks", "tests/lesson", spoken)
    assert ended.returncode == 0, ended.stdout[-3000:]
    for name in ("minirlvr.max_rl_advantages", "minirlvr.cap_advantages", "max_rl]", "[cap", "products]"):
        assert name in ended.stdout


def test_readme_is_missing_it_and_says_so(copy):
    """The tables are held against the code: each new name is asked for."""
    plain = ("-m", "pytest", "-o", "addopts=-q --import-mode=importlib", "-p", "no:cacheprovider")
    told = run(copy, *plain, "tests/house/test_readme.py").stdout
    for name in ("'max_rl'", "'+cap'", "'top_mode'"):
        assert name in told
