"""What the tests share: policies and a task whose answers are known, a tiny reference, short settings."""

import concurrent.futures
import dataclasses
import itertools
import os
import random

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, and for the processes that tests start

import pytest
import torch
from torch import nn

from lab.reference import make_reference
from lab.settings import Settings, Shape
from minirlvr import Policy
from toy_tasks import STOP, TASKS, Task
from toy_tasks.task import draw_skewed

torch.set_num_threads(1)

VOCAB = 14  # of `sums`


class ConstantPolicy(nn.Module):
    """The same logits whatever was read: (V,), or (T, V) with a row for each token of a completion."""

    def __init__(self, logits):
        super().__init__()
        self.logits = nn.Parameter(torch.as_tensor(logits, dtype=torch.float32).clone())

    def at(self, t: int):
        return self.logits if self.logits.ndim == 1 else self.logits[t]

    def forward(self, texts):
        assert self.logits.ndim == 1, "where a completion begins is not known here"
        return self.logits.expand(*texts.tokens.shape, -1)

    def start(self, prompts, group_size: int, length: int = 1):
        return self.at(0).expand(len(prompts.tokens), group_size, -1), 1

    def step(self, tokens, cache: int):
        return self.at(cache).expand(*tokens.shape, -1), cache + 1

    def completion_logits(self, prompts, completions):
        Q, G, T = completions.shape
        return torch.stack([self.at(t) for t in range(T)]).expand(Q, G, T, -1)


class Pairs(Task):
    """ "a=" -> any two letters of a..d with an a among them: seven modes of sixteen, five characters in all."""

    name = "pairs"
    characters = "abcd="
    max_new_tokens = 4
    pretraining_steps = 40
    train = ("a=", "b=", "c=")
    heldout = ("d=",)

    def modes(self, prompt):
        return ["".join(pair) for pair in itertools.product("abcd", repeat=2) if prompt[0] in pair]

    def verify(self, prompt, completion):
        return len(completion) == 2 and set(completion) <= set("abcd") and prompt[0] in completion

    def sample(self, prompt, rng: random.Random):
        if rng.random() < 0.5:
            return draw_skewed(self.modes(prompt), 0.8, rng, salt=prompt)
        return "".join(rng.choices("abcd", k=2))

    def plain_language(self, prompt):
        return f"Write two letters from a to d, one of them {prompt[0]}."


class InThisProcess(concurrent.futures.Executor):
    """Stands in for the pool of worker processes: the jobs run here, one after the other."""

    def __init__(self, max_workers, context, initializer, initargs):
        initializer(*initargs)

    def submit(self, function, *args):
        future = concurrent.futures.Future()
        try:
            future.set_result(function(*args))
        except Exception as error:
            future.set_exception(error)
        return future


def tiny_policy(vocab_size: int = VOCAB, seed: int = 0, layers: int = 2) -> Policy:
    """An untrained policy of a few thousand parameters."""
    return Policy(vocab_size, generator(seed), layers, width=16, heads=2)


def step_by_step(policy, prompts, completions):
    """(Q, G, T, V): as sampling reads them, one token of each completion at a time; prompts are Padded (Q, P)."""
    _, G, T = completions.shape
    logits, cache = policy.start(prompts, G, T - 1)
    found = [logits]
    for t in range(T - 1):
        logits, cache = policy.step(completions[..., t], cache)
        found.append(logits)
    return torch.stack(found, 2)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


SHORT = {"task": "pairs", "steps": 2, "evaluate_every": 2, "prompts": 3, "group_size": 8, "learning_rate": 3e-3}
SHORT |= {"layers": 1, "width": 16, "heads": 2, "memory_width": 16}


def short_settings(**changed) -> Settings:
    """Settings for a run of milliseconds on `pairs`; `changed` by field name, whatever group it is in."""
    left, groups = SHORT | changed, {}
    for part in dataclasses.fields(Settings):
        names = [field.name for field in dataclasses.fields(part.type) if field.name in left]
        groups[part.name] = part.type(**{name: left.pop(name) for name in names})
    assert not left, f"no such settings: {sorted(left)}"
    return Settings(**groups)


def up_to_stop(ids: list[int]) -> list[int]:
    """A completion up to and including its first stop."""
    return ids[: ids.index(STOP) + 1] if STOP in ids else ids


@pytest.fixture(scope="session")
def pairs_reference() -> Policy:
    """A reference for `pairs`, right about half of the time."""
    return make_reference(Pairs(), Shape(layers=1, width=16, heads=2))


@pytest.fixture
def pairs(monkeypatch):
    """`pairs` among the tasks, for one test."""
    monkeypatch.setitem(TASKS, "pairs", Pairs)
    return Pairs()
