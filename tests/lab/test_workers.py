"""Jobs side by side: whatever they are, one mistake stops no other, a fault stops all, and Ctrl-C asks politely."""

import multiprocessing
import os
import signal

import pytest
import torch
from conftest import InThisProcess

from lab import workers
from lab.workers import available_cores, run_all, signals_go_to
from tests.lab.jobs import Dies, Fault, Mistake, SignalsParent, WaitForStop, Write


@pytest.fixture
def in_this_process(monkeypatch):
    """No worker processes; and one thread, as before."""
    monkeypatch.setattr(workers, "ProcessPoolExecutor", InThisProcess)
    yield
    torch.set_num_threads(1)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def handlers():
    return [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]


# --- in this process ------------------------------------------------------------------------------------------------


def test_jobs_need_not_be_runs(in_this_process, tmp_path):
    """All are done, in order, after `first`; nothing went wrong; signals go where they went before."""
    before = handlers()
    jobs = [Write(tmp_path / f"{i}") for i in range(3)]
    outcome = run_all(jobs, 1, 1, 9, first=lambda: (tmp_path / "first").write_text("") and names(tmp_path))
    assert outcome == ([], None, False)
    assert names(tmp_path) == ["0", "1", "2", "first"]
    assert handlers() == before


def test_first_is_done_before_any_job(in_this_process, tmp_path):
    """A job finds what `first` made."""
    seen = []

    class Look:
        def run(self, tick, stopped):
            seen.append(names(tmp_path))

    run_all([Look()], 1, 1, 1, first=(tmp_path / "made").touch)
    assert seen == [["made"]]


def test_a_mistake_is_said_and_the_others_go_on(in_this_process, tmp_path):
    """Every UserError is collected; no fault, no stop."""
    jobs = [Mistake("one"), Write(tmp_path / "a"), Mistake("two"), Write(tmp_path / "b")]
    mistakes, fault, stopped = run_all(jobs, 1, 1, 6)
    assert (sorted(mistakes), fault, stopped) == (["one", "two"], None, False)
    assert names(tmp_path) == ["a", "b"]


def test_a_fault_is_handed_on_and_stops(in_this_process, tmp_path):
    """What is no mistake of the user's is returned as it was raised, beside the mistakes."""
    mistakes, fault, stopped = run_all([Fault("ours"), Mistake("theirs")], 1, 1, 2)
    assert (mistakes, stopped) == (["theirs"], True)
    assert isinstance(fault, ZeroDivisionError) and str(fault) == "ours"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_lets_every_job_stop_where_it_can_go_on(in_this_process, tmp_path, number):
    """Ctrl-C or a polite kill: the jobs see the stop sign, nobody is interrupted, and the outcome says so."""
    before = handlers()
    outcome = run_all([SignalsParent(number), WaitForStop(tmp_path / "job")], 1, 1, 2)
    assert outcome == ([], None, True)
    assert names(tmp_path) == ["job.begun", "job.stopped"]
    assert handlers() == before


def test_ctrl_c_during_first_need_not_wait(in_this_process, tmp_path):
    """Nothing is lost yet: KeyboardInterrupt at once, no job begins, and signals go where they went before."""
    before = handlers()
    with pytest.raises(KeyboardInterrupt):
        run_all([Write(tmp_path / "a")], 1, 1, 3, first=lambda: os.kill(os.getpid(), signal.SIGINT))
    assert not names(tmp_path)
    assert handlers() == before


def test_a_mistake_in_first_is_raised(in_this_process, tmp_path):
    """As it is: there is nothing that could go on."""

    def first():
        raise ValueError("no reference")

    with pytest.raises(ValueError, match="no reference"):
        run_all([Write(tmp_path / "a")], 1, 1, 3, first)
    assert not names(tmp_path)


def test_steps_are_counted_over_all_jobs(in_this_process, tmp_path, capsys):
    """The bar ends at the sum of what the jobs said."""
    run_all([Write(tmp_path / "a", 3), Write(tmp_path / "b", 4)], 1, 1, 7)
    assert "7/7" in capsys.readouterr().err


def test_signals_go_back_after_an_exception():
    """Whatever happens inside the block."""
    before = handlers()
    with pytest.raises(ValueError), signals_go_to(signal.SIG_IGN):
        assert handlers() == [signal.SIG_IGN] * 2
        raise ValueError
    assert handlers() == before


def test_cores_are_those_that_may_be_used():
    """At least one."""
    assert 1 <= available_cores() <= os.cpu_count()


# --- in processes of their own --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_processes_side_by_side(tmp_path):
    """Two workers share six jobs, a mistake between them; none of them is this process, and none is left behind."""
    paths = [tmp_path / f"{i}" for i in range(5)]
    outcome = run_all([Mistake("theirs"), *map(Write, paths)], 2, 1, 15)
    assert outcome == (["theirs"], None, False)
    processes = {int(path.read_text()) for path in paths}
    assert 1 <= len(processes) <= 2 and os.getpid() not in processes
    assert not multiprocessing.active_children()


@pytest.mark.slow
def test_a_fault_stops_the_others_and_what_has_not_begun(tmp_path):
    """Those at work stop where they can go on; those that wait never begin; the fault comes back whole."""
    jobs = [WaitForStop(tmp_path / "one"), Fault("ours"), *(WaitForStop(tmp_path / f"{i}") for i in range(8))]
    mistakes, fault, stopped = run_all(jobs, 2, 1, 10)
    assert (mistakes, stopped) == ([], True)
    assert isinstance(fault, ZeroDivisionError) and str(fault) == "ours"
    begun, ended = ({path.stem for path in tmp_path.glob(end)} for end in ("*.begun", "*.stopped"))
    assert "one" in begun and begun == ended
    assert len(begun) < 6, "jobs that wait should not begin"
    assert not multiprocessing.active_children()


@pytest.mark.slow
def test_a_process_that_dies_is_said(tmp_path):
    """As the user's machine running out of memory, with the way to go on."""
    mistakes, fault, stopped = run_all([Dies(), Write(tmp_path / "a")], 1, 1, 3)
    assert set(mistakes) == {"a worker process died (out of memory?); go on with --resume and fewer --jobs"}
    assert (fault, stopped) == (None, False)
    assert not multiprocessing.active_children()
