"""Answers in a talkative text: read out, and compared with the right one.

What a model writes is hostile: nothing is evaluated, and every length and number is bounded.
"""

import functools
import logging
import math
import re
import threading
from fractions import Fraction

from toy_tasks.task import READ_LAST

MOST_DIGITS = 40  # a number with more is no answer
MOST_COMPARED = 200  # characters of an answer that is not a number

_UNSIGNED = r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][-+]?[0-9]{1,2})?"
_PLAIN_FRACTION = r"\\[dt]?frac\{[0-9]{1,20}\}\{[0-9]{1,20}\}"
_NUMBER = re.compile(rf"([-+]?)\s?[$€£]?({_UNSIGNED})(?:\s?/\s?({_UNSIGNED}))?\s?%?\.?")
_IN_TEXT = re.compile(
    rf"(?:(?<![\w.)\]}}])[-−])?(?:(?:(?<![\w.])[0-9]{{1,20}} ?)?{_PLAIN_FRACTION}"
    rf"|[$€£]?(?<![\w.]){_UNSIGNED}(?:/{_UNSIGNED})?(?![0-9]))"
)
_MIXED = re.compile(r"([-+]?)([0-9]{1,20})\s?\\[dt]?frac\{([0-9]{1,20})\}\{([0-9]{1,20})\}")
_FRACTION = re.compile(r"\\[dt]?frac(?:\{([^{}]*)\}\{([^{}]*)\}|([0-9])([0-9]))")


def read_number(text: str) -> Fraction | None:
    """The number that is *all* of `text`, exactly; None for any other text, and above 40 digits.

    Reads 1,234 and $42, 42.0, 1e3, 1/2, a LaTeX fraction of two numbers and a whole number before it. A percent sign is
    dropped, as a unit is: 50% is 50, not 0.5.
    >>> [str(read_number(text)) for text in ("1,234", "-$42.50", "1/2", r"\\frac{1}{2}", "50%", "12 or 13")]
    ['1234', '-85/2', '1/2', '1/2', '50', 'None']
    """
    if len(text) > MOST_COMPARED or sum(c in "0123456789" for c in text) > MOST_DIGITS:
        return None
    for written, plain in (("−", "-"), ("{,}", ","), (r"\$", "$"), (r"\%", "%")):
        text = text.replace(written, plain)
    text = text.strip().strip("$")
    mixed = _MIXED.fullmatch(text)
    if mixed and int(mixed[4]):
        value = int(mixed[2]) + Fraction(int(mixed[3]), int(mixed[4]))
        return -value if mixed[1] == "-" else value
    match = _NUMBER.fullmatch(_FRACTION.sub(r" \1\3/\2\4", text).strip())  # the space keeps 2 \frac12 from being 21/2
    if match is None:
        return None
    sign, above, below = match.groups()
    divisor = Fraction((below or "1").replace(",", ""))
    return None if divisor == 0 else Fraction(sign + above.replace(",", "")) / divisor


def last_number(text: str) -> str | None:
    """The last number in the last 2,000 characters, as it is written. The minus of "10-3" belongs to no number.

    >>> last_number("So 3 + 4 = 7, or $1,234.50."), last_number("10-3"), last_number("It is -3"), last_number("none")
    ('$1,234.50', '3', '-3', None)
    """
    if len(text) > READ_LAST:
        text = re.sub(r"^[\w.,]+", "", text[-READ_LAST - 1 :])  # what is cut in two is no number
    return next(reversed(_IN_TEXT.findall(text)), None)


def last_boxed(text: str) -> str | None:
    r"""What stands in the last \boxed{} of the last 2,000 characters, braces balanced; None where there is none.

    A box that is not closed is empty: the answer was cut.
    >>> last_boxed(r"\boxed{1} or \boxed{\frac{1}{2}}."), last_boxed(r"\boxed{4"), last_boxed("4")
    ('\\frac{1}{2}', '', None)
    """
    _, box, inside = text[-READ_LAST:].rpartition(r"\boxed{")
    if not box:
        return None
    depth = 1
    for place, character in enumerate(inside):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return inside[:place]
    return ""


def stated_answer(text: str) -> str | None:
    r"""The answer that is marked as such: in the last \boxed{}, else behind the last #### on its line; None if none is.

    >>> stated_answer("so 6*7=42\n#### 42\nDone."), stated_answer(r"#### 1, no: \boxed{2}"), stated_answer("42")
    ('42', '2', None)
    """
    boxed = last_boxed(text)
    if boxed is not None:
        return boxed
    _, mark, after = text[-READ_LAST:].rpartition("####")
    return after.strip().partition("\n")[0].strip() if mark else None


