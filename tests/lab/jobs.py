"""Jobs that are no runs, for the workers: importable, so that a process of its own can take them up."""

import os
import signal
import time
from pathlib import Path
from typing import NamedTuple

from toy_tasks import UserError


class Write(NamedTuple):
    """Writes a file, in steps."""

    path: Path
    steps: int = 3

    def run(self, tick, stopped):
        tick(self.steps)
        self.path.write_text(str(os.getpid()))


class Mistake(NamedTuple):
    """A mistake of the user's."""

    text: str

    def run(self, tick, stopped):
        raise UserError(self.text)


class Fault(NamedTuple):
    """A fault of ours."""

    text: str

    def run(self, tick, stopped):
        raise ZeroDivisionError(self.text)


class Dies(NamedTuple):
    """A process that ends without a word, as one does that the system kills."""

    def run(self, tick, stopped):
        os._exit(7)


class WaitForStop(NamedTuple):
    """Goes on until it is told to stop; a file says that it had begun, another that it ended as it was told."""

    path: Path

    def run(self, tick, stopped):
        self.path.with_suffix(".begun").touch()
        until = time.monotonic() + 60
        while not stopped() and time.monotonic() < until:
            tick(1)
            time.sleep(0.02)
        if stopped():
            self.path.with_suffix(".stopped").touch()


class SignalsParent(NamedTuple):
    """Ctrl-C, or a polite kill, from inside a job that goes on to its end."""

    number: int = signal.SIGINT
    parent: int = os.getpid()

    def run(self, tick, stopped):
        os.kill(self.parent, self.number)
        until = time.monotonic() + 60
        while not stopped() and time.monotonic() < until:
            time.sleep(0.02)
