"""torch_native: attention over the paged KV in plain PyTorch, fast enough to serve from a CPU.

K and V are never repeated for the query heads that share a KV head. Two shapes of work, two layouts:

    decode rows   (one new token)    the group's query heads become query *rows* of their KV head. All requests go
                                     together: their slots are gathered with one flat index_select. They are sorted by
                                     length and cut into at most three groups, so that a short one is not padded to the
                                     longest.
    extend rows   (several tokens)   one request at a time, the group as the batch axis. In blocks of query rows: a
                                     block only meets the keys that it may see, so a causal prompt costs half a square.
                                     Whole prompts and chunks after a prefix are the same code.

A sliding window shortens what a request shows: gathering begins at the first position that any of its new tokens sees,
and a second diagonal in the mask hides from each query row what has slid out of its own window. Layers differ in their
windows, so a plan holds one `View` per kind of layer. KV outside of all windows stays in the pool.

A request of a prefill batch with a single new token (a decode row riding along, or a prompt that was all cached but
its last token) goes with the decode rows. `kernels/reference.py` says the same in a few slow lines; tests compare.
SGLang's `torch_native_backend.py` loops over requests and calls scaled_dot_product_attention with enable_gqa, which
repeats K and V.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tinysrt.model_executor.attention.base import DecodeLanes, PoolAttention
from tinysrt.model_executor.attention.static_decode import masked_decode_attention
from tinysrt.model_executor.forward_batch_info import ForwardBatch

QUERY_BLOCK = 128
MAX_GROUPS = 3
GROUP_RATIO = 0.7  # a request below this share of its group's longest starts another group


@dataclass(frozen=True)
class DecodeGroup:
    """n requests attended in one call, padded to the longest: `length` positions."""

    lanes: Tensor | None  # (n,) their rows in q; None: all rows of q, in order
    slots: Tensor  # (n * length,) int32, of the positions that are seen; slot 0 beyond a request's end
    k: Tensor  # (n * length, kv_heads, dim): room for what is gathered, used by one layer after the other,
    v: Tensor  # because fresh memory for every layer costs as much as the gather
    hidden: Tensor | None  # (n, 1, 1, length) float, -inf beyond a request's end; None: all equally long


@dataclass(frozen=True)
class ExtendRequest:
    start: int  # first of its rows in q
    new: int
    prefix: int  # positions before them that the first of them sees
    slots: Tensor  # (prefix + new,) int32


@dataclass(frozen=True)
class View:
    """What the layers of one window see."""

    decode: list[DecodeGroup]
    extend: list[ExtendRequest]
    # (QUERY_BLOCK, longest extend request) float: 0, and -inf where a key is hidden: above the diagonal of the last
    # QUERY_BLOCK columns, and what is out of the window. The mask of any block is its lower right corner.
    hidden: Tensor | None


@dataclass(frozen=True)
class Plan:
    positions: Tensor
    out_cache_loc: Tensor
    views: dict[int | None, View]  # window → view


class TorchNativeBackend(PoolAttention):
    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.lanes_attention = masked_decode_attention  # the reference kernel reads lengths on the host

    def plan(self, batch: ForwardBatch, padded_size: int | None = None) -> Plan | DecodeLanes:
        if padded_size is not None:
            return DecodeLanes.of(batch)
        views = {}
        for window in dict.fromkeys(self.windows):
            single, extend, hidden = self._several(batch, window)
            groups = self._decode_groups(single, batch.req_pool_indices, batch.seq_lens_cpu, window)
            views[window] = View(groups, extend, hidden)
        return Plan(batch.positions, batch.out_cache_loc, views)

    def _several(
        self, batch: ForwardBatch, window: int | None
    ) -> tuple[list[tuple[int, int]], list[ExtendRequest], Tensor | None]:
        """Requests with one new token, each with its row in q; those with several; the mask of the latter."""
        if batch.forward_mode.is_decode():
            return [(i, i) for i in range(batch.batch_size)], [], None
        extend: list[ExtendRequest] = []
        single = []
        start = 0
        for i, (new, prefix) in enumerate(zip(batch.extend_seq_lens, batch.extend_prefix_lens, strict=True)):
            if new == 1:
                single.append((i, start))
            else:
                seen = prefix if window is None else min(prefix, window - 1)
                slots = self.table[batch.req_pool_indices[i], prefix - seen : prefix + new]
                extend.append(ExtendRequest(start, new, seen, slots))
            start += new
        hidden = self._hidden(max(len(request.slots) for request in extend), window) if extend else None
        return single, extend, hidden

    def _hidden(self, longest: int, window: int | None) -> Tensor:
        columns = max(longest, QUERY_BLOCK)
        # Query row r of a block is key column r of its last QUERY_BLOCK columns.
        age = torch.arange(QUERY_BLOCK).unsqueeze(1) + (columns - QUERY_BLOCK) - torch.arange(columns)
        out_of_sight = age < 0 if window is None else (age < 0) | (age >= window)
        mask = torch.zeros(QUERY_BLOCK, columns, dtype=self.pool.dtype).masked_fill_(out_of_sight, float("-inf"))
        return mask.to(self.table.device)

    def _decode_groups(
        self, single: list[tuple[int, int]], rows: Tensor, lens: list[int], window: int | None
    ) -> list[DecodeGroup]:
        """`single`: (request, its row in q). Longest first, cut where the next one is much shorter."""
        firsts = [0 if window is None else max(0, length - window) for length in lens]  # first position seen
        lens = [length - first for length, first in zip(lens, firsts, strict=True)]
        longest_first = sorted(single, key=lambda entry: -lens[entry[0]])
        cuts: list[list[tuple[int, int]]] = []
        for entry in longest_first:
            if not cuts or (lens[entry[0]] < GROUP_RATIO * lens[cuts[-1][0][0]] and len(cuts) < MAX_GROUPS):
                cuts.append([])
            cuts[-1].append(entry)
        if len(cuts) == 1 and len(single) == len(lens):
            return [self._decode_group(single, rows, firsts, lens, everyone=True)]  # nothing to reorder
        return [self._decode_group(cut, rows, firsts, lens) for cut in cuts]

    def _decode_group(
        self, entries: list[tuple[int, int]], rows: Tensor, firsts: list[int], lens: list[int], everyone: bool = False
    ) -> DecodeGroup:
        """`firsts`, `lens`: of each request the first position seen, and how many."""
        device = rows.device
        ends = [lens[request] for request, _ in entries]
        begins = [firsts[request] for request, _ in entries]
        n, length = len(ends), max(ends)
        if not everyone:
            rows = rows[torch.tensor([request for request, _ in entries], device=device)]
        if any(begins):  # (n, length); a short request's row must not be read beyond the table
            positions = torch.tensor(begins, device=device).unsqueeze(1) + torch.arange(length, device=device)
            slots = self.table[rows.unsqueeze(1), positions.clamp_(max=self.table.shape[1] - 1)]
        else:
            slots = self.table[rows, :length]
        hidden = None
        if min(ends) < length:
            beyond = torch.arange(length, device=device) >= torch.tensor(ends, device=device).unsqueeze(1)
            # Slot 0, not what the table still holds there: a NaN in a stranger's V would survive a weight of 0.
            slots = slots.masked_fill(beyond, 0)
            hidden = torch.zeros(n, length, dtype=self.pool.dtype, device=device)
            hidden = hidden.masked_fill_(beyond, float("-inf")).view(n, 1, 1, length)
        k, v = (pool[0].new_empty(n * length, *pool[0].shape[1:]) for pool in (self.pool.k_buffer, self.pool.v_buffer))
        lanes = None if everyone else torch.tensor([lane for _, lane in entries], device=device)
        return DecodeGroup(lanes, slots.reshape(-1), k, v, hidden)

    def attend(self, layer: int, qkv: Tensor, plan: Plan | DecodeLanes) -> Tensor:
        if isinstance(plan, DecodeLanes):
            return self.attend_lanes(layer, qkv, plan)
        q = self.rope_and_store(layer, qkv, plan.positions, plan.out_cache_loc)
        k_buffer, v_buffer = self.pool.k_buffer[layer], self.pool.v_buffer[layer]
        grouped = q.view(len(q), k_buffer.shape[1], -1, q.shape[-1])  # (T, kv_heads, group, dim)
        window = self.windows[layer]
        view = plan.views[window]
        groups = view.decode
        if len(groups) == 1 and groups[0].lanes is None:
            return self._decode(grouped, k_buffer, v_buffer, groups[0]).reshape(len(q), -1)
        out = torch.empty_like(q)
        for request in view.extend:
            assert view.hidden is not None
            self._extend(grouped, k_buffer, v_buffer, request, view.hidden, window, out.view(grouped.shape))
        for group in groups:
            assert group.lanes is not None
            attended = self._decode(grouped.index_select(0, group.lanes), k_buffer, v_buffer, group)
            out.index_copy_(0, group.lanes, attended.reshape(len(group.lanes), -1, q.shape[-1]))
        return out.view(len(q), -1)

    def _decode(self, q: Tensor, k_buffer: Tensor, v_buffer: Tensor, group: DecodeGroup) -> Tensor:
        """q: (n, kv_heads, group, dim). Requests are the batch axis, KV heads the heads, the group the query rows."""
        shape = (len(q), -1, *k_buffer.shape[1:])
        k = torch.index_select(k_buffer, 0, group.slots, out=group.k).view(shape).transpose(1, 2)
        v = torch.index_select(v_buffer, 0, group.slots, out=group.v).view(shape).transpose(1, 2)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=group.hidden, scale=self.scale)

    def _extend(
        self,
        q: Tensor,
        k_buffer: Tensor,
        v_buffer: Tensor,
        request: ExtendRequest,
        hidden: Tensor,
        window: int | None,
        out: Tensor,
    ) -> None:
        """q, out: (T, kv_heads, group, dim), all requests; fills this request's rows of `out`.

                 keys  0 ...... prefix ... begin ... end
        query block    [ all visible ............][ ◣ ]     only the last square needs a mask

        With a window the block's keys begin where its first row's window does, with another masked triangle.
        """
        group = q.shape[2]
        k = k_buffer.index_select(0, request.slots).transpose(0, 1)  # (kv_heads, prefix + new, dim)
        v = v_buffer.index_select(0, request.slots).transpose(0, 1)
        for begin in range(0, request.new, QUERY_BLOCK):
            size = min(QUERY_BLOCK, request.new - begin)
            end = request.prefix + begin + size
            first = 0 if window is None else max(0, request.prefix + begin - window + 1)
            rows = slice(request.start + begin, request.start + begin + size)
            attended = F.scaled_dot_product_attention(
                q[rows].permute(2, 1, 0, 3),  # (group, kv_heads, size, dim)
                k[:, first:end].expand(group, -1, -1, -1),  # a view: every group reads the same keys
                v[:, first:end].expand(group, -1, -1, -1),
                attn_mask=hidden[-size:, first - end :],
                scale=self.scale,
            )
            out[rows] = attended.permute(2, 1, 0, 3)
