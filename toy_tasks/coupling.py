"""Semantic coupling, measured: how a step on some completions moves the probability of all the others.

To first order, a step of size eta up sum_j c_j log pi(o_j|q_j) changes every other log-probability by
eta sum_j c_j K[o', o_j], where K[o', o] = <grad log pi(o'|q'), grad log pi(o|q)> is the empirical neural tangent kernel
(P1, arXiv 2601.15609, argues by the alignment of these gradients; the formula is textbook). Here K is computed, not
estimated, and held against the step itself.

A policy is a torch module from `Padded` texts (B, L) to logits (B, L, V). Completions are anything that has `padded`
(R, L) and `scored` (R, L) bool, the tokens whose log-probabilities are summed: a `Listing`, or `Completions`.

Axes: R completions whose change is asked for, N completions that are stepped on, W parameters of the policy, Q queries.
"""

import copy
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from toy_tasks.exact import device_of, followed_by
from toy_tasks.task import Padded, Task

MAX_BYTES = 2 * 10**9
VMAP_ROWS = 16  # gradients taken side by side


class Scorable(Protocol):
    """Completions behind their prompts."""

    padded: Padded  # (R, L)
    scored: Tensor  # (R, L) bool: completion tokens up to the stop


class Completions(NamedTuple):
    """Completions that are in no listing: a sampled batch, right and wrong."""

    padded: Padded  # (R, L)
    scored: Tensor  # (R, L) bool

    @classmethod
    def of(cls, prompts: Padded, completions: Tensor, mask: Tensor) -> "Completions":
        """From prompts (Q, P), their completions (Q, G, T) and mask (Q, G, T); R = Q * G, prompt by prompt.

        >>> prompts = Padded.of(torch.tensor([[4, 13]]))
        >>> batch = Completions.of(prompts, torch.tensor([[[5, 1]]]), torch.tensor([[[True, True]]]))
        >>> batch.padded.tokens.tolist(), batch.scored.tolist()
        ([[4, 13, 5, 1]], [[False, False, True, True]])
        """
        Q, G, _ = completions.shape
        repeated = prompts.pick(torch.arange(Q, device=completions.device).repeat_interleave(G))  # (R, P)
        scored = torch.cat((torch.zeros_like(repeated.real), mask.flatten(0, 1)), 1)
        return cls(followed_by(repeated, completions.flatten(0, 1)), scored)


class Bigram(nn.Embedding):
    """The smallest policy there is, for examples: a row of logits for each last token. Weights (V, V)."""

    def forward(self, texts: Padded) -> Tensor:
        """(B, L) -> logits (B, L, V)."""
        return super().forward(texts.tokens)


def log_prob(policy: nn.Module, texts: Padded, scored: Tensor, temperature: float = 1.0) -> Tensor:
    """log pi(completion | prompt) of each row: texts and scored (B, L) -> (B,), in the policy's precision."""
    each = (policy(texts)[:, :-1] / temperature).log_softmax(-1).gather(-1, texts.tokens[:, 1:, None])[..., 0]
    return (each * scored[:, 1:]).sum(1)


# --- the kernel -----------------------------------------------------------------------------------------------------


