"""Child processes without a model: importable, so that spawned children find them.

The scheduler answers each prompt with its own characters backwards, one token a message. A prompt that begins with
"slow" gets one every 20 ms, until it is aborted; "die" kills the scheduler.
"""

from __future__ import annotations

import os
import signal
from multiprocessing.connection import Connection
from typing import Any

import zmq

from tinysrt.ipc import IpcNames, Receiver, Sender
from tinysrt.messages import (
    AbortReq,
    BatchStrOut,
    FinishAbort,
    FinishLength,
    FinishReason,
    FlushCacheReqInput,
    FlushCacheReqOutput,
    GetInternalStateReq,
    GetInternalStateReqOutput,
    OutputMeta,
    ShutdownNotice,
    ShutdownReq,
    StrOut,
    ToDetokenizer,
    TokenizedGenerateReqInput,
    ToScheduler,
)
from tinysrt.server_args import ServerArgs


class Echo:
    def __init__(self, names: IpcNames):
        context: zmq.Context[Any] = zmq.Context()
        self.receiver: Receiver[Any] = Receiver(context, names.scheduler_input, ToScheduler)
        self.tokenizer = Sender(context, names.tokenizer_input)
        self.detokenizer = Sender(context, names.detokenizer_input)
        self.running: dict[str, tuple[TokenizedGenerateReqInput, int]] = {}

    def run(self) -> None:
        while True:
            self.receiver.wait(20)
            for message in self.receiver.drain():
                if isinstance(message, ShutdownReq):
                    self.detokenizer.send(ShutdownNotice())
                    return
                self.handle(message)
            for rid in list(self.running):
                self.step(rid)

    def handle(self, message: Any) -> None:
        match message:
            case TokenizedGenerateReqInput():
                if bytes(message.input_ids) == b"die":
                    os.kill(os.getpid(), signal.SIGKILL)
                self.running[message.rid] = (message, 0)
            case AbortReq():
                if message.rid in self.running:
                    request, done = self.running.pop(message.rid)
                    self.say(request, done, "", FinishAbort("Aborted."))
            case FlushCacheReqInput():
                self.tokenizer.send(FlushCacheReqOutput(success=not self.running, message=""))
            case GetInternalStateReq():
                self.tokenizer.send(GetInternalStateReqOutput(internal_state={"running": len(self.running)}))

    def step(self, rid: str) -> None:
        request, done = self.running[rid]
        prompt = bytes(request.input_ids)
        slow, limit = prompt.startswith(b"slow"), request.sampling_params.max_new_tokens
        count = len(prompt) if limit is None else min(limit, len(prompt))
        while slow or done < count:
            done += 1
            last = done == count and not slow
            self.say(
                request, done, chr(prompt[-1 - (done - 1) % len(prompt)]), FinishLength(length=done) if last else None
            )
            if slow:
                self.running[rid] = (request, done)
                return
        if count == 0:
            self.say(request, 0, "", FinishLength(length=0))
        del self.running[rid]

    def say(self, request: TokenizedGenerateReqInput, done: int, text: str, finish: FinishReason | None) -> None:
        meta = OutputMeta(
            rid=request.rid,
            batch_id=request.batch_id,
            reply_to=request.reply_to,
            finish=finish,
            prompt_tokens=len(request.input_ids),
            completion_tokens=done,
            cached_tokens=0,
            num_retractions=0,
        )
        self.tokenizer.send(BatchStrOut(outs=[StrOut(meta=meta, text=text, new_ids=list(text.encode()))]))


def scheduler(server_args: ServerArgs, names: IpcNames, pipe: Connection) -> None:
    echo = Echo(names)
    pipe.send({"status": "ready", "max_total_num_tokens": 1000, "max_req_input_len": 60})
    echo.run()


def detokenizer(server_args: ServerArgs, names: IpcNames, pipe: Connection) -> None:
    receiver: Receiver[Any] = Receiver(zmq.Context(), names.detokenizer_input, ToDetokenizer, bind=True)
    pipe.send({"status": "ready"})
    receiver.wait()  # for the ShutdownNotice: the echo sends its text itself


def broken_scheduler(server_args: ServerArgs, names: IpcNames, pipe: Connection) -> None:
    pipe.send({"status": "error", "message": "no such model"})
