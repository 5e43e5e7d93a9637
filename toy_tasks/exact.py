"""What enumeration can say about a policy on a task: probabilities are summed here, never estimated.

A policy is any callable from `Padded` texts (B, T) to logits (B, T, V).

Axes: Q prompts, M listed modes of one prompt (padded to the longest list), R listed modes of all prompts together,
L tokens of a prompt and its longest completion, P tokens of the longest prompt.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from toy_tasks import measures
from toy_tasks.task import PAD, STOP, Padded, Task

ExactPolicy = Callable[[Padded], Tensor]
SUPPORT_THRESHOLD = 0.01  # a mode counts as within reach of the policy above this probability (our choice)


def batched(items: list, size: int) -> Iterator[list]:
    """The items in lists of at most `size`.

    >>> list(batched([1, 2, 3], 2))
    [[1, 2], [3]]
    """
    return (items[i : i + size] for i in range(0, len(items), size))


def followed_by(prompts: Padded, completions: Tensor) -> Padded:
    """Each prompt (R, P) and its completion (R, T) as one text: (R, P + T). What pads a completion counts as text."""
    texts = Padded.of(completions)
    return Padded(*(torch.cat(pair, 1) for pair in zip(prompts, texts, strict=True)))


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
        self.padded = followed_by(task.encode_prompts(prompts).pick(self.slots[:, 0]), completions)  # (R, L)
        self.scored = torch.zeros_like(self.padded.real)  # (R, L): completion tokens up to the stop
        self.scored[:, -longest:] = torch.arange(longest) < lengths[:, None]

    def log_probs(self, policy: ExactPolicy, temperature: float = 1.0) -> Tensor:
        """log pi(mode | prompt) of every listed mode, its stop included; (Q, M) float64, -inf where a row has no mode.

        One batched forward pass. Differentiable: it is the whole of the infinite-batch objective.
        """
        texts = self.padded.to(device_of(policy))
        logits = policy(texts)[:, :-1].float() / temperature  # (R, L-1, V): position t scores token t+1
        token_log_probs = logits.log_softmax(-1).gather(-1, texts.tokens[:, 1:, None]).squeeze(-1).cpu().double()
        summed = (token_log_probs * self.scored[:, 1:]).sum(1)  # (R,)
        result = torch.full((len(self.counts), int(self.counts.max())), -math.inf, dtype=torch.float64)
        return result.index_put((self.slots[:, 0], self.slots[:, 1]), summed)


def device_of(policy: ExactPolicy) -> torch.device:
    """Where a policy's parameters lie; the processor for a plain function."""
    return next((p.device for p in getattr(policy, "parameters", list)()), torch.device("cpu"))


