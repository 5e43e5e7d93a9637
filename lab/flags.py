"""The flags of the command line: read into settings, and what is wrong with them said in one line."""

import dataclasses
import itertools
import sys
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path

from lab.folder import read_settings
from lab.settings import Experiment, Files, Settings
from minirlvr import CALIBRATIONS, ESTIMATORS, Sampling, Update
from toy_tasks import TASKS, UserError
from toy_tasks.sharpening import REGIMES

FREE_ON_RESUME = ("steps", "jobs", "device")
DESCRIPTION = f"""Reinforcement learning with verifiable rewards, measured exactly.

    python minirlvr.py                         the headline comparison, in under a minute
    python minirlvr.py --help                  every setting
    python minirlvr.py --resume runs/NAME      go on after Ctrl-C

Tasks: {", ".join(TASKS)}.
Methods: an estimator ({", ".join(name for name, row in ESTIMATORS.items() if row.samples)}) or one of P2's rewards
({", ".join(REGIMES[1:])}: with RLOO; ESTIMATOR@REGIME takes another), with calibrations behind it in any order
({", ".join(f"+{name}" for name in CALIBRATIONS)}); or exact, the infinite batch.

Sources: P1 is arXiv 2601.15609 (over-sharpening, IAC, DLC), P2 is arXiv 2604.16259 (sharpening against task reward)."""


def parse_settings(argv: list[str] | None) -> Settings:
    """Settings from the command line; with --resume, those of the folder, which only a few flags may change."""
    settings = read_flags(argv, default_settings(sys.argv[1:] if argv is None else argv))
    folder = settings.files.resume
    if not folder:
        return settings
    saved = read_settings(Path(folder))
    settings = read_flags(argv, saved)
    given = {name: getattr(settings.experiment, name) for name in FREE_ON_RESUME}
    allowed = dataclasses.replace(
        saved, experiment=dataclasses.replace(saved.experiment, **given), files=Files(resume=folder)
    )
    if settings != allowed:
        flags = ", ".join(f"--{name}" for name in FREE_ON_RESUME)
        raise UserError(f"--resume {folder} goes on with its own settings: beside it only {flags} may be given")
    return settings


def default_settings(argv: list[str]) -> Settings:
    """The defaults: a language model is a thousand times larger than the toy, and learns in smaller steps.

    >>> default_settings(["--policy", "hf:FOLDER"]).update.learning_rate
    1e-05
    """
    values = {flag: value for flag, _, value in (arg.partition("=") for arg in argv)}
    values |= {flag: value for flag, value in itertools.pairwise(argv) if flag.startswith("--")}
    if not values.get("--policy", "").startswith("hf:"):
        return Settings()
    adapters = values.get("--lora-rank", values.get("--lora_rank", "0")) != "0"
    return Settings(
        experiment=Experiment(methods=("grpo", "grpo+iac+dlc"), seeds=1, steps=50),
        sampling=Sampling(prompts=8),
        update=Update(learning_rate=1e-4 if adapters else 1e-5),
    )


def read_flags(argv: list[str] | None, default: Settings) -> Settings:
    """tyro's reading of the flags; what it prints of a mistake is folded into one line. Raises UserError."""
    import tyro

    printed = StringIO()
    try:
        with redirect_stderr(printed):
            return tyro.cli(
                tyro.conf.OmitArgPrefixes[Settings],
                args=argv,
                default=default,
                prog="minirlvr.py",
                description=DESCRIPTION,
            )
    except SystemExit as stopped:
        if not stopped.code:  # --help
            raise
        lines = [line.strip("│ \t") for line in printed.getvalue().splitlines()[1:]]  # without the title
        lines = lines[1:] if lines and is_rule(lines[0]) else lines  # old terminals get one below the title
        end = next((i for i, line in enumerate(lines) if is_rule(line)), len(lines))
        raise UserError(f"{' '.join(lines[:end])} (--help lists every flag)") from None


def is_rule(line: str) -> bool:
    """Is this one of the lines that tyro draws between parts of a message?"""
    return set(line) <= set("─╯╰-")
