"""The reference: made once, kept under a name that says what made it and nothing else."""

import functools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import Pairs

import minirlvr
from lab import run
from lab.reference import fingerprint, load_reference, make_reference
from lab.settings import Shape
from tests.lab.commands import on_pairs
from tests.runs import same_tree
from toy_tasks import TASKS, Sums, Task, UserError

ROOT = Path(__file__).parents[2]
TINY = Shape(layers=1, width=16, heads=2)
PRINT_NAMES = """
import minirlvr
from lab.reference import fingerprint
from lab.settings import Shape
from toy_tasks import TASKS
print(minirlvr.__file__, minirlvr.__doc__[:7], *(fingerprint(task(), Shape(1, 16, 2)) for task in TASKS.values()))
"""


@pytest.fixture
def own_cache(monkeypatch, tmp_path):
    """A cache for one test."""
    monkeypatch.setenv("MINIRLVR_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


# --- the name -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_words_about_the_code_and_the_cache_do_not_change_the_name(tmp_path):
    """Another docstring, another comment, another folder, another process: the names that this process gives."""
    for room in ("lab", "toy_tasks"):
        shutil.copytree(ROOT / room, tmp_path / room, ignore=shutil.ignore_patterns("__pycache__"))
    text = (ROOT / "minirlvr.py").read_text()
    text = '"""Changed' + re.sub(r'^( +"""|# |    # )(?=[A-Z])', r"\1So: ", text[3:], flags=re.MULTILINE)
    assert text.count("So: ") > 50, "docstrings and comments, inside functions and outside"
    (tmp_path / "minirlvr.py").write_text("# a comment\n" + text)
    more = {"MINIRLVR_CACHE": str(tmp_path / "elsewhere"), "PYTHONPATH": str(tmp_path), "PYTHONHASHSEED": "7"}
    out = subprocess.run(
        [sys.executable, "-c", PRINT_NAMES], cwd=tmp_path, env=os.environ | more, capture_output=True, text=True
    )
    assert out.returncode == 0, out.stderr
    file, opening, *names = out.stdout.split()
    assert (file, opening) == (str(tmp_path / "minirlvr.py"), "Changed")
    assert names == [fingerprint(task(), TINY) for task in TASKS.values()]
    assert not (tmp_path / "elsewhere").exists()


def test_the_cache_folder_does_not_change_the_name(monkeypatch, own_cache):
    """Where it is kept is no part of what it is; finding the name writes nothing."""
    before = fingerprint(Pairs(), TINY)
    monkeypatch.setenv("MINIRLVR_CACHE", "/another/folder")
    assert fingerprint(Pairs(), TINY) == before
    assert not own_cache.exists()


@pytest.mark.parametrize("threads", [1, 2])
def test_threads_do_not_change_the_name_or_the_weights(threads):
    """However many add the sums up; and they are as many afterwards as before."""
    expected, weights = fingerprint(Pairs(), Shape()), make_reference(Pairs(), Shape(), 3).state_dict()
    torch.set_num_threads(threads)
    try:
        assert fingerprint(Pairs(), Shape()) == expected
        assert same_tree(dict(make_reference(Pairs(), Shape(), 3).state_dict()), dict(weights))
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(1)


def test_the_global_random_state_does_not_change_the_name():
    """Nothing outside of the recipe does."""
    before, names = torch.get_rng_state(), []
    for seed in (1, 2):
        torch.manual_seed(seed)
        names.append(fingerprint(Pairs(), TINY))
    torch.set_rng_state(before)
    assert names[0] == names[1]


def flipped(encode_prompts):
    """Prompts written from right to left."""

    def encode(task, prompts):
        texts = encode_prompts(task, prompts)
        return texts._replace(tokens=texts.tokens.flip(-1))

    return encode


def wider(visible):
    """Completions of one prompt that see each other."""
    return lambda real, branch, T: visible(real, torch.full_like(branch, minirlvr.TRUNK), T)


CHANGES = {
    "how prompts are written": (Pairs, "encode_prompts", flipped(Pairs.encode_prompts)),
    "how texts are written": (Pairs, "encode", lambda task, text: Task.encode(task, text[::-1])),
    "what is imitated": (Pairs, "sample", lambda task, prompt, rng: task.modes(prompt)[0]),
    "how long": (Pairs, "pretraining_steps", 41),
    "which prompts": (Pairs, "train", ("a=", "b=")),
    "nonlinearity": (minirlvr.F, "silu", minirlvr.F.gelu),
    "positions": (minirlvr, "rotate", lambda x, cos, sin: x),
    "mask": (minirlvr, "visible", wider(minirlvr.visible)),
    "first weights": (torch.Tensor, "normal_", torch.Tensor.uniform_),
    "optimiser": (torch.optim, "AdamW", functools.partial(torch.optim.AdamW, betas=(0.9, 0.9))),
}


@pytest.mark.parametrize(("where", "name", "other"), CHANGES.values(), ids=list(CHANGES))
def test_what_makes_the_reference_changes_the_name(monkeypatch, where, name, other):
    """How prompts become tokens, what it imitates and for how long, and the network, of the same shapes."""
    before = fingerprint(Pairs(), TINY)
    monkeypatch.setattr(where, name, other)
    assert fingerprint(Pairs(), TINY) != before


def test_every_number_of_the_shape_changes_the_name():
    """Layers, width, heads: heads too, where the weights have the same shapes."""
    shapes = [TINY, Shape(2, 16, 2), Shape(1, 32, 2), Shape(1, 16, 1), Shape()]
    assert len({fingerprint(Pairs(), shape) for shape in shapes}) == len(shapes)


@pytest.mark.parametrize("task", TASKS.values(), ids=list(TASKS))
def test_every_number_of_a_task_changes_the_name(task, monkeypatch):
    """Those of its class (`skew`, say) and those of its own, by a thousandth: two steps may look alike."""
    before, numbers = fingerprint(task(), TINY), []
    for name in [name for name, value in vars(task).items() if isinstance(value, float)]:
        with monkeypatch.context() as patch:
            patch.setattr(task, name, getattr(task, name) * 0.999)
            assert fingerprint(task(), TINY) != before, name
        numbers.append(name)
    for name, value in vars(task()).items():
        changed = task()
        setattr(changed, name, value * 0.999)
        assert fingerprint(changed, TINY) != before, name
        numbers.append(name)
    assert any("skew" in name for name in numbers)
    assert fingerprint(task(), TINY) == before


def test_a_number_that_is_inherited_changes_the_name(monkeypatch):
    """A task made from another holds that one's numbers too."""

    class Child(Sums):
        """Nothing of its own."""

    before = fingerprint(Child(), TINY)
    monkeypatch.setattr(Sums, "skew", Sums.skew * 0.999)
    assert fingerprint(Child(), TINY) != before


@pytest.mark.parametrize("task", TASKS.values(), ids=list(TASKS))
def test_any_prompt_written_otherwise_changes_the_name(task, monkeypatch):
    """Also of one that the first two batches may not hold."""
    before, ours = fingerprint(task(), TINY), task.encode_prompt
    for odd in task().prompts:
        monkeypatch.setattr(task, "encode_prompt", lambda self, p, odd=odd: ours(self, p)[:: -1 if p == odd else 1])
        assert fingerprint(task(), TINY) != before, odd


# --- the cache ------------------------------------------------------------------------------------------------------


def test_the_reference_is_made_once_and_a_damaged_cache_is_made_again(cli, monkeypatch, own_cache, tmp_path):
    """The second run reads the file; a file cut short is no obstacle; another shape has another name."""
    monkeypatch.setattr(run, "load_reference", load_reference)
    few = {"steps": 1, "seeds": 1, "methods": ["grpo"]}
    assert cli(*on_pairs(tmp_path / "a", **few))[0] == 0
    (cached,) = own_cache.iterdir()
    whole = cached.stat().st_mtime_ns
    assert cli(*on_pairs(tmp_path / "same", **few))[0] == 0
    assert cached.stat().st_mtime_ns == whole, "it was made again"
    cached.write_bytes(cached.read_bytes()[:1000])
    assert cli(*on_pairs(tmp_path / "b", **few))[0] == 0
    assert (tmp_path / "a" / "metrics.csv").read_bytes() == (tmp_path / "b" / "metrics.csv").read_bytes()
    assert cached.stat().st_size > 1000
    assert cli(*on_pairs(tmp_path / "c", "--layers", 2, **few))[0] == 0
    assert len(list(own_cache.iterdir())) == 2


def test_a_cache_that_cannot_be_written_is_named(monkeypatch, tmp_path):
    """The line says which environment variable helps."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MINIRLVR_CACHE", str(tmp_path / "file" / "below"))
    with pytest.raises(UserError, match="MINIRLVR_CACHE"):
        load_reference(Pairs(), TINY)


def test_a_cached_reference_of_nan_is_made_again(own_cache):
    """Damaged weights are not used in silence."""
    good = load_reference(Pairs(), TINY).state_dict()
    (path,) = own_cache.iterdir()
    torch.save({name: torch.full_like(value, float("nan")) for name, value in good.items()}, path)
    again = load_reference(Pairs(), TINY).state_dict()
    assert all(torch.equal(again[name], good[name]) for name in good)


def test_what_a_world_says_of_itself_is_not_what_makes_its_reference():
    """A docstring of a task, or a function beside it, leaves the name; a number of it does not."""

    class Worded(Sums):
        """Other words."""

    class Skewed(Sums):
        skew = 0.9

    name = fingerprint(Sums(), TINY)
    Worded.__doc__ += " And more of them."
    assert fingerprint(Worded(), TINY) == name
    assert fingerprint(Skewed(), TINY) != name
