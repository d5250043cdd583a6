"""A question to the scheduler and its answer, over sockets that only push; of each replica one answer.

Invariant: one outstanding call of a kind, so that an answer needs no id: it belongs to the caller whose turn it
is. A caller that gives up does not give up its turn; the late answers are read and dropped, never handed to the next.

SGLang: `FanOutCommunicator` (the TokenizerManager has one for each kind of control request).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

from tinysrt.errors import RequestError
from tinysrt.messages import Message

Reply = TypeVar("Reply")


class Communicator(Generic[Reply]):
    def __init__(self, send: Callable[[Message], None], replicas: int):
        self._send = send
        self._replicas = replicas
        self._turn = asyncio.Lock()
        self._replies: list[Reply] = []
        self._all_here: asyncio.Future[None] | None = None

    async def call(self, message: Message) -> list[Reply]:
        """The replicas' answers, in the order in which they came."""
        # In a task of its own: if the caller is cancelled, the turn still ends only with the answer.
        call = asyncio.ensure_future(self._call(message))
        # Its error is looked at even when the caller is gone, or asyncio would complain about it later.
        call.add_done_callback(lambda task: task.cancelled() or task.exception())
        return await asyncio.shield(call)

    def answer(self, reply: Reply) -> None:
        if self._all_here is not None and not self._all_here.done():
            self._replies.append(reply)
            if len(self._replies) == self._replicas:
                self._all_here.set_result(None)

    def fail(self, error: RequestError) -> None:
        """The scheduler is gone: whoever waits is told."""
        if self._all_here is not None and not self._all_here.done():
            self._all_here.set_exception(error)

    async def _call(self, message: Message) -> list[Reply]:
        async with self._turn:
            self._replies = []
            self._all_here = asyncio.get_running_loop().create_future()
            self._send(message)
            await self._all_here
            return self._replies
