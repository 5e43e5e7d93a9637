"""The reference policy of a toy task: pretrained once, then kept on disk under a name that says what made it."""

import hashlib
import json
import os
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch

from lab.files import save_tensors
from lab.settings import Shape
from minirlvr import Policy
from toy_tasks import Task, UserError, pretrain


def new_policy(task: Task, shape: Shape) -> Policy:
    """An untrained policy for a task, always the same."""
    return Policy(task.vocab_size, torch.Generator().manual_seed(0), shape.layers, shape.width, shape.heads)


def make_reference(task: Task, shape: Shape, steps: int | None = None) -> Policy:
    """Pretrain a fresh policy (`task.pretraining_steps`, or `steps` of such a run); the same on any device."""
    with one_thread():
        policy = new_policy(task, shape)
        pretrain(policy, task, steps)
    return policy


@contextmanager
def one_thread():
    """Sums of floats do not depend on how many threads add them up."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def fingerprint(task: Task, shape: Shape) -> str:
    """A name for all that makes a reference, and for nothing else: the weights after two steps of its recipe.

    They depend on the network, the optimiser, the data and how they are written as tokens, and on this machine's
    arithmetic; not on a comment, nor on a function's name. What the two steps do not reach stands beside them.
    """
    weights = make_reference(task, shape, steps=2).state_dict().values()
    digest = hashlib.sha256(b"".join(weight.numpy().tobytes() for weight in weights))
    numbers = {}  # of the class and those it comes from, such as how skewed its data is
    for part in reversed(type(task).__mro__[:-1]):  # but for `object`
        told = {name: value for name, value in vars(part).items() if not name.startswith("__")}
        numbers |= {name: value for name, value in told.items() if isinstance(value, int | float | str | tuple)}
    prompts = task.encode_prompts(task.prompts).tokens.tolist()
    recipe = [prompts, task.pretraining_steps, asdict(shape), numbers, vars(task)]
    digest.update(json.dumps(recipe, default=str, sort_keys=True).encode())
    return digest.hexdigest()[:12]


def cache_folder() -> Path:
    """MINIRLVR_CACHE if set; `.cache` of a checkout; for an installed package the user's own cache."""
    if os.environ.get("MINIRLVR_CACHE"):
        return Path(os.environ["MINIRLVR_CACHE"])
    root = Path(__file__).parent.parent
    return root / ".cache" if (root / "pyproject.toml").exists() else Path.home() / ".cache" / "minirlvr"


def load_reference(task: Task, shape: Shape = Shape()) -> Policy:  # noqa: B008 - frozen, so one for all calls
    """The reference from the cache, or pretrained now and put there. Raises UserError where it cannot be kept."""
    path = cache_folder() / f"reference-{task.name}-{fingerprint(task, shape)}.pt"
    policy = new_policy(task, shape)
    try:
        policy.load_state_dict(torch.load(path, weights_only=True))
        if all(weight.isfinite().all() for weight in policy.parameters()):
            return policy
    except Exception:  # not there yet, or damaged, which may fail anywhere inside torch.load
        pass
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        policy = make_reference(task, shape)
        save_tensors(policy.state_dict(), path)
    except (OSError, UserError) as error:
        reason = f"the reference cannot be kept in {path.parent} ({error})"
        raise UserError(f"{reason}; name a folder in the environment variable MINIRLVR_CACHE") from None
    return policy
