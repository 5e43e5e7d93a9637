"""Hugging Face models read like the toy policy, the toy policy as a Llama, and DLC in transformers' own sampling."""
# ruff: noqa: E402 (the whole file is skipped before it imports what is not there)

import contextlib
import copy
import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

import torch
from conftest import generator, step_by_step, tiny_policy
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import minirlvr
from huggingface import (
    HFPolicy,
    MemoryLogitsProcessor,
    character_tokenizer,
    export_policy,
    import_policy,
    load_model,
    load_weights,
    save_model,
    stop_ids,
)
from minirlvr import UserError, rollout, token_logprobs
from toy_tasks import PAD, STOP, TASKS, Sums
from toy_tasks.exact import encode_prompts

transformers.utils.logging.disable_progress_bar()


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    """Nothing here asks the network, not even for a name that is no folder."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


VOCAB, PAD_ID = 24, 3  # a padding id other than the toy tasks'
CLOSE = {"atol": 1e-5, "rtol": 1e-5}
KINDS = ("llama", "gpt2", "qwen2")


def tiny_model(kind: str, seed: int = 0, **changed):
    """An untrained model of two layers and a few thousand weights, drawn large enough that tokens matter."""
    sizes = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.3}
    if kind == "gpt2":
        sizes = {"vocab_size": VOCAB, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}
        sizes |= {"initializer_range": 0.3, "bos_token_id": 1, "eos_token_id": 1}
    config = transformers.AutoConfig.for_model(kind, **sizes | changed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config)


def tiny(kind: str, checkpointing: bool = False, **changed) -> HFPolicy:
    return HFPolicy(tiny_model(kind, **changed), PAD_ID, checkpointing)


def random_tokens(*shape, seed=1):
    """Any tokens but the padding id."""
    return torch.randint(PAD_ID + 1, VOCAB, shape, generator=generator(seed))


def uneven_prompts():
    """Three prompts of 5, 3 and 1 tokens, left-padded."""
    prompts = random_tokens(3, 5)
    prompts[1, :2] = PAD_ID
    prompts[2, :4] = PAD_ID
    return prompts


def one_by_one(policy, prompts, completions):
    """(Q, G, T, V): a plain loop over N separate texts without padding or cache, by the model itself."""
    rows = []
    for prompt, group, length in zip(prompts, completions, (5, 3, 1), strict=True):
        for completion in group:
            text = torch.cat((prompt[-length:], completion))[None]  # (1, length + T)
            rows.append(policy.model(input_ids=text, use_cache=False).logits[0, length - 1 : -1])
    return torch.stack(rows).view(*completions.shape, -1)


def gradients(policy, read, prompts, completions):
    """Name -> gradient of a fixed random sum of the logits (Q, G, T, V) that `read` gives."""
    pull = torch.randn(*completions.shape, policy.vocab_size, generator=generator(4))
    policy.zero_grad()
    (read(policy, prompts, completions).float() * pull).sum().backward()
    return {name: p.grad.clone() for name, p in policy.named_parameters() if p.requires_grad}


def lora_policy(folder, rank=2, **options) -> HFPolicy:
    """A policy on the model saved in `folder`, with adapters where rank is above 0."""
    if rank:
        pytest.importorskip("peft", reason="peft is not installed")
    policy, _ = load_model(str(folder), lora_rank=rank, **options)
    policy.pad = PAD_ID
    return policy


def train_a_step(policy):
    """One SGD step that surely moves what is trained."""
    optimizer = torch.optim.SGD([p for p in policy.parameters() if p.requires_grad], lr=0.5)
    completions = random_tokens(3, 2, 4)
    token_logprobs(policy.completion_logits(uneven_prompts(), completions), completions).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Kind -> a folder with a tiny model and a tokenizer, as from the hub."""
    folders = {}
    for kind in KINDS:
        folders[kind] = tmp_path_factory.mktemp(kind)
        tiny_model(kind).save_pretrained(folders[kind])
        character_tokenizer(Sums()).save_pretrained(folders[kind])
    return folders


# --- one tree, many ways to read it ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("G", "T"), [(1, 1), (3, 1), (1, 4), (3, 5)])
def test_every_way_to_read_a_group_gives_the_same_logits(kind, G, T):
    """Prompt read once, token by token from the cache, with checkpointing, and N separate texts without padding."""
    policy, checkpointed = tiny(kind), tiny(kind, checkpointing=True)
    prompts, completions = uneven_prompts(), random_tokens(3, G, T, seed=2)
    expected = one_by_one(policy, prompts, completions)
    torch.testing.assert_close(policy.completion_logits(prompts, completions), expected, **CLOSE)
    torch.testing.assert_close(checkpointed.completion_logits(prompts, completions), expected, **CLOSE)
    with torch.no_grad():
        torch.testing.assert_close(step_by_step(policy, prompts, completions), expected, **CLOSE)
        torch.testing.assert_close(step_by_step(checkpointed, prompts, completions), expected, **CLOSE)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_equal_those_of_separate_texts(kind):
    """Backward through the shared prompt, and through checkpoints, is backward through N texts of their own."""
    prompts, completions = uneven_prompts(), random_tokens(3, 3, 5, seed=2)
    expected = gradients(tiny(kind), one_by_one, prompts, completions)
    assert max(gradient.abs().max() for gradient in expected.values()) > 0.1
    for checkpointing in (False, True):
        found = gradients(tiny(kind, checkpointing), HFPolicy.completion_logits, prompts, completions)
        for name, gradient in expected.items():
            scale = gradient.abs().max().clamp(min=1)
            torch.testing.assert_close(found[name] / scale, gradient / scale, **CLOSE, msg=name)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("padding", [1, 7])
