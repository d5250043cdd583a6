"""RadixCache: binds the tree to the pools, so that requests find, publish and give back KV.

The tree (`radix_tree.py`) says which prefix is in which slots. Here slots change owner, and each of the two functions
below must leave every slot with exactly one: the free list, the tree, or one request.

Publishing, when the request comes with positions 0 .. len(ids) (page_size 4):

    position      0         protected      existing       aligned  len(ids)   allocated
                  |=============|=============|==============|======|===========|
    before        the tree's    ├── the request's own ─────────────────────────┤
    insert says   ├── known already ──────────┼── new ───────┤
    after         the tree's    freed         the tree's     the request's (unfinished)
                                                             or freed (finished)

Between `protected` and `existing` somebody else has published the same tokens since this request matched them: two
equal prompts in one batch. The request's copies are freed and its row is rewritten to the tree's slots.

KV that a launched forward is still going to write counts as there, and a slot that it still reads may be freed:
forwards run in the order of their launch, so whoever finds the one or gets the other comes later. That is why the
scheduler publishes a prompt, or a chunk of it, right after the launch (`managers/scheduler.py`, `run_batch`); the end
of a request comes through `Req.release_kv`. SGLang: `mem_cache/radix_cache.py`, `cache_unfinished_req` and
`cache_finished_req`, called when the result is processed.
"""

from __future__ import annotations

import numpy as np

from tinysrt.mem_cache.allocator import Allocator
from tinysrt.mem_cache.memory_pool import ReqToTokenPool
from tinysrt.mem_cache.prefix_cache import KVRecord, MatchResult, PrefixCache
from tinysrt.mem_cache.radix_tree import RadixTree, TreeNode


class RadixCache(PrefixCache):
    is_cache_aware = True

    def __init__(self, pool: ReqToTokenPool, allocator: Allocator, page_size: int):
        assert allocator.page_size == page_size
        self.pool = pool
        self.allocator = allocator
        self.page_size = page_size
        self.tree = RadixTree(page_size)

    def match_prefix(self, ids: np.ndarray, namespace: str | None = None) -> MatchResult:
        slots, node = self.tree.match(ids, namespace)
        return MatchResult(slots, node)

    def cache_unfinished(self, record: KVRecord, ids: np.ndarray) -> None:
        assert record.row is not None and len(ids) <= record.allocated_len
        existing = self._publish(record, ids)
        canonical, node = self.tree.match(ids, record.namespace)
        # Where the tree had its own copy, the row must name that copy from now on.
        self.pool.write(record.row, record.cache_protected_len, canonical[record.cache_protected_len : existing])
        # Lock the new end before the old one is let go, so that the path is never unlocked in between.
        self.tree.lock(node)
        if record.last_node is not None:
            self.tree.unlock(record.last_node)
        record.last_node = node
        record.cache_protected_len = len(canonical)

    def cache_finished(self, record: KVRecord, ids: np.ndarray, insert: bool = True) -> None:
        assert record.row is not None, "the request's KV was given back already"
        assert len(ids) <= record.allocated_len
        kept = record.cache_protected_len
        if insert:
            self._publish(record, ids)
            kept = max(kept, len(ids) // self.page_size * self.page_size)
        # The tail that fills no page, and what was allocated ahead; `kept` is a page boundary.
        self.allocator.free(self.pool.slots(record.row, kept, record.allocated_len))
        if record.last_node is not None:
            self.tree.unlock(record.last_node)
        self.pool.free(record.row)
        record.clear()

    def _publish(self, record: KVRecord, ids: np.ndarray) -> int:
        """Give the whole pages of `ids` to the tree; free the request's own duplicates of what was there."""
        assert record.row is not None
        slots = self.pool.slots(record.row, 0, len(ids))
        existing = self.tree.insert(ids, slots, record.namespace)
        # From cache_protected_len, not from 0: what is before it is the tree's own (test_free_from_protected_len).
        self.allocator.free(slots[record.cache_protected_len : existing])
        return existing

    def lock(self, node: TreeNode) -> None:
        self.tree.lock(node)

    def unlock(self, node: TreeNode) -> None:
        self.tree.unlock(node)

    def evict(self, num_tokens: int) -> int:
        slots = self.tree.evict(num_tokens)
        self.allocator.free(slots)
        return len(slots)

    def evictable_size(self) -> int:
        return self.tree.evictable

    def protected_size(self) -> int:
        return self.tree.protected

    def reset(self) -> None:
        assert self.tree.protected == 0, "the cache was flushed while a request holds part of it"
        self.evict(self.tree.evictable)

    def render(self) -> str:
        return self.tree.render()
