"""Answers that take a while, and clients that do not wait for them.

    plain answer    unless_disconnected(request, work)    ─ client gone ─▶ `work` is cancelled
    event stream    EventStream(first, frames)            ─ client gone ─▶ `frames` is closed

Both watch the connection while they wait, so a client that goes away is noticed within the step in flight, not at
the next poll; cancelling the generator makes the TokenizerManager abort the request and its KV is free a step later.

Invariant: whichever way an answer ends, its generator has been closed when the door returns. Nothing is left to the
garbage collector: a generator abandoned in the middle of a `send` would keep its request running.

SGLang polls the connection every four seconds and aborts streams in a background task.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable
from typing import TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tinysrt.entrypoints.errors import SSE_HEADERS

T = TypeVar("T")


async def unless_disconnected(request: Request, work: Awaitable[T]) -> T:
    """The result of `work`, or ClientDisconnect as soon as nobody waits for it. The body must have been read."""
    return await _race(_as_task(work), request.receive)


class EventStream(Response):
    """A 200 whose body is written frame by frame. `first` has been awaited before, so early errors are real 400s."""

    def __init__(self, first: bytes, frames: AsyncGenerator[bytes, None], media_type: str = "text/event-stream"):
        self.status_code = 200
        self.media_type = media_type
        self.background = None
        self.init_headers(SSE_HEADERS)  # without a `body` attribute no length is announced
        self.first, self.frames = first, frames

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await _race(asyncio.create_task(self._write(send)), receive)
        except ClientDisconnect:
            pass  # not an error, and there is nobody left to tell
        finally:
            await self.frames.aclose()

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.first, "more_body": True})
        async for frame in self.frames:
            await send({"type": "http.response.body", "body": frame, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _as_task(work: Awaitable[T]) -> asyncio.Task[T]:
    async def run() -> T:
        return await work

    return asyncio.create_task(run())


async def _race(task: asyncio.Task[T], receive: Receive) -> T:
    gone = asyncio.create_task(_disconnect(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect()
    finally:
        # Wait until both have really ended: aclose() of a generator that still runs is an error.
        gone.cancel()
        task.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)
    return task.result()


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
