"""The command line as a user meets it: files, resume, Ctrl-C, and one line for every mistake.

Three programs are really started; all other runs train in this process, on a task of milliseconds.
"""

import csv
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
from conftest import InThisProcess, Pairs, tiny_policy

import command_line
import report
from minirlvr import Settings, Shape, UserError
from toy_tasks import TASKS

ROOT = Path(__file__).parents[1]
TINY = ["--layers", "1", "--width", "16", "--heads", "2", "--memory-width", "16"]
METHODS = ("grpo", "grpo+iac+dlc")
CONTRACT_FLAGS = "task methods seeds steps group-size alpha mu beta learning-rate device jobs out resume policy help"
REAL = [*TINY, "--steps", "4", "--evaluate-every", "2", "--seeds", "2", "--methods", *METHODS]


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    """References are made once for the module, and not in the working copy."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MINIRLVR_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


LOAD_REFERENCE, KEPT = command_line.load_reference, {}


def kept_reference(task, shape):
    """`load_reference`, once for each task and shape: it hashes its sources every time."""
    if (task.name, shape) not in KEPT:
        KEPT[task.name, shape] = LOAD_REFERENCE(task, shape)
    return KEPT[task.name, shape]


@pytest.fixture
def here(monkeypatch, tmp_path):
    """Run in this process, in an empty folder, with `pairs` among the tasks and no picture drawn."""
    monkeypatch.setattr(command_line, "ProcessPoolExecutor", InThisProcess)
    monkeypatch.setattr(report, "draw", lambda *_: None)
    monkeypatch.setattr(command_line, "load_reference", kept_reference)
    monkeypatch.setitem(TASKS, "pairs", Pairs)
    empty = tmp_path / "cwd"
    empty.mkdir()
    monkeypatch.chdir(empty)


@pytest.fixture
def cli(here, capsys):
    """cli("--steps", 4) -> (exit code, stdout, lines on stderr without the progress bar)."""

    def run(*argv):
        code = command_line.main([str(value) for value in argv])
        out, err = capsys.readouterr()
        return code, out, said(err)

    return run


def said(err: str) -> list[str]:
    """The lines of stderr, progress bars left out."""
    return [
        line for line in re.split(r"[\r\n]+", err) if line.strip() and not re.match(r"\d+ runs?, \d+ at a time", line)
    ]


def on_pairs(out, *more, steps=4, seeds=2, methods=METHODS):
    """Flags of a run of milliseconds."""
    flags = ["--task", "pairs", *TINY, "--steps", steps, "--evaluate-every", 2, "--seeds", seeds]
    return [*flags, "--learning-rate", 0.003, "--methods", *methods, "--out", out, *more]


def minirlvr(*argv, **more):
    """The program itself, started in a process of its own."""
    command = [sys.executable, str(ROOT / "minirlvr.py"), *map(str, argv)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **more)


@pytest.fixture(scope="module")
def programs(cache, tmp_path_factory):
    """A comparison by two workers, and a mistake: {name: (folder, exit code, stdout, stderr)}."""
    where = tmp_path_factory.mktemp("real")
    command_line.load_reference(TASKS["sums"](), Shape(layers=1, width=16, heads=2))
    flags = {"run": [*REAL, "--jobs", 2], "mistake": ["--group-size", 1]}
    started = {name: minirlvr(*flags[name], "--out", name, cwd=where) for name in flags}
    ended = {}
    for name, process in started.items():
        out, err = process.communicate(timeout=120)
        ended[name] = (where / name, process.returncode, out, err)
    return ended


@pytest.fixture(scope="module")
def real(programs):
    """The comparison by two workers."""
    return programs["run"]


@pytest.fixture(scope="module")
def made(cache, tmp_path_factory):
    """A finished folder of four runs on `pairs`, four steps each; copy it before touching it."""
    folder = tmp_path_factory.mktemp("made") / "four"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command_line, "ProcessPoolExecutor", InThisProcess)
        patch.setitem(TASKS, "pairs", Pairs)
        assert command_line.main(list(map(str, on_pairs(folder)))) == 0
    return folder


@pytest.fixture
def folder(made, tmp_path):
    """A copy of `made`."""
    return Path(shutil.copytree(made, tmp_path / "run"))


def rows_of(folder):
    with open(folder / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file))


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def is_one_line(found, *names):
    """Exit code 2 and one line on stderr that holds all of `names`; no traceback, nothing else."""
    code, out, lines = found
    assert code == 2, lines
    assert "Traceback" not in out + "".join(lines)
    assert len(lines) == 1, lines
    assert lines[0].startswith("minirlvr: ")
    for name in names:
        assert str(name) in lines[0]


# --- the real program -----------------------------------------------------------------------------------------------


def test_a_run_folder_holds_what_the_contract_says(real):
    """config, metrics, summary, picture and one checkpoint for each method and seed; nothing half-written."""
    folder, code, _, err = real
    assert code == 0, err
    checkpoints = [f"checkpoint-{method}-seed{seed}.pt" for method in METHODS for seed in (0, 1)]
    assert sorted(contents(folder)) == sorted(
        ["config.json", "metrics.csv", "summary.json", "collapse.png", *checkpoints]
    )


def test_one_job_at_a_time_gives_the_same_bytes(real, cli, tmp_path):
    """The numbers depend neither on --jobs nor on the process: two workers, and one after the other in this one."""
    code, _, lines = cli(*REAL, "--jobs", 1, "--out", tmp_path / "again")
    assert code == 0, lines
    one, two = contents(tmp_path / "again"), contents(real[0])
    assert one["metrics.csv"] == two["metrics.csv"]
    assert one["summary.json"] == two["summary.json"]


def test_nothing_is_printed_twice(real):
    """Each line of the output comes once: one opening, one table, one closing line that names the folder."""
    _, _, out, err = real
    lines = [line for line in out.splitlines() if line.strip()]
    assert len(set(lines)) == len(lines)
    assert out.count("reference  ") == 2  # one row for each split
    assert "run" in lines[-1]
    assert not said(err)


def test_the_closing_table_has_every_method_and_split(real):
    """One row for each, with the measures of the contract, and the reference to compare with."""
    out = real[2]
    for measure in ("pass@1", "pass@8", "distinct@8", "effective_modes", "retained_mass"):
        assert measure in out
    for name in ("reference", *METHODS):
        assert len([line for line in out.splitlines() if line.split()[:1] == [name]]) == 2


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


def test_checkpoints_load_without_running_code(real):
    """weights_only=True suffices; method, seed and step are in them."""
    for method in METHODS:
        for seed in (0, 1):
            state = torch.load(real[0] / f"checkpoint-{method}-seed{seed}.pt", weights_only=True)
            assert (state["method"], state["seed"], state["step"]) == (method, seed, 4)


def test_collapse_png_is_a_picture(real):
    """A PNG of some size."""
    picture = (real[0] / "collapse.png").read_bytes()
    assert picture.startswith(b"\x89PNG\r\n\x1a\n")
    assert len(picture) > 10_000


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

    monkeypatch.setattr(command_line, "load_reference", interrupted)
    try:
        code, _, lines = cli(*on_pairs(tmp_path / "x"))
    except KeyboardInterrupt:
        pytest.fail("Ctrl-C ends in a traceback")
    assert code == 130
    assert len(lines) <= 1


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
    code, _, lines = cli(*given)
    assert code == 2 and len(lines) == 1 and message in lines[0]


def test_without_the_extras_the_flag_says_what_to_install(cli, monkeypatch):
    """One line, and everything else goes on working."""
    monkeypatch.setitem(sys.modules, "text_runs", None)
    code, _, lines = cli("--policy", "hf:anything")
    assert code == 2 and len(lines) == 1 and "pip install -r requirements-hf.txt" in lines[0]


# --- help -----------------------------------------------------------------------------------------------------------


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


# --- mistakes in the flags ------------------------------------------------------------------------------------------

MISTAKES = [
    ("--task summs", "summs", "sums"),
    ("--methods grpp", "grpp", "grpo"),
    ("--methods grpo+iac+iac", "grpo+iac+iac"),
    ("--methods exact+dlc", "exact+dlc"),
    ("--methods", "methods"),
    ("--methods grpo grpo", "once"),
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
NUMBERS = (
    "learning-rate alpha mu beta temperature max-grad-norm memory-learning-rate entropy-bonus clip-high f-grpo-gamma"
)
MISTAKES += [(f"--{flag} {bad}", f"--{flag}") for flag in NUMBERS.split() for bad in ("-0.5", "nan", "inf", "-inf")]


@pytest.mark.parametrize(("flags", "names"), [(flags, names) for flags, *names in MISTAKES], ids=lambda v: str(v)[:40])
def test_a_wrong_flag_is_one_line(cli, flags, names):
    """Exit code 2, one line that names the flag or the value, and no folder is made."""
    is_one_line(cli(*flags.split()), *names)
    assert not list(Path.cwd().iterdir())


def test_two_wrong_flags_are_one_line_too(cli):
    """However much is wrong."""
    is_one_line(cli("--stepz", 3, "--task", "x", "--seeds", "y"))


def test_a_mistake_ends_the_program_itself_with_2(programs):
    """The exit code reaches the shell, the line is on stderr, and no folder is made."""
    folder, code, out, err = programs["mistake"]
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert not folder.exists()


def test_a_task_without_modes_is_one_line(cli, monkeypatch, tmp_path):
    """A prompt with no correct answer is refused by name before anything is made."""

    class Hopeless(Pairs):
        def modes(self, prompt):
            return [] if prompt == "b=" else super().modes(prompt)

    monkeypatch.setitem(TASKS, "pairs", Hopeless)
    is_one_line(cli(*on_pairs(tmp_path / "x")), "'b='")
    assert not (tmp_path / "x").exists()


def test_out_does_not_overwrite_another_run(cli, folder):
    """One line that names the folder and --resume, and not a byte of it is changed."""
    before = contents(folder)
    is_one_line(cli(*on_pairs(folder)), folder, "--resume")
    assert contents(folder) == before


def test_out_may_be_an_empty_folder_and_not_a_file(cli, tmp_path):
    """An empty folder is as good as none; a file is one line."""
    (tmp_path / "file").write_text("mine")
    (tmp_path / "empty").mkdir()
    is_one_line(cli(*on_pairs(tmp_path / "file")), tmp_path / "file")
    is_one_line(cli(*on_pairs(tmp_path / "file" / "below")), tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"
    assert cli(*on_pairs(tmp_path / "empty", steps=1, seeds=1, methods=["grpo"]))[0] == 0


def test_group_size_1_is_enough_without_groups(cli, tmp_path):
    """REINFORCE++ and exact compare with no one."""
    found = cli(*on_pairs(tmp_path / "x", "--group-size", 1, steps=1, seeds=1, methods=["reinforce++", "exact"]))
    assert found[0] == 0, found


# --- what a run leaves ----------------------------------------------------------------------------------------------


def test_out_unless_given_is_under_runs(cli):
    """runs/TASK-DATE-TIME, and the output says so."""
    flags = on_pairs("", steps=1, seeds=1, methods=["grpo"])
    flags = flags[: flags.index("--out")]
    code, out, _ = cli(*flags)
    (made,) = Path("runs").iterdir()
    assert code == 0
    assert re.fullmatch(r"pairs-\d{8}-\d{6}", made.name)
    assert str(made) in out


def test_one_seed_has_no_interval(cli, tmp_path):
    """The mean alone; low and high are null, and the file is JSON without NaN."""
    assert cli(*on_pairs(tmp_path / "x", steps=2, seeds=1))[0] == 0
    text = (tmp_path / "x" / "summary.json").read_text()
    summary = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    value = summary["grpo"]["train"]["pass@1"]
    assert value["mean"] is not None
    assert value["low"] is value["high"] is None


def test_a_seed_is_the_same_whatever_stands_beside_it(cli, made, tmp_path):
    """Seed 1 alone, of one method alone, gives the rows it gave among others."""
    assert cli(*on_pairs(tmp_path / "x", "--first-seed", 1, seeds=1, methods=["grpo+iac+dlc"]))[0] == 0
    alone = rows_of(tmp_path / "x")
    assert alone == [row for row in rows_of(made) if (row["method"], row["seed"]) == ("grpo+iac+dlc", "1")]


def test_flat_and_cut_groups_are_explained(cli, monkeypatch, tmp_path):
    """Nothing right anywhere: the output says that every group was flat."""

    class Wrong(Pairs):
        def verify(self, prompt, completion):
            return False

    monkeypatch.setitem(TASKS, "pairs", Wrong)
    code, out, _ = cli(*on_pairs(tmp_path / "x", seeds=1, methods=["grpo"]))
    assert code == 0
    assert "every group was flat" in out


def test_the_reference_is_made_once_and_a_damaged_cache_is_made_again(cli, monkeypatch, tmp_path):
    """The second run reads the file; a file cut short is no obstacle; another shape has another name."""
    monkeypatch.setattr(command_line, "load_reference", LOAD_REFERENCE)
    monkeypatch.setenv("MINIRLVR_CACHE", str(tmp_path / "cache"))
    few = {"steps": 1, "seeds": 1, "methods": ["grpo"]}
    assert cli(*on_pairs(tmp_path / "a", **few))[0] == 0
    (cached,) = (tmp_path / "cache").iterdir()
    cached.write_bytes(cached.read_bytes()[:1000])
    assert cli(*on_pairs(tmp_path / "b", **few))[0] == 0
    assert (tmp_path / "a" / "metrics.csv").read_bytes() == (tmp_path / "b" / "metrics.csv").read_bytes()
    assert cached.stat().st_size > 1000
    assert cli(*on_pairs(tmp_path / "c", "--layers", 2, **few))[0] == 0
    assert len(list((tmp_path / "cache").iterdir())) == 2


def test_report_draws_a_folder_again(folder, capsys):
    """From metrics.csv and config.json alone, with the table that the run printed."""
    (folder / "collapse.png").unlink()
    assert report.main([str(folder)]) == 0
    out = capsys.readouterr().out
    assert (folder / "collapse.png").read_bytes().startswith(b"\x89PNG")
    for method in METHODS:
        assert out.count(f"\n{method} ") == 2


@pytest.mark.parametrize("missing", ["metrics.csv", "config.json", "both"])
def test_report_on_no_run_is_one_line(folder, capsys, missing):
    """A folder that no run made: exit code 2 and one line, no traceback."""
    for name in ("metrics.csv", "config.json") if missing == "both" else (missing,):
        (folder / name).unlink()
    try:
        code = report.main([str(folder)])
    except OSError as error:
        pytest.fail(f"traceback: {error}")
    assert code == 2
    assert len(said(capsys.readouterr().err)) == 1


# --- resume ---------------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    "flags", ["--alpha 2", "--methods grpo", "--seeds 3", "--task sums", "--group-size 4", "--out other", "--width 32"]
)
def test_resume_goes_on_with_its_own_settings(cli, folder, flags):
    """Any flag but --steps, --jobs and --device is one line, and nothing is changed or made."""
    before = contents(folder)
    is_one_line(cli("--resume", folder, *flags.split()), "--steps")
    assert contents(folder) == before
    assert not Path("other").exists()


@pytest.mark.parametrize("what", ["missing", "empty folder", "file"])
def test_resume_of_no_run_is_one_line(cli, tmp_path, what):
    """A folder that is not there, an empty one, a file."""
    path = tmp_path / "nothing"
    if what == "empty folder":
        path.mkdir()
    if what == "file":
        path.write_text("x")
    is_one_line(cli("--resume", path), path)


def setting(group, name, value):
    def damage(config):
        config["settings"][group][name] = value

    return damage


CONFIGS = {
    "steps a string": setting("experiment", "steps", "4"),
    "steps a fraction": setting("experiment", "steps", 4.5),
    "steps null": setting("experiment", "steps", None),
    "steps a list": setting("experiment", "steps", [4]),
    "steps huge": setting("experiment", "steps", 10**400),
    "steps NaN": setting("experiment", "steps", math.nan),
    "methods a string": setting("experiment", "methods", "grpo"),
    "methods null": setting("experiment", "methods", None),
    "methods of numbers": setting("experiment", "methods", [1]),
    "method unknown": setting("experiment", "methods", ["grpp"]),
    "task unknown": setting("experiment", "task", "chess"),
    "task a list": setting("experiment", "task", []),
    "device unknown": setting("experiment", "device", "tpu"),
    "policy unknown": setting("experiment", "policy", 3),
    "temperature null": setting("sampling", "temperature", None),
    "aggregate unknown": setting("update", "aggregate", "mean"),
    "ratio unknown": setting("update", "ratio", "words"),
    "kl kind unknown": setting("update", "kl_kind", "k9"),
    "importance unknown": setting("calibration", "importance", "some"),
    "memory data unknown": setting("calibration", "memory_data", "most"),
    "alpha null": setting("calibration", "alpha", None),
    "a switch a string": setting("calibration", "iac_divide", "no"),
    "heads 0": setting("shape", "heads", 0),
    "width a string": setting("shape", "width", "16"),
    "unknown setting": setting("update", "momentum", 0.9),
    "unknown group": lambda config: config["settings"].update(extras={}) or config["settings"].pop("update"),
    "group a list": lambda config: config["settings"].update(update=[1]),
    "group null": lambda config: config["settings"].update(update=None),
    "no settings": lambda config: config.pop("settings"),
    "settings a string": lambda config: config.update(settings="all"),
}


@pytest.mark.parametrize("damage", CONFIGS.values(), ids=list(CONFIGS))
def test_resume_with_a_wrong_setting_is_one_line(cli, folder, damage):
    """config.json edited into something that never ran: refused before anything is changed."""
    config = json.loads((folder / "config.json").read_text())
    damage(config)
    (folder / "config.json").write_text(json.dumps(config))
    before = contents(folder)
    is_one_line(cli("--resume", folder), folder)
    assert contents(folder) == before


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", "3", '{"settings": 1}', "[" * 100_000, "\x00", "\udcff"],
    ids=lambda text: repr(text)[:20],
)
def test_resume_with_a_config_that_is_none_is_one_line(cli, folder, text):
    """Cut short, not JSON, not UTF-8, not an object."""
    (folder / "config.json").write_bytes(text.encode(errors="surrogateescape"))
    is_one_line(cli("--resume", folder), folder)


# --- checkpoints ----------------------------------------------------------------------------------------------------

DAMAGED = "checkpoint-grpo-seed1.pt"


class Evil:
    """A pickle that leaves a file behind when it is loaded the careless way."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


