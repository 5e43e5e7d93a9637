"""The coupling kernel: against explicit gradients, closed forms, and the step that it predicts."""

import random
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from conftest import ConstantPolicy, Pairs, generator, tiny_policy
from torch import nn

import toy_tasks.coupling as coupling
from minirlvr import policy_loss, rollout, token_logprobs
from toy_tasks import Countdown, Padded, Sums
from toy_tasks.coupling import (
    Completions,
    completion_gradients,
    cosines,
    coupling_kernel,
    group_coefficients,
    log_prob,
    measured_change,
    predicted_change,
    query_selectivity,
    query_similarity,
    r_squared,
    resplit,
)
from toy_tasks.exact import Listing

PAIRS = Pairs()
POLICY = tiny_policy(PAIRS.vocab_size)
LISTING = Listing(PAIRS, PAIRS.prompts)  # 28 completions
WEIGHTS = sum(p.numel() for p in POLICY.parameters())


def gradients_by_loop(policy, completions, temperature=1.0):
    """One backward pass a completion, in float64, no vmap: (R, W)."""
    rows = []
    for r, scored in enumerate(completions.scored):
        logprobs = token_logprobs_at(policy, completions.padded.pick(slice(r, r + 1)), temperature)[0]
        total = sum(logprobs[t] for t in range(1, len(scored)) if scored[t])
        found = torch.autograd.grad(total, list(policy.parameters()))
        rows.append(torch.cat([g.flatten() for g in found]).double())
    return torch.stack(rows)


def token_logprobs_at(policy, texts, temperature):
    """log pi of token t at place t; place 0 has none."""
    each = token_logprobs(policy(texts)[:, :-1] / temperature, texts.tokens[:, 1:])
    return torch.cat((torch.zeros(len(each), 1), each), 1)


def sampled_batch(policy, task, prompts, group_size=6, seed=0):
    """A batch: the rollout, random advantages, its completions and their coefficients."""
    batch = rollout(policy, task.encode_prompts(prompts), group_size, task.max_new_tokens, generator(seed), 1.0)
    advantages = torch.randn(batch.mask.shape[:2], generator=generator(seed))  # unlike its rewards, not all 0
    stepped = Completions.of(batch.padded, batch.completions, batch.mask)
    return batch, advantages, stepped, group_coefficients(advantages, batch.mask)


# --- gradients and kernel -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_gradients_are_those_of_a_loop(temperature):
    expected = gradients_by_loop(POLICY, LISTING, temperature)
    found = completion_gradients(POLICY, LISTING, temperature=temperature)
    assert found.shape == (28, WEIGHTS) and found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(completion_gradients(POLICY, LISTING, slice(3, 5), temperature), found[3:5])


def test_log_prob_is_the_listings():
    """Two ways to score the same modes: the kernel's and the exact measures'."""
    expected = LISTING.log_probs(POLICY)[LISTING.slots[:, 0], LISTING.slots[:, 1]]
    torch.testing.assert_close(log_prob(POLICY, LISTING.padded, LISTING.scored).double(), expected, rtol=0, atol=1e-5)


def test_kernel_is_the_gram_matrix_symmetric_and_semidefinite():
    gradients = gradients_by_loop(POLICY, LISTING)
    kernel = coupling_kernel(POLICY, LISTING)
    assert kernel.dtype == torch.float64
    torch.testing.assert_close(kernel, gradients @ gradients.T, rtol=1e-4, atol=1e-4)
    assert torch.equal(kernel, kernel.T)
    assert torch.linalg.eigvalsh(kernel).min() > -1e-6 * kernel.diagonal().max()


