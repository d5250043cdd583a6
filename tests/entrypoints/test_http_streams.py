"""Streams and clients that go away: frames leave at once, and nothing runs on for nobody (FC-26)."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import pytest

from tinysrt.entrypoints.errors import sse
from tinysrt.entrypoints.stream import EventStream

PATHS = [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
    ("/v1/completions", {"prompt": "Hi"}),
    ("/generate", {"text": "Hi"}),
]


def test_a_frame_is_one_line_for_every_reader() -> None:
    text = "".join(chr(i) for i in range(0x250)) + "\u2028\u2029x😀"
    frame = sse({"text": text})
    assert len(frame.decode().splitlines()) == 2  # the line, and the empty one that ends the frame
    assert json.loads(frame.removeprefix(b"data: ")) == {"text": text}


@pytest.mark.parametrize("path, body", PATHS)
def test_frames_leave_as_soon_as_they_are_made(server: Any, path: str, body: dict[str, Any]) -> None:
    server.script.answers, server.script.pause = ["abcdef"], 0.1
    with httpx.stream("POST", server.url + path, json=body | {"stream": True}) as reply:
        assert reply.headers["content-type"].startswith("text/event-stream")
        assert "content-length" not in reply.headers and reply.headers["cache-control"] == "no-cache"
        arrived = [time.monotonic() for _ in reply.iter_raw()]
    assert arrived[-1] - arrived[0] > 0.4


@pytest.mark.parametrize("path, body", PATHS)
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_ends_its_request(server: Any, path: str, body: dict[str, Any], stream: bool) -> None:
    server.script.answers, server.script.pause = ["x" * 400], 0.05
    try:
        with httpx.stream("POST", server.url + path, json=body | {"stream": stream}, timeout=0.3) as reply:
            for _ in reply.iter_raw():
                break
    except httpx.ReadTimeout:
        assert not stream
    assert server.script.closed.wait(1.0), "the generator must be closed, so that the request is aborted"
    assert server.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200


def test_a_client_that_goes_away_before_the_first_token_ends_its_request(server: Any) -> None:
    server.script.pause = 20.0
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(server.url + "/v1/completions", json={"prompt": "a", "stream": True}, timeout=0.2)
    assert server.script.closed.wait(1.0)


def test_a_client_that_reads_slowly_and_leaves_ends_its_request() -> None:
    """The answer then waits in `send`, not for a token: its generator must be closed there too."""
    closed, blocked = [], asyncio.Event()

    async def frames() -> AsyncGenerator[bytes, None]:
        try:
            while True:
                yield b"data: x\n\n"
        finally:
            closed.append(True)

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            blocked.set()
            await asyncio.Event().wait()  # the socket's buffer is full, for ever

    async def receive() -> Any:
        await blocked.wait()
        return {"type": "http.disconnect"}

    async def answer() -> None:
        source = frames()
        await EventStream(await anext(source), source)({"type": "http"}, receive, send)

    asyncio.run(asyncio.wait_for(answer(), 5))
    assert closed
