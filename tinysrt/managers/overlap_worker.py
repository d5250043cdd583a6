"""Overlap workers: the same `launch`, but the forward runs while the scheduler goes on.

    scheduler          schedule N+1 │ launch N+1 │ process N   │ schedule N+2 │ launch N+2 │ process N+1 …
    thread or stream   ──── forward N ───────────▶──── forward N+1 ───────────────▶──── forward N+2 …

Forwards run in launch order, one at a time. That is what everything above relies on: a slot freed while step N still
writes to it may be given to step N+1, because N+1 runs later.

`OverlapWorker`, for a CPU: the queue is one thread. PyTorch releases the interpreter lock inside its operators, so the
scheduler thread does get to run; but both share the same cores. On a CPU overlap proves the order of events, not speed
(docs/chapters/12-overlap.md has the measurement).

`StreamOverlapWorker`, for CUDA: the queue is a stream of the device, and launching returns as soon as the kernels are
queued. The scheduler's own stream copies a batch to the device; the forward stream waits for those copies, computes,
and copies the tokens back:

    scheduler's stream  ── copy batch N+1 ─● copied
                                           ▼ wait
    forward stream      ─ forward N ── ● ──── forward N+1, sample ── copy tokens to pinned memory ── ● ready
                                       ▼                                                             ▼
    host                     result N: synchronize with N's event only             result N+1, one step later

Two rules keep this right, and fast:
- *Nothing waits but `result`.* One `.item()` between two launches, or one copy from memory that is not pinned, waits
  for everything that is queued, and the overlap is gone without a trace in the answers. (`model_executor/upload.py`
  copies; `torch.cuda.set_sync_debug_mode("error")` finds who waits.)
- *What crosses streams is held.* The batch's tensors belong to the scheduler's stream: freed, their memory would go to
  its next batch while the forward stream still reads. So the handle holds the batch until its event has come.

Source: SGLang `managers/tp_worker_overlap_thread.py`, later folded into `scheduler.py` as a second CUDA stream.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from tinysrt.managers.tp_worker import FinishedStep, Runner, StepHandle, Worker
from tinysrt.model_executor.forward_batch_info import ForwardBatch
from tinysrt.model_executor.step_result import StepResult


def overlap_worker(runner: Runner) -> Worker:
    """The kind that suits the runner's device."""
    device = torch.device(runner.device)
    return StreamOverlapWorker(runner, CudaStreams(device)) if device.type == "cuda" else OverlapWorker(runner)


# ---- a thread --------------------------------------------------------------------------------------------


class QueuedStep:
    """Handle of a forward in the thread's queue; an exception there is raised again by `result`."""

    def __init__(self, thread: ThreadPoolExecutor, runner: Runner, batch: ForwardBatch, delay_sampling: bool):
        self.thread = thread
        self.forward: Future[FinishedStep] = thread.submit(FinishedStep, runner, batch, delay_sampling)
        self.sampling: Future[Any] | None = None

    def finish_sampling(self) -> None:
        self.sampling = self.thread.submit(lambda: self.forward.result().finish_sampling())

    def result(self) -> StepResult:
        step = self.forward.result()
        if self.sampling is not None:
            self.sampling.result()
        return step.result()


class OverlapWorker:
    def __init__(self, runner: Runner):
        self.runner = runner
        self.thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="forward")

    def launch(self, batch: ForwardBatch, *, delay_sampling: bool = False) -> StepHandle:
        return QueuedStep(self.thread, self.runner, batch, delay_sampling)

    def close(self) -> None:
        self.thread.shutdown(wait=True)


# ---- a stream --------------------------------------------------------------------------------------------


class Streams(Protocol):
    """Two queues of work on one device. The scheduler's stream is the current one unless `forward()` is entered."""

    def forward(self) -> AbstractContextManager[Any]:
        """What is queued inside goes to the forward stream."""

    def record(self) -> Any:
        """An event: it comes when all that is queued on the current stream by now is done."""

    def wait(self, event: Any) -> None:
        """The current stream goes on when the event has come. The host does not wait."""


class CudaStreams:
    def __init__(self, device: torch.device):
        self.device = device
        self.forward_stream = torch.cuda.Stream(device)
        self.forward_stream.wait_stream(torch.cuda.current_stream(device))  # weights, pools and graphs are there

    def forward(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self.forward_stream)

    def record(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event

    def wait(self, event: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self.device).wait_event(event)


class StreamStep:
    """Handle of a forward on the forward stream. It holds the batch, which that stream reads, until `result`."""

    def __init__(self, runner: Runner, streams: Streams, batch: ForwardBatch, delay_sampling: bool):
        self.runner = runner
        self.streams = streams
        self.batch = batch
        self.output: Any = None  # on its way to the host
        copied = streams.record()
        with streams.forward():
            streams.wait(copied)
            self.logits: Any = runner.forward(batch)
        if not delay_sampling:
            self.finish_sampling()

    def finish_sampling(self) -> None:
        if self.output is None:
            copied = self.streams.record()  # what has become known since launch is on the scheduler's stream
            with self.streams.forward():
                self.streams.wait(copied)
                self.output = self.runner.sample(self.logits, self.batch)
            self.logits = None

    def result(self) -> StepResult:
        assert self.output is not None, "finish_sampling() comes before result()"
        return self.runner.to_host(self.output, self.batch)


class StreamOverlapWorker:
    def __init__(self, runner: Runner, streams: Streams):
        self.runner = runner
        self.streams = streams

    def launch(self, batch: ForwardBatch, *, delay_sampling: bool = False) -> StepHandle:
        return StreamStep(self.runner, self.streams, batch, delay_sampling)

    def close(self) -> None:
        pass
