"""Four regimes trained from one reference, beside their exact targets; with the stop, and at a fixed length."""

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from experiments.drawing import GREY, band, canvas, legend_below, save
from experiments.shared import pick, text_table
from experiments.sharpening.tables import Folder, cell, row_interval
from experiments.sharpening.training import KS, Training, train_all, vote_rows
from experiments.sharpening.world import CORE, GOALS, SPLITS, Goal, Recipe, World, make_world

STEPS = 150
# Chosen once, with seeds 1 and 2, for task's held-out accuracy among 1e-4, 2e-4, 3e-4 with 16 or all 37 prompts a step;
# the default (3e-4 with 16) overfits the 37 prompts: .86 to .89 held out. What is reported has other seeds.
LEARNING_RATE, PROMPTS_A_STEP = 2e-4, 37
SEEDS = (3, 4, 5)
MEASURED = (0, 5, 10, 20, 30, 40, 60, 80, 100, 125, 150)


def regimes() -> None:
    """results/sharpening_regimes."""
    compare(Folder("regimes"), GOALS, Recipe(every=2, min_mass=1e-4))


def fixed_length() -> None:
    """results/sharpening_fixed_length: fewer prompts and goals, since nine tokens and no stop make many more texts."""
    folder = Folder("fixed_length")
    text = (
        "Another way to take the length out, exact targets with the stop: l_ref divided by length (mean) or its root\n"
    )
    table = normalisations(make_world(Recipe(every=4, min_mass=1e-4)))
    compare(folder, CORE, Recipe(every=4, min_mass=2e-4, fixed=True), more=text + table)


def compare(folder: Folder, goals: Sequence[Goal], recipe: Recipe, more: str = "") -> None:
    """Train every goal with every seed and write the folder."""
    trainings = [
        Training(goal, seed, LEARNING_RATE, STEPS, MEASURED, PROMPTS_A_STEP, recipe, voting=True)
        for seed in SEEDS
        for goal in goals
    ]
    world = make_world(recipe)
    found = train_all(trainings)
    curve, targets = found["curve"], world.target_rows()
    votes = reference_votes(world) + found["votes"]
    for name, rows in (("curves", curve), ("targets", targets), ("votes", votes)):
        folder.csv(name, rows)
    draw_regimes(folder.path / "regimes.png", goals, curve, targets, recipe.fixed)
    draw_votes(folder.path / "votes.png", goals, votes)
    notes = NOTES.format(min_mass=recipe.min_mass) + FIXED_NOTE * recipe.fixed
    text = "\n\n".join((regimes_table(goals, curve, targets), votes_table(goals, votes), more, notes))
    tree = {"min_mass": recipe.min_mass, "prompts": world.prompts}
    folder.close(text, **trainings[0].config(), seeds=SEEDS, tree=tree)


def reference_votes(world: World) -> list[dict]:
    """The reference's rows of votes.csv."""
    head = {"goal": "reference", "learning_rate": LEARNING_RATE, "seed": ""}
    return [head | row for row in vote_rows(world, "base", world.reference)]


# --- tables ---------------------------------------------------------------------------------------------------------

NOTES = """\
± is half the 95 % interval (Student's t) over seeds. TV and KL are to the regime's exact optimum over the enumerated
completions of the reference: KL(policy || optimum) for temper and tilt; for task (nearest of its optima) and sharpen
-log of the policy's mass on the optimum's completions. The target's row gives a bound on what pruning takes from it.
outside: the policy's mass on completions that the reference gives less than {min_mass:g}, at the end. Length in tokens
with the stop. maj@k votes by the stated total, so a right total after a false step counts there. peak: the measured
step with the highest accuracy on trained prompts."""
FIXED_NOTE = """
Trained without a stop: distances and entropy are those of the whole text of nine tokens, accuracy and length those of
the answer, up to the first stop."""


def normalisations(world: World) -> str:
    """Accuracy and length of the exact targets where alpha's l_ref is summed, or divided by a power of the length."""
    rows = []
    for goal, normalize in itertools.product(CORE[1:], ("sum", "weighted", "mean")):
        summary = world.summary(world.target(goal, normalize))
        values = [row[name] for name in ("accuracy", "length") for row in world.rows(**summary)]
        rows.append((goal.name, normalize, *(f"{value:.3f}" for value in values)))
    head = ("exact target", "l_ref", *(f"{name}, {split}" for name in ("accuracy", "length") for split in SPLITS))
    return text_table(head, rows)


