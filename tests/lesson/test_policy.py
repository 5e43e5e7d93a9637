"""The policy: what a token sees, and that every way of reading a text gives the same logits."""

import copy

import pytest
import torch
from conftest import VOCAB, ConstantPolicy, generator, step_by_step, tiny_policy
from hypothesis import given, settings
from hypothesis import strategies as st

from minirlvr import TRUNK, Policy, rollout, rows_of, token_logprobs, visible
from toy_tasks import PAD, STOP, Padded, left_pad

CLOSE = {"atol": 1e-5, "rtol": 1e-5}


@pytest.fixture(scope="module")
def policy():
    return tiny_policy()


def random_tokens(*shape, seed=1):
    """Characters only, no padding, no stop."""
    return torch.randint(2, VOCAB, shape, generator=generator(seed))


def uneven_prompts():
    """Three prompts of 5, 3 and 1 tokens, left-padded."""
    return left_pad([random_tokens(length, seed=length).tolist() for length in (5, 3, 1)])


def one_by_one(policy, prompts, completions):
    """(Q, G, T, V): a plain loop over N separate texts without any padding, one whole forward pass for each."""
    rows = []
    for tokens, real, group in zip(*prompts, completions, strict=True):
        prompt = tokens[real]
        for completion in group:
            logits = policy(Padded.of(torch.cat((prompt, completion))[None]))[0]  # (P + T, V)
            rows.append(logits[len(prompt) - 1 : -1])
    return torch.stack(rows).view(*completions.shape, -1)


def plain_rows(policy, prompts, completions):
    """(Q, G, T, V): every completion behind its own left-padded copy of the prompt, N = Q * G rows of P + T tokens."""
    Q, G, T = completions.shape
    copies = prompts.pick(torch.arange(Q).repeat_interleave(G))  # (N, P)
    tail = Padded.of(completions.flatten(0, 1))  # (N, T)
    rows = Padded(torch.cat((copies.tokens, tail.tokens), 1), torch.cat((copies.real, tail.real), 1))
    return policy(rows)[:, -T - 1 : -1].view(Q, G, T, -1)


def fill(prompts, ids):
    """The same prompts with other ids under the padding."""
    return Padded(torch.where(prompts.real, prompts.tokens, ids), prompts.real)


FILLS = {"stop": STOP, "2": 2, "last": VOCAB - 1, "mixed": random_tokens(3, 5, seed=7)}
EVERY_FILL = pytest.mark.parametrize("ids", FILLS.values(), ids=list(FILLS))
IN_SEVERAL_ROWS = pytest.mark.parametrize(("G", "T"), [(64, 8), (8, 64), (6, 40), (7, 20), (2, 98)])


# --- padding and positions ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("padding", [1, 2, 7])
def test_left_padding_changes_no_logits(policy, padding):
    """The same text alone and padded: the same logits at every token."""
    text = random_tokens(2, 5)
    padded = left_pad(text.tolist(), width=5 + padding)
    torch.testing.assert_close(policy(padded)[:, padding:], policy(Padded.of(text)), **CLOSE)


def test_prompts_of_different_length_in_one_batch_equal_each_alone(policy):
    """No prompt length is assumed for the batch: first-token logits and completion logits."""
    prompts, completions = uneven_prompts(), random_tokens(3, 2, 4)
    together, first = policy.completion_logits(prompts, completions), policy.start(prompts, 2)[0]
    for q, length in enumerate((5, 3, 1)):
        alone = Padded.of(prompts.tokens[q : q + 1, -length:])
        torch.testing.assert_close(together[q], policy.completion_logits(alone, completions[q : q + 1])[0], **CLOSE)
        torch.testing.assert_close(first[q], policy.start(alone, 2)[0][0], **CLOSE)


def test_order_matters(policy):
    """Positions are really there: the same tokens in another order, the same last one, give other logits."""
    one, other = (policy(Padded.of(torch.tensor([tokens])))[0, -1] for tokens in ([3, 4, 5, 6], [4, 3, 5, 6]))
    assert (one - other).abs().max() > 1e-3


def test_padding_is_what_the_batch_says_and_no_id(policy):
    """The padding's id inside or at the front of a text is seen and takes a place: these are three texts."""
    texts = left_pad([[5, 7], [5, PAD, 7], [PAD, 5, 7]], width=4)
    without, inside, at_the_front = policy(texts)[:, -1]
    for one, other in ((without, inside), (without, at_the_front), (inside, at_the_front)):
        assert (one - other).abs().max() > 1e-3


