"""The scratchpad world: what is listed, verified, sampled and computed about it, and why likely is not right there."""

import itertools
import random
from collections import Counter

import pytest

from toy_tasks import Scratchpad

DIGITS = "0123456789"
SHORT = ["".join(s) for s in itertools.product(DIGITS, repeat=2)]
STEPS = [f"{a}{b}+{c}={d}{e}" for a, b, c, d, e in itertools.product(DIGITS, repeat=5)]
DIALS = {
    "default": {},
    "no errors": {"direct": 0.5, "forget": 0.0, "step_error": 0.0},
    "always at once": {"direct": 1.0},
    "never at once": {"direct": 0.0, "step_error": 0.5},
    "even": {"order_skew": 1.0, "forget_skew": 1.0},
    "only the last": {"order_skew": 0.0, "forget_skew": 0.0},
}
EVERY_DIAL = pytest.mark.parametrize("dials", DIALS.values(), ids=list(DIALS))


def right_mass(task, prompt):
    """Probability of a right answer in the pretraining data."""
    return sum(p for text, p in task.sampling_probs(prompt).items() if task.verify(prompt, text))


# --- the list against the verifier ----------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", ["1+2+3=", "3+4+5=", "6+7+8=", "3+3+4=", "5+5+5=", "0+0+9="])
def test_verifier_accepts_the_listed_modes_and_no_other_string(prompt):
    """Over all 100,100 strings of the two grammars: verified exactly when listed; also where a digit repeats."""
    task = Scratchpad()
    assert {s for s in itertools.chain(SHORT, STEPS) if task.verify(prompt, s)} == set(task.modes(prompt))


def test_modes_are_what_python_computes():
    """A third judge, by brute force over first number, second number and the one that is added."""
    task = Scratchpad()
    for prompt in task.prompts:
        a, b, c = map(int, prompt[:-1].split("+"))
        total = a + b + c
        expected = {f"{total:02}", f"{a + b:02}+{c}={total}", f"{a + c:02}+{b}={total}", f"{b + c:02}+{a}={total}"}
        assert set(task.modes(prompt)) == {s if len(s) != 6 else s.replace("=", "=0") for s in expected}
        assert len(task.modes(prompt)) == 4


def test_verifier_rejects_everything_outside_the_grammars():
    """Over 20,000 random strings, and each mode with one character changed, put in or left out."""
    task, rng = Scratchpad(), random.Random(0)
    strings = {"".join(rng.choices(task.characters, k=rng.randrange(10))) for _ in range(20_000)}
    for prompt in task.prompts[::6]:
        modes = task.modes(prompt)
        for mode, place in itertools.product(modes, range(8)):
            strings |= {mode[:place] + c + mode[place + 1 :] for c in task.characters}
            strings |= {mode[:place] + c + mode[place:] for c in task.characters}
            strings.add(mode[:place] + mode[place + 1 :])
        assert {s for s in strings if task.verify(prompt, s)} <= set(modes), prompt
        assert all(task.verify(prompt, mode) for mode in modes), prompt


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("06+5=12", "the first sum is wrong, the total right"),
        ("08+5=13", "the added number is one of the three, the total is not theirs"),
        ("12+0=12", "0 is none of the three"),
        ("10+2=12", "2 is none of the three, though 10 + 2 is 12"),
        ("07+5=11", "the last sum is wrong"),
        ("5+07=12", "the grammar has the sum first"),
        ("7+5=12", "one digit short"),
        ("007+5=12", "one digit long"),
        ("07+5=12.", "a stop inside"),
        ("07+5=12\n", "a newline"),
        ("٠٧+٥=١٢", "digits that are not ASCII"),
        ("1２", "a fullwidth digit"),
        ("²²", "superscripts, which str.isdigit takes"),
        ("+7+5=12", "a sign, which int takes"),
        (" 7+5=12", "a space, which int takes"),
        ("1_2", "an underscore, which int takes"),
        ("12+", "cut short"),
        ("07", "a number forgotten"),
    ],
)
def test_what_is_almost_right_is_wrong(text, why):
    """3+4+5=12, and nothing else will do."""
    assert Scratchpad().verify("3+4+5=", text) is False, why


