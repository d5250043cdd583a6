"""The detokenizer as a process: ready, answers to whoever asked, goodbye with exit code 0."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import zmq

from tests.detokenizer.test_detokenizer import LENGTH, out
from tests.text import tiny_tokenizers
from tinysrt.ipc import IpcNames, Receiver, Sender
from tinysrt.managers.detokenizer_manager import run_detokenizer_process
from tinysrt.messages import BatchStrOut, BatchTokenIDOut, ShutdownNotice, ToTokenizer
from tinysrt.server_args import ServerArgs

WAIT_S = 120  # a spawned child imports transformers first


@pytest.fixture
def ipc_names() -> Iterator[IpcNames]:
    names = IpcNames.create()
    yield names
    names.remove()


def spawn(server_args: ServerArgs, ipc_names: IpcNames) -> tuple[multiprocessing.process.BaseProcess, Connection]:
    context = multiprocessing.get_context("spawn")
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(target=run_detokenizer_process, args=(server_args, ipc_names, writer), daemon=True)
    process.start()
    writer.close()
    return process, reader


@pytest.mark.parametrize("skip_tokenizer_init", [False, True])
def test_ready_work_goodbye(tmp_path: Path, ipc_names: IpcNames, skip_tokenizer_init: bool) -> None:
    tiny_tokenizers.bytes_only().hf.save_pretrained(tmp_path)
    context = zmq.Context()
    endpoints = [ipc_names.tokenizer_input, f"ipc://{ipc_names.directory}/second"]
    receivers = [Receiver[BatchStrOut](context, endpoint, ToTokenizer, bind=True) for endpoint in endpoints]
    sender = Sender(context, ipc_names.detokenizer_input)
    process, pipe = spawn(ServerArgs(model_path=str(tmp_path), skip_tokenizer_init=skip_tokenizer_init), ipc_names)
    try:
        assert pipe.poll(WAIT_S), "no word from the detokenizer"
        assert pipe.recv() == {"status": "ready"}
        if not skip_tokenizer_init:
            # Two TokenizerManagers wait: each gets its own requests.
            outs = [out(b"one", LENGTH, rid="a", context=[]), out(b"two", LENGTH, rid="b", context=[])]
            for one, endpoint in zip(outs, endpoints, strict=True):
                one.meta.reply_to = endpoint
            sender.send(BatchTokenIDOut(outs=outs))
            for receiver, text in zip(receivers, ("one", "two"), strict=True):
                assert receiver.wait(10_000)
                assert [reply.text for reply in receiver.drain()[0].outs] == [text]
        sender.send(ShutdownNotice())
        process.join(20)
        assert process.exitcode == 0
    finally:
        process.kill()
        sender.close()
        for receiver in receivers:
            receiver.close()
        context.term()
