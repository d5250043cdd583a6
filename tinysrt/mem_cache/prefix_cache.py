"""PrefixCache: what the scheduler asks of a cache, and the small record through which it sees a request.

The scheduler only knows this interface. `RadixCache` shares prefixes, `ChunkCache` (`--disable-radix-cache`) shares
nothing; both take and give back slots and rows in the same five moments of a request's life:

    admitted        match_prefix ─ lock          the prefix found is pinned and copied into the row
    chunk launched  cache_unfinished             what it computes becomes visible to others
    last chunk      cache_unfinished
    finished        cache_finished               prompt and output stay behind, evictable
    retracted,
    aborted         cache_finished(insert=False) its own slots are freed at once

Ownership along the row of a request, with page_size 4 (a page is one cell of ====):

    position   0                   16       23      30
               |====|====|====|====|====|====|====|====|
               ├── the tree's ─────┼── the request's ──┤
                                   │        │       └ allocated_len: positions that have a slot
                                   │        └ committed_len: positions whose KV is written by launched forwards
                                   └ cache_protected_len: whole pages that the tree owns, pinned through last_node

Everything from cache_protected_len on belongs to the request alone, whole pages, also the part of the last page that
it has not used yet. `ownership.py` proves that this adds up.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np

from tinysrt.mem_cache.radix_tree import RadixTree, TreeNode


@dataclass
class KVRecord:
    """The KV of one request. `Req` owns it, the scheduler fills it, a cache clears it: this layer never sees `Req`.

    With row None the request holds no KV and no lock (waiting, retracted or over).
    """

    row: int | None = None  # in ReqToTokenPool
    cache_protected_len: int = 0  # positions [0, n) belong to the tree; a multiple of the page size
    last_node: TreeNode | None = None  # ends at cache_protected_len; locked by this record while it is here
    committed_len: int = 0  # positions whose KV is, or will be, written by forwards already launched
    allocated_len: int = 0  # positions that have a slot; more than committed_len only with speculation
    namespace: str | None = None

    def clear(self) -> None:
        self.row = None
        self.cache_protected_len = 0
        self.last_node = None
        self.committed_len = 0
        self.allocated_len = 0


@dataclass(frozen=True)
class MatchResult:
    slots: np.ndarray  # (n,) int32, n a multiple of the page size
    node: TreeNode  # ends at n; not locked yet


class PrefixCache(ABC):
    """`tree` is empty for good in a cache that shares nothing."""

    is_cache_aware: bool  # False: policies that look at cached prefixes have nothing to look at
    page_size: int
    tree: RadixTree

    @abstractmethod
    def match_prefix(self, ids: np.ndarray, namespace: str | None = None) -> MatchResult:
        """Longest cached prefix in whole pages; counts as a use of it.

        The caller cuts `ids` first: at most len(prompt) - 1 tokens, because the logits of the last position are not
        cached, and fewer if input logprobs are wanted.
        """

    @abstractmethod
    def cache_unfinished(self, record: KVRecord, ids: np.ndarray) -> None:
        """`ids`: all tokens whose KV is written by the forwards launched so far. Publish their whole pages; the
        request goes on, with the next chunk or with decoding, at committed_len."""

    @abstractmethod
    def cache_finished(self, record: KVRecord, ids: np.ndarray, insert: bool = True) -> None:
        """The request is over or retracted. Keep the KV of `ids` (the committed tokens), or with insert=False
        nothing beyond what was published; give back all the rest, the lock and the row; clear the record."""

    @abstractmethod
    def lock(self, node: TreeNode) -> None: ...

    @abstractmethod
    def unlock(self, node: TreeNode) -> None: ...

    @abstractmethod
    def evict(self, num_tokens: int) -> int:
        """Free at least num_tokens of cached slots if so many are evictable; returns how many it were."""

    @abstractmethod
    def evictable_size(self) -> int: ...

    @abstractmethod
    def protected_size(self) -> int: ...

    @abstractmethod
    def reset(self) -> None:
        """Forget everything and free its slots. Only while no request holds a node."""
