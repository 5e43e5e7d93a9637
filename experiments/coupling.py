"""Semantic coupling, measured: `python -m experiments.coupling` makes results/coupling, `... countdown` its repeat.

1. One SGD step on a real GRPO group: what the kernel predicts for every listed mode, and what happens, over step sizes.
2. Real training (AdamW, clipping, sampling) on one query alone, and on a random half of them: do the queries that were
   not trained lose more modes the more their gradients are aligned with those that were?

Writes config.json, changes.csv, sweep.csv, similarity.csv, losses.csv, relations.csv and coupling.png.
"""

import dataclasses
import itertools
import json
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from experiments.drawing import BLUE, RED, band, canvas, save
from experiments.shared import chosen_names, results_folder, versions, write_config, write_csv
from lab.reference import load_reference
from lab.run import Run, train
from lab.settings import Experiment, Settings, Shape, parse_method
from minirlvr import Policy, Rollout, grpo_advantages, rollout, update_policy, verify
from toy_tasks import TASKS, Task
from toy_tasks.coupling import (
    Completions,
    cosines,
    coupling_kernel,
    group_coefficients,
    measured_change,
    predicted_change,
    query_selectivity,
    query_similarity,
    r_squared,
    resplit,
)
from toy_tasks.exact import Listing
from toy_tasks.measures import effective_modes, retained_mass

GROUP_SIZE = 8
STEP_SIZES = [10 ** (power / 4) for power in range(-20, 5)]  # 1e-5 to 10
SMALL = STEP_SIZES[8]  # 1e-3, the step that is drawn
DRAWS = 2000  # bootstrap
# The measure of selectivity was chosen on runs with seed 0 on `sums`; everything reported is from other seeds.
FIRST_SEED = 1


class Plan(NamedTuple):
    """How much is trained, so that all of it takes less than three minutes on one core."""

    seeds: int  # of the runs on one query
    steps: int
    halves: int  # random halves, each with a seed of its own
    half_steps: int


PLANS = {"sums": Plan(seeds=3, steps=60, halves=14, half_steps=100), "countdown": Plan(1, 60, 8, 100)}
OUTCOMES = {
    "modes lost": "share of effective modes lost",
    "mass lost": "share of the reference's correct mass lost (1 - retained mass)",
    "pass@1 gain": "pass@1 gained",
}
COMPARISONS = {False: "across queries (Spearman)", True: "within queries (Pearson)"}
PREDICTORS = {"similarity": "mean cosine with the trained modes", "selectivity": "mode-by-mode cosine (RMS, centred)"}


# --- one step -------------------------------------------------------------------------------------------------------


def one_step(task: Task, reference: Policy, listing: Listing) -> dict:
    """A GRPO batch of the trained prompts under the reference, and the change of every listed mode: see the keys."""
    prompts = list(task.train)
    generator = torch.Generator().manual_seed(FIRST_SEED)
    batch = rollout(reference, task.encode_prompts(prompts), GROUP_SIZE, task.max_new_tokens, generator)
    advantages = grpo_advantages(verify(task, prompts, batch))
    coefficients = group_coefficients(advantages, batch.mask)
    stepped = Completions.of(batch.padded, batch.completions, batch.mask)
    kernel = coupling_kernel(reference, listing, stepped)
    measured = measured_change(reference, listing, stepped, coefficients, STEP_SIZES)  # (step sizes, R)
    predicted = torch.stack([predicted_change(kernel, coefficients, size) for size in STEP_SIZES])
    owners = [listed_prompts(task)[q] for q in listing.slots[:, 0]]
    trained = torch.tensor([prompt in task.train for prompt in owners])  # (R,)
    return {
        "predicted": predicted,  # (step sizes, R)
        "measured": measured,
        "trained": trained,
        "r_squared": {  # of each step size
            split: [r_squared(p[at], m[at]) for p, m in zip(predicted, measured, strict=True)]
            for split, at in (("train", trained), ("heldout", ~trained))
        },
        "adamw_correlation": first_adamw_step(task, reference, listing, batch, advantages, predicted[0]),
    }


