"""All completions of a reference that are likely enough to count, and what any policy makes of them, exactly.

Axes: Q prompts, O outcomes (completions) of all prompts together.
"""

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from experiments.drawing import BLUE, GREEN, ORANGE, PINK, RED
from lab.reference import load_reference
from lab.settings import Shape
from minirlvr import Policy
from toy_tasks import Scratchpad, sharpening
from toy_tasks.exact import Listing, Tree, device_of, followed_by
from toy_tasks.measures import maj_at_k

BETA_INVERSE = 10.0
SPLITS = {"train": "trained prompts", "heldout": "held-out prompts"}


class Goal(NamedTuple):
    """A regime with its alpha, and how it is drawn."""

    name: str
    regime: str
    alpha: float
    colour: str = ""


GOALS = (
    Goal("task", "task", 1.0, GREEN),
    Goal("tilt α=2", "tilt", 2.0, BLUE),
    Goal("temper α=2", "temper", 2.0, ORANGE),
    Goal("temper α=4", "temper", 4.0, RED),
    Goal("sharpen", "sharpen", 2.0, PINK),
)
CORE = tuple(goal for goal in GOALS if goal.name != "temper α=4")


def by_prompt(values: Tensor, owner: Tensor) -> Tensor:
    """Sum of one value an outcome over each prompt's outcomes: values and owner (O,) -> (Q,).

    >>> by_prompt(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([0, 1, 1]))
    tensor([1., 6.])
    """
    return values.new_zeros(int(owner.max()) + 1).index_add(0, owner, values)


class FixedTree(Tree):
    """The tree in which the stop is a token like others: its cut outcomes are all texts of `max_new_tokens` tokens."""

    def _children(self, policy, level: Sequence[tuple], min_mass: float) -> list[tuple]:
        prefixes = torch.tensor([node[1:] for node, _ in level], dtype=torch.long).view(len(level), -1)
        texts = followed_by(self.prompt_texts.pick([node[0] for node, _ in level]), prefixes)
        last = policy(texts.to(device_of(policy)))[:, -1].float().log_softmax(-1).cpu().double()
        log_mass = last + torch.tensor([mass for _, mass in level], dtype=torch.float64)[:, None]  # (rows, V)
        found = (log_mass >= math.log(min_mass)).nonzero().tolist()
        return [((*level[row][0], token), log_mass[row, token].item()) for row, token in found]


