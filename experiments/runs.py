"""Runs of the command line, side by side in one table: `python -m experiments.runs NAME ...` makes results/NAME again.

    sums          the headline comparison: the defaults
    sums_long     five times as many steps
    countdown     all seven estimators, with and without the calibrations
    dlc_switches  what the memory learns, and whether the update corrects for the sampler
    dlc_sweep     DLC's open choices, one at a time
    iac_control   IAC against steps that are simply as large
    lasting       1,000 steps on both sides of R = 1: what keeps modes for good

Each is a list of variants; a variant is a label and the flags of one `python minirlvr.py`. Its run folder (with
checkpoints, so that a stopped run goes on) is runs/NAME/LABEL; results/NAME gets config.json, metrics.csv,
summary.json, collapse.png and table.txt, in which a method's name carries its variant's label.
"""

import csv
import json
import sys
from pathlib import Path

import torch
from torch.nn.utils import parameters_to_vector

from experiments.shared import RUNS, chosen_names, results_folder, write_config, write_text
from lab import command_line, report
from lab.reference import load_reference
from lab.run import Run, train
from lab.settings import Settings, parse_method
from toy_tasks import TASKS

Variant = tuple[str, list[str]]  # label ("" for none) and flags

CALIBRATIONS = ("", "+iac", "+dlc", "+iac+dlc")
GRPO = [f"grpo{calibration}" for calibration in CALIBRATIONS]


def sums() -> list[Variant]:
    """The headline comparison: the defaults."""
    return [("", [])]


def sums_long() -> list[Variant]:
    """Five times as many steps: what lasts?"""
    return [("", ["--steps", "600", "--evaluate-every", "25"])]


def countdown() -> list[Variant]:
    """All seven estimators, with and without the calibrations, equal numbers of sampled completions, five seeds."""
    estimators = ("grpo", "dr_grpo", "dapo", "rloo", "reinforce++", "f_grpo", "unlikeliness")
    methods = [estimator + calibration for estimator in estimators for calibration in CALIBRATIONS]
    return [("", ["--task", "countdown", "--seeds", "5", "--steps", "150", "--methods", *methods])]


def dlc_switches() -> list[Variant]:
    """What the memory learns, and whether the update corrects for the sampler."""
    base = ["--methods", "grpo+iac+dlc", "--seeds", "5"]
    return [
        (f"memory on {data}, importance {importance}", [*base, "--memory-data", data, "--importance", importance])
        for importance in ("none", "exact", "clipped")
        for data in ("correct", "all")
    ]


def dlc_sweep() -> list[Variant]:
    """DLC's open choices, one at a time around the defaults."""
    base = ["--methods", "grpo+iac+dlc", "--seeds", "5"]
    changes = [("mu", "0.25"), ("mu", "1"), ("memory-width", "16"), ("memory-width", "64"), ("memory-layers", "2")]
    changes += [("memory-learning-rate", "0.001"), ("memory-learning-rate", "0.01"), ("memory-start", "reference")]
    return [("defaults", base), *((f"{flag} {value}", [*base, f"--{flag}", value]) for flag, value in changes)]


def iac_control() -> list[Variant]:
    """IAC against an estimator that simply takes steps as large: the learning rate is matched to the path's length."""
    seeds = ["--seeds", "5"]
    variants: list[Variant] = [("", [*seeds, "--methods", *GRPO, "f_grpo", "f_grpo+dlc"])]
    variants.append(("divided by G", [*seeds, "--methods", "grpo+iac", "grpo+iac+dlc", "--iac-divide"]))
    for plain, calibrated in (("grpo", "grpo+iac"), ("grpo+dlc", "grpo+iac+dlc")):
        rate = 3e-4 * path_length(calibrated) / path_length(plain)
        variants.append((f"lr {rate:.2e}", [*seeds, "--methods", plain, "--learning-rate", f"{rate:.3e}"]))
    return variants


def path_length(method: str, seeds: int = 3, settings: Settings | None = None) -> float:
    """Mean length of the parameters' path over a (default) run: the sum over steps of |change of the parameters|."""
    torch.set_num_threads(1)
    settings = settings or Settings()
    reference = load_reference(TASKS[settings.experiment.task](), settings.shape)
    runs = [Run(settings, parse_method(method), seed, reference) for seed in range(seeds)]
    mean = sum(length_of_path(run) / seeds for run in runs)
    print(f"path length of {method}: {mean:.3f}")
    return mean


def length_of_path(run: Run) -> float:
    """Train a run to its end and add up how far the parameters moved in each step."""
    points, lengths = [parameters_to_vector(run.policy.parameters()).detach().clone()], []

    def tick() -> None:
        points.append(parameters_to_vector(run.policy.parameters()).detach().clone())
        lengths.append((points[-1] - points.pop(0)).norm().item())

    train(run, tick)
    return sum(lengths)


def lasting() -> list[Variant]:
    """What keeps modes for 1,000 steps: P1's methods and positive advantages times kappa, on both sides of R = 1."""
    base = ["--seeds", "5", "--steps", "1000", "--evaluate-every", "50"]
    both = ["grpo+iac+dlc", "grpo+pos+dlc"]
    changes = [
        ("kappa", "8", ["grpo+pos", "grpo+pos+dlc"]),
        ("kappa", "4", ["grpo+pos+dlc"]),
        ("kappa", "2", ["grpo+pos+dlc"]),
        ("mu", "1", ["grpo+dlc", *both]),
        ("mu", "0.25", both),
        ("importance", "exact", ["grpo+pos+dlc"]),
        ("memory-data", "all", both),
    ]
    variants = [("", [*base, "--methods", *GRPO, "grpo+pos", "grpo+pos+dlc"])]
    return variants + [
        (f"{flag} {value}", [*base, "--methods", *names, f"--{flag}", value]) for flag, value, names in changes
    ]


NAMED = (sums, sums_long, countdown, dlc_switches, dlc_sweep, iac_control, lasting)
EXPERIMENTS = {make.__name__: make for make in NAMED}
# More curves would show nothing; the tables have them all.
PICTURED = {"countdown": GRPO, "lasting": ["grpo", "grpo+dlc", "grpo+iac+dlc", "grpo+pos", "grpo+pos+dlc"]}


def run_variant(folder: Path, flags: list[str]) -> list[dict]:
    """The rows of one variant's run folder, trained now, resumed or already there."""
    started = (folder / "config.json").exists()
    code = command_line.main(["--resume", str(folder)] if started else [*flags, "--out", str(folder)])
    if code:
        sys.exit(code)
    with open(folder / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file))


def make(name: str, variants: list[Variant], pictured: list[str] | None = None) -> None:
    """Run the variants of one experiment and write results/NAME; `pictured`: the methods that are drawn, or all."""
    rows, configs = [], {}
    for label, flags in variants:
        folder = RUNS / name / (label.replace(" ", "_") or "all")
        suffix = f" ({label})" if label else ""
        rows += [row | {"method": row["method"] + suffix} for row in run_variant(folder, flags)]
        configs[label] = json.loads((folder / "config.json").read_text()) | {"command": ["minirlvr.py", *flags]}
    out = results_folder(name)
    write_config(out, {"ceilings": next(iter(configs.values()))["ceilings"], "variants": configs})
    text = report.write(out, rows, pictured)
    write_text(out / "table.txt", text)
    print(text)


def main() -> None:
    for name in chosen_names("runs", EXPERIMENTS):
        make(name, EXPERIMENTS[name](), PICTURED.get(name))


if __name__ == "__main__":
    main()
