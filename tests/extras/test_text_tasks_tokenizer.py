"""Tasks in plain language over a real tokenizer of transformers, made on the spot: byte pairs, with a chat template."""

import json

import pytest

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

from text_tasks import DatasetTask, TextTask, read_dataset  # noqa: E402 - only where there is a tokenizer
from toy_tasks import TASKS  # noqa: E402
from toy_tasks.exact import encode_prompts  # noqa: E402

EVERY_TASK = pytest.mark.parametrize("task", [make() for make in TASKS.values()], ids=list(TASKS))
TEMPLATE = (
    "{% for message in messages %}<|turn|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)


def make_tokenizer(chat_template=None):
    """Byte-level BPE with 200 merges, learned from the tasks' own prompts; <|end|> ends, and pads as it often does."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    special = ["<|end|>", "<|turn|>"]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=458, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    texts = [task.plain_language(prompt) for task in (make() for make in TASKS.values()) for prompt in task.prompts]
    tokenizer.train_from_iterator(texts, trainer)
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|end|>", additional_special_tokens=["<|turn|>"]
    )
    fast.chat_template = chat_template
    return fast


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
    """The tokenizer pads with its end token: fine, as no prompt begins with it. With the turn token it is not."""
    task = TextTask(TASKS["sums"](), tokenizer, stops=[tokenizer.eos_token_id])
    assert task.pad == tokenizer.pad_token_id
    turning = make_tokenizer(tokenizer.chat_template)
    turning.pad_token = "<|turn|>"
    for spoken in (task, TextTask(TASKS["sums"](), turning, stops=[tokenizer.eos_token_id])):
        tokens = encode_prompts(spoken, list(spoken.prompts))  # (Q, P)
        real = (tokens != spoken.pad).cumsum(1) > 0
        assert real.sum(1).tolist() == [len(spoken.encode_prompt(prompt)) for prompt in spoken.prompts]


def test_a_dataset_is_asked_and_judged(tokenizer, tmp_path):
    """From the file to the verdict."""
    rows = [{"question": f"{i} + {i} = ?", "answer": f"So\n#### {2 * i:,}"} for i in range(1000, 1008)]
    path = tmp_path / "sums.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    task = DatasetTask(read_dataset(path), tokenizer, stops=[tokenizer.eos_token_id], vocab_size=512)
    assert (len(task.train), len(task.heldout), task.vocab_size) == (6, 2, 512)
    assert encode_prompts(task, list(task.train)).shape[0] == 6
    for prompt, right in (("1003 + 1003 = ?", r"It is \boxed{2006}."), ("1007 + 1007 = ?", "2014")):
        assert task.verify(prompt, task.decode([*task.encode(right), tokenizer.eos_token_id, 65]))
        assert not task.verify(prompt, task.decode(task.encode(right.replace("2", "3"))))
