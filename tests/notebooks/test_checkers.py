"""The checkers of the exercises are just: they take what is right, and tell each usual mistake by its hint."""

import math
import re

import pytest
import torch

from minirlvr import grpo_advantages, inverse_success_calibration
from notebooks.checkers import (
    check_coupling,
    check_diagnosis,
    check_iac,
    check_predictions,
    check_tail_miss,
    check_tilt,
)
from toy_tasks import Scratchpad, cats, sharpening
from toy_tasks.measures import tail_miss


def batch_std(rewards):
    """Exercise 2's function: one std for the whole batch."""
    return (rewards - rewards.mean(-1, keepdim=True)) / (rewards.std(correction=0) + 1e-6)


def sample_std(rewards):
    return (rewards - rewards.mean(-1, keepdim=True)) / (rewards.std(-1, keepdim=True) + 1e-6)


def iac_by_hand(advantages, rewards, alpha=1.0):
    failures = (rewards == 0).sum(-1, keepdim=True)
    return torch.where(advantages > 0, advantages * failures**alpha, advantages)


def in_place(advantages, rewards, alpha=1.0):
    advantages *= 2
    return advantages


def stub(*arguments):
    raise NotImplementedError


@pytest.mark.parametrize("answer", [iac_by_hand, inverse_success_calibration])
def test_iac_right(answer, capsys):
    check_iac(answer)
    assert capsys.readouterr().out.startswith("right:")


@pytest.mark.parametrize(
    "answer, hint",
    [
        (stub, "still empty"),
        (lambda a, r, alpha: None, "returns nothing"),
        (lambda a, r, alpha: 1.0, "must return a tensor"),
        (lambda a, r, alpha: a[0], "shape"),
        (lambda a, r, alpha: a.no_such_thing, "AttributeError"),
        (lambda a, r: a, "TypeError"),
        (in_place, "in place"),
        (lambda a, r, alpha: a, "still what they were"),
        (lambda a, r, alpha: a * (r == 0).sum(-1, keepdim=True) ** alpha, "negative"),
        (lambda a, r, alpha: torch.where(a > 0, a * r.sum(-1, keepdim=True) ** alpha, a), "right answers or the wrong"),
        (lambda a, r, alpha: torch.where(a > 0, a * (r == 0).sum() ** alpha, a), "along which axis"),
        (lambda a, r, alpha: inverse_success_calibration(a, r, alpha, divide_by_group=True), "divided by G"),
        (lambda a, r, alpha: iac_by_hand(a, r), "where does alpha enter"),
        (lambda a, r, alpha: iac_by_hand(a, r, alpha) / r.amax(-1, keepdim=True), "not|nothing to multiply"),
    ],
)
def test_iac_wrong(answer, hint, capsys):
    check_iac(answer)
    printed = capsys.readouterr().out
    assert printed.startswith("not yet:") and re.search(hint, printed)


def grpo_by_hand(rewards):
    std = rewards.std(-1, correction=0, keepdim=True)
    return torch.where(std > 0, (rewards - rewards.mean(-1, keepdim=True)) / std.clamp(min=1e-9), 0.0)


@pytest.mark.parametrize("repair", [grpo_by_hand, grpo_advantages])
def test_diagnosis_right(repair, capsys):
    check_diagnosis(batch_std, torch.tensor([[1.0, 0.0], [0.0, 0.0]]), repair)
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("evidence, right") and second.startswith("repair, right")


@pytest.mark.parametrize(
    "evidence, hint",
    [
        (None, "put a batch"),
        (torch.tensor([1.0, 0.0]), "shape"),
        (torch.tensor([[1.0], [0.0]]), "shape"),
        (torch.tensor([[0.5, 2.0]]), "0 or 1"),
        (torch.tensor([[1.0, 0.0, 0.0]]), "does what GRPO does"),  # a single group: nothing to mix up
        ([[1, 0], [0, 1]], "does what GRPO does"),
    ],
)
def test_evidence_wrong(evidence, hint, capsys):
    check_diagnosis(batch_std, evidence, grpo_by_hand)
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith("evidence, not yet") and hint in first


@pytest.mark.parametrize(
    "repair, hint",
    [
        (stub, "still empty"),
        (batch_std, "only group of its batch"),
        (sample_std, "population std"),
        (lambda r: (r - r.mean(-1, keepdim=True)) / r.std(-1, correction=0, keepdim=True), "teaches nothing"),
        (lambda r: r - r.mean(-1, keepdim=True), "something else"),
        (lambda r: torch.full_like(r, math.nan), "teaches nothing"),
    ],
)
def test_repair_wrong(repair, hint, capsys):
    check_diagnosis(batch_std, None, repair)
    printed = capsys.readouterr().out.splitlines()[-1]
    assert printed.startswith("repair, not yet") and hint in printed


