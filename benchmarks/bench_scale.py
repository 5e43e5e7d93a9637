"""How the cost of a step grows: one size at a time around the default work, a fresh process for each.

    python -m benchmarks.bench_scale
    python -m benchmarks.bench_scale --axes group_size width --rounds 21

The method is grpo+iac+dlc, the one that does everything. Slopes are of log time against log size between neighbouring
sizes: 1 is linear, 0 free. Writes bench_scale.txt and bench_scale.png.
"""

import argparse
import dataclasses
import math
import multiprocessing
import resource
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch

import minirlvr
from benchmarks import timing
from benchmarks.timing import Spread, spread
from benchmarks.workload import Work, make_learner, step
from lab.report import COLOURS

METHOD = "grpo+iac+dlc"
PARTS = (*timing.STEP_PARTS, "rest")
WARM_UP = 2


class Axis(NamedTuple):
    """A size that is varied: a field of Work, or the number of seeds side by side."""

    label: str
    sizes: tuple[int, ...]
    default: int
    note: str = ""


AXES = {
    "group_size": Axis("completions of a prompt (G)", (2, 4, 8, 16, 32, 64), 8),
    "prompts": Axis("prompts (Q)", (4, 8, 16, 32, 64, 128), 32),
    "new_tokens": Axis("new tokens (T)", (2, 4, 8, 16, 32, 64), 8, "attention grows with the square"),
    "layers": Axis("layers", (1, 2, 4, 8), 2),
    "width": Axis("width (D)", (16, 32, 64, 128, 256), 64, "the products grow with the square"),
    "memory_width": Axis("width of the memory network", (16, 32, 64, 128, 256), 32, "its products: with the square"),
    "seeds": Axis("seeds side by side, a process each", (1, 2, 4), 1, "slope 0: no hindrance"),
}


class Point(NamedTuple):
    """One size: seconds of a step and of its parts, and memory in MB: at most, and beyond what the start took."""

    size: int
    step: Spread
    parts: dict[str, float]
    peak: float
    beyond_start: float


BARRIER = []  # in a worker process: where the processes of one point wait for each other


def start_worker(barrier) -> None:
    """Prepare a worker process: one thread, and the barrier that it shares with the others."""
    BARRIER.append(barrier)
    torch.set_num_threads(1)


