"""DLC in transformers' own sampling."""

import torch
import transformers
from torch import Tensor

from language_models.policy import HFPolicy
from minirlvr import Policy, calibrated_logits
from toy_tasks import Padded, UserError


class MemoryLogitsProcessor(transformers.LogitsProcessor):
    """DLC for `model.generate`: samples from softmax(policy logits - mu * memory logits).

    `memory` is a toy Policy or an HFPolicy over the same tokens; it keeps its own key/value cache and reads each new
    token once. Whenever the texts are not the last ones with one more token each (a new prompt, beams reordered), it
    reads them from the start, so one processor serves any number of generations. `pad` is the id at the left of the
    prompts: the leading run of it is padding, the same id later is a token. Raises UserError for any other kind of
    memory.

        tokenizer.padding_side = "left"
        model.generate(**tokenizer(prompts, return_tensors="pt", padding=True), do_sample=True,
                       temperature=1.0, top_k=0, top_p=1.0, repetition_penalty=1.0,
                       logits_processor=[MemoryLogitsProcessor(memory, 0.5, tokenizer.pad_token_id)])

    The four settings in the middle are needed: generate's own default is top_k=50, the model's generation_config may
    hold others, and what either cuts is not sampled from that softmax. (A model with more of them, such as min_p or
    no_repeat_ngram_size, shows them in model.generation_config.) Temperature divides after mu, as in `rollout`.
    """

    def __init__(self, memory: Policy | HFPolicy, mu: float, pad: int):
        if not isinstance(memory, Policy | HFPolicy):
            raise UserError(f"the memory is a {type(memory).__name__}; wrap a model of transformers as HFPolicy(model)")
        self.memory, self.mu, self.pad = memory, mu, pad
        self.seen: Tensor | None = None  # (B, S) what the cache has read
        self.cache = None

    @torch.no_grad()
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """input_ids (B, S), the policy's scores (B, V) of the next token -> calibrated scores (B, V).

        Raises UserError where the memory has another vocabulary than the policy.
        """
        check_vocabulary(scores.shape[-1], memory_vocab_size(self.memory))
        if self.seen is not None and torch.equal(input_ids[:, :-1], self.seen):
            logits, self.cache = self.memory.step(input_ids[:, -1:], self.cache)  # (B, 1, V)
        else:
            logits, self.cache = self.memory.start(Padded(input_ids, text_mask(input_ids, self.pad)), 1)  # (B, 1, V)
        self.seen = input_ids.clone()
        return calibrated_logits(scores, logits[:, 0], self.mu)


def text_mask(tokens: Tensor, pad: int) -> Tensor:
    """(Q, T) bool: False on the padding before the first real token, True from there on, whatever comes.

    >>> text_mask(torch.tensor([[0, 0, 5, 0, 7]]), pad=0)
    tensor([[False, False,  True,  True,  True]])
    """
    return (tokens != pad).cumsum(1) > 0


def memory_vocab_size(memory: Policy | HFPolicy) -> int:
    """Width of a memory network's logits (V)."""
    return memory.vocab_size if isinstance(memory, HFPolicy) else memory.head.weight.shape[0]


def check_vocabulary(policy_vocab: int, memory_vocab: int) -> None:
    """DLC subtracts logits, so both networks need the same tokens. Raises UserError where the widths differ.

    >>> check_vocabulary(14, 14)
    >>> check_vocabulary(14, 17)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    toy_tasks.task.UserError: the policy has logits for 14 tokens, the memory for 17; take a memory with the same ...
    """
    if policy_vocab != memory_vocab:
        raise UserError(
            f"the policy has logits for {policy_vocab} tokens, the memory for {memory_vocab}; "
            "take a memory with the same vocabulary"
        )
