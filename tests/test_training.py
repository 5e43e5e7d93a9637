"""The loop: seeds, resume, what moves and what stays, on a task and a reference that take milliseconds."""

import copy
import dataclasses
import functools
import math
import os

import pytest
import torch
from conftest import ConstantPolicy, Pairs, short_settings

import minirlvr
from minirlvr import (
    ESTIMATORS,
    Rollout,
    Run,
    Settings,
    UserError,
    apply_importance,
    exact_objective,
    memory_loss,
    parse_method,
    resolve_update,
    token_logprobs,
    train,
)
from toy_tasks import TASKS
from toy_tasks.exact import encode_prompts

pytestmark = pytest.mark.usefixtures("pairs")
CALIBRATIONS = ("", "+iac", "+dlc", "+iac+dlc")
SAMPLING = [name for name, estimator in ESTIMATORS.items() if estimator.samples]
EVERY_METHOD = [estimator + calibration for estimator in SAMPLING for calibration in CALIBRATIONS] + ["exact"]


@pytest.fixture
def start(pairs_reference):
    """Make a run: start("grpo", seed=1, steps=4, ...)."""

    def make(method="grpo", seed=0, reference=None, **changed):
        return Run(short_settings(**changed), parse_method(method), seed, reference or pairs_reference)

    return make


@pytest.fixture
def trained(start):
    """Make a run and train it to its end."""

    def make(*args, **changed):
        run = start(*args, **changed)
        train(run)
        return run

    return make


def weights(run):
    return torch.cat([p.detach().flatten() for p in run.policy.parameters()])


def moved(run):
    """Largest change of any weight since the reference."""
    before = torch.cat([p.detach().flatten() for p in run.reference.parameters()])
    return (weights(run) - before).abs().max().item()


def logged(run):
    """The last row that carries the log."""
    return [row for row in run.rows if row["split"] == "train"][-1]


def same_tree(one, other):
    """Equal bit for bit, whatever is nested in what."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same_tree(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same_tree, one, other))
    return one == other


# --- seeds and resume -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["grpo", "dapo+iac+dlc"])
def test_one_seed_repeats_and_two_seeds_differ(trained, method):
    """The same seed gives the same rows and weights, bit for bit; another seed gives others."""
    one, again, other = (trained(method, seed=seed, steps=3, evaluate_every=1) for seed in (0, 0, 1))
    assert one.rows == again.rows
    assert torch.equal(weights(one), weights(again))
    assert [row["pass@1"] for row in one.rows[2:]] != [row["pass@1"] for row in other.rows[2:]]
    assert not torch.equal(weights(one), weights(other))


def test_a_run_depends_on_its_seed_alone(trained):
    """The global random state is not used: whatever it is, the run is the same."""
    before, found = torch.get_rng_state(), []
    for seed in (1, 2):
        torch.manual_seed(seed)
        found.append(weights(trained("grpo+dlc")))
    torch.set_rng_state(before)
    assert torch.equal(*found)


RESUMED = [
    ("grpo", {}),
    ("dapo+iac+dlc", {"prompts": 2, "group_size": 2}),
    ("exact", {"beta": 0.1}),
    ("grpo+dlc", {"importance": "exact", "epochs": 2, "beta": 0.1, "evaluate_every": 3}),
]


@pytest.mark.parametrize(("method", "changed"), RESUMED)
def test_ten_steps_are_five_a_resume_and_five(start, tmp_path, method, changed):
    """Bit for bit: weights, optimisers, memory, random stream, log, rows and DAPO's waiting groups."""
    changed = {"steps": 10, "evaluate_every": 10} | changed
    whole, first, second = (start(method, **changed) for _ in range(3))
    train(whole)
    train(first, stopped=lambda: first.step == 5)
    assert first.step == 5
    torch.save(first.state(), tmp_path / "half.pt")
    second.restore(torch.load(tmp_path / "half.pt", weights_only=True))
    assert same_tree(first.state(), second.state())
    train(second)
    assert second.step == 10
    assert same_tree(whole.state(), second.state())
    assert "waiting" in whole.state()
    assert not torch.equal(weights(second), weights(first))


