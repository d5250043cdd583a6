"""OverlapWorker: the same `launch`, but the forward runs while the scheduler goes on.

    scheduler thread   schedule N+1 │ launch N+1 │ process N   │ schedule N+2 │ launch N+2 │ process N+1 …
    forward thread     ──── forward N ───────────▶──── forward N+1 ───────────────▶──── forward N+2 …

On a CPU the "stream" is one thread with a queue: forwards run in launch order, one at a time, exactly like kernels on
a CUDA stream. That order is what everything above relies on: a slot freed while step N still writes to it may be given
to step N+1, because N+1 runs later.

PyTorch releases the interpreter lock inside its operators, so the scheduler thread does get to run; but both share the
same cores. On a CPU overlap proves the order of events, not speed (docs/chapters/12-overlap.md has the measurement).
Source: SGLang `managers/tp_worker_overlap_thread.py`, later folded into `scheduler.py` as a second CUDA stream.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from tinysrt.managers.tp_worker import FinishedStep, Runner, StepHandle
from tinysrt.model_executor.forward_batch_info import ForwardBatch
from tinysrt.model_executor.step_result import StepResult


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
