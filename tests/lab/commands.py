"""Commands of milliseconds, and what they leave: files, rows, one line on stderr."""

import csv
import re

TINY = ["--layers", "1", "--width", "16", "--heads", "2", "--memory-width", "16"]
METHODS = ("grpo", "grpo+iac+dlc")


def on_pairs(out, *more, steps=4, seeds=2, methods=METHODS):
    """Flags of a run of milliseconds."""
    flags = ["--task", "pairs", *TINY, "--steps", steps, "--evaluate-every", 2, "--seeds", seeds]
    return [*flags, "--learning-rate", 0.003, "--methods", *methods, "--out", out, *more]


def said(err: str) -> list[str]:
    """The lines of stderr, progress bars left out."""
    return [
        line for line in re.split(r"[\r\n]+", err) if line.strip() and not re.match(r"\d+ runs?, \d+ at a time", line)
    ]


def rows_of(folder):
    with open(folder / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file))


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def is_one_line(found, *names):
    """Exit code 2 and one line on stderr that holds all of `names`; no traceback, nothing else."""
    code, out, lines = found
    assert code == 2, lines
    assert "Traceback" not in out + "".join(lines)
    assert len(lines) == 1, lines
    assert lines[0].startswith("minirlvr: ")
    for name in names:
        assert str(name) in lines[0]
