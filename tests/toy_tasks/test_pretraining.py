"""How a fresh policy becomes the reference: what it reads, what it learns, and that it is the same each time."""

import random

import pytest
import torch
from conftest import ConstantPolicy, Pairs, tiny_policy

from toy_tasks import PAD, Scratchpad, pretrain
from toy_tasks.exact import Listing


def weights(policy):
    """All of them in one row."""
    return torch.cat([weight.detach().flatten() for weight in policy.parameters()])


def pretrained(steps=None, **more):
    policy = tiny_policy(Pairs().vocab_size)
    pretrain(policy, Pairs(), steps, **more)
    return policy


class Watched:
    """A policy that notes what it was asked to read, and its weights before each reading."""

    def __init__(self, policy):
        self.policy, self.read, self.weights = policy, [], []

    def parameters(self):
        return self.policy.parameters()

    def completion_logits(self, prompts, completions):
        self.read.append((prompts, completions))
        self.weights.append(weights(self.policy).clone())
        return self.policy.completion_logits(prompts, completions)


def test_pretraining_repeats_bit_for_bit():
    """One recipe, one policy, whatever random numbers were drawn before; another seed is another policy."""
    one = weights(pretrained(5))
    random.seed(5)
    torch.manual_seed(5)
    assert torch.equal(weights(pretrained(5)), one)
    assert not torch.equal(weights(pretrained(5, seed=1)), one)


def test_pretraining_leaves_random_numbers_alone():
    """The global streams are neither used nor moved."""
    policy = tiny_policy(Pairs().vocab_size)
    state, before = random.getstate(), torch.get_rng_state()
    pretrain(policy, Pairs(), 2)
    assert random.getstate() == state and torch.equal(torch.get_rng_state(), before)


def test_the_policy_gets_better_and_knows_every_mode():
    """From nearly nothing to about half right, and no mode is left out: that is what RL starts from."""
    task = Pairs()
    listing = Listing(task, task.prompts)
    before, after = (
        listing.log_probs(policy).exp().detach() for policy in (tiny_policy(task.vocab_size), pretrained(80))
    )
    assert (before.sum(1) < 0.2).all()
    assert ((after.sum(1) > 0.3) & (after.sum(1) < 0.75)).all()
    assert after.min() > 0.01


@pytest.mark.parametrize(("steps", "made"), [(None, 40), (40, 40), (3, 3)])
def test_steps_shorten_it(steps, made):
    """So many batches of 256 completions; the task's own number unless given."""
    watched = Watched(tiny_policy(Pairs().vocab_size))
    pretrain(watched, Pairs(), steps)
    assert len(watched.read) == made
    assert all(completions[..., 0].numel() == 256 for _, completions in watched.read)


def test_a_shorter_pretraining_is_a_whole_one():
    """Its rate rises and falls within its own steps: a run of 20 is not the first 20 of 40, and ends in tiny steps."""
    watched = Watched(tiny_policy(Pairs().vocab_size))
    pretrain(watched, Pairs(), 20)
    places = torch.stack([*watched.weights, weights(watched.policy)])  # (21, W)
    moved = (places[1:] - places[:-1]).abs().mean(1)
    assert moved[-1] < 0.01 * moved.max()
    assert moved.argmax() in range(2, 12)


def test_it_reads_every_prompt_also_the_held_out_ones():
    """The reference knows held-out prompts just as well: only RL never sees them."""
    task = Pairs()
    watched = Watched(tiny_policy(task.vocab_size))
    pretrain(watched, task, 2)
    for prompts, _ in watched.read:
        assert sorted(task.decode(ids.tolist()) for ids in prompts.tokens) == sorted(task.prompts)


def test_what_stands_behind_a_stop_is_not_learned():
    """Answers of two and of seven characters are padded to one length; padding is no answer, so it gets rarer."""
    task = Scratchpad()
    watched = Watched(ConstantPolicy(torch.zeros(task.max_new_tokens, task.vocab_size)))
    pretrain(watched, task, 20)
    T = watched.read[0][1].shape[2]
    assert (watched.read[0][1][..., 3:] == PAD).float().mean() > 0.3
    said = watched.policy.logits.detach().softmax(-1)[:T]  # (T, V)
    assert (said[:, PAD] < 1 / task.vocab_size).all()
