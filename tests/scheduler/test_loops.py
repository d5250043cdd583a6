"""The loops and the seats: what real engines got wrong, as named tests. A fake model checks every slot it reads."""

from __future__ import annotations

from typing import Any

import pytest

from tests.scheduler.late_worker import late_engine
from tests.text.tiny_tokenizers import bytes_only
from tinysrt.bench.fake_model import FakeEngine
from tinysrt.managers import schedule_policy
from tinysrt.managers.request_life import ENDED, TRANSITIONS, Stage, check_transition
from tinysrt.managers.seats import Limits
from tinysrt.messages import (
    AbortReq,
    ContinueGenerationReqInput,
    FinishAbort,
    FlushCacheReqInput,
    FlushCacheReqOutput,
    GetInternalStateReq,
    GetInternalStateReqOutput,
    HealthCheckOutput,
    LoadSnapshot,
    PauseGenerationReqInput,
    ShutdownReq,
    TokenizedGenerateReqInput,
)
from tinysrt.sampling_params import SamplingParams


def engine_of(kind: str, **kwargs: Any) -> FakeEngine:
    kwargs.setdefault("debug_invariants", True)
    return late_engine(**kwargs) if kind == "late" else FakeEngine(disable_overlap_schedule=kind == "normal", **kwargs)


LOOPS = pytest.mark.parametrize("loop", ["normal", "overlap", "late"])


# ---- the transition table ---------------------------------------------------------------------------


def test_every_state_is_in_the_table_and_every_state_can_end() -> None:
    assert set(TRANSITIONS) == set(Stage)
    for state in Stage:
        seen, todo = {state}, [state]
        while todo:
            for following in TRANSITIONS[todo.pop()]:
                if following not in seen:
                    seen.add(following)
                    todo.append(following)
        assert seen & set(ENDED), f"no way out of {state}"


def test_a_transition_that_the_table_does_not_list_is_our_own_bug() -> None:
    for state, allowed in TRANSITIONS.items():
        for new in Stage:
            if new in allowed:
                assert check_transition(state, new) is new
            else:
                with pytest.raises(AssertionError):
                    check_transition(state, new)


# ---- seats -------------------------------------------------------------------------------------------


@LOOPS
def test_the_seats_of_a_request_in_order(loop: str) -> None:
    """waiting_queue → new_batch = cur_batch → last_batch → running_batch = cur_batch → gone."""
    engine = engine_of(loop)
    engine.add("r", [1, 2, 3], max_new_tokens=3)
    engine.step()
    seats = engine.scheduler.seats
    assert not seats.waiting_queue
    assert seats.new_batch is not None and seats.cur_batch is seats.new_batch is seats.last_batch
    assert seats.running_batch.is_empty()
    engine.step()
    assert seats.new_batch is None
    assert seats.cur_batch is seats.running_batch and [r.rid for r in seats.running_batch.reqs] == ["r"]
    engine.run()
    assert engine.scheduler.seats.running_batch.filter_over() in (True, False)
    assert engine.scheduler.seats.running_batch.is_empty() and not engine.scheduler.live


@LOOPS
def test_a_long_prompt_sits_in_chunked_req_and_never_in_running_batch(loop: str) -> None:
    """Trap 15. Others are admitted when its last chunk leaves budget."""
    engine = engine_of(loop, chunked_prefill_size=32)
    engine.add("long", list(range(100)), max_new_tokens=4)
    engine.add("short", [5, 6, 7], max_new_tokens=4)
    sizes = []
    for _ in range(4):
        engine.step()
        seats = engine.scheduler.seats
        sizes.append((len(seats.cur_batch.out_cache_loc), seats.chunked_req.rid if seats.chunked_req else None))
        assert "long" not in [r.rid for r in seats.running_batch.reqs]
    assert sizes == [(32, "long"), (32, "long"), (32, "long"), (4 + 3, None)]
    engine.run()


@LOOPS
def test_chunks_of_a_prompt_are_not_cache_hits(loop: str) -> None:
    """Trap 17."""
    engine = engine_of(loop, chunked_prefill_size=32)
    engine.add("cold", list(range(100)), max_new_tokens=2)
    engine.run()
    engine.add("warm", list(range(100)), max_new_tokens=2)
    engine.run()
    assert engine.outbox.outs["cold"][-1].meta.cached_tokens == 0
    assert engine.outbox.outs["warm"][-1].meta.cached_tokens == 99  # trap 2: the last token is always computed


