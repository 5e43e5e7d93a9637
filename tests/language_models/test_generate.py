"""DLC in transformers' own sampling draws from the distribution that rollout draws from."""
# ruff: noqa: E402 (the whole file is skipped before it imports what is not there)

import contextlib

import pytest

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

import torch
from conftest import generator, tiny_policy

from language_models.generate import MemoryLogitsProcessor
from language_models.policy import HFPolicy
from minirlvr import rollout
from tests.language_models.models import CLOSE, VOCAB, random_tokens, tiny, tiny_model, uneven_prompts
from toy_tasks import Padded, UserError

PAD_ID = 3  # another than the toy tasks': what stands at the left of uneven_prompts()

PLAIN = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0}  # nothing cut, nothing bent


def generate(model, prompts: Padded, processors=(), seed=0, length=5, **options):
    """tokens (B, T), and the scores (B, T, V) they were drawn from, as log-probabilities."""
    torch.manual_seed(seed)
    options = {"do_sample": True, "max_new_tokens": length} | PLAIN | options
    result = model.generate(
        prompts.tokens, attention_mask=prompts.real.long(), logits_processor=list(processors),
        eos_token_id=None, pad_token_id=PAD_ID, output_scores=True, return_dict_in_generate=True, **options,
    )  # fmt: skip
    return result.sequences[:, prompts.tokens.shape[1] :], torch.stack(result.scores, 1).log_softmax(-1)


def bent(policy, memory, prompts, tokens, mu, temperature=1.0):
    """(B, T, V): what DLC samples from, recomputed in one pass without a cache."""
    logits, remembered = (p.completion_logits(prompts, tokens[:, None])[:, 0] for p in (policy, memory))
    return ((logits - mu * remembered) / temperature).log_softmax(-1).detach()


MEMORIES = {"hf": lambda: tiny("gpt2", seed=7), "toy": lambda: tiny_policy(VOCAB, seed=7)}


@pytest.mark.parametrize("kind_of_memory", MEMORIES)
@pytest.mark.parametrize("options", [{}, {"temperature": 0.6}, {"do_sample": False}])
def test_scores_of_generate_are_policy_minus_mu_memory(kind_of_memory, options):
    """Step by step with two caches equals one plain pass, for prompts of different length."""
    policy, memory, prompts = tiny("llama"), MEMORIES[kind_of_memory](), uneven_prompts()
    processor = MemoryLogitsProcessor(memory, 0.7, pad=PAD_ID)
    tokens, scores = generate(policy.model, prompts, [processor], **options)
    expected = bent(policy, memory, prompts, tokens, 0.7, options.get("temperature", 1.0))
    torch.testing.assert_close(scores, expected, **CLOSE)
    if options.get("do_sample") is False:
        assert torch.equal(tokens, expected.argmax(-1))


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_generate_draws_from_the_distribution_that_rollout_draws_from(temperature):
    """The scores of rollout's own tokens, forced on generate, are rollout's sampler_logprobs."""
    policy, memory = tiny("llama"), tiny("qwen2", seed=7)
    prompts = uneven_prompts()
    batch = rollout(policy, prompts, 1, 5, generator(), temperature, memory, 0.7, fixed_length=True)
    forced = torch.cat((prompts.tokens, batch.completions[:, 0]), 1)  # (Q, P + T)

    class Force(transformers.LogitsProcessor):
        """Takes note of the scores, then leaves one token."""

        def __init__(self):
            self.scores = []

        def __call__(self, input_ids, scores):
            self.scores.append((scores / temperature).log_softmax(-1))
            return torch.full_like(scores, -torch.inf).scatter(1, forced[:, input_ids.shape[1], None], 0.0)

    force = Force()
    tokens, _ = generate(policy.model, prompts, [MemoryLogitsProcessor(memory, 0.7, PAD_ID), force])
    assert torch.equal(tokens, batch.completions[:, 0])
    found = torch.stack(force.scores, 1).gather(-1, tokens[..., None])[..., 0]
    torch.testing.assert_close(found, batch.sampler_logprobs[:, 0], **CLOSE)


def test_mu_0_is_plain_generate_and_mu_above_0_is_not():
    """The same seed, the same tokens and scores."""
    policy, memory = tiny("llama"), tiny("gpt2", seed=7)
    plain = generate(policy.model, uneven_prompts())
    with_0 = generate(policy.model, uneven_prompts(), [MemoryLogitsProcessor(memory, 0.0, PAD_ID)])
    assert torch.equal(plain[0], with_0[0])
    torch.testing.assert_close(plain[1], with_0[1])
    bent_scores = generate(policy.model, uneven_prompts(), [MemoryLogitsProcessor(memory, 0.7, PAD_ID)])[1]
    assert (bent_scores[:, 0] - plain[1][:, 0]).abs().max() > 0.1


