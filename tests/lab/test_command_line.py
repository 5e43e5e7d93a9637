"""The command line as a user meets it: the whole program, files, resume, Ctrl-C, exit codes.

Four programs are really started; all other runs train in this process, on a task of milliseconds.
"""

import dataclasses
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from lab import command_line, report, run
from lab.reference import load_reference
from lab.settings import Settings, Shape
from tests.lab.commands import METHODS, TINY, contents, on_pairs, rows_of, said
from toy_tasks import TASKS

ROOT = Path(__file__).parents[2]
REAL = [*TINY, "--steps", "4", "--evaluate-every", "2", "--seeds", "2", "--methods", *METHODS]


def minirlvr(*argv, **more):
    """The program itself, started in a process of its own."""
    command = [sys.executable, str(ROOT / "minirlvr.py"), *map(str, argv)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **more)


# Python imports a module of this name at its start, in the workers too: it looks at what the process leaves.
AT_EXIT = """
import atexit, json, multiprocessing, os, sys
runs = []
sys.addaudithook(lambda event, args: event == "exec" and runs.append(getattr(args[0], "co_filename", "")))

def look():
    if "minirlvr" not in sys.modules:
        return  # a helper of multiprocessing's
    one, other = sys.modules["minirlvr"], sys.modules["__main__"]
    found = {"runs": sum(os.path.basename(name) == "minirlvr.py" for name in runs)}
    found["same"] = all(getattr(one, name) is getattr(other, name) for name in ("UserError", "Sampling", "Policy"))
    found["worker"] = multiprocessing.parent_process() is not None
    with open(os.path.join(os.path.dirname(__file__), f"{os.getpid()}.json"), "w") as file:
        json.dump(found, file)

atexit.register(look)
"""


@pytest.fixture(scope="session")
def programs(cache, tmp_path_factory):
    """A comparison by two workers, and a mistake: {name: (folder, exit code, stdout, stderr)}."""
    where = tmp_path_factory.mktemp("real")
    (where / "at_exit").mkdir()
    (where / "at_exit" / "sitecustomize.py").write_text(AT_EXIT)
    load_reference(TASKS["sums"](), Shape(layers=1, width=16, heads=2))
    flags = {"run": [*REAL, "--jobs", 2], "mistake": ["--group-size", 1]}
    looked = {"run": os.environ | {"PYTHONPATH": str(where / "at_exit")}, "mistake": os.environ}
    started = {name: minirlvr(*flags[name], "--out", name, cwd=where, env=looked[name]) for name in flags}
    ended = {}
    for name, process in started.items():
        out, err = process.communicate(timeout=120)
        ended[name] = (where / name, process.returncode, out, err)
    return ended


@pytest.fixture(scope="session")
def real(programs):
    """The comparison by two workers."""
    return programs["run"]


# --- the real program -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_folder_holds_what_the_contract_says(real):
    """config, metrics, summary, picture and one checkpoint for each method and seed; nothing half-written."""
    folder, code, _, err = real
    assert code == 0, err
    checkpoints = [f"checkpoint-{method}-seed{seed}.pt" for method in METHODS for seed in (0, 1)]
    assert sorted(contents(folder)) == sorted(
        ["config.json", "metrics.csv", "summary.json", "collapse.png", *checkpoints]
    )


@pytest.mark.slow
def test_the_program_and_its_workers_run_the_file_once(real):
    """`minirlvr` is the module that runs as `__main__`: one class of each name, in the program and in two workers."""
    found = [json.loads(path.read_text()) for path in (real[0].parent / "at_exit").glob("*.json")]
    assert sorted(process["worker"] for process in found) == [False, True, True]
    for process in found:
        assert (process["runs"], process["same"]) == (1, True), process


@pytest.mark.slow
def test_one_job_at_a_time_gives_the_same_bytes(real, cli, tmp_path):
    """The numbers depend neither on --jobs nor on the process: two workers, and one after the other in this one."""
    code, _, lines = cli(*REAL, "--jobs", 1, "--out", tmp_path / "again")
    assert code == 0, lines
    one, two = contents(tmp_path / "again"), contents(real[0])
    assert one["metrics.csv"] == two["metrics.csv"]
    assert one["summary.json"] == two["summary.json"]


