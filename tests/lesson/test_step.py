"""What a step does: a `Learner` alone, on a task and a reference that take milliseconds."""

import copy
import inspect
import math
import os
import re

import pytest
import torch
from conftest import ConstantPolicy, Pairs, short_settings

import minirlvr
from lab.settings import parse_method
from minirlvr import (
    Learner,
    Rollout,
    apply_importance,
    memory_loss,
    rollout,
    sampled_step,
    token_logprobs,
    train_memory,
    verify,
)
from tests.runs import ENDINGS, SAMPLING, flat, moved, same_tree, use_sgd, weights
from toy_tasks import UserError
from toy_tasks.exact import Listing
from toy_tasks.task import left_pad


@pytest.fixture
def start(pairs_reference):
    """Make a learner: start("grpo+iac", seed=1, epochs=2, ...); its reference is what it starts from."""

    def make(method="grpo", seed=0, task=None, reference=None, **changed):
        dials, frozen = short_settings(**changed), copy.deepcopy(reference or pairs_reference)
        _, estimator, _, calibrations = parse_method(method)
        groups = dials.sampling, dials.update, dials.calibration
        return Learner(task or Pairs(), copy.deepcopy(frozen), estimator, calibrations, *groups, seed, reference=frozen)

    return make


@pytest.fixture
def trained(start):
    """Make a learner and let it take `steps` steps."""

    def make(*args, steps=2, **changed):
        return take(start(*args, **changed), steps)

    return make


def take(learner, steps=2):
    for _ in range(steps):
        sampled_step(learner)
    return learner


def logged(learner):
    """name -> its mean over the steps so far."""
    return {name: sum(values) / len(values) for name, values in learner.logged.items()}


@torch.no_grad()
def mass(learner):
    """Exact probability of a right answer, mean over the prompts that it trains on."""
    return Listing(learner.task, learner.task.train).log_probs(learner.policy).exp().sum(-1).mean().item()


def drawn(learner, group_size):
    """A batch of all prompts from the policy as it is, and its rewards."""
    prompts = list(learner.task.train)
    batch = rollout(learner.policy, learner.task.encode_prompts(prompts), group_size, 4, learner.generator)
    return batch, verify(learner.task, prompts, batch)


class Flat(Pairs):
    """All answers are wrong."""

    def verify(self, prompt, completion):
        return False


# --- what a learner holds -------------------------------------------------------------------------------------------


def test_the_step_has_seven_numbers():
    """The comments of `sampled_step` count the sentences of README, each once and in order."""
    numbers = re.findall(r"^ +# (\d)\. [A-Z].*[.:]", inspect.getsource(sampled_step), re.MULTILINE)
    assert numbers == list("1234567")


def test_a_learner_makes_what_nobody_gives_it(pairs_reference):
    """A frozen copy where something asks for a reference, a fresh memory where a calibration does; else neither."""
    policy = copy.deepcopy(pairs_reference)
    plain, curious = Learner(Pairs(), policy), Learner(Pairs(), policy, calibrations=("dlc",))
    held = Learner(Pairs(), policy, update=minirlvr.Update(beta=0.1))
    climbing = Learner(Pairs(), policy, climb=lambda rewards, batch, reference: rewards)
    assert (plain.reference, plain.memory, plain.memory_optimizer, curious.reference) == (None, None, None, None)
    assert curious.memory is not None and curious.memory_optimizer is not None
    for learner in (held, climbing):
        assert learner.reference is not policy
        assert same_tree(dict(learner.reference.state_dict()), dict(policy.state_dict()))
        assert not any(p.requires_grad for p in learner.reference.parameters())


def test_a_fresh_memory_depends_on_the_seed(start):
    """Small, of its own shape, and the same for the same seed."""
    one, again, other = (start("grpo+dlc", seed=seed).memory.head.weight for seed in (0, 0, 1))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)


def test_a_step_depends_on_the_seed_alone(trained):
    """The global random state is not used: whatever it is, the weights are the same; another seed gives others."""
    before, found = torch.get_rng_state(), []
    for state in (1, 2):
        torch.manual_seed(state)
        found.append(weights(trained("grpo+dlc")))
    torch.set_rng_state(before)
    assert torch.equal(*found)
    assert not torch.equal(weights(trained("grpo")), weights(trained("grpo", seed=1)))


def test_the_learning_rate_is_the_one_that_was_set(start):
    """Adam's first step moves the weights by the learning rate: one source for the number."""
    learner = take(start(learning_rate=0.02), 1)
    assert moved(learner) == pytest.approx(0.02, rel=0.02)
    assert [group["lr"] for group in learner.optimizer.param_groups] == [0.02]
    assert [group["weight_decay"] for group in learner.optimizer.param_groups] == [0.0]


