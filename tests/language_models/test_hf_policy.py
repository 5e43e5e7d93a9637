"""Hugging Face models read like the toy policy: every way to read, modes and precision, LoRA adapters."""
# ruff: noqa: E402 (the whole file is skipped before it imports what is not there)

import copy

import pytest

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

import torch
from conftest import generator, step_by_step

from language_models.loading import load_model
from language_models.policy import HFPolicy
from minirlvr import rollout, token_logprobs
from tests.language_models.models import (
    CLOSE,
    KINDS,
    VOCAB,
    lora_policy,
    one_by_one,
    random_tokens,
    save_tiny_models,
    tiny,
    tiny_model,
    train_a_step,
    uneven_prompts,
)
from toy_tasks import Padded, UserError


def gradients(policy, read, prompts, completions):
    """Name -> gradient of a fixed random sum of the logits (Q, G, T, V) that `read` gives."""
    pull = torch.randn(*completions.shape, policy.vocab_size, generator=generator(4))
    policy.zero_grad()
    (read(policy, prompts, completions).float() * pull).sum().backward()
    return {name: p.grad.clone() for name, p in policy.named_parameters() if p.requires_grad}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Kind -> a folder with a tiny model and a tokenizer."""
    return save_tiny_models(tmp_path_factory.mktemp)


# --- one tree, many ways to read it ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("G", "T"), [(1, 1), (3, 1), (1, 4), (3, 5)])
def test_every_way_to_read_a_group_gives_the_same_logits(kind, G, T):
    """Prompt read once, token by token from the cache, with checkpointing, and N separate texts without padding."""
    policy, checkpointed = tiny(kind), tiny(kind, checkpointing=True)
    prompts, completions = uneven_prompts(), random_tokens(3, G, T, seed=2)
    expected = one_by_one(policy, prompts, completions)
    torch.testing.assert_close(policy.completion_logits(prompts, completions), expected, **CLOSE)
    torch.testing.assert_close(checkpointed.completion_logits(prompts, completions), expected, **CLOSE)
    with torch.no_grad():
        torch.testing.assert_close(step_by_step(policy, prompts, completions), expected, **CLOSE)
        torch.testing.assert_close(step_by_step(checkpointed, prompts, completions), expected, **CLOSE)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_equal_those_of_separate_texts(kind):
    """Backward through the shared prompt, and through checkpoints, is backward through N texts of their own."""
    prompts, completions = uneven_prompts(), random_tokens(3, 3, 5, seed=2)
    expected = gradients(tiny(kind), one_by_one, prompts, completions)
    assert max(gradient.abs().max() for gradient in expected.values()) > 0.1
    for checkpointing in (False, True):
        found = gradients(tiny(kind, checkpointing), HFPolicy.completion_logits, prompts, completions)
        for name, gradient in expected.items():
            scale = gradient.abs().max().clamp(min=1)
            torch.testing.assert_close(found[name] / scale, gradient / scale, **CLOSE, msg=name)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("padding", [1, 7])
def test_left_padding_changes_no_logits(kind, padding):
    """The same text alone and padded: the same logits at every token."""
    policy, text = tiny(kind), random_tokens(2, 5)
    padded = torch.cat((torch.full((2, padding), 3), text), 1)
    real = (torch.arange(padding + 5) >= padding).expand(2, -1)
    torch.testing.assert_close(policy(Padded(padded, real))[:, padding:], policy(Padded.of(text)), **CLOSE)


@pytest.mark.parametrize("kind", KINDS)
def test_neighbours_change_no_logits(kind):
    """Other prompts and other completions beside it leave a completion's logits as they are."""
    policy, prompts, completions = tiny(kind), uneven_prompts(), random_tokens(3, 3, 4, seed=2)
    together = policy.completion_logits(prompts, completions)
    for q, length in enumerate((5, 3, 1)):
        prompt = Padded.of(prompts.tokens[q : q + 1, -length:])
        alone = policy.completion_logits(prompt, completions[q : q + 1, 1:2])
        torch.testing.assert_close(alone[0, 0], together[q, 1], **CLOSE)


