"""A dataset: what a file may hold, how rows are split, how completions are judged. Needs no transformers."""

import functools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from language_models import dataset as dataset_module
from language_models.answers import canonical
from language_models.dataset import DatasetTask, Row, read_dataset
from tests.language_models.characters import Characters
from toy_tasks import UserError


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
    monkeypatch.setattr(dataset_module, "MOST_BYTES", 100)
    with pytest.raises(UserError, match="larger than 100 bytes"):
        read_dataset(write(tmp_path, *(row(str(i)) for i in range(5))))


def dataset(*rows, **options):
    """A task of (prompt, answer) pairs."""
    made = [Row(i, prompt, answer) for i, (prompt, answer) in enumerate(rows, 1)]
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
