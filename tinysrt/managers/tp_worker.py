"""TpWorker: one tensor-parallel rank's model, behind the scheduler's verb `launch`.

    scheduler ── launch(ForwardBatch) ──▶ TpWorker ──▶ ModelRunner.forward ─▶ .sample ─▶ .to_host
              ◀── StepHandle.result() ── StepResult

Forward and sample are separate calls. `launch(batch, delay_sampling=True)` stops between them: the handle's
`finish_sampling()` does the rest, once something the sampler needs (a grammar's mask) is known.

This worker does everything inside `launch`, so `result()` never waits: it is what `event_loop_normal` uses.
`overlap_worker.py` gives the same verb a forward thread. Source: SGLang `managers/tp_worker.py`.
"""

from __future__ import annotations

from typing import Any, Protocol

from tinysrt.model_executor.forward_batch_info import ForwardBatch
from tinysrt.model_executor.step_result import StepResult


class Runner(Protocol):
    """What a worker needs of `ModelRunner`; the tests' and the bench's fake model has the same three calls."""

    max_total_num_tokens: int
    max_running_requests: int
    vocab_size: int
    device: Any

    def forward(self, batch: ForwardBatch) -> Any: ...

    def sample(self, logits: Any, batch: ForwardBatch) -> Any: ...

    def to_host(self, output: Any, batch: ForwardBatch) -> StepResult: ...


class StepHandle(Protocol):
    """A launched forward."""

    def finish_sampling(self) -> None:
        """Sample now, if `launch` was told to delay it; else nothing."""

    def result(self) -> StepResult:
        """The step's tokens on the host; waits for this step and no other."""


class Worker(Protocol):
    def launch(self, batch: ForwardBatch, *, delay_sampling: bool = False) -> StepHandle: ...

    def close(self) -> None: ...


class FinishedStep:
    """Handle of a forward that has already run."""

    def __init__(self, runner: Runner, batch: ForwardBatch, delay_sampling: bool):
        self.runner = runner
        self.batch = batch
        self.logits: Any = runner.forward(batch)
        self.sampled: StepResult | None = None
        if not delay_sampling:
            self.finish_sampling()

    def finish_sampling(self) -> None:
        if self.sampled is None:
            output = self.runner.sample(self.logits, self.batch)
            self.sampled = self.runner.to_host(output, self.batch)
            self.logits = None  # a step's logits are large: let them go with the step

    def result(self) -> StepResult:
        assert self.sampled is not None, "finish_sampling() comes before result()"
        return self.sampled


class TpWorker:
    def __init__(self, runner: Runner):
        self.runner = runner

    def launch(self, batch: ForwardBatch, *, delay_sampling: bool = False) -> StepHandle:
        return FinishedStep(self.runner, batch, delay_sampling)

    def close(self) -> None:
        pass
