"""What every toy world gives: a vocabulary, prompts, all correct answers, a verifier, pretraining data.

Text and tokens are the same thing here: one character is one token. Two ids stand apart from the characters:
padding (never sampled on purpose, never inside a text) and stop (ends a completion, printed as ".").
"""

import abc
import functools
import random
import re
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

PAD, STOP = 0, 1  # token ids of their own: a padding id that is also the stop id hides the stop from training
STOP_TEXT = "."
PAD_TEXT = "_"
READ_LAST = 2000  # characters of a talkative model's text that are searched for its answer
SIGNS = {"×": "*", "·": "*", "⋅": "*", "−": "-", "÷": "/", r"\times": "*", r"\cdot": "*"}


class UserError(ValueError):
    """A mistake of the user's: printed as one line, exit code 2."""


class Padded(NamedTuple):
    """Texts of different lengths in one tensor, padded at the left, and what of it is text."""

    tokens: Tensor  # (Q, P)
    real: Tensor  # (Q, P) bool: text, not padding

    @classmethod
    def of(cls, tokens: Tensor) -> "Padded":
        """Texts (Q, P) of one length, without padding."""
        return cls(tokens, torch.ones_like(tokens, dtype=torch.bool))

    def pick(self, rows) -> "Padded":
        """The texts `rows` (a slice, indices or a (Q,) bool)."""
        return Padded(self.tokens[rows], self.real[rows])

    def to(self, device) -> "Padded":
        return Padded(self.tokens.to(device), self.real.to(device))


def left_pad(texts: Sequence[Sequence[int]], width: int = 0) -> Padded:
    """Token ids of texts as one batch, as wide as the longest of them and at least `width`.

    >>> left_pad([[11, 13], [3, 4, 13]])
    Padded(tokens=tensor([[ 0, 11, 13],
            [ 3,  4, 13]]), real=tensor([[False,  True,  True],
            [ True,  True,  True]]))
    """
    width = max([width, *map(len, texts)])
    tokens = torch.tensor([[PAD] * (width - len(text)) + list(text) for text in texts], dtype=torch.long)
    real = torch.tensor([[False] * (width - len(text)) + [True] * len(text) for text in texts], dtype=torch.bool)
    return Padded(tokens.view(len(texts), width), real.view(len(texts), width))


def check_rewards(rewards: Tensor, prompts: Sequence[str]) -> None:
    """Refuse rewards (Q, G) that are NaN or infinite, before they reach a mean; names the prompt.

    >>> check_rewards(torch.tensor([[1.0, float("nan")]]), ["12="])
    Traceback (most recent call last):
    ValueError: prompt '12=' has the rewards [1.0, nan]; a reward must be a finite number
    """
    for prompt, row in zip(prompts, rewards, strict=True):
        if not row.isfinite().all():
            raise ValueError(f"prompt {prompt!r} has the rewards {row.tolist()}; a reward must be a finite number")