@pytest.mark.parametrize("kind", KINDS)
def test_what_stands_after_the_stop_changes_nothing_before_it(kind):
    """Padding behind a completion, or anything else there, is not seen by earlier tokens."""
    policy, prompts, completions = tiny(kind), uneven_prompts(), random_tokens(3, 2, 6, seed=2)
    before = policy.completion_logits(prompts, completions)
    for filling in (3, 0, VOCAB - 1):
        changed = completions.clone()
        changed[..., 3:] = filling
        torch.testing.assert_close(policy.completion_logits(prompts, changed)[:, :, :4], before[:, :, :4], **CLOSE)


def test_only_what_the_batch_calls_padding_is_hidden():
    """The id that pads is a token like any other in a completion, at its beginning, and where a prompt begins."""
    policy, prompts, completions = tiny("llama"), uneven_prompts(), random_tokens(3, 2, 5, seed=2)
    completions[..., 2] = 3
    completions[0, 0, 0] = 3
    prompts.tokens[0, 0] = prompts.tokens[1, 2] = 3  # the first token of the first two prompts
    expected = one_by_one(policy, prompts, completions)
    torch.testing.assert_close(policy.completion_logits(prompts, completions), expected, **CLOSE)
    torch.testing.assert_close(step_by_step(policy, prompts, completions), expected, **CLOSE)


@pytest.mark.parametrize("kind", KINDS)
def test_of_a_prompt_of_padding_alone_the_last_token_is_read(kind):
    """An empty prompt has a next token too (many models begin a text with the id that pads), and no NaN."""
    policy, completions = tiny(kind), random_tokens(1, 2, 3)
    empty, one = torch.full((1, 4), 3), torch.tensor([[3]])
    logits = policy.completion_logits(Padded(empty, torch.zeros_like(empty, dtype=torch.bool)), completions)
    torch.testing.assert_close(logits, policy.completion_logits(Padded.of(one), completions), **CLOSE)
    torch.testing.assert_close(logits[0, 0, 0], policy.model(one).logits[0, -1], **CLOSE)
    logits.sum().backward()
    assert all(p.grad.isfinite().all() for p in policy.parameters())


def test_padding_is_what_the_batch_says():
    """No id pads by itself: the same tokens give other logits where the first is padding, and the model's where not."""
    policy, text = tiny("llama"), torch.tensor([[3, 7, 8]])
    hidden = policy(Padded(text, torch.tensor([[False, True, True]])))
    assert (policy(Padded.of(text)) - hidden)[:, 1:].abs().max() > 1e-3
    torch.testing.assert_close(policy(Padded.of(text)), policy.model(input_ids=text).logits, **CLOSE)


def test_a_text_longer_than_the_model_reads_is_refused():
    """gpt2 has a row for each position, and no more; padding may be wider, text may not."""
    policy = tiny("gpt2")
    wide = torch.cat((torch.full((1, 10), 3), random_tokens(1, 30)), 1)
    assert policy(Padded(wide, torch.arange(40)[None] >= 10)).isfinite().all()
    with pytest.raises(UserError, match="a text of 33 tokens; this model reads 32"):
        policy(Padded.of(random_tokens(1, 33)))


def test_models_that_cannot_be_padded_and_cached_are_refused():
    """A recurrent model has no positions to hand it."""
    config = transformers.MambaConfig(vocab_size=VOCAB, hidden_size=8, num_hidden_layers=1, state_size=2)
    with pytest.raises(UserError, match="MambaForCausalLM does not take position_ids"):
        HFPolicy(transformers.MambaForCausalLM(config))


# --- modes, dropout, generation settings, precision -----------------------------------------------------------------


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_dropout_is_off_in_every_pass_and_the_mode_comes_back(checkpointing, training):
    """gpt2 has dropout 0.1 in three places: the first ratio would not be 1 with it."""
    model = tiny_model("gpt2")
    assert model.config.attn_pdrop == model.config.resid_pdrop == model.config.embd_pdrop == 0.1
    policy = HFPolicy(model, checkpointing).train(training)
    prompts, completions = uneven_prompts(), random_tokens(3, 2, 4, seed=2)
    logits = policy.completion_logits(prompts, completions)
    assert model.training == training
    expected = one_by_one(tiny("gpt2").eval(), prompts, completions)
    torch.testing.assert_close(logits, expected, **CLOSE)
    with torch.no_grad():
        torch.testing.assert_close(step_by_step(policy, prompts, completions), expected, **CLOSE)
    torch.testing.assert_close(one_by_one(policy, prompts, completions), expected, **CLOSE)  # the model's own pass
    assert model.training == training
    assert model.config.attn_pdrop == model.config.resid_pdrop == model.config.embd_pdrop == 0


