"""Req and ScheduleBatch: one request, and the requests that run one step together.

    TokenizedGenerateReqInput ─▶ Req ─▶ ScheduleBatch ─▶ ForwardBatch
                                 one request's whole     this step's     a frozen copy
                                 life in the scheduler   requests        for the model

`Req` is the only mutable per-request object of the scheduler. Its tokens and their KV, left to right:

    position   0 ............ prefix_len ............ extend_end ......... len(origin)+len(output)
               │ KV in cache  │ this step's extend    │ later chunks      │
    kv         [0, cache_protected_len) owned by the tree
               [cache_protected_len, allocated_len) owned by this request
               [0, committed_len) written by the forwards launched so far

A `ScheduleBatch` is a list of requests plus a few numpy arrays in the same order. Its arrays are replaced, never edited
in place: a forward in flight may still be reading the old ones. Host state is numpy, device state is torch;
`to_forward_batch` is the border. Source: SGLang `managers/schedule_batch.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tinysrt.managers.request_life import ENDED, Stage, check_transition
from tinysrt.mem_cache.allocator import Allocator
from tinysrt.mem_cache.memory_pool import ReqToTokenPool
from tinysrt.mem_cache.prefix_cache import KVRecord, PrefixCache
from tinysrt.messages import FinishAbort, FinishReason, TokenizedGenerateReqInput
from tinysrt.model_executor.forward_batch_info import ForwardBatch, ForwardMode, LogprobSpec, TableUpdate
from tinysrt.model_executor.sampling_batch_info import SamplingBatchInfo, SamplingStatics
from tinysrt.model_executor.upload import upload
from tinysrt.text.incremental import IncrementalDecoder
from tinysrt.text.stop import StopMatcher


@dataclass(frozen=True)
class StepMemory:
    """The three keepers of KV that a batch needs to prepare a step; they belong to the scheduler."""

    pool: ReqToTokenPool
    allocator: Allocator
    tree: PrefixCache

    def available(self) -> int:
        """Tokens that could be allocated now: free ones, and cached ones that nobody holds."""
        return self.allocator.available_size() + self.tree.evictable_size()

    def make_room(self, num_tokens: int) -> bool:
        """Evict until `num_tokens` are free; False if even that is not enough."""
        missing = num_tokens - self.allocator.available_size()
        if missing > 0:
            self.tree.evict(missing)
        return self.allocator.available_size() >= num_tokens

    def report(self) -> str:
        return (
            f"{self.allocator.available_size()} tokens free, {self.tree.evictable_size()} evictable, "
            f"{self.tree.protected_size()} protected, of {self.allocator.size}"
        )


class OutputScores:
    """Log probabilities of a request that asked for them; one entry per output token, always."""

    def __init__(self) -> None:
        self.output: list[float] = []
        self.top: list[list[tuple[float, int]] | None] = []
        self.token_ids: list[list[tuple[float, int]] | None] = []
        # Prompt scores, collected chunk by chunk; None entry first: the first scored token has no predecessor.
        self.input: list[tuple[float | None, int]] = []
        self.input_top: list[list[tuple[float, int]] | None] = []
        self.input_ids: list[list[tuple[float, int]] | None] = []
        self.input_sent = False

    def clear_input(self) -> None:
        self.input, self.input_top, self.input_ids = [], [], []


class Req:
    """One request's life in the scheduler, from arrival to its last message."""

    def __init__(
        self,
        message: TokenizedGenerateReqInput,
        *,
        eos_ids: frozenset[int],
        max_new_tokens: int,
        decoder: IncrementalDecoder | None = None,
        stop_matcher: StopMatcher | None = None,
    ):
        # Who asks, and for what. Never changes.
        self.rid = message.rid
        self.batch_id = message.batch_id
        self.reply_to = message.reply_to
        self.origin_input_ids = np.asarray(message.input_ids, dtype=np.int32)
        self.params = message.sampling_params
        self.stream = message.stream
        self.max_new_tokens = max_new_tokens  # clipped to the context and the pool on arrival
        # ignore_eos switches off every stop token; stop strings are still matched.
        self.stop_ids: frozenset[int] = (
            frozenset() if self.params.ignore_eos else eos_ids | frozenset(self.params.stop_token_ids)
        )
        self.return_logprob = message.return_logprob
        self.logprob_start_len = message.logprob_start_len if message.return_logprob else -1
        self.top_logprobs_num = message.top_logprobs_num
        self.token_ids_logprob = message.token_ids_logprob

        # Where it is.
        self.stage = Stage.WAITING
        self.finish: FinishReason | None = None
        self.num_retractions = 0

        # Its tokens and their KV.
        self.output_ids: list[int] = []
        self.kv = KVRecord(namespace=message.cache_namespace)
        self.prefix_len = 0  # this step's extend covers positions [prefix_len, extend_end)
        self.extend_end = 0
        self.cached_tokens = 0  # of the prompt, at first admission; later chunks and lives do not count
        self.admitted_once = False

        # What the client has been told.
        self.decoder = decoder  # only with stop strings or regexes
        self.stop_matcher = stop_matcher
        self.stop_range: tuple[int, int] | None = None
        self.held_back = False  # the text so far ends in what may be the beginning of a stop
        self.sent_tokens = 0
        self.sent_to_detokenizer = False
        self.scores = OutputScores() if self.return_logprob else None

    @property
    def prompt_len(self) -> int:
        return len(self.origin_input_ids)

    @property
    def num_tokens(self) -> int:
        """Prompt and the output known so far."""
        return len(self.origin_input_ids) + len(self.output_ids)

    @property
    def extend_len(self) -> int:
        return self.extend_end - self.prefix_len

    @property
    def wants_input_logprobs(self) -> bool:
        return self.logprob_start_len >= 0

    def all_ids(self) -> np.ndarray:
        """Prompt and output so far, (num_tokens,) int32: what a prefill of this request computes."""
        if not self.output_ids:
            return self.origin_input_ids
        return np.concatenate([self.origin_input_ids, np.asarray(self.output_ids, dtype=np.int32)])

    def match_limit(self) -> int:
        """How many leading tokens may come from the cache: the last one never (its logits are needed), and nothing
        from the first position whose score the client wants (unless the scores were computed in an earlier life)."""
        limit = self.num_tokens - 1
        if self.wants_input_logprobs and not self.input_scores_complete():
            limit = min(limit, self.logprob_start_len)
        return limit

    def input_scores_complete(self) -> bool:
        return self.scores is not None and len(self.scores.input) == self.prompt_len - self.logprob_start_len

    def is_over(self) -> bool:
        return self.stage in ENDED

    def move_to(self, stage: Stage) -> None:
        self.stage = check_transition(self.stage, stage)

    def ends_with_launched_steps(self) -> bool:
        """True once the forwards launched so far will produce its last allowed token: no further decode is needed.
        The forward that commits position p yields the token at p+1, so committed_len - prompt_len + 1 are on the
        way."""
        return self.kv.committed_len - self.prompt_len + 1 >= self.max_new_tokens

    def end(self, reason: FinishReason) -> None:
        self.finish = reason
        self.move_to(Stage.ABORTED if isinstance(reason, FinishAbort) else Stage.FINISHED)

    def release_kv(self, tree: PrefixCache, *, insert: bool) -> None:
        """Give row and KV back: to the tree what can be shared (`insert`), the rest to the free list."""
        if self.kv.row is None:
            return
        tree.cache_finished(self.kv, self.all_ids()[: self.kv.committed_len], insert=insert)
        self.prefix_len = self.extend_end = 0

    def reset_for_retract(self, tree: PrefixCache) -> None:
        """Back to the queue: KV freed *without* inserting (the pool is short), output tokens kept."""
        self.release_kv(tree, insert=False)
        self.num_retractions += 1
        if self.scores is not None and not self.input_scores_complete():
            self.scores.clear_input()  # the prompt is scored again from its start
        self.move_to(Stage.RETRACTED)


