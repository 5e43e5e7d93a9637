"""Answers read out of a text and compared: numbers, other texts, formulas. Needs no transformers."""

import itertools
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from language_models import answers
from language_models.answers import (
    canonical,
    is_formula,
    last_boxed,
    last_number,
    read_number,
    same_answer,
    stated_answer,
)
from toy_tasks import TASKS

# --- numbers --------------------------------------------------------------------------------------------------------


@given(number=st.fractions(-(10**9), 10**9, max_denominator=10**6), places=st.integers(0, 5))
def test_numbers_are_read_exactly(number, places):
    """As a fraction, as a decimal, with thousands, whatever its spelling."""
    assert read_number(str(number)) == number
    decimal = round(number, places)
    assert read_number(f"{float(decimal):,.{places}f}") == decimal


@pytest.mark.parametrize(
    "text", ["9" * 41, "1" * 10**6, "1/" + "9" * 41, "1/0", "1_000", "0x10", "1e999", "nan", "²", "--3"]
)
def test_what_is_no_bounded_number_is_none(text):
    """No huge int is ever made, and Python's own spellings are not everybody's."""
    assert read_number(text) is None


SPELLINGS = ["42", "42.0", "$42", " 42 ", "42.", "84/2", "+42", "42%"]


@pytest.mark.parametrize(("one", "other"), list(itertools.combinations(SPELLINGS, 2)))
def test_spellings_of_one_number_are_one_answer(one, other):
    """The canonical form names the value."""
    assert same_answer(one, other) and canonical(one) == canonical(other) == "42"


# --- any text -------------------------------------------------------------------------------------------------------

LONG = {
    "digits": "1" * 10**6,
    "terms": "1+" * 500_000,
    "spaces": "1" + " " * 10**6,
    "stars": "*" * 10**6,
    "brackets": "(" * 10**6,
    "thousands": "1,111" * 200_000,
    "boxes": r"\boxed{" * 200_000,
    "times": "1 x" * 300_000,
    "exponents": "1e99" * 200_000,
}


@pytest.mark.parametrize("text", LONG.values(), ids=list(LONG))
def test_hostile_texts_take_no_time(text):
    """A million characters: a fraction of a second for all the readers together."""
    begin = time.process_time()
    for make in TASKS.values():
        make().parse_answer(text)
    for read in (last_number, last_boxed, stated_answer, read_number, canonical):
        read(text)
    same_answer(text, "42"), same_answer(text, "x+1")
    assert time.process_time() - begin < 1


# --- math-verify ----------------------------------------------------------------------------------------------------

needs_math_verify = pytest.mark.skipif(answers.math_verify() is None, reason="math-verify is not installed")
FORMULAS = [
    ("1+x", "x+1", True),
    (r"\dfrac{\sqrt{8}}{2}", r"\sqrt{2}", True),
    ("(2,1)", "(1,2)", False),
    (r"x^2", "x^3", False),
    ("x=1 or x=2", "x=1", False),
]


@needs_math_verify
@pytest.mark.parametrize(("said", "gold", "right"), FORMULAS)
def test_formulas_are_math_verifys_to_judge(said, gold, right):
    """Where both are formulas; in the main thread, for it stops itself by a signal."""
    assert same_answer(said, gold) is right


def test_without_math_verify_formulas_are_texts(monkeypatch):
    """Equal text is equal, and nothing else; numbers need no help."""
    monkeypatch.setattr(answers, "math_verify", lambda: None)
    assert same_answer("X + 1", "x + 1") and not same_answer("1 + x", "x + 1")
    assert same_answer(r"\frac12", "0.5")


def test_in_another_thread_it_is_not_asked():
    """There it could not be stopped; the judgement is that of equal texts, and nobody else's."""
    said = []
    thread = threading.Thread(target=lambda: said.append((same_answer("y+2", "2+y"), same_answer("y+2", "y+2"))))
    thread.start()
    thread.join()
    assert said == [(False, True)]
    assert same_answer("y+2", "2+y") is (answers.math_verify() is not None)


@pytest.mark.parametrize(
    "text", ["9^{9^9}", "9**9", "9!", "(9^{99})^{99}", r"\binom{99999}{9}", "factorial(9)", "x+" * 101]
)
def test_formulas_that_could_take_long_are_not_asked_about(text):
    """A power of powers, factorials, unknown commands, words and long texts."""
    assert not is_formula(text)


HOSTILE_FORMULAS = ["(a+b+c+d+f+g+h+k)^{100}", "{" * 150 + "x+1", "(((((((((x", "^^^", r"\frac{}{}", "1/0+x"]


@pytest.mark.slow
@needs_math_verify
@pytest.mark.parametrize("said", HOSTILE_FORMULAS)
def test_hostile_formulas_end_soon_and_are_wrong(said):
    """A second for each part at the most."""
    begin = time.monotonic()
    assert not same_answer(said, "x+1")
    assert time.monotonic() - begin < 6


# --- fractions that are not alone -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, value",
    [(r"1\frac{1}{2}", "3/2"), (r"-1\frac{1}{2}", "-3/2"), (r"-\frac{3}{4}", "-3/4"), (r"1\frac{1}{0}", "None")],
)
def test_a_whole_number_before_a_fraction_is_added_to_it(text, value):
    assert str(read_number(text)) == value


@pytest.mark.parametrize(
    "text, found",
    [
        (r"The answer is $\frac{1}{2}$.", r"\frac{1}{2}"),
        (r"So $-\frac{1}{2}$.", r"-\frac{1}{2}"),
        (r"It takes 1\frac{1}{2} cups.", r"1\frac{1}{2}"),
        ("123" + " " * 1998, None),
        ("1 23" + " " * 1998, "23"),
    ],
)
def test_the_last_number_is_all_of_it(text, found):
    """A fraction is one number, not its denominator; a number that is cut at the front is none."""
    assert last_number(text) == found
