"""A whole server, as an operator meets it: how it starts, refuses to start, drains, stops, and dies."""

from __future__ import annotations

import json
import signal
import socket
import time
import urllib.error
from pathlib import Path

import pytest

from tests.e2e.server import START_SECONDS, Server

pytestmark = pytest.mark.e2e


# ---- starting --------------------------------------------------------------------------------------


def test_sglangs_way_to_start_works_and_the_server_tells_what_it_is(tiny_model: Path, tmp_path: Path) -> None:
    with Server(tmp_path, "--model-path", str(tiny_model), "--tp", "1", "--page-size", "16") as server:
        server.wait_ready()
        info = server.get("/server_info")
        assert info["tensor_parallel_size"] == info["tp_size"] == 1 and info["page_size"] == 16
        assert info["chunked_prefill_size"] == 512 and info["max_running_requests"] == 64, "resolved for a CPU"
        assert info["max_total_num_tokens"] > 0 and info["device"] == "cpu" and info["random_seed"] is not None
        with server.post("/generate", {"text": "Hello", "sampling_params": {"max_new_tokens": 4}}) as response:
            assert json.load(response)["meta_info"]["completion_tokens"] <= 4
        assert server.child("scheduler") and server.child("detokenizer")
        log = server.log.read_text()
        assert "server_args: " in log and "page_size=16" in log and "ready to roll" in log
        server.process.send_signal(signal.SIGTERM)
        assert server.exit_code() == 0
        assert server.leftovers() == []


def refusal(server: Server) -> str:
    """What the server said last, having refused to start: exit code 1, one line, nothing left."""
    with server:
        assert server.exit_code(START_SECONDS) == 1
        assert server.leftovers() == []
    lines = server.log.read_text().splitlines()
    assert not any("Traceback" in line for line in lines), lines
    assert lines[-1].startswith("tinysrt: error: ")
    return lines[-1]


def test_a_port_in_use_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        assert port in refusal(Server(tmp_path, "--model-path", str(tiny_model), "--port", port))


def test_a_missing_model_is_refused(tmp_path: Path) -> None:
    assert "/no/such/model" in refusal(Server(tmp_path, "--model-path", "/no/such/model"))


def test_an_architecture_that_is_not_supported_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for path in tiny_model.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["GPTBigCodeForCausalLM"]}))
    assert "GPTBigCodeForCausalLM" in refusal(Server(tmp_path, "--model-path", str(folder)))


def test_too_little_memory_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    assert "memory" in refusal(Server(tmp_path, "--model-path", str(tiny_model), "--kv-pool-bytes", "100")).lower()


def test_a_context_that_is_too_long_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    message = refusal(Server(tmp_path, "--model-path", str(tiny_model), "--context-length", "100k"))
    assert "100000" in message.replace(",", "") and "8192" in message.replace(",", "")


@pytest.mark.parametrize("flag", ["--max-total-tokens", "--context-length"])
def test_no_room_for_any_prompt_is_refused(tiny_model: Path, tmp_path: Path, flag: str) -> None:
    assert flag in refusal(Server(tmp_path, "--model-path", str(tiny_model), flag, "10"))


def test_sigterm_while_it_loads_leaves_nothing(tiny_model: Path, tmp_path: Path) -> None:
    with Server(tmp_path, "--model-path", str(tiny_model)) as server:
        while not list(server.sockets.glob("tinysrt-*")):  # children are being spawned
            time.sleep(0.05)
        server.process.send_signal(signal.SIGTERM)
        assert server.exit_code() != 0
        assert server.leftovers() == []


# ---- stopping --------------------------------------------------------------------------------------


@pytest.fixture(params=[[], ["--no-disable-overlap-schedule"]], ids=["normal", "overlap"])
def server(tiny_model: Path, tmp_path: Path, request: pytest.FixtureRequest):  # noqa: ANN201
    with Server(tmp_path, "--model-path", str(tiny_model), "--skip-server-warmup", *request.param) as server:
        yield server.wait_ready()


def test_sigterm_lets_what_runs_finish_and_refuses_what_is_new(server: Server) -> None:
    events = server.stream("Hello", 300)
    next(events)
    server.process.send_signal(signal.SIGTERM)
    while server.status("/health") == 200:
        time.sleep(0.02)
    assert server.status("/ready") == 503
    with pytest.raises(urllib.error.HTTPError) as error:
        server.post("/generate", {"text": "late"})
    assert error.value.code == 503
    rest = list(events)
    assert rest[-1] == "[DONE]"
    assert json.loads(rest[-2])["meta_info"]["finish_reason"] == {"type": "length", "length": 300}
    assert server.exit_code() == 0
    assert server.leftovers() == []


@pytest.mark.parametrize("signals", [(signal.SIGTERM, signal.SIGTERM), (signal.SIGINT,)], ids=["twice", "ctrl-c"])
def test_stopping_now_answers_who_waits(server: Server, signals: tuple[signal.Signals, ...]) -> None:
    events = server.stream("Hello", 8000)
    next(events)
    started = time.monotonic()
    for number in signals:
        server.process.send_signal(number)
        time.sleep(0.3)
    rest = list(events)
    assert rest[-1] == "[DONE]", "the stream is closed in order"
    assert time.monotonic() - started < 20
    server.exit_code()
    assert server.leftovers() == []


# ---- dying -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("victim", ["scheduler", "detokenizer"])
def test_a_killed_child_takes_the_server_down_and_nobody_hangs(server: Server, victim: str) -> None:
    events = server.stream("Hello", 8000)
    next(events)
    server.child(victim).kill()
    rest = list(events)
    reason = json.loads(rest[-2])["meta_info"]["finish_reason"]
    assert reason["type"] == "abort" and reason["status_code"] == 503 and victim in reason["message"]
    assert rest[-1] == "[DONE]"
    assert server.exit_code() == 1
    assert f"the {victim} process was killed by SIGKILL" in server.log.read_text()
    assert server.leftovers() == []


def test_a_killed_main_process_leaves_no_orphan(server: Server) -> None:
    server.process.kill()
    server.exit_code()
    assert server.leftovers() == []
