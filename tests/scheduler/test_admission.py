"""Admission arithmetic, row by row as SGLang 0.5.23 computes it, and the traps around it."""

from __future__ import annotations

import numpy as np
import pytest

from tests.scheduler.helpers import make_adder, make_memory, make_req, running
from tinysrt.bench.fake_model import FakeEngine
from tinysrt.managers.schedule_batch import Req
from tinysrt.managers.schedule_policy import AddReqResult
from tinysrt.managers.seats import Limits

CONTINUE, NO_TOKEN, OTHER = AddReqResult.CONTINUE, AddReqResult.NO_TOKEN, AddReqResult.OTHER


@pytest.mark.parametrize(("free", "result"), [(111, NO_TOKEN), (112, CONTINUE)])
def test_need_must_be_strictly_less_than_what_is_free(free: int, result: AddReqResult) -> None:
    assert make_adder(make_memory(free)).add_one_req(make_req("a", 100)) is result


@pytest.mark.parametrize(("free", "result"), [(4197, NO_TOKEN), (4198, CONTINUE)])
def test_the_estimate_of_new_tokens_is_clipped_to_4096(free: int, result: AddReqResult) -> None:
    req = make_req("a", 100, max_new_tokens=100_000)
    assert make_adder(make_memory(free)).add_one_req(req) is result


def test_running_requests_are_charged_by_the_ratio_and_ignore_eos_in_full() -> None:
    decode = running(
        make_req("a", 10, max_new_tokens=1000, produced=200),
        make_req("b", 10, max_new_tokens=1000, produced=200, ignore_eos=True),
    )
    adder = make_adder(make_memory(5000), decode, new_token_ratio=0.5)
    assert (adder.total_offset, adder.current_offset) == (1200, 0)


def test_without_chunking_the_first_request_may_exceed_the_input_budget() -> None:
    adder = make_adder(make_memory(5000), input_budget=50, chunk_budget=None)
    req = make_req("a", 200)
    assert adder.add_one_req(req) is OTHER
    assert adder.can_run_list == [req]


def test_without_chunking_later_requests_must_stay_below_the_input_budget() -> None:
    adder = make_adder(make_memory(5000), input_budget=300, chunk_budget=None)
    results = [adder.add_one_req(make_req(name, n, start=n)) for name, n in [("a", 200), ("b", 100), ("c", 99)]]
    assert results == [CONTINUE, OTHER, CONTINUE]
    assert [req.rid for req in adder.can_run_list] == ["a", "c"]


def test_a_request_that_exceeds_the_chunk_budget_becomes_the_chunked_request() -> None:
    adder = make_adder(make_memory(5000), chunk_budget=128)
    first, second = make_req("a", 100), make_req("b", 100, start=500)
    assert [adder.add_one_req(first), adder.add_one_req(second)] == [CONTINUE, OTHER]
    assert (first.extend_len, second.extend_len) == (100, 28)
    assert adder.new_chunked_req is second
    assert adder.total_offset == (100 + 1 + 10) + (28 + 1 + 0)  # no decode tokens for a chunk that is not the last


def test_with_pages_charges_are_rounded_up_and_the_cut_ends_on_a_page() -> None:
    adder = make_adder(make_memory(5008, page_size=16), chunk_budget=128)
    first, second = make_req("a", 100), make_req("b", 100, start=500)
    adder.add_one_req(first)
    adder.add_one_req(second)
    assert second.extend_len == 16
    assert adder.total_offset == (112 + 16 + 10) + (16 + 16 + 0)


def test_a_request_that_exactly_fills_the_chunk_runs_and_still_says_other() -> None:
    adder = make_adder(make_memory(5008, page_size=16), chunk_budget=128)
    req = make_req("a", 125)
    assert adder.add_one_req(req) is OTHER
    assert adder.can_run_list == [req] and adder.new_chunked_req is None
    assert adder.rem_chunk_tokens == 0


def test_every_chunk_ends_on_a_page_of_the_prompt_whatever_came_before() -> None:
    """Trap 12: of 20 known tokens one page is cached; chunks of 100 from there end at 112, 208 and 304, not at 116."""
    memory = make_memory(5008, page_size=16)
    memory.tree.tree.insert(np.arange(20, dtype=np.int32), memory.allocator.alloc_extend([0], [20], [-1]))
    req = make_req("a", 310)
    adder = make_adder(memory, chunk_budget=100)
    adder.add_one_req(req)
    assert adder.new_chunked_req is req
    assert adder.add_one_req(make_req("b", 1, start=900)) is OTHER, "what is left of the chunk is less than a page"
    ends = [(req.prefix_len, req.extend_end)]
    chunked: Req | None = req
    while chunked is not None:
        req.kv.committed_len = req.extend_end
        chunked = make_adder(memory, chunk_budget=100).add_chunked_req(req)
        ends.append((req.prefix_len, req.extend_end))
    assert ends == [(16, 112), (112, 208), (208, 304), (304, 310)]
    req.kv.committed_len = 20  # it stopped inside a page: the boundary counts from the prompt's start, not from here
    make_adder(memory, chunk_budget=100).add_chunked_req(req)
    assert req.extend_end == 112