def test_resume_holds_what_dapo_set_aside(start, tmp_path):
    """Groups that wait for others are in the file too."""
    run = start("dapo", prompts=3, group_size=2, steps=1)
    for _ in range(20):
        train(run)
        if run.waiting and sum(len(held["rewards"]) for held in run.waiting):
            break
        run.settings = dataclasses.replace(
            run.settings, experiment=dataclasses.replace(run.settings.experiment, steps=run.step + 1)
        )
    else:
        pytest.fail("no group ever waited")
    torch.save(run.state(), tmp_path / "waiting.pt")
    other = start("dapo", prompts=3, group_size=2, steps=1)
    other.restore(torch.load(tmp_path / "waiting.pt", weights_only=True))
    assert same_tree(other.waiting, run.waiting)


def test_state_holds_full_precision(trained):
    """No weight is saved in half precision, and both optimisers are there."""
    state = trained("grpo+dlc").state()
    for name in ("policy", "memory"):
        assert all(tensor.dtype == torch.float32 for tensor in state[name].values())
    for name in ("optimizer", "memory_optimizer"):
        assert state[name]["state"]


def test_a_restored_run_does_not_share_its_state(start):
    """Going on with one run moves neither the other nor the state both came from."""
    one, other = start("grpo+dlc", steps=4), start("grpo+dlc", steps=4)
    train(one, stopped=lambda: one.step == 2)
    state = copy.deepcopy(one.state())
    other.restore(state)
    before = copy.deepcopy(state)
    train(other)
    assert same_tree(state, before)


# --- every method ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", EVERY_METHOD)
def test_every_method_moves_the_policy_and_not_the_reference(start, method):
    """Two steps change the weights, and the reference's bytes are what they were."""
    run = start(method, group_size=8)
    before = copy.deepcopy(run.reference.state_dict())
    train(run)
    assert run.step == 2
    assert moved(run) > 1e-4
    assert same_tree(dict(run.reference.state_dict()), dict(before))
    assert all(p.grad is None for p in run.reference.parameters())
    assert (run.memory is not None) == ("dlc" in method)


def test_a_run_does_not_touch_the_policy_it_was_given(start, pairs_reference):
    """Many runs start from one reference: none moves it."""
    before = copy.deepcopy(pairs_reference.state_dict())
    train(start("grpo+dlc", memory_start="reference", beta=0.1))
    assert same_tree(dict(pairs_reference.state_dict()), dict(before))


def test_loss_is_0_and_the_gradient_is_not(trained):
    """On the first update of a batch the loss is about 0 while the gradient norm is not: this is right."""
    row = logged(trained(steps=1, evaluate_every=1))
    assert abs(row["loss"]) < 1e-5
    assert row["grad_norm"] > 0.01


@pytest.mark.parametrize("temperature", [0.6, 1.0])
@pytest.mark.parametrize("method", ["grpo", "dapo", "grpo+dlc"])
def test_first_ratio_is_1(trained, method, temperature):
    """Before any update the policy is the one that sampled: |ratio - 1| < 1e-5, at any temperature."""
    row = logged(trained(method, temperature=temperature, steps=4, evaluate_every=4))
    assert row["first_ratio"] < 1e-5
    assert row["clip_fraction"] == 0


def test_the_second_epoch_has_another_ratio_and_clips(trained):
    """On reused data the old log-probabilities stay: the clip binds from the second epoch on."""
    row = logged(trained(epochs=3, learning_rate=0.05, max_grad_norm=100, steps=1, evaluate_every=1))
    assert row["first_ratio"] < 1e-5
    assert row["clip_fraction"] > 0.01


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
    runs = []
    for parts in (1, 2, 4):
        run = start(steps=2, micro_batches=parts, aggregate=aggregate, group_size=16, **changed)
        run.optimizer = torch.optim.SGD(run.policy.parameters(), lr=0.1)  # Adam would blow rounding up
        train(run)
        runs.append(run)
    assert moved(runs[0]) > 1e-4
    for run in runs[1:]:
        assert (weights(run) - weights(runs[0])).abs().max() < 1e-6
        for name in ("loss", "grad_norm", "entropy", "clip_fraction", "first_ratio"):
            assert logged(run)[name] == pytest.approx(logged(runs[0])[name], abs=1e-5), name