def gold_answer(answer: str) -> str:
    r"""What there is to verify in a row's answer: behind its last ####, else in its last \boxed{}, else all of it.

    >>> gold_answer("4 * 2 = 8\n#### 8"), gold_answer(r"Hence \boxed{8}."), gold_answer(" 8 ")
    ('8', '8', '8')
    """
    _, mark, after = answer.rpartition("####")
    boxed = last_boxed(answer)
    if mark:
        return after.strip()
    return (answer if boxed is None else boxed).strip()


def canonical(answer: str) -> str:
    r"""One spelling for equal answers: of a number its exact value, of other text without case, dollars and spaces.

    >>> canonical("42.0"), canonical("0.5"), canonical(r" \text{New  York}. ")
    ('42', '1/2', 'new york')
    """
    number = read_number(answer)
    if number is not None:
        return str(number)
    text = re.sub(r"\\(?:text|mathrm|mathbf)\{([^{}]*)\}", r"\1", answer)
    return " ".join(text.casefold().split()).strip(" .$")


def same_answer(said: str, gold: str) -> bool:
    r"""Does an answer agree with the right one? A number must be that number; text equal text, or an equal formula.

    Formulas are math-verify's to judge, where it is installed, and only if `gold` is one: 17 * 23 = ? is not answered
    by "17 * 23".
    >>> same_answer("$1,234.00", "1234"), same_answer("1/3", "0.3333"), same_answer("6*7", "42")
    (True, False, False)
    >>> same_answer("New York.", "new york"), same_answer("", "new york")
    (True, False)
    """
    if read_number(gold) is not None:
        return read_number(said) == read_number(gold)
    if len(said) > MOST_COMPARED:
        return False
    return canonical(said) == canonical(gold) or (is_formula(said) and is_formula(gold) and same_formula(said, gold))


_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{3,}")
_POWER = re.compile(r"\^(?:\{-?([0-9]{1,3}|[a-z])\}|([0-9a-z]|\\circ))")
_COMMANDS = {"frac", "dfrac", "tfrac", "sqrt", "pi", "cdot", "times", "pm", "left", "right", "circ"}
_COMMANDS |= {"infty", "cup", "cap", "in", "le", "ge", "leq", "geq"}


def is_formula(text: str) -> bool:
    r"""May `text` go to math-verify? Formulas of known commands only, with small powers, so that it is done quickly.

    Words may not: read as products of letters, "dear" and "read" are equal.
    >>> is_formula(r"\frac{\sqrt{2}}{2}"), is_formula("x^2 + 1"), is_formula("9^{9^9}"), is_formula("dear")
    (True, True, False, False)
    """
    known = set(re.findall(r"\\([A-Za-z]+)", text)) <= _COMMANDS
    plain = not (text.isalpha() or _WORD.search(text) or "!" in text or "**" in text)
    powers = ["".join(found) for found in _POWER.findall(text)]
    size = math.prod(int(power) for power in powers if power.isdecimal())  # of powers within powers, at the worst
    return len(text) <= MOST_COMPARED and known and plain and len(powers) == text.count("^") and size <= 1000


@functools.cache
def math_verify():
    """The package math-verify; None where it is not installed."""
    try:
        import math_verify
        import math_verify.errors
    except ImportError:
        return None
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it would print what a model wrote into the progress bar
    return math_verify


def same_formula(said: str, gold: str) -> bool:
    """math-verify's judgement of two formulas; False where it is not installed, gives up or takes over a second.

    It stops itself by a signal, which only a process's main thread can receive; elsewhere it is not asked.
    """
    if math_verify() is None or threading.current_thread() is not threading.main_thread():
        return False
    return _same_formula(said, gold)


@functools.lru_cache(maxsize=10_000)
def _same_formula(said: str, gold: str) -> bool:
    package = math_verify()
    options = {"extraction_config": [package.LatexExtractionConfig()], "fallback_mode": "no_fallback"}
    try:
        parsed = [package.parse(f"${text.strip().strip('$')}$", parsing_timeout=1, **options) for text in (gold, said)]
        return all(parsed) and bool(package.verify(*parsed, timeout_seconds=1))
    except (Exception, package.errors.TimeoutException):  # whatever goes wrong in there, it is not equality
        return False