@EVERY_FILL
@pytest.mark.parametrize(("G", "T"), [(4, 5), (64, 8), (8, 64)])
def test_what_stands_under_the_padding_cannot_matter(policy, ids, G, T):
    """Any ids there, and every way of reading gives the same logits bit for bit."""
    prompts, completions = uneven_prompts(), random_tokens(3, G, T)
    other = fill(prompts, ids)
    assert not torch.equal(other.tokens, prompts.tokens)
    text = prompts.real[..., None]
    assert torch.equal(policy(other) * text, policy(prompts) * text)
    expected = policy.completion_logits(prompts, completions)
    assert torch.equal(policy.completion_logits(other, completions), expected)
    assert torch.equal(step_by_step(policy, other, completions), step_by_step(policy, prompts, completions))


@EVERY_FILL
def test_what_stands_under_the_padding_changes_no_draw(policy, ids):
    """Nor what is sampled, nor how it is scored."""
    one, other = (rollout(policy, p, 6, 5, generator()) for p in (uneven_prompts(), fill(uneven_prompts(), ids)))
    for mine, yours in zip(one[1:], other[1:], strict=True):
        assert torch.equal(mine, yours)


# --- what a token sees ----------------------------------------------------------------------------------------------


def test_logits_depend_on_earlier_tokens_and_on_no_later_one(policy):
    """Changing token t changes no logits that t or an earlier token was drawn from, and those of t + 1."""
    prompts, completions = uneven_prompts(), random_tokens(3, 2, 4)
    before = policy.completion_logits(prompts, completions)
    for t in range(4):
        changed = completions.clone()
        changed[..., t] = (changed[..., t] - 1) % 12 + 2
        moved = (policy.completion_logits(prompts, changed) - before).abs().amax((0, 1, 3)) > 1e-4  # (T,)
        assert not moved[: t + 1].any()
        assert moved[t + 1 :].all()


def test_neighbours_in_a_group_do_not_influence_each_other(policy):
    """Another completion beside it leaves a completion's logits as they are; a permuted group is permuted."""
    prompts, completions = uneven_prompts(), random_tokens(3, 4, 5)
    before = policy.completion_logits(prompts, completions)
    changed = torch.cat((completions[:, :1], random_tokens(3, 3, 5, seed=2)), 1)
    torch.testing.assert_close(policy.completion_logits(prompts, changed)[:, 0], before[:, 0], **CLOSE)
    order = [2, 0, 3, 1]
    torch.testing.assert_close(policy.completion_logits(prompts, completions[:, order]), before[:, order], **CLOSE)


def test_a_lone_completion_equals_itself_in_a_group(policy):
    """The size of the group is not seen either."""
    prompts, completions = uneven_prompts(), random_tokens(3, 4, 5)
    together = policy.completion_logits(prompts, completions)
    alone = policy.completion_logits(prompts, completions[:, 2:3])
    torch.testing.assert_close(alone[:, 0], together[:, 2], **CLOSE)


def test_padding_after_the_stop_changes_nothing_before_it(policy):
    """What stands after the stop is not seen up to the stop."""
    prompts, completions = uneven_prompts(), random_tokens(3, 2, 6)
    completions[..., 2] = STOP
    padded = completions.clone()
    padded[..., 3:] = PAD
    one, other = policy.completion_logits(prompts, completions), policy.completion_logits(prompts, padded)
    torch.testing.assert_close(one[:, :, :4], other[:, :, :4], **CLOSE)


def test_padding_drawn_in_mid_completion_is_a_token_like_any_other(policy):
    """The padding id, if sampled, is seen and takes a position, in every way of reading."""
    prompts, completions = uneven_prompts(), random_tokens(3, 2, 5)
    completions[..., 1] = PAD
    completions[0, 0, 0] = PAD  # right after the prompt, too
    expected = one_by_one(policy, prompts, completions)
    torch.testing.assert_close(policy.completion_logits(prompts, completions), expected, **CLOSE)
    torch.testing.assert_close(step_by_step(policy, prompts, completions), expected, **CLOSE)
    without = torch.cat((completions[..., :1], completions[..., 2:]), -1)
    skipped = one_by_one(policy, prompts, without)
    assert (skipped[..., 2:, :] - expected[..., 3:, :]).abs().max() > 1e-3


