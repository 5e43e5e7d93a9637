"""Tasks in plain language: what is read out of a talkative text, what a tokenizer must not break, what a file may hold.

Needs no transformers: a tokenizer of characters stands in for a real one.
"""

import functools
import itertools
import json
import random
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import text_tasks
from minirlvr import UserError, text_mask
from text_tasks import (
    DatasetTask,
    TextTask,
    canonical,
    is_formula,
    last_boxed,
    last_number,
    read_dataset,
    read_number,
    same_answer,
    stated_answer,
)
from toy_tasks import TASKS, Countdown, Scratchpad, Sums
from toy_tasks.exact import encode_prompts

EVERY_TASK = pytest.mark.parametrize("task", [make() for make in TASKS.values()], ids=list(TASKS))
NBSP = "\u00a0"


class Characters:
    """A tokenizer of one id a character, from 3 on; 0 pads, 1 ends, 2 begins a turn of the chat (both special)."""

    alphabet = "".join(map(chr, range(32, 127))) + "\n×"
    chat_template = None
    pad_token_id = 0

    def __init__(self, **changed):
        vars(self).update(changed)

    def __len__(self):
        return 3 + len(self.alphabet)

    def encode(self, text, add_special_tokens=True):
        return [self.alphabet.index(character) + 3 for character in text]

    def decode(self, ids, skip_special_tokens=False):
        assert skip_special_tokens
        return "".join(self.alphabet[i - 3] for i in ids if i >= 3)

    def apply_chat_template(self, messages, add_generation_prompt, tokenize):
        assert add_generation_prompt and tokenize and [m["role"] for m in messages] == ["user"]
        return [2, *self.encode(messages[0]["content"]), 1, 2]


class Wrapped(Characters):
    """Gives its ids in a mapping, as newer libraries do."""

    def apply_chat_template(self, *args, **options):
        return {"input_ids": super().apply_chat_template(*args, **options), "attention_mask": []}


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
    wrong = {"sums": "9+9", "countdown": "9*9*9", "scratchpad": "99"}[task.name]
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


@pytest.mark.parametrize(("pad_token_id", "pad"), [(0, 0), (7, 7), (2, 0), (None, 0), (10**6, 0)])
def test_padding_is_an_id_that_no_prompt_begins_with(pad_token_id, pad):
    """Where the tokenizer's own would be read as text (2 begins every turn) or does not exist, another is taken."""
    task = TextTask(Sums(), Characters(chat_template="yes", pad_token_id=pad_token_id), stops=[1])
    assert task.pad == pad
    assert all(task.encode_prompt(prompt)[0] != task.pad for prompt in task.prompts)


def test_padded_prompts_can_be_told_from_their_padding():
    """The mask of the policy finds exactly the prompt; the width is that of the batch."""
    task = TextTask(Sums(), Characters(), stops=[1])
    tokens = encode_prompts(task, ["12=", "2="])  # (Q, P)
    assert tokens.shape == (2, len(task.encode_prompt("12=")))
    assert task.pad == 0  # what text_mask takes for padding
    assert text_mask(tokens).sum(1).tolist() == [len(task.encode_prompt(prompt)) for prompt in ("12=", "2=")]
    assert encode_prompts(task, ["2="]).shape[1] == tokens.shape[1] - 1


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


def test_no_id_left_to_pad_with_is_an_error():
    """Unlikely, but padding that is read as text would be worse."""
    with pytest.raises(UserError, match="none is left to pad"):
        text_tasks.choose_pad(0, {0, 1, 2}, vocab_size=3)


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


# --- a dataset ------------------------------------------------------------------------------------------------------


def write(folder, *rows):
    """A file of rows: bytes and texts as they are, others as JSON."""
    path = folder / "rows.jsonl"
    lines = [r if isinstance(r, bytes) else (r if isinstance(r, str) else json.dumps(r)).encode() for r in rows]
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


def row(prompt="6*7=?", answer="42"):
    return {"prompt": prompt, "answer": answer}


def test_rows_are_read_in_order_with_their_lines(tmp_path):
    """Blank lines are skipped, numbers are texts, GSM8K's names and marks are known, a byte order mark does no harm."""
    gsm8k = {"question": " Two apples and three? ", "answer": "2 + 3 = <<2+3=5>>5\n#### 5"}
    boxed = row("half?", r"It is \boxed{1} or rather \boxed{\frac{1}{2}}.")
    path = write(
        tmp_path, b"\xef\xbb\xbf" + json.dumps(row()).encode(), "", "   ", gsm8k, boxed, row(7, 0.1), row("ä", "ö")
    )
    assert [tuple(r) for r in read_dataset(path)] == [
        (1, "6*7=?", "42"),
        (4, "Two apples and three?", "5"),
        (5, "half?", r"\frac{1}{2}"),
        (6, "7", "0.1"),
        (7, "ä", "ö"),
    ]


