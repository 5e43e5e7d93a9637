"""What one training step costs: minirlvr, Hugging Face in a plain loop and TRL's GRPOTrainer, on the same work.

    python -m benchmarks.bench_step                      everybody, 1 thread and then 2
    python -m benchmarks.bench_step --peers              minirlvr alone
    python -m benchmarks.bench_step --device cuda --threads 1

The contestants take turns, a step each (TRL a short burst), for many rounds in one process per number of threads: what
else the machine does meanwhile falls on all of them alike. Writes bench_step.txt and bench_step.png.
"""

import argparse
import dataclasses
import importlib.util
import multiprocessing
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks import timing
from benchmarks.contestants import TRL, HuggingFace, Ours
from benchmarks.floor import Net, Speeds, flops, step_products
from benchmarks.timing import Spread, clock, spread
from benchmarks.workload import Work
from lab.report import COLOURS

PEERS = {"transformers": ("Hugging Face", HuggingFace), "trl": ("TRL GRPOTrainer", TRL)}
BASE = "minirlvr grpo"  # what the ratios are to
BOTH = "minirlvr grpo+iac+dlc"
FLAT = "minirlvr grpo, half flat"
COMPILED = "minirlvr grpo, --compile"
PARTS = (*timing.STEP_PARTS, "rest")
WARM_UP = 3  # steps of each contestant before the clock counts
VISIBLE = 1e-4  # seconds; a part that never takes as long is not shown


class Timed(NamedTuple):
    """One contestant's times in seconds: of whole steps, and of the parts of other steps (no parts: not split)."""

    step: Spread
    parts: dict[str, Spread]


class Measured(NamedTuple):
    """All that one number of threads gave."""

    threads: int
    contestants: dict[str, Timed]
    skipped: list[str]  # peers that are not installed
    missing: list[str]  # functions of minirlvr that were not found to be timed
    rate: float  # FLOP/s of a large matrix product
    floors: dict[str, tuple[float, float, int]]  # contestant -> seconds at that rate, at own shapes; and FLOP


