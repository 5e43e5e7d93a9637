"""From a run's rows to its files: metrics.csv, summary.json, collapse.png and the closing table.

python -m lab.report runs/NAME      draw the picture of a folder again from its metrics.csv
"""

import csv
import io
import json
import math
import sys
from pathlib import Path

from lab.files import replace_file
from toy_tasks.measures import interval

TABLE = ("pass@1", "pass@8", "distinct@8", "effective_modes", "retained_mass", "share_gained", "R", "turning_step")
TITLES = {"train": "trained prompts", "heldout": "held-out prompts"}
# Okabe and Ito's colours, told apart with every common form of colour-blindness; then again, dashed.
COLOURS = ("#D55E00", "#E69F00", "#56B4E9", "#0072B2", "#009E73", "#CC79A7", "#000000")


def write(folder: Path, rows: list[dict], pictured: list[str] | None = None) -> str:
    """Write metrics.csv, summary.json and collapse.png (of the methods `pictured`, or all); returns the table."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, fieldnames=list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    replace_file(folder / "metrics.csv", text.getvalue())
    summary = summarise(rows)
    replace_file(folder / "summary.json", json.dumps(summary, indent=2) + "\n")
    shown = [row for row in rows if pictured is None or row["method"] in pictured]
    draw(folder / "collapse.png", shown, json.loads((folder / "config.json").read_text())["ceilings"])
    return "\n".join([table(summary, rows), *explain(rows)])


def measures_of(rows: list[dict]) -> list[str]:
    """The names of the measures: the columns between `split` and `completions`, where the log begins.

    Not the ends of an estimate's interval, which are columns of their own.
    """
    names = list(rows[0])
    names = names[names.index("split") + 1 : names.index("completions")]
    return [name for name in names if not name.endswith(("_low", "_high"))]


def samples_of(rows: list[dict]) -> int:
    """Completions of each prompt that the measures are estimated from; 0 where they are exact."""
    return int(float(rows[0].get("samples", 0)))


def at_step(rows: list[dict], method: str, split: str) -> dict[int, list[dict]]:
    """step -> the rows of all seeds at that step."""
    steps: dict[int, list[dict]] = {}
    for row in rows:
        if (row["method"], row["split"]) == (method, split):
            steps.setdefault(int(row["step"]), []).append(row)
    return dict(sorted(steps.items()))


def methods_of(rows: list[dict]) -> list[str]:
    return list(dict.fromkeys(row["method"] for row in rows))


def over_seeds(rows: list[dict], measure: str) -> dict[str, float | None]:
    """Mean and 95 % interval over seeds; None (null in JSON) is what is not known.

    For a single seed the interval is an estimate's own (its sampling noise), and None for an exact one.
    """
    values = [float(row[measure]) for row in rows if row[measure] not in ("", None)]
    if not all(map(math.isfinite, values)) or not values:  # kappa may be infinite, which JSON has no number for
        return dict.fromkeys(("mean", "low", "high"))
    mean, low, high = interval(values)
    if len(rows) == 1 and f"{measure}_low" in rows[0]:
        low, high = float(rows[0][f"{measure}_low"]), float(rows[0][f"{measure}_high"])
    return {"mean": mean, "low": low if low == low else None, "high": high if high == high else None}


def summarise(rows: list[dict]) -> dict:
    """method -> split -> measure -> {"mean", "low", "high"} at the last step that every seed of the method reached."""
    summary: dict = {}
    for method in methods_of(rows):
        for split in TITLES:
            steps = at_step(rows, method, split)
            seeds = max(map(len, steps.values()))
            last = steps[max(step for step, group in steps.items() if len(group) == seeds)]
            values = {measure: over_seeds(last, measure) for measure in measures_of(rows)}
            values["turning_step"] = over_seeds(turning_steps(rows, method, split), "turning_step")
            summary.setdefault(method, {})[split] = values
    return summary


def turning_steps(rows: list[dict], method: str, split: str) -> list[dict]:
    """Of each seed, the evaluated step at which sharpening turns into over-sharpening: where distinct@8 is highest.

    Until then more mass on correct answers finds more different ones; from then on the lost modes cost more.
    """
    best: dict = {}
    for row in rows:
        if (row["method"], row["split"]) == (method, split):
            value = float(row["distinct@8"])
            if value > best.get(row["seed"], (-1.0, 0))[0]:
                best[row["seed"]] = (value, int(row["step"]))
    return [{"turning_step": step} for _, step in best.values()]


def table(summary: dict, rows: list[dict]) -> str:
    """The closing table: mean +- half of the 95 % interval, for each method and split."""
    width, known = max(9, *map(len, summary)), (*measures_of(rows), "turning_step")
    names = [name for name in TABLE if name in known]
    lines = ["", f"{'':{width}}  split    " + "".join(f"{name:>17}" for name in names)]
    base = {split: at_step(rows, rows[0]["method"], split)[0][:1] for split in TITLES}
    cells = [
        ("reference", split, {m: over_seeds(base[split], m) for m in names if m not in ("R", "turning_step")})
        for split in TITLES
    ]
    cells += [(method, split, summary[method][split]) for method in summary for split in TITLES]
    for method, split, values in cells:
        shown = (cell(values[name]) if name in values else "" for name in names)
        lines.append(f"{method:{width}}  {split:8} " + "".join(f"{text:>17}" for text in shown))
    if samples_of(rows):
        noise = "over seeds" if len({row["seed"] for row in rows}) > 1 else "of the sampling noise, for one seed"
        lines.append(f"estimates from {samples_of(rows)} completions of each prompt; ± is the 95 % interval {noise}")
    return "\n".join(lines)


def cell(value: dict) -> str:
    """
    >>> cell({"mean": 0.5, "low": 0.4, "high": 0.6}), cell({"mean": 0.5, "low": None, "high": None})
    ('0.500 ± 0.100', '0.500        ')
    """
    if value["mean"] is None:
        return "unknown"
    digits = 1 if value["mean"] > 9.995 else 3
    half = "" if value["high"] is None else f" ± {value['high'] - value['mean']:.{digits}f}"
    return f"{value['mean']:5.{digits}f}{half:8}"


def explain(rows: list[dict]) -> list[str]:
    """One plain sentence for each method whose log shows a pattern that stops learning, or that it loses modes."""
    sentences = []
    cut, cure = (0.9, ": give more --max-new-tokens") if samples_of(rows) else (1, ": none of them could be right")
    share = "nearly every" if samples_of(rows) else "every"
    for method in methods_of(rows):
        logged = [row for row in rows if row["method"] == method and row["reward"] not in ("", None)]
        still = [row for row in logged if row["grad_norm"] in ("", None) or float(row["grad_norm"]) < 1e-9]
        for name, found, sentence in (
            (
                "flat_groups",
                lambda v: v == 1,
                "every group was flat (all right or all wrong): there was nothing to learn",
            ),
            ("cut_answers", lambda v: v >= cut, f"{share} answer was cut before it ended{cure}"),
            ("entropy", lambda v: v < 0.05, "the policy's entropy is near 0: it hardly samples anything new"),
        ):
            rows_seen = still if name == "flat_groups" else logged
            steps = [int(row["step"]) for row in rows_seen if row[name] not in ("", None) and found(float(row[name]))]
            if steps:
                sentences.append(f"{method}: by step {min(steps)}, {sentence}.")
    return sentences + [told for method in methods_of(rows) if (told := tell_law(rows, method))]


def tell_law(rows: list[dict], method: str) -> str:
    """What R (toy_tasks/law.py) says of a method at its last step; "" where it is not known, or modes are kept."""
    if "R" not in rows[0]:
        return ""
    steps = at_step(rows, method, "train")
    R = over_seeds(steps[max(steps)], "R")["mean"]
    if R is None or R >= 1:
        return ""
    cure = "without +dlc it cannot reach 1"
    if "+dlc" in method:
        cure = "+pos or a larger --mu raises it" if "+iac" in method or "+pos" in method else "+iac or +pos raises it"
    return f"{method}: at step {max(steps)}, R is {R:.2f}: below 1 the settings lose modes ({cure})."


def draw(path: Path, rows: list[dict], ceilings: dict) -> None:
    """collapse.png: pass@1 and effective modes against steps, trained and held-out prompts, a colour a method."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(10, 7), sharex=True, sharey="row", layout="constrained")
    estimate = f", from {samples_of(rows)} samples" if samples_of(rows) else ""
    labels = {"pass@1": f"pass@1 (probability{estimate})", "effective_modes": f"effective modes{estimate}"}
    for row, (measure, label) in enumerate(labels.items()):
        for column, (split, title) in enumerate(TITLES.items()):
            axis, ceiling = axes[row, column], ceilings[split][measure]
            draw_curves(axis, rows, split, measure, ceiling)
            axis.set(title=title if row == 0 else None, ylabel=label if column == 0 else None)
            axis.set(ylim=(0, None), xlabel="training step" if row == 1 else None)
            axis.grid(alpha=0.25)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=110)
    plt.close(figure)
    replace_file(path, picture.getvalue())


