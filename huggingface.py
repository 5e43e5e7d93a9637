"""Hugging Face models as policies: read them like the toy policy, load, adapt with LoRA, save; DLC for `generate`.

minirlvr.py asks a policy for `start`, `step`, `completion_logits` and `forward`; `HFPolicy` gives those four for a
causal language model of transformers, and `export_policy` writes the toy policy as such a model. That both give the
same logits ties what is measured exactly on a toy task to what runs on a real model.

Axes as there: Q prompts, G completions of one prompt, N = Q * G, P prompt tokens (left padded), S tokens already in a
cache, T new tokens, V vocabulary; B rows of any kind.
"""

import contextlib
import inspect
from pathlib import Path
from typing import NamedTuple

import tokenizers
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from minirlvr import Policy, UserError, calibrated_logits, text_mask
from toy_tasks import PAD, STOP, Task
from toy_tasks.task import PAD_TEXT, STOP_TEXT

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>")  # how the usual chat templates end what the model says
LARGEST_RANK = 1024  # of a LoRA adapter; beyond it there is nothing low about the rank
LARGEST_LAYERS, LARGEST_VOCABULARY = 1024, 1_000_000  # of a config that is believed


@contextlib.contextmanager
def one_line(what: str):
    """Turn whatever goes wrong inside into a UserError of one line: `what`, then the first line of the reason.

    Every exception, because a damaged file can raise any of them inside transformers, tokenizers and safetensors.
    >>> with one_line("cannot read 'model'"):
    ...     raise KeyError("weights")
    Traceback (most recent call last):
    minirlvr.UserError: cannot read 'model' (KeyError: 'weights')
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        reason = (str(error).strip().splitlines() or [""])[0]
        raise UserError(f"{what} ({type(error).__name__}: {reason[:200]})") from error


def check_vocabulary(policy_vocab: int, memory_vocab: int) -> None:
    """DLC subtracts logits, so both networks need the same tokens. Raises UserError where the widths differ.

    >>> check_vocabulary(14, 14)
    >>> check_vocabulary(14, 17)
    Traceback (most recent call last):
    minirlvr.UserError: the policy has logits for 14 tokens, the memory for 17; take a memory with the same vocabulary
    """
    if policy_vocab != memory_vocab:
        raise UserError(
            f"the policy has logits for {policy_vocab} tokens, the memory for {memory_vocab}; "
            "take a memory with the same vocabulary"
        )


# === Reading: the four things that the training loop asks for. ===


class HFCache(NamedTuple):
    """Keys and values of N rows. Reading on changes `layers` in place, so a cache can be continued only once."""

    layers: transformers.Cache
    real: Tensor  # (N, S) bool: text, not left padding


class HFPolicy(nn.Module):
    """A causal language model of transformers, asked like the toy policy. Works with LoRA adapters (peft) on it.

    `pad` fills prompts up at the left: the leading run of that id is padding, the same id later is a token. So take a
    pad id that no text begins with. The model is changed in one way: all its dropout is set to 0, so that tokens are
    scored by the distribution they were drawn from. Its own generation settings are never used.
    `gradient_checkpointing` saves memory when training and costs time, see `completion_logits`.
    Raises UserError for a model that cannot be read this way (recurrent ones, encoders, very old ones).

    >>> config = transformers.GPT2Config(vocab_size=14, n_embd=8, n_layer=1, n_head=2, n_positions=16)
    >>> policy = HFPolicy(transformers.GPT2LMHeadModel(config), pad=0)
    >>> policy(torch.tensor([[3, 4, 13]])).shape, policy.vocab_size
    (torch.Size([1, 3, 14]), 14)
    """

    def __init__(self, model: nn.Module, pad: int, gradient_checkpointing: bool = False):
        super().__init__()
        check_readable(model)
        turn_off_dropout(model)
        self.model, self.pad, self.gradient_checkpointing = model, pad, gradient_checkpointing
        if gradient_checkpointing:
            with one_line(f"no gradient checkpointing for this {model.config.model_type} model; train it without"):
                # Not reentrant: that kind needs inputs with a gradient, which a model with a frozen base has not.
                model.activation_checkpointing_enable({"use_reentrant": False})

    @property
    def vocab_size(self) -> int:
        """Width of the logits (V). Often more than the tokenizer has tokens: rows are added to a round number."""
        return self.model.get_output_embeddings().weight.shape[0]

    @contextlib.contextmanager
    def _mode(self, training: bool):
        """Put the model in a mode and back. Without dropout that moves no logits; but transformers checkpoints
        gradients in training mode only, and then drops the key/value cache, which generation needs."""
        before = self.model.training
        if before != training:
            self.model.train(training)
        try:
            yield
        finally:
            if before != training:
                self.model.train(before)

    def _real(self, tokens: Tensor) -> Tensor:
        """(B, T) bool: False on the leading padding. The last token always counts: an empty text has a next one too."""
        real = text_mask(tokens, self.pad)
        real[:, -1] = True
        return real

    def _read(self, tokens: Tensor, real: Tensor, keep: int, cache: transformers.Cache | None, use_cache: bool):
        """tokens (B, T) after S cached ones, real (B, S+T) -> logits (B, keep, V) of the last tokens, the cache.

        A token's position is the number of real tokens before it, so that left padding shifts nothing.
        """
        position = (real.cumsum(1) - 1).clamp(min=0)[:, -tokens.shape[1] :]  # (B, T)
        self._check_length(real, position)
        output = self.model(
            input_ids=tokens, attention_mask=real.long(), position_ids=position, cache=cache, use_cache=use_cache,
            logits_to_keep=keep,
        )  # fmt: skip
        return output.logits, output.cache

    def _check_length(self, real: Tensor, position: Tensor) -> None:
        limit = getattr(self.model.config, "max_position_embeddings", None)
        if limit and real.shape[1] > limit and position.max() >= limit:  # padding may be wide, text may not
            raise UserError(f"a text of {int(position.max()) + 1} tokens; this model reads {limit}: shorten it")

    def forward(self, tokens: Tensor) -> Tensor:
        """Left-padded texts (B, T) -> logits (B, T, V). Differentiable."""
        return self._rows(tokens, self._real(tokens), keep=tokens.shape[1])

    def _rows(self, tokens: Tensor, real: Tensor, keep: int) -> Tensor:
        """Whole rows (B, T), no cache -> logits (B, keep, V)."""
        with self._mode(training=self.gradient_checkpointing):
            return self._read(tokens, real, keep, None, use_cache=False)[0]

    def start(self, prompts: Tensor, group_size: int) -> tuple[Tensor, HFCache]:
        """Read left-padded prompts (Q, P) once -> logits (Q, G, V) of the first token of G completions, and a cache."""
        real = self._real(prompts)  # (Q, P)
        with self._mode(training=False):
            logits, layers = self._read(prompts, real, 1, None, use_cache=True)  # (Q, 1, V)
        layers.batch_repeat_interleave(group_size)  # (Q, ...) -> (N, ...): the completions of a prompt side by side
        return logits.expand(-1, group_size, -1), HFCache(layers, real.repeat_interleave(group_size, 0))

    def step(self, tokens: Tensor, cache: HFCache) -> tuple[Tensor, HFCache]:
        """Read one more token (Q, G) of each completion -> logits (Q, G, V) of the next, and the longer cache.

        The cache that is handed in is used up.
        """
        logits, cache = self._extend(tokens.reshape(-1, 1), cache)  # (N, 1, V)
        return logits.view(*tokens.shape, -1), cache

    def _extend(self, tokens: Tensor, cache: HFCache) -> tuple[Tensor, HFCache]:
        """Read T more tokens (N, T) of each completion -> logits (N, T, V), and the longer cache."""
        real = torch.cat((cache.real, torch.ones_like(tokens, dtype=torch.bool)), 1)  # (N, S+T)
        with self._mode(training=False):
            logits, layers = self._read(tokens, real, tokens.shape[1], cache.layers, use_cache=True)
        return logits, HFCache(layers, real)

    def completion_logits(self, prompts: Tensor, completions: Tensor) -> Tensor:
        """The logits (Q, G, T, V) that each token of completions (Q, G, T) was drawn from; prompts (Q, P).

        Each prompt is read once for its G completions, forward and backward: its keys and values carry the gradient.
        With gradient checkpointing, which cannot keep a cache, each of the N rows reads its prompt again.
        """
        if self.gradient_checkpointing:
            return self._completion_logits_by_row(prompts, completions)
        Q, G, T = completions.shape
        first, cache = self.start(prompts, G)  # (Q, G, V)
        if T == 1:
            return first[:, :, None]
        rest, _ = self._extend(completions[..., :-1].flatten(0, 1), cache)  # (N, T-1, V)
        return torch.cat((first[:, :, None], rest.view(Q, G, T - 1, -1)), 2)

    def _completion_logits_by_row(self, prompts: Tensor, completions: Tensor) -> Tensor:
        Q, G, T = completions.shape
        read = completions[..., :-1].flatten(0, 1)  # (N, T-1)
        real = self._real(prompts).repeat_interleave(G, 0)  # (N, P)
        real = torch.cat((real, torch.ones_like(read, dtype=torch.bool)), 1)  # (N, P+T-1)
        rows = torch.cat((prompts.repeat_interleave(G, 0), read), 1)  # (N, P+T-1)
        return self._rows(rows, real, keep=T).view(Q, G, T, -1)

    def reference(self) -> "AdaptersOff":
        """The policy before training, without a second copy of it: this model with its LoRA adapters switched off.

        Raises UserError where there are none: then copy.deepcopy(policy) before training is the reference.
        """
        if not is_lora(self):
            raise UserError("this policy has no LoRA adapters to switch off; copy it before training instead")
        return AdaptersOff(self)


class AdaptersOff(nn.Module):
    """A policy's base model, read in the same four ways, without gradient. Shares every weight with the policy."""

    def __init__(self, policy: HFPolicy):
        super().__init__()
        self.policy = policy

    @torch.no_grad()
    def forward(self, tokens: Tensor) -> Tensor:
        """Left-padded texts (B, T) -> logits (B, T, V)."""
        with self.policy.model.disable_adapter():
            return self.policy(tokens)

    @torch.no_grad()
    def start(self, prompts: Tensor, group_size: int) -> tuple[Tensor, HFCache]:
        """Prompts (Q, P) -> logits (Q, G, V) of the first token of G completions, and a cache."""
        with self.policy.model.disable_adapter():
            return self.policy.start(prompts, group_size)

    @torch.no_grad()
    def step(self, tokens: Tensor, cache: HFCache) -> tuple[Tensor, HFCache]:
        """One more token (Q, G) -> logits (Q, G, V) of the next, and the longer cache."""
        with self.policy.model.disable_adapter():
            return self.policy.step(tokens, cache)

    @torch.no_grad()
    def completion_logits(self, prompts: Tensor, completions: Tensor) -> Tensor:
        """prompts (Q, P), completions (Q, G, T) -> logits (Q, G, T, V)."""
        with self.policy.model.disable_adapter():
            return self.policy.completion_logits(prompts, completions)


