"""P1's controlled example in one figure: `python -m experiments.cats` makes results/cats.

Only Persian is trained. The CSV has one row for each group size, overlap, query, moment and measure: the mean and the
95 % interval over seeds. Moments are a number of steps, or "pass@1 0.95", the first step at which the run's Persian is
right that often: small groups are flat more often and so learn more slowly, and there all have learned the same.
"""

import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from experiments.drawing import BLUE, GREEN, RED, SKY, band, canvas, legend_below, save
from experiments.shared import pick, results_folder, versions, write_config, write_csv
from minirlvr import grpo_advantages
from toy_tasks import cats
from toy_tasks.measures import interval

GROUP_SIZES = (2, 4, 8, 16, 32, 64, math.inf)
OVERLAPS = (0.0, 0.25, 0.5, 0.75, 0.9, 1.0)
SEEDS = 64
LEVEL = 0.95  # the pass@1 of Persian at which group sizes are compared
MATCHED = f"pass@1 {LEVEL}"
PICTURED = (8, 0.75)  # group size and overlap of the curves
CURVE_STEPS = sorted({round(10 ** (i / 12)) for i in range(33)} | {0, cats.STEPS})  # 0, 1, 2, ..., 464, 500
SMALL_STEP, LARGE_STEP = 0.1, 3.0
COLOURS = {"Persian": RED, "Cat": BLUE, "Siamese": GREEN}
STATE = {"Persian": "trained", "Cat": "untrained, Persian's right answers", "Siamese": "untrained, shares half of them"}

History = Mapping[str, np.ndarray]  # measure -> its value at every step, overlap, run and query (steps+1, C, R, Q)

# --- runs -----------------------------------------------------------------------------------------------------------


def histories() -> dict[float, History]:
    """Group size -> its history."""
    found = {}
    for G in GROUP_SIZES:
        if math.isinf(G):
            log_pi = cats.train_exact(OVERLAPS)
        else:
            log_pi = cats.train(OVERLAPS, cats.draw_noise(range(SEEDS), cats.STEPS, G), grpo_advantages)
        found[G] = cats.query_measures(log_pi)
    return found


def first_step(history: History) -> np.ndarray:
    """The first step at which Persian's pass@1 is at LEVEL, (C, R). Every run of this setting gets there."""
    there = history["pass@1"][..., cats.TRAINED] >= LEVEL
    if not there.any(0).all():
        sys.exit(f"{(~there.any(0)).sum()} runs never reached {MATCHED}: more steps, or a larger step size")
    return there.argmax(0)


def at_own_step(values: np.ndarray, first: np.ndarray) -> np.ndarray:
    """Each run's values (steps+1, C, R, Q) at its own first step (C, R) -> (C, R, Q)."""
    return np.take_along_axis(values, first[None, ..., None], 0)[0]


def rows_of(found: dict[float, History]) -> list[dict]:
    """The rows of cats.csv: both moments of every group size and overlap, and the curves that are drawn."""
    rows = []
    for G, history in found.items():
        moments: dict[int | str, History] = {cats.STEPS: {name: values[-1] for name, values in history.items()}}
        moments[MATCHED] = matched(history)
        for moment, measured in moments.items():
            rows += [row for c in range(len(OVERLAPS)) for row in measure_rows(G, c, moment, measured)]
        if PICTURED[0] == G or math.isinf(G):
            for step in CURVE_STEPS[:-1]:
                measured = {name: values[step] for name, values in history.items()}
                rows += measure_rows(G, OVERLAPS.index(PICTURED[1]), step, measured)
    return rows


def matched(history: History) -> dict[str, np.ndarray]:
    """What is measured of each run at its own first step at LEVEL, and that step: name -> (C, R, Q)."""
    first = first_step(history)
    found = {name: at_own_step(values, first) for name, values in history.items()}
    return found | {"step": np.repeat(first[..., None], len(cats.QUERIES), -1).astype(float)}


def measure_rows(G: float, c: int, moment: int | str, measured: Mapping[str, np.ndarray]) -> list[dict]:
    """One row for each query and measure; measured: name -> (C, R, Q)."""
    rows = []
    for q, query in enumerate(cats.QUERIES):
        for name, values in measured.items():
            mean, low, high = interval(values[c, :, q])
            seen = {"group_size": G, "overlap": OVERLAPS[c], "query": query, "moment": moment, "measure": name}
            shown = {"mean": f"{mean:.6f}", "low": f"{low:.6f}", "high": f"{high:.6f}"}
            rows.append(seen | (shown | {"low": "", "high": ""} if math.isnan(low) else shown))  # no chance, no spread
    return rows


