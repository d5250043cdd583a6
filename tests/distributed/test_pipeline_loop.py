"""The pipeline's loop with a fake model, in one process: random load under every switch, whatever the number of slots.

The worker runs each forward as late as it may, when its result is asked for, so that the other slots have scheduled,
freed and handed out slots of the pool meanwhile.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize

from tests.scheduler.late_worker import LateWorker
from tests.scheduler.test_state_machine import CONTEXT, EOS, NEXT_TOKEN, SWITCHES, VOCAB, SchedulerMachine
from tinysrt.bench.fake_model import FakeEngine
from tinysrt.managers.pp_loop import PipelineLoop
from tinysrt.managers.seats import Seats
from tinysrt.messages import (
    ContinueGenerationReqInput,
    FlushCacheReqInput,
    FlushCacheReqOutput,
    PauseGenerationReqInput,
)


class PipelineEngine(FakeEngine):
    """A step is one turn of one slot."""

    def __init__(self, slots: int, **arguments: Any):
        super().__init__(disable_overlap_schedule=True, **arguments)
        self.scheduler.worker = LateWorker(self.runner)
        self.loop = PipelineLoop(self.scheduler, slots)

    def step(self) -> None:
        self.loop.step(self.inbox.receive(block=False))

    @property
    def slots(self) -> list[Seats]:
        return self.scheduler.slots


class PipelineMachine(SchedulerMachine):
    engine: PipelineEngine

    @initialize(switches=SWITCHES, slots=st.integers(2, 4))
    def start(self, switches: dict[str, Any], slots: int) -> None:
        switches.pop("loop")
        self.engine = PipelineEngine(
            slots, vocab_size=VOCAB, eos_ids=frozenset({EOS}), context_len=CONTEXT, next_token=NEXT_TOKEN, **switches
        )
        self.requests = {}
        self.aborted = set()

    def look(self) -> None:
        """A request sits in the seats of one slot only, the queue is everyone's, each slot has one step in flight."""
        scheduler, slots = self.engine.scheduler, self.engine.slots
        scheduler.check_invariants()
        assert all(seats.waiting_queue is slots[0].waiting_queue for seats in slots)
        assert len(scheduler.in_flight) <= len(slots)
        seated: set[str] = {req.rid for req in slots[0].waiting_queue}
        for seats in slots:
            here = {req.rid for req in seats.running_batch.reqs if not req.is_over()}
            if seats.last_batch is not None:
                here |= {req.rid for req in seats.last_batch.reqs if not req.is_over()}
            if seats.chunked_req is not None:
                here.add(seats.chunked_req.rid)
            assert not here & seated
            seated |= here
        assert set(scheduler.live) <= seated | {req.rid for flight in scheduler.in_flight for req in flight.reqs}


PipelineMachine.TestCase.settings = settings(
    max_examples=30, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestPipelineMachine = PipelineMachine.TestCase


def test_waiting_requests_are_dealt_out_evenly() -> None:
    """One slot would keep one stage busy and the others waiting."""
    engine = PipelineEngine(3)
    for i in range(8):
        engine.add(f"r{i}", [i, 1, 2], max_new_tokens=20)
    for _ in range(6):
        engine.step()
    assert [len(seats.running_batch) for seats in engine.slots] == [3, 3, 2]
    engine.run()


def test_a_slot_launches_before_the_slot_after_it_gets_its_result() -> None:
    """That is the pipeline: two steps in flight at the end of a turn, one less at its middle."""
    engine = PipelineEngine(2)
    for i in range(4):
        engine.add(f"r{i}", [i, 1, 2], max_new_tokens=10)
    flights = []
    for _ in range(8):
        engine.step()
        flights.append(len(engine.scheduler.in_flight))
    assert flights == [1] + [2] * 7
    engine.run()


def test_a_long_prompt_is_cut_into_chunks_in_its_own_slot() -> None:
    engine = PipelineEngine(2, chunked_prefill_size=16)
    engine.add("long", list(range(100)), max_new_tokens=4)
    engine.add("short", [1, 2, 3], max_new_tokens=30)
    engine.step()
    engine.step()
    assert [seats.chunked_req is not None for seats in engine.slots] == [True, False]
    engine.run()
    assert len(engine.output_ids("long")) == 4 and len(engine.output_ids("short")) == 30


def test_when_memory_runs_out_no_slot_gives_up_a_request_that_would_fit_alone() -> None:
    """Each slot holds one request, and together they fill the pool: one of them goes back to the queue."""
    engine = PipelineEngine(2, max_total_num_tokens=96, debug_invariants=True)
    engine.scheduler.new_token_ratio = 0.0  # hopes that nobody will grow
    for i in range(2):
        engine.add(f"r{i}", list(range(100 * i, 100 * i + 10)), max_new_tokens=60)
        engine.step()
    assert not engine.scheduler.seats.waiting_queue
    engine.run()
    assert [len(engine.output_ids(f"r{i}")) for i in range(2)] == [60, 60]
    assert sum(engine.outbox.outs[f"r{i}"][-1].meta.num_retractions for i in range(2)) > 0


def test_prompts_half_computed_in_every_slot_do_not_lock_each_other_out() -> None:
    """Admission looks at what the other slots will need; here it does not, and both are let in."""
    engine = PipelineEngine(2, max_total_num_tokens=120, chunked_prefill_size=16, debug_invariants=True)
    engine.scheduler._holding_elsewhere = lambda seats: []  # type: ignore[method-assign]
    for i in range(2):
        engine.add(f"r{i}", list(range(100 * i, 100 * i + 80)), max_new_tokens=5)
    engine.run()
    assert [len(engine.output_ids(f"r{i}")) for i in range(2)] == [5, 5]
    assert sum(engine.outbox.outs[f"r{i}"][-1].meta.num_retractions for i in range(2)) == 1


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_pause_reaches_every_slot(mode: str) -> None:
    engine = PipelineEngine(2, debug_invariants=True)
    for i in range(4):
        engine.add(f"r{i}", [i, 1, 2], max_new_tokens=10)
    for _ in range(5):
        engine.step()
    engine.send(PauseGenerationReqInput(reply_to="", mode=mode))
    for _ in range(3):
        engine.step()
        assert not engine.scheduler.in_flight
    held = sum(len(seats.running_batch) for seats in engine.slots)
    assert held == (4 if mode == "in_place" else 0)
    if mode == "retract":
        engine.send(FlushCacheReqInput(reply_to=""))
        engine.step()
        assert FlushCacheReqOutput(success=True, message="Cache flushed.") in engine.outbox.messages
    engine.send(ContinueGenerationReqInput(reply_to=""))
    engine.run()
    assert all(len(engine.output_ids(f"r{i}")) == 10 for i in range(4))