def listed_prompts(task: Task) -> list[str]:
    """All prompts in their natural order, whatever the split: 2=, 3=, ..., 16=."""
    return sorted(task.prompts, key=lambda prompt: (len(prompt), prompt))


def first_adamw_step(
    task: Task, reference: Policy, listing: Listing, batch: Rollout, advantages: Tensor, predicted: Tensor
) -> float:
    """Correlation of what the kernel predicts for SGD, (R,), with what the loop's own first AdamW step does."""
    run = Run(settings_of(task, steps=1), parse_method("grpo"), FIRST_SEED, reference, task=task)
    update_policy(run, batch, advantages, None)
    with torch.no_grad():
        before, after = listing.log_probs(reference), listing.log_probs(run.policy)
    change = (after - before)[listing.slots[:, 0], listing.slots[:, 1]]
    return float(torch.corrcoef(torch.stack((change, predicted)))[0, 1])


# --- real training --------------------------------------------------------------------------------------------------


def trained_outcomes(
    task: Task, reference: Policy, listing: Listing, queries: Sequence[int], seed: int, steps: int
) -> np.ndarray:
    """GRPO on some queries alone: (outcomes, Q) of all queries, NaN where a query was trained."""
    some = resplit(task, [listed_prompts(task)[q] for q in queries])
    run = Run(settings_of(task, steps), parse_method("grpo"), seed, reference, task=some)
    train(run)
    with torch.no_grad():
        before, now = (listing.log_probs(policy).exp().numpy() for policy in (reference, run.policy))
    lost = 1 - effective_modes(now) / effective_modes(before)
    outcomes = np.stack((lost, 1 - retained_mass(now, before), now.sum(-1) - before.sum(-1)))
    outcomes[:, queries] = np.nan
    return outcomes


def settings_of(task: Task, steps: int) -> Settings:
    """The defaults, measured at the first and the last step alone."""
    return Settings(experiment=Experiment(task=task.name, steps=steps, evaluate_every=steps, methods=("grpo",)))


class Trained(NamedTuple):
    """Runs of one kind: U sets of trained queries, S seeds of each."""

    alone: bool  # one query in each set, each query once: U = Q
    sets: list[list[int]]
    outcomes: np.ndarray  # (S, U, outcomes, Q), NaN where a query was trained

    def of_sets(self, pairs: np.ndarray) -> np.ndarray:
        """A measure of pairs (Q, Q), averaged over the queries of each set: (U, Q)."""
        return np.stack([pairs[queries].mean(0) for queries in self.sets])


