"""Toy tasks in plain language: what is read out of a talkative text, what a tokenizer must not break.

Needs no transformers: a tokenizer of characters stands in for a real one.
"""

import functools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from language_models.tasks import TextTask
from tests.language_models.characters import Characters, Wrapped
from toy_tasks import TASKS, Countdown, Scratchpad, Sums, UserError

EVERY_TASK = pytest.mark.parametrize("task", [make() for make in TASKS.values()], ids=list(TASKS))
NBSP = "\u00a0"


def spoken(task, **options):
    return TextTask(task, Characters(), stops=[1], **options)


@functools.cache
def spoken_once(name):
    return spoken(TASKS[name]())


# --- the answer in a text -------------------------------------------------------------------------------------------

SAID = {
    Sums: [
        ("5+7", "5+7"),
        ("Sure! 12 = 5 + 7.", "5+7"),
        ("5 + 7 = 12\n", "5+7"),
        ("12=5+7=6+6", "6+6"),
        ("1+2, no: **5 + 7**", "5+7"),
        (r"\boxed{5+7}", "5+7"),
        (r"\(5 + 7\)", "5+7"),
        ("- 5+7\n- 6+6", "6+6"),
        (f"5{NBSP}+{NBSP}7", "5+7"),
        ("15+7", None),
        ("1.5+7", None),
        ("5+7.5", None),
        ("5+71", None),
        ("-5+7", None),
        ("5+7+0", None),
        ("5 - 5+7", None),
        ("2*(5+7)", None),
        ("2 * ( 5 + 7 )", None),
        ("²5+7", None),
        ("٥+٧", None),
        ("５+７", None),
        ("12=", None),
        ("", None),
    ],
    Countdown: [
        ("2 × 3 + 5", "2*3+5"),
        ("2*3+5 = 11", "2*3+5"),
        ("2·3−5", "2*3-5"),
        (r"$2 \times 3 + 5$", "2*3+5"),
        (r"2\cdot3+5", "2*3+5"),
        ("2 x 3 + 5", "2*3+5"),
        ("First 2*3=6, then 6+5=11. So: 2*3+5", "2*3+5"),
        ("5+3*2 or 5+2*3", "5+2*3"),
        ("(2+3)*5", None),
        ("2*(3+5)", None),
        ("1*(2*3+5)", None),
        ("1*2*3+5", None),
        ("2**3+5*1", None),
        ("1 ** 2*3+5", None),
        ("12*3+5", None),
        ("4/2*3+5", None),
        ("6+5", None),
    ],
    Scratchpad: [
        ("03+4=07", "03+4=07"),
        ("07", "07"),
        ("The total is 12.", "12"),
        ("3+4=7\n7 + 5 = 12", "07+5=12"),
        ("3+4=7+5=12", "07+5=12"),
        ("07+5=12, so the answer is 12", "12"),
        ("3+4+5=12", "12"),
        ("12 = 3+4+5", "12"),
        ("12 (from 3, 4 and 5)", "12"),
        ("112", None),
        ("1.12", None),
        ("7", None),
        ("07+5=", None),
    ],
}
SAID = [(make, text, answer) for make, texts in SAID.items() for text, answer in texts]


@pytest.mark.parametrize(("make", "text", "answer"), SAID, ids=[f"{make.name}-{text!a}" for make, text, _ in SAID])
def test_the_last_candidate_of_a_text_is_its_answer(make, text, answer):
    """In the task's own form; what is glued to more digits or operators is none."""
    assert make().parse_answer(text) == answer


@EVERY_TASK
def test_every_mode_states_itself(task):
    """Alone, and in a sentence."""
    for prompt in task.prompts:
        for mode in task.modes(prompt):
            assert task.parse_answer(mode) == mode
            assert task.parse_answer(f"Let me see. I say:\n**{mode}**. Done!") == mode


@EVERY_TASK
def test_listing_all_answers_does_not_win(task):
    """Only the last counts, so ending on a wrong one is wrong."""
    prompt = task.prompts[0]
    others = (mode for other in task.prompts for mode in task.modes(other))
    wrong = next(mode for mode in others if not task.verify(prompt, mode))
    everything = ", ".join(task.modes(prompt))
    assert spoken(task).verify(prompt, everything)
    assert not spoken(task).verify(prompt, f"{everything}, {wrong}")


@EVERY_TASK
@settings(max_examples=100, deadline=None)
@given(text=st.text() | st.text(alphabet="0123456789+-*=.,() ×\nx", max_size=30))
def test_any_text_is_read_and_what_is_read_reads_as_itself(task, text):
    """Never an exception; an answer is in the task's characters, and stable."""
    answer = task.parse_answer(text)
    assert answer is None or (set(answer) <= set(task.characters) and task.parse_answer(answer) == answer)
    for prompt in task.prompts[:2]:
        assert spoken_once(task.name).verify(prompt, text) is (answer in task.modes(prompt))


def test_only_the_end_of_a_long_text_is_read():
    """2,000 characters; a number that the cut goes through is no candidate."""
    assert Sums().parse_answer("5+7" + " " * 1990) == "5+7"
    assert Sums().parse_answer("5+7" + " " * 2000) is None
    assert Sums().parse_answer("15+7" + " " * 1997) is None


# --- a toy task over a tokenizer ------------------------------------------------------------------------------------


@EVERY_TASK
@pytest.mark.parametrize("chat_template", [None, "some template"])
def test_answers_survive_the_way_to_ids_and_back(task, chat_template):
    """Every mode, as its canonical ids, fits, ends in the stop and is verified as itself."""
    text_task = TextTask(task, Characters(chat_template=chat_template), stops=[1, 2])
    for prompt in task.prompts:
        for mode in text_task.modes(prompt):
            ids = text_task.answer_ids(mode)
            assert ids[-1] == 1 and len(ids) <= text_task.max_new_tokens
            assert text_task.mode_of(prompt, text_task.decode([*ids, 5, 6])) == mode
            assert text_task.verify(prompt, text_task.decode(ids))