def check_readable(model: nn.Module) -> None:
    """Refuse a model that positions, cache and padding cannot be handed to. Raises UserError."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    accepted = inspect.signature(base.forward).parameters
    missing = [name for name in ("position_ids", "cache", "logits_to_keep") if name not in accepted]
    if missing or base.config.is_encoder_decoder or getattr(base, "_is_stateful", False):
        why = f"does not take {', '.join(missing)}" if missing else "is recurrent or has an encoder"
        raise UserError(f"{type(base).__name__} {why}; take a decoder with attention, such as llama, qwen2 or gpt2")


def turn_off_dropout(model: nn.Module) -> None:
    """Set every dropout probability to 0: in modules, in what attention keeps as a number, and in the config."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        set_dropout_to_0(module)
    set_dropout_to_0(model.config.get_text_config())


def set_dropout_to_0(owner: object) -> None:
    """Set to 0 the plain numbers of `owner` that are named like a dropout (gpt2 says attn_pdrop, opt layerdrop)."""
    for name, value in list(vars(owner).items()):
        if type(value) in (int, float) and name.endswith(("dropout", "pdrop", "drop")):
            setattr(owner, name, 0.0)


# === Loading: safetensors only, nothing of the folder's own is ever run. ===


def load_model(
    name: str, dtype: str = "float32", device: str = "cpu", lora_rank: int = 0, gradient_checkpointing: bool = False
) -> tuple[HFPolicy, transformers.PreTrainedTokenizerBase]:
    """A policy and its tokenizer from a local folder or a model of the hub.

    dtype is the type of the weights: float32, bfloat16 or float16 (adapters are always float32). lora_rank 0 trains all
    weights; above 0 it freezes them and trains adapters of that rank on every linear layer but the head. The pad id is
    the tokenizer's, else its end or unknown token: set `policy.pad` if a text of yours begins with that one.
    Raises UserError, in one line, for whatever cannot be loaded.
    """
    if dtype not in DTYPES:
        raise UserError(f"dtype is {dtype!r}; choose one of {', '.join(DTYPES)}")
    if not 0 <= lora_rank <= LARGEST_RANK:
        raise UserError(f"the LoRA rank is {lora_rank}; give 0 to train all weights, or 1 to {LARGEST_RANK}")
    tokenizer = load_tokenizer(name)
    model = load_weights_and_config(name, DTYPES[dtype])
    if lora_rank:
        model = add_lora(model, lora_rank)
    policy = HFPolicy(model, default_pad(name, tokenizer), gradient_checkpointing)
    if len(tokenizer) > policy.vocab_size:
        sizes = f"{len(tokenizer)} tokens and the model {policy.vocab_size}"
        raise UserError(f"the tokenizer of {name!r} has {sizes}; they do not belong together, fetch both again")
    with one_line(f"cannot use the device {device!r}; try cpu"):
        return policy.to(device), tokenizer


