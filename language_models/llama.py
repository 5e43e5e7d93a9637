"""The toy policy as a Llama that transformers loads, and back.

Both give the same logits, which ties what is measured exactly on a toy task to what runs on a real model.
"""

from pathlib import Path

import tokenizers
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from language_models.loading import LARGEST_LAYERS, LARGEST_VOCABULARY, check_same_tensors, safely
from language_models.policy import one_line
from minirlvr import Policy
from toy_tasks import PAD, STOP, Task, UserError
from toy_tasks.task import PAD_TEXT, STOP_TEXT


def llama_names(layers: int) -> dict[str, tuple[str, ...]]:
    """Our name of each weight -> Llama's: several where ours holds several matrices, one below the other.

    >>> llama_names(1)["blocks.0.gate_up.weight"]
    ('model.layers.0.mlp.gate_proj.weight', 'model.layers.0.mlp.up_proj.weight')
    """
    block = {
        "attention_norm": ["input_layernorm"],
        "qkv": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
        "attention_out": ["self_attn.o_proj"],
        "mlp_norm": ["post_attention_layernorm"],
        "gate_up": ["mlp.gate_proj", "mlp.up_proj"],
        "down": ["mlp.down_proj"],
    }
    names = {"embedding": ["embed_tokens"], "norm": ["norm"]}
    for i in range(layers):
        names |= {f"blocks.{i}.{ours}": [f"layers.{i}.{part}" for part in parts] for ours, parts in block.items()}
    prefixed = {f"{ours}.weight": tuple(f"model.{part}.weight" for part in parts) for ours, parts in names.items()}
    return prefixed | {"head.weight": ("lm_head.weight",)}


def llama_config(vocab_size: int, width: int, heads: int, layers: int) -> transformers.LlamaConfig:
    """The shape of our policy in Llama's words."""
    return transformers.LlamaConfig(
        vocab_size=vocab_size, hidden_size=width, intermediate_size=width * 11 // 4, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=heads, hidden_act="silu", rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, tie_word_embeddings=False,
        attention_bias=False, mlp_bias=False, pad_token_id=PAD, bos_token_id=None, eos_token_id=STOP,
        architectures=["LlamaForCausalLM"],
    )  # fmt: skip


def character_tokenizer(task: Task) -> transformers.PreTrainedTokenizerBase:
    """One character, one token, with the ids of the task; nothing is put before or behind a text.

    >>> from toy_tasks import Sums
    >>> tokenizer = character_tokenizer(Sums())
    >>> tokenizer.encode("1+2."), tokenizer.decode([3, 12, 4])
    ([3, 12, 4, 1], '1+2')
    """
    vocabulary = {PAD_TEXT: PAD, STOP_TEXT: STOP} | {c: i + 2 for i, c in enumerate(task.characters)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = tokenizers.decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD_TEXT, eos_token=STOP_TEXT, padding_side="left",
        clean_up_tokenization_spaces=False, model_input_names=["input_ids", "attention_mask"],
    )  # fmt: skip


def export_policy(policy: Policy, task: Task, folder: str | Path) -> None:
    """Write a toy policy as a folder that transformers loads: a Llama with the same logits, and a character tokenizer.

    Raises UserError where the policy was not made for the task, or the folder cannot be written.
    """
    vocab_size, width = policy.embedding.weight.shape
    if vocab_size != task.vocab_size:
        raise UserError(f"the policy has {vocab_size} tokens, {task.name} {task.vocab_size}; export it with its task")
    weights = {}
    for ours, theirs in llama_names(len(policy.blocks)).items():
        parts = policy.state_dict()[ours].cpu().chunk(len(theirs))
        weights |= {name: part.contiguous() for name, part in zip(theirs, parts, strict=True)}
    with one_line(f"cannot export to {str(folder)!r}"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        llama_config(vocab_size, width, policy.blocks[0].heads, len(policy.blocks)).save_pretrained(folder)
        transformers.GenerationConfig(pad_token_id=PAD, eos_token_id=STOP).save_pretrained(folder)
        character_tokenizer(task).save_pretrained(folder)
        save_file(weights, Path(folder) / "model.safetensors", metadata={"format": "pt"})


def import_policy(folder: str | Path) -> Policy:
    """Read a toy policy, in float32, from a folder such as export_policy writes.

    Raises UserError for a folder that cannot be read, or a model that is not a Llama of our shape.
    """
    if not Path(folder).is_dir():
        raise UserError(f"no folder {str(folder)!r}; give one that holds a Llama, such as export_policy writes")
    with one_line(f"cannot import from {str(folder)!r}"):
        config = transformers.AutoConfig.from_pretrained(str(folder), **safely(str(folder)))
        found = load_file(Path(folder) / "model.safetensors")
    check_llama(folder, config)
    shape = (config.vocab_size, torch.Generator(), config.num_hidden_layers, config.hidden_size)
    weights = fuse(folder, found, config.num_hidden_layers)
    with torch.device("meta"):  # shapes alone: a config that lies about its size takes no memory
        wanted = Policy(*shape, config.num_attention_heads)
    check_same_tensors(folder, weights, wanted.state_dict())
    policy = Policy(*shape, config.num_attention_heads)
    policy.load_state_dict(weights)
    return policy


def check_llama(folder: str | Path, config: transformers.PretrainedConfig) -> None:
    """Refuse what our Policy cannot compute. Raises UserError that names the first setting that differs."""
    if config.model_type != "llama":
        raise UserError(f"{str(folder)!r} holds a {config.model_type} model; only a llama can be read as a toy policy")
    sizes = {"num_hidden_layers": LARGEST_LAYERS, "vocab_size": LARGEST_VOCABULARY, "hidden_size": LARGEST_VOCABULARY}
    for name, largest in sizes.items():
        if not 1 <= getattr(config, name) <= largest:
            raise UserError(f"{str(folder)!r} has {name} {getattr(config, name)}; it must be from 1 to {largest}")
    width, heads = config.hidden_size, config.num_attention_heads
    if heads < 1 or width % (2 * heads):
        raise UserError(f"{str(folder)!r} has {heads} heads for width {width}; each needs an equal, even share of it")
    ours = llama_config(config.vocab_size, width, heads, config.num_hidden_layers)
    names = ["intermediate_size", "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps", "rope_parameters"]
    for name in [*names, "tie_word_embeddings", "attention_bias", "mlp_bias"]:
        has, needs = getattr(config, name), getattr(ours, name)
        if has != needs:
            raise UserError(f"{str(folder)!r} has {name} {has}; a toy policy of this size has {needs}")


def fuse(folder: str | Path, found: dict[str, Tensor], layers: int) -> dict[str, Tensor]:
    """Llama's tensors by their names -> ours, in float32. Raises UserError for one too few or too many."""
    names = llama_names(layers)
    differing = found.keys() ^ {name for theirs in names.values() for name in theirs}
    if differing:
        raise UserError(f"{str(folder)!r} is not a Llama of {layers} layers: see {min(differing)}")
    with one_line(f"cannot put together the weights of {str(folder)!r}"):
        return {ours: torch.cat([found[name].float() for name in theirs]) for ours, theirs in names.items()}