def test_more_prompts_than_there_are_means_all(start):
    """And a group of two is enough."""
    learner = start(group_size=2, prompts=1000)
    prompts, batch = minirlvr.draw(learner)
    assert sorted(prompts) == sorted(learner.task.train)
    assert batch.completions.shape[:2] == (3, 2)
    take(learner)


# --- every method ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("estimator", SAMPLING)
def test_every_method_moves_the_policy_and_not_the_reference(start, estimator, ending):
    """Two steps change the weights, and the reference's bytes are what they were."""
    learner = start(estimator + ending, group_size=8)
    assert learner.name == estimator + ending
    before = copy.deepcopy(learner.reference.state_dict())
    take(learner)
    assert learner.step == 2
    assert moved(learner) > 1e-4
    assert same_tree(dict(learner.reference.state_dict()), dict(before))
    assert all(p.grad is None for p in learner.reference.parameters())
    assert (learner.memory is not None) == ("dlc" in ending)


@pytest.mark.parametrize("estimator", SAMPLING)
def test_training_learns(start, estimator):
    """Forty steps make the policy right more often: signs, masks and ratios are all in it."""
    learner = start(estimator, learning_rate=5e-3)
    before = mass(learner)
    assert mass(take(learner, 40)) > before + 0.1


def test_loss_is_0_and_the_gradient_is_not(trained):
    """On the first update of a batch the loss is about 0 while the gradient norm is not: this is right."""
    found = logged(trained(steps=1))
    assert abs(found["loss"]) < 1e-5
    assert found["grad_norm"] > 0.01


@pytest.mark.parametrize("temperature", [0.6, 1.0])
@pytest.mark.parametrize("method", ["grpo", "dapo", "grpo+dlc"])
def test_first_ratio_is_1(trained, method, temperature):
    """Before any update the policy is the one that sampled: |ratio - 1| < 1e-5, at any temperature."""
    learner = trained(method, temperature=temperature, steps=4)
    assert max(learner.logged["first_ratio"]) < 1e-5
    assert max(learner.logged["clip_fraction"]) == 0


def test_the_second_epoch_has_another_ratio_and_clips(trained):
    """On reused data the old log-probabilities stay: the clip binds from the second epoch on."""
    found = logged(trained(epochs=3, learning_rate=0.05, max_grad_norm=100, steps=1))
    assert found["first_ratio"] < 1e-5
    assert found["clip_fraction"] > 0.01


def test_the_clip_binds_in_the_step_and_not_only_in_the_log(trained):
    """With reused data another clip gives other weights; with one epoch, where the ratio is 1, it gives the same."""
    for epochs in (1, 3):
        same = {"epochs": epochs, "learning_rate": 0.05, "steps": 1}
        narrow, wide = trained(**same), trained(clip_low=1.0, clip_high=1e5, **same)
        assert torch.equal(weights(narrow), weights(wide)) == (epochs == 1)


@pytest.mark.parametrize("aggregate", ["sequence", "token", "constant"])
@pytest.mark.parametrize("changed", [{}, {"beta": 0.2, "entropy_bonus": 0.05}], ids=["plain", "kl and entropy"])
def test_micro_batches_change_nothing(start, aggregate, changed):
    """1, 2 and 4 parts: the same weights after a step, to rounding, and the same log."""
    learners = [start(micro_batches=n, aggregate=aggregate, group_size=16, **changed) for n in (1, 2, 4)]
    whole, *parts = (take(use_sgd(learner)) for learner in learners)
    assert moved(whole) > 1e-4
    for learner in parts:
        assert (weights(learner) - weights(whole)).abs().max() < 1e-6
        for name in ("loss", "grad_norm", "entropy", "clip_fraction", "first_ratio"):
            assert logged(learner)[name] == pytest.approx(logged(whole)[name], abs=1e-5), name


@pytest.mark.slow
def test_a_compiled_policy_learns_what_the_plain_one_learns(start):
    """The same draws, and weights that differ by rounding. Traced as always, but not put into C++."""
    plain, compiled = start(), start()
    compiled.policy.extend = torch.compile(compiled.policy.extend, backend="aot_eager", dynamic=True)
    for learner in (plain, compiled):
        take(use_sgd(learner))
    assert moved(plain) > 1e-3
    assert (weights(plain) - weights(compiled)).abs().max() < 1e-5
    assert logged(compiled)["first_ratio"] < 1e-5


