"""What enumeration can say about a policy on a task: probabilities are summed here, never estimated.

A policy is any callable from tokens (B, T), left-padded, to logits (B, T, V).

Axes: Q prompts, M listed modes of one prompt (padded to the longest list), R listed modes of all prompts together,
L tokens of a prompt and its longest completion, P tokens of the longest prompt.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from toy_tasks import measures
from toy_tasks.task import PAD, STOP, Task

SUPPORT_THRESHOLD = 0.01  # a mode counts as within reach of the policy above this probability (our choice)


def encode_prompts(task: Task, prompts: Sequence[str]) -> Tensor:
    """Left-padded token ids (Q, P), P the longest prompt *of the task*, so that every batch has one width.

    >>> from toy_tasks import Sums
    >>> encode_prompts(Sums(), ["9=", "12="]).tolist()
    [[0, 11, 13], [3, 4, 13]]
    """
    width = max(map(len, task.prompts))
    return torch.tensor([[PAD] * (width - len(p)) + task.encode(p) for p in prompts])


class Listing:
    """All modes of some prompts as one batch of tokens, made once and scored as often as one likes."""

    def __init__(self, task: Task, prompts: Sequence[str]):
        modes = [task.modes(prompt) for prompt in prompts]
        empty = next((p for p, m in zip(prompts, modes, strict=True) if not m), None)
        if empty is not None:
            raise ValueError(f"task {task.name}: prompt {empty!r} has no correct completion; leave it out of the task")
        self.modes = modes
        classes = [sorted({task.mode_class(mode) for mode in row}) for row in modes]
        self.counts = np.array([len(row) for row in modes])  # (Q,)
        self.class_counts = np.array([len(row) for row in classes])  # (Q,)
        self.slots = torch.tensor([(q, m) for q, row in enumerate(modes) for m in range(len(row))])  # (R, 2)
        self.class_of = np.zeros((len(modes), self.counts.max(), self.class_counts.max()))  # (Q, M, classes), one-hot
        for q, row in enumerate(modes):
            for m, mode in enumerate(row):
                self.class_of[q, m, classes[q].index(task.mode_class(mode))] = 1
        texts = [[*task.encode(mode), STOP] for row in modes for mode in row]
        longest = max(map(len, texts))
        completions = torch.tensor([text + [PAD] * (longest - len(text)) for text in texts])
        lengths = torch.tensor([len(text) for text in texts])
        prompt_tokens = encode_prompts(task, prompts)[self.slots[:, 0]]
        self.tokens = torch.cat((prompt_tokens, completions), 1)  # (R, L)
        self.scored = torch.zeros_like(self.tokens, dtype=torch.bool)  # (R, L): completion tokens up to the stop
        self.scored[:, -longest:] = torch.arange(longest) < lengths[:, None]

    def log_probs(self, policy: Callable[[Tensor], Tensor], temperature: float = 1.0) -> Tensor:
        """log pi(mode | prompt) of every listed mode, its stop included; (Q, M) float64, -inf where a row has no mode.

        One batched forward pass. Differentiable: it is the whole of the infinite-batch objective.
        """
        device = next((p.device for p in getattr(policy, "parameters", list)()), self.tokens.device)
        tokens = self.tokens.to(device)
        logits = policy(tokens)[:, :-1] / temperature  # (R, L-1, V): position t scores token t+1
        token_log_probs = logits.log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1).cpu().double()
        summed = (token_log_probs * self.scored[:, 1:]).sum(1)  # (R,)
        result = torch.full((len(self.counts), int(self.counts.max())), -math.inf, dtype=torch.float64)
        return result.index_put((self.slots[:, 0], self.slots[:, 1]), summed)


def mode_measures(listing: Listing, probs: np.ndarray, reference_probs: np.ndarray) -> dict[str, np.ndarray]:
    """Every measure of modes, one number a prompt: name -> (Q,). `probs` and `reference_probs` are (Q, M).

    The measures and their sources are in `measures.py`; `effective_classes` counts answers that differ by more
    than the order of a sum or a product.
    """
    mass = np.minimum(probs.sum(-1), 1.0)  # summed in float64; a sum of softmaxes may still pass 1 by an ulp
    by_class = np.einsum("qm,qmc->qc", probs, listing.class_of)
    support = measures.support(probs, reference_probs, SUPPORT_THRESHOLD)
    return {
        "pass@1": mass,
        "pass@8": measures.pass_at_k_exact(mass, 8),
        "distinct@8": measures.distinct_at_k(probs, 8),
        "effective_modes": measures.effective_modes(probs),
        "effective_classes": measures.effective_modes(by_class),
        "retained_mass": measures.retained_mass(probs, reference_probs),
        "moderate": measures.moderate(probs, reference_probs),
        "share_gained": measures.share_gained(probs, reference_probs),
        "worst_drop": measures.worst_drop(probs, reference_probs),
        "pcmd": measures.pcmd(probs),
        "support_kept": support.kept,
        "support_gained": support.gained,
        "support_lost": support.lost,
    }


def finite_batch_optimum(
    reference_probs: Tensor, sampled: Tensor, advantages: Tensor, beta: float, old_probs: Tensor | None = None
) -> Tensor:
    """The policy (M,) that maximises GRPO's unclipped surrogate minus beta times KL(policy || reference).

    The surrogate sum_o c(o) pi(o) with c(o) = (1/G) sum_{j: o_j = o} A_j / pi_old(o) is linear in pi, so the optimum
    is pi_ref exp(c / beta) / Z (P1, Theorem 2.2, corrected: P1 states it for the log form, where it does not hold).
    If pi_old = pi_ref and the advantages sum to zero, Z >= 1: every mode that was not sampled is multiplied by
    1/Z <= 1, right or wrong. That is the sampling bias.

    Args: reference_probs (M,) over *all* completions, summing to 1; sampled (G,) mode indices; advantages (G,);
    old_probs (M,), the reference unless given. Raises ValueError for beta <= 0 or shapes that do not fit.

    >>> finite_batch_optimum(torch.tensor([.5, .5]), torch.tensor([0]), torch.tensor([.5]), beta=1.0)
    tensor([0.7311, 0.2689])
    """
    if not beta > 0:
        raise ValueError(f"beta is {beta}: without a KL term the optimum has no closed form; give beta > 0")
    if sampled.shape != advantages.shape or sampled.ndim != 1:
        raise ValueError(f"sampled {tuple(sampled.shape)} and advantages {tuple(advantages.shape)} must both be (G,)")
    old_probs = reference_probs if old_probs is None else old_probs
    share = advantages.to(reference_probs.dtype) / old_probs[sampled] / len(sampled)  # (G,)
    c = torch.zeros_like(reference_probs).index_add(0, sampled, share)  # (M,)
    return (reference_probs.log() + c / beta).softmax(0)
