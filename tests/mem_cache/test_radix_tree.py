"""The tree alone: the reference table, splits, locks, order of eviction."""

from __future__ import annotations

import random

import numpy as np
import pytest

import tinysrt.mem_cache.radix_tree as radix_tree
from tinysrt.mem_cache.radix_tree import RadixTree, TreeNode


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, dtype=np.int64)


def insert(tree: RadixTree, tokens: list[int], slots: list[int], namespace: str | None = None) -> int:
    return tree.insert(np.array(tokens), np.array(slots), namespace)


def shape(node: TreeNode) -> dict:
    """{(tokens of the edge): the same of its node}"""
    return {tuple(child.ids.tolist()): shape(child) for child in node.children.values()}


def test_reference_table_for_page_size_1():
    tree = RadixTree()
    assert insert(tree, [1, 2, 3, 4], [11, 12, 13, 14]) == 0
    assert tree.evictable == 4

    assert insert(tree, [1, 2, 9, 9], [21, 22, 23, 24]) == 2
    assert (tree.evictable, tree.protected) == (6, 0)
    stored = sorted(slot for node in tree.nodes() for slot in node.slots.tolist())
    assert stored == [11, 12, 13, 14, 23, 24]  # 21 and 22 are the caller's to free

    slots, node = tree.match(ids(1, 2, 3, 7))
    assert slots.tolist() == [11, 12, 13]
    assert shape(tree.root) == {(1, 2): {(3,): {(4,): {}}, (9, 9): {}}}

    tree.lock(node)
    assert (tree.evictable, tree.protected) == (3, 3)
    assert tree.evict(1).tolist() == [23, 24]  # the whole leaf, least recently used
    assert tree.evict(100).tolist() == [14]
    assert (tree.evictable, tree.protected) == (0, 3)
    tree.unlock(node)
    assert tree.evict(1).tolist() == [13]
    assert tree.evictable == 2


def test_reference_table_same_ids_in_another_namespace_match_nothing():
    tree = RadixTree()
    insert(tree, [1, 2, 3, 4], [11, 12, 13, 14], "a")
    for namespace in (None, "b", ""):
        slots, node = tree.match(ids(1, 2, 3, 4), namespace)
        assert len(slots) == 0 and node is tree.root
    assert tree.match(ids(1, 2, 3, 4), "a")[0].tolist() == [11, 12, 13, 14]


def test_reference_table_for_page_size_4():
    tree = RadixTree(page_size=4)
    assert insert(tree, list(range(10)), list(range(40, 50))) == 0
    assert tree.evictable == 8  # of 10 tokens, two whole pages

    slots, _ = tree.match(ids(0, 1, 2, 3, 4, 5, 99, 99))
    assert slots.tolist() == [40, 41, 42, 43]  # 6 tokens are equal, one page is

    for probe in (ids(0, 1, 2), ids(0, 1, 2, 99, 4, 5, 6, 7)):
        slots, node = tree.match(probe)
        assert len(slots) == 0 and node is tree.root


def test_split_copies_the_lock_count():
    """Trap 7, and the last row of the reference table."""
    tree = RadixTree()
    insert(tree, [1, 2, 3, 4], [11, 12, 13, 14])
    leaf = tree.match(ids(1, 2, 3, 4))[1]
    tree.lock(leaf)
    upper = tree.match(ids(1, 2))[1]
    assert upper.lock_ref == 1 and leaf.parent is upper
    assert (tree.evictable, tree.protected) == (0, 4)
    tree.unlock(leaf)
    assert (tree.evictable, tree.protected) == (4, 0)
    assert upper.lock_ref == leaf.lock_ref == 0


def test_a_match_cut_short_by_its_own_length_splits_too():
    tree = RadixTree()
    insert(tree, [1, 2, 3, 4], [11, 12, 13, 14])
    slots, node = tree.match(ids(1, 2))
    assert slots.tolist() == [11, 12] and node.ids.tolist() == [1, 2]
    assert shape(tree.root) == {(1, 2): {(3, 4): {}}}


def test_locks_of_two_holders_are_counted():
    tree = RadixTree()
    insert(tree, [1, 2, 3], [11, 12, 13])
    insert(tree, [1, 2, 4], [11, 12, 14])
    a, b = tree.match(ids(1, 2, 3))[1], tree.match(ids(1, 2, 4))[1]
    tree.lock(a)
    tree.lock(b)
    assert (tree.evictable, tree.protected) == (0, 4)
    tree.unlock(a)
    assert (tree.evictable, tree.protected) == (1, 3)
    assert tree.evict(10).tolist() == [13]
    tree.unlock(b)
    assert (tree.evictable, tree.protected) == (3, 0)


def test_unlocking_once_too_often_is_caught():
    tree = RadixTree()
    insert(tree, [1], [11])
    node = tree.match(ids(1))[1]
    with pytest.raises(AssertionError, match="more often than locked"):
        tree.unlock(node)


def test_locking_an_evicted_node_is_caught():
    tree = RadixTree()
    insert(tree, [1], [11])
    node = tree.match(ids(1))[1]
    tree.evict(1)
    with pytest.raises(AssertionError, match="evicted before it was locked"):
        tree.lock(node)