def value(rows: list[dict], G: float, overlap: float, query: str, moment: int | str, measure: str) -> dict:
    """The one row for this, in numbers."""
    (row,) = pick(rows, group_size=G, overlap=overlap, query=query, moment=moment, measure=measure)
    return {name: float(row[name]) if row[name] else math.nan for name in ("mean", "low", "high")}


def one_step(learning_rate: float, overlap: float, query: str) -> tuple[np.ndarray, np.ndarray]:
    """(predicted, measured) change of log pi by a first step on one group of G = 8, each (R, O)."""
    phi, weights = cats.embeddings(overlap), cats.start_weights(overlap)
    before = cats.log_probs(weights, phi).expand(SEEDS, -1, -1)  # (R, Q, O)
    probs = before[:, cats.TRAINED].exp()
    sampled = cats.draw_group(probs, cats.draw_noise(range(SEEDS), 1, PICTURED[0])[:, 0])
    advantages = grpo_advantages(cats.right_answers()[sampled])
    _, predicted = cats.one_step_prediction(before, phi, sampled, advantages, learning_rate)
    stepped = cats.sgd_step(weights, phi, cats.sampled_gradient(probs, sampled, advantages), learning_rate)
    q = cats.QUERIES.index(query)
    return predicted[:, q].numpy(), (cats.log_probs(stepped, phi) - before)[:, q].numpy()


# --- the figure -----------------------------------------------------------------------------------------------------


def draw(path: Path, rows: list[dict], found: dict[float, History]) -> None:
    """Curves and one small step; heat maps over group size and overlap, and one large step."""
    figure, axes = canvas(2, 3, (15, 9.6), font=10, titles=11, grid=False)
    title = "Only Persian is trained: what happens to Cat and Siamese?"
    figure.suptitle(f"{title}\nEach step moves their logits by overlap × the change of Persian's", fontsize=14)
    draw_curves(axes[0, 0], rows, found, "pass@1", "(a)")
    draw_curves(axes[0, 1], rows, found, "effective_modes", "(b)")
    draw_one_step(axes[0, 2], SMALL_STEP, "(c)")
    draw_heat_map(axes[1, 0], rows, cats.STEPS, f"(d) Cat after {cats.STEPS} steps")
    image = draw_heat_map(axes[1, 1], rows, MATCHED, f"(e) Cat when Persian's pass@1 reaches {LEVEL}")
    draw_one_step(axes[1, 2], LARGE_STEP, "(f)")
    figure.colorbar(image, ax=axes[1, 1], label="retained mass of Cat (share of its correct mass at the start)")
    legend_below(figure, axes[0, 0], 4)
    save(figure, path, dpi=110)


def draw_curves(axis, rows: list[dict], found: dict[float, History], measure: str, letter: str) -> None:
    """Three queries with 95 % bands, the infinite batch dashed, where they start and how far they could go."""
    G, overlap = PICTURED
    label, ceiling = {"pass@1": ("pass@1 (probability)", 1), "effective_modes": ("effective modes", 6)}[measure]
    if measure == "pass@1":  # every Siamese run goes its own way, and the mean hides it
        runs = found[G][measure][:, OVERLAPS.index(overlap), :24, cats.QUERIES.index("Siamese")]  # (steps+1, 24)
        axis.plot(runs, color=COLOURS["Siamese"], linewidth=0.6, alpha=0.3)
        axis.plot([], [], color=COLOURS["Siamese"], linewidth=0.6, alpha=0.6, label="single runs of Siamese")
    for query, colour in COLOURS.items():
        points = [list(value(rows, G, overlap, query, step, measure).values()) for step in CURVE_STEPS]
        name = f"{query} ({STATE[query]})"
        band(axis, CURVE_STEPS, points, colour, name, most=ceiling, shade=0.2, linewidth=2.2)
        exact = [value(rows, math.inf, overlap, query, step, measure)["mean"] for step in CURVE_STEPS]
        axis.plot(CURVE_STEPS, exact, color=colour, linewidth=1.2, linestyle="--")
    axis.plot([], [], color="black", linewidth=1.2, linestyle="--", label="infinite batch (exact gradient)")
    start = value(rows, G, overlap, "Persian", 0, measure)["mean"]
    axis.axhline(start, color="grey", linestyle=":", label="start (all three)")
    axis.axhline(ceiling, color="grey", linestyle="-.", label="ceiling")
    axis.set_xscale("symlog", linthresh=1, linscale=0.4)
    axis.set(xlim=(0, cats.STEPS), ylim=(0, ceiling * 1.05), xlabel="SGD steps on Persian (log scale)", ylabel=label)
    axis.set_xticks([0, 1, 10, 100, 500], ["0", "1", "10", "100", "500"])
    axis.set_title(f"{letter} {label.split(' (')[0]}: G = {G}, overlap {overlap}, {SEEDS} seeds ± 95 %")
    axis.grid(alpha=0.25)