# --- one tree, many ways to read it ---------------------------------------------------------------------------------


@st.composite
def trees(draw):
    """(real (Q, S+T), branch (S+T,), T): padding anywhere among the first S, and any order of branches."""
    S, T, Q = draw(st.integers(0, 6)), draw(st.integers(1, 7)), draw(st.integers(1, 3))
    branch = draw(st.lists(st.sampled_from([TRUNK, 0, 1, 2]), min_size=S + T, max_size=S + T))
    real = [draw(st.lists(st.booleans(), min_size=S + T, max_size=S + T)) for _ in range(Q)]
    return torch.tensor(real), torch.tensor(branch), T


@settings(deadline=None, max_examples=200)
@given(tree=trees())
def test_a_token_sees_itself_and_what_is_real_and_earlier_on_its_own_way(tree):
    """By definition, token by token: the trunk before it, its own branch before it, and itself, be it padding."""
    real, branch, T = tree
    S = len(branch) - T
    found = visible(real, branch, T)
    assert found.shape == (len(real), T, S + T) and found.dtype == torch.bool
    for q in range(len(real)):
        for reader in range(S, S + T):
            for other in range(S + T):
                on_the_way = branch[other] in (TRUNK, branch[reader])
                expected = other == reader or (other < reader and bool(real[q, other]) and bool(on_the_way))
                assert found[q, reader - S, other].item() == expected, (q, reader, other)


