"""The table world: one prompt, a softmax over its answers, and a memory, to hold `law.py` against.

Nothing here but what the law is about: no network, no other prompts, no Adam. The expected update is exact, so in a
table the law is an identity; sampled groups show what it leaves out. Ours, derived in `law.py`.

How strong the noise of sampled groups is: one step moves log(q_a/q_b) by its expected drift plus noise of variance
rate^2 c' V c, V the covariance of `law.update_moments`, c = onehot(a) - onehot(b); V ~ 1/G, exactly so for advantages
that depend on their own completion alone. At R = 1 it adds up, in a
time that goes as G/rate^2: after 3 G/rate^2 steps on right answers alone, three equal modes are 2.4. Where R > 1 the
law pulls a log-ratio back, and it stays within a variance of rate c'Vc / (2 L), L the rate of return, -B+
`law.growth_rate`, as long as the modes keep clear of `law.critical_share`.

Axes: "..." tables side by side, N answers, M correct ones (modes), K records along a run, U and V a map's mus, kappas.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from toy_tasks import measures
from toy_tasks.law import (
    Advantages,
    Calibrate,
    closed_update,
    fitted_gamma,
    gamma_ideal_memory,
    gamma_now,
    group_weights,
    law_R,
    ratio_kappa,
    side_sums,
)


class Trajectory(NamedTuple):
    """A run of tables; what can be computed from the two distributions is."""

    steps: Tensor  # (K,) updates made before each record
    policy: Tensor  # (K, ..., N)
    sampler: Tensor  # (K, ..., N)
    kappa: Tensor  # (K, ...) exact, at the sampler's S; under the exact ratio `law.ratio_kappa` of it
    correct: Tensor  # (N,) bool
    importance: bool  # the exact ratio was on: the policy's shares act in the place of the sampler's

    @property
    def P(self) -> Tensor:
        """Probability of being right under the policy, (K, ...)."""
        return self.policy[..., self.correct].sum(-1)

    @property
    def S(self) -> Tensor:
        """Probability of being right under the sampler, (K, ...)."""
        return self.sampler[..., self.correct].sum(-1)

    @property
    def shares(self) -> Tensor:
        """q, (K, ..., M)."""
        return self.policy[..., self.correct] / self.P[..., None]

    @property
    def sampler_shares(self) -> Tensor:
        """ŝ, (K, ..., M)."""
        return self.sampler[..., self.correct] / self.S[..., None]

    @property
    def modes(self) -> Tensor:
        """Effective modes of the policy, (K, ...)."""
        return torch.as_tensor(measures.effective_modes(self.policy[..., self.correct].numpy()))

    @property
    def R(self) -> Tensor:
        """The law's R with the fitted gamma, (K, ...): do equal shares attract? NaN where they are reached."""
        return law_R(self.P, self.kappa, self._gamma(fitted_gamma))

    @property
    def R_now(self) -> Tensor:
        """R with `gamma_now`, (K, ...): above 1 exactly where the expected update adds effective modes here."""
        return law_R(self.P, self.kappa, self._gamma(gamma_now))

    def _gamma(self, measure) -> Tensor:
        return measure(self.shares, self.shares if self.importance else self.sampler_shares)


