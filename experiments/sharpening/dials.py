"""Where sharpening helps: the sign of one covariance of the reference, over many references."""

import itertools
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from experiments.drawing import BLUE, GREY, RED, YELLOW, canvas, save
from experiments.shared import pick, text_table
from experiments.sharpening.tables import Folder, cell, row_interval
from experiments.sharpening.training import Training, train_all
from experiments.sharpening.world import BETA_INVERSE, Goal, Recipe, by_prompt, make_world
from toy_tasks import Scratchpad, sharpening
from toy_tasks.measures import interval

GRID = {
    "direct": (0.1, 0.3, 0.45, 0.6, 0.75, 0.9),
    "forget": (0.0, 0.5, 0.75, 0.9, 0.95, 1.0),
    "step_error": (0.02, 0.05, 0.15, 0.3, 0.5),
    "order_skew": (0.3, 0.7, 1.0),
}
ALPHAS = (1.25, 2.0)
GOALS = (
    Goal("sharpen", "sharpen", 1.0),
    *(Goal(f"{regime} α={alpha:g}", regime, alpha) for alpha in ALPHAS for regime in ("temper", "tilt")),
)
# One reference on each side of zero is pretrained and trained; the default is one, in the other the direct answer and
# the likely one are right.
TRAINED = {"negative": {}, "positive": {"direct": 0.6, "forget": 0.25}}
STEPS, SEEDS, LEARNING_RATE = 100, 3, 1e-4


def dials() -> None:
    """results/sharpening_dials."""
    folder = Folder("dials")
    rows = []
    for values in itertools.product(*GRID.values()):
        setting = dict(zip(GRID, values, strict=True))
        rows.append(setting | covariance_row(*analytic_outcomes(Scratchpad(**setting))))
    points = [point for name in TRAINED for point in trained_points(name)]
    folder.csv("dials", rows)
    folder.csv("trained", points)
    draw(folder.path / "dials.png", rows, points)
    trained = {"dials": TRAINED, "steps": STEPS, "seeds": SEEDS, "learning_rate": LEARNING_RATE}
    folder.close(table(rows, points), grid=GRID, alphas=ALPHAS, beta_inverse=BETA_INVERSE, trained=trained)


def analytic_outcomes(task: Scratchpad) -> tuple[Tensor, Tensor, Tensor]:
    """log-probabilities, rewards and owner (O,) of all that `sample` can give, every prompt; nothing is left out.

    The reference is the sampler itself.
    """
    listed = [
        (q, math.log(p), task.verify(prompt, text))
        for q, prompt in enumerate(task.prompts)
        for text, p in task.sampling_probs(prompt).items()
    ]
    owner, log_probs, rewards = (torch.tensor(column) for column in zip(*listed, strict=True))
    return log_probs.double(), rewards, owner


def covariance_row(log_probs: Tensor, rewards: Tensor, owner: Tensor) -> dict:
    """Cov(r, log pi_ref) of one reference, its accuracy, and that of each exact target; log_probs, rewards (O,)."""
    covariance = sharpening.covariance_identity(log_probs, rewards, owner)[1].mean().item()
    row = {"covariance": covariance, "reference": by_prompt(log_probs.exp() * rewards, owner).mean().item()}
    for goal in GOALS:
        target = sharpening.target_log_probs(goal.regime, log_probs, rewards, owner, goal.alpha, BETA_INVERSE)
        row[goal.name] = by_prompt(target.exp() * rewards, owner).mean().item()
    return row | {"task": 1.0}


def trained_points(name: str) -> list[dict]:
    """temper with alpha 2, trained from a reference with these dials: one row a seed, held-out prompts."""
    goal, recipe = Goal("temper α=2", "temper", 2.0), Recipe(4, 3e-4, dials=tuple(TRAINED[name].items()))
    world = make_world(recipe)
    measured = (0, STEPS)
    curve = train_all(
        [Training(goal, seed, LEARNING_RATE, STEPS, measured, prompts=37, recipe=recipe) for seed in range(SEEDS)]
    )["curve"]
    heldout = torch.tensor([prompt in world.task.heldout for prompt in world.prompts])
    both = sharpening.covariance_identity(world.reference_log_probs, world.rewards, world.owner)[1]
    target = world.splits(world.summary(world.target(goal))["accuracy"])["heldout"]
    points = []
    for seed in range(SEEDS):
        first, last = pick(curve, seed=seed, split="heldout")
        point = {"dials": name, "seed": seed, "covariance": both[heldout].mean().item()}
        point |= {"reference": first["accuracy"], "trained": last["accuracy"], "target": target, "tv": last["tv"]}
        points.append(point)
    return points


# --- tables ---------------------------------------------------------------------------------------------------------