def test_eviction_takes_leaves_only_and_leaves_no_orphan():
    """Trap 9."""
    tree = RadixTree()
    insert(tree, [1, 2, 3, 4], [11, 12, 13, 14])
    insert(tree, [1, 2, 9, 9], [11, 12, 23, 24])
    insert(tree, [1, 2, 9, 9, 5], [11, 12, 23, 24, 25])
    seen: list[int] = []
    while tree.evictable:
        seen += tree.evict(1).tolist()
        for node in tree.nodes():
            ancestor: TreeNode | None = node
            while ancestor is not None and ancestor is not tree.root:
                ancestor = ancestor.parent
            assert ancestor is tree.root
    assert seen == [13, 14, 25, 23, 24, 11, 12]
    assert tree.root.children == {} and tree.lru_nodes() == []


def test_the_root_is_never_evicted_and_an_empty_tree_gives_nothing():
    tree = RadixTree()
    tree.lock(tree.root)
    tree.unlock(tree.root)
    assert tree.evict(10).tolist() == []
    assert tree.match(ids(1, 2))[1] is tree.root
    assert tree.match(ids())[1] is tree.root
    assert tree.insert(ids(), ids()) == 0


def test_the_tree_keeps_its_own_copy_of_what_it_was_given():
    tree = RadixTree()
    tokens, slots = np.array([1, 2, 3], dtype=np.int32), np.array([11, 12, 13], dtype=np.int32)
    tree.insert(tokens, slots)
    tokens[:], slots[:] = 0, 0
    assert tree.match(ids(1, 2, 3))[0].tolist() == [11, 12, 13]


def test_int32_and_int64_ids_are_the_same_prefix():
    for page_size in (1, 2):
        tree = RadixTree(page_size)
        tree.insert(np.array([1, 2, 3, 4], dtype=np.int32), ids(10, 11, 12, 13))
        assert tree.match(np.array([1, 2, 3, 4], dtype=np.int64))[0].tolist() == [10, 11, 12, 13]


def test_eviction_order_is_least_recently_used_among_unlocked_leaves():
    """Against the plain rule: a time stamp on each node, the oldest unlocked leaf goes first."""
    rng = random.Random(5)
    tree = RadixTree()
    now, last_use, locked, next_slot = 0, dict[TreeNode, int](), list[TreeNode](), 1

    def use(node: TreeNode) -> None:
        for other in tree.nodes():
            if other in parent_of and parent_of[other] is not other.parent:
                last_use[other] = now  # the lower half of an edge that was split just now
        while node is not tree.root:
            last_use[node] = now
            assert node.parent is not None
            node = node.parent

    evictions = 0
    for _ in range(3000):
        now += 1
        parent_of = {node: node.parent for node in tree.nodes()}
        tokens = [rng.randrange(3) for _ in range(rng.randrange(1, 9))]
        action = rng.randrange(10)
        if action < 3:
            insert(tree, tokens, list(range(next_slot, next_slot + len(tokens))))
            next_slot += len(tokens)
            use(tree.match(np.array(tokens))[1])
        elif action < 5:
            use(tree.match(np.array(tokens))[1])
        elif action < 6 and len(locked) < 4:
            node = tree.match(np.array(tokens))[1]
            use(node)
            tree.lock(node)
            locked.append(node)
        elif action < 7 and locked:
            node = locked.pop(rng.randrange(len(locked)))
            tree.unlock(node)
            while node is not tree.root:
                if node.lock_ref == 0:
                    last_use[node] = now
                assert node.parent is not None
                node = node.parent
        elif action >= 7:
            leaves = [node for node in tree.nodes() if not node.children and node.lock_ref == 0]
            freed = tree.evict(1)
            if leaves:
                evictions += 1
                assert freed.tolist() == min(leaves, key=lambda node: last_use[node]).slots.tolist()
            else:
                assert len(freed) == 0
    assert evictions > 300


@pytest.mark.parametrize("case", ["plain", "all touched since", "all locked and unlocked since"])
def test_eviction_visits_the_same_number_of_nodes_in_a_small_and_in_a_large_tree(monkeypatch, case):
    """The peers' fault: a scan, or a heap over all leaves, at every eviction. Nodes are counted, not milliseconds."""
    visited: set[int] = set()

    class Counted(TreeNode):
        def __getattribute__(self, name: str):
            visited.add(id(self))
            return super().__getattribute__(name)

    monkeypatch.setattr(radix_tree, "TreeNode", Counted)

    def visits(num_leaves: int) -> int:
        tree = RadixTree()
        for i in range(num_leaves):
            insert(tree, [i % 200, i, 7], [3 * i, 3 * i + 1, 3 * i + 2])
        for i in range(num_leaves if case != "plain" else 0):
            node = tree.match(ids(i % 200, i, 7))[1]
            if "locked" in case:
                tree.lock(node)
                tree.unlock(node)
        visited.clear()
        tree.evict(1)
        return len(visited)

    assert visits(40_000) == visits(400) <= 3


def test_render_draws_tokens_slots_and_locks():
    tree = RadixTree()
    insert(tree, [1, 2, 3, 4], [11, 12, 13, 14])
    insert(tree, [1, 2, 9, 9], [21, 22, 23, 24])
    insert(tree, [5], [31], "alice")
    tree.lock(tree.match(ids(1, 2, 9, 9))[1])
    assert tree.render().splitlines() == [
        "root  evictable=3 protected=4",
        "├─ [1 2]  slots [11 12]  lock_ref=1",
        "│  ├─ [3 4]  slots [13 14]  lock_ref=0",
        "│  └─ [9 9]  slots [23 24]  lock_ref=1",
        "└─ [5]  slots [31]  lock_ref=0  namespace='alice'",
    ]
