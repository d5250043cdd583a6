"""The life of a request inside the scheduler: one table, and the only place that knows it.

    COMPILING_GRAMMAR ─▶ WAITING ─▶ PREFILLING ─▶ RUNNING ─▶ FINISHED
                            │  ╲        ▲  ▲       │
                            │   ▶ CHUNKED  │       │
                            │       │      │       ▼
                            │       ╰──────┴── RETRACTED   (re-admitted with prompt + output)
                            ▼
                         ABORTED ◀── from everywhere that is not an end

    WAITING            in `waiting_queue`, no row, no KV
    CHUNKED            is `chunked_req`: holds a row and the KV of the chunks launched so far
    PREFILLING         its last (or only) prefill piece is launched, its result not yet processed
    RUNNING            has its first token; decodes in `running_batch`
    RETRACTED          in `waiting_queue` again: KV given back, output tokens kept
    PAUSED             in-place pause: keeps row and KV, is not scheduled
    FINISHED, ABORTED  over: no row, no KV, one final message sent

Rules of this file: `ReqState` changes only through `check_transition`, which refuses what the table does not
list; the tests walk the table, and `diagrams/request-life.mmd` is generated from it.
"""

from __future__ import annotations

from enum import Enum


class ReqState(Enum):
    COMPILING_GRAMMAR = "compiling grammar"  # reserved for constrained output: waits for its grammar
    WAITING = "waiting"
    CHUNKED = "prefilling in chunks"
    PREFILLING = "prefilling"
    RUNNING = "running"
    RETRACTED = "retracted"
    PAUSED = "paused"
    FINISHED = "finished"
    ABORTED = "aborted"


TRANSITIONS: dict[ReqState, tuple[ReqState, ...]] = {
    ReqState.COMPILING_GRAMMAR: (ReqState.WAITING, ReqState.ABORTED),
    ReqState.WAITING: (ReqState.PREFILLING, ReqState.CHUNKED, ReqState.ABORTED),
    # A chunked request whose last chunk is launched is an ordinary prefill from then on.
    ReqState.CHUNKED: (ReqState.PREFILLING, ReqState.RETRACTED, ReqState.PAUSED, ReqState.ABORTED),
    # PREFILLING lasts from launch to result; nothing is retracted or paused while a result is on its way.
    ReqState.PREFILLING: (ReqState.RUNNING, ReqState.ABORTED),
    ReqState.RUNNING: (ReqState.FINISHED, ReqState.RETRACTED, ReqState.PAUSED, ReqState.ABORTED),
    ReqState.RETRACTED: (ReqState.PREFILLING, ReqState.CHUNKED, ReqState.ABORTED),
    ReqState.PAUSED: (ReqState.RUNNING, ReqState.CHUNKED, ReqState.RETRACTED, ReqState.ABORTED),
    ReqState.FINISHED: (),
    ReqState.ABORTED: (),
}

ENDED = (ReqState.FINISHED, ReqState.ABORTED)


def check_transition(old: ReqState, new: ReqState) -> ReqState:
    assert new in TRANSITIONS[old], f"a request cannot go from {old.value!r} to {new.value!r}"
    return new