def tail_miss_by_counting(p, tau, G):
    """Sum over the number n of right answers, from 1 to G - 1, all of other modes."""
    return sum(math.comb(G, n) * (p - tau) ** n * (1 - p) ** (G - n) for n in range(1, G))


@pytest.mark.parametrize("answer", [tail_miss, tail_miss_by_counting, lambda *a: torch.tensor(tail_miss(*a))])
def test_tail_miss_right(answer, capsys):
    check_tail_miss(answer)
    assert capsys.readouterr().out.startswith("right:")


@pytest.mark.parametrize(
    "answer, hint",
    [
        (stub, "still empty"),
        (lambda p, tau, G: None, "returns nothing"),
        (lambda p, tau, G: "a half", "one number"),
        (lambda p, tau, G: [0.5], "one number"),
        (lambda p, tau, G: torch.zeros(2), "one number"),
        (lambda p, tau: 0.5, "TypeError"),
        (lambda p, tau, G: math.nan, "nan"),
        (lambda p, tau, G: (1 - tau) ** G, "every group without the mode"),
        (lambda p, tau, G: 1 - (1 - tau) ** G, "is\\* drawn"),
        (lambda p, tau, G: (1 - tau) ** G - (1 - p) ** G, "all answers are right are still counted"),
        (lambda p, tau, G: (1 - tau) ** G - (p - tau) ** G, "all answers are wrong are still counted"),
        (lambda p, tau, G: (1 - tau) ** G - p**G - (1 - p) ** G, "only those that you had counted"),
        (lambda p, tau, G: (1 - tau) ** G * (1 - p**G - (1 - p) ** G), "multiplied"),
        (lambda p, tau, G: 1 - p**G - (1 - p) ** G, "whether it holds the mode or not"),
        (lambda p, tau, G: 0.5, "for G = 2"),
        (lambda p, tau, G: tail_miss(p, tau, 3), "for G = 2"),  # right in the first case only
        (lambda p, tau, G: tail_miss(p, tau, G) if tau else 0.0, "tau = 0.0"),
    ],
)
def test_tail_miss_wrong(answer, hint, capsys):
    check_tail_miss(answer)
    printed = capsys.readouterr().out
    assert printed.startswith("not yet:") and re.search(hint, printed)


def coupling_by_hand(pi, phi, trained, sampled, A, eta):
    drawn = torch.nn.functional.one_hot(sampled, pi.shape[1]).float()  # (G, O)
    pull = (A[:, None] * (drawn - pi[trained])).mean(0)  # (O,)
    return eta * (phi @ phi[trained])[:, None] * pull


def coupling_of_cats(pi, phi, trained, sampled, A, eta):
    """cats.one_step_prediction, with the trained question where it expects it."""
    order = [q for q in range(len(pi)) if q != trained]
    order.insert(min(cats.TRAINED, len(order)), trained)
    change, _ = cats.one_step_prediction(pi[order].log(), phi[order], sampled, A, eta)
    return change[torch.tensor(order).argsort()]


def coupling_overwritten(pi, phi, trained, sampled, A, eta):
    pull = torch.zeros(pi.shape[1])
    for o, advantage in zip(sampled.tolist(), A.tolist(), strict=True):
        pull[o] = advantage
    return eta * (phi @ phi[trained])[:, None] * (pull - A.sum() * pi[trained]) / len(A)


@pytest.mark.parametrize("answer", [coupling_by_hand, coupling_of_cats])
def test_coupling_right(answer, capsys):
    check_coupling(answer)
    assert capsys.readouterr().out.startswith("right:")


@pytest.mark.parametrize(
    "answer, hint",
    [
        (stub, "still empty"),
        (lambda *a: None, "returns nothing"),
        (lambda *a: coupling_by_hand(*a).T, "shape"),
        (lambda *a: a[4].mul_(2), "in place"),
        (lambda *a: coupling_by_hand(*a) * len(a[4]), "mean"),
        (lambda *a: coupling_by_hand(*a[:5], 1.0), "step size"),
        (lambda *a: -coupling_by_hand(*a), "sign"),
        (lambda pi, *a: coupling_by_hand(pi * 0, *a), "the part with π"),
        (lambda pi, *a: torch.stack([coupling_by_hand(p.expand_as(pi), *a)[q] for q, p in enumerate(pi)]), "every row"),
        (coupling_overwritten, "twice"),
        (lambda pi, phi, *a: coupling_by_hand(pi, torch.ones(len(pi), 1), *a), "embeddings enter"),
        (lambda pi, phi, *a: coupling_by_hand(pi, phi / phi.norm(dim=-1, keepdim=True), *a), "cosine"),
        (lambda pi, phi, t, *a: coupling_by_hand(pi, phi, 1, *a), "argument `trained`"),
        (lambda pi, phi, t, *a: coupling_by_hand(pi, phi, t, *a) * torch.eye(len(pi))[t][:, None], "only the trained"),
        (lambda pi, *a: (d := coupling_by_hand(pi, *a)) - (pi * d).sum(-1, keepdim=True), "change of log π"),
        (lambda *a: coupling_by_hand(*a) + 1, "by hand for G = 1"),
        (lambda *a: coupling_by_hand(*a) * math.nan, "by hand for G = 1"),
    ],
)
def test_coupling_wrong(answer, hint, capsys):
    check_coupling(answer)
    printed = capsys.readouterr().out
    assert printed.startswith("not yet:") and re.search(hint, printed)


