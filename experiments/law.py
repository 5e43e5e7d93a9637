"""The law of what keeps modes (toy_tasks/law.py) against a table and against the runs of `experiments.runs lasting`.

    python -m experiments.law         the map of the table world, and what lasted on sums against R

Writes results/law: map.png and map.csv (over mu and kappa: the line R = 1, and what a simulated table did);
lasting.png, lasting.csv and table.txt (every setting of results/lasting at its last step, means over seeds).
"""

import csv
import json
import sys
from collections.abc import Sequence
from typing import NamedTuple

import torch

from experiments.drawing import BLUE, GREY, RED, canvas, save
from experiments.shared import RESULTS, results_folder, shown, text_table, versions, write_config, write_csv, write_text
from lab.report import at_step, methods_of, over_seeds
from toy_tasks.table import law_map

MUS = torch.linspace(0, 1.25, 26)
KAPPAS = torch.logspace(0, 5, 26, base=2)  # 1 to 32
COLLAPSED, KEPT = 1.5, 0.6  # modes below the first are a collapse; this share of the reference's is kept
MARGIN = 0.05  # cells of the map so near to R = 1 are not counted


class Setting(NamedTuple):
    """A method with its dials at its last step: (mean, low, high) over seeds."""

    name: str
    R: tuple[float, float, float]
    modes: tuple[float, float, float]
    accuracy: tuple[float, float, float]

    def sorted_rightly(self, reference: float) -> bool:
        """Does R = 1 tell this setting's collapse from its keeping?"""
        return self.modes[0] >= KEPT * reference if self.R[0] > 1 else self.modes[0] < COLLAPSED


def settings_of(rows: list[dict]) -> list[Setting]:
    """Every method of a results/NAME at its last step, trained prompts."""
    found = []
    for name in methods_of(rows):
        steps = at_step(rows, name, "train")
        last = [over_seeds(steps[max(steps)], measure) for measure in ("R", "effective_modes", "pass@1")]
        found.append(Setting(name, *((value["mean"], value["low"], value["high"]) for value in last)))
    return found


def told(settings: list[Setting], reference: float) -> str:
    """The table, the settings that the law sorts rightly as a fraction, and the exceptions by name."""
    head = ("setting", "R", "effective modes", "pass@1", "sorted")
    rows = []
    for setting in sorted(settings, key=lambda setting: setting.R[0]):
        means = (f"{mean:.2f} ± {high - mean:.2f}" for mean, _, high in (setting.R, setting.modes))
        verdict = "rightly" if setting.sorted_rightly(reference) else "wrongly"
        rows.append((setting.name, *means, f"{setting.accuracy[0]:.3f}", verdict))
    right = sum(setting.sorted_rightly(reference) for setting in settings)
    wrong = ", ".join(setting.name for setting in settings if not setting.sorted_rightly(reference)) or "none"
    ends = f"sorted rightly: {right} of {len(settings)} (collapse below {COLLAPSED} modes where R < 1, "
    ends += f"{KEPT:.0%} of the reference's {reference:.2f} where R > 1); exceptions: {wrong}"
    return f"{text_table(head, rows)}\n\n{ends}"


def draw_lasting(path, settings: list[Setting], reference: float, ceiling: float) -> None:
    """Final effective modes against final R, with intervals over seeds."""
    figure, axes = canvas(1, 1, size=(8, 5.5))
    axis = axes[0, 0]
    for setting in settings:
        colour = BLUE if "dlc" in setting.name else RED
        errors = [[[abs(value[0] - value[1])], [abs(value[2] - value[0])]] for value in (setting.R, setting.modes)]
        axis.errorbar(
            setting.R[0],
            setting.modes[0],
            xerr=errors[0],
            yerr=errors[1],
            fmt="o",
            color=colour,
            capsize=3,
            markersize=6,
        )
    axis.errorbar([], [], fmt="o", color=BLUE, label="with DLC")
    axis.errorbar([], [], fmt="o", color=RED, label="without")
    axis.axvline(1, color="black", linewidth=1.5, label="R = 1")
    axis.axhline(reference, color=GREY, linestyle=":", label="reference")
    axis.axhline(ceiling, color=GREY, linestyle="-.", label="ceiling")
    axis.set(xlabel="R at the end (law)", ylabel="effective modes at the end", xlim=(-0.15, 3), ylim=(0, 6.9))
    axis.set_title("What lasts 1,000 steps on sums: right of R = 1")
    axis.legend(loc="lower right", frameon=False)
    save(figure, path)


def draw_map(path, found) -> float:
    """The table world over mu and kappa; returns the share of cells away from R = 1 where law and table agree."""
    figure, axes = canvas(1, 1, size=(8, 5.5), grid=False)
    axis = axes[0, 0]
    image = axis.pcolormesh(MUS, KAPPAS, found.end.T, cmap="cividis", vmin=1, shading="nearest")
    figure.colorbar(image, ax=axis, label=f"effective modes at the end (simulated; {found.start:.2f} at first)")
    axis.contour(MUS, KAPPAS, found.R.T, levels=[1.0], colors="red", linewidths=2.5)
    axis.set(yscale="log", xlabel="mu (DLC)", ylabel="kappa (weight of the positive side)")
    axis.set_yticks([1, 2, 4, 8, 16, 32], ["1", "2", "4", "8", "16", "32"])
    axis.set_title("A table loses its modes below the law's line R = 1 (red)")
    save(figure, path)
    away = (found.R - 1).abs() > MARGIN
    return float((found.law == found.simulated)[away].double().mean())


def main(arguments: Sequence[str] = ()) -> None:
    if arguments:
        sys.exit("usage: python -m experiments.law")
    out = results_folder("law")
    found = law_map(MUS, KAPPAS)
    agree = draw_map(out / "map.png", found)
    cells = [
        {"mu": mu.item(), "kappa": kappa.item(), "R": found.R[i, j].item(), "modes": found.end[i, j].item()}
        for i, mu in enumerate(MUS)
        for j, kappa in enumerate(KAPPAS)
    ]
    write_csv(out / "map.csv", cells)
    with open(RESULTS / "lasting" / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    settings = settings_of(rows)
    first = at_step(rows, methods_of(rows)[0], "train")[0]
    reference = over_seeds(first, "effective_modes")["mean"]
    ceilings = json.loads((RESULTS / "lasting" / "config.json").read_text())["ceilings"]
    draw_lasting(out / "lasting.png", settings, reference, ceilings["train"]["effective_modes"])
    names = ("R", "modes", "accuracy")
    write_csv(out / "lasting.csv", [{"setting": s.name} | {n: getattr(s, n)[0] for n in names} for s in settings])
    text = told(settings, reference)
    text += f"\ntable world: law and simulation agree on {shown(agree, 4)} of the cells with |R - 1| > {MARGIN}"
    write_text(out / "table.txt", text)
    write_config(out, {"command": "python -m experiments.law", "versions": versions()})
    print(text)


if __name__ == "__main__":
    main(sys.argv[1:])
