"""The scheduler under random load: arrivals, aborts, flushes and pauses at any moment, under every switch.

After each step every slot and row has one owner and every request sits in one seat; at the end every request was
answered exactly once, with the tokens a model alone would have given it, and everything is free.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.scheduler.late_worker import late_engine
from tinysrt.bench.fake_model import FakeEngine, hashed_token
from tinysrt.managers.request_life import Stage
from tinysrt.managers.seats import Seats
from tinysrt.messages import (
    AbortReq,
    ContinueGenerationReqInput,
    FinishAbort,
    FinishLength,
    FinishReason,
    FinishStop,
    FlushCacheReqInput,
    FlushCacheReqOutput,
    PauseGenerationReqInput,
)

VOCAB, EOS, CONTEXT = 50, 3, 120
NEXT_TOKEN = hashed_token(VOCAB, EOS)

SWITCHES = st.fixed_dictionaries(
    {
        "loop": st.sampled_from(["normal", "overlap", "late"]),
        "page_size": st.sampled_from([1, 4, 16]),
        "chunked_prefill_size": st.sampled_from([-1, 16, 48]),
        "enable_mixed_chunk": st.booleans(),
        "disable_radix_cache": st.booleans(),
        "schedule_policy": st.sampled_from(["lpm", "fcfs", "dfs-weight", "lof", "random"]),
        "max_running_requests": st.sampled_from([2, 5, 16]),
        "max_total_num_tokens": st.sampled_from([96, 160, 640]),
        "stream_interval": st.sampled_from([1, 3]),
    }
)


def expected(
    prompt: list[int], max_new_tokens: int, stop_ids: list[int], ignore_eos: bool
) -> tuple[list[int], FinishReason]:
    """What a model alone, without any scheduler, gives."""
    ids, stops = list(prompt), [] if ignore_eos else [EOS, *stop_ids]
    output: list[int] = []
    while len(output) < max_new_tokens:
        token = NEXT_TOKEN(np.array(ids))
        ids.append(token)
        output.append(token)
        if token in stops:
            return output, FinishStop(matched=token)
    return output, FinishLength(length=max_new_tokens)


class SchedulerMachine(RuleBasedStateMachine):
    engine: FakeEngine

    @initialize(switches=SWITCHES)
    def start(self, switches: dict[str, Any]) -> None:
        loop = switches.pop("loop")
        arguments: dict[str, Any] = dict(
            vocab_size=VOCAB, eos_ids=frozenset({EOS}), context_len=CONTEXT, next_token=NEXT_TOKEN, **switches
        )
        if loop == "late":
            self.engine = late_engine(**arguments)
        else:
            self.engine = FakeEngine(disable_overlap_schedule=loop == "normal", **arguments)
        self.requests: dict[str, tuple[list[int], int, list[int], bool]] = {}
        self.aborted: set[str] = set()

    # ---- what happens -------------------------------------------------------------------------------

    @rule(
        base=st.integers(0, 2),
        shared=st.integers(0, 40),
        own=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=30),
        max_new_tokens=st.integers(0, 40),
        stop_ids=st.lists(st.integers(0, VOCAB - 1), max_size=2),
        ignore_eos=st.booleans(),
        stream=st.booleans(),
        logprob_start=st.sampled_from([None, -1, 0, 5]),
        copies=st.integers(1, 3),
    )
    def arrive(
        self,
        base: int,
        shared: int,
        own: list[int],
        max_new_tokens: int,
        stop_ids: list[int],
        ignore_eos: bool,
        stream: bool,
        logprob_start: int | None,
        copies: int,
    ) -> None:
        prompt = [(base * 17 + i) % VOCAB for i in range(shared)] + own
        scores = (
            {}
            if logprob_start is None
            else {"return_logprob": True, "logprob_start_len": min(logprob_start, len(prompt))}
        )
        for _ in range(copies):
            rid = f"r{len(self.requests)}"
            self.requests[rid] = (prompt, max_new_tokens, stop_ids, ignore_eos)
            self.engine.add(
                rid,
                prompt,
                max_new_tokens=max_new_tokens,
                stop_token_ids=stop_ids,
                ignore_eos=ignore_eos,
                stream=stream,
                batch_id=f"b{base}",
                **scores,
            )

    @rule(turns=st.integers(1, 6))
    def step(self, turns: int) -> None:
        for _ in range(turns):
            self.engine.step()
            self.look()

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        rid = data.draw(st.sampled_from(sorted(self.requests)))
        self.aborted.add(rid)
        self.engine.send(AbortReq(rid=rid))

    @rule(base=st.integers(0, 2))
    def abort_batch(self, base: int) -> None:
        self.aborted.update(rid for rid, r in self.requests.items())  # by name of a batch: any of them may be hit
        self.engine.send(AbortReq(rid=f"b{base}"))

    @rule(timeout=st.sampled_from([0.0, 5.0]))
    def flush(self, timeout: float) -> None:
        self.engine.send(FlushCacheReqInput(reply_to="", timeout_s=timeout))

    @rule(mode=st.sampled_from(["retract", "in_place"]), turns=st.integers(0, 2))
    def pause(self, mode: str, turns: int) -> None:
        self.engine.send(PauseGenerationReqInput(reply_to="", mode=mode))
        self.step(1)
        self.step(turns + 1)
        self.engine.send(ContinueGenerationReqInput(reply_to=""))

    # ---- what must hold -----------------------------------------------------------------------------

    def look(self) -> None:
        scheduler = self.engine.scheduler
        scheduler.check_invariants()
        self.check_seats(scheduler.seats)

    def check_seats(self, seats: Seats) -> None:
        waiting = {req.rid for req in seats.waiting_queue}
        running = {req.rid for req in seats.running_batch.reqs if not req.is_over()}
        last = seats.last_batch
        prefilled = (
            {req.rid for req in last.reqs if not req.is_over()} if last and last.forward_mode.is_extend() else set()
        )
        chunked = {seats.chunked_req.rid} if seats.chunked_req else set()
        in_flight = {req.rid for flight in self.engine.scheduler.in_flight for req in flight.reqs}
        live = self.engine.scheduler.live
        assert not waiting & (running | prefilled | chunked)
        assert not running & (prefilled | chunked)
        assert set(live) <= waiting | running | prefilled | chunked | in_flight
        for rid, req in live.items():
            if rid in waiting:
                assert req.stage in (Stage.WAITING, Stage.RETRACTED) and req.kv.row is None
            elif rid in chunked:
                assert req.stage in (Stage.CHUNKED, Stage.PAUSED) and req.kv.row is not None
            else:
                assert req.stage in (Stage.PREFILLING, Stage.RUNNING, Stage.PAUSED) and req.kv.row is not None

    @invariant()
    def nothing_was_sent_twice(self) -> None:
        if not hasattr(self, "engine"):
            return
        for rid, outs in self.engine.outbox.outs.items():
            assert sum(out.meta.finish is not None for out in outs) <= 1, f"{rid} was answered twice"

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        engine = self.engine
        engine.run()
        self.look()
        refused = {m.rid: m.finish for m in engine.outbox.messages if isinstance(m, AbortReq)}
        for rid, request in self.requests.items():
            self.check_answer(rid, request, refused.get(rid))
        scheduler = engine.scheduler
        engine.send(FlushCacheReqInput(reply_to=""))
        engine.step()
        assert FlushCacheReqOutput(success=True, message="Cache flushed.") in engine.outbox.messages[-2:]
        assert scheduler.memory.allocator.available_size() == scheduler.limits.capacity
        assert scheduler.memory.pool.available_size() == scheduler.limits.max_running_requests
        engine.close()

    def check_answer(
        self, rid: str, request: tuple[list[int], int, list[int], bool], refusal: FinishAbort | None
    ) -> None:
        prompt, max_new_tokens, stop_ids, ignore_eos = request
        outs = self.engine.outbox.outs.get(rid, [])
        finishes = [out.meta.finish for out in outs if out.meta.finish is not None]
        assert len(finishes) + (refusal is not None) == 1, f"{rid} was not answered exactly once"
        limits = self.engine.scheduler.limits
        output, finish = expected(prompt, limits.clip_max_new_tokens(len(prompt), max_new_tokens), stop_ids, ignore_eos)
        got = self.engine.output_ids(rid)
        reason = finishes[0] if finishes else refusal
        if isinstance(reason, FinishAbort):
            too_long = len(prompt) > limits.max_req_input_len
            assert rid in self.aborted or (too_long and reason.status_code == 400)
            assert got == output[: len(got)]
        else:
            assert got == output
            assert reason == finish
        for out in outs:
            scores = out.meta.logprobs
            assert scores is None or len(scores.output) == len(out.new_ids)
            if scores is not None and scores.input is not None:
                assert [token for _, token in scores.input] == prompt[len(prompt) - len(scores.input) :]
                assert scores.input[0][0] is None if scores.input else True


SchedulerMachine.TestCase.settings = settings(
    max_examples=120, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestSchedulerMachine = SchedulerMachine.TestCase