@dataclass
class ScheduleBatch:
    """The requests of one step, in lane order. `running_batch` is one that lives on; a prefill is one that merges into
    it.

    forward_mode      what the next launch of this batch does
    seq_lens          (B,) int64, tokens per sequence once that forward has run
    rows              (B,) int64, request rows
    out_cache_loc     (T,) int32, where the new tokens' KV goes
    num_decode_lanes  MIXED: the last so many lanes are decode rows
    is_full           running_batch only: a hint that admission cannot succeed until somebody leaves
    """

    reqs: list[Req] = field(default_factory=list)
    forward_mode: ForwardMode = ForwardMode.DECODE
    seq_lens: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    rows: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    out_cache_loc: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    num_decode_lanes: int = 0
    is_full: bool = False
    # Per-request sampling tensors; rebuilt when the composition changes, shared by steps in between.
    sampling_statics: SamplingStatics | None = None

    def __len__(self) -> int:
        return len(self.reqs)

    def is_empty(self) -> bool:
        return not self.reqs

    # ---- composition ------------------------------------------------------------------------------

    def keep(self, wanted: Sequence[Req]) -> None:
        """Keep these requests (a subsequence of `reqs`), in their order."""
        if len(wanted) == len(self.reqs):
            return
        chosen = {id(req) for req in wanted}
        lanes = np.array([i for i, req in enumerate(self.reqs) if id(req) in chosen], dtype=np.int64)
        self.reqs = [self.reqs[i] for i in lanes]
        self.seq_lens = self.seq_lens[lanes]
        self.rows = self.rows[lanes]
        self.sampling_statics = None

    def filter_over(self, excluding: Req | None = None) -> bool:
        """Drop requests that have ended, were retracted, or are `excluding`; True if any left."""
        before = len(self.reqs)
        self.keep([r for r in self.reqs if r is not excluding and r.stage in (Stage.PREFILLING, Stage.RUNNING)])
        return len(self.reqs) < before

    def merge(self, other: ScheduleBatch) -> None:
        """Append another batch's requests: how a finished prefill joins the decoding ones."""
        assert other is not self, "merging a batch with itself would decode its requests twice"
        self.reqs = self.reqs + other.reqs
        self.seq_lens = np.concatenate([self.seq_lens, other.seq_lens])
        self.rows = np.concatenate([self.rows, other.rows])
        self.sampling_statics = None

    # ---- preparing a step -------------------------------------------------------------------------

    @classmethod
    def for_extend(cls, reqs: list[Req], memory: StepMemory) -> ScheduleBatch:
        """A prefill batch over [prefix_len, extend_end) of each request; the slots are taken here.

        Admission has given each request its row and locked its prefix; see `PrefillAdder`.
        """
        pool, allocator = memory.pool, memory.allocator
        prefix_lens = [req.prefix_len for req in reqs]
        ends = [req.extend_end for req in reqs]
        last_locs = [int(pool.table[r.kv.row, r.prefix_len - 1]) if r.prefix_len else -1 for r in reqs]
        page = allocator.page_size
        new_pages = sum(-(-end // page) - -(-prefix // page) for prefix, end in zip(prefix_lens, ends, strict=True))
        memory.make_room(new_pages * page)
        slots = allocator.alloc_extend(prefix_lens, ends, last_locs)
        assert slots is not None, (
            f"admission promised room for {sum(ends) - sum(prefix_lens)} tokens: {memory.report()}"
        )
        start = 0
        for req in reqs:
            assert req.kv.row is not None
            pool.write(req.kv.row, req.prefix_len, slots[start : start + req.extend_len])
            req.kv.committed_len = req.kv.allocated_len = req.extend_end
            start += req.extend_len
        return cls(
            reqs=reqs,
            forward_mode=ForwardMode.EXTEND,
            seq_lens=np.array(ends, dtype=np.int64),
            rows=np.array([req.kv.row for req in reqs], dtype=np.int64),
            out_cache_loc=slots,
        )

    def decode_tokens_needed(self, page_size: int) -> int:
        """New slots that the next decode step takes from the pool: a page for each sequence that starts one."""
        return int(np.count_nonzero(self.seq_lens % page_size == 0)) * page_size

    def prepare_for_decode(self, memory: StepMemory) -> None:
        """One more token for every request: a slot each. The caller has made room."""
        last_locs = memory.pool.table[self.rows, self.seq_lens - 1]
        slots = memory.allocator.alloc_decode(self.seq_lens + 1, last_locs)
        assert slots is not None, f"no room for a decode step of {len(self)}: {memory.report()}"
        memory.pool.write_each(self.rows, self.seq_lens, slots)
        for req in self.reqs:
            req.kv.committed_len += 1
            req.kv.allocated_len += 1
        self.forward_mode = ForwardMode.DECODE
        self.seq_lens = self.seq_lens + 1
        self.out_cache_loc = slots
        self.num_decode_lanes = 0

    def mix_with_decode(self, decode: ScheduleBatch) -> None:
        """Let a prepared decode batch ride along this prefill: each of its requests is an extend of length 1."""
        self.merge(decode)
        self.out_cache_loc = np.concatenate([self.out_cache_loc, decode.out_cache_loc])
        self.forward_mode = ForwardMode.MIXED
        self.num_decode_lanes = len(decode)

    # ---- the border to the device -----------------------------------------------------------------

    def to_forward_batch(
        self, step: int, update: tuple[np.ndarray, np.ndarray] | None, *, vocab_size: int, device: Any
    ) -> ForwardBatch:
        """Freeze this step for the model. `update`: the table writes since the last launch (`take_update`)."""
        num_extends = len(self.reqs) - self.num_decode_lanes
        extend_lens: list[int] = []
        prefix_lens: list[int] = []
        if self.forward_mode is ForwardMode.DECODE:
            input_ids = np.zeros(len(self.reqs), np.int64)
            positions = self.seq_lens - 1
        else:
            # Decode lanes of a mixed batch hold 0 here; the relay fills them on the device.
            pieces = [req.all_ids()[req.prefix_len : req.extend_end] for req in self.reqs[:num_extends]]
            input_ids = np.concatenate([*pieces, np.zeros(self.num_decode_lanes, np.int32)])
            extend_lens = [len(piece) for piece in pieces] + [1] * self.num_decode_lanes
            prefix_lens = [int(n) - e for n, e in zip(self.seq_lens, extend_lens, strict=True)]
            positions = np.concatenate([np.arange(p, p + e) for p, e in zip(prefix_lens, extend_lens, strict=True)])
        arrays = [input_ids, positions, self.out_cache_loc, self.rows, self.seq_lens]
        if self.num_decode_lanes:  # the last tokens, one for each of the last rows
            arrays += [np.arange(len(input_ids) - self.num_decode_lanes, len(input_ids)), self.rows[num_extends:]]
        if update is not None:
            arrays.append(update[0])
        ids = [np.asarray(array, dtype=np.int64) for array in arrays]
        tensors, pinned = upload(ids if update is None else [*ids, np.asarray(update[1], dtype=np.int32)], device)
        table_update = None if update is None else TableUpdate(*tensors[-2:])
        seq_lens_cpu = self.seq_lens.tolist()
        return ForwardBatch(
            forward_mode=self.forward_mode,
            step=step,
            input_ids=tensors[0],
            positions=tensors[1],
            out_cache_loc=tensors[2],
            req_pool_indices=tensors[3],
            seq_lens=tensors[4],
            seq_lens_cpu=seq_lens_cpu,
            rows_cpu=self.rows.tolist(),
            table_update=table_update,
            relay_lanes=tensors[5] if self.num_decode_lanes else None,
            relay_rows=tensors[6] if self.num_decode_lanes else None,
            extend_seq_lens=extend_lens,
            extend_prefix_lens=prefix_lens,
            sampling_info=self._sampling_info(seq_lens_cpu, num_extends, vocab_size, device),
            logprob=self._logprob_spec(num_extends),
            pinned=pinned,
        )

    def _sampling_info(self, seq_lens: list[int], num_extends: int, vocab_size: int, device: Any) -> SamplingBatchInfo:
        if self.sampling_statics is None:
            self.sampling_statics = SamplingBatchInfo.for_requests(
                [req.params for req in self.reqs],
                [int(row) for row in self.rows],
                [req.prompt_len for req in self.reqs],
                [req.stop_ids for req in self.reqs],
                vocab_size,
                device,
            )
        if self.forward_mode is ForwardMode.DECODE:
            return self.sampling_statics.at_step(seq_lens, None)
        # A prefill restarts a row's penalty counts from what it has produced (nothing, or an earlier life's output).
        produced: list[Sequence[int] | None] = [req.output_ids[:] for req in self.reqs[:num_extends]]
        return self.sampling_statics.at_step(seq_lens, produced + [None] * self.num_decode_lanes)

    def _logprob_spec(self, num_extends: int) -> LogprobSpec | None:
        if not any(req.return_logprob for req in self.reqs):
            return None
        starts: list[int] | None = None
        targets: list[list[int]] | None = None
        if self.forward_mode.is_extend():
            starts, targets = [], []
            for i, req in enumerate(self.reqs):
                start, wanted = _input_score_rows(req) if i < num_extends else (1, [])
                starts.append(start)
                targets.append(wanted)
        return LogprobSpec(
            return_logprob=[req.return_logprob for req in self.reqs],
            top_logprobs_num=[req.top_logprobs_num for req in self.reqs],
            token_ids_logprob=[req.token_ids_logprob for req in self.reqs],
            input_start=starts,
            input_targets=targets,
        )


def _input_score_rows(req: Req) -> tuple[int, list[int]]:
    """Which rows of this request's extend score prompt tokens, and the tokens they score.

        prompt     t0 t1 t2 t3 │ t4 t5 t6        logprob_start_len 2, chunk [0, 4)
        rows        .  .  2  3                    row 2 scores t3, row 3 scores t4 (the next chunk's first token)

    Returns (first row as an offset into the extend, target ids); no rows: (extend_len, []).
    """
    if not req.wants_input_logprobs or req.input_scores_complete():
        return req.extend_len, []
    first = max(req.logprob_start_len, req.prefix_len)
    targets = req.origin_input_ids[first + 1 : req.extend_end + 1].tolist()
    if not targets:
        return req.extend_len, []
    return first - req.prefix_len, targets