def test_a_compiled_policy_learns_what_the_plain_one_learns(start, monkeypatch):
    """--compile: the same draws, and weights that differ by rounding. Traced as always, but not put into C++."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    runs = [start("grpo", steps=2, compile=compile) for compile in (False, True)]
    for run in runs:
        run.optimizer = torch.optim.SGD(run.policy.parameters(), lr=0.1)  # Adam would blow rounding up
        train(run)
    assert hasattr(runs[1].policy.extend, "_torchdynamo_orig_callable"), "it was not compiled"
    assert moved(runs[0]) > 1e-3
    assert (weights(runs[0]) - weights(runs[1])).abs().max() < 1e-5
    assert logged(runs[1])["first_ratio"] < 1e-5


@pytest.mark.skipif("MINIRLVR_SLOW_TESTS" not in os.environ, reason="half a minute of compiling: MINIRLVR_SLOW_TESTS=1")
def test_a_compiled_policy_has_the_gradient_of_the_plain_one(start):
    """The same, but put into C++: logits of a batch and their gradient."""
    plain, compiled = (start("grpo", compile=compile).policy for compile in (False, True))
    prompts = torch.tensor([[2, 6], [3, 6]])
    completions = torch.randint(2, 6, (2, 3, 4), generator=torch.Generator().manual_seed(0))
    found = []
    for policy in (plain, compiled):
        logits = policy.completion_logits(prompts, completions)
        logits.square().sum().backward()
        found.append([logits.detach(), *(p.grad for p in policy.parameters())])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


# --- rewards --------------------------------------------------------------------------------------------------------


def test_a_nan_reward_is_refused_by_prompt_before_the_policy_moves(start, monkeypatch):
    """One bad reward is an error that names the prompt; no weight has changed."""

    class Broken(Pairs):
        def verify(self, prompt, completion):
            return math.nan if prompt == "b=" else super().verify(prompt, completion)

    monkeypatch.setitem(TASKS, "pairs", Broken)
    run = start()
    with pytest.raises(ValueError, match="'b='"):
        train(run)
    assert moved(run) == 0


class Flat(Pairs):
    """All answers are wrong."""

    def verify(self, prompt, completion):
        return False


@pytest.mark.parametrize("method", SAMPLING)
def test_flat_groups_teach_nothing_without_a_kl_term(trained, monkeypatch, method):
    """beta = 0, every group flat: gradient exactly 0 (DAPO: no step), weights as they were, and the log says it."""
    monkeypatch.setitem(TASKS, "pairs", Flat)
    run = trained(method)
    row = logged(run)
    assert (row["flat_groups"], row["reward"]) == (1, 0)
    assert row["grad_norm"] == ("" if method == "dapo" else 0)
    assert moved(run) == 0


@pytest.mark.parametrize("changed", [{}, {"epochs": 2, "micro_batches": 2}], ids=["plain", "epochs, parts"])
def test_leaving_flat_groups_out_gives_the_update_of_all_groups(start, monkeypatch, changed):
    """The fast update computes the groups that can move the policy, the plain one all: the same weights and log."""

    class OneFlat(Pairs):
        def verify(self, prompt, completion):
            return prompt != "b=" and super().verify(prompt, completion)

    monkeypatch.setitem(TASKS, "pairs", OneFlat)
    runs = []
    for everything in (False, True):
        if everything:
            monkeypatch.setattr(minirlvr, "teaching_groups", lambda advantages, _: torch.arange(len(advantages)))
        run = start("grpo", steps=3, group_size=16, **changed)
        run.optimizer = torch.optim.SGD(run.policy.parameters(), lr=0.1)  # Adam would blow rounding up
        train(run)
        runs.append(run)
    fast, plain = runs
    assert logged(fast)["flat_groups"] == pytest.approx(1 / 3)
    assert (weights(fast) - weights(plain)).abs().max() < 1e-6
    assert moved(plain) > 1e-3
    for name in ("loss", "grad_norm", "entropy", "clip_fraction", "first_ratio"):
        assert logged(fast)[name] == pytest.approx(logged(plain)[name], abs=1e-5), name


def test_momentum_goes_on_where_every_group_is_flat(start, monkeypatch):
    """A flat batch has gradient 0, which is a step of Adam's all the same: its momentum still moves the weights."""
    run = start("grpo", steps=1, learning_rate=1e-3)
    train(run)
    before = weights(run)
    monkeypatch.setattr(run.task, "verify", lambda prompt, completion: False)
    minirlvr.sampled_step(run)
    assert run.window["grad_norm"][-1] == 0
    assert (weights(run) - before).abs().max() > 1e-5


