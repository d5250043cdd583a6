"""The sockets between the processes: who binds, how much they hold, who may connect."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import msgspec
import pytest
import zmq

from tinysrt.ipc import IpcNames, Receiver, Sender
from tinysrt.messages import AbortReq, FlushCacheReqInput, ToScheduler

MANY = 5000  # ZMQ's own limits are 1,000 on either side


@pytest.fixture
def names() -> Iterator[IpcNames]:
    names = IpcNames.create()
    yield names
    names.remove()


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    context = zmq.Context()
    yield context
    context.term()


@pytest.mark.parametrize("reader_is_there", [False, True])
def test_a_slow_reader_loses_nothing_and_holds_nobody_up(
    names: IpcNames, context: zmq.Context, reader_is_there: bool
) -> None:
    """Traps 58 and 59: one side binds, the other may connect and send before that; no queue is bounded."""

    with ExitStack() as stack:

        def listen() -> Receiver[AbortReq]:
            return stack.enter_context(closing(Receiver(context, names.scheduler_input, ToScheduler, bind=True)))

        receiver = listen() if reader_is_there else None
        sender = stack.enter_context(closing(Sender(context, names.scheduler_input)))
        for number in range(MANY):
            sender.send(AbortReq(rid=str(number)))  # a bounded queue would block for a second, then raise
        receiver = receiver or listen()
        got: list[str] = []
        while len(got) < MANY and receiver.wait(10_000):
            got += [message.rid for message in receiver.drain()]
        assert got == [str(number) for number in range(MANY)]


def test_nobody_else_may_connect(names: IpcNames, context: zmq.Context) -> None:
    receiver: Receiver[AbortReq] = Receiver(context, names.scheduler_input, ToScheduler, bind=True)
    path = Path(names.scheduler_input.removeprefix("ipc://"))
    assert oct(os.stat(path).st_mode)[-3:] == "600" and oct(os.stat(path.parent).st_mode)[-3:] == "700"
    receiver.close()
    names.remove()
    assert not path.parent.exists()


def test_what_is_no_message_of_ours_is_an_error_and_runs_no_code(names: IpcNames, context: zmq.Context) -> None:
    """SGLang unpickles what comes through its sockets; here only the listed types are ever built."""
    receiver: Receiver[AbortReq] = Receiver(context, names.scheduler_input, ToScheduler, bind=True)
    sender = Sender(context, names.scheduler_input)
    sender.socket.send(b"cos\nsystem\n(S'true'\ntR.")
    assert receiver.wait(10_000)
    with pytest.raises(msgspec.DecodeError):
        receiver.drain()
    sender.send(FlushCacheReqInput(reply_to="x", timeout_s=1.5))
    assert receiver.wait(10_000)
    assert receiver.drain() == [FlushCacheReqInput(reply_to="x", timeout_s=1.5)]
    sender.close()
    receiver.close()