def test_left_padding_changes_no_logits(kind, padding):
    """The same text alone and padded: the same logits at every token."""
    policy, text = tiny(kind), random_tokens(2, 5)
    padded = torch.cat((torch.full((2, padding), PAD_ID), text), 1)
    torch.testing.assert_close(policy(padded)[:, padding:], policy(text), **CLOSE)


@pytest.mark.parametrize("kind", KINDS)
def test_neighbours_change_no_logits(kind):
    """Other prompts and other completions beside it leave a completion's logits as they are."""
    policy, prompts, completions = tiny(kind), uneven_prompts(), random_tokens(3, 3, 4, seed=2)
    together = policy.completion_logits(prompts, completions)
    for q, length in enumerate((5, 3, 1)):
        alone = policy.completion_logits(prompts[q : q + 1, -length:], completions[q : q + 1, 1:2])
        torch.testing.assert_close(alone[0, 0], together[q, 1], **CLOSE)


@pytest.mark.parametrize("kind", KINDS)
def test_what_stands_after_the_stop_changes_nothing_before_it(kind):
    """Padding behind a completion, or anything else there, is not seen by earlier tokens."""
    policy, prompts, completions = tiny(kind), uneven_prompts(), random_tokens(3, 2, 6, seed=2)
    before = policy.completion_logits(prompts, completions)
    for filling in (PAD_ID, 0, VOCAB - 1):
        changed = completions.clone()
        changed[..., 3:] = filling
        torch.testing.assert_close(policy.completion_logits(prompts, changed)[:, :, :4], before[:, :, :4], **CLOSE)


def test_only_leading_padding_is_hidden():
    """The padding id inside a completion, or right at its beginning, is a token like any other."""
    policy, prompts, completions = tiny("llama"), uneven_prompts(), random_tokens(3, 2, 5, seed=2)
    completions[..., 2] = PAD_ID
    completions[0, 0, 0] = PAD_ID
    expected = one_by_one(policy, prompts, completions)
    torch.testing.assert_close(policy.completion_logits(prompts, completions), expected, **CLOSE)
    torch.testing.assert_close(step_by_step(policy, prompts, completions), expected, **CLOSE)


@pytest.mark.parametrize("kind", KINDS)
def test_of_a_prompt_of_padding_alone_the_last_token_is_read(kind):
    """An empty prompt has a next token too (many models begin a text with the id that pads), and no NaN."""
    policy, completions = tiny(kind), random_tokens(1, 2, 3)
    logits = policy.completion_logits(torch.full((1, 4), PAD_ID), completions)
    torch.testing.assert_close(logits, policy.completion_logits(torch.tensor([[PAD_ID]]), completions), **CLOSE)
    torch.testing.assert_close(logits[0, 0, 0], policy.model(torch.tensor([[PAD_ID]])).logits[0, -1], **CLOSE)
    logits.sum().backward()
    assert all(p.grad.isfinite().all() for p in policy.parameters())


def test_the_pad_id_is_a_plain_attribute():
    """A caller whose texts begin with the model's padding id chooses another."""
    policy, text = tiny("llama"), torch.tensor([[PAD_ID, 7, 8]])
    hidden = policy(text)
    policy.pad = 0
    assert (policy(text) - hidden)[:, 1:].abs().max() > 1e-3
    torch.testing.assert_close(policy(text), policy.model(input_ids=text).logits, **CLOSE)


def test_a_text_longer_than_the_model_reads_is_refused():
    """gpt2 has a row for each position, and no more; padding may be wider, text may not."""
    policy = tiny("gpt2")
    wide = torch.cat((torch.full((1, 10), PAD_ID), random_tokens(1, 30)), 1)
    assert policy(wide).isfinite().all()
    with pytest.raises(UserError, match="a text of 33 tokens; this model reads 32"):
        policy(random_tokens(1, 33))


def test_models_that_cannot_be_padded_and_cached_are_refused():
    """A recurrent model has no positions to hand it."""
    config = transformers.MambaConfig(vocab_size=VOCAB, hidden_size=8, num_hidden_layers=1, state_size=2)
    with pytest.raises(UserError, match="MambaForCausalLM does not take position_ids"):
        HFPolicy(transformers.MambaForCausalLM(config), PAD_ID)


