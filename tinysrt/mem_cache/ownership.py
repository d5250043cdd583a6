"""check_ownership: the proof that memory adds up.

Law: each slot has exactly one owner (the free list, the tree, or one request), each row too; a lock is held for
exactly as long as a record points at its node. A leak, a double free or a slot given to two requests breaks the law
at the step where it happens, long before a wrong answer shows it.

Tests call it after every step. The server calls it when idle, and after each step with `--debug-invariants`.
SGLang checks sums only (`check_memory`, when idle); here the owners themselves are compared, so an error that
cancels out in the sums is seen as well.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from tinysrt.mem_cache.allocator import Allocator
from tinysrt.mem_cache.memory_pool import ReqToTokenPool
from tinysrt.mem_cache.prefix_cache import KVRecord, PrefixCache
from tinysrt.mem_cache.radix_tree import RadixTree, TreeNode


class OwnershipError(AssertionError):
    """Our own bug, in words: which slots, rows or locks, and who claims them."""


def check_ownership(
    pool: ReqToTokenPool, allocator: Allocator, cache: PrefixCache, records: Iterable[KVRecord]
) -> None:
    """`records`: those of all requests that may hold KV. Raises OwnershipError; changes nothing."""
    records = list(records)
    holding = [record for record in records if record.row is not None]
    problems = [f"a record without a row holds KV: {r}" for r in records if r.row is None and _holds_kv(r)]
    for record in holding:
        problems += _check_record(pool, cache, record)
    problems += _check_rows(pool, holding)
    problems += _check_slots(pool, allocator, cache.tree, holding)
    problems += _check_tree(cache.tree, [r.last_node for r in holding if r.last_node is not None])
    if cache.evictable_size() != cache.tree.evictable or cache.protected_size() != cache.tree.protected:
        problems.append("the cache's sizes differ from its tree's")
    if problems:
        raise OwnershipError("memory does not add up:\n- " + "\n- ".join(problems))


def _holds_kv(record: KVRecord) -> bool:
    return bool(record.last_node or record.cache_protected_len or record.committed_len or record.allocated_len)


def _check_record(pool: ReqToTokenPool, cache: PrefixCache, record: KVRecord) -> list[str]:
    problems: list[str] = []
    name, protected, page_size = f"row {record.row}", record.cache_protected_len, cache.page_size
    if not 0 <= protected <= record.allocated_len <= pool.width or record.committed_len > record.allocated_len:
        return [f"{name}: lengths do not fit: {record}"]
    if protected % page_size:
        problems.append(f"{name}: cache_protected_len {protected} is inside a page")
    if protected and record.last_node is None:
        problems.append(f"{name}: uses {protected} tokens of the tree without a lock")
    row = pool.table[record.row, : record.allocated_len]
    if record.last_node is not None and not np.array_equal(cache.tree.path_slots(record.last_node), row[:protected]):
        problems.append(f"{name}: its first {protected} slots are not those of the node it locks")
    if not _in_whole_pages(row, page_size):
        problems.append(f"{name}: a position is not at its place in the page")
    return problems


def _check_rows(pool: ReqToTokenPool, holding: list[KVRecord]) -> list[str]:
    seen = np.bincount(pool.free_rows() + [r.row for r in holding if r.row is not None], minlength=pool.size + 1)
    problems = []
    if seen[0]:
        problems.append("row 0 is the dummy, but somebody has it")
    for row in (np.flatnonzero(seen[1:] != 1) + 1).tolist():
        problems.append(f"row {row} has {seen[row]} owners")
    return problems


def _check_slots(pool: ReqToTokenPool, allocator: Allocator, tree: RadixTree, holding: list[KVRecord]) -> list[str]:
    # In pages, each claimed through its first slot: the unused rest of a request's last page is its own as well.
    page_size = allocator.page_size
    tree_slots = np.concatenate([np.empty(0, dtype=np.int32)] + [node.slots for node in tree.nodes()])
    claims = {"free list": allocator.free_slots()[::page_size], "tree": tree_slots[::page_size]}
    for record in holding:
        first = pool.table[record.row, record.cache_protected_len : record.allocated_len : page_size]
        claims[f"row {record.row}"] = first
    claims = {who: first_slots // page_size for who, first_slots in claims.items()}
    owners = np.zeros(allocator.size // page_size + 1, dtype=np.int64)
    for pages in claims.values():
        np.add.at(owners, pages, 1)
    wrong = [page for page in np.flatnonzero(owners != 1).tolist() if page or owners[0]]
    return [
        f"slots {page * page_size}..{(page + 1) * page_size - 1}: "
        + (" and ".join(who for who, pages in claims.items() if page in pages) or "no owner")
        for page in wrong[:20]
    ] + ([f"and {len(wrong) - 20} pages more"] if len(wrong) > 20 else [])


def _check_tree(tree: RadixTree, held: list[TreeNode]) -> list[str]:
    problems: list[str] = []
    locks: dict[TreeNode, int] = {}
    for last_node in held:
        node = last_node
        while node.parent is not None:
            locks[node] = locks.get(node, 0) + 1
            node = node.parent
        if node is not tree.root:
            problems.append("a record holds a node that was evicted")
    sizes = {True: 0, False: 0}  # locked or not -> tokens
    order = {node: i for i, node in enumerate(tree.lru_nodes())}
    for node in tree.nodes():
        what = f"node {node.ids[:8].tolist()}"
        sizes[node.lock_ref > 0] += len(node.ids)
        if node.lock_ref != locks.get(node, 0):
            problems.append(f"{what}: lock_ref is {node.lock_ref}, but {locks.get(node, 0)} records hold it")
        if not len(node.ids) == len(node.slots) > 0 or len(node.ids) % tree.page_size:
            problems.append(f"{what}: {len(node.ids)} tokens, {len(node.slots)} slots, pages of {tree.page_size}")
        elif not _in_whole_pages(node.slots, tree.page_size):
            problems.append(f"{what}: a slot is not at its place in the page")
        if (node in order) != (node.lock_ref == 0):
            problems.append(f"{what}: must be in the eviction order exactly while unlocked")
        for key, child in node.children.items():
            if child.parent is not node or child.key != key:
                problems.append(f"{what}: a child does not know its place")
            if node in order and order.get(child, len(order)) > order[node]:
                problems.append(f"{what}: would be evicted before its child")
    if (tree.protected, tree.evictable) != (sizes[True], sizes[False]):
        problems.append(
            f"sizes: protected {tree.protected}, evictable {tree.evictable}, counted {sizes[True]}, {sizes[False]}"
        )
    if len(order) != sum(node in order for node in tree.nodes()):
        problems.append("the eviction order names a node that is not in the tree")
    return problems


def _in_whole_pages(slots: np.ndarray, page_size: int) -> bool:
    """Does each run of page_size positions fill one page from its start?"""
    starts = slots[::page_size]
    expected = (starts[:, None] + np.arange(page_size)).ravel()[: len(slots)]
    return bool((starts % page_size == 0).all()) and np.array_equal(slots, expected)