class Tree:
    """All completions of some prompts that a policy gives at least `min_mass`, found by walking its prefix tree.

    A node is a prefix that has not ended: K of them over all prompts, each the beginning of one of R token rows. Every
    node has one ended completion (the node, then stop), so the outcomes are the K ended ones and the cut ones, which
    reach `max_new_tokens` without a stop. What falls under `min_mass` is left out, and `left_out` says how much.
    """

    def __init__(
        self,
        policy: ExactPolicy,
        task: Task,
        prompts: Sequence[str],
        min_mass: float = 1e-6,
        temperature: float = 1.0,
    ):
        self.task, self.prompts, self.temperature = task, list(prompts), temperature
        self.prompt_texts = task.encode_prompts(prompts)  # (Q, P)
        nodes, cut = self._walk(policy, min_mass)
        inner = {node[:-1] for node in nodes + cut}  # (prompt index, *tokens) of every node with a node or a cut below
        ends = [node for node in nodes if node not in inner] + cut
        completions = torch.full((len(ends), task.max_new_tokens), PAD)
        place = {}  # node -> (row, length): the first row that begins with it
        for row, (q, *tokens) in enumerate(ends):
            completions[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.long)
            for length in range(len(tokens) + 1):
                place.setdefault((q, *tokens[:length]), (row, length))
        self.padded = followed_by(self.prompt_texts.pick([q for q, *_ in ends]), completions)  # (R, L)
        self.node_at = torch.tensor([place[node] for node in nodes])  # (K, 2): row and number of tokens
        self.cut_at = torch.tensor([place[node] for node in cut], dtype=torch.long).view(-1, 2)
        self.node_owner = torch.tensor([node[0] for node in nodes])  # (K,) prompt index
        self.owner = torch.tensor([node[0] for node in nodes + cut])  # (O,) prompt index of each outcome
        self.texts = [task.decode(list(node[1:])) for node in nodes + cut]
        self.lengths = torch.tensor([len(node) for node in nodes] + [len(node) - 1 for node in cut])  # stop included
        self.ended = torch.arange(len(nodes) + len(cut)) < len(nodes)  # (O,)
        with torch.no_grad():
            self.reference = self.conditionals(policy)  # (R, L, V)

    @torch.no_grad()
    def _walk(self, policy, min_mass: float) -> tuple[list[tuple], list[tuple]]:
        """Breadth first: the nodes and the cut completions with at least `min_mass`, as (prompt index, *tokens)."""
        level = [((q,), 0.0) for q in range(len(self.prompts))]
        nodes: list[tuple] = []
        for _ in range(self.task.max_new_tokens):
            nodes += [node for node, _ in level]
            level = [child for part in batched(level, 4096) for child in self._children(policy, part, min_mass)]
        return nodes, [node for node, _ in level]

    def _children(self, policy, level: Sequence[tuple], min_mass: float) -> list[tuple]:
        """The prefixes one token longer, with their log-probability; stops are left to the parent."""
        prefixes = torch.tensor([node[1:] for node, _ in level], dtype=torch.long).view(len(level), -1)
        texts = followed_by(self.prompt_texts.pick([node[0] for node, _ in level]), prefixes)
        logits = policy(texts.to(device_of(policy)))[:, -1].float() / self.temperature
        last = logits.log_softmax(-1).cpu().double()
        log_mass = last + torch.tensor([mass for _, mass in level], dtype=torch.float64)[:, None]  # (rows, V)
        log_mass[:, STOP] = -math.inf
        found = (log_mass >= math.log(min_mass)).nonzero().tolist()
        return [((*level[row][0], token), log_mass[row, token].item()) for row, token in found]

    def conditionals(self, policy: ExactPolicy) -> Tensor:
        """log pi(token | prefix) at every position of every row: (R, L, V) float64. Differentiable."""
        logits = policy(self.padded.to(device_of(policy))).float() / self.temperature
        return logits.log_softmax(-1).cpu().double()

    def prefix_log_probs(self, conditionals: Tensor) -> Tensor:
        """log pi of the first 0, 1, ..., T completion tokens of each row: (R, T+1)."""
        P = self.prompt_texts.tokens.shape[1]
        each = conditionals[:, P - 1 : -1].gather(-1, self.padded.tokens[:, P:, None])[..., 0]  # (R, T)
        return torch.cat((torch.zeros_like(each[:, :1]), each.cumsum(1)), 1)

    def outcome_log_probs(self, policy: ExactPolicy) -> Tensor:
        """log pi of every outcome, ended ones first: (O,) float64. Differentiable."""
        conditionals = self.conditionals(policy)
        prefix = self.prefix_log_probs(conditionals)
        row, length = self.node_at.T
        ended = prefix[row, length] + conditionals[row, self.prompt_texts.tokens.shape[1] - 1 + length, STOP]
        return torch.cat((ended, prefix[self.cut_at[:, 0], self.cut_at[:, 1]]))

    def by_prompt(self, values: Tensor) -> Tensor:
        """Sum of one value per outcome over each prompt's outcomes: (O,) -> (Q,)."""
        return torch.zeros(len(self.prompts), dtype=values.dtype).index_add(0, self.owner, values)

    def left_out(self, policy: ExactPolicy) -> Tensor:
        """Probability (Q,) of the completions that are not in the tree."""
        return 1 - self.by_prompt(self.outcome_log_probs(policy).exp())

    def kl(self, policy: ExactPolicy) -> Tensor:
        """KL(policy || the policy the tree was made of) per prompt: (Q,) float64, differentiable.

        Summed node by node, pi(prefix) KL(pi(. | prefix) || pi_ref(. | prefix)), so a pruned child still counts at
        its parent; only what happens below it is missing, which has probability `left_out`.
        """
        conditionals, fixed = self.conditionals(policy), self.reference  # (R, L, V)
        row, length = self.node_at.T
        at = self.prompt_texts.tokens.shape[1] - 1 + length
        step = (conditionals[row, at].exp() * (conditionals[row, at] - fixed[row, at])).sum(-1)  # (K,)
        value = self.prefix_log_probs(conditionals)[row, length].exp() * step
        return torch.zeros(len(self.prompts), dtype=value.dtype).index_add(0, self.node_owner, value)


class Modes(NamedTuple):
    """What the measures are made of: exact probabilities of every listed mode, now and under the reference."""

    probs: np.ndarray  # (Q, M)
    reference_probs: np.ndarray  # (Q, M)
    class_of: np.ndarray  # (Q, M, classes), one-hot

    @property
    def mass(self) -> np.ndarray:
        """Probability of being right, (Q,); a float64 sum of softmaxes may pass 1 by an ulp."""
        return np.minimum(self.probs.sum(-1), 1.0)

    @property
    def support(self) -> measures.Support:
        return measures.support(self.probs, self.reference_probs, SUPPORT_THRESHOLD)


