"""Texts of different lengths in one tensor: what is padding and what is text, and that both always travel together."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from toy_tasks import PAD, TASKS, Padded, left_pad
from toy_tasks.exact import followed_by

texts_of_ids = st.lists(st.lists(st.integers(0, 9), max_size=6), min_size=1, max_size=5).filter(any)


@given(texts=texts_of_ids, width=st.integers(0, 9))
def test_left_pad_keeps_every_text_at_the_right(texts, width):
    """Real is the text, whatever ids it holds, the padding's too; before it is padding and nothing else."""
    padded = left_pad(texts, width)
    assert padded.tokens.dtype == torch.long and padded.real.dtype == torch.bool
    assert padded.tokens.shape == padded.real.shape == (len(texts), max(width, *map(len, texts)))
    for text, ids, real in zip(texts, padded.tokens, padded.real, strict=True):
        assert ids[real].tolist() == text
        assert not ids[~real].any() and PAD == 0
        assert real.tolist() == sorted(real.tolist())  # False before True


def test_texts_of_one_length_have_no_padding():
    """`Padded.of` takes every token for text, the padding's id too."""
    padded = Padded.of(torch.tensor([[PAD, 3], [4, PAD]]))
    assert padded.real.all() and padded.real.shape == (2, 2)


@pytest.mark.parametrize("rows", [slice(1, 3), [2, 0, 2], torch.tensor([2, 0, 2]), torch.tensor([True, False, True])])
def test_picking_takes_tokens_and_mask_alike(rows):
    """A slice, indices, or a choice: the same rows of both."""
    padded = left_pad([[2], [3, 4], [5, 6, 7]])
    picked = padded.pick(rows)
    assert torch.equal(picked.tokens, padded.tokens[rows]) and torch.equal(picked.real, padded.real[rows])


def test_both_parts_move_to_a_device():
    """A mask left behind would be an error only where there is an accelerator."""
    moved = left_pad([[2], [3, 4]]).to("meta")
    assert moved.tokens.is_meta and moved.real.is_meta


def test_what_follows_a_prompt_is_text():
    """Completions are padded behind their stop, which no token before it sees: only the prompt's padding is hidden."""
    texts = followed_by(left_pad([[2], [3, 4]]), torch.tensor([[5, 1, PAD], [PAD, 6, 1]]))
    assert texts.tokens.tolist() == [[PAD, 2, 5, 1, PAD], [3, 4, PAD, 6, 1]]
    assert texts.real.tolist() == [[False, True, True, True, True], [True] * 5]


@pytest.mark.parametrize("make", TASKS.values(), ids=list(TASKS))
def test_prompts_are_padded_on_the_left_to_the_tasks_longest(make):
    """One width for every batch of a task, whatever prompts are in it; what is text reads as the prompt."""
    task = make()
    width = max(map(len, task.prompts))
    for prompts in (task.prompts, task.prompts[:1], task.prompts[::-3]):
        padded = task.encode_prompts(prompts)
        assert padded.tokens.shape == (len(prompts), width)
        for prompt, ids, real in zip(prompts, padded.tokens, padded.real, strict=True):
            assert real.tolist() == [False] * (width - len(prompt)) + [True] * len(prompt)
            assert task.decode(ids[real].tolist()) == prompt
            assert (ids[~real] == PAD).all()


def test_a_task_may_write_its_prompts_otherwise_and_choose_the_width():
    """`encode_prompt` and `prompt_width` are what a task overrides, and a batch follows both."""

    class Backwards(TASKS["sums"]):
        def encode_prompt(self, prompt):
            return self.encode(prompt[::-1])

        def prompt_width(self, prompts):
            return 5

    padded = Backwards().encode_prompts(["9=", "12="])
    forwards = [Backwards().encode(text) for text in ("=9", "=21")]
    assert padded.tokens.tolist() == [[PAD] * 3 + forwards[0], [PAD] * 2 + forwards[1]]
    assert padded.real.sum(1).tolist() == [2, 3]


def test_empty_texts_and_no_texts_are_batches_too():
    """Whole numbers whatever is in them, and as wide as was asked."""
    assert left_pad([[]]).tokens.dtype == torch.long and left_pad([[]]).tokens.shape == (1, 0)
    assert left_pad([], width=3).tokens.shape == (0, 3) and not left_pad([[]], width=2).real.any()
