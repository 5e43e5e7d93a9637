"""What every toy world gives: a vocabulary, prompts, all correct answers, a verifier, pretraining data.

Text and tokens are the same thing here: one character is one token. Two ids stand apart from the characters:
padding (never sampled on purpose, never inside a text) and stop (ends a completion, printed as ".").
"""

import abc
import functools
import random

PAD, STOP = 0, 1  # token ids of their own: a padding id that is also the stop id hides the stop from training
STOP_TEXT = "."
PAD_TEXT = "_"


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

    @property
    def vocab_size(self) -> int:
        return 2 + len(self.characters)

    @property
    def prompts(self) -> tuple[str, ...]:
        return self.train + self.heldout

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
