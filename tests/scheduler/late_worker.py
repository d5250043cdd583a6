"""A worker that runs each forward as late as possible: when its result is asked for.

The scheduler has by then scheduled the next step, freed and handed out slots, filtered and merged batches. If anything
that a launched step needs were edited in place, this worker would see it, every time.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from tinysrt.bench.fake_model import FakeEngine
from tinysrt.managers.tp_worker import FinishedStep, Runner
from tinysrt.model_executor.forward_batch_info import ForwardBatch
from tinysrt.model_executor.step_result import StepResult


class LateWorker:
    def __init__(self, runner: Runner):
        self.runner = runner
        self.queue: deque[LateStep] = deque()

    def launch(self, batch: ForwardBatch, *, delay_sampling: bool = False) -> LateStep:
        step = LateStep(self, batch)
        self.queue.append(step)
        return step

    def close(self) -> None:
        pass


class LateStep:
    def __init__(self, worker: LateWorker, batch: ForwardBatch):
        self.worker = worker
        self.batch = batch
        self.step: FinishedStep | None = None

    def finish_sampling(self) -> None:
        pass

    def result(self) -> StepResult:
        while self.step is None:
            first = self.worker.queue.popleft()
            first.step = FinishedStep(self.worker.runner, first.batch, False)
        return self.step.result()


def late_engine(**kwargs: Any) -> FakeEngine:
    """An overlap engine whose forwards run late."""
    engine = FakeEngine(disable_overlap_schedule=False, **kwargs)
    engine.close()
    engine.scheduler.worker = LateWorker(engine.runner)
    return engine