# --- modes, dropout, generation settings, precision -----------------------------------------------------------------


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_dropout_is_off_in_every_pass_and_the_mode_comes_back(checkpointing, training):
    """gpt2 has dropout 0.1 in three places: the first ratio would not be 1 with it."""
    model = tiny_model("gpt2")
    assert model.config.attn_pdrop == model.config.resid_pdrop == model.config.embd_pdrop == 0.1
    policy = HFPolicy(model, PAD_ID, checkpointing).train(training)
    prompts, completions = uneven_prompts(), random_tokens(3, 2, 4, seed=2)
    logits = policy.completion_logits(prompts, completions)
    assert model.training == training
    expected = one_by_one(tiny("gpt2").eval(), prompts, completions)
    torch.testing.assert_close(logits, expected, **CLOSE)
    with torch.no_grad():
        torch.testing.assert_close(step_by_step(policy, prompts, completions), expected, **CLOSE)
    torch.testing.assert_close(one_by_one(policy, prompts, completions), expected, **CLOSE)  # the model's own pass
    assert model.training == training
    assert model.config.attn_pdrop == model.config.resid_pdrop == model.config.embd_pdrop == 0


def test_dropout_kept_as_a_number_is_off_too():
    """llama's attention keeps its dropout as a plain number; checkpointing needs training mode, where it would act."""
    policy = tiny("llama", checkpointing=True, attention_dropout=0.5).train()
    text = random_tokens(2, 6)
    torch.testing.assert_close(policy(text), tiny("llama").eval()(text), **CLOSE)


def test_sampling_keeps_its_cache_before_and_after_a_checkpointed_update():
    """Each step reads one token; transformers drops the cache in training mode with checkpointing."""
    policy = tiny("llama", checkpointing=True).train()
    lengths = []
    policy.model.model.layers[0].register_forward_pre_hook(
        lambda module, args: lengths.append(args[0].shape[1]) if not torch.is_grad_enabled() else None
    )
    for _ in range(2):
        batch = rollout(policy, uneven_prompts(), 2, 4, generator(), fixed_length=True)
        token_logprobs(policy.completion_logits(batch.prompts, batch.completions), batch.completions).sum().backward()
    assert lengths == [5, 1, 1, 1] * 2


def test_checkpointing_recomputes_the_layers():
    """With it each layer runs again in the backward pass, which is what saves the memory; without it, it does not."""
    runs = {}
    for checkpointing in (False, True):
        policy, runs[checkpointing] = tiny("llama", checkpointing), 0

        def count(module, args, key=checkpointing):
            runs[key] += 1

        policy.model.model.layers[0].mlp.register_forward_pre_hook(count)
        policy.completion_logits(uneven_prompts(), random_tokens(3, 2, 1)).sum().backward()
    assert runs == {False: 1, True: 2}


