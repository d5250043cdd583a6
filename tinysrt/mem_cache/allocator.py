"""Allocators: who may write which KV slot next.

A *slot* is one token's place in the KV pools, a *page* is `page_size` consecutive slots. The pool of `size` tokens is
cut into pages 1 .. size / page_size; page k is the slots k*page_size .. (k+1)*page_size - 1:

    page_size 4      page 0            page 1            page 2
    slots          [0  1  2  3]      [4  5  6  7]      [8  9 10 11]   ...
                    dummy: padded     handed out lowest first
                    lanes write here

Invariants:
- page 0 is never handed out;
- a page is free or has exactly one owner; freeing a free page is our bug and stops at an assert;
- with pages of several tokens, position i of a sequence lies at offset i % page_size of its page. So a request fills
  the page it has begun (slot after `last_loc`) before it gets a new one, and only whole pages are ever freed.

The free pages are a bitmap, not a list. Taking the lowest free ones costs a short scan from `_lowest`, and gives
neighbouring slots to one prompt, which attention gathers faster than scattered ones (docs, chapter 8); a small load
also stays in a small part of the pool, so that a CPU never touches the rest of it.

The scheduler asks (`managers/schedule_batch.py`) and evicts from the prefix cache first when little is free; owners
give back through `radix_cache.py`. SGLang (`mem_cache/allocator.py`) keeps free ids as a tensor on the device and
takes them from the front.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

_SCAN = 256  # pages looked at first when searching the bitmap; doubles until enough are found


class Allocator(ABC):
    """The bitmap of free pages; the subclasses turn tokens into pages."""

    def __init__(self, size: int, page_size: int):
        assert page_size >= 1 and size >= page_size and size % page_size == 0, f"{size=} is no multiple of {page_size=}"
        self.size = size  # tokens, page 0 not counted
        self.page_size = page_size
        self.reset()

    def reset(self) -> None:
        self._is_free = np.ones(self.size // self.page_size + 1, dtype=bool)
        self._is_free[0] = False  # the dummy page
        self._num_free = self.size // self.page_size
        self._lowest = 1  # no page below it is free

    def available_size(self) -> int:
        """Free tokens."""
        return self._num_free * self.page_size

    def free_slots(self) -> np.ndarray:
        """Every free slot, ascending; for ownership checks."""
        return _slots_of(np.flatnonzero(self._is_free), self.page_size)

    @abstractmethod
    def alloc_extend(
        self, prefix_lens: Sequence[int], seq_lens: Sequence[int], last_locs: Sequence[int]
    ) -> np.ndarray | None:
        """Slots for positions prefix_lens[i] .. seq_lens[i]-1 of each request, concatenated, int32.

        last_locs[i] is the slot of position prefix_lens[i] - 1, or -1 without a prefix. If not all fit: None, and
        nothing has changed.
        """

    @abstractmethod
    def alloc_decode(self, seq_lens: np.ndarray, last_locs: np.ndarray) -> np.ndarray | None:
        """One slot for each request, whose length becomes seq_lens[i]; None, and no change, if not all fit."""

    @abstractmethod
    def free(self, slots: np.ndarray) -> None:
        """Give slots back. Each run starts on a page boundary: a page that is partly another's cannot be freed."""

    def _take(self, num_pages: int) -> np.ndarray | None:
        """The lowest free pages, ascending."""
        if num_pages > self._num_free:
            return None
        found: list[np.ndarray] = []
        missing, start, scan = num_pages, self._lowest, _SCAN
        while missing:
            pages = np.flatnonzero(self._is_free[start : start + scan])[:missing] + start
            found.append(pages)
            missing -= len(pages)
            start, scan = start + scan, scan * 2
        if not found:
            return np.empty(0, dtype=np.int64)
        taken = np.concatenate(found)
        self._is_free[taken] = False
        self._num_free -= num_pages
        self._lowest = int(taken[-1]) + 1
        return taken

    def _release(self, pages: np.ndarray) -> None:
        ordered = np.sort(pages)
        assert ordered[0] > 0, "page 0 was given back, but it is never handed out"
        assert not self._is_free[ordered].any() and (ordered[1:] != ordered[:-1]).all(), "a page was freed twice"
        self._is_free[ordered] = True
        self._num_free += len(ordered)
        self._lowest = min(self._lowest, int(ordered[0]))


class TokenAllocator(Allocator):
    """page_size 1: a page is a slot, and any free slot serves any token."""

    def __init__(self, size: int):
        super().__init__(size, page_size=1)

    def alloc_extend(
        self, prefix_lens: Sequence[int], seq_lens: Sequence[int], last_locs: Sequence[int]
    ) -> np.ndarray | None:
        slots = self._take(sum(seq_lens) - sum(prefix_lens))
        return None if slots is None else slots.astype(np.int32)

    def alloc_decode(self, seq_lens: np.ndarray, last_locs: np.ndarray) -> np.ndarray | None:
        slots = self._take(len(seq_lens))
        return None if slots is None else slots.astype(np.int32)

    def free(self, slots: np.ndarray) -> None:
        if len(slots):
            self._release(slots)


class PagedAllocator(Allocator):
    def alloc_extend(
        self, prefix_lens: Sequence[int], seq_lens: Sequence[int], last_locs: Sequence[int]
    ) -> np.ndarray | None:
        num_new = [self._pages(seq) - self._pages(pre) for pre, seq in zip(prefix_lens, seq_lens, strict=True)]
        pages = self._take(sum(num_new))
        if pages is None:
            return None
        parts: list[np.ndarray] = []
        first = 0
        for prefix_len, seq_len, last_loc, count in zip(prefix_lens, seq_lens, last_locs, num_new, strict=True):
            #   prefix_len       page boundary                    seq_len
            #   ├── rest of begun page ──┼── whole new pages ── ... ──┤ part of the last page
            room = -prefix_len % self.page_size  # slots left in the page that the prefix has begun
            begun = min(room, seq_len - prefix_len)
            assert begun == 0 or last_loc % self.page_size == (prefix_len - 1) % self.page_size, (
                f"slot {last_loc} cannot be position {prefix_len - 1}"
            )
            parts.append(np.arange(last_loc + 1, last_loc + 1 + begun))
            new_slots = _slots_of(pages[first : first + count], self.page_size)
            parts.append(new_slots[: seq_len - prefix_len - begun])
            first += count
        return np.concatenate(parts).astype(np.int32) if parts else np.empty(0, dtype=np.int32)

    def alloc_decode(self, seq_lens: np.ndarray, last_locs: np.ndarray) -> np.ndarray | None:
        starts_page = (np.asarray(seq_lens) - 1) % self.page_size == 0
        pages = self._take(int(starts_page.sum()))
        if pages is None:
            return None
        slots = np.asarray(last_locs, dtype=np.int32) + 1
        slots[starts_page] = pages * self.page_size
        return slots

    def free(self, slots: np.ndarray) -> None:
        if len(slots) == 0:
            return
        assert slots[0] % self.page_size == 0, f"slot {slots[0]} is inside a page: its neighbors would be freed too"
        self._release(np.unique(slots // self.page_size))

    def _pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)


def make_allocator(size: int, page_size: int) -> Allocator:
    return TokenAllocator(size) if page_size == 1 else PagedAllocator(size, page_size)


def _slots_of(pages: np.ndarray, page_size: int) -> np.ndarray:
    """[2, 5] with page_size 4 -> [8 9 10 11 20 21 22 23]"""
    return (pages[:, None] * page_size + np.arange(page_size)).ravel()