@LOOPS
def test_decode_does_not_duplicate_requests(loop: str) -> None:
    """Trap 18: last_batch and running_batch are the same object after a decode step."""
    engine = engine_of(loop)
    for i in range(3):
        engine.add(f"r{i}", [i], max_new_tokens=20)
    for _ in range(10):
        engine.step()
        assert len(engine.scheduler.seats.running_batch) in (0, 3)
    engine.run()


@LOOPS
def test_a_request_that_ends_while_only_prefills_run_frees_its_row_within_a_step(loop: str) -> None:
    """Trap 19."""
    engine = engine_of(loop, max_total_num_tokens=4000, context_len=2000, chunked_prefill_size=32)
    engine.add("short", [1, 2], max_new_tokens=2)
    engine.step()
    engine.step()
    engine.add("long", list(range(900)), max_new_tokens=1)
    for _ in range(4):
        engine.step()
    assert "short" not in engine.scheduler.live
    assert engine.scheduler.memory.pool.available_size() == 15
    engine.run()


def test_a_request_that_ends_by_length_is_not_decoded_once_more() -> None:
    """0.5.23's refinement of "one token too many": a length ending is known before its last result."""
    engine = engine_of("overlap")
    engine.add("r", [1, 2], max_new_tokens=5)
    engine.run()
    assert engine.scheduler.forward_count == 5
    engine.close()


def test_an_ending_by_stop_token_costs_one_step_and_shows_no_token() -> None:
    """Trap 20: overlap finds out one step late; the extra token is dropped."""
    for loop, forwards in (("normal", 3), ("late", 4)):
        engine = engine_of(loop, eos_ids=frozenset({9}), next_token=lambda ids: 9 if len(ids) == 4 else 5)
        engine.add("r", [1, 2], max_new_tokens=50)
        engine.run()
        assert engine.output_ids("r") == [5, 5, 9]
        assert engine.scheduler.forward_count == forwards
        assert sum(out.meta.finish is not None for out in engine.outbox.outs["r"]) == 1  # trap 21


def test_the_next_step_is_launched_before_the_last_one_is_looked_at() -> None:
    """Trap 22: a scheduler that needs the sampled ids on the host before it launches overlaps nothing."""
    engine = late_engine()
    worker: Any = engine.scheduler.worker
    launch, unfinished = worker.launch, []

    def spy(batch: Any, **options: Any) -> Any:
        unfinished.append(len(worker.queue))
        return launch(batch, **options)

    worker.launch = spy
    engine.add("r", [1, 2], max_new_tokens=6)
    engine.run()
    assert unfinished == [0, 1, 1, 1, 1, 1]


@LOOPS
@pytest.mark.parametrize("chunk", [-1, 16])
@pytest.mark.parametrize("start", [0, 5, 16, 59, 60])
def test_prompt_scores_are_whole_also_for_a_cached_prompt(loop: str, chunk: int, start: int) -> None:
    """Trap 3: a prefix hit ends where scores begin; there is one entry per prompt token from there, the first null."""
    engine = engine_of(loop, chunked_prefill_size=chunk)
    prompt = list(range(100, 160))
    engine.add("warm", prompt, max_new_tokens=2)
    engine.run()
    engine.add("r", prompt, max_new_tokens=3, return_logprob=True, logprob_start_len=start)
    engine.run()
    outs = engine.outbox.outs["r"]
    assert outs[-1].meta.cached_tokens == min(start, 59)
    (scores,) = [out.meta.logprobs.input for out in outs if out.meta.logprobs and out.meta.logprobs.input is not None]
    assert scores == [(None if i == start else -float(i + 100), i + 100) for i in range(start, 60)]


def test_a_cap_on_requests_per_prefill_spreads_them_over_steps() -> None:
    """And does not pass for a lack of rows: the next one is asked in the very next step."""
    engine = engine_of("normal", prefill_max_requests=1)
    for i in range(3):
        engine.add(f"r{i}", [i], max_new_tokens=20)
    prefills = []
    for _ in range(3):
        engine.step()
        prefills.append([req.rid for req in engine.scheduler.seats.new_batch.reqs])  # type: ignore[union-attr]
    assert prefills == [["r0"], ["r1"], ["r2"]]
    engine.run()


def test_many_riders_do_not_lock_newcomers_out() -> None:
    """With mixed chunks the decoding requests share the chunk budget; if they would use it up, prefill goes alone."""
    engine = engine_of("normal", enable_mixed_chunk=True, chunked_prefill_size=4, max_running_requests=8)
    for i in range(4):
        engine.add(f"r{i}", [i], max_new_tokens=30)
    for _ in range(3):
        engine.step()
    engine.add("late", [9] * 6, max_new_tokens=2)
    for _ in range(4):
        engine.step()
    assert engine.output_ids("late")
    engine.run()


