"""What the experiments share beside their figures: names on the command line, folders, files, tables of text."""

import csv
import io
import json
import platform
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np
import torch

from lab.files import replace_file
from minirlvr import __version__

ROOT = Path(__file__).parent.parent
RESULTS, RUNS = ROOT / "results", ROOT / "runs"


def chosen_names(module: str, known: Collection[str], default: Sequence[str] = ()) -> list[str]:
    """The names given behind `python -m experiments.MODULE`, or the default ones; ends with a usage line for others."""
    names = sys.argv[1:] or list(default)
    if not names or set(names) - set(known):
        sys.exit(f"usage: python -m experiments.{module} NAME ...   with NAME one of {', '.join(known)}")
    return names


def results_folder(name: str) -> Path:
    """results/NAME, made if it is not there."""
    folder = RESULTS / name
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def versions() -> dict[str, str]:
    """Of all that numbers may depend on."""
    found = {"minirlvr": __version__, "python": platform.python_version()}
    return found | {"torch": torch.__version__, "numpy": np.__version__}


def write_config(folder: Path, config: dict) -> None:
    """folder/config.json."""
    replace_file(folder / "config.json", json.dumps(config, indent=2) + "\n")


def write_csv(path: Path, rows: list[dict], digits: int | None = 6) -> None:
    """Rows with the keys of the first as columns; floats with so many significant digits, or with all of them."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, fieldnames=list(rows[0]))
    writer.writeheader()
    writer.writerows({name: shown(value, digits) for name, value in row.items()} for row in rows)
    replace_file(path, text.getvalue())


def shown(value, digits: int | None):
    """A value as write_csv writes it.

    >>> shown(0.123456789, 6), shown(0.1, None), shown("task", 6), shown(3, 6)
    ('0.123457', 0.1, 'task', 3)
    """
    return f"{value:.{digits}g}" if isinstance(value, float) and digits is not None else value


def write_text(path: Path, text: str) -> None:
    """A text without empty lines around it."""
    replace_file(path, text.strip("\n") + "\n")


def pick(rows: list[dict], **wanted) -> list[dict]:
    """The rows with these values.

    >>> pick([{"k": 1, "x": 2}, {"k": 2, "x": 3}], k=2)
    [{'k': 2, 'x': 3}]
    """
    return [row for row in rows if all(row[name] == value for name, value in wanted.items())]


def text_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as they need, the first one left, the others right.

    >>> print(text_table(("", "accuracy"), [("task", "0.9"), ("sharpen", "0.1")]))
             accuracy
    task          0.9
    sharpen       0.1
    """
    lines = [[str(cell) for cell in row] for row in (head, *rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join([first.ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(others, widths[1:], strict=True))])
        for first, *others in lines
    )