def edited(**changed):
    """The checkpoint with some entries replaced; None takes one out."""

    def damage(path):
        state = torch.load(path, weights_only=True) | changed
        torch.save({key: value for key, value in state.items() if value is not None}, path)

    return damage


def cut(share):
    return lambda path: path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])


CHECKPOINTS = {
    "empty": cut(0),
    "a few bytes": lambda path: path.write_bytes(path.read_bytes()[:10]),
    "cut in half": cut(0.5),
    "cut at the end": cut(0.999),
    "text": lambda path: path.write_text("hello"),
    "not ours, a list": lambda path: torch.save([1, 2], path),
    "not ours, weights": lambda path: torch.save(tiny_policy(7).state_dict(), path),
    "not ours, code": lambda path: torch.save({"a": Evil(path.with_name("marker"))}, path),
    "other version": edited(version=99),
    "version missing": edited(version=None),
    "other shape": edited(policy=tiny_policy(7, layers=2).state_dict()),
    "other weights": edited(policy=tiny_policy(9, layers=1).state_dict()),
    "no policy": edited(policy=None),
    "no rows": edited(rows=None),
    "no optimiser": edited(optimizer=None),
    "no generator": edited(generator=None),
    "step a string": edited(step="four"),
    "rows a number": edited(rows=7),
    "other seed": lambda path: shutil.copy(path.with_name("checkpoint-grpo-seed0.pt"), path),
    "other method": lambda path: shutil.copy(path.with_name("checkpoint-grpo+iac+dlc-seed1.pt"), path),
    "a folder": lambda path: path.unlink() or path.mkdir(),
}


