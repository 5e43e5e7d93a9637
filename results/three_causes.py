"""Three causes of collapse told apart: `python results/three_causes.py TASK` makes results/three_causes_TASK.

1. The rich get richer: with beta = 0 even the exact, infinite-batch update loses modes.
2. Sampling bias: with beta > 0 the exact update keeps them; what finite groups of G lose beyond it is the bias.
3. Semantic coupling: prompts that were never trained lose modes as well (the held-out curves).

The sampled update is RLOO's, whose gradient is an unbiased estimate of the exact one (no standard deviation), with the
KL in the reward. G is varied at an equal number of updates and at an equal number of sampled completions; effective
modes and retained mass are compared at the last step and where pass@1 first reaches a level.
"""

import csv
import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from make import ROOT, run_variant

import report
from toy_tasks.measures import interval

GROUPS, BETAS, SEEDS = (2, 4, 8, 16, 32, 64), (0.0, 0.2), 5
STEPS = {"sums": 240, "countdown": 60}  # updates; at equal samples, G completions a prompt get STEPS * 8 / G
LEVELS = {"sums": 0.9, "countdown": 0.85}  # of pass@1, for the comparison at equal pass@1
BUDGETS = {"updates": "equal updates", "samples": "equal samples"}
COLOURS = {"updates": "#0072B2", "samples": "#D55E00"}


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
    """`measure` of one run's trained prompts where pass@1 reaches `level`, interpolated; nan if it never does."""
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
    seeds = sorted({row["seed"] for row in rows})
    for measure in ("effective_modes", "retained_mass"):
        curves = [[row for row in rows if row["seed"] == seed and row["split"] == "train"] for seed in seeds]
        found[f"train {measure} at pass@1 = {level}"] = interval([at_level(curve, measure, level) for curve in curves])
    return found


def draw(path: Path, table: list[dict], task: str, start: dict[str, float]) -> None:
    """Effective modes against G: trained prompts at the end and at equal pass@1, held-out prompts; a column a beta."""
    level = LEVELS[task]
    panels = {
        "train effective_modes": "trained, last step",
        f"train effective_modes at pass@1 = {level}": f"trained, where pass@1 reaches {level}",
        "heldout effective_modes": "held out, last step",
    }
    figure, axes = plt.subplots(
        len(panels), len(BETAS), figsize=(9, 10), sharex=True, sharey=True, layout="constrained"
    )
    for row, (measure, title) in enumerate(panels.items()):
        for column, beta in enumerate(BETAS):
            axis = axes[row, column]
            for budget, label in BUDGETS.items():
                points = [r for r in table if r["budget"] == budget and r["beta"] == beta and r["measure"] == measure]
                means = [p["mean"] for p in points]
                errors = [[p["mean"] - p["low"] for p in points], [p["high"] - p["mean"] for p in points]]
                offset = 0.97 if budget == "updates" else 1.03  # so that two bars at one G can both be seen
                at = [p["G"] * offset for p in points]
                axis.errorbar(at, means, errors, color=COLOURS[budget], marker="o", capsize=3, label=f"RLOO, {label}")
            exact = next(r for r in table if r["budget"] == "exact" and r["beta"] == beta and r["measure"] == measure)
            axis.axhline(exact["mean"], color="black", label="exact update (infinite batch)")
            axis.axhline(start[measure.split()[0]], color="grey", linestyle=":", label="reference")
            axis.axhline(start[f"{measure.split()[0]} ceiling"], color="grey", linestyle="-.", label="ceiling")
            axis.set(title=f"beta = {beta:g}: {title}", xscale="log", ylim=(0, None))
            axis.set_xticks(GROUPS, [str(G) for G in GROUPS])
            axis.minorticks_off()
            axis.set(xlabel="G, completions per prompt" if row == len(panels) - 1 else None)
            axis.set(ylabel="effective modes" if column == 0 else None)
            axis.grid(alpha=0.25)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    figure.suptitle(f"{task}: what a finite group loses (95 % intervals over {SEEDS} seeds)")
    figure.savefig(path, dpi=110)


def make(task: str) -> None:
    """Run all variants of one task and write the table and the picture."""
    table, configs = [], {}
    for budget, beta, G, name, flags in runs(task):
        folder = ROOT / "runs" / f"three_causes_{task}" / name
        rows = run_variant(folder, flags)
        config = json.loads((folder / "config.json").read_text())
        configs[name] = {"command": ["minirlvr.py", *flags], "versions": config["versions"]}
        for measure, (mean, low, high) in measure_variant(rows, LEVELS[task]).items():
            line = {"budget": budget, "beta": beta, "G": G, "measure": measure}
            table.append(line | {"mean": mean, "low": low, "high": high})
    out = ROOT / "results" / f"three_causes_{task}"
    out.mkdir(exist_ok=True)
    with open(out / "table.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(table[0]))
        writer.writeheader()
        writer.writerows(table)
    (out / "config.json").write_text(json.dumps(configs, indent=2) + "\n")
    start = {f"{split} ceiling": config["ceilings"][split]["effective_modes"] for split in report.TITLES}
    for split in report.TITLES:
        start[split] = float(report.at_step(rows, "exact", split)[0][0]["effective_modes"])
    draw(out / "three_causes.png", table, task, start)


if __name__ == "__main__":
    if len(sys.argv) < 2 or set(sys.argv[1:]) - set(STEPS):
        sys.exit(f"usage: python results/three_causes.py TASK ...   with TASK one of {', '.join(STEPS)}")
    for task in sys.argv[1:]:
        make(task)
