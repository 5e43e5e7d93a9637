"""The work that the benchmarks time: a step in which everybody makes exactly the same number of tokens.

Axes as everywhere: Q prompts, G completions of one prompt, P prompt tokens, T new tokens.
"""

import random
from dataclasses import dataclass

import torch

import minirlvr
from minirlvr import Calibration, Learner, Policy, Sampling, Update, fresh_memory
from toy_tasks import Task


@dataclass(frozen=True)
class Work:
    """One step: Q prompts of P tokens, G completions of T tokens for each, on a policy of this size."""

    prompts: int = 32  # Q
    group_size: int = 8  # G
    prompt_tokens: int = 8  # P
    new_tokens: int = 8  # T, always all of them: nothing stops early
    layers: int = 2
    width: int = 64  # D
    heads: int = 4  # H
    memory_width: int = 32  # of the memory network, where DLC is on
    compile: bool = False  # minirlvr's --compile
    flat_prompts: int = 0  # prompts whose completions are all right, so that their groups teach nothing
    # The cost of a step does not depend on its size; so small a one keeps the policy, and with it the groups, as mixed
    # at the last step as at the first.
    learning_rate: float = 1e-6

    @property
    def tokens(self) -> int:
        """New tokens of a step."""
        return self.prompts * self.group_size * self.new_tokens


class Checksum(Task):
    """Right are completions whose characters add up, with the prompt's, to an even number.

    Any policy is right about half the time and cannot easily learn to be: of 8 completions all are right or all wrong
    in one group of 128, so that no one can save work on flat groups. `flat_prompts` makes some flat on purpose.

    >>> task = Checksum(Work())
    >>> task.prompts[:2], task.vocab_size
    (('00000000', '00000001'), 16)
    >>> task.verify("00000000", "11"), task.verify("00000000", "12")
    (True, False)
    """

    name = "checksum"
    characters = "0123456789abcd"
    pretraining_steps = 0

    def __init__(self, work: Work):
        self.max_new_tokens = work.new_tokens
        self.train = tuple(str(i).zfill(work.prompt_tokens) for i in range(work.prompts))
        self.heldout = ("9" * work.prompt_tokens,)
        self.flat = frozenset(self.train[: work.flat_prompts])

    def modes(self, prompt: str) -> list[str]:
        """One right completion, not all of them: nothing is evaluated here."""
        return ["00" if self.verify(prompt, "00") else "1"]

    def verify(self, prompt: str, completion: str) -> bool:
        """Is the sum of the character codes even?"""
        return prompt in self.flat or sum(map(ord, prompt + completion)) % 2 == 0

    def sample(self, prompt: str, rng: random.Random) -> str:
        return "".join(rng.choices(self.characters, k=self.max_new_tokens - 1))

    def plain_language(self, prompt: str) -> str:
        return f"Write characters whose codes add up, with those of {prompt}, to an even number."


def make_learner(work: Work, method: str, device: str = "cpu", seed: int = 0) -> Learner:
    """A learner that does this work in each `sampled_step`, from an untrained policy."""
    task, calibration = Checksum(work), Calibration(memory_width=work.memory_width)
    generator = torch.Generator().manual_seed(seed)
    policy = Policy(task.vocab_size, generator, work.layers, work.width, work.heads).to(device)
    if work.compile:
        policy.extend = torch.compile(policy.extend, dynamic=True)
    estimator, *calibrations = method.split("+")
    return Learner(
        task,
        policy,
        estimator,
        tuple(calibrations),
        Sampling(prompts=work.prompts, group_size=work.group_size, fixed_length=True),
        Update(learning_rate=work.learning_rate),
        calibration,
        seed,
        memory=fresh_memory(task.vocab_size, calibration, seed, work.heads).to(device),
    )


def step(learner: Learner) -> None:
    """One step. Looked up when called, so that a benchmark can time what is inside."""
    minirlvr.sampled_step(learner)
