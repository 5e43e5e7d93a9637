"""README tells the truth about what can be checked without running it."""

import re
from pathlib import Path

from minirlvr import ESTIMATORS, HEAD, LOG, parse_method
from toy_tasks import TASKS
from toy_tasks.exact import MEASURES

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def section(title):
    return README.split(f"## {title}")[1].split("\n## ")[0]


def test_the_algorithm_is_seven_numbered_sentences():
    """Seven items, each on a line of its own."""
    numbers = re.findall(r"^(\d)\. ", section("GRPO and its two calibrations"), re.MULTILINE)
    assert numbers == list("1234567")


def test_every_link_and_picture_exists():
    """Nothing points outside the repository or nowhere."""
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).exists(), target


def test_the_glossary_is_the_columns():
    """Every column of metrics.csv is explained, and no other word but the summary's turning_step."""
    words = re.findall(r"`([^`]+)`", "\n".join(re.findall(r"^\| (`[^|]+) \|", section("Glossary"), re.MULTILINE)))
    assert sorted(words) == sorted([*MEASURES, "completions", *LOG, "turning_step"])
    assert all(f"`{name}`" in section("Glossary") for name in HEAD)


def test_every_estimator_and_task_is_in_a_table():
    """A method that README does not name is a method that nobody finds."""
    assert all(f"| `{name}` |" in section("Methods") for name in ESTIMATORS)
    assert all(f"| `{name}` |" in README for name in TASKS)
    assert parse_method("grpo@tilt").regime == "tilt"


def test_ci_runs_the_readmes_test_commands():
    """.ci/run takes two commands out of README, by one pattern: all tests without the extras, then the extras'."""
    pattern = re.search(r"grep -E '([^']+)'", (ROOT / ".ci" / "run").read_text())[1]
    commands = [line for line in README.splitlines() if re.search(pattern, line)]
    assert [line.split(" && ")[-1] for line in commands] == [
        ".venv/bin/python -m pytest",
        ".venv/bin/python -m pytest tests/extras huggingface.py text_runs.py",
    ]