@settings(deadline=None)
@given(G=st.integers(1, 200), length=st.integers(0, 150), largest=st.integers(1, 300))
def test_rows_are_the_fewest_that_are_small_enough(G, length, largest):
    """K divides G; a row holds at most `largest` tokens, or one completion where one alone is longer; fewer do not."""
    K = rows_of(G, length, largest)
    assert 1 <= K <= G and G % K == 0
    assert G // K * length <= largest or (K == G and length > largest)
    assert all(G // fewer * length > largest for fewer in range(1, K) if G % fewer == 0)


@IN_SEVERAL_ROWS
def test_a_group_in_several_rows_has_the_logits_of_plain_rows(policy, G, T):
    """Where one tree would be large: several trees on one trunk, in one pass and token by token from the cache."""
    assert 1 < rows_of(G, T - 1) <= G
    prompts, completions = uneven_prompts(), random_tokens(3, G, T)
    expected = plain_rows(policy, prompts, completions)
    torch.testing.assert_close(policy.completion_logits(prompts, completions), expected, **CLOSE)
    torch.testing.assert_close(step_by_step(policy, prompts, completions), expected, **CLOSE)


@IN_SEVERAL_ROWS
def test_a_group_in_several_rows_has_the_gradient_of_plain_rows(G, T):
    """Backward, too, for every parameter; the trunk gathers what all its trees send."""
    prompts, completions = uneven_prompts(), random_tokens(3, G, T)
    pull = torch.randn(3, G, T, VOCAB, generator=generator()) / G
    gradients = []
    for read in (Policy.completion_logits, plain_rows):
        policy = tiny_policy().double()
        (read(policy, prompts, completions) * pull).sum().backward()
        gradients.append({name: p.grad for name, p in policy.named_parameters()})
    for name, expected in gradients[1].items():
        assert expected.abs().max() > 1e-3, name
        torch.testing.assert_close(gradients[0][name], expected, atol=1e-8, rtol=1e-8, msg=name)


@pytest.mark.parametrize("length", [0, 1, 7, 300])
def test_how_far_a_group_will_be_read_changes_no_logits(policy, length):
    """`start` may be told too little or too much: it decides the number of rows, and nothing that is read there."""
    prompts, completions = uneven_prompts(), random_tokens(3, 64, 4)
    expected = plain_rows(policy, prompts, completions)
    logits, cache = policy.start(prompts, 64, length)
    assert len(cache.real) == 3 * rows_of(64, length)
    for t in range(4):
        torch.testing.assert_close(logits, expected[:, :, t], **CLOSE)
        logits, cache = policy.step(completions[..., t], cache)


@pytest.mark.parametrize(("G", "T"), [(1, 1), (3, 1), (1, 4), (4, 5)])
def test_three_ways_to_read_a_group_give_the_same_logits(policy, G, T):
    """Shared prompt in one pass, token by token from the cache, and N separate texts."""
    prompts, completions = uneven_prompts(), random_tokens(3, G, T)
    expected = one_by_one(policy, prompts, completions)
    torch.testing.assert_close(policy.completion_logits(prompts, completions), expected, **CLOSE)
    torch.testing.assert_close(step_by_step(policy, prompts, completions), expected, **CLOSE)


def test_shared_prompts_give_the_gradient_of_separate_texts():
    """Backward through the tree equals backward through N separate sequences, for every parameter."""
    prompts, completions = uneven_prompts(), random_tokens(3, 4, 5)
    pull = torch.randn(3, 4, 5, VOCAB, generator=generator())
    gradients = []
    for read in (Policy.completion_logits, one_by_one, step_by_step):
        policy = tiny_policy().double()
        (read(policy, prompts, completions) * pull).sum().backward()
        gradients.append({name: p.grad for name, p in policy.named_parameters()})
    shared, separate, stepped = gradients
    for name, gradient in separate.items():
        assert gradient.abs().max() > 1e-3, name
        torch.testing.assert_close(shared[name], gradient, atol=1e-9, rtol=1e-9, msg=name)
        torch.testing.assert_close(stepped[name], gradient, atol=1e-9, rtol=1e-9, msg=name)


# --- scoring --------------------------------------------------------------------------------------------------------


def counting_policy():
    """A policy that is certain: after token i comes i + 1, whatever else it read."""
    policy = tiny_policy()
    with torch.no_grad():
        for weight in policy.blocks.parameters():
            weight.zero_()
        policy.embedding.weight.copy_(torch.eye(VOCAB, 16))
        policy.head.weight.copy_(1000 * torch.eye(VOCAB, 16).roll(1, 0))
    return policy


def test_a_model_certain_of_the_next_token_gives_log_probability_0():
    """No shift: it draws 4, 5, 6 after 3, and scores them with log-probability 0; one place on it would be -4000."""
    policy, prompts = counting_policy(), left_pad([[7, 3], [5]])
    completions = torch.tensor([[[4, 5, 6]], [[6, 7, 8]]])
    batch = rollout(policy, prompts, 1, 3, generator())
    assert batch.completions.tolist() == completions.tolist()
    assert batch.logprobs.abs().max() == 0
    assert token_logprobs(policy.completion_logits(prompts, completions), completions).abs().max() == 0


def test_one_marked_token_picks_its_own_log_probability():
    """Only the logit of token 4 at step 1 is raised: that score rises at step 1, nothing at steps 0 and 2."""
    logits, completions = torch.zeros(3, 6), torch.tensor([[[4, 4, 4], [3, 3, 3]]])
    logits[1, 4] = 2.0
    found = token_logprobs(ConstantPolicy(logits).completion_logits(left_pad([[5]]), completions), completions)
    flat, raised = -torch.tensor(6.0).log(), (5 + torch.tensor(2.0).exp()).log()
    expected = torch.tensor([[[0, 2, 0], [0, 0, 0]]]) - torch.stack((-flat, raised, -flat))
    torch.testing.assert_close(found, expected)


def test_log_probabilities_of_half_precision_logits_are_float32():
    """log-softmax is not left in bf16: the ratio's error against float32 stays below 1e-3."""
    logits = torch.randn(50, VOCAB, generator=generator()).bfloat16()
    tokens = torch.randint(0, VOCAB, (50,), generator=generator())
    exact = logits.double().log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
    found = token_logprobs(logits, tokens)
    assert found.dtype == torch.float32
    assert ((found.double() - exact).exp() - 1).abs().max() < 1e-3


# --- the default ----------------------------------------------------------------------------------------------------


def test_about_100k_parameters_by_default():
    """Small enough for seconds on a laptop."""
    assert 90_000 <= sum(p.numel() for p in Policy(VOCAB, generator()).parameters()) <= 115_000


def test_weights_follow_the_generator():
    """One seed repeats, another differs, and the global random state is not used."""
    before = torch.get_rng_state()
    one, again, other = (tiny_policy(seed=seed).head.weight for seed in (3, 3, 4))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    torch.manual_seed(1)
    assert torch.equal(tiny_policy(seed=3).head.weight, one)
    torch.set_rng_state(before)


def test_training_and_evaluation_mode_read_alike(policy):
    """No dropout: a policy left in the wrong mode gives the same logits."""
    other = copy.deepcopy(policy).eval()
    text = Padded.of(random_tokens(2, 4))
    assert torch.equal(other(text), policy.train()(text))
