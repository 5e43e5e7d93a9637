"""Worlds whose correct answers can be listed. Imports nothing else of this project."""

from toy_tasks.countdown import Countdown
from toy_tasks.scratchpad import Scratchpad
from toy_tasks.sums import Sums
from toy_tasks.task import PAD, STOP, Task

TASKS = {task.name: task for task in (Sums, Countdown, Scratchpad)}

__all__ = ["PAD", "STOP", "TASKS", "Countdown", "Scratchpad", "Sums", "Task"]
