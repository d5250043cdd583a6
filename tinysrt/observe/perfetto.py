"""A trace in the Chrome trace-event format, for ui.perfetto.dev or chrome://tracing.

What becomes what:

    each process                 a process row, its own events as instants
    forward_launched … _done     a slice in the scheduler's row, launch to processed result
    each request                 an async track: waiting, prefill, decode, delivery, one span after the other
    step                         counters: requests waiting and running, tokens free and cached

Times are microseconds since the first event. The format is documented in "Trace Event Format" (Google, 2016);
Perfetto reads it unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson

from tinysrt.observe.merge import Event

# The phases of a request: each opens at the first event named here and closes when the next phase opens.
PHASES: list[tuple[str, str]] = [
    ("tokenize", "request_received"),
    ("to scheduler", "sent"),
    ("waiting", "queued"),
    ("prefill", "admitted"),
    ("decode", "appended"),
    ("deliver", "finished"),
]
_ENDS = ("text_sent", "aborted")


def to_perfetto(events: Sequence[Event]) -> dict[str, Any]:
    """The JSON object a trace viewer loads."""
    start = events[0]["t"] if events else 0
    processes = list(dict.fromkeys(event["p"] for event in events))
    pids = {process: index + 1 for index, process in enumerate(processes)}
    out: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": process}} for process, pid in pids.items()
    ]
    launched: dict[tuple[int, int], float] = {}  # (pid, step) -> time of launch
    for event in events:
        pid, time = pids[event["p"]], (event["t"] - start) / 1000
        name = event["e"]
        args = {key: value for key, value in event.items() if key not in ("t", "p", "e")}
        if name == "forward_launched":
            launched[pid, event["step"]] = time
        elif name == "forward_done" and (pid, event["step"]) in launched:
            begin = launched.pop((pid, event["step"]))
            out.append(_forward(event["step"], pid, begin, time, args))
        elif name == "step":
            out += _counters(event, pid, time)
        else:
            out.append({"ph": "i", "name": name, "pid": pid, "tid": 1, "ts": time, "s": "t", "args": args})
    return {"traceEvents": out + _request_tracks(events, start), "displayTimeUnit": "ms"}


def export_perfetto(events: Sequence[Event], out: str | Path) -> None:
    Path(out).write_bytes(orjson.dumps(to_perfetto(events)))


def _forward(step: int, pid: int, begin: float, end: float, args: dict[str, Any]) -> dict[str, Any]:
    # With overlap step N+1 is launched before step N is processed, and slices of one thread may not cross: so two.
    thread = 2 + step % 2
    return {
        "ph": "X", "name": f"forward {step}", "pid": pid, "tid": thread, "ts": begin, "dur": end - begin, "args": args
    }  # fmt: skip


def _counters(event: Event, pid: int, time: float) -> list[dict[str, Any]]:
    requests = {seat: len(event[seat]) for seat in ("waiting_queue", "running_batch") if seat in event}
    tokens = {key: event[key] for key in ("free_tokens", "evictable_tokens", "protected_tokens") if key in event}
    return [
        {"ph": "C", "name": name, "pid": pid, "ts": time, "args": args}
        for name, args in (("requests", requests), ("tokens", tokens))
        if args
    ]


def _request_tracks(events: Sequence[Event], start: int) -> list[dict[str, Any]]:
    """One async track per request under a process row of their own (pid 0)."""
    out: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "requests"}}]
    opens = {event_name: phase for phase, event_name in PHASES}
    order = [phase for phase, _ in PHASES]
    current: dict[str, str] = {}  # rid -> phase

    def mark(ph: str, phase: str, rid: str, time: float) -> None:
        out.append({"ph": ph, "cat": "request", "name": phase, "id": rid, "pid": 0, "tid": 0, "ts": time})

    last: dict[str, float] = {}
    for event in events:
        rid = event.get("rid")
        if rid is None:
            continue
        time = last[rid] = (event["t"] - start) / 1000
        now, phase = current.get(rid), opens.get(event["e"])
        if event["e"] == "retracted":
            phase = "waiting"  # back in the queue: the one step backwards that there is
        elif phase is not None and now is not None and order.index(phase) <= order.index(now):
            phase = None  # a later chunk, a later token
        ends = event["e"] in _ENDS and (event["e"] == "aborted" or event.get("finished"))
        if now is not None and (phase is not None or ends):
            mark("e", current.pop(rid), rid, time)
        if phase is not None and not ends:
            current[rid] = phase
            mark("b", phase, rid, time)
    for rid, phase in current.items():  # the run ended first
        mark("e", phase, rid, last[rid])
    return out