class World:
    """The completions (O,) that a reference gives at least `min_mass`, and what any policy makes of them.

    With `fixed`, completions go on after the stop to the longest length, as `--fixed-length` trains them; what is right
    and how long the answer is are still decided at the first stop.
    """

    def __init__(self, task: Scratchpad, reference: Policy, prompts: Sequence[str], min_mass: float, fixed=False):
        self.task, self.reference, self.prompts, self.min_mass = task, reference, list(prompts), min_mass
        self.tree = (FixedTree if fixed else Tree)(reference, task, prompts, min_mass)
        self.keep = ~self.tree.ended if fixed else torch.ones_like(self.tree.ended)  # (all outcomes,)
        self.owner = self.tree.owner[self.keep]  # (O,)
        texts = [text for text, keep in zip(self.tree.texts, self.keep.tolist(), strict=True) if keep]
        owners, most = self.owner.tolist(), task.max_new_tokens
        self.lengths = torch.tensor([min(len(text) + 1, most) for text in texts])  # of the answer, stop included
        self.rewards = torch.tensor(
            [len(text) < most and task.verify(self.prompts[q], text) for q, text in zip(owners, texts, strict=True)]
        )
        self.list_totals([(q, task.mode_class(text)) for q, text in zip(owners, texts, strict=True)])
        self.listing = Listing(task, self.prompts)
        self.reference_log_probs = self.score(reference)  # (O,)
        self.left_out = (1 - by_prompt(self.reference_log_probs.exp(), self.owner)).clamp(min=0)  # (Q,)

    def list_totals(self, said: Sequence[tuple[int, str]]) -> None:
        """The outcomes by the total that they state: prompt index and total of each."""
        totals = {name: i for i, name in enumerate(dict.fromkeys(said))}
        self.total_of = torch.tensor([totals[name] for name in said])  # (O,)
        self.total_owner = torch.tensor([q for q, _ in totals])  # (totals,)
        self.total_right = torch.tensor([total == self.task.modes(self.prompts[q])[0] for q, total in totals])

    @torch.no_grad()
    def score(self, policy: Policy) -> Tensor:
        """log-probability of every outcome: (O,)."""
        return self.tree.outcome_log_probs(policy)[self.keep]

    @torch.no_grad()
    def accuracy(self, policy: Policy) -> Tensor:
        """Exact: the summed probability of the listed modes, (Q,), of all completions and not of the outcomes alone."""
        return self.listing.log_probs(policy).exp().sum(-1)

    def target(self, goal: Goal, normalize: str = "sum") -> Tensor:
        """log of the goal's optimum over the outcomes: (O,)."""
        return sharpening.target_log_probs(
            goal.regime, self.reference_log_probs, self.rewards, self.owner, goal.alpha, BETA_INVERSE, self.lengths,
            normalize,
        )  # fmt: skip

    def missing(self, goal: Goal) -> float:
        """A bound on what pruning takes from the goal's optimum, mean over prompts."""
        outcomes = self.reference_log_probs, self.rewards, self.owner, self.left_out
        size = self.min_mass, self.task.vocab_size, self.task.max_new_tokens
        return sharpening.missing_share(goal.regime, *outcomes, *size, goal.alpha, BETA_INVERSE).mean().item()

    def summary(self, log_probs: Tensor) -> dict[str, Tensor]:
        """Accuracy, length and entropy of any distribution over the outcomes (O,): name -> (Q,)."""
        return sharpening.target_summary(log_probs, self.rewards, self.lengths, self.owner)

    def measure(self, policy: Policy, goal: Goal) -> list[dict]:
        """One row a split: accuracy, length, entropy, distance to the goal's optimum, and the mass `outside`."""
        log_probs, accuracy = self.score(policy), self.accuracy(policy)
        summary = self.summary(log_probs)
        outside = (1 - by_prompt(log_probs.exp(), self.owner)).clamp(min=0)
        values = {"accuracy": accuracy, "length": summary["length"], "entropy": summary["entropy"]}
        return self.rows(**values, **self.distance(log_probs, accuracy, goal), outside=outside)

    def distance(self, log_probs: Tensor, accuracy: Tensor, goal: Goal) -> dict[str, Tensor]:
        """KL and total variation to the goal's optimum, (Q,) each.

        temper and tilt have one optimum with a tail everywhere: KL(policy || optimum). task has many and sharpen's has
        no tail, so there it is the KL of the nearest optimum from the policy, -log of the policy's mass on what is
        best; the total variation is to the same.
        """
        target = self.target(goal)
        if goal.regime in ("temper", "tilt"):
            kl = sharpening.kl(log_probs, target, self.owner)
            return {"kl": kl, "tv": sharpening.total_variation(log_probs, target, self.owner)}
        best = log_probs.exp() * (target > -math.inf)
        mass = accuracy if goal.regime == "task" else by_prompt(best, self.owner)
        return {"kl": -mass.log(), "tv": 1 - mass}

    def votes(self, log_probs: Tensor, k: int, smallest: float = 0.01) -> Tensor:
        """maj@k (Q,): the chance that the total stated most often in k answers is right, ties broken evenly.

        Wrong totals under `smallest` and what is outside the tree count as one wrong answer: a lower bound, by little.
        """
        mass = torch.zeros(len(self.total_owner)).double().index_add(0, self.total_of, log_probs.exp())
        values = []
        for q in range(len(self.prompts)):
            shares, right = mass[self.total_owner == q], self.total_right[self.total_owner == q]
            kept = right | (shares >= smallest)
            weights = [*shares[kept].tolist(), max(1 - shares[kept].sum().item(), 0.0)]
            weights = np.array(weights) / sum(weights)
            values.append(maj_at_k(weights, np.array([*right[kept].tolist(), False]), k))
        return torch.tensor(values)

    def splits(self, values: Tensor) -> dict[str, float]:
        """Means of (Q,) over the trained and over the held-out prompts."""
        trained = torch.tensor([prompt in self.task.train for prompt in self.prompts])
        return {"train": values[trained].mean().item(), "heldout": values[~trained].mean().item()}

    def rows(self, **values: Tensor) -> list[dict]:
        """One row a split: the means of each (Q,)."""
        means = {name: self.splits(value) for name, value in values.items()}
        return [{"split": split} | {name: mean[split] for name, mean in means.items()} for split in SPLITS]

    def target_rows(self) -> list[dict]:
        """The reference and every exact target: accuracy, length, entropy, and what pruning may have taken."""
        base = self.summary(self.reference_log_probs) | {"accuracy": self.accuracy(self.reference)}
        rows = [{"goal": "reference"} | row | {"missing": self.left_out.mean().item()} for row in self.rows(**base)]
        for goal in GOALS:
            missing = {"missing": self.missing(goal)}
            rows += [{"goal": goal.name} | row | missing for row in self.rows(**self.summary(self.target(goal)))]
        return rows


class Recipe(NamedTuple):
    """What a world is made of."""

    every: int = 2  # takes every second (or so) trained prompt, and twice as many of the held-out ones
    min_mass: float = 1e-4
    fixed: bool = False
    dials: tuple[tuple[str, float], ...] = ()  # of the scratchpad task, where they are not the default


@functools.cache
def make_world(recipe: Recipe) -> World:
    """The world of a recipe, made once in each process."""
    task = Scratchpad(**dict(recipe.dials))
    prompts = task.train[:: recipe.every] + task.heldout[:: max(recipe.every // 2, 1)]
    return World(task, load_reference(task, Shape()), prompts, recipe.min_mass, recipe.fixed)
