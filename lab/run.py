"""A run: one method and one seed, a `Learner` that is measured, logged, saved and resumed bit for bit."""

import copy
from collections.abc import Callable, Collection
from pathlib import Path

import numpy as np
import torch

from lab.checkpoint import FORMAT, HEAD, LOG, SPLITS, check_moments, read_checkpoint
from lab.files import save_tensors
from lab.law import LAW, Sampler, law_measures
from lab.reference import load_reference
from lab.settings import Method, Settings, Sharpening
from minirlvr import Learner, Policy, fresh_memory, sampled_step, take_step
from toy_tasks import TASKS, Task, UserError
from toy_tasks.exact import MEASURES, Listing, Tree, exact_objective, mode_measures
from toy_tasks.measures import mean_known
from toy_tasks.sharpening import sharpening_reward


class Run(Learner):
    """A learner with its measures, its rows so far, and two whole methods `save` and `load` that lose nothing of it.

    For a language model `TextRun` (language_models/run.py) puts other policies, measures and files in their place.
    """

    measures: Collection[str] = (*MEASURES, *LAW)  # the names that `measure` gives

    def __init__(self, settings: Settings, method: Method, seed: int, reference: Policy, device="cpu", task=None):
        """Starts from `reference`, which is copied (here; a language model may be trained in place)."""
        self.settings, self.method = settings, method
        task = task or TASKS[settings.experiment.task]()
        policy, frozen = self.make_policies(reference, task, device)
        super().__init__(
            task, policy, method.estimator, method.calibrations, settings.sampling, settings.update,
            settings.calibration, seed, frozen, self.make_memory(policy, task, seed, device),
            climb_regime(method.regime, settings.sharpening),
        )  # fmt: skip
        if settings.experiment.compile:  # last: a copy of a compiled policy would read with the first one's weights
            self.policy.extend = torch.compile(self.policy.extend, dynamic=True)
        self.name = method.name
        self.temperature = settings.sampling.temperature
        self.rows: list[dict] = []  # evaluations so far
        self.prepare_measures()

    def make_policies(self, reference: Policy, task: Task, device: str) -> tuple[Policy, Policy | None]:
        """The policy that will move, and the reference that will not."""
        frozen = copy.deepcopy(reference).to(device)
        return copy.deepcopy(frozen), frozen

    def make_memory(self, policy: Policy, task: Task, seed: int, device: str) -> Policy | None:
        """A fresh memory with the heads of --heads; None where there is none, or the learner copies the policy."""
        if not self.method.has_memory or self.settings.calibration.memory_start != "fresh":
            return None
        return fresh_memory(task.vocab_size, self.settings.calibration, seed, self.settings.shape.heads).to(device)

    # --- measures ---

    @torch.no_grad()
    def mode_probs(self, policy: Policy) -> np.ndarray:
        """Exact probability of every listed mode, (Q, M)."""
        return self.listing.log_probs(policy, self.temperature).exp().numpy()

    def prepare_measures(self) -> None:
        """List all correct answers once, and sum what the reference gives them."""
        self.listing = Listing(self.task, self.task.prompts)
        self.reference_probs = self.mode_probs(self.reference)  # (Q, M)
        self.train_listing = Listing(self.task, self.task.train)
        self.tree = None  # all completions, where an exact KL is summed over them
        if not self.estimator.samples and self.update.beta:
            self.tree = Tree(self.reference, self.task, self.task.train, min_mass=1e-4, temperature=self.temperature)

    def measure(self) -> dict[str, dict[str, float | str]]:
        """split -> measure -> its exact value for the policy now, the mean over the prompts of the split.

        Of the law's quantities over those prompts where they are known, and "" where it is none.
        """
        probs = self.mode_probs(self.policy)  # (Q, M)
        drawn_from = self.mode_probs(Sampler(self.policy, self.memory, self.dials.mu)) if self.memory else probs
        measured = mode_measures(self.listing, probs, self.reference_probs) | law_measures(self, probs, drawn_from)
        trained = len(self.task.train)
        rows = dict(zip(SPLITS, (slice(trained), slice(trained, None)), strict=True))
        means = {split: {name: mean_known(v[rows[split]]) for name, v in measured.items()} for split in SPLITS}
        return {
            split: {name: "" if np.isnan(mean) else float(mean) for name, mean in found.items()}
            for split, found in means.items()
        }

    def evaluate(self) -> None:
        """Add one row for the trained and one for the held-out prompts: the measures, then the means of the log."""
        Q, G = min(self.sampling.prompts, len(self.task.train)), self.sampling.group_size
        drawn = self.step * Q * G * self.estimator.samples
        logged = {name: sum(found) / len(found) if (found := self.logged.get(name)) else "" for name in LOG}
        for split, means in self.measure().items():
            head = dict(zip(HEAD, (self.name, self.seed, self.step, split), strict=True))
            tail = logged if split == "train" else dict.fromkeys(LOG, "")
            self.rows.append(head | means | {"completions": drawn} | tail)
        self.logged.clear()

    # --- kept and taken up again ---

    def parts(self) -> dict:
        """What PyTorch saves and restores by itself."""
        parts = {"policy": self.policy, "optimizer": self.optimizer}
        return parts | ({"memory": self.memory, "memory_optimizer": self.memory_optimizer} if self.memory else {})

    def contents(self) -> dict:
        """All that changes while training, as tensors and plain values only, so that loading it runs no code."""
        plain = {name: copy.deepcopy(getattr(self, name)) for name in ("seed", "step", "rows", "waiting")}
        parts = {name: part.state_dict() for name, part in self.parts().items()}
        stream = {"method": self.name, "window": dict(self.logged), "generator": self.generator.get_state()}
        return {"format": FORMAT[0], "version": FORMAT[1]} | plain | parts | stream

    def take(self, contents: dict) -> None:
        """Become what `contents` says. Raises whatever PyTorch does where it does not fit."""
        contents = copy.deepcopy(contents)  # an optimiser goes on with the very tensors it is given
        for name, part in self.parts().items():
            if isinstance(part, torch.optim.Optimizer):  # its rates are the settings', only its memory is the file's
                contents[name]["param_groups"] = part.state_dict()["param_groups"]
            part.load_state_dict(contents[name])
            if isinstance(part, torch.optim.Optimizer):
                check_moments(part)
        self.generator.set_state(contents["generator"].cpu())
        self.step, self.rows, self.waiting = (contents[name] for name in ("step", "rows", "waiting"))
        self.logged.clear()
        self.logged.update(contents["window"])

    def save(self, path: Path) -> None:
        """Write a checkpoint, whole or not at all. Raises UserError."""
        save_tensors(self.contents(), path)

    def load(self, path: Path) -> None:
        """Go on where `save` stopped. Raises UserError for a file that is damaged or another run's."""
        contents = read_checkpoint(path, self.name, self.seed, self.measures)
        if contents["step"] > self.settings.experiment.steps:
            raise UserError(f"checkpoint {path} is at step {contents['step']} already: give --steps of at least that")
        try:
            self.take(contents)
        except UserError:
            raise
        except (KeyError, IndexError, RuntimeError, ValueError, TypeError, AttributeError) as error:
            reason = " ".join(str(error).split())[:120]
            told = f"checkpoint {path} does not fit these settings ({reason}); delete it to train anew"
            raise UserError(told) from None