@pytest.mark.slow
@pytest.mark.skipif("MINIRLVR_SLOW_TESTS" not in os.environ, reason="half a minute of compiling: MINIRLVR_SLOW_TESTS=1")
def test_a_compiled_policy_has_the_gradient_of_the_plain_one(start):
    """The same, but put into C++: logits of a batch and their gradient."""
    plain, compiled = start().policy, start().policy
    compiled.extend = torch.compile(compiled.extend, dynamic=True)
    prompts = left_pad([[2, 6], [3, 6]])
    completions = torch.randint(2, 6, (2, 3, 4), generator=torch.Generator().manual_seed(0))
    found = []
    for policy in (plain, compiled):
        logits = policy.completion_logits(prompts, completions)
        logits.square().sum().backward()
        found.append([logits.detach(), *(p.grad for p in policy.parameters())])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


def test_the_gradient_is_scaled_down_to_its_norm(start):
    """max_grad_norm bounds the step: with SGD at rate 1 the weights move by at most that norm."""
    learner = use_sgd(start(max_grad_norm=1e-3), rate=1.0)
    before = weights(learner)
    take(learner, 1)
    assert (weights(learner) - before).norm().item() == pytest.approx(1e-3, rel=1e-2)
    assert logged(learner)["grad_norm"] > 1e-2


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_is_a_users_mistake(start, broken):
    """One line that names the learner and says what to do, before any weight has moved."""
    learner = start("grpo", seed=3)
    learner.policy.head.weight.register_hook(lambda gradient: gradient * broken)
    with pytest.raises(UserError, match=r"grpo seed 3, step 1.*--learning-rate") as error:
        take(learner, 1)
    assert "\n" not in str(error.value)
    assert moved(learner) == 0


# --- rewards, and groups that say nothing ---------------------------------------------------------------------------


def test_a_nan_reward_is_refused_by_prompt_before_the_policy_moves(start):
    """One bad reward is an error that names the prompt; no weight has changed."""

    class Broken(Pairs):
        def verify(self, prompt, completion):
            return math.nan if prompt == "b=" else super().verify(prompt, completion)

    learner = start(task=Broken())
    with pytest.raises(ValueError, match="'b='"):
        take(learner)
    assert moved(learner) == 0


@pytest.mark.parametrize("method", SAMPLING)
def test_flat_groups_teach_nothing_without_a_kl_term(trained, method):
    """beta = 0, every group flat: gradient exactly 0 (DAPO: no step), weights as they were, and the log says it."""
    learner = trained(method, task=Flat())
    assert learner.logged["flat_groups"] == [1, 1]
    assert learner.logged["reward"] == [0, 0]
    assert learner.logged.get("grad_norm") == (None if method == "dapo" else [0, 0])
    assert moved(learner) == 0


@pytest.mark.parametrize("changed", [{}, {"epochs": 2, "micro_batches": 2}], ids=["plain", "epochs, parts"])
def test_leaving_flat_groups_out_gives_the_update_of_all_groups(start, monkeypatch, changed):
    """The fast update computes the groups that can move the policy, the plain one all: the same weights and log."""

    class OneFlat(Pairs):
        def verify(self, prompt, completion):
            return prompt != "b=" and super().verify(prompt, completion)

    fast, plain = (use_sgd(start("grpo", task=OneFlat(), group_size=16, **changed)) for _ in range(2))
    take(fast, 3)
    monkeypatch.setattr(minirlvr, "teaching_groups", lambda advantages, _: torch.arange(len(advantages)))
    take(plain, 3)
    assert logged(fast)["flat_groups"] == pytest.approx(1 / 3)
    assert (weights(fast) - weights(plain)).abs().max() < 1e-6
    assert moved(plain) > 1e-3
    for name in ("loss", "grad_norm", "entropy", "clip_fraction", "first_ratio"):
        assert logged(fast)[name] == pytest.approx(logged(plain)[name], abs=1e-5), name


def test_momentum_goes_on_where_every_group_is_flat(start, monkeypatch):
    """A flat batch has gradient 0, which is a step of Adam's all the same: its momentum still moves the weights."""
    learner = take(start("grpo", learning_rate=1e-3), 1)
    before = weights(learner)
    monkeypatch.setattr(learner.task, "verify", lambda prompt, completion: False)
    take(learner, 1)
    assert learner.logged["grad_norm"][-1] == 0
    assert (weights(learner) - before).abs().max() > 1e-5


# --- penalties ------------------------------------------------------------------------------------------------------


def test_flat_groups_move_the_policy_with_a_kl_term(start):
    """beta > 0: away from the reference, even flat groups pull back to it."""
    learner = start(task=Flat(), beta=0.5)
    with torch.no_grad():
        for p in learner.policy.parameters():
            p.mul_(1.2)
    before = weights(learner)
    take(learner, 1)
    assert logged(learner)["grad_norm"] > 1e-3
    assert not torch.equal(weights(learner), before)