@contextlib.contextmanager
def reads_of(memory: HFPolicy):
    """The shapes that `memory` reads inside."""
    shapes, read = [], memory._read
    memory._read = lambda tokens, *rest, **named: shapes.append(tuple(tokens.shape)) or read(tokens, *rest, **named)
    try:
        yield shapes
    finally:
        memory._read = read


def test_the_memory_reads_each_token_once_and_notices_a_new_generation():
    """One processor, three generations: the same prompts again, then others of another number and length."""
    policy, memory = tiny("llama"), tiny("gpt2", seed=7)
    processor, short = MemoryLogitsProcessor(memory, 0.7, PAD_ID), Padded.of(random_tokens(2, 3, seed=9))
    with reads_of(memory) as shapes:
        for prompts, seed in ((uneven_prompts(), 0), (uneven_prompts(), 1), (short, 0)):
            shapes.clear()
            tokens, scores = generate(policy.model, prompts, [processor], seed=seed)
            assert shapes == [tuple(prompts.tokens.shape)] + [(len(prompts.tokens), 1)] * 4
            with torch.no_grad():
                torch.testing.assert_close(scores, bent(policy, memory, prompts, tokens, 0.7), **CLOSE)


def test_beams_that_change_places_are_read_again():
    """Beam search moves rows: the scores stay those of the texts that stand there."""
    policy, memory = tiny("llama"), tiny("gpt2", seed=7)
    processor, checked = MemoryLogitsProcessor(memory, 0.7, PAD_ID), []

    class Check(transformers.LogitsProcessor):
        def __call__(self, input_ids, scores):
            fresh = MemoryLogitsProcessor(memory, 0.7, PAD_ID)
            checked.append((processor(input_ids, scores) - fresh(input_ids, scores)).abs().max().item())
            return processor(input_ids, scores)

    prompts = random_tokens(2, 3)
    policy.model.generate(
        prompts, attention_mask=torch.ones_like(prompts), num_beams=3, do_sample=False, max_new_tokens=5,
        logits_processor=[Check()], eos_token_id=None, pad_token_id=PAD_ID,
    )  # fmt: skip
    assert len(checked) == 5
    assert max(checked) < 1e-5


def test_a_trained_memory_pushes_away_from_what_it_remembers():
    """What DLC is for: a token that the memory knows is drawn less often than the policy would."""
    policy, memory, prompt = tiny("llama"), tiny("gpt2", seed=7), Padded.of(random_tokens(1, 3))
    with torch.no_grad():
        remembered = memory.start(prompt, 1)[0].argmax()
        plain = policy.start(prompt, 1)[0][0, 0].softmax(-1)[remembered]
    scores = generate(policy.model, prompt, [MemoryLogitsProcessor(memory, 0.7, PAD_ID)], length=1)[1]
    assert scores[0, 0, remembered].exp() < plain


@pytest.mark.parametrize("kind_of_memory", MEMORIES)
def test_the_pad_id_reaches_the_memory(kind_of_memory):
    """The memory is told the id that pads the prompts; told another, it reads the padding. It is left as it was."""
    policy, memory, prompts = tiny("llama"), MEMORIES[kind_of_memory](), uneven_prompts()
    attributes = set(vars(memory))
    tokens, scores = generate(policy.model, prompts, [MemoryLogitsProcessor(memory, 0.7, pad=0)])
    expected = bent(policy, memory, prompts, tokens, 0.7)
    assert (scores - expected).abs().max() > 1e-3
    tokens, scores = generate(policy.model, prompts, [MemoryLogitsProcessor(memory, 0.7, pad=PAD_ID)])
    torch.testing.assert_close(scores, bent(policy, memory, prompts, tokens, 0.7), **CLOSE)
    assert set(vars(memory)) == attributes


@pytest.mark.parametrize("memory", [tiny("gpt2", vocab_size=VOCAB - 4), tiny_policy(VOCAB - 4)])
def test_a_memory_with_another_vocabulary_is_refused(memory):
    """Before it reads an id that it does not have."""
    message = f"the policy has logits for {VOCAB} tokens, the memory for {VOCAB - 4}"
    with pytest.raises(UserError, match=message):
        prompts = Padded.of(torch.tensor([[VOCAB - 1, 5]]))
        generate(tiny_model("llama"), prompts, [MemoryLogitsProcessor(memory, 0.5, PAD_ID)])