def test_the_models_generation_settings_are_never_used():
    """A generation_config that cuts to one token and punishes repetition moves no log-probability."""
    policy = tiny("qwen2")
    plain = rollout(policy, uneven_prompts(), 4, 5, generator())
    policy.model.generation_config.update(do_sample=True, temperature=0.1, top_k=1, repetition_penalty=5.0)
    again = rollout(policy, uneven_prompts(), 4, 5, generator())
    assert all(torch.equal(one, other) for one, other in zip(plain, again, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_ratio_is_1(kind):
    """Drawn token by token and scored in one pass: |ratio - 1| < 1e-5 in float32."""
    policy = tiny(kind)
    batch = rollout(policy, uneven_prompts(), 8, 6, generator())
    new = token_logprobs(policy.completion_logits(batch.prompts, batch.completions), batch.completions)
    assert (((new - batch.logprobs).exp() - 1) * batch.mask).abs().max() < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_half_precision_weights(kind, dtype):
    """Sampling is finite, and old log-probabilities from the same pass leave the ratio within 1e-3 of 1."""
    policy = tiny(kind).to(dtype)
    batch = rollout(policy, uneven_prompts(), 4, 5, generator())
    with torch.no_grad():
        old = token_logprobs(policy.completion_logits(batch.prompts, batch.completions), batch.completions)
    new = token_logprobs(policy.completion_logits(batch.prompts, batch.completions), batch.completions)
    assert new.dtype == torch.float32
    assert ((new - old).exp() - 1).abs().max() < 1e-3
    assert ((new - batch.logprobs) * batch.mask).abs().max() < 0.3  # token by token rounds otherwise
    new.sum().backward()
    assert all(p.grad.isfinite().all() for p in policy.parameters())


# --- loading --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_loads_with_its_tokenizer(saved, kind):
    """The weights are those that were saved, the padding id is the tokenizer's."""
    policy, tokenizer = load_model(str(saved[kind]))
    text = random_tokens(2, 5)
    assert torch.equal(policy(text), tiny(kind)(text))
    assert policy.pad == tokenizer.pad_token_id == PAD
    assert policy.vocab_size == VOCAB > len(tokenizer)


def test_dtype_of_the_weights(saved):
    """As asked for."""
    policy, _ = load_model(str(saved["llama"]), dtype="bfloat16")
    assert {p.dtype for p in policy.parameters()} == {torch.bfloat16}


def test_without_a_pad_token_the_end_token_pads(saved, tmp_path):
    """gpt2's tokenizer has none; the caller may choose another."""
    shutil.copytree(saved["llama"], tmp_path, dirs_exist_ok=True)
    tokenizer = character_tokenizer(Sums())
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path)
    assert load_model(str(tmp_path))[0].pad == STOP


def change_config(folder, **changed):
    """Edit config.json by hand."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))


def remove(folder, pattern):
    for path in folder.glob(pattern):
        path.unlink()


def pickled_weights(folder):
    """The old format, which can run code when it is read: this one would make a file."""

    class Hostile:
        def __reduce__(self):
            return (os.mkdir, (str(folder / "HACKED"),))

    remove(folder, "*.safetensors")
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Hostile()))


def old_format(folder):
    """A pickle without malice is refused all the same."""
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    remove(folder, "*.safetensors")


def own_code(folder):
    """A model whose code lies in its folder."""
    change_config(folder, model_type="own", auto_map={"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"})
    (folder / "own.py").write_text(f"import os\nos.mkdir({str(folder / 'HACKED')!r})\n")


def half_a_file(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def lost_layer(folder):
    """The config says three layers, the file holds two."""
    change_config(folder, num_hidden_layers=3)


def a_classifier(folder):
    config = transformers.BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)
    config.vocab_size = VOCAB
    transformers.BertForSequenceClassification(config).save_pretrained(folder)


def a_translator(folder):
    sizes = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2, "vocab_size": VOCAB}
    transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes)).save_pretrained(folder)


def no_pad_at_all(folder):
    tokenizer = character_tokenizer(Sums())
    tokenizer.pad_token = tokenizer.eos_token = None
    tokenizer.save_pretrained(folder)


def a_larger_tokenizer(folder):
    tokenizer = character_tokenizer(Sums())
    tokenizer.add_tokens([f"<{i}>" for i in range(VOCAB)])
    tokenizer.save_pretrained(folder)


DAMAGES = {
    "no config": (lambda folder: remove(folder, "config.json"), "cannot load the config"),
    "no weights": (lambda folder: remove(folder, "*.safetensors"), "cannot load the model"),
    "no tokenizer": (lambda folder: remove(folder, "token*"), "no tokenizer"),
    "half a tokenizer": (lambda folder: remove(folder, "tokenizer.json"), "cannot load the tokenizer"),
    "broken config": (lambda folder: (folder / "config.json").write_text("{"), "cannot load"),
    "broken tokenizer": (lambda folder: (folder / "tokenizer.json").write_text("[]"), "cannot load the tokenizer"),
    "half a file": (half_a_file, "cannot load the model"),
    "wrong shapes": (lambda folder: change_config(folder, vocab_size=VOCAB + 1), "cannot load the model"),
    "lost layer": (lost_layer, "lacks 9 weights, such as model.layers.2"),
    "pickle": (pickled_weights, "cannot load the model"),
    "old format": (old_format, "cannot load the model"),
    "own code": (own_code, "cannot load"),
    "classifier": (a_classifier, "not a causal language model"),
    "translator": (a_translator, "cannot load the model"),
    "adapter": (lambda folder: (folder / "adapter_config.json").write_text("{}"), "holds LoRA adapters"),
    "no pad": (no_pad_at_all, "no padding, end or unknown token"),
    "larger tokenizer": (a_larger_tokenizer, "do not belong together"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_cannot_be_loaded_is_one_line_and_runs_nothing(saved, tmp_path, damage):
    """Every failure names the folder in one line; no pickle and no code of the folder's own is ever read."""
    shutil.copytree(saved["llama"], tmp_path, dirs_exist_ok=True)
    spoil, message = DAMAGES[damage]
    spoil(tmp_path)
    with pytest.raises(UserError, match=message) as caught:
        load_model(str(tmp_path))
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)
    assert not (tmp_path / "HACKED").exists()


@pytest.mark.parametrize("name", ["no/such/folder", "nobody/no-such-model", "a b c"])
def test_a_name_that_is_neither_folder_nor_model_is_one_line(name):
    """What is allowed is in the message."""
    with pytest.raises(UserError, match="no such folder here, nor a model that can be fetched") as caught:
        load_model(name)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"dtype": "int8"}, "dtype is 'int8'; choose one of float32, bfloat16, float16"),
        ({"lora_rank": -1}, "the LoRA rank is -1"),
        ({"device": "abacus"}, "cannot use the device 'abacus'"),
    ],
)
def test_wrong_options_are_one_line(saved, option, message):
    with pytest.raises(UserError, match=message) as caught:
        load_model(str(saved["llama"]), **option)
    assert "\n" not in str(caught.value)


def test_lora_without_peft_is_one_line(saved, monkeypatch):
    """peft is an extra of the extras."""
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(UserError, match="LoRA needs peft, which is not installed"):
        load_model(str(saved["llama"]), lora_rank=2)


