"""Sampling: what is drawn, what is masked, and that it is scored as it was drawn."""

import copy
import itertools

import pytest
import torch
from conftest import ConstantPolicy, Pairs, generator, tiny_policy, up_to_stop

from minirlvr import (
    Learner,
    Sampling,
    calibrated_logits,
    importance_ratio,
    policy_loss,
    rollout,
    rows_of,
    sampled_step,
    token_logprobs,
    verify,
)
from toy_tasks import PAD, STOP, left_pad
from toy_tasks.exact import Listing, followed_by

PROMPTS = left_pad([[3, 4, 5], [4, 2]])
FIRST = PROMPTS.pick(slice(1))
LOGITS = [[0.5, 0.2, 0.0, 1.0, -1.0], [0.0, 1.0, 0.3, 0.0, 0.2], [0.1, 0.4, 0.0, 0.0, 0.9]]  # (T, V)


def score(policy, batch, temperature=1.0):
    """(Q, G, T) log-probabilities of a batch as training computes them."""
    return token_logprobs(policy.completion_logits(batch.padded, batch.completions) / temperature, batch.completions)


def far_from(counts, probabilities):
    """Pearson's chi-square of counts against probabilities, in standard deviations from its mean."""
    n, df = sum(counts), len(counts) - 1
    chi2 = sum((c - n * p) ** 2 / (n * p) for c, p in zip(counts, probabilities, strict=True))
    return (chi2 - df) / (2 * df) ** 0.5


def every_completion(vocab, length):
    """All completions that end with their first stop, or are cut at `length`."""
    for ids in itertools.product(range(vocab), repeat=length):
        if STOP not in ids[:-1]:
            yield list(ids)
    for shorter in range(1, length):
        yield from (
            [*ids, STOP] for ids in itertools.product([i for i in range(vocab) if i != STOP], repeat=shorter - 1)
        )


# --- temperature, and the ratio before any update -------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
def test_log_probabilities_are_those_of_the_distribution_drawn_from(temperature):
    """Temperature divides the logits before the softmax: each score is log softmax(logits / T), which sums to 1."""
    policy = ConstantPolicy(LOGITS)
    batch = rollout(policy, PROMPTS, 50, 3, generator(), temperature)
    table = (torch.tensor(LOGITS) / temperature).log_softmax(-1)
    assert table.exp().sum(-1).tolist() == pytest.approx([1, 1, 1])
    expected = table[torch.arange(3), batch.completions] * batch.mask
    torch.testing.assert_close(batch.logprobs, expected)
    assert torch.equal(batch.sampler_logprobs, batch.logprobs)


@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_the_first_ratio_is_1(temperature):
    """Drawn and scored at the same temperature by the same weights: |ratio - 1| < 1e-5 at every token."""
    policy = tiny_policy()
    batch = rollout(policy, PROMPTS, 16, 6, generator(), temperature)
    new, elsewhere = score(policy, batch, temperature), score(policy, batch, 1.3)
    assert (importance_ratio(new, batch.logprobs, batch.mask) - 1).abs().max() < 1e-5
    assert (importance_ratio(elsewhere, batch.logprobs, batch.mask) - 1).abs().max() > 0.01


def test_bf16_weights_keep_the_ratio_near_1():
    """Log-probabilities of a bf16 policy are taken in float32: ratio error < 1e-3 where the logits are the same."""
    policy = ConstantPolicy(LOGITS).bfloat16()
    batch = rollout(policy, PROMPTS, 16, 3, generator())
    ratio = importance_ratio(score(policy, batch), batch.logprobs, batch.mask)
    assert (ratio.double() - 1).abs().max() < 1e-3


def test_sampling_uses_the_weights_of_now():
    """After the weights moved, sampled log-probabilities are those of the moved weights."""
    policy = tiny_policy()
    rollout(policy, PROMPTS, 4, 5, generator())
    with torch.no_grad():
        for weight in policy.parameters():
            weight.mul_(1.1)
    batch = rollout(policy, PROMPTS, 4, 5, generator())
    torch.testing.assert_close(batch.logprobs, score(policy, batch) * batch.mask, atol=1e-5, rtol=1e-5)


# --- stop, padding, mask --------------------------------------------------------------------------------------------