class Task(abc.ABC):
    """A world whose correct completions can be listed. Completions are texts *without* the final stop.

    A task that says more than one string is the same answer overrides `mode_class`.
    """

    name: str
    characters: str  # token ids 2, 3, ... print as these
    max_new_tokens: int  # completions are cut here: the longest correct one, its stop, and a little slack
    pretraining_steps: int  # batches of 256 that give the reference its 30-60 % and every mode
    train: tuple[str, ...]  # prompts that RL trains on
    heldout: tuple[str, ...]  # prompts the reference knows just as well, and RL never sees
    pad: int = PAD  # fills completions up behind their stop
    stops: tuple[int, ...] = (STOP,)  # any of these ends a completion

    @abc.abstractmethod
    def modes(self, prompt: str) -> list[str]:
        """Every correct completion of `prompt`, found by search."""

    @abc.abstractmethod
    def verify(self, prompt: str, completion: str) -> bool:
        """Is `completion` right? Decided by arithmetic, never by `modes`; any text is allowed."""

    @abc.abstractmethod
    def sample(self, prompt: str, rng: random.Random) -> str:
        """One completion as the pretraining data holds it: skewed over modes, and often wrong."""

    @abc.abstractmethod
    def plain_language(self, prompt: str) -> str:
        """The same prompt for a model that speaks English."""

    def mode_class(self, completion: str) -> str:
        """A name shared by all correct completions that count as the same answer."""
        return completion

    def parse_answer(self, completion: str) -> str | None:
        """The answer that a talkative model's text states last, in the form `verify` reads; None where it states none.

        Here the stripped text. The toy tasks look for the last candidate in it: a list of all answers is no answer.
        """
        return completion.strip()

    @property
    def vocab_size(self) -> int:
        return 2 + len(self.characters)

    @property
    def prompts(self) -> tuple[str, ...]:
        return self.train + self.heldout

    def encode_prompt(self, prompt: str) -> list[int]:
        """Token ids of a prompt, as the policy reads it."""
        return self.encode(prompt)

    def prompt_width(self, prompts: Sequence[str]) -> int:
        """Tokens that a batch of `prompts` is padded to: the longest of the task, so that every batch has one width."""
        return max(map(len, self.prompts))

    def rewards(self, prompts: Sequence[str], completions: list, lengths: list) -> Tensor:
        """1 for each right completion, else 0: (Q, G). Token ids (Q, G, T) as lists, of which `lengths` (Q, G) count.

        Raises ValueError for a verifier whose answer is not a finite number.
        >>> from toy_tasks import Sums
        >>> Sums().rewards(["9="], [[[3, 12, 10, 1], [3, 12, 9, 1]]], [[4, 4]])
        tensor([[1., 0.]])
        """
        rows = []
        for prompt, group, counts in zip(prompts, completions, lengths, strict=True):
            texts = [self.decode(ids[:count]) for ids, count in zip(group, counts, strict=True)]
            rows.append([float(self.verify(prompt, text)) for text in texts])
        rewards = torch.tensor(rows)
        check_rewards(rewards, prompts)
        return rewards

    def encode_prompts(self, prompts: Sequence[str]) -> Padded:
        """A batch of prompts, (Q, P), P being the width that the task gives its batches.

        >>> from toy_tasks import Sums
        >>> Sums().encode_prompts(["9=", "12="]).tokens.tolist()
        [[0, 11, 13], [3, 4, 13]]
        """
        return left_pad([self.encode_prompt(prompt) for prompt in prompts], self.prompt_width(prompts))

    def encode(self, text: str) -> list[int]:
        """Token ids of a text; "." is the stop. Raises ValueError for a character outside the vocabulary.

        >>> from toy_tasks import Sums
        >>> Sums().encode("1+2.")
        [3, 12, 4, 1]
        """
        ids = {STOP_TEXT: STOP} | {c: i + 2 for i, c in enumerate(self.characters)}
        unknown = next((c for c in text if c not in ids), None)
        if unknown is not None:
            raise ValueError(f"character {unknown!r} is not in the vocabulary of {self.name}: {self.characters}")
        return [ids[c] for c in text]

    def decode(self, ids: list[int]) -> str:
        """Text up to the first stop (not included). Padding prints as "_", which no verifier accepts.

        >>> from toy_tasks import Sums
        >>> Sums().decode([3, 12, 4, 1, 0, 0])
        '1+2'
        """
        ids = list(ids)
        ids = ids[: ids.index(STOP)] if STOP in ids else ids
        return "".join(PAD_TEXT if i == PAD else self.characters[i - 2] for i in ids)


def statements(text: str) -> list[str]:
    """The words, numbers and formulas in the last 2,000 characters, in order, each written without spaces and in ASCII.

    A formula is one piece from end to end, so "15+7" and "1.5+7" do not hold a "5+7". Every pattern is linear.

    >>> statements("Sure! **12 = 5 + 7.** Or 2 × (3 + 2)")
    ['Sure', '12=5+7', 'Or', '2*(3+2)']
    """
    text = text if len(text) <= READ_LAST else "x" + text[-READ_LAST:]  # the x spoils a number that is cut in two
    for written, sign in SIGNS.items():
        text = text.replace(written, sign)
    text = re.sub(r"[^\S\n]+", " ", text)
    text = re.sub(r"(?<![0-9])\*\*(?=\S)|(?<=\S)\*\*(?![0-9])", "", text)  # bold in Markdown
    text = re.sub(r"(?<=[0-9]) ?[xX] ?(?=[0-9])", "*", text)
    text = re.sub(r"(?<=\() | (?=\))", "", text)
    text = re.sub(r"(?<=[0-9)]) ?([-+*/^=]+) ?(?=[0-9(])", r"\1", text)
    return [found.strip(".,") for found in re.findall(r"[\w.,+\-*/^=()]+", text)]


def last_side(pattern: str, text: str) -> str | None:
    """The last side of an equation in `text`, or formula on its own, that is all `pattern`; None if there is none.

    >>> last_side("[0-9][+][0-9]", "1+2=3, so 12 = 5 + 7."), last_side("[0-9][+][0-9]", "15+7")
    ('5+7', None)
    """
    sides = [side.strip(".,()") for statement in statements(text) for side in statement.split("=")]
    return next((side for side in reversed(sides) if re.fullmatch(pattern, side)), None)


@functools.cache
def private_order(modes: tuple[str, ...], salt: str) -> list[str]:
    """The modes in an order that depends on them and on `salt` (the prompt) alone.

    >>> sorted(private_order(("1+2", "2+1"), "3="))
    ['1+2', '2+1']
    """
    return sorted(modes, key=lambda mode: random.Random(f"{salt}{mode}").random())


def draw_skewed(modes: list[str], skew: float, rng: random.Random, salt: str) -> str:
    """One of `modes`: the k-th of their private order has weight skew^k, skew in (0, 1]. Raises IndexError if empty.

    >>> draw_skewed(["1+2"], 0.5, random.Random(0), "3=")
    '1+2'
    """
    order = private_order(tuple(modes), salt)
    return rng.choices(order, [skew**k for k in range(len(order))])[0]