def test_dropout_kept_as_a_number_is_off_too():
    """llama's attention keeps its dropout as a plain number; checkpointing needs training mode, where it would act."""
    policy = tiny("llama", checkpointing=True, attention_dropout=0.5).train()
    text = Padded.of(random_tokens(2, 6))
    torch.testing.assert_close(policy(text), tiny("llama").eval()(text), **CLOSE)


def test_sampling_keeps_its_cache_before_and_after_a_checkpointed_update():
    """Each step reads one token; transformers drops the cache in training mode with checkpointing."""
    policy = tiny("llama", checkpointing=True).train()
    lengths = []
    policy.model.model.layers[0].register_forward_pre_hook(
        lambda module, args: lengths.append(args[0].shape[1]) if not torch.is_grad_enabled() else None
    )
    for _ in range(2):
        batch = rollout(policy, uneven_prompts(), 2, 4, generator(), fixed_length=True)
        token_logprobs(policy.completion_logits(batch.padded, batch.completions), batch.completions).sum().backward()
    assert lengths == [5, 1, 1, 1] * 2


def test_checkpointing_recomputes_the_layers():
    """With it each layer runs again in the backward pass, which is what saves the memory; without it, it does not."""
    runs = {}
    for checkpointing in (False, True):
        policy, runs[checkpointing] = tiny("llama", checkpointing), 0

        def count(module, args, key=checkpointing):
            runs[key] += 1

        policy.model.model.layers[0].mlp.register_forward_pre_hook(count)
        policy.completion_logits(uneven_prompts(), random_tokens(3, 2, 1)).sum().backward()
    assert runs == {False: 1, True: 2}


