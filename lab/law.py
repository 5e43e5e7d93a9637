"""The law of what keeps modes (toy_tasks/law.py), measured on a run: exact where every mode can be listed."""

import math

import numpy as np
import torch
from torch import Tensor, nn

from minirlvr import Learner, Policy, Rollout, calibrated_logits
from toy_tasks import Padded
from toy_tasks.law import fitted_gamma, law_R, ratio_kappa, sides
from toy_tasks.measures import effective_modes

# Columns of metrics.csv, mean over the prompts of a split; "" where nothing is known. README's glossary explains them.
LAW = ("sampler_pass@1", "sampler_modes", "gamma", "kappa", "R")


class Sampler(nn.Module):
    """What completions are drawn from: the policy, bent by DLC where there is a memory. Read like a policy."""

    def __init__(self, policy: Policy, memory: Policy | None, mu: float):
        super().__init__()
        self.policy, self.memory, self.mu = policy, memory, mu

    def forward(self, texts: Padded) -> Tensor:
        """(B, T) -> logits (B, T, V)."""
        logits = self.policy(texts)
        return logits if self.memory is None else calibrated_logits(logits, self.memory(texts), self.mu)


def law_measures(learner: Learner, probs: np.ndarray, sampler_probs: np.ndarray) -> dict[str, np.ndarray]:
    """`LAW` of each prompt from exact probabilities (Q, M) of its modes: name -> (Q,), NaN where nothing is known.

    sampler_pass@1 and sampler_modes are the sampler's own; gamma is fitted over the modes of a prompt (`fitted_gamma`);
    kappa is exact for groups that the sampler draws. kappa and R are known only where the law holds: see `is_in_law`.
    """
    P, S = (np.minimum(values.sum(-1), 1.0) for values in (probs, sampler_probs))  # (Q,)
    policy_shares, sampler_shares = (
        torch.from_numpy(values / np.maximum(values.sum(-1, keepdims=True), 1e-300))
        for values in (probs, sampler_probs)
    )
    exact = learner.dials.importance == "exact"
    gamma = torch.ones(len(P)).double() if exact else fitted_gamma(policy_shares, sampler_shares)
    kappa = torch.from_numpy(kappa_at(learner, S)) if is_in_law(learner) else torch.full((len(P),), math.nan)
    if exact:
        kappa = ratio_kappa(kappa, torch.from_numpy(P), torch.from_numpy(S))
    known = (kappa > 0) & (gamma > 0)
    R = torch.where(known, law_R(torch.from_numpy(P), kappa.where(known, 1.0), gamma.where(known, 1.0)), math.nan)
    names = {"sampler_pass@1": S, "sampler_modes": effective_modes(sampler_probs), "gamma": gamma.numpy()}
    # Advantages are float32: what lies beyond the fifth digit is rounding, and 0 has no sign.
    return names | {name: values.numpy().round(5) + 0.0 for name, values in (("kappa", kappa), ("R", R))}


def is_in_law(learner: Learner) -> bool:
    """Does the law speak of this method? Advantages in a group that depend on its 0/1 rewards alone, no KL, no bonus.

    Found out by asking the estimator twice about the same rewards with different completions, not by its name.
    """
    u = learner.update
    if not learner.estimator.needs_group or learner.climb or u.beta or u.entropy_bonus:
        return False
    if learner.dials.importance == "clipped":
        return False
    rewards = torch.tensor([[1.0, 0.0, 1.0, 0.0, 1.0]])
    one, other = (group_advantages(learner, rewards, torch.arange(5.0).flip(dims)) for dims in ((), (0,)))
    return torch.equal(one, other)


def group_advantages(learner: Learner, rewards: Tensor, logprobs: Tensor | None = None) -> Tensor:
    """The estimator's advantages (..., G) of rewards (..., G), each row a group by itself, no completion cut.

    `logprobs` (G,) of the completions are all alike unless given.
    """
    groups = rewards.reshape(-1, rewards.shape[-1]).float()
    drawn = torch.zeros_like(groups) if logprobs is None else logprobs.expand_as(groups)
    drawn, blank = drawn[..., None], torch.zeros(len(groups), 1)
    batch = Rollout(blank, blank, drawn, torch.zeros_like(drawn, dtype=torch.bool), drawn, drawn, drawn)
    found = learner.estimator.advantages(groups, torch.zeros_like(groups), batch, learner.update)
    return found.view(rewards.shape)


def kappa_at(learner: Learner, S: np.ndarray) -> np.ndarray:
    """kappa (Q,) of groups drawn at success S (Q,), exactly; NaN at S = 0 and 1, where there is nothing to weigh."""

    def calibrate(advantages: Tensor, rewards: Tensor) -> Tensor:
        for bend in (row.advantages for row in learner.calibrations if row.advantages):
            advantages = bend(advantages, rewards, learner.dials)
        return advantages

    G, filtered = learner.sampling.group_size, learner.estimator.resamples
    found = sides(lambda r: group_advantages(learner, r), G, torch.from_numpy(S), calibrate, mixed=filtered)
    positive, negative = (side.numpy() for side in found)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(positive > 1e-12, positive / negative, math.nan)
