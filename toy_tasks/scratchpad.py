"""Add three digits, at once or in steps: "3+4+5=" -> "12" or "07+5=12". Right answers of two lengths: P2's world.

The reference mostly answers at once, and then mostly forgets a number: "07", which is wrong and short. Step by step it
is mostly right: "07+5=12" begins with the same "07" and goes on. So what is likely is short and wrong, and what is
right is longer: a policy that only makes the likely likelier stops too early (P2, arXiv 2604.16259; the world is ours).
"""

import itertools
import random
import re

from toy_tasks.task import Task, statements

DIGITS = "0123456789"


def _read_number(text: str) -> int | None:
    """A number of ASCII digits, None for any other text. Bounded by its callers to two characters.

    >>> _read_number("07"), _read_number("²"), _read_number("")
    (7, None, None)
    """
    if not text or any(character not in DIGITS for character in text):  # not str.isdigit, which also takes "²" and "٣"
        return None
    return int(text)


def _read_prompt(prompt: str) -> list[int]:
    """
    >>> _read_prompt("3+4+5=")
    [3, 4, 5]
    """
    return [int(number) for number in prompt.removesuffix("=").split("+")]


def _parse(text: str) -> tuple[int, ...] | None:
    """(total,) of "12", (partial sum, added, total) of "07+5=12", None for any other text.

    >>> _parse("12"), _parse("07+5=12"), _parse("7+5=12")
    ((12,), (7, 5, 12), None)
    """
    if len(text) == 2:
        parts = (text,)
    elif len(text) == 7 and text[2] + text[4] == "+=":
        parts = (text[:2], text[3], text[5:])
    else:
        return None
    numbers = tuple(_read_number(part) for part in parts)
    return None if None in numbers else numbers


def _shares(skew: float) -> list[float]:
    """How often each of the three numbers, from the last to the first, is the one: 1, skew, skew^2, normalised.

    >>> [round(share, 3) for share in _shares(0.5)]
    [0.571, 0.286, 0.143]
    """
    weights = [skew**k for k in range(3)]
    return [weight / sum(weights) for weight in weights]


PROMPTS = [f"{a}+{b}+{c}=" for a, b, c in itertools.combinations(DIGITS[1:9], 3)]