def test_flat_groups_move_the_policy_with_a_kl_term(start, monkeypatch, pairs_reference):
    """beta > 0: away from the reference, even flat groups pull back to it."""
    monkeypatch.setitem(TASKS, "pairs", Flat)
    run = start(beta=0.5, steps=1, evaluate_every=1)
    with torch.no_grad():
        for p in run.policy.parameters():
            p.mul_(1.2)
    before = weights(run)
    train(run)
    assert logged(run)["grad_norm"] > 1e-3
    assert not torch.equal(weights(run), before)


def test_kl_in_the_loss_and_in_the_reward_both_hold_the_policy_back(trained):
    """A strong KL term, either way, keeps the policy nearer to the reference; both log it, neither without beta."""
    many = {"steps": 30, "evaluate_every": 30, "learning_rate": 5e-3}
    free = trained(**many)
    assert logged(free)["kl"] == ""
    for held in (
        {"kl_in": "loss", "kl_kind": "k3"},
        {"kl_in": "loss", "kl_kind": "k2"},
        {"kl_in": "reward", "kl_kind": "k1"},
    ):
        method = "grpo" if held["kl_in"] == "loss" else "dr_grpo"
        run = trained(method, beta=2.0, **held, **many)
        assert 0 <= logged(run)["kl"] < 0.2, held
        assert logged(run)["pass@1"] < logged(free)["pass@1"] - 0.05, held


def test_kl_in_the_reward_enters_the_reward_and_not_the_loss(start):
    """At the first step policy = reference: no KL, so kl_in=reward with k1 takes the plain step."""
    plain, reward = start(steps=1), start(steps=1, beta=0.5, kl_in="reward", kl_kind="k1")
    for run in (plain, reward):
        run.optimizer = torch.optim.SGD(run.policy.parameters(), lr=0.1)
        train(run)
    assert (weights(plain) - weights(reward)).abs().max() < 1e-6
    assert moved(plain) > 1e-3
    assert logged(reward)["kl"] == pytest.approx(0, abs=1e-6)


# --- DAPO, DLC ------------------------------------------------------------------------------------------------------


def test_dapo_counts_what_it_samples(trained):
    """Steps and completions are counted for every batch drawn, whether or not it was trained on."""
    for method in ("grpo", "dapo"):
        run = trained(method, steps=6, evaluate_every=3, group_size=2)
        assert [row["completions"] for row in run.rows if row["split"] == "train"] == [0, 18, 36]


def test_dapo_waits_until_a_batch_is_mixed(start, monkeypatch):
    """No step on fewer mixed groups than a batch holds; then all trained groups have a right and a wrong answer."""
    seen = []
    ours = minirlvr.update_policy

    def spy(run, batch, advantages, *rest):
        seen.append((run.step, advantages))
        return ours(run, batch, advantages, *rest)

    monkeypatch.setattr(minirlvr, "update_policy", spy)
    train(start("dapo", group_size=2, steps=12))
    assert 0 < len(seen) < 12
    for _, advantages in seen:
        assert advantages.shape == (3, 2)
        assert (advantages != 0).all()


def test_importance_weighs_or_clips_what_dlc_bent(start):
    """none, exact and clipped are three updates; without DLC, or with mu = 0, they are one."""
    for method, changed, different in (("grpo+dlc", {}, True), ("grpo", {}, False), ("grpo+dlc", {"mu": 0.0}, False)):
        found = []
        for importance in ("none", "exact", "clipped"):
            run = start(
                method, importance=importance, mu=changed.get("mu", 2.0), steps=1, evaluate_every=1, max_grad_norm=1e6
            )
            run.optimizer = torch.optim.SGD(run.policy.parameters(), lr=0.1)
            train(run)
            found.append((weights(run), logged(run)))
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
    batch = Rollout(mask, mask, mask, own, sampler, -own)
    same, advantages = apply_importance(batch, torch.tensor([[1.5]]), "exact")
    assert advantages.item() == pytest.approx(6.0)
    assert torch.equal(same.logprobs, own)
    clipped, advantages = apply_importance(batch, torch.tensor([[1.5]]), "clipped")
    assert advantages.item() == 1.5
    assert torch.equal(clipped.logprobs, sampler)


