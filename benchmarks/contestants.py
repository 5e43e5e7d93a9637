"""Who does the step of `workload.Work`: minirlvr, Hugging Face's model in a plain loop, and TRL's GRPOTrainer.

All take the same prompts, draw the same number of tokens, ask the same verifier, and learn with AdamW and a clipped
gradient. A contestant has `step()`; `tokens` and `flat` say how many tokens its last step made and which share of its
groups was flat (all right or all wrong); `parts` names its methods or functions to be timed one by one.
"""

import os
import tempfile

import torch
import torch.nn.functional as F

import minirlvr
from benchmarks.timing import STEP_PARTS, clock
from benchmarks.workload import Checksum, Work, make_learner, step
from minirlvr import grpo_advantages
from toy_tasks.task import PAD, PAD_TEXT, STOP_TEXT

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is fetched: every model here is made on the spot


class Ours:
    """minirlvr's own step."""

    def __init__(self, work: Work, method: str, device: str):
        self.work, self.learner = work, make_learner(work, method, device)
        self.policy_size = sum(p.numel() for p in self.learner.policy.parameters())
        self.owner, self.parts = minirlvr, STEP_PARTS

    def step(self) -> None:
        step(self.learner)

    @property
    def tokens(self) -> int:
        return round(self.learner.logged["length"][-1] * self.work.prompts * self.work.group_size)

    @property
    def flat(self) -> float:
        return self.learner.logged["flat_groups"][-1]


def llama(work: Work, vocabulary: int):
    """A LlamaForCausalLM of minirlvr's size and kind, with random weights and no stop token."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=work.width,
        intermediate_size=work.width * 11 // 4,
        num_hidden_layers=work.layers,
        num_attention_heads=work.heads,
        num_key_value_heads=work.heads,
        max_position_embeddings=work.prompt_tokens + work.new_tokens,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=PAD,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config)


class HuggingFace:
    """The same step with Hugging Face's model: generate, verify, one forward and backward pass, AdamW."""

    def __init__(self, work: Work, device: str):
        self.work, self.device, self.task = work, device, Checksum(work)
        self.model = llama(work, self.task.vocab_size).to(device)
        self.policy_size = sum(p.numel() for p in self.model.parameters())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=work.learning_rate, weight_decay=0.0, fused=True)
        self.owner, self.parts = self, {"rollout": ("generate",), "rewards": ("reward",), "update": ("update",)}

    def generate(self) -> torch.Tensor:
        """Prompts and completions (N, P+T)."""
        prompts = self.task.encode_prompts(self.task.train).to(self.device)
        rows = prompts.tokens.repeat_interleave(self.work.group_size, 0)  # (N, P)
        options = {"do_sample": True, "top_k": 0, "top_p": 1.0, "temperature": 1.0, "use_cache": True}
        options |= {"max_new_tokens": self.work.new_tokens, "attention_mask": torch.ones_like(rows)}
        return self.model.generate(rows, **options)

    def reward(self, rows: torch.Tensor) -> torch.Tensor:
        """Advantages (Q, G) of prompts and completions (N, P+T)."""
        completions = rows[:, self.work.prompt_tokens :].tolist()
        prompts = [prompt for prompt in self.task.train for _ in range(self.work.group_size)]
        right = [self.task.verify(p, self.task.decode(ids)) for p, ids in zip(prompts, completions, strict=True)]
        rewards = torch.tensor(right, dtype=torch.float32, device=self.device).view(-1, self.work.group_size)
        self.tokens, self.flat = sum(map(len, completions)), flat_share(rewards)
        return grpo_advantages(rewards)

    def update(self, rows: torch.Tensor, advantages: torch.Tensor) -> None:
        """One step up the clipped objective; on the batch's first update the old log-probabilities are the new ones."""
        T = self.work.new_tokens
        logits = self.model(rows, use_cache=False, logits_to_keep=T + 1).logits[:, :-1]  # (N, T, V)
        logprobs = -F.cross_entropy(logits.transpose(1, 2), rows[:, -T:], reduction="none")  # (N, T)
        ratio, advantage = (logprobs - logprobs.detach()).exp(), advantages.reshape(-1, 1)
        loss = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()

    def step(self) -> None:
        rows = self.generate()
        self.update(rows, self.reward(rows))