def completion_gradients(
    policy: nn.Module, completions: Scorable, rows: slice = slice(None), temperature: float = 1.0
) -> Tensor:
    """grad log pi of each completion in `rows`, all parameters that are trained in one row: (rows, W).

    In the parameters' precision, on their device; while it works it takes up to 4 times the memory of its result.
    Raises ValueError for a policy without trained parameters.

    >>> batch = Completions(Padded.of(torch.tensor([[0, 1]])), torch.tensor([[False, True]]))
    >>> policy = Bigram.from_pretrained(torch.zeros(2, 2), freeze=False)
    >>> completion_gradients(policy, batch)  # d log pi(1 | 0) / d logits = onehot - pi, in row 0
    tensor([[-0.5000,  0.5000,  0.0000,  0.0000]])
    """
    weights = {name: p.detach() for name, p in policy.named_parameters() if p.requires_grad}
    if not weights:
        raise ValueError("the policy has no parameters that are trained")
    device, dtype = device_of(policy), next(iter(weights.values())).dtype
    texts, scored = completions.padded.pick(rows).to(device), completions.scored[rows].to(device)

    def one(weights, tokens, real, scored):
        texts = Padded(tokens[None], real[None])
        return log_prob(lambda t: functional_call(policy, weights, (t,)), texts, scored[None], temperature)[0]

    sizes = [w.numel() for w in weights.values()]
    result = torch.empty(len(scored), sum(sizes), dtype=dtype, device=device)
    with sdpa_kernel(SDPBackend.MATH):  # the fused kernels cannot be batched once more
        for at in torch.arange(len(scored)).split(VMAP_ROWS):
            part = slice(int(at[0]), int(at[-1]) + 1)
            found = vmap(grad(one), in_dims=(None, 0, 0, 0))(weights, *texts.pick(part), scored[part])
            for place, found_there in zip(result[part].split(sizes, 1), found.values(), strict=True):
                place.copy_(found_there.flatten(1))
    return result


def coupling_kernel(
    policy: nn.Module,
    completions: Scorable,
    stepped: Scorable | None = None,
    temperature: float = 1.0,
    max_bytes: int = MAX_BYTES,
) -> Tensor:
    """K[i, j] = <grad log pi(o_i|q_i), grad log pi(o_j|q_j)>: (R, N) float64 on the processor.

    `stepped` holds the N columns; without it they are the R rows, and K is the symmetric (R, R) Gram matrix. Gradients
    are in the parameters' precision, products are summed in float64. R * W numbers are never held at once: blocks of
    rows meet blocks of columns, and all of a pair's gradients together stay within `max_bytes`; the price of a small
    bound is that columns are differentiated once per block of rows.

    Raises ValueError where `max_bytes` does not hold five gradients.

    >>> batch = Completions(Padded.of(torch.tensor([[0, 0], [0, 1]])), torch.tensor([[False, True]]).expand(2, 2))
    >>> coupling_kernel(Bigram.from_pretrained(torch.zeros(2, 2), freeze=False), batch)
    tensor([[ 0.5000, -0.5000],
            [-0.5000,  0.5000]], dtype=torch.float64)
    """
    size = block_rows(policy, max_bytes)
    symmetric = stepped is None
    stepped = completions if stepped is None else stepped
    R, N = len(completions.scored), len(stepped.scored)
    kernel = torch.zeros(R, N, dtype=torch.float64)
    for rows in blocks(R, size):
        left = completion_gradients(policy, completions, rows, temperature)
        for columns in blocks(N, size):
            if symmetric and columns.start < rows.start:
                continue  # the mirror image of a block that is there
            same = symmetric and columns == rows
            kernel[rows, columns] = products(  # a block of columns is gone before the next is made
                left, left if same else completion_gradients(policy, stepped, columns, temperature)
            )
    return kernel.triu() + kernel.triu(1).T if symmetric else kernel


def block_rows(policy: nn.Module, max_bytes: int) -> int:
    """How many gradients make a block: a fifth of what `max_bytes` holds, for one block of rows is kept while one of
    columns is made, which takes up to 4 times its size.

    >>> block_rows(nn.Linear(10, 100, bias=False), max_bytes=10 * 4000)  # one gradient is 4,000 bytes
    2
    """
    one = sum(p.numel() * p.element_size() for p in policy.parameters() if p.requires_grad)
    if max_bytes < 5 * one:
        raise ValueError(f"max_bytes is {max_bytes}: one gradient has {one} bytes, and five must fit")
    return max_bytes // (5 * max(one, 1))


def blocks(count: int, size: int) -> Iterator[slice]:
    """
    >>> list(blocks(3, 2))
    [slice(0, 2, None), slice(2, 3, None)]
    """
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