def test_mask_holds_the_first_stop_and_nothing_after_it():
    """Up to and including the first stop; after it padding, and log-probability 0. Sampled padding is masked in."""
    batch = rollout(ConstantPolicy([1.0, 1.0, 0.0, 0.0]), PROMPTS, 200, 5, generator())
    seen_padding = seen_cut = 0
    drawn = batch.completions, batch.mask, batch.logprobs
    for ids, mask, logprobs in zip(*(t.flatten(0, 1).tolist() for t in drawn), strict=True):
        length = len(up_to_stop(ids))
        assert mask == [True] * length + [False] * (5 - length)
        assert ids[length:] == [PAD] * (5 - length)
        assert all(value < 0 for value in logprobs[:length])
        assert not any(logprobs[length:])
        seen_padding += PAD in ids[:length]
        seen_cut += STOP not in ids
    assert seen_padding
    assert seen_cut


def test_any_of_several_stops_ends_a_completion_and_any_id_may_pad():
    """Stops 1 and 3, padding 2: the mask ends with whichever stop comes first, and 2 fills the rest."""
    batch = rollout(ConstantPolicy([0.0] * 4), PROMPTS, 100, 6, generator(), stops=(STOP, 3), pad=2)
    ended_by = set()
    for ids, mask in zip(batch.completions.flatten(0, 1).tolist(), batch.mask.flatten(0, 1).tolist(), strict=True):
        length = sum(mask)
        assert not {STOP, 3} & set(ids[: length - 1])
        assert length == 6 or ids[length - 1] in (STOP, 3)
        assert ids[length:] == [2] * (6 - length)
        ended_by.add(ids[length - 1])
    assert {STOP, 3} < ended_by


def test_a_fixed_length_goes_on_behind_the_stop():
    """P2's control: every completion has all T tokens, drawn and scored, whatever stops are among them."""
    policy = ConstantPolicy([1.0, 1.0, 0.0, 0.0])
    batch = rollout(policy, PROMPTS, 200, 5, generator(), fixed_length=True)
    assert batch.mask.all() and batch.length == 5
    torch.testing.assert_close(batch.logprobs, score(policy, batch))
    behind = batch.completions[..., 1:][batch.completions[..., :-1] == STOP]
    assert far_from(torch.bincount(behind, minlength=4).tolist(), policy.logits.softmax(0).tolist()) < 4


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_entropies_are_those_of_the_policy_at_each_token(temperature):
    """By hand from the logits, inside the mask; 0 outside."""
    batch = rollout(ConstantPolicy(LOGITS), PROMPTS, 20, 3, generator(), temperature)
    probs = (torch.tensor(LOGITS) / temperature).softmax(-1)  # (T, V)
    by_hand = -(probs * probs.log()).sum(-1)  # (T,)
    torch.testing.assert_close(batch.entropies, by_hand * batch.mask)


def test_the_stop_step_has_a_gradient():
    """Stopping is learned: the logits at the stop get a gradient, those after it none."""
    policy = ConstantPolicy(torch.zeros(3, 5))
    policy.logits.data[1, STOP] = 50.0
    policy.logits.data[0, STOP] = -50.0
    batch = rollout(policy, FIRST, 2, 3, generator())
    assert (batch.completions[..., 1] == STOP).all()
    policy.logits.data.zero_()
    new, mask = score(policy, batch).flatten(0, 1), batch.mask.flatten(0, 1)
    policy_loss(new, new.detach(), torch.tensor([1.0, 0.5]), mask).backward()
    gradient = policy.logits.grad
    assert gradient[1, STOP] < -0.1
    assert gradient[0].abs().max() > 0.01
    assert gradient[2].abs().max() == 0


def test_every_shape_has_the_prompt_axis_first():
    """(Q, P) twice, the prompts as they were given, then (Q, G, T) five times; picking groups picks them in all."""
    batch = rollout(tiny_policy(), PROMPTS, 3, 4, generator())
    assert [tuple(t.shape) for t in batch] == [(2, 3)] * 2 + [(2, 3, 4)] * 5
    for mine, given in zip(batch.padded, PROMPTS, strict=True):
        assert torch.equal(mine, given)
    picked = batch.pick(torch.tensor([False, True]))
    for one, whole in zip(picked, batch, strict=True):
        assert torch.equal(one, whole[1:])