@pytest.mark.slow
def test_nothing_is_printed_twice(real):
    """Each line of the output comes once: one opening, one table, one closing line that names the folder."""
    _, _, out, err = real
    lines = [line for line in out.splitlines() if line.strip()]
    assert len(set(lines)) == len(lines)
    assert out.count("reference  ") == 2  # one row for each split
    assert "run" in lines[-1]
    assert not said(err)


@pytest.mark.slow
def test_the_closing_table_has_every_method_and_split(real):
    """One row for each, with the measures of the contract, and the reference to compare with."""
    out = real[2]
    for measure in ("pass@1", "pass@8", "distinct@8", "effective_modes", "retained_mass"):
        assert measure in out
    for name in ("reference", *METHODS):
        assert len([line for line in out.splitlines() if line.split()[:1] == [name]]) == 2


@pytest.mark.slow
def test_metrics_csv_has_the_columns_of_the_contract(real):
    """Begins method,seed,step,split; one row for each method, seed, evaluated step and split, in that order."""
    rows = rows_of(real[0])
    columns = list(rows[0])
    assert columns[:4] == ["method", "seed", "step", "split"]
    assert {"pass@1", "pass@8", "distinct@8", "effective_modes", "retained_mass"} <= set(columns)
    keys = [(row["method"], int(row["seed"]), int(row["step"]), row["split"]) for row in rows]
    expected = [(m, s, t, p) for m in METHODS for s in (0, 1) for t in (0, 2, 4) for p in ("train", "heldout")]
    assert keys == expected
    assert all(
        math.isfinite(float(value)) for row in rows for key, value in row.items() if key not in columns[:4] and value
    )


@pytest.mark.slow
def test_summary_json_is_mean_and_interval_of_the_last_step(real):
    """method -> split -> measure -> {mean, low, high}: the mean is that of the rows at step 4, within its interval."""
    folder = real[0]
    summary, rows = json.loads((folder / "summary.json").read_text()), rows_of(folder)
    assert set(summary) == set(METHODS)
    for method in METHODS:
        assert set(summary[method]) == {"train", "heldout"}
        for split, measures in summary[method].items():
            assert {"pass@1", "pass@8", "distinct@8", "effective_modes", "retained_mass"} <= set(measures)
            for value in measures.values():
                assert set(value) == {"mean", "low", "high"}
                assert value["low"] <= value["mean"] <= value["high"]
            for name in ("pass@1", "retained_mass"):
                last = [float(r[name]) for r in rows if (r["method"], r["step"], r["split"]) == (method, "4", split)]
                assert measures[name]["mean"] == pytest.approx(sum(last) / 2)


@pytest.mark.slow
def test_config_json_holds_what_ran(real):
    """Every setting with its value, the versions, the device that auto became, and the command."""
    config = json.loads((real[0] / "config.json").read_text())
    assert {"minirlvr", "python", "torch"} <= set(config["versions"])
    assert config["versions"]["torch"] == torch.__version__
    assert config["device"] in ("cpu", "cuda")
    assert "--evaluate-every 2" in config["command"]
    for part in dataclasses.fields(Settings):
        assert set(config["settings"][part.name]) == {field.name for field in dataclasses.fields(part.type)}
    assert config["settings"]["experiment"]["steps"] == 4
    assert config["settings"]["shape"] == {"layers": 1, "width": 16, "heads": 2}
    assert config["methods"]["grpo"]["clip_high"] == 0.2


@pytest.mark.slow
def test_checkpoints_load_without_running_code(real):
    """weights_only=True suffices; method, seed and step are in them."""
    for method in METHODS:
        for seed in (0, 1):
            state = torch.load(real[0] / f"checkpoint-{method}-seed{seed}.pt", weights_only=True)
            assert (state["method"], state["seed"], state["step"]) == (method, seed, 4)


@pytest.mark.slow
def test_collapse_png_is_a_picture(real):
    """A PNG of some size."""
    picture = (real[0] / "collapse.png").read_bytes()
    assert picture.startswith(b"\x89PNG\r\n\x1a\n")
    assert len(picture) > 10_000