def test_the_models_generation_settings_are_never_used():
    """A generation_config that cuts to one token and punishes repetition moves no log-probability."""
    policy = tiny("qwen2")
    plain = rollout(policy, uneven_prompts(), 4, 5, generator())
    policy.model.generation_config.update(do_sample=True, temperature=0.1, top_k=1, repetition_penalty=5.0)
    again = rollout(policy, uneven_prompts(), 4, 5, generator())
    assert all(torch.equal(one, other) for one, other in zip(plain, again, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_ratio_is_1(kind):
    """Drawn token by token and scored in one pass: |ratio - 1| < 1e-5 in float32."""
    policy = tiny(kind)
    batch = rollout(policy, uneven_prompts(), 8, 6, generator())
    new = token_logprobs(policy.completion_logits(batch.padded, batch.completions), batch.completions)
    assert (((new - batch.logprobs).exp() - 1) * batch.mask).abs().max() < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_half_precision_weights(kind, dtype):
    """Sampling is finite, and old log-probabilities from the same pass leave the ratio within 1e-3 of 1."""
    policy = tiny(kind).to(dtype)
    batch = rollout(policy, uneven_prompts(), 4, 5, generator())
    with torch.no_grad():
        old = token_logprobs(policy.completion_logits(batch.padded, batch.completions), batch.completions)
    new = token_logprobs(policy.completion_logits(batch.padded, batch.completions), batch.completions)
    assert new.dtype == torch.float32
    assert ((new - old).exp() - 1).abs().max() < 1e-3
    assert ((new - batch.logprobs) * batch.mask).abs().max() < 0.3  # token by token rounds otherwise
    new.sum().backward()
    assert all(p.grad.isfinite().all() for p in policy.parameters())


# --- LoRA -----------------------------------------------------------------------------------------------------------


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


def test_a_lora_policy_starts_equal_to_its_base(saved, kind):
    """B is 0; adapters lie on every linear layer but the head, and they alone are trained, in float32."""
    policy = lora_policy(saved[kind], dtype="bfloat16")
    base, _ = load_model(str(saved[kind]), dtype="bfloat16")
    text = Padded.of(random_tokens(2, 5))
    assert torch.equal(policy(text), base(text))
    trained = {name: p for name, p in policy.named_parameters() if p.requires_grad}
    assert trained
    assert all("lora_" in name and p.dtype == torch.float32 for name, p in trained.items())
    adapted = {name.split(".lora_")[0] for name in trained}
    linear = {name for name, m in base.named_modules() if type(m).__name__ in ("Linear", "Conv1D")}
    assert len(adapted) == len([name for name in linear if "lm_head" not in name]) >= 8


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_lora_step_moves_the_adapters_alone_and_not_the_reference(saved, kind, checkpointing):
    """Every byte of the base stays, and the reference's logits are the untouched base's, however they are read."""
    policy = lora_policy(saved[kind], gradient_checkpointing=checkpointing)
    reference, base = policy.reference(), tiny(kind)
    frozen = {name: p.clone() for name, p in policy.named_parameters() if not p.requires_grad}
    prompts, completions = uneven_prompts(), random_tokens(3, 2, 4, seed=2)
    train_a_step(policy)
    assert all(torch.equal(p, frozen[name]) for name, p in policy.named_parameters() if name in frozen)
    expected = base.completion_logits(prompts, completions)
    assert (policy.completion_logits(prompts, completions) - expected).abs().max() > 1e-3
    torch.testing.assert_close(reference.completion_logits(prompts, completions), expected, **CLOSE)
    torch.testing.assert_close(step_by_step(reference, prompts, completions), expected, **CLOSE)
    torch.testing.assert_close(reference(prompts), base(prompts), **CLOSE)
    assert (policy.completion_logits(prompts, completions) - expected).abs().max() > 1e-3  # the adapters are on again
    assert any(p.requires_grad for p in policy.parameters())


def test_lora_gradients_equal_those_of_separate_texts(saved, kind):
    """With and without checkpointing, adapters that have moved off 0."""
    prompts, completions = uneven_prompts(), random_tokens(3, 2, 4, seed=2)
    found = []
    for checkpointing, read in (
        (False, one_by_one),
        (False, HFPolicy.completion_logits),
        (True, HFPolicy.completion_logits),
    ):
        policy = lora_policy(saved[kind], gradient_checkpointing=checkpointing)
        with torch.no_grad():
            for p in policy.parameters():
                if p.requires_grad:
                    p.copy_(0.3 * torch.randn(p.shape, generator=generator(5)))
        found.append(gradients(policy, read, prompts, completions))
    for name, gradient in found[0].items():
        scale = gradient.abs().max().clamp(min=1)
        assert gradient.abs().max() > 0, name
        for other in found[1:]:
            torch.testing.assert_close(other[name] / scale, gradient / scale, **CLOSE, msg=name)


def test_lora_is_the_same_at_every_load_and_uses_no_global_randomness(saved):
    """Whatever the global seed is, and it is left as it was."""
    policies = []
    with torch.random.fork_rng(devices=[]):
        for seed in (1, 2):
            torch.manual_seed(seed)
            before = torch.get_rng_state()
            policies.append(lora_policy(saved["llama"]))
            assert torch.equal(torch.get_rng_state(), before)
    one, other = policies
    assert all(torch.equal(p, q) for p, q in zip(one.parameters(), other.parameters(), strict=True))


def test_lora_adds_twice_b_a(saved):
    """alpha = 2 rank, so the scale alpha / rank is 2 at every rank."""
    for rank in (2, 4):
        policy = lora_policy(saved["llama"], rank)
        train_a_step(policy)
        layer = policy.model.base_model.model.model.layers[0].mlp.up_proj
        a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight  # (rank, D), (hidden, rank)
        x = torch.randn(3, 16, generator=generator())
        assert b.abs().max() > 1e-3
        torch.testing.assert_close(layer(x), x @ (layer.base_layer.weight + 2 * b @ a).T, **CLOSE)


def test_without_lora_there_is_no_reference_to_switch_to():
    """The caller copies; the copy does not move."""
    policy = tiny("llama")
    with pytest.raises(UserError, match="no LoRA adapters to switch off"):
        policy.reference()
    copied, text = copy.deepcopy(policy), Padded.of(random_tokens(2, 5))
    before = policy(text)
    train_a_step(policy)
    assert torch.equal(copied(text), before)
    assert (policy(text) - before).abs().max() > 1e-3
