"""RadixTree: which token sequences have their KV in the pool, and in which slots.

    insert 1 2 3 4 -> slots 11 12 13 14            insert 1 2 9 9 -> slots 21 22 23 24

        root                                           root
        └─ 1 2 3 4                                     └─ 1 2            slots 11 12 (21 22 stay the caller's)
                                                          ├─ 3 4         slots 13 14
                                                          └─ 9 9         slots 23 24

A node holds a run of tokens and their slots; the path from the root spells a prefix. KV at a position depends on all
tokens before it, so equal prefixes have equal KV and one copy serves every request that starts with it.

Invariants:
- every edge is a whole number of pages, so a match is too, and siblings differ in their first page;
- `lock_ref` of a node is the number of holders at or below it: locks go up to the root, so all nodes above a locked
  one are locked, and all below an unlocked one are unlocked;
- `evictable` + `protected` tokens = all tokens in the tree, split by lock_ref == 0;
- `_lru` holds the unlocked nodes, least recently used first, **each after its unlocked descendants**.

The last one makes eviction cheap: the first node in the list is the oldest and certainly a leaf, whatever the size of
the tree. It holds because whoever uses a node uses the nodes above it, and `_touch` moves a path to the end of the
list from the bottom up. No clock is read: the order of the list is the order of use, the same in every run. SGLang
(`mem_cache/radix_cache.py`) gives nodes a time stamp and builds a heap over all unlocked leaves whenever it evicts.

A *namespace* separates equal tokens whose KV must not be shared (`extra_key`, `cache_salt`).

The tree knows neither pools nor requests: `radix_cache.py` binds it to them, and the waiting queue's policy
(`managers/schedule_policy.py`) builds a throw-away one of waiting prompts.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

import numpy as np

Key = tuple[str | None, int | bytes]  # (namespace, first page of the edge): how a child is found


class TreeNode:
    """Compared and hashed by identity."""

    __slots__ = ("children", "ids", "key", "lock_ref", "parent", "slots")

    def __init__(self, parent: TreeNode | None, key: Key | None, ids: np.ndarray, slots: np.ndarray):
        self.parent = parent  # None: the root, or evicted
        self.key = key  # under which the parent has it; None: the root
        self.ids = ids  # (n,) int32, the edge from the parent to here
        self.slots = slots  # (n,) int32, where their KV is
        self.children: dict[Key, TreeNode] = {}
        self.lock_ref = 0  # requests that hold this node or one below


class RadixTree:
    def __init__(self, page_size: int = 1):
        self.page_size = page_size
        self.reset()

    def reset(self) -> None:
        self.root = TreeNode(None, None, _NO_IDS, _NO_IDS)
        self.root.lock_ref = 1  # never evicted
        self.evictable = 0  # tokens in unlocked nodes
        self.protected = 0  # tokens in locked nodes
        self._lru: OrderedDict[TreeNode, None] = OrderedDict()

    # ---- matching and inserting --------------------------------------------------------------------

    def match(self, ids: np.ndarray, namespace: str | None = None) -> tuple[np.ndarray, TreeNode]:
        """Slots of the longest stored prefix of `ids`, and the node that ends exactly there.

        The node is not locked: an eviction may remove it. Whoever wants to keep it locks it before that.
        """
        node, parts = self._walk(ids, namespace)
        self._touch(node)
        return (np.concatenate(parts) if parts else _NO_IDS), node

    def insert(self, ids: np.ndarray, slots: np.ndarray, namespace: str | None = None) -> int:
        """Store the whole pages of `ids`. Returns how many leading tokens were stored already.

        The slots of those stay the caller's; the tree takes the rest over, as one new leaf.
        """
        ids = ids[: self._whole_pages(len(ids))]
        node, parts = self._walk(ids, namespace)
        existing = sum(map(len, parts))
        if existing < len(ids):
            # Copies: a view would keep the caller's array alive, or change with it.
            new_ids = np.array(ids[existing:], dtype=np.int32)
            new_slots = np.array(slots[existing : len(ids)], dtype=np.int32)
            node = self._attach(node, namespace, new_ids, new_slots)
            self.evictable += len(new_ids)
        self._touch(node)
        return existing

    def _walk(self, ids: np.ndarray, namespace: str | None) -> tuple[TreeNode, list[np.ndarray]]:
        """Go down as far as `ids` matches in whole pages; split the last edge if the match ends inside it."""
        ids = np.asarray(ids, dtype=np.int32)
        node, parts = self.root, list[np.ndarray]()
        while len(ids) >= self.page_size:
            child = node.children.get(self._key(namespace, ids))
            if child is None:
                break
            matched = self._common_pages(child.ids, ids)
            if matched < len(child.ids):
                child = self._split(child, matched)  # the next turn finds no child, or no ids are left
            parts.append(child.slots)
            ids = ids[matched:]
            node = child
        return node, parts

    def _split(self, lower: TreeNode, at: int) -> TreeNode:
        """Cut an edge; `lower` keeps its identity and its end, because holders may have it as their last node.

            parent ── 1 2 3 4 (lower)      ──▶      parent ── 1 2 (upper) ── 3 4 (lower)

        Whoever holds the lower part holds the upper one: it starts with the same lock count. Without that the
        holder's unlock would count the upper node below zero (test_split_copies_the_lock_count).
        """
        assert lower.parent is not None and lower.key is not None
        namespace = lower.key[0]
        upper = self._attach(lower.parent, namespace, lower.ids[:at].copy(), lower.slots[:at].copy())
        upper.lock_ref = lower.lock_ref
        lower.ids, lower.slots = lower.ids[at:].copy(), lower.slots[at:].copy()
        lower.parent, lower.key = upper, self._key(namespace, lower.ids)
        upper.children[lower.key] = lower
        if lower.lock_ref == 0:  # half an edge was used: that counts for the whole of it, as in SGLang
            self._lru.move_to_end(lower)
        return upper

    def _attach(self, parent: TreeNode, namespace: str | None, ids: np.ndarray, slots: np.ndarray) -> TreeNode:
        node = TreeNode(parent, self._key(namespace, ids), ids, slots)
        parent.children[node.key] = node  # type: ignore[index]
        return node

    def _touch(self, node: TreeNode) -> None:
        """The path to `node` is now the most recently used. Bottom up: parents stand after their children."""
        while node is not self.root:
            if node.lock_ref == 0:
                self._lru[node] = None
                self._lru.move_to_end(node)
            assert node.parent is not None
            node = node.parent

    # ---- locks and eviction ------------------------------------------------------------------------

    def lock(self, node: TreeNode) -> None:
        """Keep the path to `node` from being evicted, until `unlock`."""
        while node is not self.root:
            assert node.parent is not None, "the node was evicted before it was locked"
            if node.lock_ref == 0:
                self.evictable -= len(node.ids)
                self.protected += len(node.ids)
                del self._lru[node]
            node.lock_ref += 1
            node = node.parent

    def unlock(self, node: TreeNode) -> None:
        while node is not self.root:
            assert node.lock_ref > 0 and node.parent is not None, "unlocked more often than locked"
            node.lock_ref -= 1
            if node.lock_ref == 0:
                self.protected -= len(node.ids)
                self.evictable += len(node.ids)
                self._lru[node] = None  # at the end: it was in use until now
            node = node.parent

    def evict(self, num_tokens: int) -> np.ndarray:
        """Remove least recently used leaves until num_tokens are gone; returns their slots.

        Whole leaves: it may be more. Fewer only when all that is left is locked. A parent follows its last child
        when its own turn comes.
        """
        parts: list[np.ndarray] = []
        freed = 0
        while freed < num_tokens and self._lru:
            leaf, _ = self._lru.popitem(last=False)
            assert not leaf.children and leaf.parent is not None and leaf.key is not None, "the oldest node is no leaf"
            del leaf.parent.children[leaf.key]
            leaf.parent = None
            self.evictable -= len(leaf.ids)
            freed += len(leaf.ids)
            parts.append(leaf.slots)
        return np.concatenate(parts) if parts else _NO_IDS

    # ---- looking at it -----------------------------------------------------------------------------

    def nodes(self) -> Iterator[TreeNode]:
        """All nodes but the root: parents before children, siblings in the order of their insertion."""
        stack = list(reversed(self.root.children.values()))
        while stack:
            node = stack.pop()
            yield node
            stack.extend(reversed(node.children.values()))

    def lru_nodes(self) -> list[TreeNode]:
        """The unlocked nodes in the order in which eviction would remove them."""
        return list(self._lru)

    def path_slots(self, node: TreeNode) -> np.ndarray:
        """Slots of the whole prefix that ends at `node`."""
        parts: list[np.ndarray] = []
        while node is not self.root:
            assert node.parent is not None, "the node was evicted"
            parts.append(node.slots)
            node = node.parent
        return np.concatenate(parts[::-1]) if parts else _NO_IDS

    def render(self, max_tokens: int = 8) -> str:
        """A drawing: a line for each node with its tokens, slots and lock count."""
        lines = [f"root  evictable={self.evictable} protected={self.protected}"]

        def draw(node: TreeNode, indent: str) -> None:
            children = list(node.children.values())
            for i, child in enumerate(children):
                last = i == len(children) - 1
                assert child.key is not None
                name = f"  namespace={child.key[0]!r}" if node is self.root and child.key[0] is not None else ""
                lines.append(
                    f"{indent}{'└─ ' if last else '├─ '}{_short(child.ids, max_tokens)}"
                    f"  slots {_short(child.slots, max_tokens)}  lock_ref={child.lock_ref}{name}"
                )
                draw(child, indent + ("   " if last else "│  "))

        draw(self.root, "")
        return "\n".join(lines)

    # ---- pages -------------------------------------------------------------------------------------

    def _whole_pages(self, num_tokens: int) -> int:
        return num_tokens // self.page_size * self.page_size

    def _key(self, namespace: str | None, ids: np.ndarray) -> Key:
        return namespace, int(ids[0]) if self.page_size == 1 else ids[: self.page_size].tobytes()

    def _common_pages(self, a: np.ndarray, b: np.ndarray) -> int:
        """Length of the common prefix, rounded down to whole pages."""
        n = min(len(a), len(b))
        different = a[:n] != b[:n]
        first = int(different.argmax())
        return self._whole_pages(first if different[first] else n)


_NO_IDS = np.empty(0, dtype=np.int32)


def _short(values: np.ndarray, limit: int) -> str:
    shown = " ".join(map(str, values[:limit].tolist()))
    return f"[{shown}]" if len(values) <= limit else f"[{shown} … {len(values)} in all]"
