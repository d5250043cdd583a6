from __future__ import annotations

import random

import numpy as np
import pytest

from tinysrt.mem_cache.allocator import PagedAllocator, TokenAllocator, make_allocator


def test_the_factory_chooses_by_page_size():
    assert isinstance(make_allocator(64, 1), TokenAllocator)
    assert isinstance(make_allocator(64, 16), PagedAllocator)
    with pytest.raises(AssertionError, match="multiple"):
        make_allocator(65, 16)


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_slot_0_and_page_0_are_never_handed_out(page_size):
    """Trap 1: 10,000 random allocations and frees."""
    rng = random.Random(page_size)
    allocator = make_allocator(512, page_size)
    held: list[np.ndarray] = []
    for _ in range(10_000):
        if rng.random() < 0.5:
            slots = allocator.alloc_extend([0], [rng.randrange(1, 60)], [-1])
            if slots is not None:
                assert slots.dtype == np.int32 and slots.min() >= page_size
                assert slots.max() < 512 + page_size
                held.append(slots)
        elif held:
            allocator.free(held.pop(rng.randrange(len(held))))
    for slots in held:
        allocator.free(slots)
    assert allocator.available_size() == 512
    assert allocator.free_slots().tolist() == list(range(page_size, 512 + page_size))


@pytest.mark.parametrize("page_size", [1, 4])
def test_what_does_not_fit_changes_nothing(page_size):
    allocator = make_allocator(32, page_size)
    first = allocator.alloc_extend([0], [20], [-1])
    free = allocator.free_slots().tolist()
    assert allocator.alloc_extend([0, 0], [8, 8], [-1, -1]) is None
    assert allocator.alloc_decode(np.full(13, 1), np.zeros(13)) is None
    assert allocator.free_slots().tolist() == free
    allocator.free(first)
    assert allocator.alloc_extend([0], [33], [-1]) is None
    assert allocator.alloc_extend([0], [32], [-1]) is not None
    assert allocator.available_size() == 0


@pytest.mark.parametrize("page_size", [1, 4])
def test_the_lowest_free_slots_come_first(page_size):
    allocator = make_allocator(64, page_size)
    low = allocator.alloc_extend([0], [8], [-1])
    assert low.tolist() == list(range(page_size, page_size + 8))
    high = allocator.alloc_extend([0], [8], [-1])
    assert high.tolist() == list(range(page_size + 8, page_size + 16))
    allocator.free(low)
    assert allocator.alloc_extend([0], [12], [-1]).tolist() == low.tolist() + list(
        range(page_size + 16, page_size + 20)
    )


def test_extend_finishes_the_begun_page_then_takes_whole_pages_then_a_part():
    allocator = PagedAllocator(64, 4)
    assert allocator.alloc_extend([0], [6], [-1]).tolist() == [4, 5, 6, 7, 8, 9]
    assert allocator.available_size() == 64 - 8  # the rest of the second page is taken as well
    # Two requests at once: one goes on inside its page, the other starts.
    slots = allocator.alloc_extend([6, 0], [13, 2], [9, -1])
    assert slots.tolist() == [10, 11, 12, 13, 14, 15, 16] + [20, 21]


def test_extend_inside_one_page_takes_no_page():
    allocator = PagedAllocator(8, 4)
    allocator.alloc_extend([0], [5], [-1])
    assert allocator.available_size() == 0
    assert allocator.alloc_extend([5], [7], [8]).tolist() == [9, 10]
    assert allocator.alloc_extend([7], [7], [10]).tolist() == []


def test_decode_goes_on_after_the_last_slot_unless_a_page_begins():
    allocator = PagedAllocator(64, 4)
    a = allocator.alloc_extend([0], [4], [-1])
    b = allocator.alloc_extend([0], [5], [-1])
    slots = allocator.alloc_decode(np.array([5, 6]), np.array([a[-1], b[-1]]))
    assert slots.tolist() == [16, b[-1] + 1]
    assert slots.dtype == np.int32


def test_many_one_token_prompts_take_a_page_each():
    """Trap 11, the allocator's half: the page is what counts, not the token."""
    allocator = PagedAllocator(64 * 4, 64)
    assert len(allocator.alloc_extend([0] * 4, [1] * 4, [-1] * 4)) == 4
    assert allocator.available_size() == 0
    assert allocator.alloc_extend([0], [1], [-1]) is None


def test_freeing_from_the_middle_of_a_page_is_caught():
    """Trap 10: it would free the neighbor's tokens."""
    allocator = PagedAllocator(64, 16)
    slots = allocator.alloc_extend([0], [20], [-1])
    with pytest.raises(AssertionError, match="inside a page"):
        allocator.free(slots[5:])
    allocator.free(slots[16:])
    allocator.free(slots[:16])
    assert allocator.available_size() == 64


@pytest.mark.parametrize("page_size", [1, 4])
def test_freeing_twice_is_caught_and_changes_nothing(page_size):
    allocator = make_allocator(32, page_size)
    slots = allocator.alloc_extend([0], [page_size], [-1])
    allocator.free(slots)
    with pytest.raises(AssertionError, match="freed twice"):
        allocator.free(slots)
    with pytest.raises(AssertionError, match="never handed out"):
        allocator.free(np.array([0]))
    assert allocator.available_size() == 32


def test_freeing_a_slot_twice_in_one_call_is_caught():
    allocator = TokenAllocator(32)
    slots = allocator.alloc_extend([0], [4], [-1])
    with pytest.raises(AssertionError, match="freed twice"):
        allocator.free(np.array([slots[0], slots[0]]))


def test_a_search_beyond_the_first_window_of_the_bitmap_finds_all():
    allocator = TokenAllocator(10_000)
    all_slots = allocator.alloc_extend([0], [10_000], [-1])
    allocator.free(all_slots[::7])
    wanted = len(all_slots[::7])
    assert allocator.alloc_extend([0], [wanted], [-1]).tolist() == all_slots[::7].tolist()
    assert allocator.available_size() == 0


def test_reset_frees_everything():
    allocator = make_allocator(32, 4)
    allocator.alloc_extend([0], [9], [-1])
    allocator.reset()
    assert allocator.available_size() == 32
