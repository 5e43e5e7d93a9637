"""Reach a target with three digits, each used once: "235:11=" -> "2*3+5". Many strings, few ideas."""

import functools
import itertools
import math
import random

from toy_tasks.task import Task, draw_skewed, last_side

LENGTH = 5  # characters of an expression: three digits and two operators
Term = tuple[str, tuple[int, ...]]  # a sign and the factors of one product, sorted


def _read_prompt(prompt: str) -> tuple[str, int]:
    """
    >>> _read_prompt("235:11=")
    ('235', 11)
    """
    digits, target = prompt.removesuffix("=").split(":")
    return digits, int(target)


def _value(a: int, first: str, b: int, second: str, c: int) -> int:
    """a first b second c, with precedence spelled out by cases.

    >>> _value(5, "-", 2, "*", 3), _value(5, "-", 2, "-", 3)
    (-1, 0)
    """
    do = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}
    if second == "*" and first != "*":
        return do[first](a, b * c)
    return do[second](do[first](a, b), c)


@functools.cache
def _search(prompt: str) -> tuple[str, ...]:
    """Every order of the digits with every pair of operators: 54 candidates (fewer if digits repeat)."""
    digits, target = _read_prompt(prompt)
    orders = sorted(set(itertools.permutations(digits)))
    return tuple(
        f"{a}{first}{b}{second}{c}"
        for a, b, c in orders
        for first, second in itertools.product("+-*", repeat=2)
        if _value(int(a), first, int(b), second, int(c)) == target
    )


def _parse(text: str) -> list[Term] | None:
    """The terms of a well-formed expression, None for any other text. Bounded: looks at five characters at most.

    >>> _parse("5-3*2")
    [('+', (5,)), ('-', (2, 3))]
    >>> _parse("5--3") is None
    True
    """
    if len(text) != LENGTH:
        return None
    terms, factors, sign = [], [], "+"
    for place, character in enumerate(text):
        if place % 2 == 0:
            if character not in "0123456789":  # not str.isdigit, which also takes "²" and "٣"
                return None
            factors.append("0123456789".index(character))
        elif character in "+-":
            terms.append((sign, tuple(sorted(factors))))
            factors, sign = [], character
        elif character != "*":
            return None
    return [*terms, (sign, tuple(sorted(factors)))]


def mode_class(completion: str) -> str:
    """One name for all orders of the same sum of products: what is added first, then what is taken away.

    The name is itself one of the strings of its class. Text that is no expression is its own class.

    >>> mode_class("5+3*2"), mode_class("2-3+5"), mode_class("5-3-2")
    ('2*3+5', '2+5-3', '5-2-3')
    """
    terms = _parse(completion)
    if terms is None:
        return completion
    return "".join(sign + "*".join(map(str, factors)) for sign, factors in sorted(terms))[1:]


def _choose_prompts() -> list[str]:
    """All prompts with at least six answers in two classes, three different digits of 1..7, the target in 0..99.

    In order of the number of answers, so that every third one is a fair share.
    """
    digits = ["".join(chosen) for chosen in itertools.combinations("1234567", 3)]
    prompts = [f"{chosen}:{target}=" for chosen in digits for target in range(100)]
    rich = [p for p in prompts if len(_search(p)) >= 6 and len(set(map(mode_class, _search(p)))) >= 2]
    return sorted(rich, key=lambda prompt: (len(_search(prompt)), prompt))


PROMPTS = _choose_prompts()


class Countdown(Task):
    """36 prompts, each with 6 to 12 right answers in two or three classes; every third prompt is held out.

    The prompts are *all* of those with three different digits of 1..7 that have at least six answers and at least
    two classes (an idea and its commuted forms are one class). Some digits come with several targets (123 with
    0, 5 and 6), so the target has to be read. Sorted by number of answers, then by text, and the second of every
    three held out: both splits hold the same mix of 6, 8 and more answers.

    >>> len(Countdown.train), len(Countdown.heldout), Countdown.train[:3]
    (24, 12, ('123:0=', '145:0=', '156:0='))
    """

    name = "countdown"
    characters = "0123456789+-*:="
    max_new_tokens = 7  # "2*3+5." and one more
    pretraining_steps = 400
    train = tuple(prompt for i, prompt in enumerate(PROMPTS) if i % 3 != 1)
    heldout = tuple(PROMPTS[1::3])
    right, skew = 0.4, 0.7  # share of right answers in the pretraining data, and how uneven its modes are

    def modes(self, prompt: str) -> list[str]:
        """
        >>> Countdown().modes("235:11=")
        ['2*3+5', '3*2+5', '5+2*3', '5+3*2']
        """
        return list(_search(prompt))

    def verify(self, prompt: str, completion: str) -> bool:
        """
        >>> task = Countdown()
        >>> task.verify("235:11=", "5+3*2"), task.verify("235:11=", "5*2+3"), task.verify("235:11=", "9+1+1")
        (True, False, False)
        """
        terms = _parse(completion)
        if terms is None:
            return False
        digits, target = _read_prompt(prompt)
        used = sorted(factor for _, factors in terms for factor in factors)
        total = sum(math.prod(factors) * (1 if sign == "+" else -1) for sign, factors in terms)
        return used == sorted(map(int, digits)) and total == target

    def parse_answer(self, completion: str) -> str | None:
        """
        >>> [Countdown().parse_answer(text) for text in ("2 × 3 + 5", "2*3+5 = 11", "(2+3)*5", "2*3")]
        ['2*3+5', '2*3+5', None, None]
        """
        return last_side(r"[0-9][-+*][0-9][-+*][0-9]", completion)

    def sample(self, prompt: str, rng: random.Random) -> str:
        """A right answer, or (60 %) the digits in any order with any operators, which is right by luck now and then."""
        if rng.random() < self.right:
            return draw_skewed(self.modes(prompt), self.skew, rng, salt=prompt)
        a, b, c = rng.sample(_read_prompt(prompt)[0], 3)
        return f"{a}{rng.choice('+-*')}{b}{rng.choice('+-*')}{c}"

    def plain_language(self, prompt: str) -> str:
        digits, target = _read_prompt(prompt)
        a, b, c = digits
        return (
            f"Use each of the numbers {a}, {b} and {c} exactly once, with +, - or * between them and no brackets, "
            f"to make {target}. Answer with the expression alone, like 1+2*3."
        )

    def mode_class(self, completion: str) -> str:
        """
        >>> Countdown().mode_class("2*3+5") == Countdown().mode_class("5+3*2")
        True
        """
        return mode_class(completion)
