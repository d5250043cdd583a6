"""A stand-in for a GPU: two streams, events, and a clock that moves only when somebody waits or works.

    host      ─ work 5 ─ launch ─ work 5 ─ launch ─ synchronize ▪▪▪▪▪▪▪▪▪▪ ─ …
    forward             [ 20 ms ················ ][ 20 ms ············]

What is queued on a stream runs when the clock has passed its end: as late as a device may, so whatever a queued job
reads must still be there and unchanged by then. Nothing sleeps and there is one thread, so times are exact.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from tinysrt.bench.fake_model import FakeEngine, FakeModelRunner
from tinysrt.managers.overlap_worker import StreamOverlapWorker
from tinysrt.managers.tp_worker import StepHandle, TpWorker
from tinysrt.model_executor.forward_batch_info import ForwardBatch
from tinysrt.model_executor.step_result import StepResult


@dataclass
class Event:
    device: VirtualDevice
    time: float

    def synchronize(self) -> None:
        self.device.advance_to(self.time)


@dataclass
class VirtualDevice:
    """Is `Streams` for a worker. `log`: (time, what) in the order in which it happened."""

    now: float = 0.0
    free_at: dict[str, float] = field(default_factory=lambda: {"schedule": 0.0, "forward": 0.0})
    current: str = "schedule"
    pending: list[tuple[float, int, str, Callable[[], None]]] = field(default_factory=list)
    log: list[tuple[float, str]] = field(default_factory=list)
    queued: int = 0

    # ---- the host ----

    def work(self, ms: float) -> None:
        self.advance_to(self.now + ms)

    def advance_to(self, time: float) -> None:
        """Everything that ends by then happens, in the order of its ends."""
        while self.pending and min(self.pending)[0] <= time:
            job = min(self.pending)
            self.pending.remove(job)
            self.now = max(self.now, job[0])
            self.say(f"end {job[2]}")
            job[3]()
        self.now = max(self.now, time)

    def say(self, what: str) -> None:
        self.log.append((self.now, what))

    def when(self, what: str) -> int:
        """Its place in the log."""
        return [entry for _, entry in self.log].index(what)

    # ---- streams ----

    def queue(self, name: str, ms: float, job: Callable[[], None]) -> None:
        end = max(self.free_at[self.current], self.now) + ms
        self.free_at[self.current] = end
        self.queued += 1
        self.pending.append((end, self.queued, name, job))

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        self.current = "forward"
        try:
            yield
        finally:
            self.current = "schedule"

    def record(self) -> Event:
        return Event(self, max(self.free_at[self.current], self.now))

    def wait(self, event: Event) -> None:
        self.free_at[self.current] = max(self.free_at[self.current], event.time)


@dataclass
class Output:
    ready: Event
    tokens: list[int] = field(default_factory=list)


class VirtualRunner:
    """FakeModelRunner on the device: its calls queue work and return at once. The device holds a batch by nothing but a
    weak reference: whoever launched it must keep it."""

    def __init__(self, fake: FakeModelRunner, device: VirtualDevice, forward_ms: float):
        self.fake = fake
        self.clock = device
        self.forward_ms = forward_ms
        self.max_total_num_tokens = fake.max_total_num_tokens
        self.max_running_requests = fake.max_running_requests
        self.vocab_size = fake.vocab_size
        self.device = "cpu"

    def forward(self, batch: ForwardBatch) -> dict[str, Any]:
        box: dict[str, Any] = {}
        held = weakref.ref(batch)

        def run() -> None:
            alive = held()
            assert alive is not None, "the batch was let go while the device still reads it"
            box["logits"] = self.fake.forward(alive)

        self.clock.queue(f"forward {batch.step}", self.forward_ms, run)
        return box

    def sample(self, logits: dict[str, Any], batch: ForwardBatch) -> Output:
        output = Output(Event(self.clock, 0.0))
        held = weakref.ref(batch)

        def run() -> None:
            alive = held()
            assert alive is not None, "the batch was let go while the device still reads it"
            output.tokens = self.fake.sample(logits["logits"], alive)

        self.clock.queue(f"sample {batch.step}", 0.0, run)
        output.ready = self.clock.record()
        return output

    def to_host(self, output: Output, batch: ForwardBatch) -> StepResult:
        output.ready.synchronize()
        self.clock.say(f"result {batch.step}")
        return self.fake.to_host(output.tokens, batch)  # type: ignore[arg-type]


class UploadingWorker(StreamOverlapWorker):
    """Copies each batch to the device first, on the scheduler's stream, as `to_forward_batch` does on CUDA."""

    upload_ms = 1.0

    def launch(self, batch: ForwardBatch, *, delay_sampling: bool = False) -> StepHandle:
        device = self.streams
        assert isinstance(device, VirtualDevice)
        device.queue(f"upload {batch.step}", self.upload_ms, lambda: None)
        handle = super().launch(batch, delay_sampling=delay_sampling)
        device.say(f"launched {batch.step}")
        return handle


def virtual_engine(*, overlap: bool, forward_ms: float = 20.0, **kwargs: Any) -> tuple[FakeEngine, VirtualDevice]:
    engine = FakeEngine(disable_overlap_schedule=not overlap, **kwargs)
    engine.close()
    device = VirtualDevice()
    runner = VirtualRunner(engine.runner, device, forward_ms)
    engine.scheduler.worker = UploadingWorker(runner, device) if overlap else TpWorker(runner)
    return engine, device
