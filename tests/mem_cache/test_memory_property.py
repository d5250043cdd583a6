"""Random lives of requests against a naive reference: 10,000 steps for each page size.

Laws, checked after every step:
- every slot and row has exactly one owner, locks are what the records hold, sizes add up (check_ownership);
- a match is the longest prefix that the reference knows, in whole pages, and its slots hold the KV of that prefix;
- rows name the right KV for every committed position;
- eviction never takes what a request holds, and never leaves a page whose prefix is gone.
At the end everything is free.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

STEPS = 100
EXAMPLES = 100  # times STEPS: 10,000 steps for each page size
SIZE = {1: 32, 4: 64, 16: 160}  # small enough that memory runs short several times in each example
step_bytes = st.binary(min_size=4 * STEPS, max_size=4 * STEPS)
fixed = settings(max_examples=EXAMPLES, deadline=None, derandomize=True, database=None)


class Naive:
    """The cache as a dictionary: (namespace, tokens up to the end of a page) -> first slot of that page."""

    def __init__(self, memory) -> None:
        self.memory = memory
        self.page_size = memory.page_size
        self.pages: dict[tuple[str | None, tuple[int, ...]], int] = {}

    def ends(self, length: int) -> range:
        return range(self.page_size, length + 1, self.page_size)

    def longest(self, ids: list[int], namespace: str | None) -> int:
        length = 0
        for end in self.ends(len(ids)):
            if (namespace, tuple(ids[:end])) not in self.pages:
                break
            length = end
        return length

    def publish(self, ids: list[int], namespace: str | None, slots: np.ndarray) -> None:
        for end in self.ends(len(ids)):
            self.pages.setdefault((namespace, tuple(ids[:end])), int(slots[end - self.page_size]))

    def forget_free(self) -> None:
        """Drop what was evicted: pages whose slots are free now."""
        free = set(self.memory.allocator.free_slots().tolist())
        self.pages = {key: slot for key, slot in self.pages.items() if slot not in free}
        for namespace, ids in self.pages:
            before = ids[: -self.page_size]
            assert not before or (namespace, before) in self.pages, "an inner page was evicted before its followers"


class Play:
    """Turns bytes into steps; what makes no sense at the moment does something near it, or nothing."""

    def __init__(self, memory) -> None:
        self.memory = memory
        self.naive = Naive(memory)
        memory.after_evict = self.naive.forget_free
        self.retracted: list[tuple[list[int], str | None]] = []
        self.shares = memory.cache.is_cache_aware

    def tokens(self, a: int, b: int, c: int) -> tuple[list[int], str | None]:
        """Few families with one changed token, lengths around multiples of the page: much is shared."""
        page_size = self.memory.page_size
        length = max(1, (b % 6) * page_size + (b // 6) % 5 - 2 + (a % 7))
        ids = [(a % 2) * 50 + i for i in range(length)]
        ids[c % length] += c % 3
        return ids, "other" if a % 11 == 0 else None

    def pick(self, index: int, in_prefill: bool):
        several = [request for request in self.memory.requests if request.in_prefill() == in_prefill]
        return several[index % len(several)] if several else None

    def step(self, op: int, a: int, b: int, c: int) -> None:
        memory = self.memory
        kind = op % 16
        prefilling, running = self.pick(a, True), self.pick(a, False)
        if kind <= 2:
            ids, namespace = self.retracted.pop(0) if self.retracted and a % 2 else self.tokens(a, b, c)
            request = memory.start(ids, namespace)
            if request is not None and self.shares:
                assert request.record.cache_protected_len == self.naive.longest(ids[:-1], namespace)
        elif kind <= 6 and prefilling:
            if memory.extend(prefilling, 1 + b % 40):
                self.publish(prefilling)
            elif not running:
                self.retract(prefilling)
        elif kind <= 10 and running:
            if not memory.decode(running, 100 + b % 3, ahead=c % 9 if c % 4 == 0 else 0):
                self.retract(running)
        elif kind == 11 and running:
            self.finish(running, insert=True)
        elif kind == 12 and (prefilling or running):
            self.retract(prefilling or running)
        elif kind == 13 and (prefilling or running):
            self.finish(prefilling or running, insert=False)  # abort
        elif kind == 14:
            free = memory.allocator.available_size()
            evictable = memory.cache.evictable_size()
            freed = memory.evict(b % 64)
            assert freed >= min(b % 64, evictable)
            assert memory.allocator.available_size() == free + freed
        elif kind == 15 and memory.idle():
            memory.cache.reset()
            assert memory.allocator.available_size() == memory.allocator.size
            self.naive.forget_free()
        memory.check()
        ids, namespace = self.tokens(c, a, b)
        assert len(memory.cached(ids, namespace)) == (self.naive.longest(ids, namespace) if self.shares else 0)
        memory.check()  # the match may have split a node

    def publish(self, request) -> None:
        self.learn(request)
        self.memory.publish(request)

    def finish(self, request, insert: bool) -> None:
        if insert:
            self.learn(request)
        self.memory.finish(request, insert)

    def learn(self, request) -> None:
        if self.shares:
            record = request.record
            ids = request.ids[: record.committed_len]
            self.naive.publish(ids, record.namespace, self.memory.pool.slots(record.row, 0, len(ids)))

    def retract(self, request) -> None:
        self.retracted.append((list(request.ids), request.record.namespace))
        self.memory.finish(request, insert=False)

    def close(self) -> None:
        memory = self.memory
        for request in list(memory.requests):
            self.finish(request, insert=not request.in_prefill())
            memory.check()
        total = memory.allocator.size
        assert memory.cache.protected_size() == 0
        assert memory.allocator.available_size() + memory.cache.evictable_size() == total
        memory.evict(total)
        assert self.naive.pages == {}
        memory.check()
        assert memory.allocator.available_size() == total
        assert memory.pool.available_size() == memory.pool.size


def play(memory, data: bytes) -> Play:
    game = Play(memory)
    for i in range(0, len(data), 4):
        game.step(*data[i : i + 4])
    game.close()
    return game


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_memory_adds_up_after_every_step(new_memory, page_size):
    @fixed
    @given(step_bytes)
    def run(data: bytes) -> None:
        play(new_memory(page_size, size=SIZE[page_size], rows=5), data)

    run()


@pytest.mark.parametrize("page_size", [1, 16])
def test_memory_adds_up_without_sharing(new_memory, page_size):
    @settings(fixed, max_examples=20)
    @given(step_bytes)
    def run(data: bytes) -> None:
        play(new_memory(page_size, size=SIZE[page_size], rows=5, radix=False), data)

    run()
