"""The port is taken before anything slow happens, and the line that the server prints really works."""

from __future__ import annotations

import dataclasses
import socket
import subprocess
from types import SimpleNamespace
from typing import Any

import pytest

from tests.entrypoints.fakes import make_app, running
from tinysrt.entrypoints.http_server import HttpServer, _reserved_port
from tinysrt.errors import StartupError


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0", ""])
def test_a_reserved_port_refuses_connections_until_it_is_served(host: str) -> None:
    with _reserved_port(host, 0) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=5)


@pytest.mark.parametrize("listening", [False, True], ids=["a server that still loads", "a server that runs"])
def test_a_port_in_use_is_one_clear_line(listening: bool) -> None:
    with _reserved_port("127.0.0.1", 0) as other:
        if listening:
            other.listen()
        port = other.getsockname()[1]
        with pytest.raises(StartupError, match=f"127.0.0.1:{port}.*in use.*--port"), _reserved_port("127.0.0.1", port):
            pass


def test_a_host_that_is_not_ours_is_one_clear_line() -> None:
    with pytest.raises(StartupError, match="192.0.2.1"), _reserved_port("192.0.2.1", 0):
        pass
    with pytest.raises(StartupError, match="no.such.host.invalid"), _reserved_port("no.such.host.invalid", 0):
        pass


@pytest.mark.parametrize("flags", [{}, {"skip_tokenizer_init": True}])
def test_the_curl_line_of_the_ready_message_works(flags: dict[str, Any]) -> None:
    app, manager = make_app(**flags)
    with running(app) as url:
        fake: Any = SimpleNamespace(getsockname=lambda: ("", int(url.rpartition(":")[2])))
        args = dataclasses.replace(manager.server_args, host="0.0.0.0")
        line = HttpServer(app, manager, args, fake)._curl_line()  # type: ignore[arg-type]
        done = subprocess.run(["sh", "-c", line.replace("curl", "curl -s", 1)], capture_output=True, text=True)
        assert "Hello" in done.stdout, done
