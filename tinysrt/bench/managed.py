"""A server that a bench starts and stops itself, so that two servers are never up at the same time.

    command with {port} ── spawn, a process group of its own ──▶ log file
                        ◀─ GET /health until 200, or the command ends: its last words are the error
    measure …
                        ── SIGTERM to the group, later SIGKILL ──▶ nothing is left

Two busy servers on two cores slow each other by a factor, and an idle one may still spin; so `bench serve --start`
runs each in turn. While one is up it is also looked at from outside: how long until it was ready, how much memory its
processes hold, what it burns when idle.

Invariant: when `with` ends, in whatever way, every process of the group has ended.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from tinysrt.errors import StartupError
from tinysrt.processes import ask_kernel_to_die_with_parent

STOP_SECONDS = 30.0
POLL_SECONDS = 0.1
IDLE_WINDOW = 3.0


class ManagedServer:
    def __init__(self, command: str, url: str, log: Path, *, start_timeout: float = 600.0):
        """`{port}` in command and url becomes a free port."""
        port = str(free_port())
        try:
            self.command = shlex.split(command.replace("{port}", port))
        except ValueError as error:
            raise StartupError(f"{command}: {error}") from None
        self.url = url.replace("{port}", port).rstrip("/")
        self.log = log
        self.start_timeout = start_timeout
        self.start_seconds = 0.0
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> ManagedServer:
        begin = time.monotonic()
        with open(self.log, "ab") as log:
            try:
                self._process = subprocess.Popen(
                    self.command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    preexec_fn=ask_kernel_to_die_with_parent,  # also if this bench is killed
                )
            except OSError as error:
                raise StartupError(f"{shlex.join(self.command)}: {error.strerror}") from None
        try:
            self._wait_until_healthy(begin + self.start_timeout)
        except BaseException:
            self._stop()
            raise
        self.start_seconds = time.monotonic() - begin
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def _wait_until_healthy(self, deadline: float) -> None:
        assert self._process is not None
        while not is_healthy(self.url):
            if self._process.poll() is not None:
                raise StartupError(f"{self.command[0]} ended before it was ready:\n{self._last_words()}")
            if time.monotonic() > deadline:
                raise StartupError(
                    f"{self.command[0]} is not ready after {self.start_timeout:g} s:\n{self._last_words()}"
                )
            time.sleep(POLL_SECONDS)

    def _stop(self) -> None:
        assert self._process is not None
        group = self._process.pid
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGTERM)
        deadline = time.monotonic() + STOP_SECONDS
        while self._alive() and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)  # what has ignored the first; also grandchildren whose parent is gone
        self._process.wait()

    def _alive(self) -> bool:
        assert self._process is not None
        self._process.poll()  # collects it
        try:
            os.killpg(self._process.pid, 0)
        except ProcessLookupError:
            return False
        return True

    def look(self) -> dict[str, Any]:
        """From outside, while no request runs: memory in MiB, and percent of one core that it burns idle."""
        family = self.family()
        before = sum(_cpu_seconds(process) for process in family)
        begin = time.monotonic()
        time.sleep(IDLE_WINDOW)
        burnt = sum(_cpu_seconds(process) for process in family) - before
        return {
            "start_s": round(self.start_seconds, 2),
            "rss_mib": round(sum(_resident(process) for process in family) / 2**20),
            "idle_cpu_percent": round(100 * burnt / (time.monotonic() - begin), 2),
        }

    def family(self) -> list[psutil.Process]:
        assert self._process is not None
        try:
            parent = psutil.Process(self._process.pid)
            return [parent, *parent.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def _last_words(self) -> str:
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(f"    {line}" for line in lines[-15:]) + f"\n    (all of it: {self.log})"


def _cpu_seconds(process: psutil.Process) -> float:
    with contextlib.suppress(psutil.Error):
        times = process.cpu_times()
        return times.user + times.system
    return 0.0


def _resident(process: psutil.Process) -> int:
    """Pages that several processes share count once: PSS where the system tells it, else RSS."""
    with contextlib.suppress(psutil.Error):
        memory = process.memory_full_info()
        return int(getattr(memory, "pss", memory.rss))
    return 0


def is_healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(url + "/health", timeout=10.0) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError, ValueError):
        return False


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
