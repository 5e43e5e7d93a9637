"""How a fresh policy becomes the reference: it imitates a world's skewed, half-wrong data until it knows every mode."""

import random

import torch

from toy_tasks.task import PAD, STOP, Task

BATCH = 256  # completions


def pretrain(policy: torch.nn.Module, task: Task, steps: int | None = None, seed: int = 0) -> None:
    """Train `policy` in place, on the processor, by cross-entropy on completions that `task.sample` gives.

    policy: anything with `completion_logits(prompts, completions)`, as minirlvr's `Policy`. steps: batches of 256
    completions, `task.pretraining_steps` unless given; AdamW with a one-cycle rate over just these.
    """
    steps, rng = task.pretraining_steps if steps is None else steps, random.Random(seed)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3, weight_decay=0.0, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=4e-3, total_steps=steps)
    Q = min(len(task.prompts), 32)
    G = BATCH // Q
    for _ in range(steps):
        prompts = rng.sample(task.prompts, Q)
        texts = [[*task.encode(task.sample(prompt, rng)), STOP] for prompt in prompts for _ in range(G)]
        T = max(map(len, texts))
        completions = torch.tensor([text + [PAD] * (T - len(text)) for text in texts])  # (N, T)
        mask = torch.tensor([[t < len(text) for t in range(T)] for text in texts]).float()  # (N, T)
        logits = policy.completion_logits(task.encode_prompts(prompts), completions.view(Q, G, T)).flatten(0, 1)
        logprobs = logits.log_softmax(-1).gather(-1, completions[..., None]).squeeze(-1)  # (N, T)
        loss = -(logprobs * (mask / mask.sum())).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
