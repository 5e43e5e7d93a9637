"""Your own questions and answers, from a .jsonl file. What it holds is hostile: every length is bounded."""

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from language_models.answers import (
    MOST_COMPARED,
    canonical,
    gold_answer,
    last_number,
    read_number,
    same_answer,
    stated_answer,
)
from language_models.tasks import LanguageTask
from toy_tasks import UserError
from toy_tasks.task import READ_LAST

MOST_BYTES = 256 * 2**20  # of a dataset
MOST_LINE_BYTES = 2**20  # of one row of it
BOXED = r"Put the final answer in \boxed{}."


class Row(NamedTuple):
    """One row of a dataset."""

    line: int  # in the file, from 1
    prompt: str
    gold: str  # what a completion's answer is compared with


def read_dataset(path: str | Path) -> list[Row]:
    """All rows of a .jsonl file: an object a line, with `prompt` (or `question`) and `answer`, texts or numbers.

    Blank lines are skipped. Raises UserError, one line with file and line number, for the first thing that is wrong.
    The bounds: 256 MiB a file, 1 MiB a line, 200 characters for what is compared.
    """
    rows, seen = [], {}
    for number, line in _numbered_lines(path):
        where = f"{path}, line {number}"
        row = _read_row(number, line, where)
        if row is None:
            continue
        if row.prompt in seen:
            raise UserError(f"{where}: the same prompt as in line {seen[row.prompt]}; leave one of them out")
        seen[row.prompt] = number
        rows.append(row)
    if not rows:
        raise UserError(f'{path}: no rows; write one object a line, like {{"prompt": "6 * 7 = ?", "answer": 42}}')
    return rows


def _numbered_lines(path: str | Path) -> Iterator[tuple[int, bytes]]:
    """The lines of a file, from 1, never more than the bounds in memory."""
    read = 0
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(MOST_LINE_BYTES + 1), b""), 1):
                read += len(line)
                if len(line) > MOST_LINE_BYTES:
                    raise UserError(f"{path}, line {number}: longer than {MOST_LINE_BYTES:,} bytes; shorten it")
                if read > MOST_BYTES:
                    raise UserError(f"{path}: larger than {MOST_BYTES:,} bytes; take a part of it")
                yield number, line
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None


def _read_row(number: int, line: bytes, where: str) -> Row | None:
    """The row of one line; None for a blank one. `where` begins the message of what is wrong."""
    try:
        text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
    except UnicodeDecodeError:
        raise UserError(f"{where}: not UTF-8; save the file in that encoding") from None
    if not text:
        return None
    try:  # numbers stay as they are written: no rounding, and no huge int is ever made
        row = json.loads(text, parse_int=str, parse_float=str, parse_constant=lambda name: None)
    except (ValueError, RecursionError):
        raise UserError(f"{where}: not JSON; each line must be one object of its own") from None
    if not isinstance(row, dict):
        raise UserError(f'{where}: not an object; write {{"prompt": ..., "answer": ...}}')
    prompt = _read_text(row, "prompt" if "prompt" in row or "question" not in row else "question", where)
    gold = gold_answer(_read_text(row, "answer", where))
    if not canonical(gold):
        raise UserError(
            rf"{where}: nothing to verify in the answer; what follows #### or stands in \boxed{{}} is empty"
        )
    if len(gold) > MOST_COMPARED:
        reason = f"an answer of {len(gold)} characters, and at most {MOST_COMPARED} can be compared"
        raise UserError(rf"{where}: {reason}; mark the final one by #### or \boxed{{}}")
    return Row(number, prompt, gold)


def _read_text(row: dict, key: str, where: str) -> str:
    """The text under `key`, stripped and not empty."""
    if key not in row:
        raise UserError(f'{where}: no "{key}"; every row needs a prompt (or question) and an answer')
    value = row[key]
    if not isinstance(value, str):  # numbers are texts here
        raise UserError(f'{where}: "{key}" must be a text or a number')
    if not value.strip():
        raise UserError(f'{where}: "{key}" is empty')
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise UserError(f'{where}: "{key}" holds half a character (a lone surrogate), which no tokenizer reads')
    return value.strip()


class DatasetTask(LanguageTask):
    r"""Rows of `read_dataset` as a task: the last `heldout` of them (default: a quarter, at most 64) are never trained.

    A completion is judged by what it states: the last \boxed{}, else behind ####, else its last number (its last line
    where the row's answer is no number). Each row has one correct answer, however it is spelled, so M = 1: of measures
    that count modes, `distinct@k` is pass@k and `effective_modes` is 1 wherever anything is right.

    Raises UserError where `heldout` leaves nothing to train on or to evaluate.
    """

    name = "dataset"

    def __init__(
        self,
        rows: Sequence[Row],
        tokenizer,
        stops: Sequence[int],
        heldout: int | None = None,
        max_new_tokens: int = 256,
        instruction: str = BOXED,
        vocab_size: int | None = None,
    ):
        heldout = max(min(64, len(rows) // 4), 1) if heldout is None else heldout
        if not 0 < heldout < len(rows):
            reason = f"{heldout} rows held out of {len(rows)}"
            raise UserError(f"{reason}: at least one must be held out and one trained on; give more rows")
        self.gold = {row.prompt: row.gold for row in rows}
        prompts = tuple(self.gold)
        self.train, self.heldout = prompts[:-heldout], prompts[-heldout:]
        self.max_new_tokens = max_new_tokens
        super().__init__(tokenizer, stops, instruction, vocab_size)

    def modes(self, prompt: str) -> list[str]:
        """The one correct answer, in its canonical spelling."""
        return [canonical(self.gold[prompt])]

    def parse_answer(self, completion: str, numeric: bool = True) -> str | None:
        """The answer that is marked as such, else the last number (where one is expected), else the last line."""
        stated = stated_answer(completion)
        if stated is None and numeric:
            stated = last_number(completion)
        return completion[-READ_LAST:].strip().rpartition("\n")[2] if stated is None else stated

    def verify(self, prompt: str, completion: str) -> bool:
        """Does the text state the row's answer, in whatever spelling?"""
        gold = self.gold[prompt]
        return same_answer(self.parse_answer(completion, read_number(gold) is not None), gold)

    def mode_of(self, prompt: str, completion: str) -> str | None:
        """The row's answer in its canonical spelling if the text states it, else None: distinct answers count 1."""
        return self.modes(prompt)[0] if self.verify(prompt, completion) else None

    def sample(self, prompt: str, rng: random.Random) -> str:
        """The row's answer: there is no pretraining data here, and no choice."""
        return self.gold[prompt]

    def plain_language(self, prompt: str) -> str:
        """The prompt: it is plain language already."""
        return prompt