BROKEN = {
    "not JSON": ("{'prompt': 1}", "not JSON"),
    "two objects": ('{"prompt": "a"} {"answer": 1}', "not JSON"),
    "code": ("__import__('os').system('true')", "not JSON"),
    "deep": ("[" * 100_000, "not JSON"),
    "a list": ([1, 2], "not an object"),
    "no prompt": ({"answer": 1}, 'no "prompt"'),
    "no answer": ({"prompt": "a"}, 'no "answer"'),
    "empty prompt": (row("  "), '"prompt" is empty'),
    "empty question": ({"question": "", "answer": 1}, '"question" is empty'),
    "empty answer": (row("a", ""), '"answer" is empty'),
    "nothing behind the mark": (row("a", "so\n#### "), "nothing to verify"),
    "an empty box": (row("a", r"\boxed{}"), "nothing to verify"),
    "only marks": (row("a", " $. "), "nothing to verify"),
    "a long answer": (row("a", "so " * 100), "300|299 characters"),
    "true": (row("a", True), "must be a text or a number"),
    "null": (row("a", None), "must be a text or a number"),
    "NaN": ('{"prompt": "a", "answer": NaN}', "must be a text or a number"),
    "a chat": (row([{"role": "user", "content": "a"}]), "must be a text or a number"),
    "half a character": (r'{"prompt": "\ud800", "answer": 1}', "surrogate"),
    "latin-1": ('{"prompt": "ä", "answer": 1}'.encode("latin-1"), "not UTF-8"),
    "a long line": (row("a" * 2**20), "longer than 1,048,576 bytes"),
    "a prompt twice": (row(" 6*7=? ", 3), "same prompt as in line 1"),
}


@pytest.mark.parametrize(("broken", "says"), BROKEN.values(), ids=list(BROKEN))
def test_a_broken_row_is_named_in_one_line(tmp_path, broken, says):
    """File, line number, what is wrong, whatever stands around it."""
    path = write(tmp_path, row(), "", broken, row("another"))
    with pytest.raises(UserError, match=says) as error:
        read_dataset(path)
    assert str(error.value).startswith(f"{path}, line 3: ")
    assert "\n" not in str(error.value) and len(str(error.value)) < 300 + len(str(path))


def test_files_that_hold_no_rows_are_refused(tmp_path, monkeypatch):
    """Missing, a folder, empty, blank, too large."""
    with pytest.raises(UserError, match=r"cannot be read: No such file"):
        read_dataset(tmp_path / "none.jsonl")
    with pytest.raises(UserError, match=r"cannot be read"):
        read_dataset(tmp_path)
    for rows in ((), ("", "  ")):
        with pytest.raises(UserError, match="no rows"):
            read_dataset(write(tmp_path, *rows))
    monkeypatch.setattr(text_tasks, "MOST_BYTES", 100)
    with pytest.raises(UserError, match="larger than 100 bytes"):
        read_dataset(write(tmp_path, *(row(str(i)) for i in range(5))))


def dataset(*rows, **options):
    """A task of (prompt, answer) pairs."""
    made = [text_tasks.Row(i, prompt, answer) for i, (prompt, answer) in enumerate(rows, 1)]
    return DatasetTask(made, Characters(), stops=[1], **options)


def numbered(n):
    return [(f"{i}?", str(i)) for i in range(n)]


@pytest.mark.parametrize(("rows", "given", "held"), [(2, None, 1), (8, None, 2), (400, None, 64), (8, 3, 3), (8, 7, 7)])
def test_the_last_rows_are_held_out(rows, given, held):
    """A quarter, at most 64, at least one; or as many as are asked for."""
    task = dataset(*numbered(rows), heldout=given)
    assert task.heldout == tuple(f"{i}?" for i in range(rows - held, rows))
    assert task.train == tuple(f"{i}?" for i in range(rows - held))


@pytest.mark.parametrize(("rows", "given"), [(1, None), (3, 3), (3, 0), (3, -1)])
def test_a_split_with_an_empty_side_is_refused(rows, given):
    """Something must be trained on, something evaluated."""
    with pytest.raises(UserError, match=f"held out of {rows}"):
        dataset(*numbered(rows), heldout=given)