def test_kl_in_the_loss_and_in_the_reward_both_hold_the_policy_back(trained):
    """A strong KL term, either way, keeps the policy nearer to the reference; both log it, neither without beta."""
    many = {"steps": 30, "learning_rate": 5e-3}
    free = trained(**many)
    assert "kl" not in free.logged
    for held in (
        {"kl_in": "loss", "kl_kind": "k3"},
        {"kl_in": "loss", "kl_kind": "k2"},
        {"kl_in": "reward", "kl_kind": "k1"},
    ):
        method = "grpo" if held["kl_in"] == "loss" else "dr_grpo"
        learner = trained(method, beta=2.0, **held, **many)
        assert 0 <= logged(learner)["kl"] < 0.2, held
        assert mass(learner) < mass(free) - 0.05, held


def test_kl_in_the_reward_enters_the_reward_and_not_the_loss(start):
    """At the first step policy = reference: no KL, so kl_in=reward with k1 takes the plain step."""
    plain, reward = start(), start(beta=0.5, kl_in="reward", kl_kind="k1")
    for learner in (plain, reward):
        take(use_sgd(learner), 1)
    assert (weights(plain) - weights(reward)).abs().max() < 1e-6
    assert moved(plain) > 1e-3
    assert logged(reward)["kl"] == pytest.approx(0, abs=1e-6)


def test_what_is_climbed_takes_the_verifiers_place(start):
    """`climb` sees the verifier's rewards and the reference's log-probabilities; what it returns is what is learned."""
    seen = []

    def climb(rewards, batch, reference_logprobs):
        seen.append((rewards, batch, reference_logprobs))
        return 1 - rewards

    learner = start()
    learner.climb = climb
    before = mass(learner)
    take(learner, 20)
    assert mass(learner) < before - 0.1, "it should learn to be wrong"
    assert logged(learner)["reward"] < before, "the log goes on saying what the verifier found"
    rewards, batch, reference_logprobs = seen[0]
    assert rewards.shape == (3, 8)
    torch.testing.assert_close(reference_logprobs, batch.logprobs, atol=1e-5, rtol=1e-5)  # nothing had moved yet


# --- DAPO, importance -----------------------------------------------------------------------------------------------


def test_dapo_waits_until_a_batch_is_mixed(start, monkeypatch):
    """No step on fewer mixed groups than a batch holds; then all trained groups have a right and a wrong answer."""
    seen = []
    ours = minirlvr.update_policy

    def spy(learner, batch, advantages, *rest):
        seen.append((learner.step, advantages))
        return ours(learner, batch, advantages, *rest)

    monkeypatch.setattr(minirlvr, "update_policy", spy)
    learner = take(start("dapo", group_size=2), 12)
    assert 0 < len(seen) < 12
    assert learner.step == 12, "a batch that is not trained on counts all the same"
    for _, advantages in seen:
        assert advantages.shape == (3, 2)
        assert (advantages != 0).all()


def test_importance_weighs_or_clips_what_dlc_bent(start):
    """none, exact and clipped are three updates; without DLC, or with mu = 0, they are one."""
    for method, changed, different in (("grpo+dlc", {}, True), ("grpo", {}, False), ("grpo+dlc", {"mu": 0.0}, False)):
        found = []
        for importance in ("none", "exact", "clipped"):
            learner = start(method, **{"importance": importance, "mu": 2.0, "max_grad_norm": 1e6} | changed)
            take(use_sgd(learner), 1)
            found.append((weights(learner), logged(learner)))
        for i in (1, 2):
            distance = (found[i][0] - found[0][0]).abs().max().item()
            assert (distance > 1e-4) if different else (distance < 1e-6), (method, changed, i)
        assert found[0][1]["first_ratio"] < 1e-5
        assert (found[2][1]["first_ratio"] > 0.01) == different


def test_exact_importance_multiplies_by_policy_over_sampler():
    """One completion drawn at 1/4 of the policy's probability counts four times; masked tokens not at all."""
    mask = torch.tensor([[[True, True, False]]])
    own, sampler = (torch.tensor([[[a, b, 0.0]]]).log() * mask for a, b in ((0.5, 0.5), (0.25, 0.25)))
    own, sampler = own.nan_to_num(), sampler.nan_to_num()
    batch = Rollout(mask, mask, mask, mask, own, sampler, -own)
    same, advantages = apply_importance(batch, torch.tensor([[1.5]]), "exact")
    assert advantages.item() == pytest.approx(6.0)
    assert torch.equal(same.logprobs, own)
    clipped, advantages = apply_importance(batch, torch.tensor([[1.5]]), "clipped")
    assert advantages.item() == 1.5
    assert torch.equal(clipped.logprobs, sampler)


