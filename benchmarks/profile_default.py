"""Where each second of the default command `python minirlvr.py` goes.

    python -m benchmarks.profile_default

First the whole command from outside, with an empty cache and again with a full one; then its pieces: the start of a
process, the reference, the report, and one run of each method inside this process, its functions timed. Writes
profile_default.txt.
"""

import argparse
import csv
import dataclasses
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch

import lab.run
import minirlvr
from benchmarks import timing
from lab import report
from lab.command_line import Job
from lab.reference import load_reference
from lab.settings import Experiment, Settings, parse_method
from toy_tasks import TASKS

# What a worker process does: whose functions, and the part that each is charged to.
WATCHED = (
    (lab.run, {"set-up": ("load_reference", "Run")}),
    (lab.run.Run, {"evaluation": ("evaluate",), "checkpoint": ("save",)}),
    (minirlvr, timing.STEP_PARTS),
)
PARTS = ("set-up", *timing.STEP_PARTS, "evaluation", "checkpoint", "rest")


class Profile(NamedTuple):
    """One run of one method: seconds of its parts, and the functions that were not found."""

    seconds: dict[str, float]
    missing: list[str]


def profile_run(settings: Settings, method: str, device: str) -> Profile:
    """Do in this process what a worker process does for one method and seed, with the clock at its functions."""
    with tempfile.TemporaryDirectory() as folder:
        job = Job(settings, parse_method(method), 0, Path(folder), device)
        with timing.timed_parts(*WATCHED, device=device) as measured:
            job.run(lambda steps: None, lambda: False)
    return Profile(measured.seconds, measured.missing)


def seconds_of(*command: str, **environment: str) -> float:
    """Wall time of a command, run quietly; raises CalledProcessError, with what it printed, if it fails."""
    began = time.perf_counter()
    done = subprocess.run(
        command, cwd=timing.ROOT, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    seconds = time.perf_counter() - began
    if done.returncode:
        print(done.stderr, file=sys.stderr)
    done.check_returncode()
    return seconds


def nothing() -> None:
    """What a process does when only its start is timed."""


def worker_start() -> None:
    """Start a fresh worker process, with our imports, and let it do nothing."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        pool.submit(nothing).result()


def seconds_in(function: Callable, *arguments) -> float:
    """Wall time of a call."""
    began = time.perf_counter()
    function(*arguments)
    return time.perf_counter() - began


def rewrite_report(folder: Path) -> None:
    """Table and picture of a finished run once more, Matplotlib's import included where it is the first."""
    with open(folder / "metrics.csv", newline="") as file:
        report.write(folder, list(csv.DictReader(file)))


def once(settings: Settings, finished: Path) -> dict[str, float]:
    """What happens once in a command: name -> seconds. `finished` is the folder of a run; the cache must be empty."""
    reference = load_reference, TASKS[settings.experiment.task](), settings.shape
    bare = seconds_of(sys.executable, "-c", "")
    imported = seconds_of(sys.executable, "-c", "import lab.command_line, tyro")
    return {
        "Python itself": bare,
        "imports (PyTorch first of all)": imported - bare,
        "reference, pretrained": seconds_in(*reference),
        "reference, from the cache": seconds_in(*reference),
        "start of a worker process": seconds_in(worker_start),
        "report and picture": seconds_in(rewrite_report, finished),
    }


def profile_all(settings: Settings, methods: list[str], device: str) -> dict[str, Profile]:
    """The profile of a run of each method, after one of two steps that warms up."""
    profile_run(dataclasses.replace(settings, experiment=short(settings)), methods[0], device)
    return {method: profile_run(settings, method, device) for method in methods}


def short(settings: Settings) -> Experiment:
    """Two steps, to warm up."""
    return dataclasses.replace(settings.experiment, steps=2, evaluate_every=1)


def run_table(profiles: dict[str, Profile], steps: int) -> str:
    """Seconds of the parts of one run, a column a method; then evaluation's share."""
    width = max(14, *(len(name) + 2 for name in profiles))
    totals = {name: sum(profile.seconds.values()) for name, profile in profiles.items()}
    lines = [f"one run ({steps} steps, 1 thread), in seconds"]
    lines.append(f"{'':14}" + "".join(f"{name:>{width}}{'%':>6}" for name in profiles))
    for part in PARTS:
        cells = ((profile.seconds.get(part, 0.0), totals[name]) for name, profile in profiles.items())
        lines.append(f"{part:14}" + "".join(f"{s:{width}.3f}{100 * s / total:6.1f}" for s, total in cells))
    lines.append(f"{'all':14}" + "".join(f"{total:{width}.3f}{100:6.1f}" for total in totals.values()))
    evaluation = sum(profile.seconds.get("evaluation", 0.0) for profile in profiles.values())
    lines.append("")
    lines.append(
        f"evaluation's share of the runs' time: {100 * evaluation / sum(totals.values()):.1f} % (at most 5 wanted)"
    )
    missing = sorted({name for profile in profiles.values() for name in profile.missing})
    return "\n".join(lines + [f"not found, so part of rest: {', '.join(missing)}"] * bool(missing))


def whole_table(
    fixed: dict[str, float], profiles: dict[str, Profile], seeds: int, uncached: float, cached: float
) -> str:
    """The command from outside, beside what its parts add up to."""
    count = seeds * len(profiles)
    side_by_side = min(timing.cores(), count)
    runs = seeds * sum(sum(profile.seconds.values()) for profile in profiles.values()) / side_by_side
    accounted = sum(fixed.values()) - fixed["reference, pretrained"] + runs
    rows = {**fixed, f"{count} runs as above, {side_by_side} side by side": runs}
    rows |= {"sum of these, the reference cached": accounted, "measured, the reference cached": cached}
    rows |= {"measured less the sum: not accounted for": cached - accounted, "measured, nothing cached": uncached}
    lines = ["the whole command, in seconds", *(f"{name:44}{seconds:9.2f}" for name, seconds in rows.items())]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Measure, print, write. Returns the exit code."""
    defaults = Settings()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=timing.at_least_one, default=defaults.experiment.steps)
    parser.add_argument("--seeds", type=timing.at_least_one, default=defaults.experiment.seeds)
    parser.add_argument("--methods", nargs="+", default=list(defaults.experiment.methods))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--out", type=Path, default=timing.RESULTS, help="folder for the table")
    options = parser.parse_args(argv)
    heading = timing.heading("profile_default", options.device, argv)
    torch.set_num_threads(1)
    experiment = dataclasses.replace(
        defaults.experiment, steps=options.steps, seeds=options.seeds, methods=tuple(options.methods)
    )
    settings = dataclasses.replace(defaults, experiment=experiment)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = [sys.executable, "minirlvr.py", "--steps", str(options.steps), "--seeds", str(options.seeds)]
        command += ["--device", options.device, "--methods", *options.methods]
        uncached, cached = (
            seconds_of(*command, "--out", str(folder / out), MINIRLVR_CACHE=str(folder / "fresh"))
            for out in ("first", "second")
        )
        with mock.patch.dict(os.environ, MINIRLVR_CACHE=str(folder / "cache")):
            fixed = once(settings, folder / "second")
            profiles = profile_all(settings, options.methods, options.device)
    text = [heading, run_table(profiles, options.steps)]
    text.append(whole_table(fixed, profiles, options.seeds, uncached, cached))
    timing.write_results(options.out, "profile_default", "\n\n".join(text))
    return 0


if __name__ == "__main__":
    sys.exit(main())
