"""Language models and their tokenizers: load, adapt with LoRA, save. Safetensors only, no code of a folder's is run."""

from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn

from language_models.policy import HFPolicy, is_lora, one_line
from toy_tasks import UserError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>")  # how the usual chat templates end what the model says
LARGEST_RANK = 1024  # of a LoRA adapter; beyond it there is nothing low about the rank
LARGEST_LAYERS, LARGEST_VOCABULARY = 1024, 1_000_000  # of a config that is believed


def load_model(
    name: str, dtype: str = "float32", device: str = "cpu", lora_rank: int = 0, gradient_checkpointing: bool = False
) -> tuple[HFPolicy, transformers.PreTrainedTokenizerBase]:
    """A policy and its tokenizer from a local folder or a model of the hub.

    dtype is the type of the weights: float32, bfloat16 or float16 (adapters are always float32). lora_rank 0 trains all
    weights; above 0 it freezes them and trains adapters of that rank on every linear layer but the head.
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
    policy = HFPolicy(model, gradient_checkpointing)
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


def read_model_config(name: str) -> transformers.PretrainedConfig:
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
    read_model_config(name)
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


def load_model_weights(policy: HFPolicy, folder: str | Path) -> None:
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
    """The LoRA half of load_model_weights."""
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


def check_same_tensors(folder: str | Path, found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    """Refuse weights whose names, shapes or types differ from the policy's. Raises UserError that names one of them."""
    found, wanted = (
        {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()} for tensors in (found, wanted)
    )
    for name in sorted(found.keys() | wanted.keys()):
        if found.get(name) != wanted.get(name):
            has, needs = ("none" if x is None else f"{x[0]} {x[1]}" for x in (found.get(name), wanted.get(name)))
            raise UserError(f"{str(folder)!r} is of another model: {name} is {has}, needed is {needs}")
