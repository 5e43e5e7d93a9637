"""Tiny language models and their tokenizers, made on the spot. Whoever imports this is skipped without transformers."""
# ruff: noqa: E402 (skipped before it imports what is not there)

import json
import os
import pickle

import pytest

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

import huggingface_hub
import tokenizers
import torch
from conftest import generator
from safetensors.torch import load_file, save_file

from language_models.llama import character_tokenizer
from language_models.loading import load_model
from language_models.policy import HFPolicy
from minirlvr import token_logprobs
from toy_tasks import TASKS, Padded, Sums

transformers.utils.logging.disable_progress_bar()
huggingface_hub.constants.HF_HUB_OFFLINE = True  # nothing asks the network, not even for a name that is no folder

VOCAB = 24
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
        return transformers.AutoModelForCausalLM.from_config(config)


def tiny(kind: str, checkpointing: bool = False, **changed) -> HFPolicy:
    return HFPolicy(tiny_model(kind, **changed), checkpointing)


def random_tokens(*shape, seed=1):
    """Tokens from 4 on: the first four are left for padding and stops."""
    return torch.randint(4, VOCAB, shape, generator=generator(seed))


def uneven_prompts(pad: int = 3) -> Padded:
    """Three prompts of 5, 3 and 1 tokens, left-padded with an id that no prompt holds."""
    lengths = torch.tensor([5, 3, 1])
    real = torch.arange(5) >= 5 - lengths[:, None]  # (3, 5)
    return Padded(random_tokens(3, 5).where(real, pad), real)


def one_by_one(policy, prompts: Padded, completions):
    """(Q, G, T, V): a plain loop over N separate texts without padding or cache, by the model itself."""
    rows = []
    for prompt, real, group in zip(*prompts, completions, strict=True):
        for completion in group:
            text = torch.cat((prompt[real], completion))[None]  # (1, length + T)
            rows.append(policy.model(input_ids=text, use_cache=False).logits[0, int(real.sum()) - 1 : -1])
    return torch.stack(rows).view(*completions.shape, -1)


def lora_policy(folder, rank=2, **options) -> HFPolicy:
    """A policy on the model saved in `folder`, with adapters where rank is above 0."""
    if rank:
        pytest.importorskip("peft", reason="peft is not installed")
    return load_model(str(folder), lora_rank=rank, **options)[0]


def train_a_step(policy) -> None:
    """One SGD step that surely moves what is trained."""
    optimizer = torch.optim.SGD([p for p in policy.parameters() if p.requires_grad], lr=0.5)
    completions = random_tokens(3, 2, 4)
    token_logprobs(policy.completion_logits(uneven_prompts(), completions), completions).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def save_tiny_models(new_folder) -> dict:
    """Kind -> a folder with a tiny model and a tokenizer, as from the hub; `new_folder` makes one for a name."""
    folders = {}
    for kind in KINDS:
        folders[kind] = new_folder(kind)
        tiny_model(kind).save_pretrained(folders[kind])
        character_tokenizer(Sums()).save_pretrained(folders[kind])
    return folders


# --- a tokenizer of byte pairs --------------------------------------------------------------------------------------

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


def save_chat_model(folder) -> None:
    """A tiny untrained Llama with a tokenizer and a chat template, as one finds them in a folder."""
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=464, num_key_value_heads=1, eos_token_id=0, **sizes)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        transformers.LlamaForCausalLM(config).save_pretrained(folder)
    make_tokenizer(TEMPLATE).save_pretrained(folder)


# --- damage ---------------------------------------------------------------------------------------------------------


def change_config(folder, **changed) -> None:
    """Edit config.json by hand."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))


def remove(folder, pattern) -> None:
    for path in folder.glob(pattern):
        path.unlink()


def pickled_weights(folder) -> None:
    """The old format, which can run code when it is read: this one would make a file."""

    class Hostile:
        def __reduce__(self):
            return (os.mkdir, (str(folder / "HACKED"),))

    remove(folder, "*.safetensors")
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Hostile()))


def half_a_file(folder) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def rename_a_tensor(path) -> None:
    tensors = load_file(path)
    first = min(tensors)
    save_file({("x" if name == first else name): t for name, t in tensors.items()}, path, metadata={"format": "pt"})
