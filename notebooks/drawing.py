"""What the lessons draw and print with, so that their cells can be about the idea. Nothing here learns."""

import ast
import inspect
import io
import itertools
import textwrap
from collections.abc import Callable, Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
from IPython.display import Image, display
from PIL import Image as Picture

from lab.report import COLOURS

RED, ORANGE, SKY, BLUE, GREEN, PINK, BLACK = COLOURS  # one method has one colour in every figure
GREY = "#8C8C8C"

Curve = Sequence[Mapping[str, float]]  # rows of one training, each with "step", "pass@1" and "effective modes"
PANELS = (("pass@1", "pass@1 (probability)"), ("effective modes", "effective modes (number)"))


def set_style() -> None:
    plt.rcParams.update({"figure.constrained_layout.use": True, "font.size": 11})
    plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True})
    plt.rcParams.update({"grid.alpha": 0.25, "axes.axisbelow": True, "legend.frameon": False})


def show(function: Callable) -> None:
    """The source of a function of minirlvr, its docstring cut to the first line."""
    source = textwrap.dedent(inspect.getsource(function))
    body = ast.parse(source).body[0].body
    lines = source.splitlines()
    if ast.get_docstring(ast.parse(source).body[0]):
        first, last = body[0].lineno - 1, body[0].end_lineno
        summary = lines[first].rstrip().removesuffix('"""')
        lines[first:last] = [summary + '"""']
    text = "\n".join(lines)
    display({"text/markdown": f"```python\n{text}\n```", "text/plain": text}, raw=True)


def table(head: Sequence[str], rows: Sequence[Sequence]) -> None:
    """Print columns: the first to the left, numbers to the right, floats with three digits behind the point."""
    cells = [[f"{x:.3f}" if isinstance(x, float | np.floating) else str(x) for x in row] for row in [head, *rows]]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for first, *others in cells:
        print(first.ljust(widths[0]), *(x.rjust(w) for x, w in zip(others, widths[1:], strict=True)), sep="   ")


def summary(runs: Mapping[str, Sequence[Curve]], reference: Mapping[str, float]) -> None:
    """The last row of every training: the mean over seeds, and the lowest and highest seed."""

    def cell(curves: Sequence[Curve], name: str) -> str:
        last = [curve[-1][name] for curve in curves]
        return f"{np.mean(last):.2f} ({min(last):.2f} to {max(last):.2f})"

    rows = [[label, *(cell(curves, name) for name, _ in PANELS)] for label, curves in runs.items()]
    table(["mean (lowest to highest seed)", *(name for name, _ in PANELS)], [
        ["reference", *(f"{reference[name]:.2f}" for name, _ in PANELS)], *rows,
    ])  # fmt: skip


def with_interval(mean: float, low: float, high: float, sign: str = "") -> str:
    """A mean with its 95 % interval: "2.00 (1.50 to 2.50)"; `sign` = "+" writes the sign of positive ones, too."""
    return f"{mean:{sign}.2f} ({low:{sign}.2f} to {high:{sign}.2f})"


def modes_at(curve: Curve, level: float) -> float:
    """Effective modes where pass@1 first reaches `level`, on a straight line between two evaluations.

    NaN if it never does.
    """
    for before, now in itertools.pairwise(curve):
        if now["pass@1"] >= level:
            share = (level - before["pass@1"]) / (now["pass@1"] - before["pass@1"])
            return before["effective modes"] + share * (now["effective modes"] - before["effective modes"])
    return float("nan")


# --- figures --------------------------------------------------------------------------------------------------------


def present(figure: plt.Figure, colours: int = 64) -> None:
    """Show a figure as a PNG of few colours: sharp, and a quarter of the size, since outputs are committed."""
    buffer, small = io.BytesIO(), io.BytesIO()
    figure.savefig(buffer, dpi=100)
    plt.close(figure)
    Picture.open(buffer).convert("RGB").quantize(colours, dither=Picture.Dither.NONE).save(small, "PNG", optimize=True)
    display(Image(small.getvalue(), width=int(figure.get_figwidth() * 80)))


