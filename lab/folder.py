"""The run folder: what config.json says of a run, written once and read again by --resume."""

import dataclasses
import hashlib
import json
import math
import platform
import shlex
import sys
import time
import typing
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Literal

import torch

import minirlvr
from lab.files import replace_file
from lab.settings import Files, Method, Settings, check
from minirlvr import ESTIMATORS, resolve_update
from toy_tasks import Task, UserError

INFINITE = "infinite"  # what stands for infinity in config.json


def read_settings(folder: Path) -> Settings:
    """The settings in a run folder's config.json. Raises UserError where there are none that this version knows."""
    try:
        saved = json.loads((folder / "config.json").read_text())["settings"]
        groups = {part.name: read_group(saved[part.name], part.type) for part in dataclasses.fields(Settings)}
        settings = Settings(**groups)
        check(settings)
    except OSError:
        raise UserError(f"--resume {folder}: no config.json can be read there; name a folder that a run made") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = " ".join(str(error).split())[:120]
        raise UserError(f"--resume {folder}: its config.json is damaged or of another version ({reason})") from None
    return settings


def read_group(saved: dict, group: type):
    """One group of settings from JSON, every value of its declared type. Raises ValueError or TypeError."""
    hints = typing.get_type_hints(group)
    if not isinstance(saved, dict) or set(saved) != set(hints):
        raise ValueError(f"{group.__name__} has other fields")
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in saved.items()}
    values |= {name: math.inf for name, value in values.items() if value == INFINITE and hints[name] is float}
    for name, value in values.items():
        if not fits(value, hints[name]):
            raise ValueError(f"{name} is {value!r:.40}")
    return group(**values)


def fits(value, hint) -> bool:
    """Is a value from JSON of a declared type?

    >>> fits(1, float), fits(True, int), fits("k4", Literal["k1", "k2"]), fits(None, float | None)
    (True, False, False, True)
    """
    origin, options = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return value in options
    if origin is tuple:
        return isinstance(value, tuple) and all(isinstance(item, str) for item in value)
    if options:  # float | None
        return any(fits(value, option) for option in options)
    return type(value) in ((int, float) if hint is float else (hint,))


def open_folder(settings: Settings, methods: list[Method], device: str, task: Task, extras: Sequence[str] = ()) -> Path:
    """Make the run folder, or open the one to resume; either way config.json then says what runs.

    `extras` are the packages whose versions it names besides PyTorch's.
    """
    files = settings.files
    folder = Path(files.resume or files.out or Path("runs") / f"{task.name}-{time.strftime('%Y%m%d-%H%M%S')}")
    versions = {"minirlvr": minirlvr.__version__, "python": platform.python_version(), "torch": torch.__version__}
    installed = {part.name for part in metadata.distributions()} if extras else set()
    versions |= {name: metadata.version(name) for name in sorted(installed.intersection(extras))}
    now = {
        "device": device,
        "versions": versions | {"platform": platform.platform()},
        "command": shlex.join(["python", *sys.argv]),
    }
    config = {
        "settings": in_json(dataclasses.asdict(dataclasses.replace(settings, files=Files()))),
        "methods": {m.name: resolve_update(settings.update, ESTIMATORS[m.estimator]) for m in methods},
        "ceilings": ceilings(task),
        "dataset_sha256": fingerprint(settings.language_model.dataset),
    }
    try:
        if files.resume:  # what made the folder stays; what went on with it is added
            saved = json.loads((folder / "config.json").read_text())
            if saved.get("dataset_sha256") != config["dataset_sha256"]:
                raise UserError(
                    f"--resume {folder}: its dataset {settings.language_model.dataset!r:.80} has changed since"
                )
            before = saved.get("resumed", [])
            config = saved | config | {"resumed": [*(before if isinstance(before, list) else []), now]}
        elif folder.exists() and (not folder.is_dir() or any(path.name != "config.json" for path in folder.iterdir())):
            raise UserError(f"--out {folder} exists and is not empty: name a new one, or go on with --resume {folder}")
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(now | config, indent=2, default=dataclasses.asdict) + "\n"
        replace_file(folder / "config.json", text)
    except OSError as error:
        flag = "--resume" if files.resume else "--out"
        raise UserError(f"{flag} {folder!s:.200} cannot be written: {error.strerror}") from None
    return folder


def in_json(value):
    """A value of settings as JSON can hold it: it has no number for infinity.

    >>> in_json({"calibration": {"kappa": math.inf, "mu": 0.5}})
    {'calibration': {'kappa': 'infinite', 'mu': 0.5}}
    """
    if isinstance(value, dict):
        return {name: in_json(inner) for name, inner in value.items()}
    return INFINITE if value == math.inf else value


def fingerprint(dataset: str) -> str | None:
    """SHA-256 of a dataset's file; None without one."""
    return hashlib.sha256(Path(dataset).read_bytes()).hexdigest() if dataset else None


def ceilings(task: Task) -> dict[str, dict[str, float]]:
    """The best that can be reached: split -> measure -> value; all modes of a prompt equally likely."""
    return {
        split: {"pass@1": 1.0, "effective_modes": sum(len(task.modes(prompt)) for prompt in prompts) / len(prompts)}
        for split, prompts in (("train", task.train), ("heldout", task.heldout))
    }
