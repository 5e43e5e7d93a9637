"""Experiments in this process, writing where a test looks, at sizes of milliseconds."""

import pytest
import torch
from conftest import InThisProcess, Pairs

from experiments import runs, shared, three_causes
from lab import workers
from toy_tasks import TASKS


@pytest.fixture
def written(monkeypatch, tmp_path):
    """The folder that stands for results/; runs go beside it, `pairs` is among the tasks."""
    monkeypatch.setenv("MINIRLVR_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(workers, "ProcessPoolExecutor", InThisProcess)
    monkeypatch.setattr(shared, "RESULTS", tmp_path / "results")
    for module in (runs, three_causes):
        monkeypatch.setattr(module, "RUNS", tmp_path / "runs")
    monkeypatch.setitem(TASKS, "pairs", Pairs)
    yield tmp_path / "results"
    torch.set_num_threads(1)