@pytest.mark.parametrize(
    ("prompt", "max_new", "free", "extend", "stays", "offset"),
    [
        (500, 10, 5000, 128, True, 129),
        (200, 50, 5000, 72, False, 72 + 1 + 50),
        (500, 10, 60, 60, True, 61),
    ],
)
def test_continuing_a_chunked_request(
    prompt: int, max_new: int, free: int, extend: int, stays: bool, offset: int
) -> None:
    memory = make_memory(free)
    req = make_req("a", prompt, max_new_tokens=max_new)
    req.kv.row, req.kv.committed_len = 1, 128
    adder = make_adder(memory, chunk_budget=128)
    assert (adder.add_chunked_req(req) is req) is stays
    assert (req.prefix_len, req.extend_len) == (128, extend)
    assert adder.total_offset == offset


def test_a_chunked_request_makes_progress_although_running_requests_will_need_it_all() -> None:
    decode = running(make_req("r", 10, max_new_tokens=4000))
    adder = make_adder(make_memory(1000), decode, new_token_ratio=1.0, chunk_budget=128)
    req = make_req("a", 500)
    req.kv.row, req.kv.committed_len = 1, 128
    assert adder.rem_total_tokens <= 0
    assert adder.add_chunked_req(req) is req
    assert req.extend_len == 128


@pytest.mark.parametrize(("free", "result"), [(20, NO_TOKEN), (22, CONTINUE)])
def test_the_pinned_prefix_is_not_counted_as_evictable(free: int, result: AddReqResult) -> None:
    """Trap 8: 90 of 100 prompt tokens are cached and unlocked, so that the pool seems to have free + 90."""
    memory = make_memory(free + 90)
    slots = memory.allocator.alloc_extend([0], [90], [-1])
    memory.tree.tree.insert(np.arange(90, dtype=np.int32), slots)
    adder = make_adder(memory)
    assert adder.rem_total_tokens == free + 90
    assert adder.add_one_req(make_req("a", 100)) is result
    if result is CONTINUE:
        assert memory.tree.protected_size() == 90 and adder.rem_total_tokens == 1
    else:
        assert memory.tree.protected_size() == 0, "the refused request let its lock go"


def test_decode_rows_that_ride_along_use_up_budgets() -> None:
    adder = make_adder(make_memory(5000), mixed_decode_tokens=30)
    assert (adder.rem_input_tokens, adder.rem_chunk_tokens, adder.total_offset) == (16354, 8162, 30)


def test_cache_off_and_ignore_eos_admits_what_fits_to_the_end() -> None:
    adder = make_adder(make_memory(1000, radix=False))
    reqs = [make_req(str(i), 100, max_new_tokens=200, ignore_eos=True) for i in range(4)]
    assert [adder.add_one_req(req) for req in reqs] == [CONTINUE, CONTINUE, CONTINUE, NO_TOKEN]


def test_readmitting_a_retracted_request_charges_its_prompt_and_output() -> None:
    adder = make_adder(make_memory(5000))
    adder.add_one_req(make_req("a", 100, max_new_tokens=50, produced=45))
    assert adder.total_offset == 145 + 1 + 50


def test_one_extra_page_per_request_is_reserved() -> None:
    """Trap 11: many one-token prompts fill a pool of pages without an allocation failure."""
    engine = FakeEngine(page_size=16, max_total_num_tokens=160, max_running_requests=16, debug_invariants=True)
    for i in range(12):
        engine.add(f"r{i}", [i], max_new_tokens=20)
    engine.run()
    assert all(len(engine.output_ids(f"r{i}")) == 20 for i in range(12))


def test_ignore_eos_load_is_admitted_without_retracts() -> None:
    """Trap 30: what will surely be produced is reserved in full, so a benchmark never retracts."""
    engine = FakeEngine(max_total_num_tokens=400, max_running_requests=16)
    for i in range(20):
        engine.add(f"r{i}", list(range(i, i + 30)), max_new_tokens=60, ignore_eos=True)
    engine.run()
    assert engine.scheduler.report.retracted == 0


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("capacity", [96, 608])
def test_the_longest_prompt_that_is_accepted_runs_and_a_longer_one_never_could(page_size: int, capacity: int) -> None:
    """FC-28: the limit that the TokenizerManager is told is the scheduler's own, pages included."""
    engine = FakeEngine(max_total_num_tokens=capacity, page_size=page_size, context_len=1000, debug_invariants=True)
    limits: Limits = engine.scheduler.limits
    longest = limits.max_req_input_len
    assert longest >= capacity - 2 * page_size - 4
    assert all(limits.clip_max_new_tokens(length, None) >= 0 for length in range(1, longest + 1))
    for length in (longest, longest - 1):
        engine.add(f"r{length}", list(range(length)), max_new_tokens=900)
        engine.run()
        assert engine.output_ids(f"r{length}"), "refused, or not a single token"
