"""Flags: --help says all of them, and every mistake in them is one line."""

import dataclasses
import re
import sys
import typing
from pathlib import Path

import pytest
from conftest import Pairs

from lab import command_line
from lab.flags import default_settings, parse_settings
from lab.settings import Settings
from tests.lab.commands import contents, is_one_line, on_pairs
from toy_tasks import TASKS

CONTRACT_FLAGS = "task methods seeds steps group-size alpha mu beta learning-rate device jobs out resume policy help"


def test_help_is_complete_and_grouped(capsys):
    """Exit code 0; every flag of the contract and every setting there is, in the groups of the settings."""
    with pytest.raises(SystemExit) as stopped:
        command_line.main(["--help"])
    out, err = capsys.readouterr()
    assert stopped.value.code == 0
    assert not err
    for flag in CONTRACT_FLAGS.split():
        assert re.search(rf"--{flag}\b", out), flag
    for part in dataclasses.fields(Settings):
        assert f"{part.name.replace('_', '-')} options" in out
        for field in dataclasses.fields(part.type):
            assert f"--{field.name.replace('_', '-')}" in out, field.name


def test_a_language_model_has_defaults_of_its_own():
    """A model is far larger than the toy: smaller steps, one seed, two methods; adapters learn faster."""
    assert parse_settings([]) == Settings()
    model = parse_settings(["--policy", "hf:FOLDER"])
    assert model == dataclasses.replace(default_settings(["--policy=hf:FOLDER"]), experiment=model.experiment)
    assert (model.update.learning_rate, model.sampling.prompts) == (1e-5, 8)
    assert (model.experiment.methods, model.experiment.seeds) == (("grpo", "grpo+iac+dlc"), 1)
    assert parse_settings(["--policy", "hf:FOLDER", "--lora-rank", "8"]).update.learning_rate == 1e-4
    given = parse_settings(["--policy", "hf:FOLDER", "--learning-rate", "0.5", "--seeds", "3"])
    assert (given.update.learning_rate, given.experiment.seeds) == (0.5, 3)


# --- mistakes -------------------------------------------------------------------------------------------------------

MISTAKES = [
    ("--task summs", "summs", "sums"),
    ("--methods grpp", "grpp", "grpo"),
    ("--methods grpo+iac+iac", "grpo+iac+iac"),
    ("--methods exact+dlc", "exact+dlc"),
    ("--methods", "methods"),
    ("--methods grpo grpo", "once"),
    ("--methods grpo+iac+dlc grpo+dlc+iac", "once"),
    ("--stepz 3", "stepz"),
    ("nonsense", "nonsense"),
    ("--steps", "steps"),
    ("--steps x", "x"),
    ("--steps 2.5", "2.5"),
    ("--steps 0", "--steps"),
    ("--steps -3", "--steps"),
    ("--steps 1" + 400 * "0", "--steps"),
    ("--seeds 0", "--seeds"),
    ("--first-seed -1", "--first-seed"),
    ("--jobs -1", "--jobs"),
    ("--group-size 1", "--group-size", "2"),
    ("--group-size 1 --methods reinforce+++iac", "--group-size"),
    ("--group-size 0", "--group-size"),
    ("--prompts 0", "--prompts"),
    ("--device tpu", "device"),
    ("--policy gpt", "policy"),
    ("--resume nowhere", "nowhere"),
    ("--kl-kind k1 --beta 0.1", "k1"),
    ("--kl-kind k9", "k9"),
    ("--aggregate mean", "mean"),
    ("--width 15", "--width"),
    ("--heads 3", "--heads"),
    ("--temperature 0", "--temperature"),
    ("--clip-low 1.5", "--clip-low"),
    ("--epochs 0", "--epochs"),
    ("--micro-batches 0", "--micro-batches"),
]
FLOATS = [
    name.replace("_", "-")
    for part in dataclasses.fields(Settings)
    for name, hint in typing.get_type_hints(part.type).items()
    if float in (hint, *typing.get_args(hint)) and part.name != "language_model"
]
OUT_OF_RANGE = [(flag, bad) for flag in FLOATS for bad in ("-0.5", "nan", "inf", "-inf")]
OUT_OF_RANGE.remove(("kappa", "inf"))  # the one dial that may be infinite
MISTAKES += [(f"--{flag} {bad}", f"--{flag}") for flag, bad in OUT_OF_RANGE]


def test_the_floats_are_found():
    """The walk over the settings finds the numbers that were once listed by hand."""
    known = "learning-rate alpha mu beta temperature max-grad-norm memory-learning-rate entropy-bonus clip-high"
    assert {*known.split(), "f-grpo-gamma"} < set(FLOATS)


@pytest.mark.parametrize(("flags", "names"), [(flags, names) for flags, *names in MISTAKES], ids=lambda v: str(v)[:40])
def test_a_wrong_flag_is_one_line(cli, flags, names):
    """Exit code 2, one line that names the flag or the value, and no folder is made."""
    is_one_line(cli(*flags.split()), *names)
    assert not list(Path.cwd().iterdir())


def test_two_wrong_flags_are_one_line_too(cli):
    """However much is wrong."""
    is_one_line(cli("--stepz", 3, "--task", "x", "--seeds", "y"))


@pytest.mark.parametrize(
    "given, message",
    [
        (["--policy", "gpt2"], "toy or hf:FOLDER_OR_ID"),
        (["--policy", "hf:"], "toy or hf:FOLDER_OR_ID"),
        (["--lora-rank", "4"], "--lora-rank is for a language model"),
        (["--dataset", "x.jsonl"], "--dataset is for a language model"),
        (["--memory-start", "hf:model"], "fresh or reference"),
    ],
)
def test_flags_of_language_models_are_refused_elsewhere(cli, given, message):
    """One line that says where they belong."""
    code, _, lines = cli(*given)
    assert code == 2 and len(lines) == 1 and message in lines[0]


def test_without_the_extras_the_flag_says_what_to_install(cli, monkeypatch):
    """One line, and everything else goes on working."""
    monkeypatch.setitem(sys.modules, "language_models.run", None)
    code, _, lines = cli("--policy", "hf:anything")
    assert code == 2 and len(lines) == 1 and "pip install -r requirements-hf.txt" in lines[0]


def test_a_task_without_modes_is_one_line(cli, monkeypatch, tmp_path):
    """A prompt with no correct answer is refused by name before anything is made."""

    class Hopeless(Pairs):
        def modes(self, prompt):
            return [] if prompt == "b=" else super().modes(prompt)

    monkeypatch.setitem(TASKS, "pairs", Hopeless)
    is_one_line(cli(*on_pairs(tmp_path / "x")), "'b='")
    assert not (tmp_path / "x").exists()


# --- beside --resume ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags", ["--alpha 2", "--methods grpo", "--seeds 3", "--task sums", "--group-size 4", "--out other", "--width 32"]
)
def test_resume_goes_on_with_its_own_settings(cli, folder, flags):
    """Any flag but --steps, --jobs and --device is one line, and nothing is changed or made."""
    before = contents(folder)
    is_one_line(cli("--resume", folder, *flags.split()), "--steps")
    assert contents(folder) == before
    assert not Path("other").exists()
