"""The toy worlds: what is listed, what is verified and what is sampled must tell one story."""

import itertools
import math
import random
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from toy_tasks import PAD, STOP, TASKS, Countdown, Sums
from toy_tasks.task import check_rewards

EVERY_TASK = pytest.mark.parametrize("task", [make() for make in TASKS.values()], ids=list(TASKS))
DIGITS, OPERATORS = "0123456789", "+-*"

HOSTILE = {
    "empty": "",
    "a million digits": "1" * 10**6,
    "a million terms": "1+" * 500_000 + "1",
    "null": "\0",
    "nulls in between": "5\0+\0007",
    "superscript digit": "²+5",
    "arabic digits": "٥+٧",
    "fullwidth digits": "５+７",
    "fullwidth expression": "２*３+５",
    "unicode minus": "5−3+2",
    "lone surrogate": "\ud800+5*3",
    "code": "__import__('os').system('true')",
    "power": "9**9**9",
    "division by zero": "1/0+2",
    "spaces": " 5+7",
    "newline": "5+7\n",
    "sign in front": "-5+3",
    "brackets": "(2)*3",
    "exponent": "1e9+2",
    "stop inside": "5+7.",
    "padding": "5+7_",
}


def rendered(task, text):
    """The ids of a completion, with its stop."""
    return task.encode(text + ".")


# --- the list against the verifier ----------------------------------------------------------------------------------


def test_sums_verifier_accepts_the_listed_modes_and_no_other_string():
    """Over all 22,621 strings of at most four characters: verified exactly when listed."""
    task = Sums()
    strings = ["".join(s) for length in range(5) for s in itertools.product(task.characters, repeat=length)]
    for prompt in task.prompts:
        assert {s for s in strings if task.verify(prompt, s)} == set(task.modes(prompt)), prompt


def test_countdown_verifier_accepts_the_listed_modes_and_no_other_expression():
    """Over all 9,000 expressions digit-operator-digit-operator-digit, for every prompt."""
    task = Countdown()
    strings = ["".join(s) for s in itertools.product(DIGITS, OPERATORS, DIGITS, OPERATORS, DIGITS)]
    for prompt in task.prompts:
        assert {s for s in strings if task.verify(prompt, s)} == set(task.modes(prompt)), prompt


def test_countdown_verifier_rejects_everything_outside_the_grammar():
    """Over 20,000 random strings, and each mode with one character changed, put in or left out."""
    task, rng = Countdown(), random.Random(0)
    strings = {"".join(rng.choices(task.characters, k=rng.randrange(8))) for _ in range(20_000)}
    for prompt in task.prompts[::6]:
        modes = task.modes(prompt)
        for mode, place in itertools.product(modes, range(6)):
            strings |= {mode[:place] + c + mode[place + 1 :] for c in task.characters}
            strings |= {mode[:place] + c + mode[place:] for c in task.characters}
            strings.add(mode[:place] + mode[place + 1 :])
        assert {s for s in strings if task.verify(prompt, s)} <= set(modes), prompt
        assert all(task.verify(prompt, mode) for mode in modes), prompt


def test_countdown_arithmetic_is_pythons():
    """A third judge: every candidate is listed exactly when Python computes the target from it."""
    task = Countdown()
    for prompt in task.prompts:
        digits, target = re.fullmatch(r"(\d\d\d):(\d+)=", prompt).groups()
        pairs = itertools.product(itertools.permutations(digits), itertools.product(OPERATORS, repeat=2))
        strings = {f"{a}{f}{b}{s}{c}" for (a, b, c), (f, s) in pairs}
        assert {s for s in strings if eval(s) == int(target)} == set(task.modes(prompt)), prompt


def test_countdown_uses_a_repeated_digit_as_often_as_it_is_given():
    """Digits are a multiset: 2 2 3 asks for two twos, and no mode is listed twice."""
    task = Countdown()
    assert sorted(task.modes("223:7=")) == ["2*2+3", "2+2+3", "2+3+2", "3+2*2", "3+2+2"]
    assert task.verify("223:7=", "2+2+3")
    assert not task.verify("223:8=", "2+3+3")
    assert not task.verify("223:4=", "2*2*1")


@EVERY_TASK
@pytest.mark.parametrize("text", HOSTILE.values(), ids=list(HOSTILE))
def test_hostile_text_is_wrong_and_never_an_exception(task, text):
    """Whatever a policy prints is judged, never executed, and never ends a run."""
    for prompt in task.prompts:
        assert task.verify(prompt, text) is False
    assert isinstance(task.mode_class(text), str)


