"""The size of a step, and of a text, before any weight is loaded."""
# ruff: noqa: E402 (the whole file is skipped before it imports what is not there)

import pytest

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from conftest import short_settings

from lab.settings import parse_method
from language_models.loading import load_model
from language_models.run import TextRuns
from language_models.size import longest_text
from tests.language_models.models import save_chat_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny untrained Llama with a tokenizer and a chat template."""
    path = tmp_path_factory.mktemp("model")
    save_chat_model(path)
    return path


def test_the_size_of_a_step_is_said_before_it(folder):
    """Parameters as transformers counts them; tokens as the flags multiply; adapters as peft makes them."""
    chosen = short_settings(policy=f"hf:{folder}", task="sums", prompts=2, group_size=4, max_new_tokens=6, lora_rank=2)
    policy = load_model(str(folder), lora_rank=2)[0]
    trained = sum(p.numel() for p in policy.parameters() if p.requires_grad)
    total = sum(p.numel() for p in policy.parameters()) - trained
    runs = TextRuns(chosen)
    runs.prepare([parse_method("grpo")], "cpu")
    said = runs.description
    assert f"{total:,} parameters, {trained:,} of them trained" in said
    assert "2 prompts of up to" in said and "4 completions of up to 6 tokens each: 48 tokens drawn" in said


def test_a_model_that_stretches_its_positions_is_not_asked_for_texts_that_do_so(folder):
    """With them, what lies in the cache and what is read at once would have other positions."""
    config = transformers.LlamaConfig.from_pretrained(folder)
    assert longest_text(config) == config.max_position_embeddings
    config.rope_parameters |= {"rope_type": "longrope", "original_max_position_embeddings": 100}
    assert longest_text(config) == 100
