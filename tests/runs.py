"""Which methods there are, and what two runs have in common: for the tests of a step and of the lab."""

import torch

from minirlvr import ESTIMATORS

SAMPLING = [name for name, estimator in ESTIMATORS.items() if estimator.samples]
ENDINGS = ("", "+iac", "+dlc", "+iac+dlc")
EVERY_METHOD = [estimator + ending for estimator in SAMPLING for ending in ENDINGS] + ["exact"]


def weights(learner):
    """All weights of the policy in one row."""
    return flat(learner.policy.parameters())


def flat(tensors):
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def moved(learner):
    """Largest change of any weight since the reference."""
    return (weights(learner) - flat(learner.reference.parameters())).abs().max().item()


def use_sgd(learner, rate=0.1):
    """Plain gradient steps: Adam would blow rounding up, and hides how long a gradient is."""
    learner.optimizer = torch.optim.SGD(learner.policy.parameters(), lr=rate)
    return learner


def same_tree(one, other):
    """Equal bit for bit, whatever is nested in what."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same_tree(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same_tree, one, other))
    return one == other
