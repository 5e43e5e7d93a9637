"""The toy policy as a Llama: the same logits, draws, tokens and exact probabilities, and bit for bit back."""
# ruff: noqa: E402 (the whole file is skipped before it imports what is not there)

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

import torch
from conftest import generator, step_by_step, tiny_policy
from transformers import AutoTokenizer

import minirlvr
from language_models.generate import text_mask
from language_models.llama import export_policy, import_policy
from language_models.loading import load_model, stop_ids
from language_models.policy import HFPolicy
from minirlvr import rollout
from tests.language_models.models import (
    CLOSE,
    change_config,
    half_a_file,
    pickled_weights,
    random_tokens,
    remove,
    rename_a_tensor,
    tiny_model,
    uneven_prompts,
)
from toy_tasks import PAD, STOP, TASKS, UserError
from toy_tasks.exact import Listing


@pytest.fixture(scope="module", params=TASKS)
def exported(request, tmp_path_factory):
    """A task, a random toy policy for it, and the folder it was exported to."""
    task, folder = TASKS[request.param](), tmp_path_factory.mktemp(request.param)
    policy = tiny_policy(task.vocab_size)
    export_policy(policy, task, folder)
    return task, policy, folder


def toy_batch(task):
    """Prompts of all lengths (Q, P), left-padded, and completions (Q, G, T) of all tokens."""
    prompts = task.encode_prompts(sorted(task.prompts, key=len)[:: max(1, len(task.prompts) // 5)])
    completions = torch.randint(0, task.vocab_size, (len(prompts.tokens), 3, 4), generator=generator(2))
    return prompts, completions


def test_an_exported_policy_gives_the_same_logits(exported):
    """By AutoModelForCausalLM, in every way to read, with padding: within 1e-5."""
    task, policy, folder = exported
    loaded, _ = load_model(str(folder))
    assert type(loaded.model) is transformers.LlamaForCausalLM
    prompts, completions = toy_batch(task)
    expected = policy.completion_logits(prompts, completions)
    torch.testing.assert_close(loaded.completion_logits(prompts, completions), expected, **CLOSE)
    torch.testing.assert_close(step_by_step(loaded, prompts, completions), expected, **CLOSE)
    torch.testing.assert_close(loaded(prompts)[prompts.real], policy(prompts)[prompts.real], **CLOSE)


def test_the_toy_policy_and_its_llama_draw_the_same_completions(exported):
    """One loop for both: the same seed, the same tokens, the same log-probabilities."""
    task, policy, folder = exported
    prompts, _ = toy_batch(task)
    one, other = (
        rollout(p, prompts, 4, task.max_new_tokens, generator()) for p in (policy, load_model(str(folder))[0])
    )
    assert torch.equal(one.completions, other.completions)
    torch.testing.assert_close(one.logprobs, other.logprobs, **CLOSE)


def test_an_imported_policy_is_the_exported_one_bit_for_bit(exported):
    task, policy, folder = exported
    back = import_policy(folder)
    for name, value in policy.state_dict().items():
        assert torch.equal(back.state_dict()[name], value), name
    prompts, completions = toy_batch(task)
    assert torch.equal(back.completion_logits(prompts, completions), policy.completion_logits(prompts, completions))


def test_a_llama_of_our_shape_made_elsewhere_is_imported(tmp_path):
    """transformers' own random llama: logits of the toy policy within 1e-5 of its own, padded batches too."""
    shape = {"intermediate_size": 44, "num_key_value_heads": 4, "rms_norm_eps": 1e-5, "pad_token_id": PAD}
    model = tiny_model("llama", **shape)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 1:
                weight.uniform_(0.5, 2, generator=generator(6))  # norms that are not 1
            assert weight.abs().max() > 0, name
    model.save_pretrained(tmp_path)
    prompts, completions, peer = uneven_prompts(PAD), random_tokens(3, 2, 4, seed=2), HFPolicy(model)
    expected = peer.completion_logits(prompts, completions)
    torch.testing.assert_close(import_policy(tmp_path).completion_logits(prompts, completions), expected, **CLOSE)


def test_the_tokenizer_is_the_tasks_own_coding(exported):
    """Text to ids and back for every prompt and mode, nothing put before or behind, as AutoTokenizer reads it."""
    task, _, folder = exported
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    texts = {text for prompt in task.prompts for text in (prompt, *task.modes(prompt))}
    for text in sorted(texts):
        for spelled in (text, text + "."):
            assert tokenizer.encode(spelled) == tokenizer(spelled)["input_ids"] == task.encode(spelled)
        ids = task.encode(text)
        assert tokenizer.decode(ids) == task.decode(ids) == text
        ended = [*ids, STOP, PAD, PAD]
        assert tokenizer.decode(ended, skip_special_tokens=True) == task.decode(ended) == text
        assert tokenizer.decode(ended) == text + ".__"
    assert len(tokenizer) == task.vocab_size
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id) == (PAD, STOP, None)


def test_the_tokenizer_pads_a_batch_as_the_task_does(exported):
    """At the left, with the ids of encode_prompts."""
    task, _, folder = exported
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    batch = tokenizer(list(task.prompts), return_tensors="pt", padding=True)
    expected = task.encode_prompts(task.prompts)
    assert torch.equal(batch["input_ids"], expected.tokens)
    assert torch.equal(batch["attention_mask"].bool(), expected.real)
    assert torch.equal(expected.real, text_mask(batch["input_ids"], PAD))


def test_greedy_generate_of_the_export_ends_at_the_stop(exported):
    """eos and pad reach transformers' own generation: the toy policy's most likely tokens up to its stop."""
    task, policy, folder = exported
    loaded, tokenizer = load_model(str(folder))
    assert stop_ids(loaded, tokenizer) == (STOP,)
    prompts, _ = toy_batch(task)
    options = {"do_sample": False, "max_new_tokens": task.max_new_tokens}
    drawn = loaded.model.generate(prompts.tokens, attention_mask=prompts.real.long(), **options)
    greedy = rollout(policy, prompts, 1, task.max_new_tokens, generator(), temperature=1e-4)
    P = prompts.tokens.shape[1]
    assert torch.equal(drawn[:, P:], greedy.completions[:, 0, : drawn.shape[1] - P])


def test_a_policy_of_another_task_is_not_exported(tmp_path):
    with pytest.raises(UserError, match="the policy has 14 tokens, countdown 17"):
        export_policy(tiny_policy(14), TASKS["countdown"](), tmp_path)


NOT_OURS = {
    "intermediate_size": 40,
    "num_key_value_heads": 1,
    "hidden_act": "gelu",
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0},
    "tie_word_embeddings": True,
    "attention_bias": True,
    "mlp_bias": True,
    "head_dim": 4,
    "num_hidden_layers": 10**9,
    "vocab_size": 10**12,
    "hidden_size": -16,
    "num_attention_heads": 16,
    "model_type": "qwen2",
}


@pytest.mark.parametrize("setting", NOT_OURS)
def test_a_llama_of_another_shape_is_not_imported(exported, tmp_path, setting):
    """One line that names the setting; a config that lies about its size takes no memory."""
    shutil.copytree(exported[2], tmp_path, dirs_exist_ok=True)
    change_config(tmp_path, **{setting: NOT_OURS[setting]})
    with pytest.raises(UserError) as caught:
        import_policy(tmp_path)
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_rope_theta_is_checked(exported, tmp_path):
    """The same words, other angles."""
    shutil.copytree(exported[2], tmp_path, dirs_exist_ok=True)
    change_config(tmp_path, rope_parameters={"rope_type": "default", "rope_theta": 500000.0})
    with pytest.raises(UserError, match="rope_parameters"):
        import_policy(tmp_path)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: remove(folder, "*"), "cannot import"),
        (lambda folder: shutil.rmtree(folder), "no folder"),
        (half_a_file, "cannot import"),
        (lambda folder: rename_a_tensor(folder / "model.safetensors"), "not a Llama of 2 layers: see lm_head.weight"),
        (lambda folder: change_config(folder, num_hidden_layers=1), "not a Llama of 1 layers"),
        (lambda folder: change_config(folder, vocab_size=99999), "is of another model: embedding.weight"),
        (lambda folder: change_config(folder, hidden_size="16"), "cannot import"),
        (pickled_weights, "cannot import"),
    ],
)
def test_a_damaged_folder_is_not_imported(exported, tmp_path, spoil, message):
    shutil.copytree(exported[2], tmp_path, dirs_exist_ok=True)
    spoil(tmp_path)
    with pytest.raises(UserError, match=message) as caught:
        import_policy(tmp_path)
    assert "\n" not in str(caught.value)


def test_an_exact_listing_is_the_same_for_both(exported):
    """toy_tasks.exact takes either: the exact probability of every mode, within 1e-5."""
    task, policy, folder = exported
    listing = Listing(task, task.train[:4])
    with torch.no_grad():
        found = listing.log_probs(load_model(str(folder))[0])
        torch.testing.assert_close(found, listing.log_probs(policy), **CLOSE)


@pytest.mark.slow
def test_the_one_file_needs_no_transformers():
    """A toy run never imports this room or what it needs."""
    code = "import lab.command_line, minirlvr, sys; assert not {'language_models', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(minirlvr.__file__).parent)