def make_contestants(work: Work, peers: list[str], device: str, compiled: bool) -> tuple[dict, list[str]]:
    """Name -> contestant, and the names of those that are not installed here."""
    made = {BASE: Ours(work, "grpo", device), BOTH: Ours(work, "grpo+iac+dlc", device)}
    made[FLAT] = Ours(dataclasses.replace(work, flat_prompts=work.prompts // 2), "grpo", device)
    if compiled:
        made[COMPILED] = Ours(dataclasses.replace(work, compile=True), "grpo", device)
    skipped = []
    for package in peers:
        name, kind = PEERS[package]
        if importlib.util.find_spec(package) is None:
            skipped.append(name)
        else:
            made[name] = kind(work, device)
    return made, skipped


def check_equal(contestants: dict, work: Work) -> None:
    """Let each take one step; raises ValueError unless all made the same number of tokens with as many parameters."""
    size = Net(work.layers, work.width, work.heads).parameters
    for name, contestant in contestants.items():
        contestant.step()
        if (contestant.tokens, contestant.policy_size) != (work.tokens, size):
            made = f"{contestant.tokens} tokens with {contestant.policy_size} parameters"
            raise ValueError(f"{name} made {made}; the work is {work.tokens} with {size}")
        if contestant.flat > 0.25 + 0.5 * (name == FLAT):
            raise ValueError(f"{name} had {contestant.flat:.0%} flat groups: too many to compare it by")


def take_turns(contestants: dict, rounds: int) -> Iterator[tuple[str, object]]:
    """Everybody once a round, each round beginning with the next."""
    turns = list(contestants.items())
    for i in range(rounds):
        first = i % len(turns)
        yield from turns[first:] + turns[:first]


def time_steps(contestant, device: str) -> list[float]:
    """Seconds of a whole step, or of the few that a contestant takes in one burst."""
    if hasattr(contestant, "burst"):
        return contestant.burst()
    began = clock(device)
    contestant.step()
    return [clock(device) - began]


def measure(threads: int, rounds: int, peers: list[str], device: str, work: Work, compiled: bool) -> Measured:
    """Time everybody in this process."""
    torch.set_num_threads(threads)
    contestants, skipped = make_contestants(work, peers, device, compiled)
    check_equal(contestants, work)
    products = {BASE: step_products(work), BOTH: step_products(work, dlc=True)}
    speeds = Speeds(set(products[BOTH]), device)
    for _, contestant in take_turns(contestants, WARM_UP):
        contestant.step()
    steps = {name: [] for name in contestants}
    parts = {name: {part: [] for part in (*getattr(c, "parts", ()), "rest")} for name, c in contestants.items()}
    missing: set[str] = set()
    for i, (name, contestant) in enumerate(take_turns(contestants, rounds)):
        steps[name] += time_steps(contestant, device)
        if hasattr(contestant, "parts"):  # in a step of its own: the clock between parts holds up a GPU
            with timing.timed_parts((contestant.owner, contestant.parts), device=device) as measured:
                contestant.step()
            missing.update(measured.missing)
            for part, values in parts[name].items():
                values.append(measured.seconds.get(part, 0.0))
        if i % len(contestants) == 0:
            speeds.measure()
    timed = {name: Timed(spread(steps[name]), spreads(parts[name])) for name in contestants}
    floors = {name: (*speeds.floors(needed), flops(needed)) for name, needed in products.items()}
    return Measured(threads, timed, skipped, sorted(missing), speeds.rate, floors)


def spreads(parts: dict[str, list[float]]) -> dict[str, Spread]:
    """Of the parts that can be seen: the memory's is none where a method has no memory.

    >>> list(spreads({"update": [0.02, 0.03], "memory": [1e-6, 2e-6], "rest": []}))
    ['update']
    """
    return {part: spread(seconds) for part, seconds in parts.items() if max(seconds, default=0) > VISIBLE}


def in_own_process(*options) -> Measured:
    """`measure` in a fresh process, so that one number of threads leaves nothing to the next."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(measure, *options).result()


def milliseconds(value: Spread) -> str:
    """
    >>> milliseconds(Spread(0.1, 0.09, 0.12))
    '  100.0 [   90.0,   120.0]'
    """
    return f"{value.median * 1e3:7.1f} [{value.low * 1e3:7.1f}, {value.high * 1e3:7.1f}]"


def table(measured: Measured) -> str:
    """Medians, quartiles and ratios, a line a contestant and a line a part; then the floor."""
    base, lines = measured.contestants[BASE].step.median, []
    lines.append(f"{measured.threads} thread{'s' * (measured.threads > 1)}")
    lines.append(f"{'':28}{'ms a step [quartiles]':>29}{'of ' + BASE:>20}")
    for name, timed in measured.contestants.items():
        lines.append(f"{name:28}{milliseconds(timed.step):>29}{timed.step.median / base:20.2f}")
        lines += [f"    {part:24}{milliseconds(value):>29}" for part, value in timed.parts.items()]
    lines += [f"{name:28}{'skipped':>29}" for name in measured.skipped]
    lines += ["", f"matrix rate (float32, 1024 x 1024): {measured.rate / 1e9:.1f} GFLOP/s"]
    for name, (fast, own, work) in measured.floors.items():
        time = measured.contestants[name].step.median
        lines.append(f"{name}: {work / 1e9:.2f} GFLOP")
        for kind, floor in (("at that rate", fast), ("its own shapes, each alone", own)):
            lines.append(f"    floor, {kind:30}{floor * 1e3:8.1f} ms; a step is {time / floor:6.2f} floors")
    if measured.missing:
        lines.append(f"not found in minirlvr.py, so part of rest: {', '.join(measured.missing)}")
    return "\n".join(lines)


def draw(results: list[Measured], folder: Path) -> None:
    """A panel a number of threads: stacked parts, whiskers over the quartiles of whole steps, the floors as lines."""
    names = list(results[0].contestants)
    figure, axes = timing.new_picture(1, len(results), size=(5.5 * len(results) + 1.5, 1.6 + 0.6 * len(names)))
    colours = dict(zip((*PARTS, "whole step"), COLOURS, strict=False))
    for axis, measured in zip(axes[0], results, strict=True):
        for row, name in enumerate(names):
            draw_bar(axis, row, measured.contestants[name], colours)
        fast, own, _ = measured.floors[BASE]
        axis.axvline(fast * 1e3, color="black", linestyle="-", label="floor of grpo: large products' rate")
        axis.axvline(own * 1e3, color="black", linestyle=":", label="floor of grpo: products at own shapes")
        axis.set(title=f"{measured.threads} thread{'s' * (measured.threads > 1)}", xlabel="time of one step (ms)")
        axis.set_yticks(range(len(names)), names)
        axis.invert_yaxis()
        axis.grid(axis="x", alpha=0.25)
    for axis in axes[0][1:]:
        axis.set_yticklabels([])
    labelled = {label: handle for a in axes[0] for handle, label in zip(*a.get_legend_handles_labels(), strict=True)}
    figure.legend(labelled.values(), labelled.keys(), loc="outside lower center", ncols=4, frameon=False)
    timing.save_picture(figure, folder, "bench_step")


def draw_bar(axis, row: int, timed: Timed, colours: dict[str, str]) -> None:
    """One contestant: its parts one after the other (scaled to the whole step's median), or one bar."""
    middle, low, high = (value * 1e3 for value in timed.step)
    parts = {part: value.median for part, value in timed.parts.items()} or {"whole step": 1.0}
    left, scale = 0.0, middle / sum(parts.values())
    for part, seconds in parts.items():
        axis.barh(row, seconds * scale, left=left, color=colours[part], label=part, height=0.65)
        left += seconds * scale
    axis.errorbar(middle, row, xerr=[[middle - low], [high - middle]], color="black", capsize=3, linewidth=1)


def explain(work: Work, rounds: int) -> str:
    """What was timed, and how."""
    flat = work.prompts // 2
    return (
        f"{work.prompts} prompts x {work.group_size} completions x {work.new_tokens} new tokens after "
        f"{work.prompt_tokens} prompt tokens: {work.tokens} new tokens a step for everybody;\n"
        f"{work.layers} layers, width {work.width}, {work.heads} heads. Right or wrong is a parity: about 1 group in "
        f"128 is flat, so no one can skip work;\nin `half flat` {flat} of {work.prompts} groups are flat. "
        f"{rounds} rounds, the contestants taking turns; parts are timed in steps of their own.\n"
        "TRL's steps are timed inside trainer.train(), from one on_step_begin to the next, 2 a burst after a warm-up."
    )


def main(argv: list[str] | None = None) -> int:
    """Measure, print, write. Returns the exit code."""
    parser = timing.arguments(__doc__.splitlines()[0], rounds=40)
    parser.add_argument("--threads", type=timing.at_least_one, nargs="+", default=[1, 2], help="of PyTorch")
    parser.add_argument("--no-compile", action="store_true", help="leave out --compile, which needs a compiler")
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS), help="packages to compare with")
    options: argparse.Namespace = parser.parse_args(argv)
    work, heading = Work(), timing.heading("bench_step", options.device, argv)
    common = (options.rounds, options.peers, options.device, work, not options.no_compile)
    results = [in_own_process(threads, *common) for threads in options.threads]
    text = "\n\n".join([heading, explain(work, options.rounds), *map(table, results)])
    timing.write_results(options.out, "bench_step", text)
    draw(results, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
