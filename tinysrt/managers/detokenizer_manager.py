"""The third process: token ids in, text out.

    Scheduler ── BatchTokenIDOut ──▶ handle ── BatchStrOut ──▶ TokenizerManager
                                       │
                        states: rid → IncrementalDecoder + how many characters were sent

It exists so that turning ids into text never delays the scheduler, whose next step the accelerator waits for.

Invariants (tests/detokenizer/):
- joined over a request, the deltas are one decode of its output ids, cut at the stop; none takes anything back;
- a stop *token* is dropped from the ids before decoding, a stop *string* is cut from the text at the range that the
  scheduler found with the same decoder; neither changes `new_ids`, which the client gets whole;
- a state lives from a request's first message to its finish, and no longer. A running request ends with a finish
  here however it ends; one that never ran never gets here.

`DetokenizerManager` knows no socket: a message in, a message out. `run_detokenizer_process` is the process around it.

SGLang (`managers/detokenizer_manager.py`) decodes a sliding window of tokens twice per step, batched over requests;
here a step costs a table lookup per token, so there is nothing left to batch, and `--disable-tokenizer-batch-decode`
asks for what happens anyway. Its table of states is bounded and forgets the oldest *live* request when full, which then
loses text; ours is bounded by the live requests.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from multiprocessing.connection import Connection

import zmq

from tinysrt.ipc import IpcNames, Receiver, Sender
from tinysrt.messages import BatchStrOut, BatchTokenIDOut, FinishStop, ShutdownNotice, StrOut, ToDetokenizer, TokenIDOut
from tinysrt.observe.trace import Recorder
from tinysrt.server_args import ServerArgs
from tinysrt.text.incremental import IncrementalDecoder
from tinysrt.text.tokenizer import Tokenizer


@dataclass
class DecodeState:
    decoder: IncrementalDecoder
    sent: int = 0  # characters of the text that the TokenizerManager has


class DetokenizerManager:
    def __init__(self, tokenizer: Tokenizer, trace: Recorder):
        self.tokenizer = tokenizer
        self.trace = trace
        self.states: dict[str, DecodeState] = {}

    def handle(self, batch: BatchTokenIDOut) -> BatchStrOut:
        return BatchStrOut(outs=[self._decode(out) for out in batch.outs])

    def _decode(self, out: TokenIDOut) -> StrOut:
        rid, finish = out.meta.rid, out.meta.finish
        state = self._state_of(out)
        ids = out.new_ids
        if isinstance(finish, FinishStop) and not out.no_stop_trim and ids and ids[-1] == finish.matched:
            ids = ids[:-1]  # the token, not characters: its printed name may not be in the text at all
        state.decoder.push(ids)
        if finish is not None:
            state.decoder.finish()
            del self.states[rid]
        text = state.decoder.released_text
        if out.stop_range is not None:
            start, end = out.stop_range
            text = text[: end if out.no_stop_trim else start]
        delta = text[state.sent :]
        state.sent = max(state.sent, len(text))
        if self.trace.on:
            self.trace.event(
                "detokenized", rid=rid, tokens=len(out.new_ids), chars=len(delta), finished=finish is not None
            )
        return StrOut(meta=out.meta, text=delta, new_ids=out.new_ids)

    def _state_of(self, out: TokenIDOut) -> DecodeState:
        """A first message brings its context and begins anew, whatever a request of the same name left behind."""
        state = self.states.get(out.meta.rid)
        if state is None or out.context_ids is not None:
            decoder = IncrementalDecoder(
                self.tokenizer, out.context_ids, out.skip_special_tokens, out.spaces_between_special_tokens
            )
            state = self.states[out.meta.rid] = DecodeState(decoder)
        return state


def run_detokenizer_process(server_args: ServerArgs, ipc_names: IpcNames, pipe: Connection) -> None:
    """Entry of the child process; returns after each replica's ShutdownNotice. `processes.py` reports a failure."""
    trace = Recorder("detokenizer", server_args.trace_dir)
    context = zmq.Context()
    # Bound before "ready", though the scheduler may connect and queue earlier.
    receiver: Receiver[BatchTokenIDOut | ShutdownNotice] = Receiver(
        context, ipc_names.detokenizer_input, ToDetokenizer, bind=True
    )
    senders: dict[str, Sender] = {}  # one for each TokenizerManager that waits for answers
    manager = None
    if not server_args.skip_tokenizer_init:  # else the scheduler sends its ids past us, and we only wait for the end
        path = server_args.tokenizer_path or server_args.model_path
        assert path is not None, "resolved before any process is spawned"
        if not server_args.trust_remote_code:
            _hide_pytorch()
        tokenizer = Tokenizer.load(
            path, mode=server_args.tokenizer_mode, trust_remote_code=server_args.trust_remote_code
        )
        manager = DetokenizerManager(tokenizer, trace)
    still_there = server_args.data_parallel_size  # schedulers that have not said goodbye
    pipe.send({"status": "ready"})
    try:
        while True:
            receiver.wait()
            for message in receiver.drain():
                if isinstance(message, ShutdownNotice):
                    still_there -= 1
                    if still_there == 0:
                        return
                    continue
                assert manager is not None, "ids came to a detokenizer without a tokenizer"
                for endpoint, reply in _by_endpoint(manager.handle(message)).items():
                    if endpoint not in senders:
                        senders[endpoint] = Sender(context, endpoint)
                    senders[endpoint].send(reply)
    finally:
        receiver.close()
        for sender in senders.values():
            sender.close()
        context.term()  # waits until the last answers are out, a second at most
        trace.close()


def _hide_pytorch() -> None:
    """transformers imports PyTorch wherever it finds it: 230 MB and more than a second, for nothing in this process."""
    if "torch" not in sys.modules:
        os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"  # or it says that it misses PyTorch
        sys.modules["torch"] = None  # type: ignore[assignment]  # the import system's own way to say "not there"


def _by_endpoint(batch: BatchStrOut) -> dict[str, BatchStrOut]:
    groups: dict[str, BatchStrOut] = {}
    for out in batch.outs:
        groups.setdefault(out.meta.reply_to, BatchStrOut(outs=[])).outs.append(out)
    return groups
