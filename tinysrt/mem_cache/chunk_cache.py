"""ChunkCache: the cache that shares nothing (`--disable-radix-cache`).

Same interface as RadixCache, so that the scheduler has no second code path. Nothing is ever found, and everything a
request allocated is freed when it ends. Its name says what is left to do: between two chunks of a prompt the request
keeps its row and slots, and the next chunk goes on from `committed_len`, not from a match.

SGLang: `mem_cache/chunk_cache.py`.
"""

from __future__ import annotations

import numpy as np

from tinysrt.mem_cache.allocator import Allocator
from tinysrt.mem_cache.memory_pool import ReqToTokenPool
from tinysrt.mem_cache.prefix_cache import KVRecord, MatchResult, PrefixCache
from tinysrt.mem_cache.radix_tree import RadixTree, TreeNode


class ChunkCache(PrefixCache):
    is_cache_aware = False

    def __init__(self, pool: ReqToTokenPool, allocator: Allocator, page_size: int):
        assert allocator.page_size == page_size
        self.pool = pool
        self.allocator = allocator
        self.page_size = page_size
        self.tree = RadixTree(page_size)  # stays empty: its root is the node that every match ends at

    def match_prefix(self, ids: np.ndarray, namespace: str | None = None) -> MatchResult:
        return MatchResult(np.empty(0, dtype=np.int32), self.tree.root)

    def cache_unfinished(self, record: KVRecord, ids: np.ndarray) -> None:
        assert record.row is not None and len(ids) <= record.allocated_len

    def cache_finished(self, record: KVRecord, ids: np.ndarray, insert: bool = True) -> None:
        assert record.row is not None, "the request's KV was given back already"
        self.allocator.free(self.pool.slots(record.row, 0, record.allocated_len))
        self.pool.free(record.row)
        record.clear()

    def lock(self, node: TreeNode) -> None:
        self.tree.lock(node)

    def unlock(self, node: TreeNode) -> None:
        self.tree.unlock(node)

    def evict(self, num_tokens: int) -> int:
        return 0

    def evictable_size(self) -> int:
        return 0

    def protected_size(self) -> int:
        return 0

    def reset(self) -> None:
        """Nothing is kept beyond a request."""
