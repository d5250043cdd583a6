"""One run, one file: the per-process files of a trace directory joined in time order.

The merged file has the same lines as its parts (see `trace.py`): a header `{"trace": 1, "merged": [...]}` that names
the processes, then every event, oldest first. `load` reads either kind, so everything downstream (text rendering,
Perfetto export, labs, the docs) starts from `list[dict]` and never opens files itself.

Invariant: events of one process keep the order in which they were recorded, even when their clock readings are equal.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import orjson

from tinysrt.observe.trace import TRACE_VERSION

Event = dict[str, Any]


class TraceFormatError(ValueError):
    """A file that is not a trace, or one of a version this reader does not know."""


def load(path: str | Path) -> list[Event]:
    """The events of one file, or of every file of a directory, oldest first; headers are checked and dropped."""
    path = Path(path)
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    events: list[Event] = []
    for file in files:
        events += _read(file)
    events.sort(key=lambda event: event["t"])  # stable: equal times keep their file's order
    return events


def merge(directory: str | Path, out: str | Path) -> list[Event]:
    """Join the files of `directory` into `out`; returns the events."""
    events = load(directory)
    processes = list(dict.fromkeys(event["p"] for event in events))
    lines: Iterable[Event] = [{"trace": TRACE_VERSION, "merged": processes}, *events]
    Path(out).write_bytes(b"".join(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE) for line in lines))
    return events


def rids(events: Iterable[Event]) -> list[str]:
    """The requests of a run, in the order in which they first appear."""
    return list(dict.fromkeys(event["rid"] for event in events if "rid" in event))


def _read(file: Path) -> list[Event]:
    events: list[Event] = []
    lines = file.read_bytes().split(b"\n")
    # A live recorder may be in the middle of its last line: what follows the last newline is not an event yet.
    for number, line in enumerate(lines[:-1], 1):
        try:
            record = orjson.loads(line)
        except orjson.JSONDecodeError as exc:
            raise TraceFormatError(f"{file}, line {number}: not JSON ({exc}).") from exc
        if not isinstance(record, dict) or (not events and number == 1 and "trace" not in record):
            raise TraceFormatError(f"{file}: not a trace (no header in its first line).")
        if "trace" in record:
            if record["trace"] != TRACE_VERSION:
                raise TraceFormatError(
                    f"{file}: trace version {record['trace']}; this tinysrt reads version {TRACE_VERSION}."
                )
        else:
            events.append(record)
    return events
