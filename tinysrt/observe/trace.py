"""The trace recorder: typed events of one run, from every process, in one format.

(The full text is being written; this is the interface every component uses.)
"""

from __future__ import annotations

from typing import Any


class Recorder:
    """One per process, passed to what records. `if trace.on: trace.event("queued", rid=req.rid, waiting=3)`."""

    def __init__(self, process: str, directory: str | None = None):
        self.process = process
        self.on = directory is not None

    def event(self, name: str, rid: str | None = None, **fields: Any) -> None:
        raise NotImplementedError

    def close(self) -> None:
        pass
