"""`generate --url` and `chat`, against a scripted server: what they send, what they print, how they fail."""

from __future__ import annotations

import io
import json
import os
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from rich.console import Console

from tinysrt import cli
from tinysrt.chat import Chat, summary
from tinysrt.client import error_message, is_up, stream
from tinysrt.errors import StartupError


class ScriptedServer(ThreadingHTTPServer):
    """Answers every POST with the next of `answers`: a list of events, or (status, error body)."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers: list[Any] = []
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.ready = True

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: ScriptedServer

    def log_message(self, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.send_response(200 if self.server.ready else 503)
        self.end_headers()

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((self.path, body))
        answer = self.server.answers.pop(0)
        status, error = answer if isinstance(answer, tuple) else (200, None)
        self.send_response(status)
        self.end_headers()
        if error is not None:
            self.wfile.write(error.encode())
            return
        for event in answer:
            self.wfile.write(f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n".encode())


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer() as scripted:
        threading.Thread(target=scripted.serve_forever, daemon=True).start()
        yield scripted
        scripted.shutdown()


def delta(text: str) -> dict[str, Any]:
    return {"choices": [{"delta": {"content": text}}]}


USAGE = {
    "choices": [],
    "usage": {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 5}},
}


def chat(server: ScriptedServer, typed: str, monkeypatch: pytest.MonkeyPatch, **options: Any) -> str:
    """The terminal after `typed`, as plain text."""
    monkeypatch.setattr("sys.stdin", io.StringIO(typed))
    console = Console(file=io.StringIO(), width=200, highlight=False)
    settings = {"system": None, "max_tokens": 50, "temperature": None} | options
    Chat(console, server.url, **settings).run()
    return console.file.getvalue()  # type: ignore[attr-defined]


# ---- the client ------------------------------------------------------------------------------------


def test_events_are_yielded_until_done(server: ScriptedServer) -> None:
    server.answers = [[{"text": "a"}, {"text": "ab"}, "[DONE]", {"text": "never"}]]
    assert [event["text"] for event in stream(server.url + "/", "/generate", {"text": "x"})] == ["a", "ab"]
    assert server.asked == [("/generate", {"text": "x"})]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((400, '{"error": {"message": "too long"}}'), "answers 400: too long"),
        ((404, '{"object": "error", "message": "no such model"}'), "answers 404: no such model"),
        ((502, "<html>bad\n gateway"), "answers 502: <html>bad gateway"),
        ([{"text": "a"}, {"error": {"message": "the server is going down"}}, "[DONE]"], ": the server is going down"),
        (["{"], "Expecting property name"),
        ([{"text": "a"}], ": the connection ended before the answer did"),
    ],
)
def test_whatever_goes_wrong_is_one_line(server: ScriptedServer, answer: Any, message: str) -> None:
    server.answers = [answer]
    with pytest.raises(StartupError) as error:
        list(stream(server.url, "/generate", {}))
    assert message in str(error.value) and server.url in str(error.value) and "\n" not in str(error.value)


def test_error_bodies_of_both_kinds() -> None:
    assert error_message({"error": "Unauthorized"}) == "Unauthorized"
    assert error_message({"error": {"message": "m", "code": 1}}) == "m"


def test_is_up_follows_ready(server: ScriptedServer) -> None:
    assert is_up(server.url)
    server.ready = False
    assert not is_up(server.url)
    assert not is_up("http://127.0.0.1:9")
    assert not is_up("no address")


# ---- generate --------------------------------------------------------------------------------------


def test_generate_prints_the_growing_text_once(server: ScriptedServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.answers = [[{"text": " Par"}, {"text": " Paris"}, {"text": " Paris."}, "[DONE]"]]
    code = cli.main(["generate", "The capital", "--url", server.url, "--seed", "3", "--stop", "\n", "--stop", "END"])
    assert code == 0 and capsys.readouterr().out == " Paris.\n"
    path, body = server.asked[0]
    params = {"max_new_tokens": 128, "temperature": 0.0, "top_p": 1.0, "stop": ["\n", "END"], "sampling_seed": 3}
    assert (path, body) == ("/generate", {"text": "The capital", "sampling_params": params, "stream": True})


def test_generate_reads_the_prompt_from_stdin(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("from a pipe"))
    server.answers = [["[DONE]"]]
    assert cli.main(["generate", "--url", server.url]) == 0
    assert server.asked[0][1]["text"] == "from a pipe"


def test_generate_takes_no_flag_of_the_server_for_one_that_runs(server: ScriptedServer) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(["generate", "x", "--url", server.url, "--page-size", "16"])
    assert exit_.value.code == 2 and not server.asked


# ---- chat ------------------------------------------------------------------------------------------


def test_a_conversation_is_sent_whole_each_time(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server.answers = [[delta("Par"), delta("is."), USAGE, "[DONE]"], [delta("Rome."), "[DONE]"]]
    screen = chat(server, "France?\n\nItaly?\n/quit\nnever\n", monkeypatch, system="Be brief.", temperature=0.5)
    assert "Paris." in screen and "Rome." in screen and "5 of them cached" in screen
    path, body = server.asked[1]
    assert path == "/v1/chat/completions" and len(server.asked) == 2
    assert body["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "France?"},
        {"role": "assistant", "content": "Paris."},
        {"role": "user", "content": "Italy?"},
    ]
    assert body["stream"] and body["max_completion_tokens"] == 50 and body["temperature"] == 0.5


def test_commands_of_the_chat(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server.answers = [[delta("1"), "[DONE]"], [delta("2"), "[DONE]"]]
    screen = chat(server, "a\n/new\n/system You are a cat.\n/what\nb\n", monkeypatch)
    assert screen.count("/new forgets") == 2, "at the start, and for a command that is none"
    assert server.asked[1][1]["messages"] == [
        {"role": "system", "content": "You are a cat."},
        {"role": "user", "content": "b"},
    ]


def test_an_answer_that_fails_leaves_the_conversation_usable(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.answers = [(400, '{"error": {"message": "too long"}}'), [delta("fine"), "[DONE]"]]
    screen = chat(server, "a very long question\nshort\n", monkeypatch)
    assert "answers 400: too long" in screen and "fine" in screen
    assert server.asked[1][1]["messages"] == [{"role": "user", "content": "short"}]


def test_markup_in_an_answer_is_text(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server.answers = [[delta("[bold]not markup[/bold]"), "[DONE]"], (400, '{"error": "[/] in an error"}')]
    screen = chat(server, "a\nb\n", monkeypatch)
    assert "[bold]not markup[/bold]" in screen and "[/] in an error" in screen


def test_the_line_under_an_answer() -> None:
    usage = USAGE["usage"]
    assert summary(usage, 1.5, 0.5) == "2 tokens, 1 a second, first after 0.50 s; prompt 9 tokens, 5 of them cached"
    assert (
        summary({"completion_tokens": 1, "prompt_tokens": 3}, 1.0, 1.0)
        == "1 tokens, first after 1.00 s; prompt 3 tokens"
    )
    assert summary({}, 1.5, None) == "1.5 s"


# ---- bench -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["scheduler", "radix", "overlap"])
def test_each_benchmark_tells_its_flags(part: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(["bench", part, "--help"])
    assert exit_.value.code == 0 and f"tinysrt bench {part}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("part", "set_before", "anew"),
    [("kernels", None, True), ("kernels", "glibc.malloc.check=1", False), ("serve", None, False)],
)
def test_what_computes_here_has_its_memory_as_a_scheduler(
    part: str, set_before: str | None, anew: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []
    monkeypatch.setattr(cli.os, "execv", lambda *args: started.append(os.environ["GLIBC_TUNABLES"]))
    monkeypatch.setattr(sys, "argv", ["tinysrt", "bench", part, "--help"])
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    if set_before is not None:
        monkeypatch.setenv("GLIBC_TUNABLES", set_before)
    with pytest.raises(SystemExit):
        cli.main()
    assert [("hugetlb=1" in said) for said in started] == [True] * anew