def train_all(task: Task, reference: Policy, listing: Listing, plan: Plan) -> dict[str, Trained]:
    """Every query alone with every seed, and random halves of the queries, each half with a seed of its own."""
    Q, rng = len(listing.modes), random.Random(FIRST_SEED)
    alone = [[q] for q in range(Q)]
    halves = [sorted(rng.sample(range(Q), Q // 2)) for _ in range(plan.halves)]

    def run(queries: list[int], seed: int, steps: int) -> np.ndarray:
        return trained_outcomes(task, reference, listing, queries, FIRST_SEED + seed, steps)

    one = np.array([[run(queries, seed, plan.steps) for queries in alone] for seed in range(plan.seeds)])
    half = np.array([[run(queries, seed, plan.half_steps) for seed, queries in enumerate(halves)]])
    return {"one query trained": Trained(True, alone, one), "half of them trained": Trained(False, halves, half)}


# --- how loss goes with similarity ----------------------------------------------------------------------------------


def ranks(values: np.ndarray) -> np.ndarray:
    """Ranks from 0, ties sharing their mean.

    >>> ranks(np.array([5, 1, 5])).tolist()
    [1.5, 0.0, 1.5]
    """
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts + 1) / 2)[place]


def correlation(x: np.ndarray, y: np.ndarray) -> float:
    """Pearson's."""
    return float(np.corrcoef(x, y)[0, 1])


def spearman(x: np.ndarray, y: np.ndarray) -> float:
    """Spearman's: Pearson's of the ranks."""
    return correlation(ranks(x.round(9)), ranks(y))  # x of (a, b) and of (b, a) are equal, but for rounding


def without_own_means(values: np.ndarray, sets_too: bool) -> np.ndarray:
    """(U, Q) less each held-out query's own mean, and each trained set's where `sets_too`; NaN stays NaN."""
    for _ in range(50):  # alternating means settle fast where few are missing
        values = values - np.nanmean(values, 0)
        values = values - np.nanmean(values, 1, keepdims=True) if sets_too else values
    return values


def bootstrap(
    statistic: Callable, x: np.ndarray, y: np.ndarray, within: bool = False, alone: bool = False
) -> np.ndarray:
    """`statistic(x, y)`, then its values in DRAWS resamples: (1 + DRAWS, ...). x (U, Q), y (S, U, Q), with NaN.

    Seeds, trained sets and held-out queries are each drawn anew, since numbers that share one are not independent.
    `within`: a held-out query is compared with itself under other trained sets, and where one query was trained
    `alone`, its effect on one query with that on others; what makes a query fragile or a lesson strong is then out.
    """
    rng = np.random.default_rng(0)
    S, U, Q = y.shape
    x = np.where(np.isnan(y[0]), np.nan, x)
    if within:  # linear, and the same holes under every seed: it may be done once, before the seeds are averaged
        x, y = without_own_means(x, alone), np.stack([without_own_means(values, alone) for values in y])
    values = []
    for draw in range(1 + DRAWS):
        seeds, sets, queries = (rng.integers(n, size=n) if draw else np.arange(n) for n in (S, U, Q))
        cells = np.ix_(sets, queries)
        known, mean = x[cells], y[seeds].mean(0)[cells]
        there = np.isfinite(known)
        values.append(statistic(known[there], mean[there]))
    return np.array(values)


def relations(trained: dict[str, Trained], predictors: dict[str, np.ndarray]) -> list[dict]:
    """One row for each kind of run, outcome, comparison and predictor: a correlation and its 95 % interval.

    Then their difference: the resamples are the same for both, so its interval is that of a paired comparison.
    """
    rows = []
    for (kind, runs), (i, outcome), within in itertools.product(trained.items(), enumerate(OUTCOMES), (False, True)):
        y, statistic = runs.outcomes[:, :, i], correlation if within else spearman
        found = {
            name: bootstrap(statistic, runs.of_sets(pairs), y, within, runs.alone) for name, pairs in predictors.items()
        }
        found["selectivity - similarity"] = found["selectivity"] - found["similarity"]
        for name, values in found.items():
            low, high = np.percentile(values[1:], (2.5, 97.5))
            row = {"runs": kind, "outcome": outcome, "comparison": COMPARISONS[within], "predictor": name}
            row |= {"correlation": float(values[0]), "low": float(low), "high": float(high)}
            rows.append(row | {"cells": int(np.isfinite(y[0]).sum())})
    return rows


# --- the picture ----------------------------------------------------------------------------------------------------

TRAINED, HELD_OUT = BLUE, RED


def draw(
    path: Path, listing: Listing, labels: list[str], cosine: np.ndarray, step: dict, runs: Trained,
    predictors: dict[str, np.ndarray], found: list[dict]
) -> None:  # fmt: skip
    """The kernel and one step above; below, the runs in which one query was trained, and all correlations."""
    figure, axes = canvas(2, 3, (18, 11), titles=14, grid=False)
    draw_kernel(figure, axes[0, 0], listing, labels, cosine)
    draw_step(axes[0, 1], step)
    draw_sweep(axes[0, 2], step)
    draw_losses(axes[1, 0], runs, predictors["similarity"], found, "similarity", "d")
    draw_losses(axes[1, 1], runs, predictors["selectivity"], found, "selectivity", "e")
    draw_relations(axes[1, 2], found)
    save(figure, path)


def draw_kernel(figure, axis, listing: Listing, labels: list[str], cosine: np.ndarray) -> None:
    """The cosines of all listed modes, grouped by query."""
    image = axis.imshow(cosine, cmap="RdBu_r", vmin=-0.6, vmax=0.6, interpolation="nearest")
    edges = np.concatenate(([0], np.cumsum(listing.counts)))
    for edge in edges[1:-1] - 0.5:
        axis.axhline(edge, color="black", linewidth=0.4)
        axis.axvline(edge, color="black", linewidth=0.4)
    middles = (edges[1:] + edges[:-1] - 1) / 2
    size = 10 if len(labels) < 20 else 6
    axis.set_xticks(middles, labels, rotation=90, fontsize=size)
    axis.set_yticks(middles, labels, fontsize=size)
    stripes = "; stripes: the same first digit" if all("+" in mode for row in listing.modes for mode in row) else ""
    axis.set(title="a  Cosine between gradients of log π, mode by mode", xlabel=f"modes, grouped by query{stripes}")
    figure.colorbar(image, ax=axis, shrink=0.8, extend="max", label="cosine (each mode with itself: 1)")


def draw_step(axis, step: dict) -> None:
    """Predicted against measured at the small step."""
    i = STEP_SIZES.index(SMALL)
    predicted, measured = step["predicted"][i].numpy(), step["measured"][i].numpy()
    ends = [min(predicted.min(), measured.min()), max(predicted.max(), measured.max())]
    axis.plot(1e3 * np.array(ends), 1e3 * np.array(ends), color="grey", linewidth=1, label="prediction = measurement")
    for split, name, colour in (("train", "trained", TRAINED), ("heldout", "held-out", HELD_OUT)):
        at = step["trained"].numpy() == (split == "train")
        score = step["r_squared"][split][i]
        label = f"{name} queries, R² = 1 - {1 - score:.0e}" if score > 0.999 else f"{name} queries, R² = {score:.3f}"
        axis.scatter(1e3 * predicted[at], 1e3 * measured[at], s=26, alpha=0.7, color=colour, label=label)
    axis.axhline(0, color="grey", linewidth=0.5)
    axis.axvline(0, color="grey", linewidth=0.5)
    axis.set(
        title=f"b  One SGD step of size {SMALL:g} on a GRPO batch",
        xlabel="predicted: η Σ c ⟨∇log π, ∇log π′⟩, in thousandths",
    )
    axis.set(ylabel="measured change of log π of each mode, in thousandths")
    axis.legend(frameon=False, loc="upper left")


def draw_sweep(axis, step: dict) -> None:
    """R² against the step size, and how large a change that is."""
    rms = float(step["predicted"][0].pow(2).mean().sqrt()) / STEP_SIZES[0]
    for split, name, colour in (("train", "trained", TRAINED), ("heldout", "held-out", HELD_OUT)):
        axis.plot(STEP_SIZES, step["r_squared"][split], "o-", markersize=4, color=colour, label=f"{name} queries")
    axis.axhline(0.99, color="grey", linestyle=":", label="R² = 0.99")
    axis.axhline(0, color="grey", linewidth=0.5)
    axis.set(xscale="log", ylim=(-0.55, 1.05), xlabel="SGD step size η", ylabel="R² of the first-order prediction")
    axis.set_title("c  How far the first order carries")
    top = axis.secondary_xaxis("top", functions=(lambda x: x * rms, lambda x: x / rms))
    top.set_xlabel("predicted change of log π (root mean square)")
    axis.legend(frameon=False, loc="lower left")


def draw_losses(axis, runs: Trained, pairs: np.ndarray, found: list[dict], predictor: str, letter: str) -> None:
    """Share of effective modes lost by each held-out query, against its coupling to the one that was trained."""
    x, y = runs.of_sets(pairs), runs.outcomes[:, :, 0]
    mean = y.mean(0)
    there = np.isfinite(mean)
    ends = np.linspace(x[there].min(), x[there].max(), 50)
    fits = bootstrap(lambda a, b: np.polyval(np.polyfit(a, b, 1), ends), x, y)
    points = np.stack((fits[0], *np.percentile(fits[1:], (2.5, 97.5), axis=0)), 1)  # (50, 3)
    axis.scatter(x[there], mean[there], s=18, alpha=0.5, color=HELD_OUT, linewidth=0)
    band(axis, ends, points, "black", "least squares, 95 % of bootstrap", shade=0.15)
    axis.axhline(0, color="grey", linewidth=0.5)
    across, within = (
        row
        for row in found
        if (row["runs"], row["predictor"], row["outcome"]) == ("one query trained", predictor, "modes lost")
    )
    lines = [
        f"{name} {row['correlation']:.2f}, 95 % [{row['low']:.2f}, {row['high']:.2f}]"
        for name, row in (("Spearman ρ", across), ("within queries r", within))
    ]
    axis.text(0.97, 0.03, "\n".join(lines), transform=axis.transAxes, ha="right", va="bottom", fontsize=12)
    axis.set(xlabel=PREDICTORS[predictor], ylabel="share of effective modes lost, query not trained")
    axis.set_ylim(mean[there].min() - 0.15, mean[there].max() + 0.12)
    axis.set_title(f"{letter}  Modes lost against {predictor}: one query trained")
    axis.legend(frameon=False, loc="upper left")


def draw_relations(axis, found: list[dict]) -> None:
    """The correlations with their intervals."""
    rows = [row for row in found if row["outcome"] != "mass lost" and row["predictor"] in PREDICTORS]
    order = sorted(
        rows, key=lambda row: (row["outcome"], row["runs"] != "one query trained", row["predictor"] != "similarity")
    )
    place, ticks, labels, before = 0.0, [], [], None
    for row in order:
        group = (row["outcome"], row["runs"], row["predictor"])
        if group != before:
            place -= 1.0 if before is None or group[:2] == before[:2] else 1.5
            ticks.append(place - 0.12)  # between its two comparisons
            labels.append(f"{row['predictor']} → {row['outcome']}\n{row['runs']}")
        across = row["comparison"].startswith("across")
        at = place if across else place - 0.25
        colour = HELD_OUT if row["outcome"] == "modes lost" else TRAINED
        style = {"marker": "o", "markerfacecolor": colour if across else "white", "color": colour}
        axis.plot([row["low"], row["high"]], [at, at], color=colour, linewidth=2, alpha=1 if across else 0.6)
        axis.plot(row["correlation"], at, **style)
        before = group
    axis.set_yticks(ticks, labels)
    axis.plot([], [], "o", color="black", label="across queries (Spearman)")
    axis.plot([], [], "o", color="black", markerfacecolor="white", label="within queries (Pearson)")
    axis.axvline(0, color="grey", linewidth=1)
    axis.set(
        xlim=(-1, 1),
        xticks=(-1, -0.5, 0, 0.5, 1),
        ylim=(place - 2.2, -0.4),
        xlabel="correlation, 95 % interval",
        title="f  What coupling goes with",
    )
    axis.legend(frameon=False, loc="lower left")


# --- files ----------------------------------------------------------------------------------------------------------


def write_step(out: Path, listing: Listing, labels: list[str], step: dict) -> None:
    """sweep.csv, one row a step size, and changes.csv, one row a mode at the small step."""
    sweep = []
    for size, train_score, heldout_score, predicted in zip(
        STEP_SIZES, step["r_squared"]["train"], step["r_squared"]["heldout"], step["predicted"], strict=True
    ):
        row = {"step_size": size, "r_squared_train": train_score, "r_squared_heldout": heldout_score}
        sweep.append(row | {"rms_predicted": float(predicted.pow(2).mean().sqrt())})
    write_csv(out / "sweep.csv", sweep)
    changes = []
    for i, (q, m) in enumerate(listing.slots.tolist()):
        split = "train" if step["trained"][i] else "heldout"
        change = {name: float(step[name][STEP_SIZES.index(SMALL), i]) for name in ("predicted", "measured")}
        changes.append({"query": labels[q], "mode": listing.modes[q][m], "split": split} | change)
    write_csv(out / "changes.csv", changes)


def write_training(
    out: Path, labels: list[str], trained: dict[str, Trained], predictors: dict[str, np.ndarray]
) -> None:
    """similarity.csv, one row a pair of queries, and losses.csv, one row a run and query that it did not train."""
    pairs_of = itertools.product(enumerate(labels), repeat=2)
    similarity = [
        {"query": a, "other": b} | {name: float(pairs[i, j]) for name, pairs in predictors.items()}
        for (i, a), (j, b) in pairs_of
    ]
    write_csv(out / "similarity.csv", similarity)
    rows = []
    for kind, runs in trained.items():
        for seed, u, q in np.argwhere(np.isfinite(runs.outcomes[:, :, 0])):
            row = {"runs": kind, "seed": FIRST_SEED + int(seed if runs.alone else u)}
            row |= {"trained": " ".join(labels[i] for i in runs.sets[u]), "query": labels[q]}
            row |= {name: float(runs.of_sets(pairs)[u, q]) for name, pairs in predictors.items()}
            rows.append(row | {name: float(v) for name, v in zip(OUTCOMES, runs.outcomes[seed, u, :, q], strict=True)})
    write_csv(out / "losses.csv", rows)


def config_of(name: str, plan: Plan, labels: list[str], step: dict, trained: dict[str, Trained]) -> dict:
    """What made the folder, and the few numbers that are in no table of it."""
    at, kinds = STEP_SIZES.index(SMALL), trained.items()
    means = {kind: np.nanmean(runs.outcomes, (0, 1, 3)).tolist() for kind, runs in kinds}
    return {
        "command": f"python -m experiments.coupling {name}",
        "settings": dataclasses.asdict(settings_of(TASKS[name](), plan.steps)),
        "plan": plan._asdict() | {"first_seed": FIRST_SEED, "group_size": GROUP_SIZE, "bootstrap_draws": DRAWS},
        "halves": [[labels[q] for q in queries] for queries in trained["half of them trained"].sets],
        "r_squared_at": {"step_size": SMALL} | {split: row[at] for split, row in step["r_squared"].items()},
        "correlation_of_first_adamw_step_with_kernel": step["adamw_correlation"],
        "mean_outcomes": {kind: dict(zip(OUTCOMES, values, strict=True)) for kind, values in means.items()},
    }


def make(name: str) -> None:
    """Measure, train, resample; write the folder of one task."""
    began, plan, task = time.process_time(), PLANS[name], TASKS[name]()
    reference = load_reference(task, Shape())
    labels = listed_prompts(task)
    listing = Listing(task, labels)
    kernel, owner = coupling_kernel(reference, listing), listing.slots[:, 0]
    predictors = {"similarity": query_similarity(kernel, owner), "selectivity": query_selectivity(kernel, owner)}
    predictors = {name: pairs.numpy() for name, pairs in predictors.items()}
    step = one_step(task, reference, listing)
    print(f"{time.process_time():.0f} s: one step measured; training")
    trained = train_all(task, reference, listing, plan)
    print(f"{time.process_time():.0f} s: trained; resampling")
    found = relations(trained, predictors)
    out = results_folder("coupling" if name == "sums" else f"coupling_{name}")
    write_step(out, listing, labels, step)
    write_training(out, labels, trained, predictors)
    write_csv(out / "relations.csv", found)
    runs = trained["one query trained"]
    draw(out / "coupling.png", listing, labels, cosines(kernel).numpy(), step, runs, predictors, found)
    config = config_of(name, plan, labels, step, trained)
    seconds = {"processor_seconds": round(time.process_time() - began)}
    write_config(out, config | seconds | {"versions": versions()})
    print_relations(config, found)


def print_relations(config: dict, found: list[dict]) -> None:
    """The folder in short, for the terminal."""
    print(json.dumps({name: config[name] for name in list(config)[4:]}, indent=1))
    for row in found:
        head = f"{row['runs']:22} {row['outcome']:12} {row['comparison']:26} {row['predictor']:25}"
        print(f"{head}{row['correlation']:6.2f} [{row['low']:.2f}, {row['high']:.2f}]")


def main() -> None:
    torch.set_num_threads(1)
    for name in chosen_names("coupling", PLANS, default=["sums"]):
        make(name)


if __name__ == "__main__":
    main()
