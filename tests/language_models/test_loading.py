"""Models and tokenizers from a folder: what loads, what is refused in one line, and what was trained, saved."""
# ruff: noqa: E402 (the whole file is skipped before it imports what is not there)

import shutil
import sys

import pytest

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

import torch
from safetensors.torch import load_file

from language_models.llama import character_tokenizer
from language_models.loading import load_model, load_model_weights, save_model, stop_ids
from language_models.policy import HFPolicy
from tests.language_models.models import (
    KINDS,
    VOCAB,
    change_config,
    half_a_file,
    lora_policy,
    pickled_weights,
    random_tokens,
    remove,
    rename_a_tensor,
    save_tiny_models,
    tiny,
    tiny_model,
    train_a_step,
    uneven_prompts,
)
from toy_tasks import STOP, Padded, Sums, UserError


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Kind -> a folder with a tiny model and a tokenizer, as from the hub."""
    return save_tiny_models(tmp_path_factory.mktemp)


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


# --- loading --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_loads_with_its_tokenizer(saved, kind):
    """The weights are those that were saved."""
    policy, tokenizer = load_model(str(saved[kind]))
    text = Padded.of(random_tokens(2, 5))
    assert torch.equal(policy(text), tiny(kind)(text))
    assert policy.vocab_size == VOCAB > len(tokenizer)


def test_dtype_of_the_weights(saved):
    """As asked for."""
    policy, _ = load_model(str(saved["llama"]), dtype="bfloat16")
    assert {p.dtype for p in policy.parameters()} == {torch.bfloat16}


def test_a_tokenizer_needs_no_pad_token(saved, tmp_path):
    """gpt2's has none: padding belongs to the batch."""
    shutil.copytree(saved["llama"], tmp_path, dirs_exist_ok=True)
    tokenizer = character_tokenizer(Sums())
    tokenizer.pad_token = tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path)
    assert load_model(str(tmp_path))[0](uneven_prompts()).isfinite().all()


def old_format(folder):
    """A pickle without malice is refused all the same."""
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    remove(folder, "*.safetensors")


def own_code(folder):
    """A model whose code lies in its folder."""
    change_config(folder, model_type="own", auto_map={"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"})
    (folder / "own.py").write_text(f"import os\nos.mkdir({str(folder / 'HACKED')!r})\n")


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
    assert stop_ids(model, tokenizer) == stop_ids(HFPolicy(model), tokenizer) == (STOP, 5, 6, turn_end)


def test_stop_ids_leaves_out_what_is_no_special_token_or_has_no_logit():
    """A text that spells an end of turn out is no end, and an id past the logits cannot be sampled."""
    tokenizer, model = character_tokenizer(Sums()), tiny_model("llama", eos_token_id=VOCAB + 7)
    tokenizer.add_tokens(["<end_of_turn>"])
    model.generation_config.eos_token_id = None
    assert stop_ids(model, tokenizer) == (STOP,)


# --- saving ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_saved_weights_come_back_bit_for_bit(saved, tmp_path, kind, rank, dtype):
    """And with LoRA the file holds the adapters alone."""
    options = {"rank": rank, "dtype": dtype}
    policy, fresh = lora_policy(saved[kind], **options), lora_policy(saved[kind], **options)
    train_a_step(policy)
    save_model(policy, tmp_path)
    load_model_weights(fresh, tmp_path)
    for name, value in policy.state_dict().items():
        assert torch.equal(fresh.state_dict()[name], value), name
    assert torch.equal(fresh(uneven_prompts()), policy(uneven_prompts()))
    assert {p.requires_grad for p in fresh.parameters()} == {p.requires_grad for p in policy.parameters()}
    assert not list(tmp_path.glob("*.bin")) + list(tmp_path.glob("*.pt"))
    assert (tmp_path / "model.safetensors").exists() == (rank == 0)


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
            load_model_weights(policy, folder)
        assert "\n" not in str(caught.value)
        assert str(folder) in str(caught.value)
    assert all(torch.equal(value, before[name]) for name, value in policy.state_dict().items())


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot save to"):
        save_model(tiny("llama"), tmp_path / "file")