@pytest.mark.slow
def test_a_mistake_ends_the_program_itself_with_2(programs):
    """The exit code reaches the shell, the line is on stderr, and no folder is made."""
    folder, code, out, err = programs["mistake"]
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert not folder.exists()


# --- Ctrl-C ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_ctrl_c_saves_and_the_resumed_run_equals_an_uninterrupted_one(real, cli, tmp_path):
    """Exit code 130, the command to go on, no traceback; then the same metrics as if nothing had happened."""
    few = [*TINY, "--methods", "grpo", "--seeds", 1, "--evaluate-every", 7, "--prompts", 3]
    run = tmp_path / "stopped"
    process = minirlvr(*few, "--steps", 100_000, "--jobs", 1, "--out", run, start_new_session=True, cwd=tmp_path)
    checkpoint, deadline = run / "checkpoint-grpo-seed0.pt", time.time() + 60
    while not checkpoint.exists() and process.poll() is None and time.time() < deadline:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the program and its workers
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Traceback" not in out + err
    assert len(said(err)) == 1
    command = re.search(r"python minirlvr.py (--resume \S+)", said(err)[0])
    assert command[1] == f"--resume {run}"
    assert not list(run.glob("*.partial"))
    steps = 3 + torch.load(checkpoint, weights_only=True)["step"]
    code, _, lines = cli(*command[1].split(), "--steps", steps)
    assert code == 0, lines
    assert cli(*few, "--steps", steps, "--out", tmp_path / "whole")[0] == 0
    assert (run / "metrics.csv").read_text() == (tmp_path / "whole" / "metrics.csv").read_text()
    one, other = (torch.load(f / checkpoint.name, weights_only=True) for f in (run, tmp_path / "whole"))
    assert all(torch.equal(one["policy"][name], other["policy"][name]) for name in one["policy"])


def test_ctrl_c_before_training_is_no_traceback(cli, monkeypatch, tmp_path):
    """While the reference is made there is nothing to save yet: exit code 130 and no more than a line."""

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "load_reference", interrupted)
    try:
        code, _, lines = cli(*on_pairs(tmp_path / "x"))
    except KeyboardInterrupt:
        pytest.fail("Ctrl-C ends in a traceback")
    assert code == 130
    assert len(lines) <= 1


def test_ctrl_c_while_training_saves_every_run(cli, monkeypatch, tmp_path):
    """The stop sign reaches the run at work and those that wait: all are saved, none is at its end, and all go on."""
    ours = run.sampled_step

    def step(learner):
        ours(learner)
        os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(run, "sampled_step", step)
        code, _, lines = cli(*on_pairs(tmp_path / "x"))
    assert code == 130 and len(lines) == 1 and f"--resume {tmp_path / 'x'}" in lines[0]
    steps = [torch.load(path, weights_only=True)["step"] for path in sorted((tmp_path / "x").glob("checkpoint-*.pt"))]
    assert sorted(steps) == [0, 0, 0, 1]
    assert cli("--resume", tmp_path / "x")[0] == 0
    assert cli(*on_pairs(tmp_path / "whole"))[0] == 0
    assert contents(tmp_path / "x")["metrics.csv"] == contents(tmp_path / "whole")["metrics.csv"]


# --- what goes wrong on the way -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error, said_of_it",
    [
        (torch.OutOfMemoryError("CUDA out of memory."), ("--prompts", "--group-size", "--max-new-tokens")),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), ("--prompts", "--micro-batches")),
        (MemoryError(), ("out of memory",)),
        (torch._dynamo.exc.Unsupported("no compiler"), ("--compile", "C++ compiler")),
    ],
)
def test_running_out_of_memory_or_a_compiler_says_what_to_turn_down(cli, monkeypatch, tmp_path, error, said_of_it):
    """One line, exit code 2; any other error of PyTorch's is a fault and stays one."""

    def fails(*_):
        raise error

    monkeypatch.setattr(command_line, "train", fails)
    code, _, lines = cli(*on_pairs(tmp_path / "x"))
    assert code == 2 and len(lines) == 1
    assert all(part in lines[0] for part in said_of_it)
    error = RuntimeError("a fault of ours")
    with pytest.raises(RuntimeError, match="of ours"):
        cli(*on_pairs(tmp_path / "y"))


