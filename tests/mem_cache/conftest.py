"""Memory: pools, allocator and cache as the scheduler uses them, without a scheduler and without a model.

What a forward would store is replaced by a fingerprint of everything the KV at a position depends on: the namespace
and all tokens up to it. So a test can see whether a slot that the cache hands out holds the right KV.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tinysrt.mem_cache.allocator import make_allocator
from tinysrt.mem_cache.chunk_cache import ChunkCache
from tinysrt.mem_cache.memory_pool import ReqToTokenPool
from tinysrt.mem_cache.ownership import check_ownership
from tinysrt.mem_cache.prefix_cache import KVRecord, PrefixCache
from tinysrt.mem_cache.radix_cache import RadixCache


def fingerprints(ids: list[int], namespace: str | None) -> np.ndarray:
    value, out = hash(("namespace", namespace)), []
    for token in ids:
        value = hash((value, token))
        out.append(value)
    return np.array(out, dtype=np.int64)


class Request:
    def __init__(self, ids: list[int], namespace: str | None):
        self.ids = list(ids)  # prompt, then output
        self.prompt_len = len(ids)
        self.record = KVRecord(namespace=namespace)

    @property
    def committed(self) -> np.ndarray:
        return np.array(self.ids[: self.record.committed_len], dtype=np.int64)

    def in_prefill(self) -> bool:
        return self.record.committed_len < self.prompt_len


class Memory:
    def __init__(self, page_size: int = 1, size: int = 256, rows: int = 6, radix: bool = True):
        self.page_size = page_size
        self.pool = ReqToTokenPool(rows, width=size)
        self.allocator = make_allocator(size, page_size)
        kind = RadixCache if radix else ChunkCache
        self.cache: PrefixCache = kind(self.pool, self.allocator, page_size)
        self.kv = np.zeros(size + page_size, dtype=np.int64)
        self.device_table = np.zeros_like(self.pool.table)
        self.requests: list[Request] = []
        self.after_evict: Callable[[], None] = lambda: None  # before the freed slots are given to somebody else

    def start(self, ids: list[int], namespace: str | None = None) -> Request | None:
        """Admission: a row, and the cached prefix of all but the last token."""
        rows = self.pool.alloc()
        if rows is None:
            return None
        request = Request(ids, namespace)
        record = request.record
        match = self.cache.match_prefix(np.array(ids[:-1]), namespace)
        self.cache.lock(match.node)
        record.row, record.last_node = rows[0], match.node
        record.cache_protected_len = record.committed_len = record.allocated_len = len(match.slots)
        self.pool.write(record.row, 0, match.slots)
        self.requests.append(request)
        return request

    def extend(self, request: Request, num_tokens: int) -> bool:
        """Compute up to num_tokens more of the prompt; False: no memory, nothing has changed."""
        record = request.record
        end = min(record.committed_len + num_tokens, request.prompt_len)
        if end > record.allocated_len and not self._reserve(request, end):
            return False
        self._forward(request, end)
        return True

    def prefill(self, request: Request, publish: bool = True) -> None:
        assert self.extend(request, request.prompt_len)
        if publish:
            self.publish(request)

    def decode(self, request: Request, token: int, ahead: int = 0) -> bool:
        """Feed one token more, with room for `ahead` further ones, as speculation reserves it."""
        record = request.record
        end = record.committed_len + 1
        if ahead:
            fits = self._reserve(request, min(end + ahead, self.pool.width))
        elif end > record.allocated_len:
            need = self.page_size if record.committed_len % self.page_size == 0 else 0
            self._make_room(need)
            last = self.pool.table[record.row, record.committed_len - 1]
            slots = self.allocator.alloc_decode(np.array([end]), np.array([last]))
            fits = slots is not None
            if slots is not None:
                self.pool.write_each(np.array([record.row]), np.array([end - 1]), slots)
                record.allocated_len = end
        else:
            fits = True
        if fits:
            request.ids.append(token)
            self._forward(request, end)
        return fits

    def publish(self, request: Request) -> None:
        self.cache.cache_unfinished(request.record, request.committed)

    def finish(self, request: Request, insert: bool = True) -> None:
        self.cache.cache_finished(request.record, request.committed, insert)
        self.requests.remove(request)

    def cached(self, ids: list[int], namespace: str | None = None) -> list[int]:
        """Slots of a match, its content checked."""
        slots = self.cache.match_prefix(np.array(ids), namespace).slots
        assert len(slots) % self.page_size == 0 and len(slots) <= len(ids)
        expected = fingerprints(ids[: len(slots)], namespace)
        assert np.array_equal(self.kv[slots], expected), "a match names slots with the KV of another prefix"
        return slots.tolist()

    def check(self) -> None:
        check_ownership(self.pool, self.allocator, self.cache, [request.record for request in self.requests])
        update = self.pool.take_update()
        if update is not None:
            flat_index, slots = update
            assert len(set(flat_index.tolist())) == len(flat_index)
            self.device_table.reshape(-1)[flat_index] = slots
        for request in self.requests:
            record = request.record
            row = self.device_table[record.row, : record.committed_len]
            expected = fingerprints(request.ids[: record.committed_len], record.namespace)
            assert np.array_equal(self.kv[row], expected), "a request's row names slots with foreign KV"

    def evict(self, num_tokens: int) -> int:
        freed = self.cache.evict(num_tokens)
        self.after_evict()
        return freed

    def idle(self) -> bool:
        return not self.requests

    def _reserve(self, request: Request, end: int) -> bool:
        record = request.record
        if end <= record.allocated_len:
            return True
        begin = record.allocated_len
        self._make_room(-(-end // self.page_size) * self.page_size - begin)
        last = int(self.pool.table[record.row, begin - 1]) if begin else -1
        slots = self.allocator.alloc_extend([begin], [end], [last])
        if slots is None:
            return False
        self.pool.write(record.row, begin, slots)
        record.allocated_len = end
        return True

    def _make_room(self, num_tokens: int) -> None:
        missing = num_tokens - self.allocator.available_size()
        if missing > 0:
            self.evict(missing)

    def _forward(self, request: Request, end: int) -> None:
        record = request.record
        slots = self.pool.slots(record.row, record.committed_len, end)
        self.kv[slots] = fingerprints(request.ids[:end], record.namespace)[record.committed_len :]
        record.committed_len = end


@pytest.fixture(scope="session")
def new_memory() -> type[Memory]:
    return Memory