def test_columns_may_be_other_completions():
    """Listed modes against a sampled batch that holds wrong and cut completions: (R, N), the loop's products."""
    _, _, stepped, _ = sampled_batch(POLICY, PAIRS, PAIRS.train)
    assert (~stepped.scored[:, -1]).any() and stepped.scored[:, -1].any(), "the batch should have short and cut ones"
    kernel = coupling_kernel(POLICY, LISTING, stepped)
    expected = gradients_by_loop(POLICY, LISTING) @ gradients_by_loop(POLICY, stepped).T
    torch.testing.assert_close(kernel, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows", [5, 14, 27])
def test_small_blocks_give_the_same_kernel(rows):
    """Whatever the bound on memory: symmetric and rectangular, blocks that divide R and blocks that do not."""
    small = Completions(LISTING.padded.pick(slice(7)), LISTING.scored[:7])
    bound = rows * 5 * WEIGHTS * 4
    torch.testing.assert_close(coupling_kernel(POLICY, LISTING, max_bytes=bound), WHOLE, rtol=1e-5, atol=1e-5)
    rectangular = coupling_kernel(POLICY, LISTING, small, max_bytes=bound)
    torch.testing.assert_close(rectangular, WHOLE[:, :7], rtol=1e-5, atol=1e-5)


WHOLE = coupling_kernel(POLICY, LISTING)


def test_frozen_parameters_do_not_couple():
    policy = tiny_policy(PAIRS.vocab_size)
    policy.embedding.weight.requires_grad_(False)
    assert completion_gradients(policy, LISTING).shape[1] == WEIGHTS - policy.embedding.weight.numel()
    for p in policy.parameters():
        p.requires_grad_(False)
    with pytest.raises(ValueError, match="no parameters"):
        completion_gradients(policy, LISTING)


def test_a_policy_without_a_prompt_couples_by_its_letters_alone():
    """Closed form: with constant logits grad log pi(o) = counts(o) - length pi, the same for every prompt."""
    policy = ConstantPolicy(torch.randn(PAIRS.vocab_size, generator=generator()))
    share = policy.logits.detach().double().softmax(0)
    counts = torch.stack(
        [
            torch.bincount(t[s], minlength=PAIRS.vocab_size)
            for t, s in zip(LISTING.padded.tokens, LISTING.scored, strict=True)
        ]
    )
    expected = counts.double() - counts.sum(1, keepdim=True) * share
    torch.testing.assert_close(coupling_kernel(policy, LISTING), expected @ expected.T, rtol=1e-5, atol=1e-5)


# --- memory ---------------------------------------------------------------------------------------------------------


def test_no_more_gradients_are_alive_than_the_bound_allows(monkeypatch):
    """Counts the blocks that live side by side; making one takes up to four times its size."""
    alive, most, make = {}, [0], completion_gradients

    def counted(*args, **kwargs):
        block = make(*args, **kwargs)
        before = sum(alive.values())
        most[0] = max(most[0], before + 4 * block.nbytes)
        alive[id(block)] = block.nbytes
        weakref.finalize(block, alive.pop, id(block))
        return block

    monkeypatch.setattr(coupling, "completion_gradients", counted)
    bound = 5 * 5 * WEIGHTS * 4
    coupling_kernel(POLICY, LISTING, max_bytes=bound)
    assert 0 < most[0] <= bound


def test_a_bound_too_small_is_one_line():
    with pytest.raises(ValueError, match="five must fit"):
        coupling_kernel(POLICY, LISTING, max_bytes=5 * WEIGHTS * 4 - 1)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak of the resident memory from /proc")
def test_resident_memory_stays_within_the_bound():
    """24 gradients of a million parameters are 96 MB, and vmap would take 128 more; the bound is 48."""
    code = """
import torch
from toy_tasks import Padded
from toy_tasks.coupling import Bigram, Completions, coupling_kernel
def peak():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]) * 1024
torch.set_num_threads(1)
batch = Completions(Padded.of(torch.arange(48).view(24, 2)), torch.tensor([[False, True]]).expand(24, 2))
coupling_kernel(Bigram(100, 100), batch)  # what PyTorch loads the first time
policy = Bigram(1000, 1000)
before = peak()
coupling_kernel(policy, batch, max_bytes=48_000_000)
print(peak() - before)
"""
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, check=True)
    assert int(done.stdout) < 1.1 * 48e6, done.stdout


# --- the step -------------------------------------------------------------------------------------------------------


class LinearSoftmax(nn.Module):
    """P1's policy: z_o(q) = w_o . phi(q) with fixed embeddings phi, whatever else was read before."""

    def __init__(self, embeddings):  # (V, d)
        super().__init__()
        self.register_buffer("embeddings", embeddings)
        self.weight = nn.Parameter(torch.randn(len(embeddings), embeddings.shape[1], generator=generator(1)))

    def forward(self, texts):
        return self.embeddings[texts.tokens] @ self.weight.T


