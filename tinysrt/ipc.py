"""ZMQ sockets between the processes, and the bytes on them.

Every link is PUSH → PULL over `ipc://` in a private temporary directory (mode 0700):

    link               sends                          receives and binds
    scheduler_input    TokenizerManager               Scheduler rank 0 *connects*, TokenizerManager binds
    detokenizer_input  Scheduler                      DetokenizerManager binds
    tokenizer_input    DetokenizerManager, Scheduler  TokenizerManager binds

With `--dp` the DataParallelController connects to scheduler_input and binds one such end for each replica. Ranks of one
replica talk over gloo (`distributed/groups.py`); only rank 0 of each has sockets.

The TokenizerManager binds both of its ends because it lives in the main process and is there before anyone
needs an answer; ZMQ lets the other side connect first and queue. Two senders share the tokenizer's input, so
an abort notice may overtake the text before it: receivers tolerate unknown rids.

Invariant: while its peer lives a send never blocks, and it never drops (high-water mark 0). What arrives decodes
as one of the types the receiver names, or raises: nothing is unpickled. (SGLang: `utils/network.py`,
`managers/io_struct.py`.)
"""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec
import zmq
import zmq.asyncio

T = TypeVar("T")

_encoder = msgspec.msgpack.Encoder()


@dataclass(frozen=True)
class IpcNames:
    """The endpoints of one server; `create` makes the directory, `remove` deletes it."""

    directory: str
    replica: int | None = None  # None: the server's own, or there is only one replica

    def of_replica(self, rank: int) -> IpcNames:
        """The same endpoints but the scheduler's."""
        return IpcNames(self.directory, rank)

    @property
    def scheduler_input(self) -> str:
        return f"ipc://{self.directory}/scheduler" + ("" if self.replica is None else f"-{self.replica}")

    @property
    def detokenizer_input(self) -> str:
        return f"ipc://{self.directory}/detokenizer"

    @property
    def tokenizer_input(self) -> str:
        return f"ipc://{self.directory}/tokenizer"

    @classmethod
    def create(cls) -> IpcNames:
        # mkdtemp makes it 0700: no other user can connect. A Unix socket path is at most 107 bytes.
        return cls(tempfile.mkdtemp(prefix="tinysrt-"))

    def remove(self) -> None:
        shutil.rmtree(self.directory, ignore_errors=True)


def encode(message: Any) -> bytes:
    return _encoder.encode(message)


class Sender:
    """The PUSH end: `send` queues and returns at once."""

    def __init__(self, context: zmq.Context, endpoint: str, *, bind: bool = False):
        # A zmq.asyncio context would make send() a coroutine; shadowing gives a plain socket on the same I/O threads.
        self.socket: zmq.Socket[bytes] = zmq.Context.shadow(context).socket(zmq.PUSH)
        self.socket.setsockopt(zmq.SNDHWM, 0)
        # A bound PUSH socket whose only peer has died would block for ever; raise zmq.Again instead.
        self.socket.setsockopt(zmq.SNDTIMEO, 1000)
        self.socket.setsockopt(zmq.LINGER, 1000)  # ms to flush the last words at close
        _open(self.socket, endpoint, bind)

    def send(self, message: Any) -> None:
        self.socket.send(encode(message))

    def send_raw(self, data: bytes) -> None:
        self.socket.send(data)

    def close(self) -> None:
        self.socket.close()


class Receiver(Generic[T]):
    """The PULL end of a process with its own loop (Scheduler, DetokenizerManager)."""

    def __init__(self, context: zmq.Context, endpoint: str, kind: Any, *, bind: bool = False):
        self.decoder = msgspec.msgpack.Decoder(kind)
        self.socket = context.socket(zmq.PULL)
        self.socket.setsockopt(zmq.RCVHWM, 0)
        _open(self.socket, endpoint, bind)

    def drain(self) -> list[T]:
        """All messages that are here now, oldest first; never waits."""
        messages = []
        while True:
            try:
                messages.append(self.decoder.decode(self.socket.recv(zmq.NOBLOCK)))
            except zmq.Again:
                return messages

    def wait(self, timeout_ms: int | None = None) -> bool:
        """Block until a message is here, or the timeout has passed; True if one is."""
        return self.socket.poll(timeout_ms) != 0

    def close(self) -> None:
        self.socket.close(linger=0)


class RawReceiver:
    """The PULL end of a process that passes messages on without reading them."""

    def __init__(self, context: zmq.Context, endpoint: str):
        self.socket = context.socket(zmq.PULL)
        self.socket.setsockopt(zmq.RCVHWM, 0)
        _open(self.socket, endpoint, bind=False)

    def receive(self) -> bytes:
        return self.socket.recv()

    def close(self) -> None:
        self.socket.close(linger=0)


class AsyncReceiver(Generic[T]):
    """The PULL end of the TokenizerManager, which lives on an asyncio loop."""

    def __init__(self, context: zmq.asyncio.Context, endpoint: str, kind: Any, *, bind: bool = False):
        self.decoder = msgspec.msgpack.Decoder(kind)
        self.socket = context.socket(zmq.PULL)
        self.socket.setsockopt(zmq.RCVHWM, 0)
        _open(self.socket, endpoint, bind)

    async def receive(self) -> T:
        return self.decoder.decode(await self.socket.recv())

    def close(self) -> None:
        self.socket.close(linger=0)


def _open(socket: Any, endpoint: str, bind: bool) -> None:
    if bind:
        socket.bind(endpoint)
        if endpoint.startswith("ipc://"):
            os.chmod(endpoint.removeprefix("ipc://"), 0o600)
    else:
        socket.connect(endpoint)
