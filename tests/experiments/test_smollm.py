"""The experiment on a real model, on a tiny one: the warm-up learns what it is shown, and a step comes in its parts."""

import random

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

import torch

from experiments import smollm
from language_models.loading import load_model
from tests.language_models.models import save_chat_model


@pytest.fixture
def flags(written, monkeypatch, tmp_path):
    """The flags of the experiment, for a tiny untrained model; both folders are in a temporary one."""
    save_chat_model(tmp_path / "model")
    monkeypatch.setattr(smollm, "REFERENCE", tmp_path / "reference")
    monkeypatch.setattr(smollm, "WARM_UP", 3)
    monkeypatch.setattr(smollm, "ROUNDS", 2)
    monkeypatch.setattr(smollm, "device", lambda: "cpu")
    flags = ["--policy", f"hf:{tmp_path / 'model'}", "--task", "sums", "--prompts", "2", "--group-size", "4"]
    flags += ["--max-new-tokens", "6"]
    monkeypatch.setattr(smollm, "DIRECT", flags)
    monkeypatch.setattr(smollm, "TRAIN", flags)
    return flags


def test_the_warm_up_saves_a_model_that_has_moved(flags, tmp_path, capsys):
    smollm.warm_up()
    assert capsys.readouterr().out.count("nats a token") == 3
    before, after = (load_model(str(tmp_path / name))[0] for name in ("model", "reference"))
    moved = [(p - q).abs().max().item() for p, q in zip(before.parameters(), after.parameters(), strict=True)]
    assert 0 < max(moved) < 1e-2


def test_answers_are_padded_behind_their_stop(flags):
    task = smollm.start(flags, "grpo").task
    completions, mask = smollm.draw_answers(task, list(task.train[:2]), random.Random(0))
    assert completions.shape == mask.shape and completions.shape[:2] == (2, 8)
    assert (completions[~mask] == task.pad).all()
    ends = completions.gather(-1, mask.sum(-1, keepdim=True) - 1)
    assert torch.isin(ends, torch.tensor(task.stops)).all()


def test_the_overhead_names_every_part(flags, written):
    smollm.overhead()
    text = (written / "smollm" / "dlc_overhead.txt").read_text()
    assert text.startswith("python -m experiments.smollm overhead: 2 rounds")
    for part in ("rollout ", "rollout with DLC", "memory's step", "update", "a step with DLC takes"):
        assert f"\n{part}" in text