def test_the_group_of_a_prompt_is_its_row():
    """Completions are grouped as they were drawn: a reward that is the prompt's index has no spread in any group."""

    class Index(Pairs):
        def verify(self, prompt, completion):
            return self.prompts.index(prompt)

    task = Index()
    prompts = list(task.prompts)
    policy = tiny_policy(task.vocab_size)
    with torch.no_grad():
        for weight in policy.blocks.parameters():
            weight.zero_()
        policy.head.weight.copy_(1000 * policy.embedding.weight)  # each token repeats itself
        policy.head.weight[[PAD, STOP]] = 0
    batch = rollout(policy, left_pad([[6, 2], [6, 3], [6, 4], [6, 5]]), 5, 2, generator())
    assert verify(task, prompts, batch).tolist() == [[i] * 5 for i in range(4)]
    assert batch.completions[..., 0].tolist() == [[i] * 5 for i in (2, 3, 4, 5)]


def test_one_token_completions_are_drawn_and_scored():
    """T = 1: no branch is read at all, and the ratio is still 1."""
    policy = tiny_policy()
    batch = rollout(policy, PROMPTS, 4, 1, generator())
    torch.testing.assert_close(score(policy, batch), batch.logprobs, atol=1e-5, rtol=1e-5)


# --- the draws ------------------------------------------------------------------------------------------------------


def test_slots_and_prompts_draw_for_themselves():
    """Eight slots of one group, and the same prompt twice, do not repeat one another."""
    batch = rollout(ConstantPolicy(torch.zeros(14)), PROMPTS.pick([0, 0]), 8, 5, generator())
    for group in batch.completions:
        assert len(set(group[:, 0].tolist())) > 1
        assert len({tuple(ids) for ids in group.tolist()}) > 4
    assert not torch.equal(batch.completions[0], batch.completions[1])


def test_draws_follow_the_generator_alone():
    """One seed repeats, two seeds differ, and the global random state is neither used nor moved."""
    policy, before = tiny_policy(), torch.get_rng_state()
    one = rollout(policy, PROMPTS, 8, 5, generator(1)).completions
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(5)
    assert torch.equal(rollout(policy, PROMPTS, 8, 5, generator(1)).completions, one)
    assert not torch.equal(rollout(policy, PROMPTS, 8, 5, generator(2)).completions, one)


def test_a_generator_goes_on_from_batch_to_batch():
    """The second batch is not the first again."""
    policy, random = tiny_policy(), generator()
    one, two = (rollout(policy, PROMPTS, 8, 5, random).completions for _ in range(2))
    assert not torch.equal(one, two)


@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_sampled_frequencies_are_the_exact_probabilities(temperature):
    """All 40 completions of a real policy over 4 tokens up to length 3, by enumeration: chi-square of 6,000 draws."""
    policy, prompt = tiny_policy(4), left_pad([[3, 2]])
    policy.head.weight.data *= 0.7
    listed = list(every_completion(4, 3))
    probabilities = []
    for ids in listed:
        completion = torch.tensor([ids])
        logits = policy(followed_by(prompt, completion))[0, 1:-1] / temperature
        probabilities.append(token_logprobs(logits, completion[0]).sum().exp().item())
    assert sum(probabilities) == pytest.approx(1, abs=1e-5)
    batch = rollout(policy, prompt.pick([0] * 600), 10, 3, generator(), temperature)
    drawn = [up_to_stop(ids) for ids in batch.completions.flatten(0, 1).tolist()]
    assert abs(far_from([drawn.count(ids) for ids in listed], probabilities)) < 4


# --- DLC ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mu", "temperature"), [(0.5, 1.0), (0.5, 0.6), (1.5, 1.0), (0.0, 1.0)])
def test_dlc_draws_from_the_policy_less_the_memory(mu, temperature):
    """Sampler: softmax((policy - mu * memory) / T), drawn at that frequency; `logprobs` are the policy's own."""
    policy, memory = ConstantPolicy(LOGITS), ConstantPolicy([1.0, -1.0, 0.0, 2.0, 0.5])
    batch = rollout(policy, PROMPTS.pick([0] * 500), 8, 3, generator(), temperature, memory, mu)
    own = (policy.logits / temperature).log_softmax(-1)
    bent = ((policy.logits - mu * memory.logits) / temperature).log_softmax(-1)
    place = torch.arange(3)
    torch.testing.assert_close(batch.logprobs, own[place, batch.completions] * batch.mask)
    torch.testing.assert_close(batch.sampler_logprobs, bent[place, batch.completions] * batch.mask)
    first = batch.completions[..., 0].flatten().tolist()
    assert abs(far_from([first.count(i) for i in range(5)], bent[0].exp().tolist())) < 4