def simulate_table(
    logits: Tensor, correct: Tensor, advantages: Advantages, group_size: int, steps: int, rate: float | Tensor = 1.0, *,
    calibrate: Calibrate | None = None, factor: float | Tensor = 1.0, mu: float | Tensor = 0.0,
    memory: Literal["ideal", "correct", "all"] = "ideal", memory_rate: float = 1.0, importance: bool = False,
    natural: bool = False, generator: torch.Generator | None = None, every: int = 1
) -> Trajectory:  # fmt: skip
    """Train tables (..., N) for so many steps; correct (N,) bool. Records before the first step and after `every`-th.

    The update is the expected one, or, with a generator, that of one group a table drawn from it. `natural` divides the
    expected one by its positive side, given mixed groups, so that time does not stop as the sampler gets all right.
    `factor` multiplies the correct ones' advantages after `calibrate`; inf keeps those alone. rate, factor, mu: (...).
    The sampler is softmax(logits - mu * log m) for a memory m that is `ideal` (it is the sampler) or a softmax table
    that starts equal and takes one cross-entropy step a step on what was drawn: the `correct` answers, or `all`.
    `importance` weights completions by policy/sampler. Raises ValueError for `natural` with a generator.

    >>> centred = lambda r: r - r.mean(-1, keepdim=True)
    >>> start, correct = torch.tensor([0.4, 0.2, 0.0]).double(), torch.tensor([True, True, False])
    >>> for factor in (1.0, 8.0):  # GRPO with DLC, then both calibrations
    ...     run = simulate_table(start, correct, centred, 8, 300, mu=0.5, factor=factor, every=300)
    ...     print(run.modes.numpy().round(2), run.R[-1].numpy().round(2))
    [1.99 1.82] 0.0
    [1.99 2.  ] 1.31
    """
    if natural and generator is not None:
        raise ValueError("a natural step divides the expected update; sampled groups have none")
    correct, logits = correct.bool(), logits.double()
    rate, factor, mu = (torch.as_tensor(value, dtype=torch.float64)[..., None] for value in (rate, factor, mu))
    shape = torch.broadcast_shapes(logits.shape, rate.shape, factor.shape, mu.shape)
    logits, learned = logits.expand(shape), torch.zeros(shape, dtype=torch.float64)
    right, wrong = torch.where(factor.isinf(), 1.0, factor), torch.where(factor.isinf(), 0.0, 1.0)  # (..., 1)
    sums = torch.stack(side_sums(advantages, group_size, calibrate))  # (2, G+1)
    records = []
    for step in range(steps + 1):
        policy = logits.softmax(-1)
        bent = logits / (1 + mu) if memory == "ideal" else logits - mu * learned.log_softmax(-1)
        sampler = bent.softmax(-1)
        S = (sampler * correct).sum(-1).clamp(max=1.0)
        positive, negative = (group_weights(group_size, S, mixed=natural) @ sums.T).unbind(-1)
        positive, negative = positive * right[..., 0], negative * wrong[..., 0]
        if step % every == 0:
            kappa = positive / negative
            kappa = ratio_kappa(kappa, (policy * correct).sum(-1), S) if importance else kappa
            records.append((torch.tensor(step), policy, sampler, kappa))
        if generator is None:
            unit = positive if natural else torch.ones_like(positive)
            change = closed_update(policy, sampler, correct, positive / unit, negative / unit, importance)
            drawn = sampler
        else:
            rows = _draw(sampler, group_size, generator)  # (..., G)
            rewards = correct[rows].double()
            worth = advantages(rewards)
            worth = (worth if calibrate is None else calibrate(worth, rewards)) * torch.where(rewards > 0, right, wrong)
            if importance:
                worth = worth * (policy / sampler).gather(-1, rows)
            pull = torch.zeros(shape, dtype=torch.float64).scatter_add(-1, rows, worth.double()) / group_size
            change = pull - policy * pull.sum(-1, keepdim=True)
            drawn = torch.zeros(shape, dtype=torch.float64).scatter_add(-1, rows, torch.full_like(rewards, 1))
        if memory != "ideal":
            learned = learned + memory_rate * _lesson(learned, drawn * correct if memory == "correct" else drawn)
        logits = logits + rate * change
    return Trajectory(*(torch.stack(parts) for parts in zip(*records, strict=True)), correct, importance)


def _draw(sampler: Tensor, group_size: int, generator: torch.Generator) -> Tensor:
    """(..., G) answers, independent draws from sampler (..., N)."""
    rows = torch.multinomial(sampler.reshape(-1, sampler.shape[-1]), group_size, replacement=True, generator=generator)
    return rows.view(*sampler.shape[:-1], group_size)


def _lesson(learned: Tensor, drawn: Tensor) -> Tensor:
    """Down the gradient of a memory's cross-entropy on `drawn` (..., N), as shares; 0 where nothing was drawn."""
    total = drawn.sum(-1, keepdim=True)
    return torch.where(total > 0, drawn / total - learned.softmax(-1), 0.0)


class LawMap(NamedTuple):
    """What the law says and what the table does, over mus (U,) and kappas (V,)."""

    R: Tensor  # (U, V) by the law, at the run's last P
    start: float  # effective modes at first
    end: Tensor  # (U, V) effective modes at last

    @property
    def law(self) -> Tensor:
        """(U, V) bool: the law says that modes spread."""
        return self.R > 1

    @property
    def simulated(self) -> Tensor:
        """(U, V) bool: they did."""
        return self.end > self.start


def law_map(
    mus: Tensor, kappas: Tensor, modes: int = 5, wrong: int = 5, P: float = 0.9, tilt: float = 0.1, steps: int = 400,
    rate: float = 0.5
) -> LawMap:  # fmt: skip
    """Outcome by law and by simulation for every mu (U,) and kappa (V,), an ideal memory; a fraction of a second.

    All tables start at the same P, each mode e^tilt times as likely as the next, and take natural steps. A large tilt
    starts outside of some basins (step 5 in `law.py`): there modes fall although R > 1.
    >>> found = law_map(torch.tensor([0.0, 0.2, 0.5]), torch.tensor([1.0, 5.0, 8.0, torch.inf]))
    >>> found.law.int(), bool((found.law == found.simulated).all())
    (tensor([[0, 0, 0, 0],
            [0, 0, 1, 1],
            [0, 1, 1, 1]], dtype=torch.int32), True)
    """
    mus, kappas = mus.double()[:, None], kappas.double()[None]  # (U, 1), (1, V)
    right = P * (-tilt * torch.arange(modes, dtype=torch.float64)).softmax(-1)
    start = torch.cat((right, torch.full((wrong,), (1 - P) / wrong, dtype=torch.float64))).log()
    run = simulate_table(
        start, torch.arange(modes + wrong) < modes, lambda rewards: rewards - rewards.mean(-1, keepdim=True), 8, steps,
        rate, factor=kappas, mu=mus, natural=True, every=steps
    )  # fmt: skip
    R = law_R(run.P[-1], kappas, gamma_ideal_memory(mus))
    return LawMap(R, run.modes[0, 0, 0].item(), run.modes[-1])