def alone(token):
    """A text of one token."""
    return Padded.of(torch.tensor([[token]]))


def test_a_linear_softmax_policy_moves_as_its_formula_says():
    """Delta z_o(q') = eta A (1[o = o_j] - pi(o|q)) phi(q) . phi(q'), exactly; log pi follows to first order."""
    V, q, other, sampled, advantage, step_size = 5, 2, 3, 4, 1.5, 1e-4
    embeddings = torch.randn(V, 4, generator=generator())
    policy = LinearSoftmax(embeddings)
    one_hot, share = torch.eye(V).double()[sampled], policy(alone(q))[0, 0].double().softmax(0)
    change = step_size * advantage * (one_hot - share) * (embeddings[q] @ embeddings[other]).double()  # (V,) of z
    other_share = policy(alone(other))[0, 0].double().softmax(0)
    answers = Completions(Padded.of(torch.tensor([[other, o] for o in range(V)])), torch.tensor([[False, True]] * V))
    stepped = Completions(Padded.of(torch.tensor([[q, sampled]])), torch.tensor([[False, True]]))
    found = predicted_change(coupling_kernel(policy, answers, stepped), torch.tensor([advantage]), step_size)
    torch.testing.assert_close(found, (change - (other_share * change).sum()).detach(), rtol=1e-4, atol=1e-10)
    measured = measured_change(policy, answers, stepped, torch.tensor([advantage]), [step_size])[0]
    z = policy(alone(other))[0, 0].double()
    exact = (z + change).log_softmax(0) - z.log_softmax(0)
    torch.testing.assert_close(measured, exact.detach(), rtol=1e-4, atol=1e-10)


def test_coefficients_make_the_gradient_of_grpos_loss():
    """sum_j c_j grad log pi(o_j) is minus the gradient of the loss that the loop minimises."""
    batch, advantages, stepped, coefficients = sampled_batch(POLICY, PAIRS, PAIRS.train)
    logits = POLICY.completion_logits(batch.padded, batch.completions)
    new = token_logprobs(logits, batch.completions).flatten(0, 1)
    loss = policy_loss(new, new.detach(), advantages, batch.mask.flatten(0, 1))
    expected = torch.cat([g.flatten() for g in torch.autograd.grad(-loss, list(POLICY.parameters()))])
    torch.testing.assert_close(coefficients @ completion_gradients(POLICY, stepped), expected, rtol=1e-3, atol=1e-5)


def test_the_measured_change_is_that_of_sgd_and_leaves_the_policy_alone():
    _, _, stepped, coefficients = sampled_batch(POLICY, PAIRS, PAIRS.train)
    before = [p.detach().clone() for p in POLICY.parameters()]
    measured = measured_change(POLICY, LISTING, stepped, coefficients, [0.1, 0.0])
    assert all(torch.equal(a, b) for a, b in zip(before, POLICY.parameters(), strict=True))
    stepping = tiny_policy(PAIRS.vocab_size).double()
    optimizer = torch.optim.SGD(stepping.parameters(), lr=0.1)
    old = log_prob(stepping, LISTING.padded, LISTING.scored).detach()
    (-(coefficients * log_prob(stepping, stepped.padded, stepped.scored)).sum()).backward()
    optimizer.step()
    expected = log_prob(stepping, LISTING.padded, LISTING.scored).detach() - old
    torch.testing.assert_close(measured[0], expected, rtol=1e-9, atol=1e-12)
    assert not measured[1].any()


@pytest.mark.parametrize("task", [Sums(), Countdown()], ids=lambda task: task.name)
def test_the_kernel_predicts_a_small_step_and_not_a_large_one(task):
    """R^2 is 1 at a tiny step, lower at a large one; a wrong sign, or another completion's column, is far off."""
    policy = tiny_policy(task.vocab_size)
    rng = random.Random(0)
    prompts = rng.sample(task.prompts, 4)
    listing = Listing(task, prompts)
    stepped = Completions(listing.padded.pick(slice(0, None, 3)), listing.scored[::3])
    coefficients = torch.randn(len(stepped.scored), generator=generator())
    kernel = coupling_kernel(policy, listing, stepped)
    tiny, large = 1e-5, 3.0
    measured = measured_change(policy, listing, stepped, coefficients, [tiny, large])
    assert r_squared(predicted_change(kernel, coefficients, tiny), measured[0]) > 0.9999
    assert r_squared(predicted_change(kernel, coefficients, large), measured[1]) < 0.9
    for wrong in (-coefficients, coefficients.roll(1)):
        assert r_squared(predicted_change(kernel, wrong, tiny), measured[0]) < 0.5