def draw_curves(axis, rows: list[dict], split: str, measure: str, ceiling: float) -> None:
    """One curve a method with its 95 % band over seeds, the reference's level and the ceiling."""
    for i, method in enumerate(methods_of(rows)):
        steps = at_step(rows, method, split)
        values = [over_seeds(group, measure) for group in steps.values()]
        steps = [step for step, value in zip(steps, values, strict=True) if value["mean"] is not None]
        values = [value for value in values if value["mean"] is not None]
        means = [value["mean"] for value in values]
        colour, style = COLOURS[i % len(COLOURS)], "-" if i < len(COLOURS) else "--"
        axis.plot(steps, means, color=colour, linestyle=style, linewidth=2, label=method)
        low = [max(value["mean"] if value["low"] is None else value["low"], 0) for value in values]
        high = [min(value["mean"] if value["high"] is None else value["high"], ceiling) for value in values]
        axis.fill_between(steps, low, high, color=colour, alpha=0.15, linewidth=0)
    base = over_seeds(at_step(rows, methods_of(rows)[0], split)[0], measure)["mean"]
    if base is not None:
        axis.axhline(base, color="grey", linestyle=":", label="reference")
    axis.axhline(ceiling, color="grey", linestyle="-.", label="ceiling")


def main(folders: list[str]) -> int:
    if not folders or folders[0].startswith("-"):
        print("report: name a run folder: python -m lab.report runs/NAME", file=sys.stderr)
        return 2
    for folder in map(Path, folders):
        try:
            with open(folder / "metrics.csv", newline="") as file:
                rows = list(csv.DictReader(file))
            ceilings = json.loads((folder / "config.json").read_text())["ceilings"]
            draw(folder / "collapse.png", rows, ceilings)
            print(table(summarise(rows), rows))
        except (OSError, KeyError, ValueError, IndexError, TypeError, RecursionError, csv.Error) as error:
            print(f"report: {folder} is not the folder of a finished run ({error})", file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