def test_a_checkpoint_from_a_stranger_runs_no_code(tmp_path):
    """A pickle that would leave a file behind is refused, and leaves none."""
    torch.save({"format": command_line.FORMAT[0], "rows": Evil(tmp_path / "marker")}, tmp_path / "evil.pt")
    with pytest.raises(UserError, match=r"evil\.pt"):
        command_line.load_checkpoint(tmp_path / "evil.pt", "grpo", 0)
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize("damage", CHECKPOINTS.values(), ids=list(CHECKPOINTS))
def test_resume_with_a_bad_checkpoint_is_one_line_and_the_others_go_on(cli, folder, damage):
    """It is named, runs no code and lends no rows to metrics.csv; the three other runs reach step 8."""
    damage(folder / DAMAGED)
    is_one_line(cli("--resume", folder, "--steps", 8), DAMAGED)
    assert not (folder / "marker").exists()
    ends = {f"checkpoint-{method}-seed{seed}.pt": 8 for method in METHODS for seed in (0, 1)}
    del ends[DAMAGED]
    for name in ends:
        assert torch.load(folder / name, weights_only=True)["step"] == 8, name
    keys = [(row["method"], row["seed"], row["step"], row["split"]) for row in rows_of(folder)]
    assert len(set(keys)) == len(keys)
    assert ("grpo", "0", "8", "train") in keys
    assert ("grpo+iac+dlc", "1", "8", "heldout") in keys