def test_dlc_memory_reads_what_was_drawn():
    """The memory follows the same prompts and completions with its own cache, token by token."""
    policy, memory = tiny_policy(seed=0), tiny_policy(seed=1, layers=1)
    batch = rollout(policy, PROMPTS, 6, 5, generator(), 0.8, memory, 0.5)
    logits = policy.completion_logits(batch.padded, batch.completions)
    logits = calibrated_logits(logits, memory.completion_logits(batch.padded, batch.completions), 0.5)
    expected = token_logprobs(logits / 0.8, batch.completions) * batch.mask
    torch.testing.assert_close(batch.sampler_logprobs, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(batch.logprobs, score(policy, batch, 0.8) * batch.mask, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("G", "T"), [(64, 8), (8, 64), (6, 40)])
def test_groups_read_in_several_rows_are_drawn_as_they_are_scored(G, T):
    """Where a prompt's completions grow in several trees, the policy's and the memory's: against plain padded rows."""
    assert rows_of(G, T - 1) > 1
    policy, memory = tiny_policy(seed=0), tiny_policy(seed=1, layers=1)
    batch = rollout(policy, PROMPTS, G, T, generator(), 0.8, memory, 0.5, fixed_length=True)
    assert batch.mask.all()
    rows = batch.padded.pick(torch.arange(2).repeat_interleave(G))
    texts = followed_by(rows, batch.completions.flatten(0, 1))
    own, other = (model(texts)[:, -T - 1 : -1].view(2, G, T, -1) for model in (policy, memory))
    bent = calibrated_logits(own, other, 0.5)
    for found, logits in ((batch.logprobs, own), (batch.sampler_logprobs, bent)):
        expected = token_logprobs(logits / 0.8, batch.completions)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert len({tuple(ids) for ids in batch.completions.flatten(0, 1).tolist()}) == 2 * G


# --- what sampling leaves alone -------------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [True, False])
def test_sampling_leaves_mode_weights_and_gradients_alone(training):
    """Neither the policy nor the memory is changed, and nothing that comes back carries a gradient."""
    policy, memory = tiny_policy().train(training), tiny_policy(seed=1).train(training)
    before = copy.deepcopy((policy.state_dict(), memory.state_dict()))
    batch = rollout(policy, PROMPTS, 4, 4, generator(), 1.0, memory, 0.5)
    assert policy.training is memory.training is training
    for model, saved in zip((policy, memory), before, strict=True):
        assert all(torch.equal(model.state_dict()[name], saved[name]) for name in saved)
        assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert not any(t.requires_grad for t in batch)


# --- groups of two --------------------------------------------------------------------------------------------------


class Coins(Pairs):
    """512 prompts, one right answer for each: "a"."""

    name = "coins"
    characters = "abc="
    train = tuple("".join(letters) for letters in itertools.product("ab", repeat=9))
    heldout = ("c",)

    def modes(self, prompt):
        return ["a"]

    def verify(self, prompt, completion):
        return completion == "a"


@pytest.mark.parametrize("group_size", [2, 4])
def test_logged_share_of_flat_groups_is_the_chance_of_it(group_size):
    """All right or all wrong: P^G + (1 - P)^G, for 512 groups within four standard deviations."""
    logits = [-9.0, 1.0, 1.5, 0.0, -1.0, -1.0]
    learner = Learner(Coins(), ConstantPolicy(logits), "grpo", sampling=Sampling(prompts=512, group_size=group_size))
    share = torch.tensor(logits).softmax(0)
    right = (share[2] * share[STOP]).item()
    listed = Listing(Coins(), Coins.train).log_probs(learner.policy).exp().sum(1)
    assert listed.tolist() == pytest.approx([right] * 512, abs=1e-6)
    sampled_step(learner)
    flat = right**group_size + (1 - right) ** group_size
    assert learner.logged["flat_groups"] == pytest.approx([flat], abs=4 * (flat * (1 - flat) / 512) ** 0.5)