def test_the_error_of_the_prediction_is_of_second_order():
    """A step ten times as small has an error a hundred times as small."""
    _, _, stepped, coefficients = sampled_batch(POLICY, PAIRS, PAIRS.train)
    policy = tiny_policy(PAIRS.vocab_size).double()
    kernel = coupling_kernel(policy, LISTING, stepped)
    sizes = [1e-3, 1e-4]
    measured = measured_change(policy, LISTING, stepped, coefficients, sizes)
    errors = [(m - predicted_change(kernel, coefficients, s)).norm() for m, s in zip(measured, sizes, strict=True)]
    assert errors[0] / errors[1] == pytest.approx(100, rel=0.05)


def test_r_squared_refuses_what_it_cannot_judge():
    with pytest.raises(ValueError, match="alike"):
        r_squared(torch.zeros(2), torch.zeros(3))
    with pytest.raises(ValueError, match="nothing to explain"):
        r_squared(torch.zeros(2), torch.ones(2))


# --- queries --------------------------------------------------------------------------------------------------------


def random_kernel(seed: int, queries: int = 4) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random gradients (R, 6), their Gram matrix and owners, each query with at least one mode."""
    g = generator(seed)
    owner = torch.cat((torch.arange(queries), torch.randint(queries, (6,), generator=g)))
    gradients = torch.randn(len(owner), 6, generator=g, dtype=torch.float64)
    return gradients, gradients @ gradients.T, owner


@pytest.mark.parametrize("seed", range(3))
def test_similarity_and_selectivity_by_loops(seed):
    gradients, kernel, owner = random_kernel(seed)
    similarity, selectivity = query_similarity(kernel, owner), query_selectivity(kernel, owner)
    unit = gradients / gradients.norm(dim=1, keepdim=True)
    for a in range(4):
        for b in range(4):
            block = unit[owner == a] @ unit[owner == b].T
            assert similarity[a, b].item() == pytest.approx(block.mean().item())
            apart = block - block.mean(0, keepdim=True) - block.mean(1, keepdim=True) + block.mean()
            assert selectivity[a, b].item() == pytest.approx(apart.pow(2).mean().sqrt().item(), abs=1e-7)


def test_the_length_of_a_gradient_does_not_count():
    gradients, kernel, owner = random_kernel(0)
    longer = gradients * torch.arange(1, len(gradients) + 1)[:, None]
    for measure in (query_similarity, query_selectivity):
        torch.testing.assert_close(measure(longer @ longer.T, owner), measure(kernel, owner))


def test_a_zero_gradient_has_no_direction():
    assert cosines(torch.tensor([[4.0, 0.0], [0.0, 0.0]])).tolist() == [[1.0, 0.0], [0.0, 0.0]]


def test_one_mode_has_no_selectivity():
    """With one mode, all of the coupling is common to the query's modes."""
    kernel = torch.tensor([[1.0, 0.9], [0.9, 1.0]], dtype=torch.float64)
    assert query_selectivity(kernel, torch.tensor([0, 1])).abs().max() < 1e-7


# --- splits ---------------------------------------------------------------------------------------------------------


def test_resplit_moves_prompts_and_nothing_else():
    task = Countdown()
    chosen = random.Random(0).sample(task.prompts, 5)
    other = resplit(task, chosen)
    assert other.train == tuple(chosen) and sorted(other.prompts) == sorted(task.prompts)
    assert len(task.train) == 24 and Countdown.train == task.train, "the task itself is left alone"
    for one, same in zip(other.encode_prompts(chosen), task.encode_prompts(chosen), strict=True):
        assert torch.equal(one, same)


@pytest.mark.parametrize("prompts", [[], ["9=", "9="], ["99="]])
def test_resplit_refuses_what_is_no_split(prompts):
    with pytest.raises(ValueError, match="must be some of sums"):
        resplit(Sums(), prompts)