def draw_level(axis: plt.Axes, height: float, name: str) -> None:
    """A grey line across the figure, its name on it."""
    axis.axhline(height, color=GREY, linestyle=":" if name == "reference" else "-.", linewidth=1.5)
    place = {"x": 0.985, "y": height, "transform": axis.get_yaxis_transform()}
    side = "top" if name == "reference" else "bottom"
    axis.text(**place, s=name, color="#666666", fontsize=9.5, ha="right", va=side)


def draw_curves(runs: Mapping[str, Sequence[Curve]], colours: Mapping[str, str], ceiling: float) -> None:
    """pass@1 and effective modes against steps: a thin line a seed, a thick one for their mean."""
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.9))
    start = next(iter(runs.values()))[0][0]
    for axis, (name, label), top in zip(axes, PANELS, (1.0, ceiling), strict=True):
        for method, curves in runs.items():
            steps = [row["step"] for row in curves[0]]
            values = np.array([[row[name] for row in curve] for curve in curves])  # (seeds, steps)
            if len(values) > 1:
                axis.plot(steps, values.T, color=colours[method], linewidth=0.9, alpha=0.55)
            axis.plot(steps, values.mean(0), color=colours[method], linewidth=2.6, label=method)
        draw_level(axis, start[name], "reference")
        draw_level(axis, top, "ceiling")
        axis.set(xlabel="training step", ylabel=label, ylim=(0, 1.1 * top), xlim=(0, steps[-1]))
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4)
    present(figure)


def draw_plane(runs: Mapping[str, Sequence[Curve]], colours: Mapping[str, str], ceiling: float) -> None:
    """Every method as a path through the plane of pass@1 and effective modes: a thin line a seed, a thick mean."""
    figure, axis = plt.subplots(figsize=(8, 4.4))
    for method, curves in runs.items():
        x, y = (np.array([[row[name] for row in curve] for curve in curves]) for name, _ in PANELS)  # (seeds, steps)
        axis.plot(x.T, y.T, color=colours[method], linewidth=0.9, alpha=0.55)
        axis.plot(x.mean(0), y.mean(0), "o-", color=colours[method], markersize=4, linewidth=2.2, label=method)
    axis.plot(x[0, 0], y[0, 0], "o", color=GREY, markersize=11)
    axis.annotate("reference", (x[0, 0], y[0, 0]), (0, -18), textcoords="offset points", color="#666666")
    draw_level(axis, ceiling, "ceiling")
    axis.set(xlabel=PANELS[0][1], ylabel=PANELS[1][1], ylim=(0, 1.1 * ceiling), xlim=(0.45, 1))
    axis.legend(loc="lower left")
    present(figure)


def draw_modes(modes: Sequence[str], panels: Mapping[str, Mapping[str, Sequence[float]]], colours: Mapping) -> None:
    """Probability of every mode of one prompt and of all wrong answers together (hatched).

    panels: title -> {name: probabilities of the modes}; several names in one panel stand side by side.
    """
    widths = [1 + 0.4 * (len(series) - 1) for series in panels.values()]
    figure, axes = plt.subplots(
        1, len(panels), figsize=(7 if len(panels) == 1 else 11, 3.3), sharey=True, squeeze=False, width_ratios=widths
    )
    for axis, (title, series) in zip(axes[0], panels.items(), strict=True):
        width, places = 0.8 / len(series), np.arange(len(modes) + 1)
        for i, (name, probs) in enumerate(series.items()):
            heights = [*probs, max(1 - sum(probs), 0)]
            where = places + (i - (len(series) - 1) / 2) * width
            bars = axis.bar(where, heights, width, color=colours[name], label=name)
            bars[-1].set(hatch="///", edgecolor="white", alpha=0.55)
        axis.set_xticks(places, [*modes, "wrong"], rotation=90 if len(panels) > 1 else 0)
        axis.set(title=title, xlabel="answer")
        axis.grid(axis="x", visible=False)
        if len(series) > 1:
            axis.legend()
    axes[0, 0].set(ylabel="probability", ylim=(0, 1.05 * axes[0, 0].get_ylim()[1] if len(panels) == 1 else 1))
    present(figure)


