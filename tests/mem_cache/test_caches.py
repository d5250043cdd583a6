"""A request's KV through the caches: who owns which slot at each moment of its life.

Every test ends in `check` (each slot has one owner) and most in an empty cache with a full free list.
"""

from __future__ import annotations

import numpy as np
import pytest

from tinysrt.mem_cache.ownership import OwnershipError
from tinysrt.mem_cache.prefix_cache import KVRecord

PAGE_SIZES = [1, 4, 16]


def all_free(memory) -> bool:
    memory.check()
    memory.cache.reset()
    memory.check()
    return (
        memory.allocator.available_size() == memory.allocator.size
        and memory.pool.available_size() == memory.pool.size
        and memory.cache.protected_size() == memory.cache.evictable_size() == 0
    )


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_two_identical_prompts_in_one_batch_keep_one_copy(new_memory, page_size):
    """Trap 5. Both compute the prompt; the second frees its own copies and reads the first one's from then on."""
    memory = new_memory(page_size)
    prompt = list(range(100, 139))
    first, second = memory.start(prompt), memory.start(prompt)
    memory.prefill(first, publish=False)
    memory.prefill(second, publish=False)
    memory.check()
    free = memory.allocator.available_size()
    memory.publish(first)
    memory.check()
    assert memory.allocator.available_size() == free
    memory.publish(second)
    memory.check()
    whole = 39 // page_size * page_size
    assert memory.allocator.available_size() == free + whole
    table = memory.pool.table
    assert np.array_equal(table[first.record.row, :whole], table[second.record.row, :whole])
    assert memory.cache.protected_size() == whole and memory.cache.evictable_size() == 0
    for token in range(20):
        assert memory.decode(first, token) and memory.decode(second, token)
        memory.check()
    memory.finish(first)
    memory.check()
    memory.finish(second)
    assert memory.cached([*prompt, *range(20)])[: len(prompt) // page_size * page_size]
    assert all_free(memory)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_free_from_protected_len(new_memory, page_size):
    """Trap 6: what a request found in the tree is not its own to free."""
    memory = new_memory(page_size)
    prompt = list(range(40))
    first = memory.start(prompt)
    memory.prefill(first)
    memory.finish(first)
    second = memory.start([*prompt, 7, 8, 9])
    assert second.record.cache_protected_len == 40 // page_size * page_size
    memory.prefill(second)
    memory.decode(second, 5)
    memory.finish(second)
    memory.check()
    third = memory.start([*prompt, 7, 8, 9])
    memory.prefill(third)
    memory.finish(third, insert=False)
    assert all_free(memory)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_a_request_that_ends_twice_is_caught(new_memory, page_size):
    """A peer's fault: an abort in flight frees the row of a request that has finished."""
    memory = new_memory(page_size)
    request = memory.start(list(range(20)))
    memory.prefill(request)
    ids = request.committed
    memory.finish(request)
    for insert in (True, False):
        with pytest.raises(AssertionError, match="given back already"):
            memory.cache.cache_finished(request.record, ids, insert)
    assert request.record == KVRecord()
    assert all_free(memory)


@pytest.mark.parametrize("length", [1, 3, 15, 16, 17, 31, 32, 33, 64, 128])
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_a_prompt_that_is_wholly_cached_still_computes_its_last_token(new_memory, page_size, length):
    """Trap 2."""
    memory = new_memory(page_size)
    prompt = list(range(length))
    for turn in range(3):
        request = memory.start(prompt)
        cached = request.record.cache_protected_len
        assert cached <= length - 1
        assert cached == (0 if turn == 0 else (length - 1) // page_size * page_size)
        memory.prefill(request)
        memory.check()
        memory.finish(request)
        memory.check()
    changed = [*prompt[: length // 2], -1, *prompt[length // 2 + 1 :]]
    assert len(memory.cached(changed)) == length // 2 // page_size * page_size
    assert all_free(memory)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("radix", [True, False])
def test_chunks_publish_as_they_go_and_the_unaligned_tail_stays_the_requests(new_memory, page_size, radix):
    memory = new_memory(page_size, radix=radix)
    prompt = list(range(100))
    request = memory.start(prompt)
    for end in (23, 46, 69, 92, 100):
        assert memory.extend(request, 23)
        memory.publish(request)
        memory.check()
        assert request.record.committed_len == end
        whole = end // page_size * page_size if radix else 0
        assert request.record.cache_protected_len == whole
        assert len(memory.cached(prompt)) == whole
    memory.finish(request)
    assert all_free(memory)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_another_request_shares_a_prompt_that_is_still_being_computed_in_chunks(new_memory, page_size):
    memory = new_memory(page_size)
    prompt = list(range(96))
    first = memory.start(prompt)
    memory.extend(first, 64)
    memory.publish(first)
    second = memory.start(prompt)
    assert second.record.cache_protected_len == 64
    memory.prefill(second)  # overtakes: first's remaining chunks are duplicates when they are published
    memory.check()
    memory.prefill(first)
    memory.check()
    memory.finish(second)
    memory.finish(first)
    assert all_free(memory)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_retract_and_abort_keep_nothing_that_was_not_published(new_memory, page_size):
    memory = new_memory(page_size)
    prompt = list(range(40))
    request = memory.start(prompt)
    memory.prefill(request)
    for token in range(30):
        memory.decode(request, token)
    memory.finish(request, insert=False)
    memory.check()
    assert len(memory.cached([*prompt, *range(30)])) == 40 // page_size * page_size
    assert memory.cache.protected_size() == 0
    aborted = memory.start(list(range(500, 530)))
    memory.extend(aborted, 10)
    memory.finish(aborted, insert=False)
    assert memory.cached(list(range(500, 530))) == []
    assert all_free(memory)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_slots_allocated_ahead_are_freed_at_the_end(new_memory, page_size):
    """Speculation reserves beyond the committed length."""
    for insert in (True, False):
        memory = new_memory(page_size)
        request = memory.start(list(range(21)))
        memory.prefill(request)
        for token in range(9):
            memory.decode(request, token, ahead=13)
            memory.check()
        assert request.record.allocated_len > request.record.committed_len + 9
        memory.finish(request, insert)
        assert all_free(memory)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_a_pinned_match_is_not_evictable_and_survives_pressure(new_memory, page_size):
    """Trap 8, the cache's half: the pin takes the match out of what admission may count on."""
    memory = new_memory(page_size, size=128)
    prompt = list(range(64))
    request = memory.start(prompt)
    memory.prefill(request)
    memory.finish(request)
    before = memory.cache.evictable_size()
    match = memory.cache.match_prefix(np.array(prompt[:48]))
    memory.cache.lock(match.node)
    assert memory.cache.evictable_size() == before - 48
    assert memory.cache.evict(1000) == before - 48
    assert memory.cached(prompt) == match.slots.tolist()
    memory.cache.unlock(match.node)
    assert memory.cache.evictable_size() == 48
    assert all_free(memory)


def test_a_finished_request_leaves_its_kv_evictable_not_used(new_memory):
    """Trap 74: usage is (total - free - evictable) / total."""
    memory = new_memory(1, size=2048)
    request = memory.start(list(range(1000)))
    memory.prefill(request)
    memory.finish(request)
    assert memory.allocator.size - memory.allocator.available_size() - memory.cache.evictable_size() == 0
    assert memory.cache.evictable_size() == 1000


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_output_is_found_by_the_next_turn_of_a_conversation(new_memory, page_size):
    memory = new_memory(page_size)
    turn = memory.start(list(range(33)))
    memory.prefill(turn)
    for token in range(200, 220):
        memory.decode(turn, token)
    history = list(turn.ids)
    memory.finish(turn)
    next_turn = memory.start([*history, 1, 2, 3])
    assert next_turn.record.cache_protected_len == len(history) // page_size * page_size
    memory.prefill(next_turn)
    memory.finish(next_turn)
    assert all_free(memory)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_namespaces_never_share(new_memory, page_size):
    memory = new_memory(page_size)
    prompt = list(range(48))
    for namespace in (None, "alice", "bob"):
        request = memory.start(prompt, namespace)
        assert request.record.cache_protected_len == 0
        memory.prefill(request)
        memory.check()
        memory.finish(request)
    assert memory.start(prompt, "bob").record.cache_protected_len == 47 // page_size * page_size
    slots = [tuple(memory.cached(prompt, namespace)) for namespace in (None, "alice", "bob")]
    assert len(set(slots)) == 3
    memory.check()


def test_a_flush_while_a_request_holds_a_node_is_caught_and_harmless(new_memory):
    """FC-31: the scheduler refuses it; if it did not, nothing would be lost."""
    memory = new_memory(4)
    request = memory.start(list(range(40)))
    memory.prefill(request)
    with pytest.raises(AssertionError, match="flushed while"):
        memory.cache.reset()
    memory.check()
    memory.decode(request, 1)
    memory.finish(request)
    assert all_free(memory)
    assert memory.cached(list(range(40))) == []


def test_the_chunk_cache_finds_nothing_and_frees_everything(new_memory):
    memory = new_memory(1, radix=False)
    assert not memory.cache.is_cache_aware
    for _ in range(2):
        request = memory.start(list(range(50)))
        assert request.record.cache_protected_len == 0
        memory.prefill(request)
        memory.decode(request, 1)
        memory.check()
        memory.finish(request)
        assert memory.allocator.available_size() == memory.allocator.size
    assert memory.cache.evict(10) == 0 and memory.cache.evictable_size() == memory.cache.protected_size() == 0


# ---- the check itself sees what it must see -------------------------------------------------------------


def broken(memory, message: str) -> None:
    with pytest.raises(OwnershipError, match=message):
        memory.check()


@pytest.fixture(params=PAGE_SIZES)
def busy(request, new_memory):
    """One request in decode that shares a prefix with an earlier one."""
    memory = new_memory(request.param)
    earlier = memory.start(list(range(48)))
    memory.prefill(earlier)
    memory.finish(earlier)
    running = memory.start([*range(48), 77, 78])
    memory.prefill(running)
    memory.decode(running, 5)
    memory.check()
    return memory


def test_check_sees_a_leaked_slot(busy):
    busy.allocator.alloc_extend([0], [1], [-1])
    broken(busy, "no owner")


def test_check_sees_a_slot_with_two_owners(busy):
    record = busy.requests[0].record
    page_size = busy.page_size
    first = busy.pool.table[record.row, record.cache_protected_len]
    busy.allocator._is_free[first // page_size] = True
    broken(busy, f"free list and row {record.row}")


def test_check_sees_a_row_that_does_not_follow_the_tree(busy):
    busy.pool.table[busy.requests[0].record.row, 0] += busy.page_size
    broken(busy, "not those of the node it locks")


def test_check_sees_a_lock_too_much_and_one_too_little(busy):
    node = busy.requests[0].record.last_node
    busy.cache.lock(node)
    broken(busy, "lock_ref is 2, but 1 records hold it")
    busy.cache.unlock(node)
    busy.check()
    busy.cache.unlock(node)
    broken(busy, "lock_ref is 0, but 1 records hold it")


def test_check_sees_a_lost_row_and_a_row_held_twice(busy):
    row = busy.pool.alloc()[0]
    broken(busy, f"row {row} has 0 owners")
    busy.pool.free(row)
    busy.pool._free_rows.append(busy.requests[0].record.row)
    broken(busy, f"row {busy.requests[0].record.row} has 2 owners")


def test_check_sees_sizes_that_drift(busy):
    busy.cache.tree.evictable += 1
    broken(busy, "sizes: ")


def test_check_sees_a_record_that_was_not_cleared(busy):
    record = busy.requests[0].record
    busy.cache.cache_finished(record, busy.requests[0].committed)
    record.allocated_len = 3
    broken(busy, "without a row")
