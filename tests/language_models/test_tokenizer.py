"""Tasks in plain language over a real tokenizer of transformers, made on the spot: byte pairs, with a chat template."""
# ruff: noqa: E402 (the whole file is skipped before it imports what is not there)

import json

import pytest

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from language_models.dataset import DatasetTask, read_dataset
from language_models.tasks import TextTask
from tests.language_models.models import TEMPLATE, make_tokenizer
from toy_tasks import TASKS

EVERY_TASK = pytest.mark.parametrize("task", [make() for make in TASKS.values()], ids=list(TASKS))


@pytest.fixture(scope="module", params=[None, TEMPLATE], ids=["plain", "chat"])
def tokenizer(request):
    return make_tokenizer(request.param)


def test_the_prompt_is_what_the_template_prints(tokenizer):
    """A flat list of ids: the words, the turns, and the model's turn begun."""
    task = TextTask(TASKS["sums"](), tokenizer, stops=[tokenizer.eos_token_id])
    ids, said = task.encode_prompt("12="), TASKS["sums"]().plain_language("12=")
    assert all(type(i) is int for i in ids)
    chat = f"<|turn|>user\n{said}<|end|>\n<|turn|>assistant\n"
    assert tokenizer.decode(ids) == (chat if tokenizer.chat_template else f"{said}\nAnswer:\n")


@EVERY_TASK
def test_canonical_ids_of_every_mode_state_it(tokenizer, task):
    """Text to ids to text, special tokens left out, cut at the stop; all fit the default length."""
    text_task = TextTask(task, tokenizer, stops=[tokenizer.eos_token_id])
    turn = tokenizer.convert_tokens_to_ids("<|turn|>")
    for prompt in task.prompts:
        for mode in task.modes(prompt):
            ids = text_task.answer_ids(mode)
            assert len(ids) <= text_task.max_new_tokens
            assert text_task.decode([turn, *ids, *text_task.encode("99")]) == mode
            assert text_task.mode_of(prompt, text_task.decode(ids)) == mode


def test_padding_is_told_from_text(tokenizer):
    """Whatever id the tokenizer itself would pad with: its end token, or the one that every turn begins with."""
    task = TextTask(TASKS["sums"](), tokenizer, stops=[tokenizer.eos_token_id])
    turning = make_tokenizer(tokenizer.chat_template)
    turning.pad_token = "<|turn|>"
    for spoken in (task, TextTask(TASKS["sums"](), turning, stops=[tokenizer.eos_token_id])):
        real = spoken.encode_prompts(spoken.prompts).real  # (Q, P)
        assert real.sum(1).tolist() == [len(spoken.encode_prompt(prompt)) for prompt in spoken.prompts]


def test_a_dataset_is_asked_and_judged(tokenizer, tmp_path):
    """From the file to the verdict."""
    rows = [{"question": f"{i} + {i} = ?", "answer": f"So\n#### {2 * i:,}"} for i in range(1000, 1008)]
    path = tmp_path / "sums.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    task = DatasetTask(read_dataset(path), tokenizer, stops=[tokenizer.eos_token_id], vocab_size=512)
    assert (len(task.train), len(task.heldout), task.vocab_size) == (6, 2, 512)
    assert task.encode_prompts(task.train).tokens.shape[0] == 6
    for prompt, right in (("1003 + 1003 = ?", r"It is \boxed{2006}."), ("1007 + 1007 = ?", "2014")):
        assert task.verify(prompt, task.decode([*task.encode(right), tokenizer.eos_token_id, 65]))
        assert not task.verify(prompt, task.decode(task.encode(right.replace("2", "3"))))