def load_tokenizer(name: str) -> transformers.PreTrainedTokenizerBase:
    """The tokenizer of a folder or hub id. Raises UserError."""
    if name.startswith(("/", ".", "~")) and not Path(name).is_dir():  # no name of the hub's: no need to ask it
        raise UserError(f"no such folder: {name!r}")
    if (Path(name) / "adapter_config.json").exists():
        raise UserError(f"{name!r} holds LoRA adapters; train their base model, or merge them into it first")
    if Path(name).is_dir() and not any(Path(name).glob("*token*")) and not any(Path(name).glob("vocab*")):
        raise UserError(f"no tokenizer in {name!r}; save one there with tokenizer.save_pretrained")
    with one_line(cannot_load("tokenizer", name)):
        return transformers.AutoTokenizer.from_pretrained(name, **safely(name))


def cannot_load(part: str, name: str) -> str:
    """The beginning of an error message."""
    if Path(name).is_dir():
        return f"cannot load the {part} in {name!r}"
    return f"cannot load the {part} of {name!r}: no such folder here, nor a model that can be fetched from the hub"


def safely(name: str) -> dict[str, bool]:
    """Options of every from_pretrained here: no code of the folder's own, and for a folder no look at the network."""
    return {"trust_remote_code": False, "local_files_only": Path(name).is_dir()}