def climb_regime(regime: str, dials: Sharpening) -> Callable | None:
    """P2's reward in the place of the verifier's; None for the task reward itself."""
    if regime == "task":
        return None

    def climb(rewards, batch, reference_logprobs):
        likelihoods = batch.logprobs.sum(-1), (reference_logprobs * batch.mask).sum(-1)  # (Q, G) each
        options = dials.sharpen_alpha, dials.beta_inverse, dials.normalize, dials.length_power
        return sharpening_reward(regime, rewards, *likelihoods, batch.mask.sum(-1), *options)

    return climb


def train(run: Run, tick=lambda: None, checkpoint=lambda run: None, stopped=lambda: False) -> None:
    """Train until the last step or until `stopped()`. Calls `tick` each step, `checkpoint` each evaluation and last."""
    steps, every = run.settings.experiment.steps, run.settings.experiment.evaluate_every
    take = sampled_step if run.estimator.samples else exact_step
    if not run.rows:
        run.evaluate()
    while run.step < steps and not stopped():
        take(run)
        tick()
        if run.step % every == 0 or run.step == steps:
            run.evaluate()
            checkpoint(run)
    checkpoint(run)


def exact_step(run: Run) -> None:
    """The infinite batch: one step up the summed probability of the listed modes, less beta times the exact KL."""
    run.step += 1
    run.optimizer.zero_grad()
    success = run.train_listing.log_probs(run.policy, run.temperature).exp().sum(-1)  # (Q,)
    kl = run.tree.kl(run.policy) if run.tree else None
    loss = -exact_objective(success, kl, run.update.beta, run.update.exact_std, run.update.kl_in).mean()
    loss.backward()
    take_step(run, loss=loss.item(), reward=success.mean().item())
    if kl is not None:
        run.log(kl=kl.mean().item())


class ToyRuns:
    """How the command line makes runs of the toy policy; `language_models.run.TextRuns` makes those of a real one."""

    extras: tuple[str, ...] = ()  # packages whose versions config.json names besides PyTorch's
    shares_processor = True  # many runs side by side, one thread each
    measures: Collection[str] = Run.measures
    description = ""  # what is said before the first step

    def __init__(self, settings: Settings):
        self.settings = settings

    def prepare(self, methods: list[Method], device: str) -> None:
        """Sets `task`, `measures` and `description`. Raises UserError for what cannot be run."""
        self.task = TASKS[self.settings.experiment.task]()

    def make_reference(self) -> None:
        """What all runs start from, made once before the first of them."""
        load_reference(TASKS[self.settings.experiment.task](), self.settings.shape)

    def start(self, method: Method, seed: int, device: str) -> Run:
        """A run at its first step."""
        reference = load_reference(TASKS[self.settings.experiment.task](), self.settings.shape)
        return Run(self.settings, method, seed, reference, device)
