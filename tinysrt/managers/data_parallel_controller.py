"""DataParallelController: `--dp` N independent replicas behind one door.

                                              ┌─▶ scheduler of replica 0 ─┐
    TokenizerManager ─▶ DataParallelController┼─▶ scheduler of replica 1 ─┼─▶ DetokenizerManager ─▶ TokenizerManager
                            one process       └─▶ scheduler of replica 2 ─┘

A replica is a whole model with its own queue, KV pool and prefix cache (and its own `--tp` and `--pp` ranks). A request
goes to the replica that it names, or to the one whose turn it is; everything else (abort, flush, pause, shutdown …)
goes to all: who does not know a rid does nothing, and the TokenizerManager collects one answer from each.

The controller reads the kind of a message and the replica's number in it, no more, and passes the bytes on as they
came. Round robin needs no knowledge of the replicas' load; requests that share a prefix are better off behind a router
that looks at prefixes (sglang-router), with a server for each replica.

Source: SGLang `managers/data_parallel_controller.py`, which starts the replicas' processes too.
"""

from __future__ import annotations

from multiprocessing.connection import Connection

import msgspec
import zmq

from tinysrt.ipc import IpcNames, RawReceiver, Sender
from tinysrt.messages import ShutdownReq, TokenizedGenerateReqInput
from tinysrt.server_args import ServerArgs


class Envelope(msgspec.Struct):
    """What the controller reads of a message; the decoder skips the rest."""

    type: str  # the message's class
    data_parallel_rank: int | None = None


class RoundRobin:
    """Which replicas get a message."""

    def __init__(self, replicas: int):
        self.replicas = replicas
        self.turn = 0

    def route(self, envelope: Envelope) -> list[int]:
        if envelope.type != TokenizedGenerateReqInput.__name__:
            return list(range(self.replicas))
        if envelope.data_parallel_rank is not None:
            return [envelope.data_parallel_rank]
        chosen, self.turn = self.turn, (self.turn + 1) % self.replicas
        return [chosen]


def run_data_parallel_controller_process(server_args: ServerArgs, ipc_names: IpcNames, pipe: Connection) -> None:
    """Entry of the child process; returns after a ShutdownReq."""
    replicas = server_args.data_parallel_size
    context = zmq.Context()
    receiver = RawReceiver(context, ipc_names.scheduler_input)
    senders = [Sender(context, ipc_names.of_replica(rank).scheduler_input, bind=True) for rank in range(replicas)]
    decoder = msgspec.msgpack.Decoder(Envelope)
    routing = RoundRobin(replicas)
    pipe.send({"status": "ready"})
    try:
        while True:
            data = receiver.receive()
            envelope = decoder.decode(data)
            for rank in routing.route(envelope):
                senders[rank].send_raw(data)
            if envelope.type == ShutdownReq.__name__:
                return
    finally:
        receiver.close()
        for sender in senders:
            sender.close()
        context.term()  # waits until the last words are out