def read_config(name: str) -> transformers.PretrainedConfig:
    """The config of a folder or hub id, its sizes within reason. Raises UserError."""
    with one_line(cannot_load("config", name)):
        config = transformers.AutoConfig.from_pretrained(name, **safely(name))
        text = config.get_text_config()
    for key, most in (("num_hidden_layers", LARGEST_LAYERS), ("vocab_size", LARGEST_VOCABULARY)):
        value = getattr(text, key, 1)
        if type(value) is not int or not 1 <= value <= most:
            raise UserError(f"the config of {name!r} says {key} = {value!r:.20}; it must be from 1 to {most}")
    return config


def load_weights_and_config(name: str, dtype: torch.dtype | str) -> nn.Module:
    """A causal language model with all its weights from safetensors files. Raises UserError."""
    read_config(name)
    options = {"dtype": dtype, "use_safetensors": True, "output_loading_info": True}
    with one_line(cannot_load("model", name)):
        model, info = transformers.AutoModelForCausalLM.from_pretrained(name, **options, **safely(name))
    made_for = model.config.architectures or [type(model).__name__]
    if type(model).__name__ not in made_for or getattr(model, "_hf_peft_config_loaded", False):
        raise UserError(f"{name!r} holds {made_for[0]}, not a causal language model of its own; choose another model")
    unfilled = sorted(map(str, [*info["missing_keys"], *info["mismatched_keys"]]))
    if unfilled:  # transformers would go on with random numbers in their place
        raise UserError(f"{name!r} lacks {len(unfilled)} weights, such as {unfilled[0]}; fetch the model again")
    return model