def regimes_table(goals: Sequence[Goal], curve: list[dict], targets: list[dict]) -> str:
    """The reference, and every goal at the last step above its exact target."""
    names = ("accuracy", "length", "entropy", "tv", "kl", "outside")
    rows = []
    for name, split in itertools.product(["reference", *(goal.name for goal in goals)], SPLITS):
        (target,) = pick(targets, goal=name, split=split)
        last = pick(curve, goal=name, split=split, step=STEPS)
        if last:
            rows.append((name, split, *(cell(row_interval(last, measure)) for measure in names)))
        label = "  its target" if last else name
        values = [f"{target[measure]:.3f}" for measure in names[:3]]
        rows.append((label, split, *values, "", "", f"≤ {target['missing']:.1e}"))
    return text_table(("", "split", "accuracy", "length", "entropy", "TV", "KL (nats)", "outside"), rows)


def votes_table(goals: Sequence[Goal], votes: list[dict]) -> str:
    """pass@k and maj@k of the reference, and of every goal at its peak and at the end."""
    rows = []
    cases = [("reference", "base"), *((goal.name, moment) for goal in goals for moment in ("peak", "last"))]
    for (name, moment), split in itertools.product(cases, SPLITS):
        of = pick(votes, goal=name, moment=moment, split=split)
        values = [f"{np.mean([v[m] for v in pick(of, k=k)]):.3f}" for m in ("pass@k", "maj@k") for k in KS]
        rows.append((name, moment, split, *values))
    head = [f"{measure}@{k}" for measure in ("pass", "maj") for k in KS]
    return text_table(("", "moment", "split", *head), rows)


# --- figures --------------------------------------------------------------------------------------------------------


def draw_regimes(path: Path, goals: Sequence[Goal], curve: list[dict], targets: list[dict], fixed: bool) -> None:
    """Accuracy, length and total variation against steps; dotted, each regime's exact target."""
    figure, axes = canvas(3, 2, (13, 13.5), sharex=True, sharey="row")
    what = {"accuracy": ("accuracy (probability)", 0, 1), "length": ("mean answer length (tokens, with stop)", 1, 9)}
    what["tv"] = ("total variation to own exact target", 0, 1)
    for (i, (measure, (label, low, high))), (j, (split, title)) in itertools.product(
        enumerate(what.items()), enumerate(SPLITS.items())
    ):
        axis, of = axes[i, j], pick(targets, split=split)
        for goal in goals:
            rows = pick(curve, goal=goal.name, split=split)
            points = [row_interval(pick(rows, step=step), measure) for step in MEASURED]
            band(axis, MEASURED, points, goal.colour, goal.name, low, high)
            if measure != "tv":
                draw_level(axis, of, goal.name, measure, color=goal.colour, linestyle=":")
        if measure != "tv":
            draw_level(axis, of, "reference", measure, color=GREY, linestyle="--", label="reference")
        axis.set(ylim=(low if i != 1 else 2.5, high + (0.03 if i != 1 else 0)), title=title if i == 0 else None)
        axis.set(ylabel=label if j == 0 else None, xlabel="training step" if i == 2 else None)
    where = "fixed length: the stop is ignored in training" if fixed else "completions end at the stop"
    figure.suptitle(f"Four regimes from one reference ({where})", fontsize=15)
    axes[0, 0].plot([], [], color="black", linestyle=":", label="exact target, in the regime's colour")
    legend_below(figure, axes[0, 0], 4)
    save(figure, path)


def draw_level(axis, targets: list[dict], name: str, measure: str, **style) -> None:
    """A line across the figure where the reference stands, or a goal's exact target; targets: the rows of one split."""
    (level,) = pick(targets, goal=name)
    axis.axhline(level[measure], linewidth=1.3, **style)


def draw_votes(path: Path, goals: Sequence[Goal], votes: list[dict]) -> None:
    """pass@k and maj@k at the end of training, beside the reference."""
    figure, axes = canvas(2, 2, (12, 9), sharex=True, sharey=True)
    for (i, measure), (j, (split, title)) in itertools.product(
        enumerate(("pass@k", "maj@k")), enumerate(SPLITS.items())
    ):
        axis = axes[i, j]
        for goal in goals:
            of = pick(votes, goal=goal.name, moment="last", split=split)
            points = [row_interval(pick(of, k=k), measure) for k in KS]
            band(axis, KS, points, goal.colour, goal.name, 0, 1, marker="o", markersize=4)
        base = [pick(votes, goal="reference", split=split, k=k)[0][measure] for k in KS]
        axis.plot(KS, base, "--", color=GREY, marker="s", markersize=4, label="reference")
        axis.axhline(1, color="black", linewidth=0.6)
        axis.set_xscale("log", base=2)
        axis.set_xticks(KS, KS)
        axis.set(ylim=(0, 1.03), title=title if i == 0 else None)
        axis.set(ylabel=f"{measure} (probability)" if j == 0 else None, xlabel="answers k" if i == 1 else None)
    figure.suptitle(f"Right at least once, and by vote over the stated total, after {STEPS} steps", fontsize=15)
    legend_below(figure, axes[0, 0], 6)
    save(figure, path)