# ---- retract ------------------------------------------------------------------------------------------


@LOOPS
@pytest.mark.parametrize("page_size", [1, 16])
def test_being_retracted_is_invisible(loop: str, page_size: int) -> None:
    """Trap 26, FC-29: a pool that cannot hold everybody, and the outputs of a pool that can."""
    outputs = []
    for tokens in (4000, 320):
        engine = engine_of(
            loop,
            max_total_num_tokens=tokens,
            page_size=page_size,
            schedule_conservativeness=0.1,
            chunked_prefill_size=-1,
        )
        for i in range(8):  # in a trickle: what runs already is charged by the ratio, newcomers in full
            engine.add(f"r{i}", list(range(i, i + 20)), max_new_tokens=70)
            engine.step()
            engine.step()
        engine.run()
        outputs.append([engine.output_ids(f"r{i}") for i in range(8)])
        metas = [engine.outbox.outs[f"r{i}"][-1].meta for i in range(8)]
        assert all(meta.completion_tokens == 70 and meta.prompt_tokens == 20 for meta in metas)
        assert all(meta.cached_tokens <= 19 for meta in metas)
        retracted = sum(meta.num_retractions for meta in metas)
        engine.close()
    assert retracted > 0
    assert outputs[0] == outputs[1]


def test_victims_are_the_shortest_output_then_the_longest_prompt() -> None:
    """Traps 26 and 27."""
    engine = engine_of("normal", max_total_num_tokens=1000)
    prompts = {"old": 10, "long": 40, "short": 20}
    engine.add("old", list(range(10)), max_new_tokens=100)
    for _ in range(5):
        engine.step()
    for rid in ("long", "short"):
        engine.add(rid, list(range(100, 100 + prompts[rid])), max_new_tokens=100)
    engine.step()
    engine.step()
    scheduler = engine.scheduler
    assert len(scheduler.seats.running_batch) == 3
    victims: list[str] = []
    original = scheduler.send_back
    scheduler.send_back = lambda seats, req: victims.append(req.rid) or original(seats, req)  # type: ignore
    scheduler._has_decode_room = lambda running: len(running) == 1  # type: ignore[method-assign]
    tree = scheduler.memory.tree
    cached = tree.evictable_size() + tree.protected_size()
    scheduler.retract(scheduler.seats)
    assert victims == ["long", "short"]
    assert tree.evictable_size() + tree.protected_size() == cached, "trap 26: what they produced is freed, not cached"
    assert [req.rid for req in scheduler.seats.waiting_queue] == ["long", "short"]


def test_one_request_always_stays_and_a_single_one_that_outgrows_the_pool_is_aborted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Trap 28 and the peers' fault. Arrival clips every request to the pool, so both checks are bent to get there."""
    monkeypatch.setattr(Limits, "clip_max_new_tokens", lambda self, length, wanted: wanted or 200)
    monkeypatch.setattr(schedule_policy, "CLIP_MAX_NEW_TOKENS", 10)
    engine = engine_of("normal", max_total_num_tokens=64)
    engine.add("r", [1, 2, 3], max_new_tokens=200)
    engine.run()
    finish = engine.outbox.outs["r"][-1].meta.finish
    assert isinstance(finish, FinishAbort) and finish.status_code == 500 and "too small" in finish.message
    assert len(engine.output_ids("r")) == 64 - 3 + 1


def test_the_new_token_ratio_is_back_at_its_start_when_idle() -> None:
    """Trap 29."""
    engine = engine_of("normal", max_total_num_tokens=200)
    for i in range(6):
        engine.add(f"r{i}", list(range(i, i + 20)), max_new_tokens=60)
    engine.run()
    engine.step()
    assert engine.scheduler.new_token_ratio == engine.scheduler.init_new_token_ratio


# ---- abort, pause, flush ------------------------------------------------------------------------------


@LOOPS
def test_abort_names_match_whole_names_and_batches(loop: str) -> None:
    """Trap 44, FC-27: "a" is not a prefix of "ab"; an empty name is nobody; a batch's name is all its items."""
    engine = engine_of(loop, max_running_requests=2)
    for rid in ("a", "ab", "abc"):
        engine.add(rid, [ord(c) for c in rid], max_new_tokens=30)
    for i in range(2):
        engine.add(f"b_{i}", [1, i], max_new_tokens=30, batch_id="b")
    engine.step()
    engine.step()
    for rid in ("a", "", "zzz", "b"):
        engine.send(AbortReq(rid=rid))
    engine.step()
    assert set(engine.scheduler.live) == {"ab", "abc"}
    told = {m.rid for m in engine.outbox.messages if isinstance(m, AbortReq)}
    assert told == {"b_0", "b_1"}, "those that were waiting are answered straight to the TokenizerManager"
    assert isinstance(engine.outbox.outs["a"][-1].meta.finish, FinishAbort)
    engine.send(AbortReq(abort_all=True))
    engine.run()
    assert not engine.scheduler.live


