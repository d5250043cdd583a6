"""The trace recorder: typed events of one run, from every process, in one format.

    main process    Recorder("tokenizer", dir)    ─▶ dir/tokenizer-<pid>.jsonl    ┐
    scheduler       Recorder("scheduler", dir)    ─▶ dir/scheduler-<pid>.jsonl    ├─▶ merge.py ─▶ run.jsonl
    detokenizer     Recorder("detokenizer", dir)  ─▶ dir/detokenizer-<pid>.jsonl  ┘

A recorder is made once per process and passed to whatever records; nothing is global. Off is the default and costs
one attribute test, because every call site reads

    if trace.on:
        trace.event("queued", rid=req.rid, waiting=len(queue))

**The format** (version 1). A file is JSON lines. The first is a header,

    {"trace": 1, "process": "scheduler", "pid": 4711, "t": 81234567890, "unix": 1767225600.0}

and each further line one event: `t` (time.monotonic_ns: one clock for all processes of a machine), `p` (process),
`e` (name), `rid` where the event belongs to one request, then the fields that `EVENTS` names. Readers must ignore
fields they do not know; a field's meaning never changes within a version.

Invariant: an event is encoded when it happens, so what it shows cannot change afterwards, whatever the caller does to
its lists. Lines reach the file at most `FLUSH_SECONDS` later, also when the process falls idle, and at `close`.

SGLang's tracing exports OpenTelemetry spans instead (`--enable-trace`); here a run is a file that a person can read.
Next: `merge.py` joins the files of a run, `render.py` and `perfetto.py` show it.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

TRACE_VERSION = 1
FLUSH_SECONDS = 0.2
FLUSH_LINES = 512  # flush at once when so many wait: bounds memory under load


@dataclass(frozen=True)
class EventKind:
    process: str
    meaning: str
    fields: tuple[str, ...] = ()  # besides t, p, e and rid


# Every event, in the order one request meets them. A field that names requests holds rids.
EVENTS: dict[str, EventKind] = {
    "request_received": EventKind("tokenizer", "a request came through a door", ("stream",)),
    "tokenized": EventKind("tokenizer", "its text is ids now", ("prompt_tokens",)),
    "sent": EventKind("tokenizer", "TokenizedGenerateReqInput left for the scheduler"),
    "queued": EventKind("scheduler", "the Req is in waiting_queue; `waiting` is its length", ("prompt_len", "waiting")),
    "matched": EventKind("scheduler", "the prefix cache held `cached` of its tokens", ("cached", "prompt_len")),
    "admitted": EventKind("scheduler", "it computes [from, to) of its tokens this step", ("row", "extend")),
    "chunked": EventKind("scheduler", "it holds the chunked seat, `done` tokens in", ("done", "prompt_len")),
    "step": EventKind(
        "scheduler",
        "the seats once get_next_batch_to_run has decided, and the memory",
        ("step", "mode", "waiting_queue", "new_batch", "running_batch", "cur_batch", "chunked_req")
        + ("free_tokens", "evictable_tokens", "protected_tokens"),
    ),
    "forward_launched": EventKind("scheduler", "the batch went to the worker", ("step", "mode", "rids", "tokens")),
    "replayed": EventKind("scheduler", "it is a captured step of `bucket` lanes", ("step", "bucket")),
    "sampled": EventKind("scheduler", "the model runner drew the next tokens", ("step", "rows", "tokens")),
    "forward_done": EventKind("scheduler", "its result is on the host and processed", ("step", "tokens")),
    "appended": EventKind("scheduler", "the request's output grew", ("token", "output_len")),
    "merged": EventKind("scheduler", "last_batch's requests joined running_batch", ("rids",)),
    "retracted": EventKind("scheduler", "pushed back into the queue, its KV given up", ("output_len",)),
    "finished": EventKind("scheduler", "the end was seen", ("reason", "output_len")),
    "aborted": EventKind("scheduler", "ended before its time", ("reason", "output_len")),
    "detokenized": EventKind("detokenizer", "ids became text", ("tokens", "chars", "finished")),
    "text_sent": EventKind("tokenizer", "news was handed to the door", ("chars", "finished")),
}


class Recorder:
    """One per process, passed to what records. `if trace.on: trace.event("queued", rid=req.rid, waiting=3)`."""

    def __init__(self, process: str, directory: str | None = None):
        self.process = process
        self.on = directory is not None
        if directory is None:
            return
        Path(directory).mkdir(parents=True, exist_ok=True)
        self.path = Path(directory) / f"{process}-{os.getpid()}.jsonl"
        self._file = open(self.path, "ab")  # noqa: SIM115  closed in close()
        # A forward thread may record beside the scheduler's own, and the flusher empties what both fill.
        self._lock = threading.Lock()
        self._lines: list[bytes] = []
        self._closed = threading.Event()
        header = {"trace": TRACE_VERSION, "process": process, "pid": os.getpid()}
        self._add(header | {"t": time.monotonic_ns(), "unix": time.time()})
        # Without this thread the last events before an idle wait would stay in memory until the next request.
        threading.Thread(target=self._flush_regularly, name="trace-flush", daemon=True).start()
        atexit.register(self.close)

    def event(self, name: str, rid: str | None = None, **fields: Any) -> None:
        """Record `name` now. Fields are JSON values, or numpy scalars and arrays."""
        if not self.on:
            return
        record: dict[str, Any] = {"t": time.monotonic_ns(), "p": self.process, "e": name}
        if rid is not None:
            record["rid"] = rid
        record.update(fields)
        self._add(record)

    def flush(self) -> None:
        """Write what is waiting. Whole lines only: a reader of a live file sees at most one cut line, the last."""
        if not self.on:
            return
        with self._lock:
            self._write()

    def close(self) -> None:
        """Write the rest; further events are ignored. May be called twice (atexit calls it too)."""
        if not self.on:
            return
        self._closed.set()
        with self._lock:
            self.on = False
            self._write()
            self._file.close()
        atexit.unregister(self.close)

    def _add(self, record: dict[str, Any]) -> None:
        line = orjson.dumps(record, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE)
        with self._lock:
            if not self.on:  # closed between the caller's test and here
                return
            self._lines.append(line)
            if len(self._lines) >= FLUSH_LINES:
                self._write()

    def _write(self) -> None:
        if self._lines:
            self._file.write(b"".join(self._lines))
            self._file.flush()
            self._lines.clear()

    def _flush_regularly(self) -> None:
        while not self._closed.wait(FLUSH_SECONDS):
            self.flush()