def peak_memory(device: str) -> float:
    """The most memory (MB) that this process has had: of the GPU, or of the machine."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated() / 1e6
    unit = 1 if sys.platform == "darwin" else 1024  # bytes there, kilobytes elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6


def work_in_child(work: Work, seed: int, rounds: int, device: str) -> tuple[list[dict[str, float]], float, float]:
    """Seconds of the parts of each step; peak memory, and how much of it the steps and their learner added."""
    at_start = peak_memory(device)
    learner = make_learner(work, METHOD, device, seed)
    for _ in range(WARM_UP):
        step(learner)
    BARRIER[0].wait()
    rows = []
    for _ in range(rounds):
        with timing.timed_parts((minirlvr, timing.STEP_PARTS), device=device) as measured:
            step(learner)
        rows.append(measured.seconds)
    return rows, peak_memory(device), peak_memory(device) - at_start


def measure(axis: str, size: int, rounds: int, device: str) -> Point:
    """One point, in as many fresh processes as there are seeds; the memory is that of all of them."""
    seeds = size if axis == "seeds" else 1
    work = Work() if axis == "seeds" else dataclasses.replace(Work(), **{axis: size})
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(seeds, context, start_worker, (context.Barrier(seeds),)) as pool:
        results = [pool.submit(work_in_child, work, seed, rounds, device) for seed in range(seeds)]
        results = [result.result() for result in results]
    rows = [row for steps, _, _ in results for row in steps]
    parts = {part: spread(row.get(part, 0.0) for row in rows).median for part in PARTS}
    peak, beyond = (sum(result[i] for result in results) for i in (1, 2))
    return Point(size, spread(sum(row.values()) for row in rows), parts, peak, beyond)


def slope(before: Point, after: Point) -> float:
    """Slope of log time against log size between two points.

    >>> two, four = (Point(n, Spread(n**2, 0, 0), {}, 0, 0) for n in (2, 4))
    >>> slope(two, four)
    2.0
    """
    return math.log(after.step.median / before.step.median) / math.log(after.size / before.size)


def in_words(slope: float) -> str:
    """
    >>> [in_words(slope) for slope in (0.3, 1.0, 1.6)]
    ['less than linear', 'linear', 'more than linear']
    """
    return "less than linear" if slope < 0.8 else "linear" if slope <= 1.2 else "more than linear"


def table(name: str, points: list[Point]) -> str:
    """A line a size; the slope beside a size is that from the size before it."""
    axis = AXES[name]
    note = f" ({axis.note})" if axis.note else ""
    lines = [f"{axis.label}{note}; default {axis.default}"]
    lines.append(
        f"{'size':>6}{'ms a step [quartiles]':>30}{'slope':>7}  {'growth':18}"
        + "".join(f"{part:>9}" for part in PARTS)
        + f"{'peak MB':>10}{'of steps':>10}"
    )
    for i, point in enumerate(points):
        growth = slope(points[i - 1], point) if i else None
        middle, low, high = (value * 1e3 for value in point.step)
        told = f"{'':9}{'':18}" if growth is None else f"{growth:7.2f}  {in_words(growth):18}"
        lines.append(
            f"{point.size:6d}{f'{middle:.1f} [{low:.1f}, {high:.1f}]':>30}{told}"
            + "".join(f"{point.parts[part] * 1e3:9.1f}" for part in PARTS)
            + f"{point.peak:10.0f}{point.beyond_start:10.0f}"
        )
    if len(points) > 2:
        lines.append(f"over all of it the slope is {slope(points[0], points[-1]):.2f}")
    return "\n".join(lines)


def draw(curves: dict[str, list[Point]], folder: Path) -> None:
    """A panel an axis: the step and its parts, log-log, with linear growth in grey; last, memory."""
    columns = min(4, len(curves) + 1)
    rows = math.ceil((len(curves) + 1) / columns)
    figure, axes = timing.new_picture(rows, columns, size=(4.0 * columns, 3.4 * rows + 0.6))
    panels = list(axes.flat)
    for panel, (name, points) in zip(panels, curves.items(), strict=False):
        draw_times(panel, AXES[name], points)
    draw_memory(panels[len(curves)], curves)
    for panel in panels:
        panel.grid(alpha=0.25)
    for panel in panels[len(curves) + 1 :]:
        panel.set_visible(False)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    timing.save_picture(figure, folder, "bench_scale")


def draw_times(panel, axis: Axis, points: list[Point]) -> None:
    """The whole step in black with its quartiles, each part in a colour."""
    sizes, middles = [p.size for p in points], [p.step.median * 1e3 for p in points]
    whiskers = [
        [(p.step.median - p.step.low) * 1e3 for p in points],
        [(p.step.high - p.step.median) * 1e3 for p in points],
    ]
    panel.errorbar(sizes, middles, yerr=whiskers, color="black", marker="o", capsize=3, label="step")
    for part, colour in zip(PARTS, COLOURS, strict=False):
        panel.plot(sizes, [p.parts[part] * 1e3 for p in points], color=colour, marker=".", label=part)
    linear = [middles[-1] * size / sizes[-1] for size in sizes]
    panel.plot(sizes, linear, color="grey", linestyle="--", label="linear growth")
    panel.set(xscale="log", yscale="log", xlabel=axis.label, ylabel="time (ms)")
    panel.set_xticks(sizes, list(map(str, sizes)))
    panel.minorticks_off()


def draw_memory(panel, curves: dict[str, list[Point]]) -> None:
    """What the steps added to a process's memory, against each size in units of its default."""
    for i, (name, points) in enumerate(curves.items()):
        sizes, memory = [p.size / AXES[name].default for p in points], [p.beyond_start for p in points]
        panel.plot(sizes, memory, marker="o", color=COLOURS[i % len(COLOURS)], label=name)
    panel.set(xscale="log", ylim=(0, None), xlabel="size, in units of its default", ylabel="memory of the steps (MB)")
    panel.set_xticks([0.125, 0.25, 0.5, 1, 2, 4, 8], ["1/8", "1/4", "1/2", "1", "2", "4", "8"])
    panel.minorticks_off()
    panel.legend(fontsize="x-small", frameon=False)


def main(argv: list[str] | None = None) -> int:
    """Measure, print, write. Returns the exit code."""
    parser = timing.arguments(__doc__.splitlines()[0], rounds=15)
    parser.add_argument("--axes", nargs="+", choices=AXES, default=list(AXES), help="what to vary")
    parser.add_argument("--points", type=timing.at_least_one, default=99, help="only so many sizes of each")
    options: argparse.Namespace = parser.parse_args(argv)
    heading, curves = timing.heading("bench_scale", options.device, argv), {}
    for name in options.axes:
        sizes = AXES[name].sizes[: options.points]
        curves[name] = [measure(name, size, options.rounds, options.device) for size in sizes]
        print(f"{name} done", file=sys.stderr)
    default = Work()
    explained = (
        f"{METHOD}; {default.prompts} prompts x {default.group_size} completions x {default.new_tokens} new tokens\n"
        f"after {default.prompt_tokens} prompt tokens, but for the size that is varied; 1 thread, "
        f"{options.rounds} steps a size.\n`of steps`: memory beyond what Python and its imports had taken at the start."
    )
    tables = [table(name, points) for name, points in curves.items()]
    timing.write_results(options.out, "bench_scale", "\n\n".join([heading, explained, *tables]))
    draw(curves, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