def agreement(rows: list[dict], name: str) -> tuple[int, int]:
    """How many references, of those it moves at all, it moves the way the covariance says."""
    moved = [row for row in rows if abs(row[name] - row["reference"]) > 1e-9 and abs(row["covariance"]) > 1e-9]
    return sum((row[name] > row["reference"]) == (row["covariance"] > 0) for row in moved), len(moved)


def table(rows: list[dict], points: list[dict]) -> str:
    """What each exact target gains on either side of zero; then the two references that were trained."""
    lines = []
    for name in ("temper α=1.25", "temper α=2", "sharpen", "tilt α=1.25", "tilt α=2"):
        agree, moved = agreement(rows, name)
        gains = {sign: [r[name] - r["reference"] for r in rows if (r["covariance"] > 0) == sign] for sign in (1, 0)}
        values = [f"{np.mean(gain):+.3f} [{min(gain):+.3f}, {max(gain):+.3f}]" for gain in gains.values()]
        lines.append((name, *values, f"{agree} of {moved} ({agree / moved:.3f})"))
    head = ("exact target", "gain where Cov > 0 [range]", "gain where Cov < 0 [range]", "sign as Cov says")
    parts = [f"{len(rows)} references, {sum(r['covariance'] > 0 for r in rows)} of them with Cov(r, log π_ref) > 0"]
    return "\n\n".join([*parts, text_table(head, lines), trained_table(points)])


def trained_table(points: list[dict]) -> str:
    """The two references that were trained."""
    lines = []
    for name in TRAINED:
        of = pick(points, dials=name)
        values = [f"{of[0][key]:.3f}" for key in ("covariance", "reference", "target")]
        lines.append((name, *values, cell(row_interval(of, "trained")), cell(row_interval(of, "tv"))))
    head = ("trained, temper α=2", "Cov (held-out)", "reference", "exact target", "trained", "TV to target")
    return text_table(head, lines)


# --- the figure -----------------------------------------------------------------------------------------------------


def draw(path: Path, rows: list[dict], points: list[dict]) -> None:
    """Gain in accuracy of each exact target against the covariance, one dot a reference."""
    figure, axes = canvas(1, 3, (18, 6.4), sharex=True)
    panels = {"temper α=1.25": "sharpened a little: temper, α = 1.25", "temper α=2": "temper, α = 2"}
    panels["sharpen"] = "sharpened to the end: the most likely answer"
    for axis, (name, title) in zip(axes[0], panels.items(), strict=True):
        draw_gains(axis, rows, name)
        if name == "temper α=2":
            draw_points(axis, points)
        axis.axhline(0, color=GREY, linestyle="--", linewidth=1.2)
        axis.axvline(0, color=GREY, linestyle="--", linewidth=1.2)
        axis.set(title=title, xlabel="Cov(r, log π_ref) under the reference (nats)")
        axis.legend(frameon=False, loc="upper left" if name != "sharpen" else "lower right")
    axes[0, 0].set(ylabel="accuracy of the exact target - the reference's", ylim=(-0.12, 0.25))
    axes[0, 1].set(ylim=(-0.35, 0.75))
    axes[0, 2].set(ylim=(-0.8, 0.9))
    figure.suptitle(f"Does sharpening help? {len(rows)} scratchpad references, exact targets, no training", fontsize=15)
    save(figure, path)


def draw_gains(axis, rows: Sequence[dict], name: str) -> None:
    """One exact target: every reference, blue where the sign of the covariance is that of the gain."""
    x = np.array([row["covariance"] for row in rows])
    gain = np.array([row[name] - row["reference"] for row in rows])
    agrees = (gain > 0) == (x > 0)
    for at, colour, label in ((agrees, BLUE, "as the sign says"), (~agrees, RED, "against it")):
        axis.scatter(x[at], gain[at], s=16, alpha=0.55, color=colour, label=f"{label}: {at.sum()}", linewidths=0)
    if name != "sharpen":
        line = np.array([x.min(), x.max()])
        slope = float(name.split("=")[1]) - 1
        axis.plot(line, slope * line, color="black", linewidth=1, label="first order: (α - 1) Cov")


def draw_points(axis, points: list[dict]) -> None:
    """The two references that were trained: mean and 95 % interval over seeds."""
    for i, name in enumerate(TRAINED):
        of = pick(points, dials=name)
        mean, low, high = interval([row["trained"] - row["reference"] for row in of])
        label = f"really trained (held-out, {SEEDS} seeds)" if i == 0 else None
        axis.errorbar(of[0]["covariance"], mean, [[mean - low], [high - mean]], fmt="D", color="black", capsize=4,
                      markersize=8, markerfacecolor=YELLOW, zorder=5, label=label)  # fmt: skip