def test_memory_learns_the_correct_completions_or_all(start, monkeypatch):
    """With nothing correct the memory stays when it learns from correct ones, and moves when it learns from all."""
    monkeypatch.setitem(TASKS, "pairs", Flat)
    for data in ("correct", "all"):
        run = start("grpo+dlc", memory_data=data)
        before = copy.deepcopy(run.memory.state_dict())
        train(run)
        assert same_tree(dict(run.memory.state_dict()), dict(before)) == (data == "correct")
        assert (logged(run)["memory_loss"] == "") == (data == "correct")


def test_memory_learns_what_was_drawn(trained):
    """Its cross-entropy falls, and the policy's own weights are not what it moves."""
    run = trained("grpo+dlc", steps=40, evaluate_every=10, learning_rate=1e-9, memory_learning_rate=0.01)
    losses = [row["memory_loss"] for row in run.rows if row["split"] == "train"][1:]
    assert losses[-1] < losses[0] - 0.1
    assert moved(run) < 1e-6


def test_groups_without_a_correct_completion_are_not_read_by_the_memory(start, monkeypatch):
    """They add nothing to its loss, so leaving them out gives the memory of reading them all."""

    class SomeRight(Pairs):
        def verify(self, prompt, completion):
            return prompt == "a=" and super().verify(prompt, completion)

    monkeypatch.setitem(TASKS, "pairs", SomeRight)
    run, plain = start("grpo+dlc"), start("grpo+dlc")
    batch = minirlvr.rollout(run.policy, encode_prompts(run.task, run.task.train), 8, 4, run.generator)
    rewards = minirlvr.verify(run.task, list(run.task.train), batch)
    assert rewards.any(-1).tolist() == [True, False, False]
    minirlvr.train_memory(run, batch, rewards)
    logprobs = token_logprobs(plain.memory.completion_logits(batch.prompts, batch.completions), batch.completions)
    loss = memory_loss(logprobs.flatten(0, 1), batch.mask.flatten(0, 1), rewards.flatten() > 0)
    assert run.window["memory_loss"] == [pytest.approx(loss.item())]
    loss.backward()
    plain.memory_optimizer.step()
    ours, theirs = (torch.cat([p.flatten() for p in r.memory.parameters()]) for r in (run, plain))
    assert (ours - theirs).abs().max() < 1e-5


def test_micro_batches_change_no_memory(start):
    """1, 2 and 3 parts, and completions of different length: the same loss and the same gradient."""
    found = []
    for parts in (1, 2, 3):
        run = start("grpo+dlc", micro_batches=parts, group_size=16)
        batch = minirlvr.rollout(run.policy, encode_prompts(run.task, run.task.train), 16, 4, run.generator)
        minirlvr.train_memory(run, batch, minirlvr.verify(run.task, list(run.task.train), batch))
        found.append((run.window["memory_loss"][0], torch.cat([p.grad.flatten() for p in run.memory.parameters()])))
    assert len(set(batch.mask.sum(-1).flatten().tolist())) > 1
    assert found[0][1].abs().max() > 1e-3
    for loss, gradient in found[1:]:
        assert loss == pytest.approx(found[0][0], abs=1e-6)
        torch.testing.assert_close(gradient, found[0][1], atol=1e-6, rtol=1e-4)


def test_memory_may_start_from_the_reference(start):
    """fresh: a small network of its own shape, by the seed; reference: a copy of the reference, not the same object."""
    copied = start("grpo+dlc", memory_start="reference")
    assert same_tree(dict(copied.memory.state_dict()), dict(copied.reference.state_dict()))
    assert copied.memory is not copied.reference
    assert copied.memory is not copied.policy
    one, again, other = (start("grpo+dlc", seed=seed).memory.head.weight for seed in (0, 0, 1))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)


