"""Who is prefilled next, and how much of it: SchedulePolicy orders the waiting queue, PrefillAdder admits from it.

Both answer one question in two halves. The policy says in which order to ask; the adder says whether the next request
fits. There is no skipping ahead: the first refusal ends the pass, so order is fairness.

What the adder must never do is promise memory that decode will miss. It keeps two budgets for one pass:

    total    free + evictable − what running requests are expected to grow by − what this pass takes, growth included
    current  free + evictable − what this pass takes now

and two per-step limits: input tokens (`--max-prefill-tokens`) and the chunk (`--chunked-prefill-size`). A request is
charged its page-rounded extend + one page (its last, partly filled) + the tokens it will produce, at most 4,096.

Invariant: a request in `can_run_list` holds a row and a lock on its prefix; a refused one holds neither.
Source: SGLang `managers/schedule_policy.py`.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from enum import Enum, auto

import numpy as np

from tinysrt.managers.schedule_batch import Req, ScheduleBatch, StepMemory
from tinysrt.mem_cache.prefix_cache import MatchResult, PrefixCache
from tinysrt.mem_cache.radix_tree import RadixTree, TreeNode

CACHE_AWARE_POLICIES = ("lpm", "dfs-weight")
POLICIES = ("lpm", "fcfs", "dfs-weight", "lof", "random")

# More waiting requests than this and lpm costs more tree walks a step than it saves.
LPM_QUEUE_LIMIT = 128
# In-batch prefix trick: a request with at most so many cached tokens is compared with those that wait before it ...
IN_BATCH_CHECK_THRESHOLD = 32
# ... and waits a step if it shares at least so many; or if one that runs already computes so many more for it.
IN_BATCH_DEPRIORITIZE_THRESHOLD = 32

# Nobody knows how much a request will produce; more than this is not reserved for one.
CLIP_MAX_NEW_TOKENS = 4096


class SchedulePolicy:
    """Orders the waiting queue in place, once per step. Ties keep their order: the queue is stable."""

    def __init__(self, name: str, tree: PrefixCache, seed: int = 0):
        assert name in POLICIES, name
        # Without a tree there is no prefix to prefer.
        self.name = name if tree.is_cache_aware or name not in CACHE_AWARE_POLICIES else "fcfs"
        self.tree = tree
        self.random = random.Random(seed)  # every rank draws the same

    def effective(self, waiting: int) -> str:
        return "fcfs" if self.name == "lpm" and waiting > LPM_QUEUE_LIMIT else self.name

    def sort(self, waiting_queue: list[Req], beside: Sequence[Req] = ()) -> int:
        """`beside`: who runs in this pass already, with a last chunk. Returns how many, from the front, may be asked in
        it; the rest gain by waiting a step."""
        policy = self.effective(len(waiting_queue))
        held_back = 0
        if policy == "lof":
            waiting_queue.sort(key=lambda req: -req.max_new_tokens)
        elif policy == "random":
            self.random.shuffle(waiting_queue)
        elif policy in CACHE_AWARE_POLICIES and len(waiting_queue) + len(beside) > 1:
            matches = [self.tree.match_prefix(_matchable_ids(req), req.kv.namespace) for req in waiting_queue]
            last = deprioritized(waiting_queue, matches, beside)
            held_back = len(last)
            if policy == "lpm":
                order = sorted(range(len(matches)), key=lambda i: (i in last, -len(matches[i].slots)))
            else:
                order = _dfs_order(matches)
                order = [i for i in order if i not in last] + [i for i in order if i in last]
            waiting_queue[:] = [waiting_queue[i] for i in order]
        return len(waiting_queue) - held_back


def _matchable_ids(req: Req) -> np.ndarray:
    return req.all_ids()[: req.match_limit()]


def deprioritized(waiting_queue: list[Req], matches: list[MatchResult], beside: Sequence[Req] = ()) -> list[int]:
    """The in-batch prefix trick: indices of requests that share a prefix with an earlier waiting one, or with one that
    runs in this pass already, and gain by waiting one step, until that one has computed it. Without it, n equal prompts
    arriving at once are n full prefills. (SGLang sorts them last, and still runs them in the same step if the budget
    allows; here they do wait, and for the last chunk of a prompt too. Nobody starves: what they wait for stands before
    them in the queue, or runs.)
    """
    running, waiting = RadixTree(), RadixTree()  # of prompts only; their "slots" are never used
    for req in beside:
        ids = req.all_ids()[: req.extend_end]
        running.insert(ids, ids, req.kv.namespace)
    last = []
    for i, req in enumerate(waiting_queue):
        ids, namespace, cached = _matchable_ids(req), req.kv.namespace, len(matches[i].slots)
        if len(running.match(ids, namespace)[0]) - cached >= IN_BATCH_DEPRIORITIZE_THRESHOLD:
            last.append(i)
        elif cached <= IN_BATCH_CHECK_THRESHOLD:
            if len(waiting.match(ids, namespace)[0]) >= IN_BATCH_DEPRIORITIZE_THRESHOLD:
                last.append(i)
            else:
                waiting.insert(ids, ids, namespace)
    return last


def _dfs_order(matches: list[MatchResult]) -> list[int]:
    """Depth first over the tree, the subtree with more waiting requests first: neighbors in the tree run together."""
    weight: dict[TreeNode, int] = {}
    waiting_at: dict[TreeNode, list[int]] = {}
    children: dict[TreeNode, list[TreeNode]] = {}
    roots: list[TreeNode] = []
    for i, match in enumerate(matches):
        node = match.node
        waiting_at.setdefault(node, []).append(i)
        while True:
            first_visit = node not in weight
            weight[node] = weight.get(node, 0) + 1
            if node.parent is None:
                if first_visit:
                    roots.append(node)
                break
            if first_visit:
                children.setdefault(node.parent, []).append(node)
            node = node.parent
    order: list[int] = []
    stack = sorted(roots, key=lambda n: weight[n])
    while stack:
        node = stack.pop()
        stack.extend(sorted(children.get(node, []), key=lambda n: weight[n]))
        order.extend(waiting_at.get(node, []))
    return order


class AddReqResult(Enum):
    """Whether to look at the next request; *not* whether this one was admitted: a request that uses up a budget runs
    and still returns OTHER."""

    CONTINUE = auto()
    NO_TOKEN = auto()  # out of KV memory
    OTHER = auto()  # out of this step's input or chunk budget


class PrefillAdder:
    """One pass of admission. `chunk_budget` None: chunking is off."""

    def __init__(
        self,
        memory: StepMemory,
        running_batch: ScheduleBatch,
        *,
        new_token_ratio: float,
        input_budget: int,
        chunk_budget: int | None,
        mixed_decode_tokens: int = 0,
        neighbors: Sequence[Req] = (),  # who runs in a pipeline's other microbatches
    ):
        self.memory = memory
        self.page_size = memory.allocator.page_size
        self.rem_input_tokens = input_budget - mixed_decode_tokens
        self.rem_chunk_tokens = None if chunk_budget is None else chunk_budget - mixed_decode_tokens
        self.current_offset = mixed_decode_tokens
        # Running requests will grow: by all they may, times the ratio that history says they really use.
        self.total_offset = mixed_decode_tokens + sum(
            _expected_growth(req) * (1.0 if req.params.ignore_eos else new_token_ratio)
            for req in (*running_batch.reqs, *neighbors)
        )
        self.total_offset += sum(req.num_tokens - req.kv.committed_len for req in neighbors)  # prompts half computed
        self.can_run_list: list[Req] = []
        self.new_chunked_req: Req | None = None

    @property
    def rem_total_tokens(self) -> float:
        return self.memory.available() - self.total_offset

    @property
    def rem_current_tokens(self) -> int:
        return self.memory.available() - self.current_offset

    def budget_state(self) -> AddReqResult:
        if self.rem_total_tokens <= 0 or self.rem_current_tokens <= 0:
            return AddReqResult.NO_TOKEN
        if self.rem_input_tokens <= 0 or (self.rem_chunk_tokens is not None and self.rem_chunk_tokens <= 0):
            return AddReqResult.OTHER
        return AddReqResult.CONTINUE

    def add_chunked_req(self, req: Req) -> Req | None:
        """Go on with the request between chunks, before anyone in the queue. It already holds a row and KV, so it is
        never refused for the memory it will need later; it takes what is free now, and nothing if nothing is.
        Returns it while chunks remain, None when this was the last."""
        assert self.rem_chunk_tokens is not None
        req.prefix_len = req.kv.committed_len
        req.extend_end = req.num_tokens
        budget = self.rem_total_tokens if self.rem_total_tokens > 0 else self.rem_current_tokens
        length = min(req.extend_len, self.rem_chunk_tokens, max(0, int(budget)))
        if length < req.extend_len:
            length = self._page_aligned(req.prefix_len, length)
        if length <= 0:
            req.extend_end = req.prefix_len
            return req
        truncated = length < req.extend_len
        req.extend_end = req.prefix_len + length
        self.can_run_list.append(req)
        self._charge(length, 0 if truncated else min(req.max_new_tokens, CLIP_MAX_NEW_TOKENS))
        return req if truncated else None

    def add_one_req(self, req: Req) -> AddReqResult:
        """Try one waiting request."""
        tree = self.memory.tree
        match = tree.match_prefix(_matchable_ids(req), req.kv.namespace)
        req.prefix_len = len(match.slots)
        req.extend_end = req.num_tokens
        # Pin the prefix before asking: what this request would hold is no longer evictable for it.
        tree.lock(match.node)
        result = self._fits(req)
        if result is not None:
            tree.unlock(match.node)
            req.prefix_len = req.extend_end = 0
            return result
        self._take(req, match)
        return self.budget_state()

    def _fits(self, req: Req) -> AddReqResult | None:
        """None and `extend_end` set to what runs this step, or the reason to stop."""
        need = req.extend_len + _expected_growth(req) + self.page_size
        if need >= self.rem_total_tokens:
            return AddReqResult.NO_TOKEN
        rounded = self._ceil_page(req.extend_len)
        if self.rem_chunk_tokens is None:
            # The first of a pass may exceed the input budget, else a long prompt would never run.
            if self.can_run_list and rounded >= self.rem_input_tokens:
                return AddReqResult.OTHER
            return None
        if rounded <= self.rem_chunk_tokens:
            return None
        length = self._page_aligned(req.prefix_len, self.rem_chunk_tokens)
        if length <= 0:
            return AddReqResult.OTHER
        req.extend_end = req.prefix_len + length
        self.new_chunked_req = req
        return None

    def _take(self, req: Req, match: MatchResult) -> None:
        rows = self.memory.pool.alloc(1)
        assert rows is not None, "the scheduler asks only while rows are free"
        kv = req.kv
        kv.row = rows[0]
        kv.last_node = match.node
        kv.cache_protected_len = kv.committed_len = kv.allocated_len = len(match.slots)
        self.memory.pool.write(kv.row, 0, match.slots)
        self.can_run_list.append(req)
        chunked = req is self.new_chunked_req
        self._charge(self._ceil_page(req.extend_len), 0 if chunked else min(req.max_new_tokens, CLIP_MAX_NEW_TOKENS))

    def _charge(self, extend_tokens: int, new_tokens: int) -> None:
        self.total_offset += extend_tokens + self.page_size + new_tokens
        self.current_offset += extend_tokens + self.page_size
        self.rem_input_tokens -= extend_tokens
        if self.rem_chunk_tokens is not None:
            self.rem_chunk_tokens -= extend_tokens

    def _ceil_page(self, tokens: int) -> int:
        return -(-tokens // self.page_size) * self.page_size

    def _page_aligned(self, start: int, length: int) -> int:
        """The longest extend of at most `length` from `start` that ends on a page boundary."""
        return (start + length) // self.page_size * self.page_size - start


def _expected_growth(req: Req) -> int:
    return min(req.max_new_tokens - len(req.output_ids), CLIP_MAX_NEW_TOKENS)
