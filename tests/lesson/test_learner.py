"""The lesson on its own: a learner is made and trained with `minirlvr` and `toy_tasks`, and nothing else is loaded."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import minirlvr
from minirlvr import Calibration, Learner, Policy, Sampling, Update
from toy_tasks import TASKS, exact, measures, sharpening

ROOT = Path(__file__).parents[2]

SIX_LINES = """
policy = Policy(Sums().vocab_size, torch.Generator().manual_seed(0))
pretrain(policy, Sums(), steps=20)
learner = Learner(Sums(), policy, "grpo", calibrations=("iac", "dlc"))
for _ in range(3):
    sampled_step(learner)
print(json.dumps(learner.logged))
"""

IMPORTS = """
import json, pkgutil, sys
def loaded():
    print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})))
import torch, toy_tasks
for module in pkgutil.iter_modules(toy_tasks.__path__):
    __import__(f"toy_tasks.{module.name}")
loaded()
from minirlvr import Learner, Policy, sampled_step
from toy_tasks import Sums, pretrain
"""


def rooms():
    """What stands at the root and can be imported, and the packages that only the outer rooms need."""
    own = {path.parent.name for path in ROOT.glob("*/__init__.py")} | {path.stem for path in ROOT.glob("*.py")}
    assert {"toy_tasks", "minirlvr", "lab"} <= own
    return own | {"tyro", "matplotlib", "transformers", "tokenizers", "peft"}


@pytest.mark.slow
def test_six_lines_train_a_policy_with_two_rooms_alone():
    """In a process of its own: `toy_tasks` imports no room, the lesson `toy_tasks` alone, also while it trains."""
    code = IMPORTS + SIX_LINES + "loaded()\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    below, logged, after = map(json.loads, done.stdout.splitlines())
    assert rooms() & set(below) == {"toy_tasks"}
    assert rooms() & set(after) == {"toy_tasks", "minirlvr"}
    assert {len(values) for values in logged.values()} == {3}
    assert {"reward", "loss", "grad_norm", "flat_groups", "memory_loss"} <= set(logged)


def test_names_that_readers_look_for_are_here():
    """Three names of the lesson are made in `toy_tasks`; all public names exist, and no imported one is among them."""
    for name, home in (("finite_batch_optimum", exact), ("pass_at_k", measures), ("sharpening_reward", sharpening)):
        assert getattr(minirlvr, name) is getattr(home, name)
        assert name in minirlvr.__all__
    assert len(set(minirlvr.__all__)) == len(minirlvr.__all__)
    assert all(hasattr(minirlvr, name) for name in minirlvr.__all__)
    assert not {"torch", "nn", "F", "Task", "Padded", "copy"} & set(minirlvr.__all__)


@pytest.mark.parametrize(("names", "told"), [(("grpp", ()), "estimator 'grpp'"), (("grpo", ("iaq",)), "'iaq'")])
def test_an_unknown_name_is_told_with_what_there_is(names, told):
    """A mistyped method is one line that lists the known ones, not a bare KeyError."""
    policy = Policy(TASKS["sums"]().vocab_size, torch.Generator().manual_seed(0), width=16, heads=2)
    with pytest.raises(ValueError, match=f"unknown .*{told}; choose one of (grpo|iac), "):
        Learner(TASKS["sums"](), policy, *names)


def small(**more):
    """A learner on sums with an untrained policy."""
    policy = Policy(TASKS["sums"]().vocab_size, torch.Generator().manual_seed(0), width=16, heads=2)
    return Learner(TASKS["sums"](), policy, "grpo", ("dlc",), **more)


@pytest.mark.parametrize(
    ("dials", "told"),
    [
        ({"update": Update(beta=1.0, kl_in="rewards")}, "kl_in is 'rewards': it must be one of loss, reward"),
        ({"update": Update(epochs=0)}, "epochs is 0: it must be from 1 to"),
        ({"update": Update(clip_low=1.5)}, "clip_low is 1.5: it must be from 0 to 1"),
        ({"dials": Calibration(importance="exakt")}, "importance is 'exakt': it must be one of none, exact, clipped"),
        ({"dials": Calibration(mu=float("nan"))}, "mu is nan"),
        ({"sampling": Sampling(temperature=0.0)}, "temperature is 0.0"),
    ],
)
def test_a_dial_out_of_its_range_is_told_and_not_taken_in_silence(dials, told):
    """Made by hand, not by flags, a learner still says what is wrong, before it learns anything."""
    with pytest.raises(ValueError, match=told):
        small(**dials)


def test_a_memory_that_starts_as_the_policy_is_a_copy_of_it():
    """Equal at first, and another network: what it learns does not move the policy."""
    learner = small(dials=Calibration(memory_start="reference"))
    pairs = list(zip(learner.policy.parameters(), learner.memory.parameters(), strict=True))
    assert all(torch.equal(one, other) and one is not other for one, other in pairs)