def test_dlc_samples_otherwise_and_iac_pulls_otherwise(trained):
    """Each calibration changes the run; mu = 0 and alpha = 0 change nothing."""
    plain = trained(steps=1)
    for method, off in (("grpo+dlc", {"mu": 0.0}), ("grpo+iac", {"alpha": 0.0})):
        on = trained(method, steps=1, mu=2.0)
        assert (weights(on) - weights(plain)).abs().max() > 1e-5, method
        assert (weights(trained(method, steps=1, **off)) - weights(plain)).abs().max() < 1e-6, method


def test_group_of_two_and_all_prompts_at_once(trained):
    """G = 2 is enough, and more prompts than there are means all."""
    run = trained(group_size=2, prompts=1000)
    assert run.rows[-1]["completions"] == 2 * 3 * 2


# --- the infinite batch ---------------------------------------------------------------------------------------------


def test_exact_climbs_the_summed_probability_of_the_modes(start):
    """Its gradient is that of the mean over prompts of P / sqrt(P (1 - P)), the deviation held fixed; nothing drawn."""
    run = start("exact", steps=1, evaluate_every=1, max_grad_norm=1e6)
    run.optimizer = torch.optim.SGD(run.policy.parameters(), lr=1.0)
    twin = copy.deepcopy(run.policy)
    success = run.listing.log_probs(twin).exp().sum(-1)[:3]
    (success / (success * (1 - success)).sqrt().detach()).mean().backward()
    train(run)
    for p, q in zip(run.policy.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q.detach() + q.grad, atol=1e-5, rtol=1e-4)
    assert run.rows[-1]["completions"] == 0


def test_exact_is_grpo_with_very_many_completions(start):
    """The sampled gradient of GRPO at G = 400 points where the exact one does, and is as long."""
    found = []
    for method, changed in (("exact", {}), ("grpo", {"group_size": 400, "aggregate": "constant"})):
        run = start(method, steps=1, max_grad_norm=1e6, **changed)
        run.optimizer = torch.optim.SGD(run.policy.parameters(), lr=1.0)
        before = weights(run)
        train(run)
        found.append(weights(run) - before)
    exact, sampled = found
    sampled = sampled * 4  # "constant" divides by T
    assert torch.cosine_similarity(exact, sampled, dim=0) > 0.9
    assert (sampled.norm() / exact.norm()).item() == pytest.approx(1, abs=0.1)


def test_exact_objective_by_hand():
    """P over its deviation; the KL inside the reward is divided too, in the loss it is not; solved is finite."""
    success, kl = torch.tensor([0.2, 0.5]), torch.tensor([0.1, 0.3])
    torch.testing.assert_close(exact_objective(success), torch.tensor([0.5, 1.0]))
    torch.testing.assert_close(exact_objective(success, normalize_std=False), success)
    torch.testing.assert_close(exact_objective(success, kl, 0.5), torch.tensor([0.15 / 0.4, 0.35 / 0.5]))
    torch.testing.assert_close(exact_objective(success, kl, 0.5, kl_in="loss"), torch.tensor([0.45, 0.85]))
    assert exact_objective(torch.tensor([1.0, 0.0])).isfinite().all()


def test_exact_kl_holds_the_policy_back(trained):
    """With beta the exact run stays nearer to the reference, and logs a KL above 0."""
    many = {"steps": 30, "evaluate_every": 30, "learning_rate": 5e-3}
    free, held = trained("exact", **many), trained("exact", beta=1.0, **many)
    assert logged(free)["kl"] == ""
    assert 0 < logged(held)["kl"] < 1
    assert held.rows[-2]["pass@1"] < free.rows[-2]["pass@1"] - 0.02


# --- limits and settings --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["grpo", "exact"])
@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_is_a_users_mistake(start, method, broken):
    """One line that names the run and says what to do, before any weight has moved."""
    run = start(method, seed=3)
    run.policy.head.weight.register_hook(lambda gradient: gradient * broken)
    with pytest.raises(UserError, match=rf"{method} seed 3, step 1.*--learning-rate") as error:
        train(run)
    assert "\n" not in str(error.value)
    assert moved(run) == 0