def add_lora(model: nn.Module, rank: int) -> nn.Module:
    """The model, frozen, with adapters W + 2 B A on every linear layer but the head. B starts at 0: nothing moves yet.

    A is drawn from a seed of its own: the same at every load, and no one else's random numbers shift.
    Raises UserError where peft is not installed.
    """
    try:
        import peft
    except ImportError:
        raise UserError("LoRA needs peft, which is not installed; install it, or train all weights (rank 0)") from None
    is_transposed = any(isinstance(module, transformers.pytorch_utils.Conv1D) for module in model.modules())  # gpt2
    config = peft.LoraConfig(
        r=rank, lora_alpha=2 * rank, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM",
        fan_in_fan_out=is_transposed,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]), one_line("cannot put LoRA adapters on this model"):
        torch.default_generator.manual_seed(0)  # the processor's alone: torch.manual_seed would reseed every GPU
        return peft.get_peft_model(model, config)


def default_pad(name: str, tokenizer: transformers.PreTrainedTokenizerBase) -> int:
    """The pad id: the tokenizer's, else its end or unknown token. Raises UserError where it has none of them."""
    candidates = (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id)
    found = [token for token in candidates if token is not None]
    if not found:
        raise UserError(f"the tokenizer of {name!r} has no padding, end or unknown token; give it a pad_token")
    return found[0]


def stop_ids(model: nn.Module, tokenizer: transformers.PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Every id that ends an answer: the tokenizer's and the model's end tokens, and the usual ends of a chat turn.

    `model` is an HFPolicy or a model of transformers.
    """
    model = model.model if isinstance(model, HFPolicy) else model
    configs = (tokenizer, model.config, model.config.get_text_config(), getattr(model, "generation_config", None))
    found = []
    for config in configs:
        ends = getattr(config, "eos_token_id", None)
        found += ends if isinstance(ends, list | tuple) else [ends]
    added = tokenizer.added_tokens_decoder.items()
    found += [token_id for token_id, token in added if token.special and token.content in TURN_ENDS]
    vocab_size = model.get_output_embeddings().weight.shape[0]
    return tuple(dict.fromkeys(token for token in found if isinstance(token, int) and 0 <= token < vocab_size))


# === Saving and loading what was trained. ===


def save_model(policy: HFPolicy, folder: str | Path) -> None:
    """Write the weights and their config as safetensors and JSON; with LoRA the adapters alone. Raises UserError."""
    with one_line(f"cannot save to {str(folder)!r}"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        if is_lora(policy):  # False: peft would else ask the hub whether the vocabulary has grown
            policy.model.save_pretrained(folder, save_embedding_layers=False)
        else:
            policy.model.save_pretrained(folder)


def load_weights(policy: HFPolicy, folder: str | Path) -> None:
    """Read back what save_model wrote, bit for bit, into a policy of the same kind.

    Raises UserError, and leaves the policy as it was, for a damaged file or tensors that are not the policy's. (The
    adapters of another base model whose layers have the same names and shapes cannot be told from its own.)
    """
    if is_lora(policy):
        load_adapters(policy, Path(folder))
        return
    if not Path(folder).is_dir():
        raise UserError(f"no folder {str(folder)!r}; give one that save_model wrote")
    saved = load_weights_and_config(str(folder), "auto").state_dict()
    check_same_tensors(folder, saved, policy.model.state_dict())
    policy.model.load_state_dict(saved)


def load_adapters(policy: HFPolicy, folder: Path) -> None:
    """The LoRA half of load_weights."""
    import peft

    with one_line(f"cannot read a LoRA adapter from {str(folder)!r}"):
        saved = load_file(folder / "adapter_model.safetensors")
        config = peft.LoraConfig.from_pretrained(str(folder), local_files_only=True)
    ours = policy.model.peft_config[policy.model.active_adapter]
    has, needs = (config.r, config.lora_alpha), (ours.r, ours.lora_alpha)
    if has != needs:
        raise UserError(
            f"{str(folder)!r} has LoRA rank and alpha {has}, the policy {needs}; load the model with that rank"
        )
    check_same_tensors(folder, saved, peft.get_peft_model_state_dict(policy.model, save_embedding_layers=False))
    peft.set_peft_model_state_dict(policy.model, saved)


def is_lora(policy: HFPolicy) -> bool:
    """Are there adapters that alone are trained?"""
    return hasattr(policy.model, "peft_config")


def check_same_tensors(folder: str | Path, found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    """Refuse weights whose names, shapes or types differ from the policy's. Raises UserError that names one of them."""
    found, wanted = (
        {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()} for tensors in (found, wanted)
    )
    for name in sorted(found.keys() | wanted.keys()):
        if found.get(name) != wanted.get(name):
            has, needs = ("none" if x is None else f"{x[0]} {x[1]}" for x in (found.get(name), wanted.get(name)))
            raise UserError(f"{str(folder)!r} is of another model: {name} is {has}, needed is {needs}")


