"""One HTTP/1.1 exchange on asyncio sockets, as cheap as a measuring client can be.

    bytes of the socket ──▶ httptools' parser ──▶ (time of the read, piece of the body) ──▶ events of a stream

On two cores the client takes its time from the server that it measures. Here a token costs one read and one JSON
decode, about half of the processor time that a general client (httpx) was measured to spend on it. Every request has a
connection of its own, so none waits behind another one's bytes.

Invariants: a time is taken when the bytes are read, before anything is parsed; a status other than 200, a body that
ends too early and silence longer than the timeout are `HttpFailed`, never an empty answer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any
from urllib.parse import urlsplit

import httptools
import orjson

READ_SIZE = 1 << 16


class HttpFailed(Exception):
    """The server did not answer as it should; the message says how."""


class _Response:
    """What httptools calls back into."""

    def __init__(self) -> None:
        self.body = b""
        self.headers: dict[bytes, bytes] = {}
        self.complete = False
        self.parser = httptools.HttpResponseParser(self)

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.lower()] = value

    def on_body(self, piece: bytes) -> None:
        self.body += piece

    def on_message_complete(self) -> None:
        self.complete = True

    def ends_with_the_connection(self) -> bool:
        return b"content-length" not in self.headers and b"chunked" not in self.headers.get(b"transfer-encoding", b"")


async def exchange(
    base: str, method: str, path: str, body: dict[str, Any] | None = None, *, timeout: float
) -> AsyncGenerator[tuple[float, bytes], None]:
    """The body of a 200 in pieces as they arrive, each with the time of its read (`time.perf_counter`)."""
    url = urlsplit(base)
    secure = url.scheme == "https"
    data = b"" if body is None else orjson.dumps(body)
    head = (
        f"{method} {url.path.rstrip('/')}{path} HTTP/1.1\r\nHost: {url.netloc}\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    writer: asyncio.StreamWriter | None = None
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(timeout) as silence:
            port = url.port or (443 if secure else 80)
            reader, writer = await asyncio.open_connection(url.hostname, port, ssl=secure or None)
            writer.write(head.encode() + data)
            response = _Response()
            refusal = b""
            heard = loop.time()
            while not response.complete:
                piece = await reader.read(READ_SIZE)
                now = time.perf_counter()
                if loop.time() - heard > timeout / 100:  # a timer for each token would cost more than its parsing
                    heard = loop.time()
                    silence.reschedule(heard + timeout)
                if not piece:
                    if response.headers and response.ends_with_the_connection():
                        break
                    raise HttpFailed(f"{method} {path}: the connection ended before the answer did")
                response.parser.feed_data(piece)
                taken, response.body = response.body, b""
                if response.headers and response.parser.get_status_code() != 200:
                    refusal += taken
                elif taken:
                    yield now, taken
        if (status := response.parser.get_status_code()) != 200:
            raise HttpFailed(f"{method} {path} answers {status}: {_short(refusal)}")
    except TimeoutError:
        raise HttpFailed(f"{method} {path}: nothing came for {timeout:g} s") from None
    except (OSError, httptools.HttpParserError) as error:
        raise HttpFailed(f"{method} {path}: {error}") from None
    finally:
        if writer is not None:
            writer.close()


async def call(
    base: str, method: str, path: str, body: dict[str, Any] | None = None, *, timeout: float
) -> tuple[float, Any]:
    """A whole answer: the time of its last byte, and its JSON (None if it is empty or no JSON)."""
    at, whole = time.perf_counter(), b""
    async with aclosing(exchange(base, method, path, body, timeout=timeout)) as pieces:
        async for at, piece in pieces:  # noqa: B007  the last one's time is the answer's
            whole += piece
    try:
        return at, orjson.loads(whole)
    except orjson.JSONDecodeError:
        return at, None


async def events(
    base: str, path: str, body: dict[str, Any], *, timeout: float
) -> AsyncGenerator[tuple[float, dict[str, Any]], None]:
    """A server-sent stream: each event's JSON with the time at which its last byte was read."""
    rest = b""
    async with aclosing(exchange(base, "POST", path, body, timeout=timeout)) as pieces:
        async for at, piece in pieces:
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                data = line[len(b"data:") :].strip() if line.startswith(b"data:") else b""
                if data and data != b"[DONE]":
                    try:
                        yield at, orjson.loads(data)
                    except orjson.JSONDecodeError:
                        raise HttpFailed(f"POST {path}: an event is no JSON: {_short(data)}") from None


def _short(body: bytes) -> str:
    text = " ".join(body.decode(errors="replace").split())
    return text if len(text) <= 200 else text[:200] + "…"
