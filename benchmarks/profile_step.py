"""Where the time of one grpo step goes, by kind of operation: why a step takes several times its arithmetic floor.

    python -m benchmarks.profile_step

One thread, the default work of workload.py, PyTorch's own profiler. Its overhead makes every operation a little slower
than without it, small ones most. Writes profile_step.txt.
"""

import sys

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks import timing
from benchmarks.floor import flops, step_products
from benchmarks.workload import Work, make_learner, step

OTHERS = "add sub div pow sum mean rsqrt exp neg where _log_softmax clamp minimum isfinite"
# Kind -> what the names of its operations begin with; the first that fits counts.
KINDS = {
    "matrix products": ("aten::mm", "aten::addmm", "aten::bmm", "aten::linear"),
    "attention": ("aten::_scaled_dot_product",),
    "copies (cat, copy, fill, gather)": ("aten::cat", "aten::copy_", "aten::fill_", "aten::gather", "aten::scatter"),
    "activation (SwiGLU)": ("aten::silu",),
    "multiplications (norms, rotary, SwiGLU)": ("aten::mul",),
    "drawing tokens": ("aten::multinomial", "aten::exponential_", "aten::argmax"),
    "other arithmetic": tuple(f"aten::{name}" for name in OTHERS.split()),
    "optimiser": ("Optimizer", "aten::_fused_adamw", "aten::_foreach"),
}
REST = "calls, views and all else"


def kind_of(name: str) -> str:
    """
    >>> kind_of("aten::mm"), kind_of("aten::view")
    ('matrix products', 'calls, views and all else')
    """
    return next((kind for kind, beginnings in KINDS.items() if name.startswith(beginnings)), REST)


def profile_steps(steps: int) -> tuple[dict[str, float], dict[str, float]]:
    """Kind -> milliseconds a step, and calls a step."""
    learner = make_learner(Work(), "grpo")
    for _ in range(3):
        step(learner)
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        for _ in range(steps):
            step(learner)
    spent, calls = (dict.fromkeys((*KINDS, REST), 0.0) for _ in range(2))
    for event in recorded.key_averages():
        spent[kind_of(event.key)] += event.self_cpu_time_total / 1e3 / steps
        calls[kind_of(event.key)] += event.count / steps
    return spent, calls


def table(spent: dict[str, float], calls: dict[str, float]) -> str:
    """A line a kind."""
    total = sum(spent.values())
    lines = [f"{'one grpo step, 1 thread':42}{'ms':>7}{'%':>7}{'calls':>8}"]
    lines += [f"{kind:42}{ms:7.1f}{100 * ms / total:7.1f}{calls[kind]:8.0f}" for kind, ms in spent.items()]
    needed = flops(step_products(Work()))
    rate = needed / (spent["matrix products"] + spent["attention"]) / 1e6
    lines.append(f"{'all':42}{total:7.1f}{100:7.1f}{sum(calls.values()):8.0f}")
    lines.append(
        "(under PyTorch's profiler, which slows small operations most; bench_step.txt has the undisturbed time)"
    )
    lines.append(f"products and attention do the floor's {needed / 1e9:.2f} GFLOP at {rate:.0f} GFLOP/s")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Profile, print, write. Returns the exit code."""
    options = timing.arguments(__doc__.splitlines()[0], rounds=20).parse_args(argv)
    torch.set_num_threads(1)
    heading = timing.heading("profile_step", "cpu", argv)
    timing.write_results(options.out, "profile_step", f"{heading}\n\n{table(*profile_steps(options.rounds))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
