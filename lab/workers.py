"""Jobs side by side in processes of their own: one bar, one stop sign, no process left behind."""

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import torch
from tqdm import tqdm

from toy_tasks import UserError


class Runnable(Protocol):
    """Anything that can be pickled and run. UserErrors it raises are its own; it looks at `stopped()` now and then."""

    def run(self, tick: Callable[[int], None], stopped: Callable[[], bool]) -> None:
        """Do the work; `tick(n)` says that n steps are done."""


def available_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


SHARED: dict = {}  # in a worker process: the stop sign that Ctrl-C raises, and the counter of steps done


def start_worker(stop, steps, threads: int) -> None:
    """Prepare a worker process: its number of threads, and no life without its parent."""
    SHARED.update(stop=stop, steps=steps)
    torch.set_num_threads(threads)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def in_worker(job: Runnable) -> None:
    """One job, whose steps count on the common bar."""

    def tick(steps: int) -> None:
        with SHARED["steps"].get_lock():
            SHARED["steps"].value += steps

    job.run(tick, SHARED["stop"].is_set)


class Outcome(NamedTuple):
    """How it went: users' mistakes, for which the others went on; a fault of ours, for which all stopped; Ctrl-C."""

    mistakes: list[str]
    fault: BaseException | None
    stopped: bool


def run_all(
    jobs: Sequence[Runnable], side_by_side: int, threads: int, total_steps: int, first: Callable[[], object] = int
) -> Outcome:
    """Do all jobs after `first` is done, in processes of so many threads; Ctrl-C lets each job stop where it can go on.

    The numbers do not depend on how many run side by side. Raises KeyboardInterrupt for a Ctrl-C during `first`.
    """
    context = multiprocessing.get_context("spawn")  # the one that works with CUDA, and the same on every system
    stop, steps = context.Event(), context.Value("q", 0)
    with signals_go_to(lambda *_: stop.set()):
        mistakes, fault = _run_all(jobs, side_by_side, threads, total_steps, first, context, stop, steps)
    return Outcome(mistakes, fault, stop.is_set())


def _run_all(jobs, side_by_side, threads, total_steps, first, context, stop, steps):
    mistakes: list[str] = []
    fault = None
    name = f"{len(jobs)} runs, {side_by_side} at a time"
    pace = 0.1 if sys.stderr.isatty() else 10  # seconds between two updates of the bar: a log file wants few
    with (
        tqdm(total=total_steps, unit="step", desc=name, mininterval=pace) as bar,
        ProcessPoolExecutor(side_by_side, context, start_worker, (stop, steps, threads)) as pool,
    ):
        with signals_go_to(signal.SIG_IGN):  # the workers are born deaf: Ctrl-C is the parent's to hear
            for _ in range(side_by_side):
                pool.submit(int)  # the workers import PyTorch while `first` runs here
        with signals_go_to(signal.default_int_handler):  # nothing is lost yet, so Ctrl-C need not wait
            first()
        pending: set[Future] = {pool.submit(in_worker, job) for job in jobs}
        while pending:
            done, pending = wait(pending, timeout=0.2)
            bar.update(steps.value - bar.n)
            for error in [future.exception() for future in done if not future.cancelled() and future.exception()]:
                if isinstance(error, BrokenProcessPool):
                    mistakes.append("a worker process died (out of memory?); go on with --resume and fewer --jobs")
                elif isinstance(error, UserError):
                    mistakes.append(str(error))
                else:
                    fault = error
                    stop.set()
            if stop.is_set():
                pending -= {future for future in pending if future.cancel()}
    return mistakes, fault


@contextmanager
def signals_go_to(handler):
    """Ctrl-C and a polite kill are handled by `handler` inside the block, and as before after it."""
    before = [(number, signal.signal(number, handler)) for number in (signal.SIGINT, signal.SIGTERM)]
    try:
        yield
    finally:
        for number, old in before:
            signal.signal(number, old)