# --- what an outsider broke -----------------------------------------------------------------------------------------


def test_resume_keeps_the_command_that_made_the_run(folder, cli):
    """config.json names what made the folder; what went on with it is listed beside it."""
    before = json.loads((folder / "config.json").read_text())
    assert cli("--resume", folder, "--steps", 6)[0] == 0
    after = json.loads((folder / "config.json").read_text())
    assert after["command"] == before["command"]
    assert len(after["resumed"]) == 1
    assert after["settings"]["experiment"]["steps"] == 6


def test_a_config_that_cannot_be_rewritten_is_not_lost(folder, cli, monkeypatch):
    """A full disk while resuming leaves config.json as it was."""
    before = (folder / "config.json").read_bytes()

    def full_disk(path, text, **_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full_disk)
    is_one_line(cli("--resume", folder), "--resume", "No space left")
    assert (folder / "config.json").read_bytes() == before


def test_a_checkpoint_that_cannot_be_written_is_a_users_mistake(tmp_path):
    """A folder that is gone or full: one line, and no half file."""
    with pytest.raises(UserError, match="cannot be written"):
        command_line.save({"a": 1}, tmp_path / "gone" / "checkpoint.pt")


def test_fewer_steps_than_done_are_refused(folder, cli):
    """--resume never says that a run of four steps has two."""
    code, _, lines = cli("--resume", folder, "--steps", 2)
    assert code == 2 and all("--steps" in line for line in lines)


