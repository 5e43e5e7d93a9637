"""Intervals over seeds, their cells in a table of text, and the folder that a part writes."""

import os
import time
from collections.abc import Sequence

from experiments.shared import results_folder, versions, write_config, write_csv, write_text
from toy_tasks.measures import interval


def row_interval(rows: Sequence[dict], measure: str) -> tuple[float, float, float]:
    """Mean and 95 % interval over the rows (one a seed).

    >>> row_interval([{"tv": 0.25}, {"tv": 0.25}], "tv")
    (0.25, 0.25, 0.25)
    """
    return interval([row[measure] for row in rows])


def cell(values: tuple[float, float, float], digits: int = 3) -> str:
    """The mean, and half of the interval where there is one.

    >>> cell((0.5, 0.4, 0.6)), cell((0.5, float("nan"), float("nan")))
    ('0.500 ±0.100', '0.500')
    """
    mean, _, high = values
    return f"{mean:.{digits}f}" + (f" ±{high - mean:.{digits}f}" if high == high else "")


class Folder:
    """results/sharpening_NAME, its files and its clock."""

    def __init__(self, name: str):
        self.name, self.path, self.began = name, results_folder(f"sharpening_{name}"), time.time()

    def csv(self, name: str, rows: list[dict]) -> None:
        """NAME.csv."""
        write_csv(self.path / f"{name}.csv", rows)

    def close(self, text: str, **config) -> None:
        """table.txt and config.json, last."""
        write_text(self.path / "table.txt", text)
        seconds = {"wall_seconds": round(time.time() - self.began), "processor_seconds": round(processor_seconds())}
        command = {"command": f"python -m experiments.sharpening {self.name}"}
        write_config(self.path, command | seconds | config | {"versions": versions()})
        print(text, f"\n{seconds}; everything is in {self.path}/")


def processor_seconds() -> float:
    """Of this process and the workers that have ended."""
    return sum(os.times()[:4])