def draw_clip(objective: Mapping[str, tuple], ratios: Mapping[str, Sequence[float]], colours: Mapping) -> None:
    """objective: advantage -> (ratios, objective); ratios: name -> the ratio of every token after some steps."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.7))
    for name, (x, y) in objective.items():
        left.plot(x, y, color=colours[name], linewidth=2.6, label=name)
    left.axvspan(0.8, 1.2, color=GREY, alpha=0.2, linewidth=0)
    left.set(xlabel="ratio (policy now / policy that drew)", ylabel="objective of one token")
    left.set(title="The clipped objective")
    for name, values in ratios.items():
        share = np.linspace(0, 100, len(values))
        right.plot(share, np.sort(np.asarray(values)), color=colours[name], linewidth=2.6, label=name)
    right.axhspan(0.8, 1.2, color=GREY, alpha=0.2, linewidth=0)
    right.set(xlabel="tokens of the batch, lowest ratio first (%)", ylabel="ratio", yscale="log", ylim=(5e-3, 30))
    right.set(title="Ratios after 8 steps on one batch", xlim=(0, 100))
    for axis in (left, right):
        axis.legend(loc="upper left" if axis is right else "center left")
    present(figure)


def draw_weights(right: Sequence[int], advantages: Mapping[str, Sequence[float]], colours: Mapping) -> None:
    """The advantage of a right answer against how many of its group are right."""
    figure, axis = plt.subplots(figsize=(7, 3.6))
    for name, values in advantages.items():
        axis.plot(right, values, "o-", color=colours[name], linewidth=2.2, label=name)
    axis.set(xlabel=f"right answers in a group of {right[-1] + 1}", ylabel="advantage of a right answer")
    axis.set(yscale="log")
    axis.set_yticks([0.3, 1, 3, 10], ["0.3", "1", "3", "10"])
    axis.minorticks_off()
    axis.legend()
    present(figure)


# --- the lesson on sampling bias -----------------------------------------------------------------------------------

Points = Sequence[tuple[int, float, float, float]]  # (G, mean, low, high); low = high where there is nothing to draw


def draw_factors(names: Sequence[str], factors: Sequence[float], drawn: Sequence[int], right: Sequence[bool]) -> None:
    """By how much each answer of a group is multiplied: bars up or down from 1; grey if it was not drawn."""
    figure, axis = plt.subplots(figsize=(10, 4.2))
    colours = [(BLUE if r else RED) if n else GREY for n, r in zip(drawn, right, strict=True)]
    low, high = 1e-3, max(factors)
    axis.bar(range(len(names)), np.array(factors) - 1, 0.75, bottom=1, color=colours)
    for place, factor in enumerate(factors):
        side = "top" if low < factor < 1 else "bottom"
        text = f"{factor:.2g}" if factor > low else f"< {low:.2g}"
        axis.annotate(text, (place, max(factor, low)), (0, -4 if low < factor < 1 else 4), textcoords="offset points",
            ha="center", va=side, color=BLACK if factor > low else "white")  # fmt: skip
    axis.axhline(1, color=BLACK, linewidth=1)
    room = (high / low) ** 0.12
    axis.set(yscale="log", ylim=(low, high * room), xlabel="answer, and how often it was drawn")
    axis.set(ylabel="probability after / before")
    times = ["never" if not n else "once" if n == 1 else f"{n} times" for n in drawn]
    axis.set_xticks(range(len(names)), [f"{name}\n{n}" for name, n in zip(names, times, strict=True)])
    axis.yaxis.set_major_formatter("{x:g}")
    axis.grid(axis="x", visible=False)
    for name, colour in {"drawn, right": BLUE, "drawn, wrong": RED, "not drawn": GREY}.items():
        axis.bar([0], [0], bottom=1, color=colour, label=name)
    figure.legend(*axis.get_legend_handles_labels(), loc="outside upper center", ncols=3)
    present(figure)


def draw_objectives(x: Sequence[float], curves: Mapping[str, Sequence[float]], colours: Mapping, stated: float) -> None:
    """Objectives over the probability of the first of two modes, each with its maximum marked."""
    figure, axis = plt.subplots(figsize=(7.5, 4))
    for name, y in curves.items():
        best = int(np.argmax(y))
        axis.plot(x, y, color=colours[name], linewidth=2.6, label=name)
        axis.plot(x[best], y[best], "o", color=colours[name], markersize=9)
        axis.annotate(f"maximum at {x[best]:.3f}", (x[best], y[best]), (0, 9), textcoords="offset points",
            ha="center", bbox={"facecolor": "white", "edgecolor": "none", "pad": 1})  # fmt: skip
    axis.axvline(stated, color=GREY, linestyle=":", linewidth=1.5)
    axis.annotate(f"stated: {stated:.3f}", (stated, 0.03), (-5, 0), xycoords=("data", "axes fraction"),
        textcoords="offset points", color="#666666", ha="right")  # fmt: skip
    axis.set(xlabel="probability of the mode that was drawn", xlim=(0, 1))
    axis.set(ylabel="objective (reward)", ylim=(-1.6, 1.3))
    axis.legend(loc="upper left")
    present(figure)


def put_by_group(axis: plt.Axes, series: Mapping[str, Points], colours: Mapping[str, str]) -> None:
    """One line a series over G, on a log axis, with 95 % intervals as bars; dashed without bars where it is exact."""
    for name, points in series.items():
        G, mean, low, high = (np.array(column) for column in zip(*points, strict=True))
        if np.array_equal(low, high):
            axis.plot(G, mean, "--", color=colours[name], linewidth=2.4, label=name, zorder=5)
        else:
            axis.errorbar(G, mean, (mean - low, high - mean), color=colours[name], fmt="o-", markersize=4.5,
                linewidth=1.8, capsize=3, label=name)  # fmt: skip
    ticks = [2**i for i in range(1, 1 + int(np.log2(max(G for points in series.values() for G, *_ in points))))]
    axis.set_xscale("log", base=2)
    axis.set_xticks(ticks, [str(G) for G in ticks])
    axis.minorticks_off()
    axis.set(xlabel="group size G (answers per prompt)")


def draw_by_group(panels: Mapping[str, tuple[Mapping[str, Points], Mapping[str, float]]], colours: Mapping) -> None:
    """panels: label of the y axis, perhaps after a title and a newline -> (series, horizontal lines)."""
    width = 7.5 if len(panels) == 1 else 10
    figure, axes = plt.subplots(1, len(panels), figsize=(width, 4.2), squeeze=False)
    for axis, (label, (series, levels)) in zip(axes[0], panels.items(), strict=True):
        *title, label = label.split("\n")
        put_by_group(axis, series, colours)
        for name, height in levels.items():
            draw_level(axis, height, name)
        axis.set(ylabel=label, ylim=(0, None), title="".join(title))
        if levels:
            axis.set(ylim=(0, 1.1 * max(levels.values())))
    handles = {label: h for axis in axes[0] for h, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=3)
    present(figure)


def draw_misses(formula: Mapping[str, Points], counted: Mapping[str, Points], colours: Mapping[str, str]) -> None:
    """Probability against G: a formula as a line, counts as points with 95 % intervals."""
    figure, axis = plt.subplots(figsize=(7.5, 4.2))
    put_by_group(axis, formula, colours)
    for name, points in counted.items():
        G, mean, low, high = (np.array(column) for column in zip(*points, strict=True))
        axis.errorbar(G, mean, (mean - low, high - mean), color=colours[name], fmt="o", markersize=5, capsize=3)
    axis.errorbar([], [], [], color=BLACK, fmt="o", markersize=5, capsize=3, label="counted")
    axis.set(ylabel="chance of a mixed group without the mode", ylim=(0, 1))
    axis.legend(loc="upper right")
    present(figure)


def draw_climbs(
    curves: Mapping[str, tuple], ends: Mapping[str, Points], colours: Mapping[str, str], levels: Mapping[str, float]
) -> None:
    """Left: name -> (steps, mean, low, high) of effective modes; right: where they end, against G."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.2), sharey=True)
    for name, (steps, mean, low, high) in curves.items():
        left.plot(steps, mean, color=colours[name], linewidth=2.4, linestyle="--" if "exact" in name else "-")
        left.fill_between(steps, low, high, color=colours[name], alpha=0.25, linewidth=0)
    put_by_group(right, ends, colours)
    for axis in (left, right):
        for name, height in levels.items():
            draw_level(axis, height, name)
    left.set(xlabel="update", ylabel="effective modes (number)", ylim=(0, 1.12 * max(levels.values())), title="G = 4")
    left.set(xlim=(0, steps[-1]))
    right.set(title="After the last update")
    figure.legend(*right.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    present(figure)


# --- the lesson on semantic coupling -------------------------------------------------------------------------------

Band = tuple[Sequence[float], Sequence[float], Sequence[float], Sequence[float]]  # x, mean, low, high


def draw_answers(panels: Mapping[str, tuple], colours: Mapping[str, str]) -> None:
    """title -> (probabilities before, after, which answers are right): frames and bars; the wrong ones are grey."""
    figure, axes = plt.subplots(1, len(panels), figsize=(10, 3.4), sharey=True)
    for axis, (title, (before, after, right)) in zip(axes, panels.items(), strict=True):
        shades = [colours[title] if good else GREY for good in right]
        places = range(len(after))
        axis.bar(places, after, 0.8, color=shades)
        axis.bar(places, before, 0.8, color="none", edgecolor=shades, linewidth=1.3)
        axis.set(title=title, xlabel="answer", ylim=(0, 1))
        axis.set_xticks(places, [str(i) for i in places], fontsize=9)
        axis.grid(axis="x", visible=False)
    axes[0].set(ylabel="probability")
    marks = {"before (frame)": {"color": "none", "edgecolor": BLACK}, "after (bar)": {"color": BLACK}}
    marks |= {"wrong answers": {"color": GREY}}
    handles = [axes[0].bar([0], [0], **style) for style in marks.values()]
    figure.legend(handles, marks, loc="outside lower center", ncols=3)
    present(figure)


def draw_bands(
    panels: Mapping[str, Mapping[str, Band]], colours: Mapping[str, str], xlabel: str,
    levels: Mapping[str, Mapping[str, float]], exact: Mapping[str, Mapping[str, tuple]],
    runs: Mapping[str, Mapping[str, tuple]] | None = None, log_ticks: Sequence[int] = ()
) -> None:  # fmt: skip
    """y label -> {name: means with a 95 % band}; exact: the same without a band, dashed; runs: (x, (steps, runs))."""
    figure, axes = plt.subplots(1, len(panels), figsize=(7.5 if len(panels) == 1 else 10, 4.1), squeeze=False)
    for axis, (label, bands) in zip(axes[0], panels.items(), strict=True):
        for name, (x, single) in (runs or {}).get(label, {}).items():
            axis.plot(x, single, color=colours[name], linewidth=0.6, alpha=0.35)
            axis.plot([], [], color=colours[name], linewidth=0.6, label=f"single runs of {name.split(' (')[0]}")
        for name, (x, mean, low, high) in bands.items():
            axis.fill_between(x, low, high, color=colours[name], alpha=0.22, linewidth=0)
            marker = "" if log_ticks else "o"
            axis.plot(x, mean, color=colours[name], linewidth=2.6, marker=marker, markersize=5, label=name)
        for name, (x, y) in exact[label].items():
            axis.plot(x, y, "--", color=colours[name], linewidth=1.3)
        for name, height in levels[label].items():
            draw_level(axis, height, name)
        axis.plot([], [], "--", color=BLACK, linewidth=1.3, label="exact gradient, no sampling")
        axis.set(xlabel=xlabel, ylabel=label, xlim=(min(x), max(x)), ylim=(0, 1.1 * max(levels[label].values())))
        if log_ticks:
            axis.set_xscale("symlog", linthresh=1, linscale=0.4)
            axis.set_xticks(log_ticks, [str(t) for t in log_ticks])
    handles = {label: h for axis in axes[0] for h, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=5, columnspacing=1.4)
    present(figure)


def put_prediction(axis: plt.Axes, series: Mapping[str, tuple], colours: Mapping[str, str]) -> None:
    """name -> (predicted, measured), as points about the line on which the two are equal."""
    reach = 1.08 * max(float(abs(np.asarray(v)).max()) for pair in series.values() for v in pair)
    axis.plot([-reach, reach], [-reach, reach], color=GREY, linestyle=":", label="prediction = measurement")
    for name, (predicted, measured) in series.items():
        axis.scatter(predicted, measured, s=20, color=colours[name], alpha=0.7, linewidths=0, label=name)
    axis.set(xlim=(-reach, reach), ylim=(-reach, reach), aspect="equal")
    axis.set(xlabel="predicted change of log π (nats)", ylabel="measured change of log π (nats)")
    axis.locator_params(nbins=6)


def draw_predictions(panels: Mapping[str, Mapping[str, tuple]], colours: Mapping[str, str]) -> None:
    """title -> {name: (predicted, measured)}."""
    figure, axes = plt.subplots(1, len(panels), figsize=(10, 4.9))
    for axis, (title, series) in zip(axes, panels.items(), strict=True):
        put_prediction(axis, series, colours)
        axis.set(title=title)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    present(figure)


def draw_changes(names: Sequence[str], predicted: Sequence[float], measured: Sequence[float], title: str) -> None:
    """What was predicted for each answer as bars, and what happened as dots."""
    figure, axis = plt.subplots(figsize=(7.5, 3.5))
    axis.bar(names, predicted, 0.7, color=SKY, label="predicted by the kernel")
    axis.plot(names, measured, "o", color=BLACK, markersize=6, label="measured")
    axis.axhline(0, color=BLACK, linewidth=0.8)
    axis.set(title=title, xlabel="answer", ylabel="change of log π (nats)")
    axis.grid(axis="x", visible=False)
    axis.legend()
    present(figure)


def draw_kernel(cosine: np.ndarray, counts: Sequence[int], labels: Sequence[str]) -> None:
    """The cosines (R, R) of all listed answers, grouped by prompt; counts and labels of the prompts."""
    figure, axis = plt.subplots(figsize=(8, 6.8))
    image = axis.imshow(cosine, cmap="RdBu_r", vmin=-0.6, vmax=0.6, interpolation="nearest")
    edges = np.concatenate(([0], np.cumsum(counts)))
    for edge in edges[1:-1] - 0.5:
        axis.axhline(edge, color=BLACK, linewidth=0.5)
        axis.axvline(edge, color=BLACK, linewidth=0.5)
    middles = (edges[1:] + edges[:-1] - 1) / 2
    axis.set_xticks(middles, labels, rotation=90)
    axis.set_yticks(middles, labels)
    axis.set(xlabel="right answers, grouped by prompt", ylabel="right answers, grouped by prompt")
    axis.grid(visible=False)
    figure.colorbar(image, ax=axis, shrink=0.85, extend="both", label="cosine of two gradients of log π")
    present(figure, colours=256)


def draw_blocks(blocks: Mapping[str, tuple]) -> None:
    """title -> (cosines, names of its rows, of its columns, label of the rows, of the columns)."""
    figure, axes = plt.subplots(1, len(blocks), figsize=(10, 4.4))
    for axis, (title, (block, rows, columns, down, across)) in zip(axes, blocks.items(), strict=True):
        image = axis.imshow(block, cmap="RdBu_r", vmin=-0.6, vmax=0.6, aspect="equal")
        axis.set_yticks(range(len(rows)), rows)
        axis.set_xticks(range(len(columns)), columns, rotation=90)
        axis.set(title=title, ylabel=down, xlabel=across)
        axis.grid(visible=False)
    figure.colorbar(image, ax=axes, shrink=0.8, label="cosine of two gradients")
    present(figure, colours=256)


def draw_sweep(series: Mapping[str, tuple], title: str, scores: Mapping[str, tuple], colours: Mapping) -> None:
    """Left: name -> (predicted, measured) of one step. Right: name -> (step sizes, R squared)."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.6))
    put_prediction(left, series, colours)
    left.set(title=title)
    for name, (sizes, values) in scores.items():
        right.plot(sizes, values, "o-", color=colours[name], markersize=5, linewidth=2.2)
    draw_level(right, 1, "ceiling")
    right.axhline(0, color=BLACK, linewidth=0.8)
    right.set(xscale="log", ylim=(-1, 1.12), xlabel="size η of the SGD step", ylabel="R² of the prediction")
    right.set(title="How far the first order carries")
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    present(figure)


def draw_outcomes(
    predictors: Mapping[str, np.ndarray], outcomes: Mapping[str, np.ndarray], colours: Mapping[str, str]
) -> None:
    """Every outcome (a row) against every predictor (a column): a point a pair of prompts; black: means of fifths."""
    figure, axes = plt.subplots(
        len(outcomes), len(predictors), figsize=(10, 6.2), sharex="col", sharey="row", squeeze=False
    )
    for row, (outcome, y) in zip(axes, outcomes.items(), strict=True):
        for axis, (predictor, x) in zip(row, predictors.items(), strict=True):
            axis.scatter(x, y, s=22, color=colours[predictor], alpha=0.65, linewidths=0)
            axis.axhline(0, color=BLACK, linewidth=0.8)
            fifths = np.array_split(np.argsort(x), 5)
            axis.plot([x[f].mean() for f in fifths], [y[f].mean() for f in fifths], "o-", color=BLACK, linewidth=2)
        row[0].set(ylabel=outcome)
    for axis, predictor in zip(axes[-1], predictors, strict=True):
        axis.set(xlabel=predictor)
    axes[0, 0].plot([], [], "o", color=GREY, label="one trained and one other prompt")
    axes[0, 0].plot([], [], "o-", color=BLACK, linewidth=2, label="mean of a fifth of the points")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    present(figure)


def rank_correlation(x: np.ndarray, y: np.ndarray) -> float:
    """Spearman's; ties share their mean rank."""

    def ranks(values: np.ndarray) -> np.ndarray:
        _, place, counts = np.unique(np.round(values, 9), return_inverse=True, return_counts=True)
        return (np.cumsum(counts) - (counts + 1) / 2)[place]

    return float(np.corrcoef(ranks(x), ranks(y))[0, 1])


def draw_relations(worlds: Mapping[str, Sequence[Mapping]], colours: Mapping[str, str]) -> None:
    """Correlations with 95 % intervals: title -> rows with group, predictor, filled, correlation, low and high."""
    figure, axes = plt.subplots(1, len(worlds), figsize=(10, 5.2), sharey=True)
    for axis, (title, rows) in zip(axes, worlds.items(), strict=True):
        groups = list(dict.fromkeys(row["group"] for row in rows))
        for group in groups:
            mine = [row for row in rows if row["group"] == group]
            for i, row in enumerate(mine):
                colour, at = colours[row["predictor"]], -groups.index(group) + 0.3 - 0.2 * i
                axis.plot([row["low"], row["high"]], [at, at], color=colour, linewidth=2)
                axis.plot(row["correlation"], at, "o", color=colour, markersize=7,
                    markerfacecolor=colour if row["filled"] else "white")  # fmt: skip
        for edge in range(1, len(groups)):
            axis.axhline(0.5 - edge, color=GREY, linewidth=0.6)
        axis.axvline(0, color=BLACK, linewidth=0.8)
        axis.set(title=title, xlabel="correlation, with 95 % interval", xlim=(-1, 1), ylim=(0.5 - len(groups), 0.5))
        axis.set_xticks([-1, -0.5, 0, 0.5, 1])
        axis.set_yticks([-i for i in range(len(groups))], groups)
        axis.grid(axis="y", visible=False)
    for name, colour in colours.items():
        axes[0].plot([], [], color=colour, linewidth=4, label=name)
    axes[0].plot([], [], "o", color=BLACK, label="across prompts (Spearman)")
    axes[0].plot([], [], "o", color=BLACK, markerfacecolor="white", label="within prompts (Pearson)")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    present(figure)


# --- the lesson on sharpening ---------------------------------------------------------------------------------------


def draw_completions(
    names: Sequence[str], right: Sequence[bool], panels: Mapping[str, Sequence[float]], rest: bool = False
) -> None:
    """title -> probabilities of some completions, as lying bars: blue is right, red is wrong.

    With `rest`, the last two are all other right and all other wrong completions together, hatched.
    """
    figure, axes = plt.subplots(1, len(panels), figsize=(7.5 if len(panels) == 1 else 10.5, 4.3), sharey=True)
    places = range(len(names))
    for axis, (title, probs) in zip(np.atleast_1d(axes), panels.items(), strict=True):
        bars = axis.barh(places, probs, 0.78, color=[BLUE if good else RED for good in right])
        for bar in bars[-2:] if rest else ():
            bar.set(hatch="////", edgecolor="white", alpha=0.6)
        for place, p in zip(places, probs, strict=True):
            if p >= 0.005:
                axis.annotate(f"{p:.2f}", (p, place), (4, 0), textcoords="offset points", va="center", fontsize=9)
        axis.set(title=title, xlabel="probability", xlim=(0, 1.25 * max(map(max, panels.values()))))
        axis.grid(axis="y", visible=False)
    first = np.atleast_1d(axes)[0]
    first.set_yticks(places, names, family="monospace")
    first.set(ylabel="completion")
    first.invert_yaxis()
    handles = [first.barh([0], [0], color=colour) for colour in (BLUE, RED)]
    figure.legend(handles, ["right", "wrong"], loc="outside lower center", ncols=2)
    present(figure)


Line = tuple[Sequence[float], Sequence[float]] | tuple[Sequence[float], Sequence[float], Sequence[float]]


def draw_lines(
    panels: Mapping[str, Mapping[str, Line]],
    colours: Mapping[str, str],
    xlabel: str,
    targets: Mapping[str, Mapping[str, float]] | None = None,
    levels: Mapping[str, Mapping[str, float]] | None = None,
    limits: Mapping[str, tuple] | None = None,
    points: Sequence[str] = (),
    xticks: Sequence[float] = (),
    log: Sequence[str] = (),
) -> None:
    """label of the y axis -> name -> (x, y), or (x, y, half of the 95 % interval), which is drawn as points with bars.

    `targets`: dashed lines in the colour of their name; `levels`: grey ones with the name on them; `points`: names that
    are drawn as rings and not as a line; `log`: the labels of logarithmic axes.
    """
    figure, axes = plt.subplots(1, len(panels), figsize=(7.5 if len(panels) == 1 else 10.5, 4), squeeze=False)
    for axis, (label, lines) in zip(axes[0], panels.items(), strict=True):
        for name, (x, y, *error) in lines.items():
            if error:
                axis.errorbar(x, y, error[0], color=colours[name], fmt="s", markersize=6, capsize=4, label=name)
            elif name in points:
                axis.plot(x, y, "o", color=colours[name], markerfacecolor="none", markersize=8, label=name)
            else:
                marker = "o" if len(x) < 15 else ""
                axis.plot(x, y, color=colours[name], linewidth=2.4, marker=marker, markersize=4.5, label=name)
        for name, height in (targets or {}).get(label, {}).items():
            axis.axhline(height, color=colours[name], linestyle="--", linewidth=1.5)
        for name, height in (levels or {}).get(label, {}).items():
            draw_level(axis, height, name) if name else axis.axhline(height, color=BLACK, linewidth=1)
        axis.set(xlabel=xlabel, ylabel=label)
        if label in log:
            axis.set_yscale("log")
            axis.yaxis.set_major_formatter("{x:g}")
        axis.set(**({"ylim": limits[label]} if limits and label in limits else {}))
        if xticks:
            axis.set_xticks(xticks, [f"{x:g}" for x in xticks])
    handles = {name: h for axis in axes[0] for h, name in zip(*axis.get_legend_handles_labels(), strict=True)}
    if targets:
        handles["exact target"] = axes[0, 0].plot([], [], "--", color="#666666", linewidth=1.5)[0]
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=5)
    present(figure)