def test_stop_ids_are_all_ends_that_anyone_names():
    """Tokenizer, config, generation config (a number or a list), and ends of turns; each once, none twice."""
    tokenizer, model = character_tokenizer(Sums()), tiny_model("llama", eos_token_id=[STOP, 5])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})
    model.generation_config.eos_token_id = 6
    turn_end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert stop_ids(model, tokenizer) == stop_ids(HFPolicy(model, PAD_ID), tokenizer) == (STOP, 5, 6, turn_end)


def test_stop_ids_leaves_out_what_is_no_special_token_or_has_no_logit():
    """A text that spells an end of turn out is no end, and an id past the logits cannot be sampled."""
    tokenizer, model = character_tokenizer(Sums()), tiny_model("llama", eos_token_id=VOCAB + 7)
    tokenizer.add_tokens(["<end_of_turn>"])
    model.generation_config.eos_token_id = None
    assert stop_ids(model, tokenizer) == (STOP,)


# --- LoRA -----------------------------------------------------------------------------------------------------------


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


def test_a_lora_policy_starts_equal_to_its_base(saved, kind):
    """B is 0; adapters lie on every linear layer but the head, and they alone are trained, in float32."""
    policy = lora_policy(saved[kind], dtype="bfloat16")
    base, _ = load_model(str(saved[kind]), dtype="bfloat16")
    text = random_tokens(2, 5)
    assert torch.equal(policy(text), base(text))
    trained = {name: p for name, p in policy.named_parameters() if p.requires_grad}
    assert trained
    assert all("lora_" in name and p.dtype == torch.float32 for name, p in trained.items())
    adapted = {name.split(".lora_")[0] for name in trained}
    linear = {name for name, m in base.named_modules() if type(m).__name__ in ("Linear", "Conv1D")}
    assert len(adapted) == len([name for name in linear if "lm_head" not in name]) >= 8


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_lora_step_moves_the_adapters_alone_and_not_the_reference(saved, kind, checkpointing):
    """Every byte of the base stays, and the reference's logits are the untouched base's, however they are read."""
    policy = lora_policy(saved[kind], gradient_checkpointing=checkpointing)
    reference, base = policy.reference(), tiny(kind)
    frozen = {name: p.clone() for name, p in policy.named_parameters() if not p.requires_grad}
    prompts, completions = uneven_prompts(), random_tokens(3, 2, 4, seed=2)
    train_a_step(policy)
    assert all(torch.equal(p, frozen[name]) for name, p in policy.named_parameters() if name in frozen)
    expected = base.completion_logits(prompts, completions)
    assert (policy.completion_logits(prompts, completions) - expected).abs().max() > 1e-3
    torch.testing.assert_close(reference.completion_logits(prompts, completions), expected, **CLOSE)
    torch.testing.assert_close(step_by_step(reference, prompts, completions), expected, **CLOSE)
    torch.testing.assert_close(reference(prompts), base(prompts), **CLOSE)
    assert (policy.completion_logits(prompts, completions) - expected).abs().max() > 1e-3  # the adapters are on again
    assert any(p.requires_grad for p in policy.parameters())


def test_lora_gradients_equal_those_of_separate_texts(saved, kind):
    """With and without checkpointing, adapters that have moved off 0."""
    prompts, completions = uneven_prompts(), random_tokens(3, 2, 4, seed=2)
    found = []
    for checkpointing, read in (
        (False, one_by_one),
        (False, HFPolicy.completion_logits),
        (True, HFPolicy.completion_logits),
    ):
        policy = lora_policy(saved[kind], gradient_checkpointing=checkpointing)
        with torch.no_grad():
            for p in policy.parameters():
                if p.requires_grad:
                    p.copy_(0.3 * torch.randn(p.shape, generator=generator(5)))
        found.append(gradients(policy, read, prompts, completions))
    for name, gradient in found[0].items():
        scale = gradient.abs().max().clamp(min=1)
        assert gradient.abs().max() > 0, name
        for other in found[1:]:
            torch.testing.assert_close(other[name] / scale, gradient / scale, **CLOSE, msg=name)


def test_lora_is_the_same_at_every_load_and_uses_no_global_randomness(saved):
    """Whatever the global seed is, and it is left as it was."""
    policies = []
    with torch.random.fork_rng(devices=[]):
        for seed in (1, 2):
            torch.manual_seed(seed)
            before = torch.get_rng_state()
            policies.append(lora_policy(saved["llama"]))
            assert torch.equal(torch.get_rng_state(), before)
    one, other = policies
    assert all(torch.equal(p, q) for p, q in zip(one.parameters(), other.parameters(), strict=True))


def test_lora_adds_twice_b_a(saved):
    """alpha = 2 rank, so the scale alpha / rank is 2 at every rank."""
    for rank in (2, 4):
        policy = lora_policy(saved["llama"], rank)
        train_a_step(policy)
        layer = policy.model.base_model.model.model.layers[0].mlp.up_proj
        a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight  # (rank, D), (hidden, rank)
        x = torch.randn(3, 16, generator=generator())
        assert b.abs().max() > 1e-3
        torch.testing.assert_close(layer(x), x @ (layer.base_layer.weight + 2 * b @ a).T, **CLOSE)