@EVERY_TASK
@settings(max_examples=200, deadline=None)
@given(text=st.text() | st.text(alphabet="0123456789+-*:=._", max_size=9))
def test_any_text_is_judged_as_the_list_says(task, text):
    """For any string at all the verifier gives a bool, and it is membership of the list."""
    for prompt in task.prompts[:3]:
        assert task.verify(prompt, text) is (text in task.modes(prompt))


# --- tokens ---------------------------------------------------------------------------------------------------------


def test_padding_and_stop_are_two_ids():
    """A padding id equal to the stop id would hide the stop from training."""
    assert PAD != STOP


@EVERY_TASK
def test_no_character_shares_an_id(task):
    """Characters, padding and stop all have ids of their own, below vocab_size."""
    ids = [PAD, *rendered(task, task.characters)]
    assert sorted(ids) == list(range(task.vocab_size))


@EVERY_TASK
def test_decode_undoes_encode(task):
    """Prompts and modes survive the way to ids and back; what follows the stop is not read."""
    for prompt in task.prompts:
        assert task.decode(task.encode(prompt)) == prompt
        for mode in task.modes(prompt):
            assert task.decode([*rendered(task, mode), PAD, STOP, 2]) == mode


@EVERY_TASK
def test_padding_inside_an_answer_makes_it_wrong(task):
    """A policy that emits the padding id must not get away with it."""
    for prompt in task.prompts:
        ids = task.encode(task.modes(prompt)[0])
        for place in range(len(ids) + 1):
            assert not task.verify(prompt, task.decode([*ids[:place], PAD, *ids[place:], STOP]))


@EVERY_TASK
def test_encode_names_the_character_it_does_not_know(task):
    """An unknown character is an error that says which."""
    with pytest.raises(ValueError, match="'x'"):
        task.encode("1x")


# --- prompts --------------------------------------------------------------------------------------------------------


@EVERY_TASK
def test_train_and_heldout_share_no_prompt(task):
    """Held out means held out, and no prompt comes twice."""
    assert task.train and task.heldout
    assert len(set(task.prompts)) == len(task.train) + len(task.heldout)


@EVERY_TASK
def test_every_prompt_has_at_least_three_modes_none_twice(task):
    """With fewer there would be nothing to collapse."""
    for prompt in task.prompts:
        modes = task.modes(prompt)
        assert len(set(modes)) == len(modes) >= 3, prompt


@EVERY_TASK
def test_every_mode_fits_with_its_stop(task):
    """No right answer is ever cut."""
    assert max(len(rendered(task, mode)) for p in task.prompts for mode in task.modes(p)) <= task.max_new_tokens


@EVERY_TASK
def test_both_splits_hold_similar_numbers_of_modes(task):
    """A difference between the splits must not come from the split."""
    mean = {s: sum(len(task.modes(p)) for p in s) / len(s) for s in (task.train, task.heldout)}
    assert mean[task.train] == pytest.approx(mean[task.heldout], rel=0.2)


@EVERY_TASK
def test_a_caller_cannot_damage_the_list_of_modes(task):
    """The list may come from a cache; what a caller does to his copy stays his."""
    prompt = task.prompts[0]
    before = list(task.modes(prompt))
    task.modes(prompt).clear()
    assert task.modes(prompt) == before


@EVERY_TASK
def test_plain_language_states_the_prompts_numbers(task):
    """A real model is told every number of the prompt."""
    for prompt in task.prompts:
        said = re.findall(r"\d+", task.plain_language(prompt))
        *digits, target = re.findall(r"\d(?=\d*[:+])", prompt) + re.findall(r"\d+(?==)", prompt)
        assert {*digits, target} <= set(said), prompt


def test_countdown_prompts_are_the_declared_ones():
    """All with three different digits of 1..7, at least six answers and two classes: 24 and 12."""
    assert (len(Countdown.train), len(Countdown.heldout)) == (24, 12)
    task = Countdown()
    digits = itertools.combinations("1234567", 3)
    every = [f"{''.join(chosen)}:{target}=" for chosen in digits for target in range(100)]
    rich = [p for p in every if len(task.modes(p)) >= 6 and len({task.mode_class(m) for m in task.modes(p)}) >= 2]
    assert sorted(rich) == sorted(task.prompts)


# --- the pretraining data -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def samples():
    """2,000 seeded draws for every prompt of every task."""
    drawn = {}
    for make in TASKS.values():
        task, rng = make(), random.Random(1)
        drawn[task.name] = {p: [task.sample(p, rng) for _ in range(2000)] for p in task.prompts}
    return drawn