@pytest.mark.parametrize("tokenizer", [Characters, Wrapped])
def test_the_prompt_goes_through_the_chat_template(tokenizer):
    """A list of ids, or a mapping that holds it; with the instruction under it."""
    task = TextTask(Sums(), tokenizer(chat_template="yes"), stops=[1], instruction="Be brief.")
    first, *text, stop, last = task.encode_prompt("12=")
    assert (first, stop, last) == (2, 1, 2)
    said = Characters().decode(text, skip_special_tokens=True)
    assert said == Sums().plain_language("12=") + "\nBe brief."


def test_without_a_chat_template_the_prompt_is_plain_text():
    """It ends in a line break: the answer then begins with a token of its own."""
    said = Characters().decode(spoken(Sums()).encode_prompt("12="), skip_special_tokens=True)
    assert said == Sums().plain_language("12=") + "\nAnswer:\n"


def test_a_tokenizer_that_ends_every_text_does_not_end_the_prompt():
    """A model that reads its own end goes on with something else."""

    class Ending(Characters):
        def encode(self, text, add_special_tokens=True):
            return super().encode(text) + [1] * add_special_tokens

    task = TextTask(Sums(), Ending(), stops=[1])
    assert task.encode_prompt("12=") == spoken(Sums()).encode_prompt("12=")
    assert task.answer_ids("5+7").count(1) == 1


def test_padded_prompts_can_be_told_from_their_padding():
    """The mask of the batch is exactly the prompt; the width is that of the batch."""
    task = TextTask(Sums(), Characters(), stops=[1])
    tokens, real = task.encode_prompts(["12=", "2="])  # (Q, P)
    assert tokens.shape == real.shape == (2, len(task.encode_prompt("12=")))
    assert real.sum(1).tolist() == [len(task.encode_prompt(prompt)) for prompt in ("12=", "2=")]
    for prompt, row, text in zip(("12=", "2="), tokens, real, strict=True):
        assert row[text].tolist() == task.encode_prompt(prompt)
    assert task.encode_prompts(["2="]).tokens.shape[1] == tokens.shape[1] - 1


def test_a_prompt_may_begin_with_the_id_that_pads():
    """Padding is what the batch says, whatever the tokens are."""

    class Beginning(Characters):
        def encode(self, text, add_special_tokens=True):
            return [0] * add_special_tokens + super().encode(text)

    task = TextTask(Sums(), Beginning(), stops=[1])
    tokens, real = task.encode_prompts(["12=", "2="])  # (Q, P)
    assert task.pad == task.encode_prompt("2=")[0] == tokens[1, 0] == 0
    assert real.sum(1).tolist() == [len(task.encode_prompt(prompt)) for prompt in ("12=", "2=")]
    assert tokens[1][real[1]].tolist() == task.encode_prompt("2=")


def test_a_caller_cannot_damage_the_ids_of_a_prompt():
    """They come from a cache."""
    task = spoken(Sums())
    before = task.encode_prompt("12=")
    task.encode_prompt("12=").clear()
    assert task.encode_prompt("12=") == before


def test_decoding_ends_at_the_first_of_all_stops():
    """Any of them; special tokens on the way are not text."""
    task = TextTask(Sums(), Characters(), stops=[1, 2])
    five, plus, seven = task.encode("5+7")
    assert task.decode([five, plus, seven, 2, five, 1]) == "5+7"
    assert task.decode([five, 0, plus, seven]) == "5+7"
    assert task.decode([]) == ""


def test_the_longest_right_answer_fits_by_default():
    """With its stop and four tokens more, at least 12; too short a limit is the user's mistake."""
    assert spoken(Sums()).max_new_tokens == 12  # 3 + 1 + 4 would be 8
    assert spoken(Scratchpad()).max_new_tokens == 12  # 7 + 1 + 4
    assert spoken(Sums(), max_new_tokens=4).max_new_tokens == 4
    with pytest.raises(UserError, match=r"max_new_tokens is 3: .* 4 tokens"):
        spoken(Sums(), max_new_tokens=3)


def test_the_vocabulary_is_the_models():
    """It may be larger than the tokenizer's, not smaller than an id that a prompt holds."""
    assert spoken(Sums()).vocab_size == len(Characters())
    assert spoken(Sums(), vocab_size=128).vocab_size == 128
    with pytest.raises(UserError, match="vocabulary of 50"):
        spoken(Sums(), vocab_size=50)
    with pytest.raises(UserError, match="token id 999"):
        TextTask(Sums(), Characters(), stops=[999])
    with pytest.raises(UserError, match="stop"):
        TextTask(Sums(), Characters(), stops=[])


@EVERY_TASK
def test_a_text_task_is_the_toy_task(task):
    """Same prompts and modes; classes of what is stated; pretraining data that it can judge."""
    text_task, rng = spoken(task), random.Random(0)
    assert (text_task.name, text_task.train, text_task.heldout) == (task.name, task.train, task.heldout)
    for prompt in task.prompts[:5]:
        assert text_task.modes(prompt) == task.modes(prompt)
        mode = task.modes(prompt)[-1]
        assert text_task.mode_class(f"I say {mode}.") == task.mode_class(mode)
        for _ in range(20):
            drawn = task.sample(prompt, rng)
            assert text_task.verify(prompt, drawn) is task.verify(prompt, drawn)
    assert text_task.mode_of(task.prompts[0], "I do not know") is None