def test_without_lora_there_is_no_reference_to_switch_to():
    """The caller copies; the copy does not move."""
    policy = tiny("llama")
    with pytest.raises(UserError, match="no LoRA adapters to switch off"):
        policy.reference()
    copied, text = copy.deepcopy(policy), random_tokens(2, 5)
    before = policy(text)
    train_a_step(policy)
    assert torch.equal(copied(text), before)
    assert (policy(text) - before).abs().max() > 1e-3


# --- saving ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_saved_weights_come_back_bit_for_bit(saved, tmp_path, kind, rank, dtype):
    """And with LoRA the file holds the adapters alone."""
    options = {"rank": rank, "dtype": dtype}
    policy, fresh = lora_policy(saved[kind], **options), lora_policy(saved[kind], **options)
    train_a_step(policy)
    save_model(policy, tmp_path)
    load_weights(fresh, tmp_path)
    for name, value in policy.state_dict().items():
        assert torch.equal(fresh.state_dict()[name], value), name
    assert torch.equal(fresh(uneven_prompts()), policy(uneven_prompts()))
    assert {p.requires_grad for p in fresh.parameters()} == {p.requires_grad for p in policy.parameters()}
    assert not list(tmp_path.glob("*.bin")) + list(tmp_path.glob("*.pt"))
    assert (tmp_path / "model.safetensors").exists() == (rank == 0)


def rename_a_tensor(path):
    tensors = load_file(path)
    first = min(tensors)
    save_file({("x" if name == first else name): t for name, t in tensors.items()}, path, metadata={"format": "pt"})


@pytest.mark.parametrize("rank", [0, 2])
def test_weights_that_do_not_fit_are_one_line_and_change_nothing(saved, tmp_path, rank):
    """Another model, another rank, another type, a damaged, renamed or missing file, a pickle in its place."""
    policy = lora_policy(saved["llama"], rank)
    before = {name: value.clone() for name, value in policy.state_dict().items()}
    weights = "adapter_model.safetensors" if rank else "model.safetensors"
    other = lora_policy(saved["llama"], rank=3) if rank else tiny("llama", hidden_size=32)
    folders = {name: tmp_path / name for name in ("other", "gpt2", "half", "renamed", "pickle", "missing")}
    save_model(other, folders["other"])
    save_model(lora_policy(saved["gpt2"], rank), folders["gpt2"])
    for name in ("half", "renamed", "pickle"):
        save_model(policy, folders[name])
    (folders["half"] / weights).write_bytes((folders["half"] / weights).read_bytes()[:200])
    rename_a_tensor(folders["renamed"] / weights)
    (folders["pickle"] / weights).rename(folders["pickle"] / weights.replace("safetensors", "bin"))
    for folder in folders.values():
        with pytest.raises(UserError) as caught:
            load_weights(policy, folder)
        assert "\n" not in str(caught.value)
        assert str(folder) in str(caught.value)
    assert all(torch.equal(value, before[name]) for name, value in policy.state_dict().items())


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot save to"):
        save_model(tiny("llama"), tmp_path / "file")


# --- the toy policy as a Llama --------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=TASKS)
def exported(request, tmp_path_factory):
    """A task, a random toy policy for it, and the folder it was exported to."""
    task, folder = TASKS[request.param](), tmp_path_factory.mktemp(request.param)
    policy = tiny_policy(task.vocab_size)
    export_policy(policy, task, folder)
    return task, policy, folder