def test_a_class_is_the_total():
    """A vote counts answers: all ways to say one number are one answer, right or wrong; other text is its own."""
    task = Scratchpad()
    assert {task.mode_class(mode) for mode in task.modes("3+4+5=")} == {"12"}
    assert task.mode_class("06+5=12") == "12"
    assert task.mode_class("07") == task.mode_class("03+4=07") == "07"
    assert [task.mode_class(text) for text in ("", "7", "²²", "07+5=1")] == ["", "7", "²²", "07+5=1"]


def test_prompts_are_the_declared_ones():
    """All sets of three different digits of 1..8, 37 and 19; forgetting a number is always wrong."""
    task = Scratchpad()
    assert (len(task.train), len(task.heldout)) == (37, 19)
    assert set(task.prompts) == {f"{a}+{b}+{c}=" for a, b, c in itertools.combinations(range(1, 9), 3)}
    assert not any("0" in prompt for prompt in task.prompts)


# --- the pretraining data -------------------------------------------------------------------------------------------


@EVERY_DIAL
def test_sampling_probs_are_those_of_sample(dials):
    """They sum to 1 and hold every draw; 20,000 seeded draws lie within four standard errors of each, for two prompts.

    A repeated digit makes different draws the same string; the sums must then be added up."""
    task, rng, n = Scratchpad(**dials), random.Random(0), 20_000
    for prompt in ("2+5+7=", "3+3+4="):
        probs = task.sampling_probs(prompt)
        assert sum(probs.values()) == pytest.approx(1, abs=1e-12)
        counts = Counter(task.sample(prompt, rng) for _ in range(n))
        assert set(counts) <= set(probs)
        for text, p in probs.items():
            assert abs(counts[text] / n - p) <= 4.5 * (p * (1 - p) / n) ** 0.5 + 1e-12, text


@EVERY_DIAL
def test_right_mass_is_the_declared_formula(dials):
    """direct (1 - forget) + (1 - direct) (1 - step_error)^2, for every prompt."""
    task = Scratchpad(**dials)
    declared = task.direct * (1 - task.forget) + (1 - task.direct) * (1 - task.step_error) ** 2
    for prompt in task.prompts:
        assert right_mass(task, prompt) == pytest.approx(declared)


def test_default_data_is_short_and_mostly_wrong():
    """.39 right; at once 5 %, step by step 90 %."""
    task = Scratchpad()
    probs = task.sampling_probs("3+4+5=")
    at_once = {text: p for text, p in probs.items() if len(text) == 2}
    right_at_once = at_once["12"] / sum(at_once.values())
    assert right_mass(task, "3+4+5=") == pytest.approx(0.391)
    assert (sum(at_once.values()), right_at_once) == pytest.approx((0.6, 0.05))
    assert (right_mass(task, "3+4+5=") - at_once["12"]) / 0.4 == pytest.approx(0.95**2)


@pytest.mark.parametrize("dials", [{}, {"direct": 0.4, "forget_skew": 0.3, "order_skew": 1.0}], ids=str)
def test_the_most_likely_completion_is_short_and_wrong(dials):
    """On every prompt; with the second dials although most of the mass, 56 %, is right."""
    task = Scratchpad(**dials)
    for prompt in task.prompts:
        probs = task.sampling_probs(prompt)
        likeliest = max(probs, key=probs.get)
        assert len(likeliest) == 2 and not task.verify(prompt, likeliest)
        if dials:
            assert right_mass(task, prompt) > 0.55


def test_the_short_wrong_answer_begins_the_long_right_one():
    """Forgetting a number and stopping after the first sum are one and the same text."""
    task = Scratchpad(step_error=0.0)
    for prompt in task.prompts:
        probs = task.sampling_probs(prompt)
        wrong = {text for text in probs if not task.verify(prompt, text)}
        assert wrong == {mode[:2] for mode in task.modes(prompt) if len(mode) == 7}


@pytest.mark.parametrize("dial", ["direct", "forget", "step_error", "order_skew", "forget_skew"])
@pytest.mark.parametrize("value", [-0.1, 1.1, float("nan")])
def test_a_dial_out_of_range_is_named(dial, value):
    """Shares are from 0 to 1."""
    with pytest.raises(ValueError, match=dial):
        Scratchpad(**{dial: value})