@EVERY_TASK
def test_samples_are_right_about_half_of_the_time(task, samples):
    """The reference must have something to learn from RL, and something to start from."""
    for prompt, drawn in samples[task.name].items():
        assert 0.30 <= sum(task.verify(prompt, s) for s in drawn) / len(drawn) <= 0.75, prompt


@EVERY_TASK
def test_samples_hold_every_mode_unevenly(task, samples):
    """The reference knows every mode (at least 0.4 % of the data) and has favourites (1.5 x the rarest)."""
    for prompt, drawn in samples[task.name].items():
        counts = [drawn.count(mode) for mode in task.modes(prompt)]
        assert min(counts) >= 8, prompt
        assert max(counts) >= 1.5 * min(counts), prompt


@EVERY_TASK
def test_samples_can_be_encoded_and_fit(task, samples):
    """Pretraining data never holds what the policy could not say."""
    for drawn in samples[task.name].values():
        assert max(len(rendered(task, s)) for s in set(drawn)) <= task.max_new_tokens


@EVERY_TASK
def test_samples_follow_their_seed(task):
    """One seed repeats, two seeds differ."""
    one, again, other = ([task.sample(p, rng) for p in task.prompts] for rng in map(random.Random, (3, 3, 4)))
    assert one == again != other


@EVERY_TASK
def test_right_scores_above_wrong(task, samples):
    """The verifier is a reward, not a distance: every listed answer above every unlisted one."""
    for prompt, drawn in samples[task.name].items():
        right = [float(task.verify(prompt, mode)) for mode in task.modes(prompt)]
        wrong = [float(task.verify(prompt, s)) for s in set(drawn) - set(task.modes(prompt))]
        assert wrong and min(right) > max(wrong), prompt


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_rewards_that_are_not_finite_are_refused_by_prompt(bad):
    """One NaN or infinity is an error that names its prompt, and no other."""
    with pytest.raises(ValueError, match=r"'12='") as error:
        check_rewards(torch.tensor([[1.0, 0.0], [0.0, bad], [1.0, 1.0]]), ["9=", "12=", "5="])
    assert "9=" not in str(error.value)
    check_rewards(torch.tensor([[1.0, 0.0]]), ["9="])


# --- classes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "same",
    [
        ("2*3+5", "3*2+5", "5+2*3", "5+3*2"),
        ("2-3+5", "5+2-3", "5-3+2", "2+5-3"),
        ("9-2-3", "9-3-2"),
        ("2*3*5", "5*2*3", "3*5*2"),
        ("7-2*3", "7-3*2"),
        ("2*7-3", "7*2-3"),
    ],
)
def test_countdown_class_is_blind_to_commuting(same):
    """Orders of one sum of products are one class, named after one of them."""
    task = Countdown()
    assert len({task.mode_class(s) for s in same}) == 1
    assert task.mode_class(same[0]) in same


@pytest.mark.parametrize(
    ("one", "other"), [("2*3+5", "2+3*5"), ("2-3+5", "3-2+5"), ("1*2*3", "1+2+3"), ("7-2*3", "2*3-7")]
)
def test_countdown_class_keeps_different_ideas_apart(one, other):
    """Other terms or other signs are another class, even where the value is equal."""
    assert Countdown().mode_class(one) != Countdown().mode_class(other)


def test_countdown_class_is_equality_of_formulas():
    """Digits replaced by large unrelated numbers: two expressions of one prompt agree exactly when their class does."""
    task, big = Countdown(), {d: str(10**6 + random.Random(d).randrange(10**6)) for d in DIGITS}
    for digits in ("235", "147", "567"):
        pairs = itertools.product(itertools.permutations(digits), itertools.product(OPERATORS, repeat=2))
        strings = [f"{a}{f}{b}{s}{c}" for (a, b, c), (f, s) in pairs]
        value = {s: eval(re.sub(r"\d", lambda d: big[d.group()], s)) for s in strings}
        for one, other in itertools.combinations(strings, 2):
            assert (task.mode_class(one) == task.mode_class(other)) == (value[one] == value[other]), (one, other)


@EVERY_TASK
def test_a_class_is_named_by_one_of_its_modes(task):
    """The name of a class is a right answer that is in it: naming twice changes nothing."""
    for prompt in task.prompts:
        names = {task.mode_class(mode) for mode in task.modes(prompt)}
        assert names <= set(task.modes(prompt))
        assert {task.mode_class(name) for name in names} == names
