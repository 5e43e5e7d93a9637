"""P1's controlled example: three queries, a linear softmax policy, only Persian is trained; what happens to Cat?

The policy's logits are z_o(q) = w_o . phi(q) over listed answers o. One SGD step on Persian adds a multiple of
phi(Persian) to each w_o, so it moves every other query's logits by the same vector times phi(q) . phi(Persian): that
is semantic coupling, and here it is exact.

From P1 (arXiv 2601.15609): the queries, four fixed dimensions, SGD, 500 steps on Persian alone; group size and overlap
of the embeddings are varied. The paper's page does not tell the rest, so it is *our* choice:

- Embeddings of length 1. Persian is the first axis; Cat and Siamese have the cosine `overlap` with it and the rest on
  an axis each of their own, so their own cosine is overlap^2. The fourth dimension stays 0.
- Twelve answers, six of them right for each query. Cat has the same six as Persian; Siamese shares three of them and
  has three of its own, so that what is learned about Persian may be wrong for it.
- All queries start from the same probabilities, at every overlap: four blocks of three (shared, Persian's and Cat's
  own, Siamese's own, wrong for all) with .13, .08 and .04 each. Each query is right half of the time, in 5.4 effective
  modes of 6. The blocks are alike, so that nothing but chance favours a mode that is right for Siamese. That makes
  ties, which an infinite batch keeps and finite ones break; `start_weights` takes any other start.
- Rewards 0 and 1, no KL term, step size 1 on the mean over the group of A_j log pi(o_j), as GRPO averages.

Axes: Q = 3 queries, O = 12 answers, D = 4 dimensions, G completions in a group, M = 6 right answers of a query,
R runs, C overlaps, "..." any batch in front. Everything is float64.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from toy_tasks import measures

QUERIES = ("Cat", "Persian", "Siamese")
TRAINED = QUERIES.index("Persian")
RIGHT = ((0, 1, 2, 3, 4, 5), (0, 1, 2, 3, 4, 5), (0, 1, 2, 6, 7, 8))  # (Q, M): the right answers of each query
REFERENCE = torch.tensor([0.13, 0.08, 0.04] * 4, dtype=torch.float64)  # (O,): where every query starts
LEARNING_RATE = 1.0
STEPS = 500


# --- the policy -----------------------------------------------------------------------------------------------------


def embeddings(overlap: float | Tensor) -> Tensor:
    """phi (..., Q, D), rows of length 1, of which Cat and Siamese have the cosine `overlap` (...) with Persian.

    Raises ValueError for an overlap outside [0, 1].

    >>> embeddings(0.6)
    tensor([[0.6000, 0.8000, 0.0000, 0.0000],
            [1.0000, 0.0000, 0.0000, 0.0000],
            [0.6000, 0.0000, 0.8000, 0.0000]], dtype=torch.float64)
    """
    c = torch.as_tensor(overlap, dtype=torch.float64)
    if not ((c >= 0) & (c <= 1)).all():
        raise ValueError(f"overlap is a cosine between 0 and 1, got {overlap}")
    one, zero, own = torch.ones_like(c), torch.zeros_like(c), (1 - c * c).sqrt()
    rows = ((c, own, zero, zero), (one, zero, zero, zero), (c, zero, own, zero))
    return torch.stack([torch.stack(row, -1) for row in rows], -2)


def start_weights(overlap: float | Tensor, reference: Tensor = REFERENCE) -> Tensor:
    """W (..., O, D) that gives every query the probabilities `reference` (O,) at this overlap (...).

    W = log(reference) v^T with v . phi(q) = 1 for all three queries: v = (1, k, k, 0), k = sqrt((1 - c) / (1 + c)).
    Raises ValueError where the reference gives an answer no probability.

    >>> log_probs(start_weights(0.6), embeddings(0.6)).exp()[:, :4]
    tensor([[0.1300, 0.0800, 0.0400, 0.1300],
            [0.1300, 0.0800, 0.0400, 0.1300],
            [0.1300, 0.0800, 0.0400, 0.1300]], dtype=torch.float64)
    """
    if not (reference > 0).all():
        raise ValueError(f"every answer needs a probability above 0 in the reference, got {reference.tolist()}")
    c = torch.as_tensor(overlap, dtype=torch.float64)
    k = ((1 - c) / (1 + c)).sqrt()
    v = torch.stack((torch.ones_like(c), k, k, torch.zeros_like(c)), -1)  # (..., D)
    return reference.log()[:, None] * v[..., None, :]


def log_probs(weights: Tensor, phi: Tensor) -> Tensor:
    """log pi(o | q) (..., Q, O), with the logits z_o(q) = w_o . phi(q); weights (..., O, D), phi (..., Q, D).

    >>> log_probs(torch.zeros(2, 4), torch.ones(1, 4))
    tensor([[-0.6931, -0.6931]])
    """
    return (phi @ weights.mT).log_softmax(-1)


def draw_noise(seeds: Sequence[int], steps: int, group_size: int) -> Tensor:
    """Uniform numbers (R, steps, G), one generator a seed: a run's chance does not depend on what runs beside it.

    >>> bool((draw_noise([7], 3, 2) == draw_noise([5, 7], 3, 2)[1:]).all())
    True
    """

    def one(seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.rand(steps, group_size, generator=generator, dtype=torch.float64)

    return torch.stack([one(seed) for seed in seeds])


def draw_group(probs: Tensor, noise: Tensor) -> Tensor:
    """Answers (..., G) drawn from probs (..., O) by inverting its distribution function at noise (..., G) in [0, 1).

    >>> draw_group(torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.0, 0.49, 0.51, 0.79, 0.81]))
    tensor([0, 0, 1, 1, 2])
    """
    drawn = torch.searchsorted(probs.cumsum(-1), noise.contiguous(), right=True)
    return drawn.clamp(max=probs.shape[-1] - 1)  # the sum of all may round to just under 1


# --- one step -------------------------------------------------------------------------------------------------------


def sampled_gradient(probs: Tensor, sampled: Tensor, advantages: Tensor) -> Tensor:
    """d/dz of (1/G) sum_j A_j log pi(o_j): (1/G) sum_j A_j (1[o = o_j] - pi(o)); (..., O).

    probs (..., O), sampled and advantages (..., G).

    >>> sampled_gradient(torch.tensor([0.5, 0.5]), torch.tensor([0, 1]), torch.tensor([1.0, -1.0]))
    tensor([ 0.5000, -0.5000])
    """
    advantages = advantages.to(probs.dtype)
    pulled = torch.zeros_like(probs).scatter_add(-1, sampled, advantages) / sampled.shape[-1]
    return pulled - advantages.mean(-1, keepdim=True) * probs


def exact_gradient(probs: Tensor, right: Tensor) -> Tensor:
    """The same for an infinite batch with GRPO's advantages: pi(o) A(o), A = (r - P) / sqrt(P (1 - P)); (..., O).

    probs (..., O), right (O,) bool. P is the probability of being right.

    >>> exact_gradient(torch.tensor([0.5, 0.25, 0.25]), torch.tensor([True, False, False]))
    tensor([ 0.5000, -0.2500, -0.2500])
    """
    P, wrong = (probs * right).sum(-1, keepdim=True), (probs * ~right).sum(-1, keepdim=True)  # keeps 1 - P's digits
    return probs * torch.where(right, (wrong / P).sqrt(), -(P / wrong).sqrt())


def group_speed(p: float, group_size: int) -> float:
    """How much slower than an infinite batch GRPO moves on average with groups of G, right with probability p.

    The mean of `sampled_gradient` is this number times `exact_gradient`: the group size changes the noise and, since
    small groups are flat more often, the speed, but not the mean direction. With S ~ Binomial(G, p) right answers it
    is E[sqrt(S (G - S))] / (G sqrt(p (1 - p))) [ours]. In [0, 1].

    >>> [round(group_speed(0.5, G), 3) for G in (1, 2, 8, 64)]
    [0.0, 0.5, 0.928, 0.992]
    """
    s = torch.arange(group_size + 1, dtype=torch.float64)
    chance = torch.distributions.Binomial(group_size, torch.tensor(p, dtype=torch.float64)).log_prob(s).exp()
    return float((chance * (s * (group_size - s)).sqrt()).sum() / group_size / (p * (1 - p)) ** 0.5)


def sgd_step(weights: Tensor, phi: Tensor, gradient: Tensor, learning_rate: float) -> Tensor:
    """W + eta gradient phi(Persian)^T: one step up on Persian. weights (..., O, D), gradient (..., O) in z.

    >>> sgd_step(torch.zeros(2, 4), embeddings(0.5).float(), torch.tensor([1.0, -1.0]), 0.5)
    tensor([[ 0.5000,  0.0000,  0.0000,  0.0000],
            [-0.5000,  0.0000,  0.0000,  0.0000]])
    """
    return weights + learning_rate * gradient[..., None] * phi[..., TRAINED, :][..., None, :]


def one_step_prediction(
    log_pi: Tensor, phi: Tensor, sampled: Tensor, advantages: Tensor, learning_rate: float
) -> tuple[Tensor, Tensor]:
    """What one step on Persian does to all queries: (change of z, first-order change of log pi), both (..., Q, O).

    dz_o(q') = eta (1/G) sum_j A_j (1[o = o_j] - pi(o | Persian)) phi(Persian) . phi(q') is exact for this policy; to
    first order d log pi(o | q') = dz_o(q') - sum_i pi(i | q') dz_i(q'). Its error is one number for all answers of a
    query, log E_pi[exp dz] - E_pi[dz] >= 0 by Jensen and about Var_pi(dz) / 2, so the prediction is never too low.

    log_pi (..., Q, O) before the step, phi (..., Q, D), sampled and advantages (..., G).

    >>> half, group, advantages = torch.full((3, 2), 0.5), torch.tensor([0]), torch.tensor([1.0])
    >>> z, log_pi = one_step_prediction(half.log(), embeddings(0.5).float(), group, advantages, 0.2)
    >>> z
    tensor([[ 0.0500, -0.0500],
            [ 0.1000, -0.1000],
            [ 0.0500, -0.0500]])
    """
    gradient = sampled_gradient(log_pi[..., TRAINED, :].exp(), sampled, advantages)  # (..., O)
    kernel = (phi * phi[..., TRAINED : TRAINED + 1, :]).sum(-1)  # (..., Q)
    z = learning_rate * kernel[..., None] * gradient[..., None, :]
    return z, z - (log_pi.exp() * z).sum(-1, keepdim=True)


# --- 500 steps ------------------------------------------------------------------------------------------------------


def right_answers(query: int = TRAINED) -> Tensor:
    """(O,) bool: which answers are right for a query.

    >>> right_answers(QUERIES.index("Siamese")).int().tolist()
    [1, 1, 1, 0, 0, 0, 1, 1, 1, 0, 0, 0]
    """
    return torch.isin(torch.arange(len(REFERENCE)), torch.tensor(RIGHT[query]))


def _ascend(overlaps, runs: int, steps: int, learning_rate: float, reference: Tensor, gradient) -> Tensor:
    """`steps` SGD steps on Persian with `gradient(step, probs (C, R, O))` -> log pi (steps+1, C, R, Q, O)."""
    overlaps = torch.as_tensor(overlaps, dtype=torch.float64)[:, None]  # (C, 1)
    phi, weights = embeddings(overlaps), start_weights(overlaps, reference)  # (C, 1, Q, D), (C, 1, O, D)
    weights = weights.expand(-1, runs, -1, -1)
    history = [log_probs(weights, phi)]
    for t in range(steps):
        weights = sgd_step(weights, phi, gradient(t, history[-1][..., TRAINED, :].exp()), learning_rate)
        history.append(log_probs(weights, phi))
    return torch.stack(history)


def train(
    overlaps: Sequence[float], noise: Tensor, advantages: Callable[[Tensor], Tensor],
    learning_rate: float = LEARNING_RATE, reference: Tensor = REFERENCE
) -> Tensor:  # fmt: skip
    """Train Persian on sampled groups: log pi (steps+1, C, R, Q, O), the start first.

    noise (R, steps, G) is all the chance there is (`draw_noise`); every overlap sees the same, so that Persian's run is
    the same at all of them. advantages maps rewards (..., G) to as many, as `minirlvr.grpo_advantages` does.

    >>> centred = lambda rewards: rewards - rewards.mean(-1, keepdim=True)
    >>> train([0.0, 0.9], draw_noise(range(3), 10, 8), centred).shape
    torch.Size([11, 2, 3, 3, 12])
    """
    runs, steps, G = noise.shape
    right = right_answers()

    def gradient(t: int, probs: Tensor) -> Tensor:
        sampled = draw_group(probs, noise[:, t].expand(len(probs), runs, G))  # (C, R, G)
        return sampled_gradient(probs, sampled, advantages(right[sampled].to(probs.dtype)))

    return _ascend(overlaps, runs, steps, learning_rate, reference, gradient)


def train_exact(
    overlaps: Sequence[float], steps: int = STEPS,
    learning_rate: float = LEARNING_RATE, reference: Tensor = REFERENCE
) -> Tensor:  # fmt: skip
    """Train Persian on infinite batches with GRPO's advantages: log pi (steps+1, C, 1, Q, O). No chance in it.

    >>> pass_at_1 = query_measures(train_exact([0.5], steps=10))["pass@1"]
    >>> pass_at_1[[0, -1], 0, 0].round(2).tolist()  # at first and at last: Cat, Persian, Siamese
    [[0.5, 0.5, 0.5], [0.71, 0.86, 0.5]]
    """
    right = right_answers()
    return _ascend(overlaps, 1, steps, learning_rate, reference, lambda _, probs: exact_gradient(probs, right))


def query_measures(log_pi: Tensor, reference: Tensor = REFERENCE) -> dict[str, np.ndarray]:
    """Measures of the right answers of each query, name -> (..., Q); log_pi (..., Q, O), reference (O,) at the start.

    `measures.py` says what each is. Effective modes are exp(entropy over the right answers).

    >>> start = query_measures(log_probs(start_weights(0.5), embeddings(0.5)))
    >>> start["effective_modes"].round(2).tolist()
    [5.43, 5.43, 5.43]
    """
    right = torch.tensor(RIGHT)  # (Q, M)
    probs = log_pi.exp().gather(-1, right.expand(*log_pi.shape[:-1], -1)).numpy()  # (..., Q, M)
    before, P = reference[right].numpy(), np.minimum(probs.sum(-1), 1.0)  # (Q, M), (..., Q)
    return {
        "pass@1": P,
        "pass@8": measures.pass_at_k_exact(P, 8),
        "effective_modes": measures.effective_modes(probs),
        "retained_mass": measures.retained_mass(probs, before),
        "share_gained": measures.share_gained(probs, before),
    }
