"""Training runs whose distance to their own exact target is measured on the way, side by side in the lab's workers."""

import copy
import dataclasses
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from experiments.sharpening.world import BETA_INVERSE, Goal, Recipe, World, make_world
from lab.files import replace_file
from lab.run import Run, train
from lab.settings import Experiment, Settings, Sharpening, parse_method
from lab.workers import available_cores, run_all
from minirlvr import Policy, Sampling, Update
from toy_tasks.measures import pass_at_k_exact

KS = (1, 2, 4, 8, 16)


class Training(NamedTuple):
    """One run."""

    goal: Goal
    seed: int
    learning_rate: float
    steps: int
    measured: tuple[int, ...]  # the steps at which it is measured
    prompts: int  # a step
    recipe: Recipe
    voting: bool = False
    path: Path = Path()  # where its rows go

    def settings(self) -> Settings:
        """The settings of the run."""
        return Settings(
            experiment=Experiment(task="scratchpad", steps=self.steps, evaluate_every=self.steps),
            sampling=Sampling(prompts=self.prompts, fixed_length=self.recipe.fixed),
            update=Update(learning_rate=self.learning_rate),
            sharpening=Sharpening(sharpen_alpha=self.goal.alpha, beta_inverse=BETA_INVERSE),
        )

    def config(self) -> dict:
        """For config.json."""
        return {"settings": dataclasses.asdict(self.settings()), "measured_steps": self.measured}

    def head(self) -> dict:
        """The first columns of its rows."""
        return {"goal": self.goal.name, "learning_rate": self.learning_rate, "seed": self.seed}

    def run(self, tick: Callable[[int], None], stopped: Callable[[], bool]) -> None:
        """Train, then write {"curve": a row a step measured and split, "votes": a row a moment, split and k}."""
        world = make_world(self.recipe)
        run = Run(self.settings(), parse_method(self.goal.regime), self.seed, world.reference, task=world.task)
        curve, peak = [], Peak()

        def measure() -> None:
            if run.step in self.measured:
                rows = world.measure(run.policy, self.goal)
                curve.extend(self.head() | {"step": run.step} | row for row in rows)
                peak.see(rows[0]["accuracy"], run.policy)

        def after_step() -> None:
            measure()
            tick(1)

        measure()
        train(run, after_step, stopped=stopped)
        if stopped():
            return
        moments = {"peak": peak.policy, "last": run.policy} if self.voting else {}
        votes = [row for moment, policy in moments.items() for row in vote_rows(world, moment, policy)]
        found = {"curve": curve, "votes": [self.head() | row for row in votes]}
        replace_file(self.path, json.dumps(found))


class Peak:
    """The policy where the accuracy on trained prompts was highest, so that nothing looks at others."""

    def __init__(self) -> None:
        self.best, self.policy = -1.0, None

    def see(self, accuracy: float, policy: Policy) -> None:
        """Keep a copy of the policy if it is the best so far."""
        if accuracy > self.best:
            self.best, self.policy = accuracy, copy.deepcopy(policy)


def vote_rows(world: World, moment: str, policy: Policy) -> list[dict]:
    """pass@k and maj@k of one policy: a row a k and split."""
    log_probs, mass = world.score(policy), world.accuracy(policy).clamp(max=1)
    rows = []
    for k in KS:
        measured = {"pass@k": torch.from_numpy(pass_at_k_exact(mass.numpy(), k)), "maj@k": world.votes(log_probs, k)}
        rows += [{"moment": moment, "k": k} | row for row in world.rows(**measured)]
    return rows


def train_all(trainings: list[Training]) -> dict[str, list[dict]]:
    """All runs, side by side: their rows, in the order of the runs; how many at a time changes nothing.

    Ends the process where a run cannot go on, and after Ctrl-C.
    """
    with tempfile.TemporaryDirectory() as folder:
        jobs = [one._replace(path=Path(folder) / f"{i}.json") for i, one in enumerate(trainings)]
        outcome = run_all(jobs, min(available_cores(), len(jobs)), 1, sum(one.steps for one in jobs))
        if outcome.fault is not None:
            raise outcome.fault
        if outcome.mistakes or outcome.stopped:
            sys.exit("; ".join(outcome.mistakes) or "stopped: nothing is written")
        parts = [json.loads(one.path.read_text()) for one in jobs]
    return {name: [row for part in parts for row in part[name]] for name in ("curve", "votes")}