def products(left: Tensor, right: Tensor) -> Tensor:
    """left (R, W) times right (N, W) transposed, summed over W in float64: (R, N) on the processor.

    >>> products(torch.tensor([[3.0, 4.0]]), torch.tensor([[3.0, 4.0], [1.0, 0.0]]))
    tensor([[25.,  3.]], dtype=torch.float64)
    """
    total = torch.zeros(len(left), len(right), dtype=torch.float64)
    for part in blocks(left.shape[1], -(-left.shape[1] // 8)):  # an eighth at a time: float64 copies stay small
        total += left[:, part].cpu().double() @ right[:, part].cpu().double().T
    return total


# --- one step, predicted and taken ----------------------------------------------------------------------------------


def group_coefficients(advantages: Tensor, mask: Tensor) -> Tensor:
    """The c (N,) with which GRPO's first update steps up sum_j c_j log pi(o_j): A_j / (N * length_j).

    advantages (Q, G), mask (Q, G, T): the mean over completions of the mean over each one's tokens. On the first update
    the ratio is 1 and nothing is clipped, so this is the whole of the gradient, not a part of it.

    >>> group_coefficients(torch.tensor([[1.0, -1.0]]), torch.tensor([[[True, True], [True, False]]]))
    tensor([ 0.2500, -0.5000])
    """
    return (advantages / mask.sum(-1).clamp(min=1)).flatten() / advantages.numel()


def predicted_change(kernel: Tensor, coefficients: Tensor, step_size: float) -> Tensor:
    """First-order change of log pi of every row after one SGD step: eta K c. kernel (R, N), c (N,) -> (R,) float64.

    >>> predicted_change(torch.tensor([[0.5, -0.5]]), torch.tensor([1.0, -1.0]), step_size=0.1)
    tensor([0.1000], dtype=torch.float64)
    """
    return step_size * (kernel.double() @ coefficients.to(kernel.device).double())


def measured_change(
    policy: nn.Module,
    completions: Scorable,
    stepped: Scorable,
    coefficients: Tensor,
    step_sizes: Sequence[float],
    temperature: float = 1.0,
) -> Tensor:
    """Change of log pi of every completion after the real SGD step on `stepped`: (len(step_sizes), R) float64.

    The policy is left alone: a copy in float64 takes the step, so that changes of 1e-9 are still digits, not rounding.
    Plain SGD: AdamW's step is another direction, which this kernel does not describe.
    """
    policy = copy.deepcopy(policy).double()
    device = device_of(policy)
    stepped_texts, stepped_scored = stepped.padded.to(device), stepped.scored.to(device)
    weights = [p for p in policy.parameters() if p.requires_grad]
    objective = (coefficients.to(device) * log_prob(policy, stepped_texts, stepped_scored, temperature)).sum()
    direction = torch.autograd.grad(objective, weights)
    start = [w.detach().clone() for w in weights]

    @torch.no_grad()
    def after(step_size: float) -> Tensor:
        for w, at, d in zip(weights, start, direction, strict=True):
            w.copy_(at + step_size * d)
        return log_prob(policy, completions.padded.to(device), completions.scored.to(device), temperature).cpu()

    before = after(0.0)
    return torch.stack([after(step_size) - before for step_size in step_sizes])


def r_squared(predicted: Tensor, measured: Tensor) -> float:
    """1 - sum (measured - predicted)^2 / sum (measured - mean)^2: at most 1, and below 0 for a bad prediction.

    Nothing is fitted. Raises ValueError for shapes that differ and for a measured change that is the same everywhere.

    >>> r_squared(torch.tensor([0.0, 1.0]), torch.tensor([0.0, 1.0])), r_squared(torch.zeros(2), torch.tensor([0.0, 1]))
    (1.0, -1.0)
    """
    if predicted.shape != measured.shape:
        raise ValueError(f"predicted {tuple(predicted.shape)} and measured {tuple(measured.shape)} must be alike")
    spread = ((measured - measured.mean()) ** 2).sum()
    if not spread > 0:
        raise ValueError("the measured change is the same everywhere: there is nothing to explain")
    return float(1 - ((measured - predicted) ** 2).sum() / spread)


# --- from completions to queries ------------------------------------------------------------------------------------


def cosines(kernel: Tensor) -> Tensor:
    """The kernel (R, R) with every gradient scaled to length 1; a zero gradient is at right angles to all.

    >>> cosines(torch.tensor([[4.0, 1.0], [1.0, 1.0]]))
    tensor([[1.0000, 0.5000],
            [0.5000, 1.0000]])
    """
    length = kernel.diagonal().clamp(min=0).sqrt()
    scale = torch.where(length > 0, 1 / length, 0.0)
    return kernel * scale[:, None] * scale


def query_similarity(kernel: Tensor, owner: Tensor) -> Tensor:
    """Mean cosine between the gradients of two queries' modes: kernel (R, R), owner (R,) query of each -> (Q, Q).

    How far right answers to one query raise *all* right answers to the other, alike. Every query 0..Q-1 has at least
    one mode, as in a `Listing` (`listing.slots[:, 0]` are its owners). On the diagonal: the mean over
    all pairs of a query's own modes, each mode with itself included.

    >>> query_similarity(torch.tensor([[1.0, 0.0, 0.5], [0.0, 1.0, 0.5], [0.5, 0.5, 1.0]]), torch.tensor([0, 0, 1]))
    tensor([[0.5000, 0.5000],
            [0.5000, 1.0000]])
    """
    average = averages(owner, kernel.dtype)
    return average @ cosines(kernel) @ average.T


def query_selectivity(kernel: Tensor, owner: Tensor) -> Tensor:
    """What is left of two queries' cosines after their mean: kernel (R, R), owner (R,) -> (Q, Q), at least 0.

    Of the block of cosines between the modes of two queries, the root mean square of the part that depends on *both*
    modes (block - row means - column means + mean). Where it is large, the mode that wins on one query decides
    which mode wins on the other: the part of the coupling that can cost modes. A measure of ours, not P1's.

    >>> same_first = torch.tensor([[1, 0, 0.5, 0.0], [0, 1, 0.0, 0.5], [0.5, 0, 1, 0], [0, 0.5, 0, 1]])
    >>> query_selectivity(same_first, torch.tensor([0, 0, 1, 1]))
    tensor([[0.5000, 0.2500],
            [0.2500, 0.5000]])
    """
    cosine, average = cosines(kernel), averages(owner, kernel.dtype)
    own_mean = average[owner]  # (R, R): the mean over the modes of each mode's query
    centred = cosine - own_mean @ cosine - cosine @ own_mean.T + own_mean @ cosine @ own_mean.T
    return (average @ centred**2 @ average.T).sqrt()


def averages(owner: Tensor, dtype: torch.dtype) -> Tensor:
    """The matrix (Q, R) that takes one value a mode to their mean over each query's modes. owner (R,).

    >>> averages(torch.tensor([0, 0, 1]), torch.float32) @ torch.tensor([1.0, 3.0, 5.0])
    tensor([2., 5.])
    """
    member = nn.functional.one_hot(owner).T.to(dtype)
    return member / member.sum(1, keepdim=True)


def resplit(task: Task, train: Sequence[str]) -> Task:
    """The same task with `train` as its trained prompts and all its others held out.

    Raises ValueError for prompts that are not the task's, repeated, or none.

    >>> from toy_tasks import Sums
    >>> resplit(Sums(), ["9="]).prompts[:3]
    ('9=', '2=', '3=')
    """
    if not train or len(set(train)) < len(train) or not set(train) <= set(task.prompts):
        raise ValueError(f"train prompts {list(train)} must be some of {task.name}'s, each once")
    other = copy.copy(task)
    other.train = tuple(train)
    order = sorted(task.prompts, key=lambda prompt: (len(prompt), prompt))
    other.heldout = tuple(prompt for prompt in order if prompt not in other.train)
    return other
