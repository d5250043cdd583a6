"""How the ranks of a group stay in step: rank 0 says what a step depends on, everyone computes the same from it.

              sockets                     one list a step                      the same step everywhere
    clients ─────────▶ LeadingInbox ──── StepInputs(now, messages) ──▶ FollowingInbox ─▶ recv_requests
    clients ◀───────── SocketOutbox                                    NullOutbox    ◀── (said by rank 0 alone)

No rank looks at its own clock, socket or dice. The clock and the messages travel in the list; the dice are seeded with
rank 0's seed; tokens need not travel, because all ranks of a stage sample from the same bytes. One thing is left that
ranks could judge differently: a stop regex has a time limit, and time is a rank's own. Such a verdict is rank 0's, and
it is told (`SharedJudge`).

An idle rank 0 waits in its socket's poll, the others for its next list, all of them in the kernel.

Invariant: after each step the schedulers of all ranks are in the same state. Source: SGLang `Scheduler.recv_requests`,
which pickles the list, and where idle ranks spin.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec

from tinysrt.distributed.groups import Messenger, Tag
from tinysrt.distributed.parallel_state import ParallelState
from tinysrt.errors import StartupError
from tinysrt.managers.batch_result_processor import TextVerdict, judge_text
from tinysrt.managers.schedule_batch import Req
from tinysrt.managers.seats import Inbox, StepInputs
from tinysrt.messages import BatchTokenIDOut, Message, ToScheduler
from tinysrt.server_args import ServerArgs

_encode = msgspec.msgpack.encode
_step_decoder: Any = msgspec.msgpack.Decoder(tuple[float, list[ToScheduler]])
_verdict_decoder = msgspec.msgpack.Decoder(TextVerdict)

# What each machine may set for itself; all other flags must be the same everywhere.
OF_ONE_MACHINE = (
    {"host", "port", "node_rank", "nccl_port", "random_seed", "num_threads", "kv_pool_bytes", "mem_fraction_static"}
    | {"model_path", "tokenizer_path", "served_model_name", "chat_template", "ssl_keyfile", "ssl_certfile"}
    | {"log_level", "log_level_http", "decode_log_interval", "trace_dir", "api_key", "admin_api_key"}
)  # fmt: skip


class LeadingInbox:
    """Rank 0's: what its own inbox gives, told to everyone."""

    def __init__(self, inbox: Inbox, messages: Messenger):
        self.inbox = inbox
        self.messages = messages

    def receive(self, *, block: bool) -> StepInputs:
        inputs = self.inbox.receive(block=block)
        self.messages.tell_all(_encode((inputs.now, inputs.messages)), Tag.STEP)
        return inputs


class FollowingInbox:
    """Everyone else's. Always waits: rank 0 says something every step, and once a second when it is idle."""

    def __init__(self, messages: Messenger):
        self.messages = messages

    def receive(self, *, block: bool) -> StepInputs:
        now, messages = _step_decoder.decode(self.messages.hear(0, Tag.STEP))
        return StepInputs(now=now, messages=messages)


class NullOutbox:
    def to_detokenizer(self, message: BatchTokenIDOut) -> None:
        pass

    def to_tokenizer(self, message: Message, reply_to: str | None = None) -> None:
        pass

    def close(self) -> None:
        pass


class SharedJudge:
    """`judge_text`, with the verdicts on regexes of one rank."""

    def __init__(self, parallel: ParallelState):
        self.leads = parallel.rank == 0
        self.messages = parallel.messages

    def __call__(self, req: Req, token: int) -> TextVerdict:
        if self.messages is None or not req.params.stop_regex:
            return judge_text(req, token)
        if not self.leads:
            return _verdict_decoder.decode(self.messages.hear(0, Tag.VERDICT))
        verdict = judge_text(req, token)
        self.messages.tell_all(_encode(verdict), Tag.VERDICT)
        return verdict


def agree(args: ServerArgs, parallel: ParallelState) -> ServerArgs:
    """Everyone's flags with rank 0's seed; refused if the machines were started with flags that do not fit together."""
    if parallel.messages is None:
        return args
    mine = dataclasses.asdict(args)
    first, *others = (msgspec.msgpack.decode(said) for said in parallel.messages.exchange(_encode(mine)))
    for theirs in others:
        for name, value in first.items():
            if name not in OF_ONE_MACHINE and theirs[name] != value:
                raise StartupError(
                    f"node {theirs['node_rank']} was started with {name} {theirs[name]!r}, node 0 with {value!r}: "
                    "all nodes need the same"
                )
    return dataclasses.replace(args, random_seed=first["random_seed"])
