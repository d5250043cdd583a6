"""A scheduler and a model in this process, for measuring one mechanism without doors, sockets and other processes.

    Want … ──▶ Scheduler ──▶ ModelRunner         `play` steps until everybody has ended
                   │
                   └─▶ TimedOutbox: when each request's tokens came

Requests arrive before the first step, and one may arrive when all the others have produced some tokens (that is how a
long prompt is dropped among readers). After each `play` the cache is flushed: a run never finds what another one left.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from tinysrt.bench.dialects import RunVoid
from tinysrt.bench.fake_model import ListInbox, ListOutbox
from tinysrt.bench.workloads import gaps_during
from tinysrt.managers.scheduler import Scheduler
from tinysrt.managers.scheduler_process import assemble
from tinysrt.messages import BatchTokenIDOut, FlushCacheReqInput, TokenizedGenerateReqInput
from tinysrt.model_executor.model_runner import ModelRunner
from tinysrt.model_executor.openmp_team import in_own_thread
from tinysrt.observe.trace import Recorder
from tinysrt.sampling_params import SamplingParams
from tinysrt.server_args import ServerArgs

MAX_STEPS = 100_000

Result = TypeVar("Result")


@dataclass(frozen=True)
class Want:
    ids: list[int]
    max_new_tokens: int
    late: int = 0  # arrives once every request that is not late has produced so many tokens


class TimedOutbox(ListOutbox):
    """Notes when tokens come."""

    def __init__(self) -> None:
        super().__init__()
        self.arrivals: dict[str, list[float]] = {}  # one entry a token
        self.cached = 0

    def to_detokenizer(self, message: BatchTokenIDOut) -> None:
        now = time.perf_counter()
        super().to_detokenizer(message)
        for out in message.outs:
            times = self.arrivals.setdefault(out.meta.rid, [])
            if not times:
                self.cached += out.meta.cached_tokens
            times += [now] * len(out.new_ids)


@dataclass(frozen=True)
class Played:
    begin: float
    sent: list[float]
    arrivals: list[list[float]]  # of each Want, in their order
    cached_tokens: int

    @property
    def wall(self) -> float:
        return max(times[-1] for times in self.arrivals) - self.begin

    def ttft(self, i: int) -> float:
        return self.arrivals[i][0] - self.sent[i]

    def longest_gap(self, newcomer: int) -> float:
        """The longest any other request waited for a token while the newcomer's prompt was computed."""
        begin, end = self.sent[newcomer], self.arrivals[newcomer][0]
        others = [times for i, times in enumerate(self.arrivals) if i != newcomer]
        return max((gap for times in others for gap in gaps_during(times, begin, end)), default=0.0)


class InProcess:
    """One scheduler, as the flags say, around a runner that others may use in turn."""

    def __init__(self, runner: ModelRunner, args: ServerArgs):
        self.inbox, self.outbox = ListInbox([]), TimedOutbox()
        self.scheduler: Scheduler = assemble(
            args,
            runner,
            tokenizer=None,
            eos_ids=frozenset(),
            inbox=self.inbox,
            outbox=self.outbox,
            trace=Recorder("bench"),
        )
        # The runner's tables may be larger than this side allows.
        limits, allowed = self.scheduler.limits, args.max_running_requests or runner.max_running_requests
        self.scheduler.limits = replace(limits, max_running_requests=min(allowed, limits.max_running_requests))
        self._step = self.scheduler.step_normal if args.disable_overlap_schedule else self.scheduler.step_overlap

    def turn(self) -> None:
        """One step of the scheduler, with whatever has been put into the inbox."""
        self._step(self.inbox.receive(block=False))

    def play(self, wants: Sequence[Want]) -> Played:
        self.outbox.arrivals, self.outbox.cached = {}, 0
        early = [i for i, want in enumerate(wants) if not want.late]
        late = [i for i, want in enumerate(wants) if want.late]
        sent = [0.0] * len(wants)
        begin = time.perf_counter()
        for i in early:
            sent[i] = self._send(i, wants[i])
        for _ in range(MAX_STEPS):
            self.turn()
            produced = min(len(self.outbox.arrivals.get(str(i), ())) for i in early)
            while late and produced >= wants[late[0]].late:
                i = late.pop(0)
                sent[i] = self._send(i, wants[i])
            if not self.inbox.messages and self.scheduler.is_idle():
                break
        arrivals = [self.outbox.arrivals.get(str(i), []) for i in range(len(wants))]
        for want, times in zip(wants, arrivals, strict=True):
            if len(times) != want.max_new_tokens:
                raise RunVoid(f"a request got {len(times)} tokens instead of {want.max_new_tokens}")
        self.inbox.messages.append(FlushCacheReqInput(reply_to=""))
        self.turn()
        return Played(begin, sent, arrivals, self.outbox.cached)

    def _send(self, i: int, want: Want) -> float:
        params = SamplingParams(max_new_tokens=want.max_new_tokens, top_k=1, ignore_eos=True)
        self.inbox.messages.append(
            TokenizedGenerateReqInput(rid=str(i), reply_to="", input_ids=want.ids, sampling_params=params, stream=True)
        )
        return time.perf_counter()

    def close(self) -> None:
        self.scheduler.worker.close()


def with_scheduler(runner: ModelRunner, args: ServerArgs, use: Callable[[InProcess], Result]) -> Result:
    """`use` a scheduler that is made for it, in a thread of its own: no OpenMP team of one side outlives its turn and
    slows the other (`model_executor/openmp_team.py`)."""

    def turn() -> Result:
        side = InProcess(runner, args)
        try:
            return use(side)
        finally:
            side.close()

    return in_own_thread(turn)


def with_flags(args: ServerArgs, **flags: object) -> ServerArgs:
    """As typed, then resolved; a flag that cannot be on this machine is a StartupError."""
    return replace(args, **flags).resolve()  # type: ignore[arg-type]