class Scratchpad(Task):
    """56 prompts, each with four right answers: the sum, and three ways to get there in two steps.

    The prompts are *all* sets of three different digits of 1..8, in rising order; without a 0, forgetting a number is
    always wrong. The second of every three is held out.

    The dials say how the pretraining data, and so the reference, answers (the defaults are ours, after a pilot):

    - direct: how often at once, without a step.
    - forget: how often such an answer leaves one number out.
    - step_error: how often each of the two additions of a step-by-step answer is off by one, up or down alike. A wrong
      first sum is carried on, so the total is then wrong too, unless a second error happens to mend it.
    - order_skew, forget_skew: how evenly the third number, and the forgotten one, are chosen: the last of the prompt
      has weight 1, the middle one `skew`, the first `skew`^2.

    So it is right direct (1 - forget) + (1 - direct) (1 - step_error)^2 of the time: .391 with the defaults, .37 once a
    reference has learned it with a few errors of its own.

    >>> len(Scratchpad.train), len(Scratchpad.heldout), Scratchpad.train[:3]
    (37, 19, ('1+2+3=', '1+2+5=', '1+2+6='))
    >>> Scratchpad(direct=1.5)
    Traceback (most recent call last):
    ValueError: direct must be from 0 to 1, got 1.5
    """

    name = "scratchpad"
    characters = "0123456789+="
    max_new_tokens = 9  # "07+5=12." and one more
    pretraining_steps = 400
    train = tuple(prompt for i, prompt in enumerate(PROMPTS) if i % 3 != 1)
    heldout = tuple(PROMPTS[1::3])

    def __init__(
        self,
        direct: float = 0.6,
        forget: float = 0.95,
        step_error: float = 0.05,
        order_skew: float = 0.7,
        forget_skew: float = 0.7,
    ):
        self.direct, self.forget, self.step_error = direct, forget, step_error
        self.order_skew, self.forget_skew = order_skew, forget_skew
        for dial, value in vars(self).items():
            if not 0 <= value <= 1:
                raise ValueError(f"{dial} must be from 0 to 1, got {value!r}")

    def modes(self, prompt: str) -> list[str]:
        """
        >>> Scratchpad().modes("3+4+5=")
        ['12', '07+5=12', '08+4=12', '09+3=12']
        """
        steps = {f"{a + b:02d}+{c}={a + b + c:02d}" for a, b, c in itertools.permutations(_read_prompt(prompt))}
        return [f"{sum(_read_prompt(prompt)):02d}", *sorted(steps)]

    def verify(self, prompt: str, completion: str) -> bool:
        """
        >>> task = Scratchpad()
        >>> [task.verify("3+4+5=", text) for text in ("12", "08+4=12", "07", "12+0=12", "08+5=12", "07+5=13")]
        [True, True, False, False, False, False]
        """
        numbers, said = _read_prompt(prompt), _parse(completion)
        if said is None or said[-1] != sum(numbers):
            return False
        if len(said) == 1:
            return True
        partial, added, total = said
        if added not in numbers:
            return False
        numbers.remove(added)
        return partial == sum(numbers) and partial + added == total

    def parse_answer(self, completion: str) -> str | None:
        """The last step "sum + number = total", its sums in two digits; where that is no step, a two-digit total.

        >>> [Scratchpad().parse_answer(text) for text in ("3+4 = 7, then 7 + 5 = 12.", "3+4+5=12", "It is 12", "7")]
        ['07+5=12', '12', '12', None]
        """
        for statement in reversed(statements(completion)):
            sides = statement.strip("()").split("=")
            step = re.fullmatch(r"([0-9]{1,2})\+([0-9])=([0-9]{1,2})", "=".join(sides[-2:]))
            if step:
                partial, added, total = step.groups()
                return f"{partial:0>2}+{added}={total:0>2}"
            totals = [side for side in sides if re.fullmatch("[0-9]{2}", side)]
            if totals:
                return totals[-1]
        return None

    def sample(self, prompt: str, rng: random.Random) -> str:
        """At once or step by step, with the errors that the dials ask for."""
        numbers = _read_prompt(prompt)[::-1]
        if rng.random() < self.direct:
            forgets = rng.random() < self.forget
            return f"{sum(numbers) - forgets * rng.choices(numbers, _shares(self.forget_skew))[0]:02d}"
        added = rng.choices(numbers, _shares(self.order_skew))[0]
        partial = sum(numbers) - added + self._slip(rng)
        return f"{partial:02d}+{added}={partial + added + self._slip(rng):02d}"

    def _slip(self, rng: random.Random) -> int:
        """The error of one addition: 0, or 1 or -1 with chance step_error."""
        return rng.choice((-1, 1)) if rng.random() < self.step_error else 0

    def sampling_probs(self, prompt: str) -> dict[str, float]:
        """The probability of every completion that `sample` can give; they sum to 1. Derived here.

        >>> probs = Scratchpad().sampling_probs("3+4+5=")
        >>> [round(probs[text], 4) for text in ("07", "12", "07+5=12", "08+5=13")]
        [0.2603, 0.03, 0.1648, 0.0043]
        """
        numbers, probs = _read_prompt(prompt)[::-1], {}

        def add(text: str, probability: float) -> None:
            if probability:
                probs[text] = probs.get(text, 0.0) + probability

        add(f"{sum(numbers):02d}", self.direct * (1 - self.forget))
        for forgotten, share in zip(numbers, _shares(self.forget_skew), strict=True):
            add(f"{sum(numbers) - forgotten:02d}", self.direct * self.forget * share)
        slips = ((0, 1 - self.step_error), (-1, self.step_error / 2), (1, self.step_error / 2))
        for added, share in zip(numbers, _shares(self.order_skew), strict=True):
            for (first, p), (second, q) in itertools.product(slips, repeat=2):
                partial = sum(numbers) - added + first
                add(f"{partial:02d}+{added}={partial + added + second:02d}", (1 - self.direct) * share * p * q)
        return probs

    def plain_language(self, prompt: str) -> str:
        a, b, c = _read_prompt(prompt)
        return (
            f"Add {a}, {b} and {c}. Answer with the total alone, in two digits, like 07; or step by step, with the sum "
            "of two of the numbers, the third number and the total, like 03+4=07. Write nothing else."
        )

    def mode_class(self, completion: str) -> str:
        """The total that is stated, so that a vote counts answers, not ways to write them; other text is its own class.

        >>> task = Scratchpad()
        >>> task.mode_class("12"), task.mode_class("07+5=12"), task.mode_class("07+")
        ('12', '12', '07+')
        """
        said = _parse(completion)
        return completion if said is None else f"{said[-1]:02d}"
