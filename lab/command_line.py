"""The command line: read the flags, train the runs side by side, write the run folder."""

import os
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch

from lab import report
from lab.checkpoint import read_checkpoint
from lab.flags import parse_settings
from lab.folder import open_folder
from lab.run import Run, ToyRuns, train
from lab.settings import Method, Settings, check
from lab.workers import available_cores, run_all
from toy_tasks import UserError


def open_runs(settings: Settings):
    """The one object that knows the kind of policy: `ToyRuns`, or `TextRuns`, the door to language models.

    Raises UserError where what that needs is not installed.
    """
    if settings.experiment.policy == "toy":
        return ToyRuns(settings)
    try:
        from language_models.run import TextRuns
    except ImportError as error:
        raise UserError(f"--policy hf:... needs {error.name}: pip install -r requirements-hf.txt") from None
    return TextRuns(settings)


class Job(NamedTuple):
    """One method and one seed, for a worker process."""

    settings: Settings
    method: Method
    seed: int
    folder: Path
    device: str

    @property
    def checkpoint(self) -> Path:
        return self.folder / f"checkpoint-{self.method.name}-seed{self.seed}.pt"

    def run(self, tick: Callable[[int], None], stopped: Callable[[], bool]) -> None:
        """From the checkpoint, or from the reference, to the last step or to `stopped()`."""
        with advice():
            run: Run = open_runs(self.settings).start(self.method, self.seed, self.device)
            if self.checkpoint.exists():
                run.load(self.checkpoint)
            tick(run.step)
            train(run, lambda: tick(1), lambda run: run.save(self.checkpoint), stopped)


@contextmanager
def advice():
    """Running out of memory, or of a compiler, becomes a UserError that says what to do."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:  # PyTorch's are RuntimeErrors
        if type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
            reason = "it needs a C++ compiler, or Triton on a GPU"
            raise UserError(f"--compile failed ({reason}): leave it out to train without") from None
        if not isinstance(error, MemoryError | torch.OutOfMemoryError) and "allocate memory" not in str(error):
            raise
        flags = "--prompts, --group-size or --max-new-tokens (of the toy policy --width)"
        raise UserError(
            f"out of memory: turn down {flags}, or raise --micro-batches, which changes no result"
        ) from None


def choose_device(name: str) -> str:
    """auto becomes cuda or cpu; a device that is not there is a UserError."""
    there = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if name == "auto":
        return "cuda" if there["cuda"] else "cpu"
    if not there[name]:
        raise UserError(
            f"--device {name}: PyTorch finds none here; take one of {', '.join(n for n in there if there[n])}"
        )
    return name


def compare(settings: Settings) -> int:
    """Run what the settings ask for and write the folder. Returns the exit code: 0, 2 for a mistake, 130 for Ctrl-C."""
    began = time.time()
    methods, device = check(settings), choose_device(settings.experiment.device)
    runs = open_runs(settings)
    runs.prepare(methods, device)
    folder = open_folder(settings, methods, device, runs.task, runs.extras)
    trained, held_out = len(runs.task.train), len(runs.task.heldout)
    print(f"{runs.task.name}: {trained} prompts to train on, {held_out} held out; writing to {folder}/")
    if runs.description:
        print(runs.description)
    jobs = make_jobs(settings, methods, folder, device)
    side_by_side, threads = share_processor(settings.experiment.jobs, len(jobs), device, runs.shares_processor)
    total = len(jobs) * settings.experiment.steps
    try:
        mistakes, fault, stopped = run_all(jobs, side_by_side, threads, total, runs.make_reference)
    except KeyboardInterrupt:
        return say_stopped(folder)
    mistakes += conclude(folder, sorted(jobs, key=lambda job: (methods.index(job.method), job.seed)), runs.measures)
    print(f"{time.time() - began:.0f} s; everything is in {folder}/")
    for mistake in sorted(set(mistakes)):
        print(f"minirlvr: {mistake}", file=sys.stderr)
    if fault is not None:
        raise fault
    if stopped:
        say_stopped(folder)
    return 2 if mistakes else 130 if stopped else 0


def make_jobs(settings: Settings, methods: list[Method], folder: Path, device: str) -> list[Job]:
    """Seed by seed, so that all methods grow together."""
    seeds = range(settings.experiment.first_seed, settings.experiment.first_seed + settings.experiment.seeds)
    return [Job(settings, method, seed, folder, device) for seed in seeds for method in methods]


def share_processor(asked: int, jobs: int, device: str, shares: bool) -> tuple[int, int]:
    """How many processes side by side, and threads in each; `asked` is --jobs, 0 for a choice of ours."""
    cores = available_cores()
    side_by_side = min(asked or (cores if device == "cpu" and shares else 1), jobs)
    all_threads = torch.get_num_threads()  # as many as there are cores, or as OMP_NUM_THREADS says
    torch.set_num_threads(1)
    return side_by_side, 1 if shares else max(min(all_threads, cores) // side_by_side, 1)


def conclude(folder: Path, jobs: list[Job], measures) -> list[str]:
    """Write the tables and the picture of what was reached; returns what went wrong, for which the rest goes on."""
    rows, mistakes = [], []
    for job in jobs:
        try:
            if job.checkpoint.exists():
                rows += read_checkpoint(job.checkpoint, job.method.name, job.seed, measures)["rows"]
        except UserError as error:  # the others are reported all the same
            mistakes.append(str(error))
    if rows:
        try:
            print(report.write(folder, rows))
        except OSError as error:
            mistakes.append(f"the results in {folder} cannot be written: {error.strerror}")
    return mistakes


def say_stopped(folder: Path) -> int:
    print(f"stopped and saved; go on with: python minirlvr.py --resume {folder}", file=sys.stderr)
    return 130


def main(argv: list[str] | None = None) -> int:
    """The command line. Returns the exit code; a user's mistake is one line and exit code 2."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # an old terminal without the sign ± is no reason to lose a table
    try:
        return compare(parse_settings(argv))
    except UserError as error:
        print(f"minirlvr: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # whoever read our output has gone; the files are written
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
