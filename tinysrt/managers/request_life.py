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

Rules of this file: `Stage` changes only through `check_transition`, which refuses what the table does not
list; the tests walk the table, and `diagrams/request-life.mmd` is generated from it.
"""

from __future__ import annotations

from enum import Enum


class Stage(Enum):
    COMPILING_GRAMMAR = "compiling grammar"  # reserved for constrained output: waits for its grammar
    WAITING = "waiting"
    CHUNKED = "prefilling in chunks"
    PREFILLING = "prefilling"
    RUNNING = "running"
    RETRACTED = "retracted"
    PAUSED = "paused"
    FINISHED = "finished"
    ABORTED = "aborted"


TRANSITIONS: dict[Stage, tuple[Stage, ...]] = {
    Stage.COMPILING_GRAMMAR: (Stage.WAITING, Stage.ABORTED),
    Stage.WAITING: (Stage.PREFILLING, Stage.CHUNKED, Stage.ABORTED),
    # A chunked request whose last chunk is launched is an ordinary prefill from then on.
    Stage.CHUNKED: (Stage.PREFILLING, Stage.RETRACTED, Stage.PAUSED, Stage.ABORTED),
    # PREFILLING lasts from launch to result; nothing is retracted or paused while a result is on its way.
    Stage.PREFILLING: (Stage.RUNNING, Stage.ABORTED),
    Stage.RUNNING: (Stage.FINISHED, Stage.RETRACTED, Stage.PAUSED, Stage.ABORTED),
    Stage.RETRACTED: (Stage.PREFILLING, Stage.CHUNKED, Stage.ABORTED),
    Stage.PAUSED: (Stage.RUNNING, Stage.CHUNKED, Stage.RETRACTED, Stage.ABORTED),
    Stage.FINISHED: (),
    Stage.ABORTED: (),
}

ENDED = (Stage.FINISHED, Stage.ABORTED)


def check_transition(old: Stage, new: Stage) -> Stage:
    assert new in TRANSITIONS[old], f"a request cannot go from {old.value!r} to {new.value!r}"
    return new