@LOOPS
def test_an_abort_frees_its_memory_within_a_step_whatever_the_state(loop: str) -> None:
    """Peers' faults: state left after an abort; a row freed twice by an abort in flight."""
    for steps in range(1, 7):
        engine = engine_of(loop, chunked_prefill_size=16, max_total_num_tokens=400)
        engine.add("r", list(range(60)), max_new_tokens=30)
        for _ in range(steps):
            engine.step()
        engine.send(AbortReq(rid="r"))
        engine.send(AbortReq(rid="r"))
        engine.step()
        assert not engine.scheduler.live and engine.scheduler.seats.chunked_req is None
        assert engine.scheduler.report.used_tokens() == 0
        assert engine.scheduler.memory.pool.available_size() == 16
        engine.add("next", list(range(60)), max_new_tokens=5)
        engine.run()
        assert len(engine.output_ids("next")) == 5
        engine.close()


@LOOPS
def test_flush_is_refused_while_busy_and_works_right_after(loop: str) -> None:
    """Trap 75, FC-31: with overlap one step is still in flight when the last answer is out."""
    engine = engine_of(loop, eos_ids=frozenset({9}), next_token=lambda ids: 9 if len(ids) > 6 else 5)
    engine.add("r", [1, 2], max_new_tokens=50)
    engine.step()
    engine.send(FlushCacheReqInput(reply_to=""))
    engine.step()
    busy = [m for m in engine.outbox.messages if isinstance(m, FlushCacheReqOutput)]
    assert [m.success for m in busy] == [False]
    while engine.scheduler.live:
        engine.step()
    engine.send(FlushCacheReqInput(reply_to=""))
    engine.step()
    assert [m.success for m in engine.outbox.messages if isinstance(m, FlushCacheReqOutput)] == [False, True]
    engine.add("again", [1, 2], max_new_tokens=50)
    engine.run()
    assert engine.outbox.outs["again"][-1].meta.cached_tokens == 0


def test_a_flush_with_a_timeout_waits_for_idle() -> None:
    engine = engine_of("normal")
    engine.add("r", [1, 2], max_new_tokens=5)
    engine.send(FlushCacheReqInput(reply_to="", timeout_s=10))
    engine.send(FlushCacheReqInput(reply_to="", timeout_s=10))
    engine.run()
    engine.step()
    answers = [m.success for m in engine.outbox.messages if isinstance(m, FlushCacheReqOutput)]
    assert answers == [False, True], "one deferred flush at a time; the first one waits"


@LOOPS
@pytest.mark.parametrize("mode", ["in_place", "retract", "abort"])
def test_pause_and_continue(loop: str, mode: str) -> None:
    alone = engine_of("normal")
    alone.add("r", list(range(40)), max_new_tokens=20)
    alone.run()
    engine = engine_of(loop, chunked_prefill_size=16)
    engine.add("r", list(range(40)), max_new_tokens=20)
    engine.add("s", list(range(100, 140)), max_new_tokens=20)
    for _ in range(4):
        engine.step()
    engine.send(PauseGenerationReqInput(reply_to="", mode=mode))
    for _ in range(3):
        engine.step()
    forwards = engine.scheduler.forward_count
    engine.step()
    assert engine.scheduler.forward_count == forwards, "paused"
    assert (engine.scheduler.report.used_tokens() > 0) is (mode == "in_place")
    engine.send(ContinueGenerationReqInput(reply_to=""))
    engine.run()
    if mode == "abort":
        assert all(isinstance(engine.outbox.outs[r][-1].meta.finish, FinishAbort) for r in engine.outbox.outs)
    else:
        assert engine.output_ids("r") == alone.output_ids("r")
        assert len(engine.output_ids("s")) == 20