# === The toy policy as a Llama, and back. ===


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
    policy.pad = PAD if config.pad_token_id is None else config.pad_token_id
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


# === DLC in transformers' own sampling. ===


class MemoryLogitsProcessor(transformers.LogitsProcessor):
    """DLC for `model.generate`: samples from softmax(policy logits - mu * memory logits).

    `memory` is a toy Policy or an HFPolicy over the same tokens; it keeps its own key/value cache and reads each new
    token once. Whenever the texts are not the last ones with one more token each (a new prompt, beams reordered), it
    reads them from the start, so one processor serves any number of generations. `pad` is the id at the left of the
    prompts, where it is not already the memory's own; it becomes the memory's `pad`. Raises UserError for any other
    kind of memory.

        tokenizer.padding_side = "left"
        model.generate(**tokenizer(prompts, return_tensors="pt", padding=True), do_sample=True,
                       temperature=1.0, top_k=0, top_p=1.0, repetition_penalty=1.0,
                       logits_processor=[MemoryLogitsProcessor(memory, mu=0.5)])

    The four settings in the middle are needed: generate's own default is top_k=50, the model's generation_config may
    hold others, and what either cuts is not sampled from that softmax. (A model with more of them, such as min_p or
    no_repeat_ngram_size, shows them in model.generation_config.) Temperature divides after mu, as in `rollout`.
    """

    def __init__(self, memory: Policy | HFPolicy, mu: float, pad: int | None = None):
        if not isinstance(memory, Policy | HFPolicy):
            raise UserError(
                f"the memory is a {type(memory).__name__}; wrap a model of transformers as HFPolicy(model, pad)"
            )
        self.memory, self.mu = memory, mu
        if pad is not None:
            memory.pad = pad
        self.seen: Tensor | None = None  # (B, S) what the cache has read
        self.cache = None

    @torch.no_grad()
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """input_ids (B, S), the policy's scores (B, V) of the next token -> calibrated scores (B, V).

        Raises UserError where the memory has another vocabulary than the policy.
        """
        check_vocabulary(scores.shape[-1], memory_vocab_size(self.memory))
        if self.seen is not None and torch.equal(input_ids[:, :-1], self.seen):
            logits, self.cache = self.memory.step(input_ids[:, -1:], self.cache)  # (B, 1, V)
        else:
            logits, self.cache = self.memory.start(input_ids, 1)  # (B, 1, V)
        self.seen = input_ids.clone()
        return calibrated_logits(scores, logits[:, 0], self.mu)


def memory_vocab_size(memory: Policy | HFPolicy) -> int:
    """Width of a memory network's logits (V)."""
    return memory.vocab_size if isinstance(memory, HFPolicy) else memory.head.weight.shape[0]
