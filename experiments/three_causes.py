"""Three causes of collapse told apart: `python -m experiments.three_causes TASK ...` makes results/three_causes_TASK.

1. The rich get richer: with beta = 0 even the exact, infinite-batch update loses modes.
2. Sampling bias: with beta > 0 the exact update keeps them; what finite groups of G lose beyond it is the bias.
3. Semantic coupling: prompts that were never trained lose modes as well (the held-out curves).

The sampled update is RLOO's, whose gradient is an unbiased estimate of the exact one (no standard deviation), with the
KL in the reward. G is varied at an equal number of updates and at an equal number of sampled completions; effective
modes and retained mass are compared at the last step and where pass@1 first reaches a level.
"""

import json
from pathlib import Path

from experiments.drawing import BLUE, RED, canvas, legend_below, save
from experiments.runs import run_variant
from experiments.shared import RUNS, chosen_names, pick, results_folder, write_config, write_csv
from lab import report
from toy_tasks.measures import interval

GROUPS, BETAS, SEEDS = (2, 4, 8, 16, 32, 64), (0.0, 0.2), 5
STEPS = {"sums": 240, "countdown": 60}  # updates; at equal samples, G completions a prompt get STEPS * 8 / G
LEVELS = {"sums": 0.9, "countdown": 0.85}  # of pass@1, for the comparison at equal pass@1
BUDGETS = {"updates": ("equal updates", BLUE), "samples": ("equal samples", RED)}


def runs(task: str) -> list[tuple[str, float, int, str, list[str]]]:
    """(budget, beta, G, folder name, flags) of every sampled variant, then the exact ones with G = 0."""
    found = []
    for beta in BETAS:
        base = ["--task", task, "--beta", str(beta), "--kl-in", "reward", "--kl-kind", "k1"]
        for G in GROUPS:
            for budget in BUDGETS:
                steps = STEPS[task] if budget == "updates" else STEPS[task] * 8 // G
                flags = [*base, "--methods", "rloo", "--seeds", str(SEEDS), "--group-size", str(G)]
                flags += ["--steps", str(steps), "--evaluate-every", str(max(1, steps // 24))]
                found.append((budget, beta, G, f"beta{beta}_G{G}_{steps}", flags))
        flags = [*base, "--methods", "exact", "--seeds", "1", "--no-exact-std"]
        flags += ["--steps", str(STEPS[task]), "--evaluate-every", str(STEPS[task] // 24)]
        found.append(("exact", beta, 0, f"beta{beta}_exact", flags))
    return found


def at_level(rows: list[dict], measure: str, level: float) -> float:
    """`measure` of one run's trained prompts where pass@1 reaches `level`, interpolated; nan if it never does.

    >>> at_level([{"pass@1": "0.5", "modes": "4"}, {"pass@1": "1", "modes": "2"}], "modes", level=0.75)
    3.0
    """
    before = None
    for row in rows:
        now = (float(row["pass@1"]), float(row[measure]))
        if now[0] >= level:
            if before is None:
                return now[1]
            share = (level - before[0]) / (now[0] - before[0])
            return before[1] + share * (now[1] - before[1])
        before = now
    return float("nan")


def measure_variant(rows: list[dict], level: float) -> dict[str, tuple[float, float, float]]:
    """name -> (mean, low, high) over seeds, at the last step of both splits and at equal pass@1."""
    found = {}
    for split in report.TITLES:
        last = list(report.at_step(rows, rows[0]["method"], split).values())[-1]
        for measure in ("pass@1", "effective_modes", "retained_mass"):
            found[f"{split} {measure}"] = interval([float(row[measure]) for row in last])
    curves = [pick(rows, seed=seed, split="train") for seed in sorted({row["seed"] for row in rows})]
    for measure in ("effective_modes", "retained_mass"):
        found[f"train {measure} at pass@1 = {level}"] = interval([at_level(curve, measure, level) for curve in curves])
    return found


# --- the figure -----------------------------------------------------------------------------------------------------


def draw(path: Path, table: list[dict], task: str, start: dict[str, float]) -> None:
    """Effective modes against G: trained prompts at the end and at equal pass@1, held-out prompts; a column a beta.

    `start` holds the reference's effective modes and the ceiling of each split.
    """
    level = LEVELS[task]
    panels = {
        "train effective_modes": "trained, last step",
        f"train effective_modes at pass@1 = {level}": f"trained, where pass@1 reaches {level}",
        "heldout effective_modes": "held out, last step",
    }
    size, plain = (9, 10), {"font": 10, "titles": "large", "grid": False}
    figure, axes = canvas(len(panels), len(BETAS), size, **plain, sharex=True, sharey=True)
    for row, (measure, title) in zip(axes, panels.items(), strict=True):
        split = measure.split()[0]
        for axis, beta in zip(row, BETAS, strict=True):
            draw_groups(axis, pick(table, beta=beta, measure=measure))
            axis.axhline(start[split], color="grey", linestyle=":", label="reference")
            axis.axhline(start[f"{split} ceiling"], color="grey", linestyle="-.", label="ceiling")
            axis.set(title=f"beta = {beta:g}: {title}", ylim=(0, None))
        row[0].set(ylabel="effective modes")
    for axis in axes[-1]:
        axis.set(xlabel="G, completions per prompt")
    legend_below(figure, axes[0, 0], 3)
    figure.suptitle(f"{task}: what a finite group loses (95 % intervals over {SEEDS} seeds)")
    save(figure, path, dpi=110)


def draw_groups(axis, table: list[dict]) -> None:
    """One measure at one beta against G: a line with intervals for each budget, and the exact update."""
    for budget, (label, colour) in BUDGETS.items():
        points = pick(table, budget=budget)
        means = [p["mean"] for p in points]
        errors = [[p["mean"] - p["low"] for p in points], [p["high"] - p["mean"] for p in points]]
        offset = 0.97 if budget == "updates" else 1.03  # so that two bars at one G can both be seen
        at = [p["G"] * offset for p in points]
        axis.errorbar(at, means, errors, color=colour, marker="o", capsize=3, label=f"RLOO, {label}")
    (exact,) = pick(table, budget="exact")
    axis.axhline(exact["mean"], color="black", label="exact update (infinite batch)")
    axis.set(xscale="log")
    axis.set_xticks(GROUPS, [str(G) for G in GROUPS])
    axis.minorticks_off()
    axis.grid(alpha=0.25)


# --- the command ----------------------------------------------------------------------------------------------------


def make(task: str) -> None:
    """Run all variants of one task and write the table and the picture."""
    name, table, configs = f"three_causes_{task}", [], {}
    for budget, beta, G, variant, flags in runs(task):
        folder = RUNS / name / variant
        rows = run_variant(folder, flags)
        config = json.loads((folder / "config.json").read_text())
        configs[variant] = {"command": ["minirlvr.py", *flags], "versions": config["versions"]}
        for measure, (mean, low, high) in measure_variant(rows, LEVELS[task]).items():
            line = {"budget": budget, "beta": beta, "G": G, "measure": measure}
            table.append(line | {"mean": mean, "low": low, "high": high})
    out = results_folder(name)
    write_csv(out / "table.csv", table, digits=None)
    write_config(out, configs)
    start = {f"{split} ceiling": config["ceilings"][split]["effective_modes"] for split in report.TITLES}
    for split in report.TITLES:
        start[split] = float(report.at_step(rows, "exact", split)[0][0]["effective_modes"])
    draw(out / "three_causes.png", table, task, start)


def main() -> None:
    for task in chosen_names("three_causes", STEPS):
        make(task)


if __name__ == "__main__":
    main()
