"""A real `tinysrt serve` as a child process, with a socket directory of its own that can be looked at."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from tinysrt.processes import ask_kernel_to_die_with_parent

ROOT = Path(__file__).parents[2]
START_SECONDS, STOP_SECONDS = 240.0, 60.0  # a loaded two-core machine; alone it takes ten and one


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """`with Server(tmp_path, "--model-path", …) as server:` starts one; leaving kills what is left of it."""

    def __init__(self, folder: Path, *flags: str, module: str = "tinysrt.launch_server"):
        self.port = free_port()
        self.sockets = folder / "s"  # short: the path of a Unix socket may have 107 bytes
        self.sockets.mkdir(exist_ok=True)
        self.log = folder / "log"
        command = [sys.executable, "-m", module, *(["serve"] if module == "tinysrt.cli" else [])]
        self.process = subprocess.Popen(
            [*command, "--port", str(self.port), *flags],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=open(self.log, "w"),
            env=os.environ | {"TMPDIR": str(self.sockets)},
            preexec_fn=ask_kernel_to_die_with_parent,  # also when the test run is killed
        )
        self.family: list[psutil.Process] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def wait_ready(self) -> Server:
        deadline = time.monotonic() + START_SECONDS
        while self.status("/ready") != 200:
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.1)
        self.family = psutil.Process(self.process.pid).children(recursive=True)
        return self

    def child(self, name: str) -> psutil.Process:
        return next(child for child in self.family if f"tinysrt::{name}" in " ".join(child.cmdline()))

    def status(self, path: str) -> int:
        """HTTP status, or 0 where nobody answers."""
        try:
            with urllib.request.urlopen(self.url + path, timeout=30) as response:
                return int(response.status)
        except urllib.error.HTTPError as error:
            return error.code
        except (urllib.error.URLError, OSError):
            return 0

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self.url + path, timeout=30) as response:
            return json.load(response)

    def post(self, path: str, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        return urllib.request.urlopen(request, timeout=STOP_SECONDS)

    def stream(self, prompt: str, max_new_tokens: int) -> Iterator[str]:
        """The data of each event of a streamed /generate that runs to its length."""
        params = {"max_new_tokens": max_new_tokens, "ignore_eos": True, "temperature": 0}
        with self.post("/generate", {"text": prompt, "sampling_params": params, "stream": True}) as response:
            for line in response:
                if line.startswith(b"data: "):
                    yield line.decode().removeprefix("data: ").rstrip()

    def exit_code(self, seconds: float = STOP_SECONDS) -> int:
        return self.process.wait(seconds)

    def leftovers(self) -> list[str]:
        """Processes and files that should have gone with the server; waits a moment for the last of them."""
        psutil.wait_procs(self.family, timeout=10)
        alive = [str(child) for child in self.family if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
        return alive + [str(path) for path in self.sockets.glob("tinysrt-*")]

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