# --- calibrations and the memory ------------------------------------------------------------------------------------


def test_dlc_samples_otherwise_and_iac_pulls_otherwise(trained):
    """Each calibration changes the step; mu = 0 and alpha = 0 change nothing."""
    plain = trained(steps=1)
    for method, off in (("grpo+dlc", {"mu": 0.0}), ("grpo+iac", {"alpha": 0.0})):
        on = trained(method, steps=1, mu=2.0)
        assert (weights(on) - weights(plain)).abs().max() > 1e-5, method
        assert (weights(trained(method, steps=1, **off)) - weights(plain)).abs().max() < 1e-6, method


def test_memory_learns_the_correct_completions_or_all(start):
    """With nothing correct the memory stays when it learns from correct ones, and moves when it learns from all."""
    for data in ("correct", "all"):
        learner = start("grpo+dlc", task=Flat(), memory_data=data)
        before = copy.deepcopy(learner.memory.state_dict())
        take(learner)
        assert same_tree(dict(learner.memory.state_dict()), dict(before)) == (data == "correct")
        assert ("memory_loss" not in learner.logged) == (data == "correct")


def test_memory_learns_what_was_drawn(trained):
    """Its cross-entropy falls, and the policy's own weights are not what it moves."""
    learner = trained("grpo+dlc", steps=40, learning_rate=1e-9, memory_learning_rate=0.01)
    losses = learner.logged["memory_loss"]
    assert sum(losses[-10:]) / 10 < sum(losses[:10]) / 10 - 0.1
    assert moved(learner) < 1e-6


def test_groups_without_a_correct_completion_are_not_read_by_the_memory(start):
    """They add nothing to its loss, so leaving them out gives the memory of reading them all."""

    class SomeRight(Pairs):
        def verify(self, prompt, completion):
            return prompt == "a=" and super().verify(prompt, completion)

    learner, plain = start("grpo+dlc", task=SomeRight()), start("grpo+dlc", task=SomeRight())
    batch, rewards = drawn(learner, 8)
    assert rewards.any(-1).tolist() == [True, False, False]
    train_memory(learner, batch, rewards)
    logprobs = token_logprobs(plain.memory.completion_logits(batch.padded, batch.completions), batch.completions)
    loss = memory_loss(logprobs, batch.mask, rewards > 0)
    assert learner.logged["memory_loss"] == [pytest.approx(loss.item())]
    loss.backward()
    plain.memory_optimizer.step()
    assert (flat(learner.memory.parameters()) - flat(plain.memory.parameters())).abs().max() < 1e-5


def test_micro_batches_change_no_memory(start):
    """1, 2 and 3 parts, and completions of different length: the same loss and the same gradient."""
    found = []
    for parts in (1, 2, 3):
        learner = start("grpo+dlc", micro_batches=parts, group_size=16)
        batch, rewards = drawn(learner, 16)
        train_memory(learner, batch, rewards)
        found.append((learner.logged["memory_loss"][0], flat(p.grad for p in learner.memory.parameters())))
    assert len(set(batch.mask.sum(-1).flatten().tolist())) > 1
    assert found[0][1].abs().max() > 1e-3
    for loss, gradient in found[1:]:
        assert loss == pytest.approx(found[0][0], abs=1e-6)
        torch.testing.assert_close(gradient, found[0][1], atol=1e-6, rtol=1e-4)


# --- the log --------------------------------------------------------------------------------------------------------


def test_the_log_says_what_the_batch_was(trained):
    """A policy that always answers "ab." after any prompt: reward 2/3, all groups flat, none cut, length 3."""
    logits = torch.full((4, 7), -200.0)
    for t, token in enumerate((2, 3, 1, 1)):
        logits[t, token] = 0
    found = logged(trained(reference=ConstantPolicy(logits), steps=1))
    assert found["reward"] == pytest.approx(2 / 3)
    assert (found["flat_groups"], found["cut_answers"], found["length"]) == (1, 0, 3)
    assert found["entropy"] == pytest.approx(0, abs=1e-6)


def test_cut_answers_are_logged(trained):
    """A policy that never stops: every answer is cut, none is right, and the log says both."""
    found = logged(trained(reference=ConstantPolicy([-200.0, -200.0, 0, 0, 0, 0, -200.0]), steps=1))
    assert (found["cut_answers"], found["reward"], found["length"], found["flat_groups"]) == (1, 0, 4, 1)