def test_the_instruction_is_written_under_the_prompt():
    """And may be left out."""
    said = [
        Characters().decode(dataset(*numbered(2), **options).encode_prompt("1?"), skip_special_tokens=True)
        for options in ({}, {"instruction": ""}, {"instruction": "Be brief."})
    ]
    assert said == ["1?\nPut the final answer in \\boxed{}.\nAnswer:\n", "1?\nAnswer:\n", "1?\nBe brief.\nAnswer:\n"]


JUDGED = [
    ("42", "42", True),
    ("42", "The answer is 42.", True),
    ("42", "6 * 7 = 42", True),
    ("42", "6 * 7", False),
    ("42", r"Not 41 but \boxed{42}, as 1 + 1 = 2", True),
    ("42", r"\boxed{42} or \boxed{43}", False),
    ("42", r"\boxed{41, 42}", False),
    ("42", r"\boxed{6*7}", False),
    ("42", r"\boxed{42", False),  # cut before it was said
    ("42", "#### 42\nThat was number 7", True),
    ("42", "#### 41, 42", False),
    ("42", "#### $42.00", True),
    ("42", "142", False),
    ("42", "42.5", False),
    ("-3", "It is -3", True),
    ("-3", "10-3", False),
    ("3", "10-3", True),
    ("1234", "about $1,234.", True),
    ("1,234", r"\boxed{1{,}234}", True),
    ("0.5", r"\boxed{\frac{1}{2}}", True),
    ("0.5", "1/2", True),
    ("1/3", "0.3333", False),
    ("50%", r"\boxed{50\%}", True),
    ("50", "50%", True),
    ("0.5", "50%", False),
    ("1/0", "1/0", True),  # no number, but the same text
    ("1000", "1e3", True),
    ("42", "٤٢", False),
    ("42", "", False),
    ("42", "no idea", False),
    ("Paris", r"\boxed{paris}", True),
    ("Paris", "I think:\nParis.", True),
    ("Paris", r"\boxed{\text{Paris}}", True),
    ("dear", r"\boxed{read}", False),
    ("B", r"\boxed{A or B}", False),
]


@pytest.mark.parametrize(("gold", "completion", "right"), JUDGED)
def test_a_completion_is_judged_by_what_it_states(gold, completion, right):
    """With and without math-verify the same: these are numbers and plain text."""
    task = dataset(("?", gold), ("another", "0"))
    assert task.verify("?", completion) is right
    assert task.mode_of("?", completion) == (canonical(gold) if right else None)
    assert task.modes("?") == [canonical(gold)]


@settings(max_examples=100, deadline=None)
@given(text=st.text() | st.text(alphabet=r"0123456789+-*/=.,{}\$#^% boxedfrac", max_size=60))
def test_any_completion_is_judged_and_never_an_exception(text):
    """By rows with a number, a word and a formula."""
    task = dataset_once()
    assert all(task.verify(prompt, text) in (True, False) for prompt in task.prompts)


@functools.cache
def dataset_once():
    return dataset(("number", "42"), ("word", "Paris"), ("half", "0.5"))


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


# --- math-verify ----------------------------------------------------------------------------------------------------

needs_math_verify = pytest.mark.skipif(text_tasks.math_verify() is None, reason="math-verify is not installed")
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
    monkeypatch.setattr(text_tasks, "math_verify", lambda: None)
    assert same_answer("X + 1", "x + 1") and not same_answer("1 + x", "x + 1")
    assert same_answer(r"\frac12", "0.5")


def test_in_another_thread_it_is_not_asked():
    """There it could not be stopped; the judgement is that of equal texts, and nobody else's."""
    said = []
    thread = threading.Thread(target=lambda: said.append((same_answer("y+2", "2+y"), same_answer("y+2", "y+2"))))
    thread.start()
    thread.join()
    assert said == [(False, True)]
    assert same_answer("y+2", "2+y") is (text_tasks.math_verify() is not None)


@pytest.mark.parametrize(
    "text", ["9^{9^9}", "9**9", "9!", "(9^{99})^{99}", r"\binom{99999}{9}", "factorial(9)", "x+" * 101]
)
def test_formulas_that_could_take_long_are_not_asked_about(text):
    """A power of powers, factorials, unknown commands, words and long texts."""
    assert not is_formula(text)


HOSTILE_FORMULAS = ["(a+b+c+d+f+g+h+k)^{100}", "{" * 150 + "x+1", "(((((((((x", "^^^", r"\frac{}{}", "1/0+x"]


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
