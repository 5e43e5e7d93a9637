"""Worlds whose correct answers can be listed, and what can be summed there. Imports nothing else of this project."""

from toy_tasks.countdown import Countdown
from toy_tasks.pretraining import pretrain
from toy_tasks.scratchpad import Scratchpad
from toy_tasks.sums import Sums
from toy_tasks.task import PAD, STOP, Padded, Task, UserError, check_rewards, left_pad

TASKS = {task.name: task for task in (Sums, Countdown, Scratchpad)}

__all__ = ["PAD", "STOP", "TASKS", "Countdown", "Padded", "Scratchpad", "Sums", "Task", "UserError"]
__all__ += ["check_rewards", "left_pad", "pretrain"]