@pytest.mark.parametrize("method", ["grpo", "grpo+iac+dlc", "exact"])
def test_any_learning_rate_that_is_allowed_ends_in_numbers_or_a_users_mistake(start, method):
    """However large the step: rows of finite numbers, or a UserError; never another exception."""
    for changed in ({"learning_rate": 1e6}, {"learning_rate": 1e3, "beta": 0.1}, {"memory_learning_rate": 1e6}):
        run = start(method, **{"steps": 10, "evaluate_every": 5} | changed)
        try:
            train(run)
        except UserError as error:
            assert "--learning-rate" in str(error)
        for row in run.rows:
            assert all(math.isfinite(v) for v in row.values() if isinstance(v, float))


def test_the_gradient_is_scaled_down_to_its_norm(start):
    """max_grad_norm bounds the step: with SGD at rate 1 the weights move by at most that norm."""
    run = start(max_grad_norm=1e-3, steps=1)
    run.optimizer = torch.optim.SGD(run.policy.parameters(), lr=1.0)
    before = weights(run)
    train(run)
    assert (weights(run) - before).norm().item() == pytest.approx(1e-3, rel=1e-2)
    assert logged(run)["grad_norm"] > 1e-2


def test_the_learning_rate_is_the_one_that_was_set(start):
    """Adam's first step moves the weights by the learning rate: one source for the number."""
    run = start(learning_rate=0.02, steps=1)
    train(run)
    assert moved(run) == pytest.approx(0.02, rel=0.02)
    assert [group["lr"] for group in run.optimizer.param_groups] == [0.02]
    assert [group["weight_decay"] for group in run.optimizer.param_groups] == [0.0]


def test_defaults_are_pinned():
    """Nothing is on by surprise: no entropy bonus, no KL, clips of .2 and .2, DAPO's .28, one epoch."""
    update = Settings().update
    assert (update.entropy_bonus, update.beta, update.epochs, update.micro_batches) == (0, 0, 1, 1)
    assert (Settings().calibration.alpha, Settings().calibration.importance) == (1.0, "none")
    assert (Settings().sampling.temperature, Settings().sampling.group_size) == (1.0, 8)
    assert Settings().experiment.methods == ("grpo", "grpo+iac", "grpo+dlc", "grpo+iac+dlc")
    assert (Settings().experiment.task, Settings().experiment.seeds) == ("sums", 3)
    averages = {"grpo": "sequence", "dr_grpo": "constant", "dapo": "token", "rloo": "token"}
    for name, estimator in ESTIMATORS.items():
        resolved = resolve_update(update, estimator)
        assert (resolved.clip_low, resolved.clip_high) == (0.2, 0.28 if name == "dapo" else 0.2), name
        assert resolved.aggregate == averages.get(name, resolved.aggregate), name


def test_settings_given_are_settings_used():
    """A clip or an average that is given wins over the paper's."""
    update = dataclasses.replace(Settings().update, clip_low=0.1, clip_high=0.5, aggregate="constant")
    resolved = resolve_update(update, ESTIMATORS["dapo"])
    assert (resolved.clip_low, resolved.clip_high, resolved.aggregate) == (0.1, 0.5, "constant")
    zero = resolve_update(dataclasses.replace(update, clip_low=0.0, clip_high=0.0), ESTIMATORS["grpo"])
    assert (zero.clip_low, zero.clip_high) == (0.0, 0.0)


@pytest.mark.parametrize(
    "name", ["", "grpp", "exact+iac", "grpo+iac+iac", "grpo+dlc+iac", "GRPO", "grpo+", "+iac", "grpo iac"]
)
def test_a_method_that_is_none_is_refused(name):
    """One line that lists the estimators."""
    with pytest.raises(UserError, match=r"dr_grpo.*\+iac\+dlc"):
        parse_method(name)


@pytest.mark.parametrize("name", EVERY_METHOD)
def test_every_method_is_read_as_written(name):
    """The estimator may hold plus signs of its own."""
    method = parse_method(name)
    assert method.name == name
    assert method.estimator + "+iac" * method.iac + "+dlc" * method.dlc == name


# --- rows -----------------------------------------------------------------------------------------------------------