def toy_batch(task):
    """Prompts of all lengths (Q, P), left-padded, and completions (Q, G, T) of all tokens."""
    prompts = encode_prompts(task, sorted(task.prompts, key=len)[:: max(1, len(task.prompts) // 5)])
    completions = torch.randint(0, task.vocab_size, (len(prompts), 3, 4), generator=generator(2))
    return prompts, completions


def test_an_exported_policy_gives_the_same_logits(exported):
    """By AutoModelForCausalLM, in every way to read, with padding: within 1e-5."""
    task, policy, folder = exported
    loaded, _ = load_model(str(folder))
    assert type(loaded.model) is transformers.LlamaForCausalLM
    assert loaded.pad == PAD
    prompts, completions = toy_batch(task)
    expected = policy.completion_logits(prompts, completions)
    torch.testing.assert_close(loaded.completion_logits(prompts, completions), expected, **CLOSE)
    torch.testing.assert_close(step_by_step(loaded, prompts, completions), expected, **CLOSE)
    real = minirlvr.text_mask(prompts)
    torch.testing.assert_close(loaded(prompts)[real], policy(prompts)[real], **CLOSE)


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
    prompts = torch.where(uneven_prompts() == PAD_ID, PAD, uneven_prompts())
    completions, peer = random_tokens(3, 2, 4, seed=2), HFPolicy(model, PAD)
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
    assert torch.equal(batch["input_ids"], encode_prompts(task, task.prompts))
    assert torch.equal(batch["attention_mask"].bool(), minirlvr.text_mask(batch["input_ids"]))


def test_greedy_generate_of_the_export_ends_at_the_stop(exported):
    """eos and pad reach transformers' own generation: the toy policy's most likely tokens up to its stop."""
    task, policy, folder = exported
    loaded, tokenizer = load_model(str(folder))
    assert stop_ids(loaded, tokenizer) == (STOP,)
    prompts, _ = toy_batch(task)
    mask = minirlvr.text_mask(prompts).long()
    drawn = loaded.model.generate(prompts, attention_mask=mask, do_sample=False, max_new_tokens=task.max_new_tokens)
    greedy = rollout(policy, prompts, 1, task.max_new_tokens, generator(), temperature=1e-4)
    T = drawn.shape[1] - prompts.shape[1]
    assert torch.equal(drawn[:, prompts.shape[1] :], greedy.completions[:, 0, :T])


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


# --- DLC in transformers' generate ----------------------------------------------------------------------------------

PLAIN = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0}  # nothing cut, nothing bent


def generate(model, prompts, pad, processors=(), seed=0, length=5, **options):
    """tokens (B, T), and the scores (B, T, V) they were drawn from, as log-probabilities."""
    torch.manual_seed(seed)
    options = {"do_sample": True, "eos_token_id": None, "pad_token_id": pad, "max_new_tokens": length} | PLAIN | options
    result = model.generate(
        prompts, attention_mask=(prompts != pad).long(), logits_processor=list(processors),
        output_scores=True, return_dict_in_generate=True, **options,
    )  # fmt: skip
    return result.sequences[:, prompts.shape[1] :], torch.stack(result.scores, 1).log_softmax(-1)


def bent(policy, memory, prompts, tokens, mu, temperature=1.0):
    """(B, T, V): what DLC samples from, recomputed in one pass without a cache."""
    logits, remembered = (p.completion_logits(prompts, tokens[:, None])[:, 0] for p in (policy, memory))
    return ((logits - mu * remembered) / temperature).log_softmax(-1).detach()


MEMORIES = {"hf": lambda: tiny("gpt2", seed=7), "toy": lambda: tiny_policy(VOCAB, seed=7)}


@pytest.mark.parametrize("kind_of_memory", MEMORIES)
@pytest.mark.parametrize("options", [{}, {"temperature": 0.6}, {"do_sample": False}])
def test_scores_of_generate_are_policy_minus_mu_memory(kind_of_memory, options):
    """Step by step with two caches equals one plain pass, for prompts of different length."""
    policy, memory, prompts = tiny("llama"), MEMORIES[kind_of_memory](), uneven_prompts()
    processor = MemoryLogitsProcessor(memory, 0.7, pad=PAD_ID)
    tokens, scores = generate(policy.model, prompts, PAD_ID, [processor], **options)
    expected = bent(policy, memory, prompts, tokens, 0.7, options.get("temperature", 1.0))
    torch.testing.assert_close(scores, expected, **CLOSE)
    if options.get("do_sample") is False:
        assert torch.equal(tokens, expected.argmax(-1))


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_generate_draws_from_the_distribution_that_rollout_draws_from(temperature):
    """The scores of rollout's own tokens, forced on generate, are rollout's sampler_logprobs."""
    policy, memory = tiny("llama"), tiny("qwen2", seed=7)
    prompts = uneven_prompts()
    batch = rollout(policy, prompts, 1, 5, generator(), temperature, memory, 0.7, fixed_length=True)
    forced = torch.cat((prompts, batch.completions[:, 0]), 1)  # (Q, P + T)

    class Force(transformers.LogitsProcessor):
        """Takes note of the scores, then leaves one token."""

        def __init__(self):
            self.scores = []

        def __call__(self, input_ids, scores):
            self.scores.append((scores / temperature).log_softmax(-1))
            return torch.full_like(scores, -torch.inf).scatter(1, forced[:, input_ids.shape[1], None], 0.0)

    force = Force()
    tokens, _ = generate(policy.model, prompts, PAD_ID, [MemoryLogitsProcessor(memory, 0.7), force])
    assert torch.equal(tokens, batch.completions[:, 0])
    found = torch.stack(force.scores, 1).gather(-1, tokens[..., None])[..., 0]
    torch.testing.assert_close(found, batch.sampler_logprobs[:, 0], **CLOSE)


def test_mu_0_is_plain_generate_and_mu_above_0_is_not():
    """The same seed, the same tokens and scores."""
    policy, memory = tiny("llama"), tiny("gpt2", seed=7)
    plain = generate(policy.model, uneven_prompts(), PAD_ID)
    with_0 = generate(policy.model, uneven_prompts(), PAD_ID, [MemoryLogitsProcessor(memory, 0.0)])
    assert torch.equal(plain[0], with_0[0])
    torch.testing.assert_close(plain[1], with_0[1])
    bent_scores = generate(policy.model, uneven_prompts(), PAD_ID, [MemoryLogitsProcessor(memory, 0.7)])[1]
    assert (bent_scores[:, 0] - plain[1][:, 0]).abs().max() > 0.1


@contextlib.contextmanager
def reads_of(memory: HFPolicy):
    """The shapes that `memory` reads inside."""
    shapes, read = [], memory._read
    memory._read = lambda tokens, *rest, **named: shapes.append(tuple(tokens.shape)) or read(tokens, *rest, **named)
    try:
        yield shapes
    finally:
        memory._read = read


def test_the_memory_reads_each_token_once_and_notices_a_new_generation():
    """One processor, three generations: the same prompts again, then others of another number and length."""
    policy, memory = tiny("llama"), tiny("gpt2", seed=7)
    processor, short = MemoryLogitsProcessor(memory, 0.7), random_tokens(2, 3, seed=9)
    with reads_of(memory) as shapes:
        for prompts, seed in ((uneven_prompts(), 0), (uneven_prompts(), 1), (short, 0)):
            shapes.clear()
            tokens, scores = generate(policy.model, prompts, PAD_ID, [processor], seed=seed)
            assert shapes == [tuple(prompts.shape)] + [(len(prompts), 1)] * 4
            with torch.no_grad():
                torch.testing.assert_close(scores, bent(policy, memory, prompts, tokens, 0.7), **CLOSE)


def test_beams_that_change_places_are_read_again():
    """Beam search moves rows: the scores stay those of the texts that stand there."""
    policy, memory = tiny("llama"), tiny("gpt2", seed=7)
    processor, checked = MemoryLogitsProcessor(memory, 0.7), []

    class Check(transformers.LogitsProcessor):
        def __call__(self, input_ids, scores):
            fresh = MemoryLogitsProcessor(memory, 0.7)
            checked.append((processor(input_ids, scores) - fresh(input_ids, scores)).abs().max().item())
            return processor(input_ids, scores)

    prompts = random_tokens(2, 3)
    policy.model.generate(
        prompts, attention_mask=torch.ones_like(prompts), num_beams=3, do_sample=False, max_new_tokens=5,
        logits_processor=[Check()], eos_token_id=None, pad_token_id=PAD_ID,
    )  # fmt: skip
    assert len(checked) == 5
    assert max(checked) < 1e-5


def test_a_trained_memory_pushes_away_from_what_it_remembers():
    """What DLC is for: a token that the memory knows is drawn less often than the policy would."""
    policy, memory, prompt = tiny("llama"), tiny("gpt2", seed=7), random_tokens(1, 3)
    with torch.no_grad():
        remembered = memory.start(prompt, 1)[0].argmax()
        plain = policy.start(prompt, 1)[0][0, 0].softmax(-1)[remembered]
    scores = generate(policy.model, prompt, PAD_ID, [MemoryLogitsProcessor(memory, 0.7)], length=1)[1]
    assert scores[0, 0, remembered].exp() < plain


@pytest.mark.parametrize("kind_of_memory", MEMORIES)
def test_the_pad_id_reaches_the_memory(kind_of_memory):
    """A memory with another padding id is told the one that the prompts have; without, it would read the padding."""
    policy, memory, prompts = tiny("llama"), MEMORIES[kind_of_memory](), uneven_prompts()
    memory.pad = 0
    tokens, scores = generate(policy.model, prompts, PAD_ID, [MemoryLogitsProcessor(memory, 0.7)])
    memory.pad = PAD_ID
    expected = bent(policy, memory, prompts, tokens, 0.7)
    assert (scores - expected).abs().max() > 1e-3
    memory.pad = 0
    tokens, scores = generate(policy.model, prompts, PAD_ID, [MemoryLogitsProcessor(memory, 0.7, pad=PAD_ID)])
    torch.testing.assert_close(scores, bent(policy, memory, prompts, tokens, 0.7), **CLOSE)


@pytest.mark.parametrize("memory", [tiny("gpt2", vocab_size=VOCAB - 4), tiny_policy(VOCAB - 4)])
def test_a_memory_with_another_vocabulary_is_refused(memory):
    """Before it reads an id that it does not have."""
    message = f"the policy has logits for {VOCAB} tokens, the memory for {VOCAB - 4}"
    with pytest.raises(UserError, match=message):
        generate(tiny_model("llama"), torch.tensor([[VOCAB - 1, 5]]), PAD_ID, [MemoryLogitsProcessor(memory, 0.5)])


# --- the training loop does not know which policy it has --------------------------------------------------------------


def test_an_exact_listing_is_the_same_for_both(exported):
    """toy_tasks.exact takes either: the exact probability of every mode, within 1e-5."""
    task, policy, folder = exported
    listing = minirlvr.Listing(task, task.train[:4])
    with torch.no_grad():
        found = listing.log_probs(load_model(str(folder))[0])
        torch.testing.assert_close(found, listing.log_probs(policy), **CLOSE)


def test_the_one_file_needs_no_transformers():
    """A toy run never imports this module or what it needs."""
    code = "import minirlvr, sys; assert not {'huggingface', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(minirlvr.__file__).parent)
