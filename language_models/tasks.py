"""Tasks for a model that speaks: a toy task in plain language; dataset.py asks your own questions.

A `LanguageTask` puts a tokenizer between text and tokens; the training loop sees what it sees of any task. `TextTask`
asks a toy task's prompts in English and reads the answer out of what comes back.
"""

import random
from collections.abc import Mapping, Sequence

from toy_tasks import Task, UserError


class LanguageTask(Task):
    """What all tasks over a tokenizer share. A subclass gives prompts, `plain_language`, and sets `max_new_tokens`.

    A tokenizer is one of transformers', or anything with its `encode`, `decode`, `len` and, where a `chat_template` is
    not None, `apply_chat_template`. `stops` are the ids that end a completion; `vocab_size` is the model's number of
    logits, which may exceed the tokenizer's; `instruction` is written under every prompt.
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
