"""Seeds and learning rates: fall from the peak, spread over seeds, collapse of the length."""

import itertools
from pathlib import Path

import numpy as np

from experiments.drawing import GREY, band, canvas, legend_below, save
from experiments.shared import pick, text_table
from experiments.sharpening.tables import Folder, cell, row_interval
from experiments.sharpening.training import Training, train_all
from experiments.sharpening.world import CORE, SPLITS, Recipe, make_world

RATES = (1e-4, 3e-4, 1e-3, 3e-3)
STEPS, SEEDS = 100, 3
MEASURED = (0, 10, 20, 30, 40, 60, 80, 100)
SHORT = 4.0  # tokens; a mean length below it counts as collapsed: the direct answer has 3, the steps 8
RECIPE = Recipe(every=4, min_mass=3e-4)


def instability() -> None:
    """results/sharpening_instability."""
    folder = Folder("instability")
    trainings = [
        Training(goal, seed, rate, STEPS, MEASURED, prompts=16, recipe=RECIPE)
        for seed, rate, goal in itertools.product(range(SEEDS), RATES, CORE)
    ]
    world = make_world(RECIPE)
    curve = train_all(trainings)["curve"]
    targets, runs = world.target_rows(), [row for training in trainings for row in run_rows(curve, training)]
    folder.csv("curves", curve)
    folder.csv("runs", runs)
    draw(folder.path / "instability.png", curve, runs, targets)
    tree = {"min_mass": RECIPE.min_mass, "prompts": world.prompts}
    text = table(runs, targets) + "\n\n" + NOTES
    folder.close(text, **trainings[0].config(), learning_rates=RATES, seeds=SEEDS, tree=tree)


NOTES = """\
peak is the highest accuracy of the measured steps, step 0 (the reference) included; fall = peak - last. ± is half the
95 % interval over seeds; sd is the standard deviation of the last accuracy over seeds. closest: the smallest total
variation to the regime's exact target along training. short: share of runs that end with a mean length below 4 tokens;
sharpen's own target is there, temper's and tilt's are not."""


def run_rows(curve: list[dict], training: Training) -> list[dict]:
    """One row a run and split: peak, last, fall, distances, length."""
    rows, head = [], training.head()
    for split in SPLITS:
        of = pick(curve, **head, split=split)
        peak, last = max(row["accuracy"] for row in of), of[-1]
        row = head | {"split": split, "peak": peak, "last": last["accuracy"], "fall": peak - last["accuracy"]}
        row |= {"length": last["length"], "tv": last["tv"], "closest": min(row["tv"] for row in of)}
        rows.append(row | {"kl": last["kl"]})
    return rows


def table(runs: list[dict], targets: list[dict]) -> str:
    """One line a goal, split and learning rate."""
    rows = []
    for goal, split, rate in itertools.product(CORE, SPLITS, RATES):
        of = pick(runs, goal=goal.name, split=split, learning_rate=rate)
        (target,) = pick(targets, goal=goal.name, split=split)
        values = [cell(row_interval(of, measure)) for measure in ("peak", "last", "fall")]
        values.append(f"{np.std([row['last'] for row in of], ddof=1):.3f}")
        values += [cell(row_interval(of, "closest")), cell(row_interval(of, "tv")), cell(row_interval(of, "length"), 2)]
        short = np.mean([row["length"] < SHORT for row in of])
        rows.append((goal.name, split, f"{rate:g}", *values, f"{target['length']:.2f}", f"{short:.2f}"))
    head = ("", "split", "rate", "peak", "last", "fall", "sd", "closest TV", "last TV", "length", "target's", "short")
    return text_table(head, rows)


def draw(path: Path, curve: list[dict], runs: list[dict], targets: list[dict]) -> None:
    """Held-out prompts: the fall and the distance over learning rates, then the distance along training at each."""
    figure, axes = canvas(2, 4, (18, 9))
    panels = {"last": "last accuracy (probability)", "fall": "fall from peak to last accuracy"}
    panels |= {"tv": "total variation to own exact target, last", "length": "mean length, last (tokens)"}
    (base,) = pick(targets, goal="reference", split="heldout")
    for axis, (measure, label) in zip(axes[0], panels.items(), strict=True):
        draw_rates(axis, pick(runs, split="heldout"), measure, base)
        axis.set(title=label)
    for axis, rate in zip(axes[1], RATES, strict=True):
        for goal in CORE:
            of = pick(curve, goal=goal.name, split="heldout", learning_rate=rate)
            points = [row_interval(pick(of, step=step), "tv") for step in MEASURED]
            band(axis, MEASURED, points, goal.colour, goal.name, 0, 1)
        axis.set(ylim=(0, 1.03), xlabel="training step", title=f"learning rate {rate:g}")
    axes[1, 0].set(ylabel="total variation to own exact target")
    figure.suptitle(f"Held-out prompts, mean and 95 % interval over {SEEDS} seeds", fontsize=15)
    legend_below(figure, axes[0, 3], 6)
    save(figure, path)


def draw_rates(axis, runs: list[dict], measure: str, base: dict) -> None:
    """One measure at the end of training over learning rates, beside the reference's where it has one."""
    least, most = (2.5, 9) if measure == "length" else (0, 1)
    for goal in CORE:
        of = pick(runs, goal=goal.name)
        points = [row_interval(pick(of, learning_rate=rate), measure) for rate in RATES]
        band(axis, RATES, points, goal.colour, goal.name, 0, most, marker="o", markersize=5)
    if measure in ("last", "length"):
        level = base["accuracy" if measure == "last" else "length"]
        axis.axhline(level, color=GREY, linestyle="--", linewidth=1.3, label="reference")
    if measure == "length":
        axis.axhline(SHORT, color="black", linestyle=":", label="counts as collapsed below")
    axis.set(xscale="log", xlabel="learning rate", ylim=(least, most * 1.03))
