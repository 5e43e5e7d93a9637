"""Checkpoints: what is in one, read back only where it is whole and belongs to the run that asks."""

from collections.abc import Collection
from pathlib import Path

import torch

from lab.law import LAW
from minirlvr import Rollout
from toy_tasks import UserError
from toy_tasks.exact import MEASURES

FORMAT = ("minirlvr checkpoint", 2)  # the second number changes when older files no longer load
HEAD = ("method", "seed", "step", "split")
SPLITS = ("train", "heldout")
LOG = ("reward", "flat_groups", "cut_answers", "length", "loss", "grad_norm", "entropy", "first_ratio", "clip_fraction")
LOG += ("kl", "memory_loss")  # README's glossary says what each means; "" where a run has none


def read_checkpoint(path: Path, method: str, seed: int, measures: Collection[str] = (*MEASURES, *LAW)) -> dict:
    """What `Run.contents` gave, with rows of those measures.

    Tensors and plain values only (weights_only): a file from a stranger runs no code. Raises UserError for a file cut
    short, not ours, of another version or of another run.
    """
    try:
        state = torch.load(path, weights_only=True, map_location="cpu")
    except Exception as error:  # a damaged file may fail anywhere inside torch.load
        reason = " ".join(str(error).split())[:80]
        raise UserError(f"checkpoint {path} cannot be read ({reason}); delete it to train that run again") from None
    if not isinstance(state, dict) or state.get("format") != FORMAT[0]:
        raise UserError(f"checkpoint {path} was not written by minirlvr; take it out of the folder")
    if state.get("version") != FORMAT[1]:
        theirs = f"{state.get('version')!r:.20}"
        raise UserError(f"checkpoint {path} is of another version ({theirs}, not {FORMAT[1]}): use its own minirlvr")
    if (state.get("method"), state.get("seed")) != (method, seed):
        theirs = f"{state.get('method')!s:.40} seed {state.get('seed')!s:.20}"
        raise UserError(f"checkpoint {path} holds {theirs}; give it back its name")
    rows, step, window = state.get("rows"), state.get("step"), state.get("window")
    sound = type(step) is int and 0 <= step <= 10**6 and type(rows) is list and len(rows) > 0
    columns = {*HEAD, *measures, "completions", *LOG}
    if sound and all(type(row) is dict for row in rows) and any(set(row) != columns for row in rows):
        raise UserError(f"checkpoint {path} is of another version (its rows have other columns): use its own minirlvr")
    sound = sound and all(is_row(row, method, seed, measures) for row in rows) and is_window(window)
    sound = sound and is_waiting(state.get("waiting"))
    if not sound:
        raise UserError(f"checkpoint {path} is damaged (its rows, log or step); delete it to train that run again")
    return state


def is_row(row, method: str, seed: int, measures: Collection[str]) -> bool:
    """Is this a row of metrics.csv, of this run? What is estimated, or the law's, may be blank: not known."""
    numbers = (*measures, "completions", *LOG)
    if not isinstance(row, dict) or set(row) != {*HEAD, *numbers}:
        return False
    head = (row["method"], row["seed"]) == (method, seed) and row["split"] in SPLITS
    blank = {*LOG, *LAW, *(measures if "samples" in measures else ())}
    logged = all(type(row[name]) in (int, float) or (name in blank and row[name] == "") for name in numbers)
    return head and type(row["step"]) is int and logged


def is_window(window) -> bool:
    """Is this what a run logs between two evaluations?"""
    if not isinstance(window, dict) or not set(window) <= set(LOG):
        return False
    return all(type(values) is list and all(type(v) is float for v in values) for values in window.values())


def is_waiting(waiting) -> bool:
    """Is this what DAPO keeps of groups that wait for a full batch?"""
    names = {"batch", "rewards"}
    if type(waiting) is not list or not all(type(held) is dict and set(held) == names for held in waiting):
        return False
    batches = [held["batch"] for held in waiting]
    if not all(type(batch) is dict and set(batch) == set(Rollout._fields) for batch in batches):
        return False
    tensors = [tensor for held in waiting for tensor in (held["rewards"], *held["batch"].values())]
    return all(isinstance(tensor, torch.Tensor) for tensor in tensors)


def check_moments(optimizer: torch.optim.Optimizer) -> None:
    """Refuse moments of another shape than their parameters, which the fused kernel would read past. ValueError."""
    for parameter in optimizer.param_groups[0]["params"]:
        state = optimizer.state.get(parameter, {})
        if any(state[name].shape != parameter.shape for name in ("exp_avg", "exp_avg_sq") if name in state):
            raise ValueError("the optimizer's moments do not fit its parameters")
