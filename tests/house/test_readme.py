"""README tells the truth about what can be checked without running it."""

import inspect
import re
from pathlib import Path

from lab.checkpoint import HEAD, LOG
from lab.law import LAW
from lab.settings import parse_method
from minirlvr import CALIBRATIONS, ESTIMATORS, sampled_step
from toy_tasks import TASKS
from toy_tasks.exact import MEASURES

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def section(title):
    return README.split(f"## {title}")[1].split("\n## ")[0]


def numbered(text, prefix=""):
    """The seven numbered sentences of a text, without emphasis."""
    found = re.findall(rf"^ *{prefix}(\d)\. (.*)$", text, re.MULTILINE)
    assert [number for number, _ in found] == list("1234567")
    return [sentence.replace("**", "") for _, sentence in found]


def test_the_seven_sentences_are_the_comments_of_the_step():
    """What README promises is what the code says of itself, word for word."""
    sentences = section("GRPO and its two calibrations").split("```")[0]
    assert numbered(sentences) == numbered(inspect.getsource(sampled_step), prefix="# ")


def test_the_step_is_printed_as_it_is():
    """README's code is the file's."""
    printed = re.findall(r"```python\n(.*?)```", section("GRPO and its two calibrations"), re.DOTALL)
    assert printed == [inspect.getsource(sampled_step)]


def test_every_link_and_picture_exists():
    """Nothing points outside the repository or nowhere."""
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md"):
        targets = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text())
        assert targets, page
        for target in targets:
            assert (ROOT / target).exists(), target


def test_the_glossary_is_the_columns():
    """Every column of metrics.csv is explained, and no other word but the summary's turning_step."""
    words = re.findall(r"`([^`]+)`", "\n".join(re.findall(r"^\| (`[^|]+) \|", section("Glossary"), re.MULTILINE)))
    assert sorted(words) == sorted([*MEASURES, *LAW, "completions", *LOG, "turning_step"])
    assert all(f"`{name}`" in section("Glossary") for name in HEAD)


def test_every_estimator_calibration_and_task_is_in_a_table():
    """A method that README does not name is a method that nobody finds."""
    names = [*ESTIMATORS, *(f"+{name}" for name in CALIBRATIONS)]
    assert [name for name in names if f"| `{name}` |" not in section("Methods")] == []
    assert [name for name in TASKS if f"| `{name}` |" not in README] == []
    assert parse_method("grpo@tilt").regime == "tilt"


def test_the_plan_names_every_room():
    """Who reads on finds each folder that holds code."""
    rooms = {path.parent.name for path in ROOT.glob("*/*.py")} - {".venv"}
    plan = section("Where to read on")
    assert rooms >= {"lab", "toy_tasks", "language_models", "experiments", "benchmarks"}
    assert [room for room in sorted(rooms) if f"[{room}/](" not in plan] == []


def test_ci_runs_the_readmes_test_commands():
    """.ci/run takes two commands out of README, by one pattern: all tests without the extras, then the extras'."""
    pattern = re.search(r"grep -E '([^']+)'", (ROOT / ".ci" / "run").read_text())[1]
    commands = [line for line in README.splitlines() if re.search(pattern, line)]
    assert [line.split(" && ")[-1] for line in commands] == [
        ".venv/bin/python -m pytest",
        ".venv/bin/python -m pytest tests/language_models language_models",
    ]
