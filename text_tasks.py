"""Tasks for a model that speaks: a toy task in plain language, or your own questions and answers from a .jsonl file.

A `LanguageTask` puts a tokenizer between text and tokens; the training loop sees what it sees of any task. `TextTask`
asks a toy task's prompts in English and reads the answer out of what comes back. `DatasetTask` asks yours.

What a model writes and what a file holds is hostile: nothing is evaluated, and every length and number is bounded.
"""

import functools
import json
import logging
import math
import random
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

from minirlvr import UserError
from toy_tasks.task import READ_LAST, Task

MOST_BYTES = 256 * 2**20  # of a dataset
MOST_LINE_BYTES = 2**20  # of one row of it
MOST_DIGITS = 40  # a number with more is no answer
MOST_COMPARED = 200  # characters of an answer that is not a number
BOXED = r"Put the final answer in \boxed{}."


# === Text and tokens ===


class LanguageTask(Task):
    """What all tasks over a tokenizer share. A subclass gives prompts, `plain_language`, and sets `max_new_tokens`.

    A tokenizer is one of transformers', or anything with its `encode`, `decode`, `pad_token_id`, `len` and, where a
    `chat_template` is not None, `apply_chat_template`. `stops` are the ids that end a completion; `vocab_size` is the
    model's number of logits, which may exceed the tokenizer's; `instruction` is written under every prompt.
    """

    vocab_size: int = 0  # the model's: set for each task, in place of the count of characters

    def __init__(self, tokenizer, stops: Sequence[int], instruction: str = "", vocab_size: int | None = None):
        """Encodes every prompt once. Raises UserError where ids, stops and the model's vocabulary do not fit."""
        self.tokenizer, self.stops, self.instruction = tokenizer, tuple(stops), instruction
        self.vocab_size = len(tokenizer) if vocab_size is None else vocab_size
        if not self.stops:
            raise UserError("no stop token is given: a completion could not end; give at least one id")
        self.prompt_ids = {prompt: self._encode_message(self.plain_language(prompt)) for prompt in self.prompts}
        if len({tuple(ids) for ids in self.prompt_ids.values()}) < len(self.prompts):
            raise UserError("two prompts have the same token ids: the tokenizer or its chat template leaves text out")
        largest = max(*self.stops, *map(max, self.prompt_ids.values()))
        if largest >= self.vocab_size:
            reason = f"token id {largest} is outside the model's vocabulary of {self.vocab_size}"
            raise UserError(f"{reason}: take the tokenizer and the stops that belong to the model")
        first_ids = {ids[0] for ids in self.prompt_ids.values()}
        self.pad = choose_pad(tokenizer.pad_token_id, first_ids, self.vocab_size)

    def _encode_message(self, text: str) -> list[int]:
        """Ids of one message to the model: through the chat template, or as plain text where there is none."""
        text = f"{text}\n{self.instruction}" if self.instruction else text
        try:
            ids = self._ids_of_message(text)
        except Exception as error:  # a tokenizer without unknown tokens, a chat template that does not run, and more
            reason = " ".join(str(error).split())[:120]
            raise UserError(f"the tokenizer cannot write {text!r:.60} ({reason}): take another model or task") from None
        if not ids:
            raise UserError(f"the tokenizer makes no token of the prompt {text!r:.60}: take another tokenizer")
        return ids

    def _ids_of_message(self, text: str) -> list[int]:
        """The same, as the tokenizer gives them."""
        if getattr(self.tokenizer, "chat_template", None):
            message = [{"role": "user", "content": text}]
            encoded = self.tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=True)
            return list(encoded["input_ids"] if isinstance(encoded, Mapping) else encoded)
        # Ends in a line break, not in "Answer: ": a space there would be half of the token " 5".
        ids = list(self.tokenizer.encode(f"{text}\nAnswer:\n"))
        while ids and ids[-1] in self.stops:  # some tokenizers end every text, and the model would go on after its end
            ids.pop()
        return ids

    def encode_prompt(self, prompt: str) -> list[int]:
        """Token ids of one of the task's prompts, as the model reads it. Raises KeyError for any other prompt."""
        return list(self.prompt_ids[prompt])

    def prompt_width(self, prompts: Sequence[str]) -> int:
        """Tokens that a batch of `prompts` is padded to: the longest of them, for prompts of a dataset vary a lot."""
        return max(len(self.prompt_ids[prompt]) for prompt in prompts)

    def encode(self, text: str) -> list[int]:
        """Token ids of a bare text: no special token in front or behind."""
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def decode(self, ids: Sequence[int]) -> str:
        """Text up to the first stop (not included), without special tokens."""
        ids = list(ids)
        end = next((place for place, token in enumerate(ids) if token in self.stops), len(ids))
        return self.tokenizer.decode(ids[:end], skip_special_tokens=True)

    def answer_ids(self, mode: str) -> list[int]:
        """The canonical token ids of an answer's text, and the first stop.

        The same text can be cut into tokens in other ways, end in another stop, or stand in a sentence. So the
        probability of these ids is a *lower bound* on the probability of the answer, not the probability itself.
        """
        return [*self.encode(mode), self.stops[0]]

    def mode_of(self, prompt: str, completion: str) -> str | None:
        """Which of `modes(prompt)` a completion states; None where it is wrong."""
        raise NotImplementedError