# Every measure of modes, in the order of the columns of metrics.csv. A new one is one more function of `Modes` that
# gives one number a prompt; what each of them says, and its source, stands in `measures.py` and README's glossary.
MEASURES: dict[str, Callable[[Modes], np.ndarray]] = {
    "pass@1": lambda modes: modes.mass,
    "pass@8": lambda modes: measures.pass_at_k_exact(modes.mass, 8),
    "distinct@8": lambda modes: measures.distinct_at_k(modes.probs, 8),
    "effective_modes": lambda modes: measures.effective_modes(modes.probs),
    "effective_classes": lambda modes: measures.effective_modes(np.einsum("qm,qmc->qc", modes.probs, modes.class_of)),
    "retained_mass": lambda modes: measures.retained_mass(modes.probs, modes.reference_probs),
    "moderate": lambda modes: measures.moderate(modes.probs, modes.reference_probs),
    "share_gained": lambda modes: measures.share_gained(modes.probs, modes.reference_probs),
    "worst_drop": lambda modes: measures.worst_drop(modes.probs, modes.reference_probs),
    "pcmd": lambda modes: measures.pcmd(modes.probs),
    "support_kept": lambda modes: modes.support.kept,
    "support_gained": lambda modes: modes.support.gained,
    "support_lost": lambda modes: modes.support.lost,
}


def mode_measures(listing: Listing, probs: np.ndarray, reference_probs: np.ndarray) -> dict[str, np.ndarray]:
    """Every measure of `MEASURES`, one number a prompt: name -> (Q,). `probs` and `reference_probs` are (Q, M)."""
    modes = Modes(probs, reference_probs, listing.class_of)
    return {name: measure(modes) for name, measure in MEASURES.items()}


def exact_objective(
    success: Tensor, kl: Tensor | None = None, beta: float = 0.0, normalize_std: bool = True, kl_in: str = "reward"
) -> Tensor:
    """What GRPO climbs with infinitely many completions, per prompt; `success` and `kl` (Q,) -> (Q,). Differentiable.

    GRPO's expected update is the gradient of the success probability P over sqrt(P (1 - P)), the root held fixed. A KL
    in the reward is divided with it (its own variance is left out of the root: our choice), a KL in the loss is not.
    >>> exact_objective(torch.tensor([0.5, 0.5]), kl=torch.tensor([0.0, 0.1]), beta=1.0)
    tensor([1.0000, 0.8000])
    """
    deviation = (success * (1 - success)).clamp(min=0).sqrt().detach() + 1e-6 if normalize_std else 1.0
    if kl is None:
        return success / deviation
    return (success - beta * kl) / deviation if kl_in == "reward" else success / deviation - beta * kl


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


def expected_unsampled_loss(
    reference_probs: Tensor,
    correct: Tensor,
    group_size: int,
    beta: float,
    advantages: Callable[[Tensor], Tensor],
    groups: int | None = None,
    generator: torch.Generator | None = None,
) -> tuple[float, float, float]:
    """Share of the correct mass that modes outside the group lose in one `finite_batch_optimum`, expected over groups.

    reference_probs (M,) over all completions, correct (M,) bool; `advantages` maps rewards (1, G) to advantages (1, G).
    Without `groups` every group is enumerated (as multisets: M = 8 and G = 6 make 1,716) and the value is exact; with
    it, so many groups are drawn from `generator`. Returns (value, low, high), the 95 % interval of the mean; for an
    exact value all three are equal.

    >>> centred = lambda rewards: rewards - rewards.mean()
    >>> probs, correct = torch.tensor([0.4, 0.1, 0.5]), torch.tensor([True, True, False])
    >>> value, low, high = expected_unsampled_loss(probs, correct, 2, beta=0.5, advantages=centred)
    >>> round(value, 4), low == value == high
    (0.1072, True)
    """
    M, drawn = len(reference_probs), groups is not None
    if drawn:
        rows = torch.multinomial(reference_probs.expand(groups, M), group_size, replacement=True, generator=generator)
        weights = [1 / groups] * groups
    else:
        rows = torch.combinations(torch.arange(M), group_size, with_replacement=True)  # (multisets, G)
        weights = [multiset_probability(row, reference_probs) for row in rows]
    losses = []
    for row in rows:
        new = finite_batch_optimum(reference_probs, row, advantages(correct[row].float()[None])[0], beta)
        missed = correct.clone()
        missed[row] = False
        losses.append(((reference_probs - new)[missed].sum() / reference_probs[correct].sum()).item())
    value = sum(weight * loss for weight, loss in zip(weights, losses, strict=True))
    error = 1.96 * float(np.std(losses, ddof=1)) / math.sqrt(len(losses)) if drawn else 0.0
    return value, value - error, value + error


def multiset_probability(row: Tensor, probs: Tensor) -> float:
    """Probability that len(row) draws from probs (M,) give the indices of `row`, in whatever order.

    >>> multiset_probability(torch.tensor([0, 1]), torch.tensor([0.5, 0.5]))
    0.5
    """
    counts = torch.bincount(row, minlength=len(probs)).tolist()
    orders = math.factorial(len(row)) / math.prod(math.factorial(count) for count in counts)
    return orders * math.prod(p**count for p, count in zip(probs.tolist(), counts, strict=True))