def test_results_that_cannot_be_written_are_one_line(cli, monkeypatch, tmp_path):
    """A disk that is full at the end: exit code 2, and the checkpoints are there to go on from."""

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(report, "write", full)
    code, _, lines = cli(*on_pairs(tmp_path / "x"))
    assert code == 2 and len(lines) == 1 and "No space left on device" in lines[0]
    assert list((tmp_path / "x").glob("checkpoint-*.pt"))


def test_group_size_1_is_enough_without_groups(cli, tmp_path):
    """REINFORCE++ and exact compare with no one."""
    found = cli(*on_pairs(tmp_path / "x", "--group-size", 1, steps=1, seeds=1, methods=["reinforce++", "exact"]))
    assert found[0] == 0, found


# --- seeds and resume -----------------------------------------------------------------------------------------------


def test_a_seed_is_the_same_whatever_stands_beside_it(cli, made, tmp_path):
    """Seed 1 alone, of one method alone, gives the rows it gave among others."""
    assert cli(*on_pairs(tmp_path / "x", "--first-seed", 1, seeds=1, methods=["grpo+iac+dlc"]))[0] == 0
    alone = rows_of(tmp_path / "x")
    assert alone == [row for row in rows_of(made) if (row["method"], row["seed"]) == ("grpo+iac+dlc", "1")]


def test_a_method_is_the_same_in_any_order(cli, made, tmp_path):
    """`grpo+dlc+iac` is `grpo+iac+dlc` under another name: the same numbers, and the name as it was given."""
    assert cli(*on_pairs(tmp_path / "x", seeds=1, methods=["grpo+dlc+iac"]))[0] == 0
    rows = rows_of(tmp_path / "x")
    assert {row.pop("method") for row in rows} == {"grpo+dlc+iac"}
    others = [row for row in rows_of(made) if (row.pop("method"), row["seed"]) == ("grpo+iac+dlc", "0")]
    assert rows == others


def test_resume_goes_on_from_4_to_8(cli, folder, tmp_path):
    """The same as eight steps in one go, in metrics and weights; config.json says eight."""
    code, _, lines = cli("--resume", folder, "--steps", 8)
    assert code == 0, lines
    assert cli(*on_pairs(tmp_path / "whole", steps=8))[0] == 0
    assert (folder / "metrics.csv").read_text() == (tmp_path / "whole" / "metrics.csv").read_text()
    assert (folder / "summary.json").read_text() == (tmp_path / "whole" / "summary.json").read_text()
    assert json.loads((folder / "config.json").read_text())["settings"]["experiment"]["steps"] == 8


def test_resume_goes_on_from_the_checkpoint_and_not_from_the_start(cli, folder):
    """Weights that were changed in the file are the ones that go on: old rows as they were, new ones other."""
    plain = Path(shutil.copytree(folder, folder.with_name("plain")))
    state = torch.load(folder / "checkpoint-grpo-seed0.pt", weights_only=True)
    state["policy"]["head.weight"][2] += 3.0
    torch.save(state, folder / "checkpoint-grpo-seed0.pt")
    for path in (folder, plain):
        assert cli("--resume", path, "--steps", 6)[0] == 0
    pairs_of_rows = zip(rows_of(folder), rows_of(plain), strict=True)
    changed = {(one["method"], one["seed"], one["step"]) for one, other in pairs_of_rows if one != other}
    assert changed == {("grpo", "0", "6")}


def test_resume_of_a_finished_run_changes_no_number(cli, folder):
    """Nothing left to do: exit code 0 and the same metrics."""
    before = contents(folder)
    assert cli("--resume", folder)[0] == 0
    after = contents(folder)
    assert all(after[name] == before[name] for name in ("metrics.csv", "summary.json"))


def test_resume_trains_what_is_missing(cli, folder):
    """A checkpoint that was deleted is trained from the start, to the same numbers."""
    before = (folder / "metrics.csv").read_bytes()
    (folder / "checkpoint-grpo-seed1.pt").unlink()
    (folder / "metrics.csv").unlink()
    assert cli("--resume", folder)[0] == 0
    assert (folder / "metrics.csv").read_bytes() == before