def test_rows_are_within_bounds(trained):
    """Every number of every row: shares in [0, 1], modes within their counts, the log where it belongs."""
    shares = ("pass@1", "pass@8", "retained_mass", "share_gained", "worst_drop", "pcmd")
    for method in ("grpo", "dapo+iac+dlc"):
        run = trained(method, steps=6, beta=0.1, evaluate_every=2)
        assert [(row["step"], row["split"]) for row in run.rows] == [
            (s, p) for s in (0, 2, 4, 6) for p in ("train", "heldout")
        ]
        columns = list(run.rows[0])
        assert columns[:4] == ["method", "seed", "step", "split"]
        for row in run.rows:
            assert list(row) == columns
            for name in shares:
                assert 0 <= row[name] <= 1, name
            assert row["pass@1"] <= row["pass@8"]
            assert 1 <= row["effective_modes"] <= 7
            assert row["effective_classes"] <= row["effective_modes"] + 1e-9
            assert 0 <= row["distinct@8"] <= 7
            if row["split"] == "train" and row["step"]:
                for name in ("reward", "flat_groups", "cut_answers"):
                    assert 0 <= row[name] <= 1, name
                assert 1 <= row["length"] <= 4
                assert 0 <= row["entropy"] <= math.log(7)
        start = run.rows[0]
        assert (start["retained_mass"], start["worst_drop"], start["support_lost"]) == (1, 0, 0)


def test_rows_are_the_exact_measures_of_the_policy_now(trained):
    """pass@1 of the last row is the listed mass of the final weights, by an independent sum over the prompts."""
    run = trained(steps=3)
    with torch.no_grad():
        mass = run.listing.log_probs(run.policy).exp().sum(-1)
    for row, rows in zip(run.rows[-2:], (slice(3), slice(3, None)), strict=True):
        assert row["pass@1"] == pytest.approx(mass[rows].mean().item(), abs=1e-6)


def test_the_log_says_what_the_batch_was(trained):
    """A policy that always answers "ab." after any prompt: reward 2/3, all groups flat, none cut, length 3."""
    logits = torch.full((4, 7), -200.0)
    for t, token in enumerate((2, 3, 1, 1)):
        logits[t, token] = 0

    class Sure(ConstantPolicy):
        def forward(self, tokens):  # prompts of "pairs" are two tokens
            table = torch.cat((logits[:1], self.logits, logits[:1], logits[:1]))[: tokens.shape[1]]
            return table.expand(len(tokens), -1, -1)

    run = trained(reference=Sure(logits), steps=1)
    row = logged(run)
    assert row["reward"] == pytest.approx(2 / 3)
    assert (row["flat_groups"], row["cut_answers"], row["length"]) == (1, 0, 3)
    assert row["entropy"] == pytest.approx(0, abs=1e-6)
    assert row["pass@1"] == pytest.approx(2 / 3)


def test_cut_answers_are_logged(trained):
    """A policy that never stops: every answer is cut, none is right, and the log says both."""
    run = trained(reference=ConstantPolicy([-200.0, -200.0, 0, 0, 0, 0, -200.0]), steps=1)
    row = logged(run)
    assert (row["cut_answers"], row["reward"], row["length"], row["flat_groups"]) == (1, 0, 4, 1)


def test_the_log_is_the_mean_since_the_last_row(trained):
    """One row a step, against rows every two steps: the mean of each pair."""
    fine, coarse = trained(steps=4, evaluate_every=1), trained(steps=4, evaluate_every=2)
    assert torch.equal(weights(fine), weights(coarse))
    one = [row for row in fine.rows if row["split"] == "train"]
    two = [row for row in coarse.rows if row["split"] == "train"]
    for name in ("reward", "grad_norm", "length", "entropy"):
        assert two[1][name] == pytest.approx((one[1][name] + one[2][name]) / 2), name
        assert two[2][name] == pytest.approx((one[3][name] + one[4][name]) / 2), name


def test_evaluating_does_not_change_the_run(trained):
    """Measures draw no random numbers and leave the policy's mode as it was."""
    run = trained(steps=3, evaluate_every=1)
    assert torch.equal(weights(run), weights(trained(steps=3, evaluate_every=3)))
    assert run.policy.training


def test_training_learns(trained):
    """Forty steps of each plain method make the policy right more often: signs, masks and ratios are all in it."""
    for method in ESTIMATORS:
        run = trained(method, steps=40, evaluate_every=40, learning_rate=5e-3)
        assert run.rows[-2]["pass@1"] > run.rows[0]["pass@1"] + 0.1, method