def choose_pad(preferred: int | None, first_ids: set[int], vocab_size: int) -> int:
    """The preferred padding id, or else the smallest that no prompt begins with: padding is the *leading* run of it.

    Raises UserError where prompts begin with every id that there is.
    >>> choose_pad(7, {1, 2}, vocab_size=10), choose_pad(1, {0, 1}, vocab_size=10), choose_pad(None, {1}, vocab_size=10)
    (7, 2, 0)
    """
    if preferred is not None and preferred < vocab_size and preferred not in first_ids:
        return preferred
    free = next((i for i in range(vocab_size) if i not in first_ids), None)
    if free is None:
        raise UserError(f"prompts begin with each of the {vocab_size} token ids, so none is left to pad with")
    return free


# === A toy task, spoken ===

SHORTEST_CUT = 12  # tokens: room for "12 = 5 + 7." where a token is a character, and still cheap to sample
SLACK = 4  # tokens: a space, a line break, a full stop around the longest answer


class TextTask(LanguageTask):
    """A toy task in plain language: same prompts, same answers, same verifier, and a model that may be talkative.

    `max_new_tokens` (default: the longest right answer with its stop and 4 more, at least 12) is where completions are
    cut. Talk that goes on beyond is cut and often wrong, which RL soon learns. Raises UserError where it is too short
    for some right answer.
    """

    def __init__(
        self,
        task: Task,
        tokenizer,
        stops: Sequence[int],
        max_new_tokens: int | None = None,
        instruction: str = "",
        vocab_size: int | None = None,
    ):
        self.task, self.name, self.train, self.heldout = task, task.name, task.train, task.heldout
        super().__init__(tokenizer, stops, instruction, vocab_size)
        longest = max(len(self.answer_ids(mode)) for prompt in self.prompts for mode in self.modes(prompt))
        if max_new_tokens is not None and max_new_tokens < longest:
            reason = f"the longest right answer of {self.name} and its stop take {longest} tokens"
            raise UserError(f"max_new_tokens is {max_new_tokens}: {reason}, so give at least that")
        self.max_new_tokens = max_new_tokens or max(longest + SLACK, SHORTEST_CUT)

    def modes(self, prompt: str) -> list[str]:
        """The toy task's: every correct answer in its canonical form."""
        return self.task.modes(prompt)

    def parse_answer(self, completion: str) -> str | None:
        """The last answer that the text states, in the toy task's canonical form."""
        return self.task.parse_answer(completion)

    def mode_of(self, prompt: str, completion: str) -> str | None:
        """The correct answer that the text states; None where it states a wrong one or none."""
        answer = self.parse_answer(completion)
        return answer if answer is not None and self.task.verify(prompt, answer) else None

    def verify(self, prompt: str, completion: str) -> bool:
        """Is the answer that the text states last right?"""
        return self.mode_of(prompt, completion) is not None

    def sample(self, prompt: str, rng: random.Random) -> str:
        """The toy task's pretraining data; a real model needs none."""
        return self.task.sample(prompt, rng)

    def plain_language(self, prompt: str) -> str:
        """The toy task's."""
        return self.task.plain_language(prompt)

    def mode_class(self, completion: str) -> str:
        """The toy task's class of the stated answer; the text itself where it states none."""
        answer = self.parse_answer(completion)
        return completion if answer is None else self.task.mode_class(answer)


# === Numbers and other answers, compared ===

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


# === The user's own questions ===


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