@LOOPS
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_prompt_sent_back_between_its_chunks_is_scored_again_from_its_start(loop: str, steps: int) -> None:
    engine = engine_of(loop, chunked_prefill_size=16)
    engine.add("r", list(range(60)), max_new_tokens=3, return_logprob=True, logprob_start_len=5)
    for _ in range(steps):
        engine.step()
    assert engine.scheduler.seats.chunked_req is not None
    engine.send(PauseGenerationReqInput(reply_to="", mode="retract"))
    engine.step()
    engine.send(ContinueGenerationReqInput(reply_to=""))
    engine.run()
    outs = engine.outbox.outs["r"]
    assert outs[-1].meta.num_retractions == 1
    (scores,) = [out.meta.logprobs.input for out in outs if out.meta.logprobs and out.meta.logprobs.input is not None]
    assert scores == [(None if i == 5 else -float(i), i) for i in range(5, 60)]


# ---- what it says ---------------------------------------------------------------------------------------


def probe(rid: str) -> TokenizedGenerateReqInput:
    params = SamplingParams(max_new_tokens=1, top_k=1)
    return TokenizedGenerateReqInput(rid=rid, reply_to="", input_ids=[0], sampling_params=params, is_health_check=True)


def test_a_busy_scheduler_answers_a_health_probe_with_its_next_result() -> None:
    """Trap 54: a probe must not wait behind a long prefill."""
    engine = engine_of("normal", chunked_prefill_size=16, max_total_num_tokens=1000)
    engine.add("long", list(range(300)), max_new_tokens=2)
    engine.step()
    engine.send(probe("HEALTH_CHECK_1"))
    engine.step()
    assert HealthCheckOutput(rid="HEALTH_CHECK_1") in engine.outbox.messages
    engine.run()
    engine.send(probe("HEALTH_CHECK_2"))
    engine.run()
    assert len(engine.output_ids("HEALTH_CHECK_2")) == 1, "an idle one really generates"


def test_requests_that_cannot_run_are_refused_on_arrival() -> None:
    engine = engine_of("normal", max_total_num_tokens=100, max_queued_requests=2, context_len=512)
    engine.add("too long", list(range(96)), max_new_tokens=1)
    for i in range(3):
        engine.add(f"q{i}", [i], max_new_tokens=1)
    engine.add("q0", [1], max_new_tokens=1)
    engine.add("bad regex", [1], max_new_tokens=1, stop_regex=["("])
    engine.run()
    refused = {m.rid: m.finish for m in engine.outbox.messages if isinstance(m, AbortReq)}
    assert {rid: finish.status_code for rid, finish in refused.items() if finish} == {
        "too long": 400, "q2": 503, "q0": 400, "bad regex": 503,
    }  # fmt: skip


def test_a_bad_stop_regex_is_refused_not_fatal() -> None:
    engine = engine_of("normal", tokenizer=bytes_only(), vocab_size=257)
    engine.add("r", [1], max_new_tokens=1, stop_regex=["("])
    engine.run()
    (refused,) = [m for m in engine.outbox.messages if isinstance(m, AbortReq)]
    assert refused.finish is not None and refused.finish.status_code == 400


def test_load_snapshots_are_pushed_and_the_cache_counts_as_unused() -> None:
    """Trap 74."""
    engine = engine_of("normal")
    engine.add("r", list(range(50)), max_new_tokens=40)
    engine.run()
    engine.step()
    snapshots = [m for m in engine.outbox.messages if isinstance(m, LoadSnapshot)]
    assert [s.num_running_reqs for s in snapshots] == [1, 1, 1, 0]  # prefill, two times 15 decode steps, idle
    assert snapshots[1].num_used_tokens > 50 and snapshots[-1].num_used_tokens == 0
    engine.send(GetInternalStateReq(reply_to=""))
    engine.step()
    (state,) = [m for m in engine.outbox.messages if isinstance(m, GetInternalStateReqOutput)]
    assert state.internal_state["num_cached_tokens"] == 89


def test_shutdown_ends_the_loop_after_the_step_in_flight() -> None:
    engine = engine_of("overlap")
    engine.add("r", [1, 2], max_new_tokens=50)
    engine.step()
    engine.send(ShutdownReq())
    engine.scheduler.event_loop_overlap()
    assert not engine.scheduler.running and not engine.scheduler.in_flight
    engine.close()


@LOOPS
def test_a_request_that_stops_growing_long_before_its_limit_gives_back_what_was_reserved(loop: str) -> None:
    engine = engine_of(loop, eos_ids=frozenset({9}), next_token=lambda ids: 9 if len(ids) > 25 else 5)
    for i in range(30):
        engine.add(f"r{i}", [i] * 20, max_new_tokens=400)
    engine.run()
    assert all(engine.output_ids(f"r{i}")[-1] == 9 for i in range(30))
    assert engine.scheduler.report.used_tokens() == 0
