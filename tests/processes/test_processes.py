"""Spawn, handshake, watch, stop: with children that do nothing, load for ever, fail, or are killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.context import SpawnProcess
from pathlib import Path

import psutil
import pytest

from tests.processes import fakes
from tinysrt.errors import StartupError
from tinysrt.processes import Entry, Launched, launch
from tinysrt.server_args import ServerArgs

REPOSITORY = Path(__file__).parents[2]
SECONDS = 20.0  # generous: a loaded machine takes two or three to spawn


def wait_until(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + SECONDS
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def assert_nothing_is_left(launched: Launched) -> None:
    assert not any(child.process.is_alive() for child in launched.children), "no orphan"
    assert not os.path.exists(launched.ipc_names.directory), "no stale socket directory"


def test_launch_returns_what_the_scheduler_says_when_it_is_ready() -> None:
    with launch(ServerArgs(), fakes.ready, fakes.ready) as launched:
        info = launched.wait_ready()
        assert info["max_total_num_tokens"] == 4096
        assert info["pid"] == launched.children[0].process.pid, "the scheduler's word, not the detokenizer's"
        assert oct(os.stat(launched.ipc_names.directory).st_mode)[-3:] == "700"
        launched.stop(0.0)
    assert_nothing_is_left(launched)


def test_children_are_spawned_not_forked() -> None:
    """Trap 57: a fork would copy locks that other threads hold, and CUDA state that no child can use."""
    with launch(ServerArgs(), fakes.ready, fakes.ready) as launched:
        assert all(isinstance(child.process, SpawnProcess) for child in launched.children)
        launched.stop(0.0)


def test_children_are_recognizable_in_ps() -> None:
    with launch(ServerArgs(), fakes.ready, fakes.ready) as launched:
        launched.wait_ready()
        titles = [psutil.Process(child.process.pid).cmdline()[0] for child in launched.children]
        assert titles == ["tinysrt::scheduler", "tinysrt::detokenizer"]
        launched.stop(0.0)


@pytest.mark.parametrize(
    ("scheduler", "message"),
    [
        (fakes.says_error, "no such folder: nowhere"),
        (fakes.raises_startup_error, "the model is too large for this machine"),
        (fakes.raises_bug, "the scheduler process failed: ValueError: two lines of trouble"),
        (
            fakes.killed_while_loading,
            "the scheduler process was killed by SIGKILL (out of memory?) while the server was starting",
        ),
        (fakes.leaves_without_a_word, "the scheduler process ended with exit code 0 while the server was starting"),
    ],
)
def test_a_scheduler_that_fails_to_start_ends_the_launch_with_one_line(scheduler: Entry, message: str) -> None:
    started = time.monotonic()
    launched = launch(ServerArgs(), scheduler, fakes.loads_for_ever)
    with pytest.raises(StartupError) as error:
        launched.wait_ready()
    assert str(error.value) == message
    assert time.monotonic() - started < SECONDS
    assert_nothing_is_left(launched)


def test_a_detokenizer_killed_while_the_scheduler_loads_ends_the_launch() -> None:
    launched = launch(ServerArgs(), fakes.loads_for_ever, fakes.killed_while_loading)
    with pytest.raises(StartupError, match="the detokenizer process was killed by SIGKILL"):
        launched.wait_ready()
    assert_nothing_is_left(launched)


def test_a_detokenizer_that_dies_after_its_ready_while_the_scheduler_loads_ends_the_launch() -> None:
    launched = launch(ServerArgs(), fakes.loads_for_ever, fakes.ready_then_killed)
    with pytest.raises(StartupError, match="the detokenizer process was killed by SIGKILL"):
        launched.wait_ready()
    assert_nothing_is_left(launched)


def test_a_child_killed_after_ready_is_reported_once() -> None:
    with launch(ServerArgs(), fakes.ready, fakes.ready) as launched:
        launched.wait_ready()
        messages: list[str] = []
        told = threading.Event()
        launched.watch(lambda message: (messages.append(message), told.set()))
        for child in launched.children:
            os.kill(child.process.pid, signal.SIGKILL)
        assert told.wait(SECONDS)
        time.sleep(0.2)
        assert len(messages) == 1 and "was killed by SIGKILL" in messages[0]
        launched.stop(0.0)
    assert_nothing_is_left(launched)


def test_a_goodbye_with_exit_code_0_is_no_crash() -> None:
    with launch(ServerArgs(), fakes.ready_then_leaves, fakes.ready) as launched:
        launched.wait_ready()
        messages: list[str] = []
        launched.watch(messages.append)
        launched.children[0].process.join(SECONDS)
        time.sleep(0.2)
        assert messages == []
        launched.stop(0.0)


def test_stop_gives_children_time_to_leave_and_reports_no_death() -> None:
    launched = launch(ServerArgs(), fakes.ready_then_leaves, fakes.ready_then_leaves)
    launched.wait_ready()
    messages: list[str] = []
    launched.watch(messages.append)
    launched.stop(SECONDS)
    assert [child.process.exitcode for child in launched.children] == [0, 0], "they left by themselves"
    launched.stop()  # a second stop finds nothing to do
    assert messages == []
    assert_nothing_is_left(launched)


def test_children_leave_signals_to_the_main_process() -> None:
    with launch(ServerArgs(), fakes.ready, fakes.ready) as launched:
        launched.wait_ready()
        for child in launched.children:
            os.kill(child.process.pid, signal.SIGTERM)
            os.kill(child.process.pid, signal.SIGINT)
        time.sleep(0.3)
        assert all(child.process.is_alive() for child in launched.children)
        launched.stop(0.0)


def run_program(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.processes.abandon", *arguments]
    return subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_children_and_sockets_go_with_their_parent(how: signal.Signals) -> None:
    with run_program() as parent:
        assert parent.stdout is not None
        told = json.loads(parent.stdout.readline())
        parent.send_signal(how)
        parent.wait(SECONDS)
    assert wait_until(lambda: all(is_gone(pid) for pid in told["pids"]))
    assert wait_until(lambda: not os.path.exists(told["directory"]))


def test_children_outlive_the_thread_that_launched_them() -> None:
    with run_program("thread") as parent:
        out, _ = parent.communicate(timeout=SECONDS)
    assert json.loads(out) == [True, True]
    assert parent.returncode == 0, "and an exit without stop() does not hang"