def draw_heat_map(axis, rows: list[dict], moment: int | str, title: str):
    """Cat's retained mass, a row a group size (largest on top), a column an overlap."""
    cells = [[value(rows, G, c, "Cat", moment, "retained_mass") for c in OVERLAPS] for G in GROUP_SIZES]
    means = np.array([[cell["mean"] for cell in row] for row in cells])
    half = np.nanmax([[cell["high"] - cell["mean"] for cell in row] for row in cells])
    image = axis.imshow(means, cmap="viridis", vmin=0, vmax=1, aspect="auto", origin="lower")
    for (g, c), mean in np.ndenumerate(means):
        axis.text(c, g, f"{mean:.2f}", ha="center", va="center", color="black" if mean > 0.6 else "white")
    axis.set_xticks(range(len(OVERLAPS)), [f"{c:g}" for c in OVERLAPS])
    axis.set_yticks(range(len(GROUP_SIZES)), ["∞" if math.isinf(G) else str(G) for G in GROUP_SIZES])
    axis.set(xlabel="overlap of the embeddings, cos(Persian, Cat)", ylabel="group size G (completions)")
    axis.axhline(len(GROUP_SIZES) - 1.5, color="white", linewidth=3)  # above it: no sampling
    axis.set_title(f"{title} (95 %: ± {half:.2f} or less)")
    return image


def draw_one_step(axis, learning_rate: float, letter: str) -> None:
    """Predicted against measured change of log pi, for Persian and for a neighbour at two overlaps."""
    groups = (("Persian", 1.0, "Persian"), ("Cat", 0.9, "Cat, overlap 0.9"), ("Cat", 0.5, "Cat, overlap 0.5"))
    worst, reach = 0.0, 0.0
    colours = (COLOURS["Persian"], COLOURS["Cat"], SKY)
    for (query, overlap, label), colour, marker in zip(groups, colours, "os^", strict=True):
        predicted, measured = one_step(learning_rate, overlap, query)
        axis.scatter(predicted, measured, s=14, color=colour, marker=marker, alpha=0.5, linewidths=0, label=label)
        worst = max(worst, np.abs(predicted - measured).max())
        reach = max(reach, np.abs(predicted).max(), np.abs(measured).max())
    reach *= 1.05
    axis.plot([-reach, reach], [-reach, reach], color="grey", linestyle=":", label="prediction = measurement")
    axis.set(xlim=(-reach, reach), ylim=(-reach, reach), aspect="equal")
    axis.set(xlabel="predicted Δ log π of an answer (nats)", ylabel="measured Δ log π (nats)")
    axis.set_title(f"{letter} one step of size η = {learning_rate:g}: error up to {worst:.2g}")
    axis.legend(loc="upper left", fontsize=8.5)
    axis.grid(alpha=0.25)


# --- the command ----------------------------------------------------------------------------------------------------


def table(rows: list[dict]) -> str:
    """Mean and half of the 95 % interval at overlap PICTURED, for both moments."""
    names, lines = ("pass@1", "pass@8", "effective_modes", "retained_mass"), []
    for moment in (cats.STEPS, MATCHED):
        lines += ["", f"{f'overlap {PICTURED[1]}, {moment}':34}" + "".join(f"{name:>19}" for name in names)]
        for query in COLOURS:
            for G in GROUP_SIZES:
                cells = [value(rows, G, PICTURED[1], query, moment, name) for name in names]
                texts = [
                    f"{c['mean']:.3f}" + ("" if math.isnan(c["low"]) else f" ± {c['high'] - c['mean']:.3f}")
                    for c in cells
                ]
                lines.append(f"{query:10} G = {G:<19}" + "".join(f"{text:>19}" for text in texts))
    return "\n".join(lines)


def main(arguments: Sequence[str] = ()) -> None:
    if arguments:
        sys.exit("usage: python -m experiments.cats")
    torch.set_num_threads(1)
    found = histories()
    rows = rows_of(found)
    out = results_folder("cats")
    config = {
        "command": "python -m experiments.cats",
        "advantages": "grpo", "learning_rate": cats.LEARNING_RATE, "steps": cats.STEPS,
        "group_sizes": [str(G) for G in GROUP_SIZES], "overlaps": OVERLAPS, "seeds": list(range(SEEDS)),
        "queries": cats.QUERIES, "trained": cats.QUERIES[cats.TRAINED], "right": cats.RIGHT,
        "reference": cats.REFERENCE.tolist(), "ceilings": {"pass@1": 1.0, "effective_modes": len(cats.RIGHT[0])},
        "versions": versions(),
    }  # fmt: skip
    write_config(out, config)
    write_csv(out / "cats.csv", rows, digits=None)
    draw(out / "cats.png", rows, found)
    print(table(rows))


if __name__ == "__main__":
    main(sys.argv[1:])
