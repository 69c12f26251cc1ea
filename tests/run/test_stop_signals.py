"""The first Ctrl-C or SIGTERM stops in order, the second one at once; what was ignored stays ignored."""

import contextlib
import os
import signal
import threading

import pytest

from lit_klrb.stops import Stopped, Stops

CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}
NAMES = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}


@pytest.fixture(autouse=True)
def heard():
    """Enable Ctrl-C, which children of a shell in the background ignore."""
    before = {number: signal.signal(number, signal.default_int_handler) for number in CODES}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def exit_code_of(action):
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        action()
    finally:
        os._exit(7)


@pytest.mark.parametrize("number", CODES)
def test_the_first_one_is_raised_where_the_program_is(number):
    with pytest.raises(Stopped, match=f"stopped by {NAMES[number]}") as stopped, Stops():
        os.kill(os.getpid(), number)
    assert stopped.value.exit_code == CODES[number]
    assert not isinstance(stopped.value, Exception)
    assert signal.getsignal(number) is signal.default_int_handler


@pytest.mark.parametrize("number", CODES)
def test_or_only_noted(number, capfd):
    with Stops(later="wait; once more to stop at once") as stops:
        assert stops.asked is None
        os.kill(os.getpid(), number)
        assert stops.asked == number
    assert capfd.readouterr().err == "wait; once more to stop at once\n"


@pytest.mark.parametrize("second", CODES)
def test_the_second_one_ends_the_process(second):
    def twice():
        with Stops(later="wait"):
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), second)

    assert exit_code_of(twice) == CODES[second]


@pytest.mark.parametrize(("first", "asked"), [(signal.SIGUSR1, "requeue 7\n"), (signal.SIGTERM, "")])
def test_a_save_that_the_end_of_a_slurm_job_cuts_off_is_followed_by_a_requeue(
    tmp_path, monkeypatch, first, asked
):
    (tmp_path / "scontrol").write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\n')
    (tmp_path / "scontrol").chmod(0o755)
    (tmp_path / "asked").touch()
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("SLURM_JOB_ID", "7")

    def cut_off():
        with Stops(later="saving"):
            os.kill(os.getpid(), first)
            os.kill(os.getpid(), signal.SIGTERM)

    assert exit_code_of(cut_off) == 143
    assert (tmp_path / "asked").read_text() == asked


@pytest.mark.parametrize("later", ["", "wait"])
def test_in_a_sweeps_cell_it_changes_nothing(later, monkeypatch):
    monkeypatch.setattr(Stops, "at_once", False)

    def thrice():
        with Stops(later) as stops:
            with contextlib.suppress(Stopped):
                os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGINT)
            os._exit(0 if stops.asked == signal.SIGTERM else 1)

    assert exit_code_of(thrice) == 0


def test_what_was_ignored_stays_ignored():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with Stops():
        os.kill(os.getpid(), signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        with pytest.raises(Stopped):
            os.kill(os.getpid(), signal.SIGTERM)


def test_an_inner_block_answers_in_place_of_the_outer():
    with Stops() as outer:
        with Stops(later="wait") as inner:
            os.kill(os.getpid(), signal.SIGTERM)
        assert (inner.asked, outer.asked) == (signal.SIGTERM, None)
        with pytest.raises(Stopped):
            os.kill(os.getpid(), signal.SIGTERM)


def test_other_threads_than_the_main_one_do_without():
    def listen():
        with Stops() as stops:
            found.append(stops.asked)

    found = []
    thread = threading.Thread(target=listen)
    thread.start()
    thread.join()
    assert found == [None]