def flat_share(rewards: torch.Tensor) -> float:
    """Share of the groups (Q, G) with one reward for all.

    >>> flat_share(torch.tensor([[1.0, 1.0], [0.0, 1.0]]))
    0.5
    """
    return (rewards == rewards[:, :1]).all(1).float().mean().item()


class TRL:
    """TRL's GRPOTrainer on the same model, prompts and verifier, without logging, saving, reports or evaluation.

    A trainer runs many steps by itself, so `burst` lets it, and a callback reads the clock at the beginning of each:
    from one beginning to the next is one step. The first of a burst, where the trainer warms up, does not count.
    """

    LONGEST_BURST = 8

    def __init__(self, work: Work, device: str):
        from datasets import Dataset
        from transformers import PrinterCallback
        from trl import GRPOTrainer

        self.work, self.device, self.task = work, device, Checksum(work)
        self.folder = tempfile.TemporaryDirectory()
        self.began: list[float] = []  # when each step of the burst began
        prompts = self.task.train * (self.LONGEST_BURST + 2)  # so long that no burst comes to the end of an epoch
        self.trainer = GRPOTrainer(
            model=llama(work, self.task.vocab_size),
            reward_funcs=self.reward,
            args=self.config(),
            train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts]),
            processing_class=tokenizer(self.task),
            callbacks=[self.clock_callback()],
        )
        self.trainer.remove_callback(PrinterCallback)
        self.policy_size = sum(p.numel() for p in self.trainer.model.parameters())

    def config(self):
        """The settings that make it the same step; everything else as TRL has it."""
        from trl import GRPOConfig

        quiet = {"logging_strategy": "no", "save_strategy": "no", "eval_strategy": "no", "report_to": "none"}
        return GRPOConfig(
            output_dir=self.folder.name,
            use_cpu=self.device == "cpu",
            bf16=False,
            gradient_checkpointing=False,
            per_device_train_batch_size=self.work.prompts * self.work.group_size,
            num_generations=self.work.group_size,
            max_completion_length=self.work.new_tokens,
            learning_rate=self.work.learning_rate,
            lr_scheduler_type="constant",
            loss_type="grpo",
            shuffle_dataset=False,
            disable_tqdm=True,
            dataloader_pin_memory=False,
            **quiet,
        )

    def clock_callback(self):
        from transformers import TrainerCallback

        began, device = self.began, self.device

        class ReadClock(TrainerCallback):
            def on_step_begin(self, args, state, control, **kwargs):
                began.append(clock(device))

        return ReadClock()

    def reward(self, prompts, completions, completion_ids, **_) -> list[float]:
        """The verifier's rewards, from the tokens themselves; counts them on the way."""
        right = [float(self.task.verify(p, self.task.decode(i))) for p, i in zip(prompts, completion_ids, strict=True)]
        self.tokens = sum(map(len, completion_ids))
        self.flat = flat_share(torch.tensor(right).view(-1, self.work.group_size))
        return right

    def burst(self, steps: int = 2) -> list[float]:
        """Seconds of each of at most LONGEST_BURST steps, after one that warms up; one more only ends the last."""
        self.began.clear()
        self.trainer.args.max_steps = steps + 2
        self.trainer.train()
        return [end - start for start, end in zip(self.began[1:], self.began[2:], strict=False)]

    def step(self) -> None:
        self.burst(steps=1)


def tokenizer(task: Checksum):
    """The task's characters as a Hugging Face tokenizer. Its end token is one that no policy here can draw."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    texts = [PAD_TEXT, STOP_TEXT, *task.characters, "<end>"]
    words = Tokenizer(models.WordLevel({text: i for i, text in enumerate(texts)}, unk_token=PAD_TEXT))
    words.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token=PAD_TEXT, eos_token="<end>")
