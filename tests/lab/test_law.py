"""The law's quantities of a run: the sampler's own probabilities, gamma, kappa and R, against other ways to them."""

import math

import pytest
import torch
from conftest import generator

from lab.law import LAW, Sampler, is_in_law
from minirlvr import rollout
from toy_tasks.exact import followed_by

G = 6


def columns(run, split="train"):
    measured = run.measure()[split]
    return {name: measured[name] for name in LAW}


def mode_probs(run):
    """Exact probabilities (Q, M) of the trained prompts' modes: the policy's and the sampler's."""
    trained = len(run.task.train)
    sampler = Sampler(run.policy, run.memory, run.dials.mu)
    return run.mode_probs(run.policy)[:trained], run.mode_probs(sampler)[:trained]


def test_the_sampler_is_what_completions_are_drawn_from(trained):
    """Its exact probability of every completion drawn is what the rollout says it drew it with."""
    run = trained("grpo+dlc", steps=6, mu=1.5, temperature=0.8, memory_learning_rate=0.02)
    prompts = run.task.encode_prompts(run.task.train)
    batch = rollout(run.policy, prompts, G, 4, generator(3), temperature=0.8, memory=run.memory, mu=1.5)
    logits = torch.stack(
        [Sampler(run.policy, run.memory, 1.5)(one) for one in texts_of(prompts, batch.completions)], dim=1
    )  # (Q, G, P + T, V)
    P = prompts.tokens.shape[1]
    logprobs = (logits[:, :, P - 1 : -1] / 0.8).log_softmax(-1).gather(-1, batch.completions[..., None])[..., 0]
    torch.testing.assert_close(logprobs.where(batch.mask, 0.0), batch.sampler_logprobs, rtol=0, atol=1e-5)
    assert (batch.sampler_logprobs - batch.logprobs).abs().max() > 0.01


def texts_of(prompts, completions):
    """G batches of Q whole texts."""
    return [followed_by(prompts, completions[:, g]) for g in range(completions.shape[1])]


def test_on_policy_the_sampler_is_the_policy(trained):
    """gamma is 1 and S is P; without a calibration kappa is 1 and R 0."""
    run = trained("grpo", steps=4, group_size=G)
    law, measures = columns(run), run.measure()["train"]
    assert law["sampler_pass@1"] == measures["pass@1"] and law["sampler_modes"] == measures["effective_modes"]
    assert abs(law["gamma"] - 1) < 1e-9 and abs(law["kappa"] - 1) < 1e-5 and abs(law["R"]) < 1e-5


def test_kappa_and_R_are_their_formulas(trained):
    """IAC over r - mean: kappa = 1 + (G - 2)(1 - S); R = P (1 - 1/kappa) / gamma, prompt by prompt."""
    run = trained("dr_grpo+iac+dlc", steps=8, group_size=G, mu=0.7, memory_learning_rate=0.02)
    probs, drawn = (torch.from_numpy(values) for values in mode_probs(run))
    P, S = probs.sum(-1), drawn.sum(-1)
    kappa = 1 + (G - 2) * (1 - S)
    q, s = probs / P[:, None], drawn / S[:, None]
    off = q.log() - (q * q.log()).sum(-1, keepdim=True)
    gamma = (q * off * s.log()).sum(-1) / (q * off**2).sum(-1)
    law = columns(run)
    wanted = {"sampler_pass@1": S, "gamma": gamma, "kappa": kappa, "R": P * (1 - 1 / kappa) / gamma}
    for name, values in wanted.items():
        assert law[name] == pytest.approx(values.mean().item(), rel=1e-4), name
    assert (S - P).abs().max() > 0.01 and abs(law["gamma"] - 1) > 0.01


def test_the_exact_ratio_puts_the_policys_shares_in_the_place_of_the_samplers(start):
    """gamma is then 1 whatever the sampler; kappa keeps the sampler's groups, times P (1-S) / (S (1-P))."""
    run = start("dr_grpo+iac+dlc", group_size=G, importance="exact", mu=1.0)
    probs, drawn = (values.sum(-1) for values in mode_probs(run))
    kappa = (1 + (G - 2) * (1 - drawn)) * probs * (1 - drawn) / (drawn * (1 - probs))
    law = columns(run)
    assert law["gamma"] == 1
    assert law["kappa"] == pytest.approx(kappa.mean(), rel=1e-4)


OUTSIDE = [
    ("unlikeliness", {}),
    ("reinforce++", {}),
    ("tilt", {}),
    ("grpo", {"beta": 0.1}),
    ("grpo", {"entropy_bonus": 0.1}),
    ("grpo+dlc", {"importance": "clipped"}),
]


@pytest.mark.parametrize(("method", "dials"), OUTSIDE)
def test_where_the_law_is_silent_the_columns_are_blank(start, method, dials):
    """Advantages that look at more than rewards in a group, a KL or a bonus: no kappa and no R, but the rest."""
    run = start(method, **dials)
    assert not is_in_law(run)
    law = columns(run)
    assert law["kappa"] == law["R"] == ""
    assert 0 < law["sampler_pass@1"] < 1 and not math.isnan(law["gamma"])


@pytest.mark.parametrize("method", ["grpo", "dr_grpo", "rloo", "f_grpo", "dapo", "grpo+iac+dlc"])
def test_where_it_speaks(start, method):
    """Advantages of the rewards of a group alone, calibrated or not."""
    run = start(method, f_grpo_gamma=0.5)
    assert is_in_law(run)
    assert columns(run)["kappa"] > 0.99