def tilt_by_hand(log_probs, rewards, alpha, b):
    return (alpha * log_probs + b * rewards).softmax(0)


def tilt_of_the_lab(log_probs, rewards, alpha, b):
    owner = torch.zeros(len(log_probs), dtype=torch.long)
    return sharpening.target_log_probs("tilt", log_probs, rewards, owner, alpha, b).exp()


def tilt_of_powers(log_probs, rewards, alpha, b):
    weights = log_probs.exp() ** alpha * (b * rewards).exp()
    return weights / weights.sum()


@pytest.mark.parametrize("answer", [tilt_by_hand, tilt_of_the_lab])
def test_tilt_right(answer, capsys):
    check_tilt(answer)
    assert capsys.readouterr().out.startswith("right:")


@pytest.mark.parametrize(
    "answer, hint",
    [
        (stub, "still empty"),
        (lambda *a: None, "returns nothing"),
        (lambda *a: [0.25] * 4, "must return a tensor"),
        (lambda *a: tilt_by_hand(*a)[:2], "shape"),
        (lambda x, r: x, "TypeError"),
        (lambda x, r, a, b: x.add_(a), "in place"),
        (lambda x, r, a, b: (a * x + b * r).exp(), "do not sum to 1"),
        (lambda *a: tilt_by_hand(*a).log(), "logarithms"),
        (lambda x, r, a, b: (a * x).softmax(0), "rewards make no difference"),
        (lambda x, r, a, b: (x + b * r).softmax(0), "alpha makes no difference"),
        (lambda x, r, a, b: (a * (x + b * r)).softmax(0), "reference alone"),
        (lambda x, r, a, b: (a * x + r / b).softmax(0), "exp\\(b r\\)"),
        (lambda x, r, a, b: ((a - 1) * x + b * r).softmax(0), "another l_ref"),
        (lambda x, r, a, b: torch.full_like(x, 0.25), "make it a distribution"),
        (tilt_of_powers, "stay with logarithms"),
    ],
)
def test_tilt_wrong(answer, hint, capsys):
    check_tilt(answer)
    printed = capsys.readouterr().out
    assert printed.startswith("not yet:") and re.search(hint, printed)


WORLDS = {"in steps": Scratchpad(direct=0.3), "slips": Scratchpad(step_error=0.2), "half": Scratchpad(direct=0.5)}


def test_predictions_right(capsys):
    check_predictions(WORLDS, {"in steps": "rises", "slips": "falls", "half": "rises"})
    printed = capsys.readouterr().out
    assert printed.startswith("right:")
    for name, world in WORLDS.items():  # the checker's finite difference against the covariance, by the identity
        rows = [(p, world.verify(q, text)) for q in world.train for text, p in world.sampling_probs(q).items()]
        owner = [i for i, q in enumerate(world.train) for _ in world.sampling_probs(q)]
        p, r = torch.tensor(rows, dtype=torch.float64).T
        covariance = sharpening.covariance_identity(p.log(), r, torch.tensor(owner))[1].mean().item()
        assert f"{covariance:+.3f} ({name})" in printed


@pytest.mark.parametrize(
    "predictions, hint",
    [
        ({}, "in steps, slips, half"),
        (dict.fromkeys(WORLDS), "in steps, slips, half"),
        ({"in steps": "rises", "slips": "up", "half": "falls"}, 'predict "rises" or "falls" for slips$'),
        ({"in steps": "rises", "slips": "falls", "half": "falls"}, "2 of 3"),
        ({"in steps": "falls", "slips": "rises", "half": "falls"}, "0 of 3"),
    ],
)
def test_predictions_wrong(predictions, hint, capsys):
    check_predictions(WORLDS, predictions)
    printed = capsys.readouterr().out.strip()
    assert printed.startswith("not yet:") and re.search(hint, printed) and "right" not in printed