def test_moments_of_another_shape_are_refused(folder, cli):
    """The fused optimizer would read past them: the checkpoint is named instead."""
    path = next(folder.glob("checkpoint-grpo-seed0.pt"))
    state = torch.load(path, weights_only=True)
    state["optimizer"]["state"][0]["exp_avg"] = torch.ones(1)
    torch.save(state, path)
    code, _, lines = cli("--resume", folder, "--steps", 6)
    assert code == 2 and any(path.name in line and "moments" in line for line in lines)


def test_a_cache_that_cannot_be_written_is_named(monkeypatch, tmp_path, capsys):
    """The line says which environment variable helps."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MINIRLVR_CACHE", str(tmp_path / "file" / "below"))
    with pytest.raises(UserError, match="MINIRLVR_CACHE"):
        LOAD_REFERENCE(Pairs(), Shape(layers=1, width=16, heads=2))


def test_a_cached_reference_of_nan_is_made_again(monkeypatch, tmp_path):
    """Damaged weights are not used in silence."""
    monkeypatch.setenv("MINIRLVR_CACHE", str(tmp_path))
    shape = Shape(layers=1, width=16, heads=2)
    good = LOAD_REFERENCE(Pairs(), shape).state_dict()
    (path,) = tmp_path.iterdir()
    torch.save({name: torch.full_like(value, float("nan")) for name, value in good.items()}, path)
    again = LOAD_REFERENCE(Pairs(), shape).state_dict()
    assert all(torch.equal(again[name], good[name]) for name in good)


def test_flat_groups_are_blamed_only_where_nothing_was_learned():
    """REINFORCE++ learns from flat groups: the sentence needs a gradient of 0 as well."""
    row = {"method": "reinforce++", "step": 10, "reward": 0.5, "flat_groups": 1.0, "cut_answers": 0.0, "entropy": 1.0}
    assert report.explain([row | {"grad_norm": 0.7}]) == []
    assert "flat" in report.explain([row | {"grad_norm": 0.0}])[0]
