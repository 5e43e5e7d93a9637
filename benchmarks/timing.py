"""What the benchmarks share: a clock, medians with quartiles, time split into parts, the machine, the results' file."""

import argparse
import contextlib
import datetime
import functools
import importlib.metadata
import os
import platform
import shlex
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import numpy as np
import torch

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results"
PACKAGES = ("torch", "transformers", "trl")
# The parts of a step, and minirlvr's functions that each is made of, for GRPO. All else is charged to "rest".
STEP_PARTS = {
    "rollout": ("rollout",),
    "rewards": ("verify", "penalise", "grpo_advantages", "inverse_success_calibration"),
    "memory": ("train_memory",),
    "update": ("update_policy",),
}


def clock(device: str = "cpu") -> float:
    """Seconds; on a GPU after all that was asked of it is done, since its kernels only start when they are called."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


class Spread(NamedTuple):
    """The median of some values, and their quartiles."""

    median: float
    low: float
    high: float


def spread(values: Iterable[float]) -> Spread:
    """Median and quartiles; raises ValueError without values.

    >>> spread([1, 2, 3, 4, 100])
    Spread(median=3.0, low=2.0, high=4.0)
    """
    values = list(values)
    if not values:
        raise ValueError("no values to take a median of")
    low, median, high = np.percentile(values, (25, 50, 75))
    return Spread(float(median), float(low), float(high))


class Parts:
    """Seconds spent in named parts. A part inside another is charged to the inner one alone, so parts add up.

    >>> parts = Parts()
    >>> with parts.measure("outer"), parts.measure("inner"):
    ...     pass
    >>> sorted(parts.seconds)
    ['inner', 'outer']
    """

    def __init__(self, device: str = "cpu"):
        self.device, self.seconds, self.missing = device, {}, []
        self._open: list[str] = []  # parts entered and not left, the innermost last
        self._since = 0.0  # up to here all time is charged to someone

    def _charge(self) -> None:
        now = clock(self.device)
        if self._open:
            self.seconds[self._open[-1]] += now - self._since
        self._since = now

    @contextlib.contextmanager
    def measure(self, part: str) -> Iterator[None]:
        """Charge the time inside the block to `part`."""
        self._charge()
        self.seconds.setdefault(part, 0.0)
        self._open.append(part)
        try:
            yield
        finally:
            self._charge()
            self._open.pop()

    def timed(self, part: str, function):
        """The same function, its time charged to `part`."""

        @functools.wraps(function)
        def call(*args, **kwargs):
            with self.measure(part):
                return function(*args, **kwargs)

        return call


@contextlib.contextmanager
def timed_parts(*watched: tuple[object, dict[str, tuple[str, ...]]], device: str = "cpu") -> Iterator[Parts]:
    """Inside the block, named functions charge their part; all else is "rest".

    `watched` are pairs of an owner of functions (a module, a class, an object) and part -> their names. A name that an
    owner does not have is in `missing` afterwards, and its time in "rest".
    >>> import types
    >>> owner = types.SimpleNamespace(add=lambda a, b: a + b)
    >>> with timed_parts((owner, {"adding": ("add",), "lost": ("no_such_function",)})) as measured:
    ...     owner.add(1, 2)
    3
    >>> sorted(measured.seconds), measured.missing
    (['adding', 'rest'], ['no_such_function'])
    """
    measured = Parts(device)
    names = [(owner, part, name) for owner, parts in watched for part, names in parts.items() for name in names]
    with contextlib.ExitStack() as stack:
        for owner, part, name in names:
            if hasattr(owner, name):
                replaced = measured.timed(part, getattr(owner, name))
                stack.enter_context(mock.patch.object(owner, name, replaced))
            else:
                measured.missing.append(name)
        stack.enter_context(measured.measure("rest"))
        yield measured


def cpu_name() -> str:
    """The processor's name as its maker gives it."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def version(package: str) -> str:
    """The version of an installed package, or "not installed".

    >>> version("no-such-package")
    'not installed'
    """
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def load() -> str:
    """What else the machine was doing: processes that ran or waited, on average over the last minute."""
    return f"{os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else "unknown"


def heading(name: str, device: str = "cpu", argv: list[str] | None = None) -> str:
    """What made a result: the command `name` with its flags, the machine, the versions and the day."""
    flags = sys.argv[1:] if argv is None else argv
    gpu = f", {torch.cuda.get_device_name()}" if device == "cuda" else ""
    versions = ", ".join(f"{package} {version(package)}" for package in PACKAGES)
    return "\n".join(
        (
            shlex.join(["python", "-m", f"benchmarks.{name}", *flags]),
            f"{cpu_name()}, {cores()} cores{gpu}; {platform.system()}, Python {platform.python_version()}, {versions}",
            f"{datetime.date.today()}; load average before: {load()}",
        )
    )


def arguments(description: str, rounds: int) -> argparse.ArgumentParser:
    """The flags that the benchmarks have in common."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--rounds", type=at_least_one, default=rounds, help=f"timed repetitions (default {rounds})")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the table and the picture")
    return parser


def at_least_one(text: str) -> int:
    """A whole number of 1 or more, for argparse; raises ValueError, which argparse turns into a line.

    >>> at_least_one("3")
    3
    """
    if int(text) < 1:
        raise ValueError
    return int(text)


def write_results(folder: Path, name: str, text: str) -> None:
    """Print a text and keep it as folder/name.txt."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.txt").write_text(text.rstrip("\n") + "\n")
    print(text)


def new_picture(*shape: int, size: tuple[float, float]):
    """Matplotlib's figure and axes (shape: rows, columns), drawn without a screen."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt.subplots(*shape, figsize=size, layout="constrained", squeeze=False)


def save_picture(figure, folder: Path, name: str) -> None:
    """Keep a figure as folder/name.png."""
    import matplotlib.pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / f"{name}.png", dpi=110)
    plt.close(figure)
