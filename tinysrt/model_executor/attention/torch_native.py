"""torch_native: attention over the paged KV in plain PyTorch, fast enough to serve from a CPU.

Query heads that share a KV head are laid out as query *rows* of it, (kv_head, group) instead of (head): K and V are
never repeated, and a decode step's tiny matrix products become a little less tiny.

    decode rows   (one new token)    all together: their slots are gathered with one flat index_select. Requests are
                                     sorted by length and split into at most three groups, so that a short one is not
                                     padded to the longest.
    extend rows   (several tokens)   one request at a time, in blocks of query rows; a block only multiplies with the
                                     keys that it may see, so a causal prompt costs half a square. Whole prompts,
                                     chunks after a cached prefix and the chunks of a long prompt are the same code.

A request of a prefill batch with a single new token (a decode row riding along, or a prompt that was all cached but
its last token) goes with the decode rows. `kernels/reference.py` says the same in a few slow lines; tests compare.
SGLang's `torch_native_backend.py` loops over requests and calls scaled_dot_product_attention with enable_gqa, which
repeats K and V: four times slower at batch 8.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tinysrt.mem_cache.memory_pool import KVPool
from tinysrt.model_executor.attention.base import AttentionBackend
from tinysrt.model_executor.forward_batch_info import ForwardBatch

QUERY_BLOCK = 128
MAX_GROUPS = 3
GROUP_RATIO = 0.7  # a request below this share of its group's longest starts another group


@dataclass(frozen=True)
class DecodeGroup:
    """Requests attended in one call. n requests, padded to `length` positions."""

    lanes: Tensor  # (n,) their rows in q
    slots: Tensor  # (n * length,) int32; slot 0 beyond a request's end
    length: int
    hidden: Tensor | None  # (n, 1, 1, length) float, -inf beyond a request's end; None: all equally long


@dataclass(frozen=True)
class ExtendRequest:
    start: int  # first of its rows in q
    new: int
    prefix: int
    slots: Tensor  # (prefix + new,) int32


@dataclass(frozen=True)
class Plan:
    out_cache_loc: Tensor
    decode: list[DecodeGroup]
    extend: list[ExtendRequest]


class TorchNativeBackend(AttentionBackend):
    def __init__(self, pool: KVPool, table: Tensor, num_heads: int, scale: float):
        self.pool = pool
        self.table = table  # (rows + 1, width) int32, the device copy
        self.num_heads = num_heads
        self.scale = scale

    def plan(self, batch: ForwardBatch, padded_size: int | None = None) -> Plan:
        rows, lens = batch.req_pool_indices, batch.seq_lens_cpu
        if batch.forward_mode.is_decode():
            if padded_size is not None and padded_size > len(lens):
                padding = padded_size - len(lens)
                rows, lens = F.pad(rows, (0, padding)), [*lens, *[1] * padding]
            return Plan(batch.out_cache_loc, self._decode_groups([(i, i) for i in range(len(lens))], rows, lens), [])
        extend: list[ExtendRequest] = []
        single: list[tuple[int, int]] = []  # (request, its row in q)
        start = 0
        for i, (new, prefix) in enumerate(zip(batch.extend_seq_lens, batch.extend_prefix_lens, strict=True)):
            if new == 1:
                single.append((i, start))
            else:
                slots = self.table[rows[i], : prefix + new]
                extend.append(ExtendRequest(start, new, prefix, slots))
            start += new
        decode: list[DecodeGroup] = []
        decode = self._decode_groups(single, rows, lens) if single else []
        return Plan(batch.out_cache_loc, decode, extend)

    def _decode_groups(self, single: list[tuple[int, int]], rows: Tensor, lens: list[int]) -> list[DecodeGroup]:
        """`single`: (request, its row in q). Longest first, cut where the next one is much shorter."""
        longest_first = sorted(single, key=lambda entry: -lens[entry[0]])
        cuts: list[list[tuple[int, int]]] = []
        for entry in longest_first:
            if not cuts or (lens[entry[0]] < GROUP_RATIO * lens[cuts[-1][0][0]] and len(cuts) < MAX_GROUPS):
                cuts.append([])
            cuts[-1].append(entry)
        return [self._decode_group(cut, rows, lens) for cut in cuts]

    def _decode_group(self, entries: list[tuple[int, int]], rows: Tensor, lens: list[int]) -> DecodeGroup:
        requests = [request for request, _ in entries]
        length, shortest = lens[requests[0]], lens[requests[-1]]
        slots = self.table[rows[torch.tensor(requests, device=rows.device)], :length]  # (n, length)
        hidden = None
        if shortest < length:
            ends = torch.tensor([[lens[i]] for i in requests], device=rows.device)
            beyond = torch.arange(length, device=rows.device) >= ends
            # Slot 0, not what the table still holds there: a NaN in a stranger's V would survive a weight of 0.
            slots = slots.masked_fill(beyond, 0)
            hidden = torch.zeros(beyond.shape, dtype=self.pool.dtype, device=rows.device)
            hidden = hidden.masked_fill_(beyond, float("-inf")).view(len(requests), 1, 1, length)
        lanes = torch.tensor([lane for _, lane in entries], device=rows.device)
        return DecodeGroup(lanes, slots.reshape(-1), length, hidden)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, plan: Plan) -> Tensor:
        self.pool.set_kv(layer, plan.out_cache_loc, k, v)
        k_buffer, v_buffer = self.pool.k_buffer[layer], self.pool.v_buffer[layer]
        kv_heads = k.shape[1]
        q = q.reshape(q.shape[0], kv_heads, -1, q.shape[2])  # (T, kv_heads, group, dim)
        out = torch.empty_like(q)
        for group in plan.decode:
            out.index_copy_(0, group.lanes, self._decode(q.index_select(0, group.lanes), k_buffer, v_buffer, group))
        for request in plan.extend:
            rows = slice(request.start, request.start + request.new)
            self._extend(q[rows], k_buffer, v_buffer, request, out[rows])
        return out.view(q.shape[0], -1)

    def _decode(self, q: Tensor, k_buffer: Tensor, v_buffer: Tensor, group: DecodeGroup) -> Tensor:
        """q: (n, kv_heads, group, dim). One call for all: requests are the batch, KV heads the heads."""
        shape = (len(q), group.length, *k_buffer.shape[1:])
        k = k_buffer.index_select(0, group.slots).view(shape).transpose(1, 2)  # (n, kv_heads, length, dim)
        v = v_buffer.index_select(0, group.slots).view(shape).transpose(1, 2)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=group.hidden, scale=self.scale)

    def _extend(self, q: Tensor, k_buffer: Tensor, v_buffer: Tensor, request: ExtendRequest, out: Tensor) -> None:
        """q, out: (new, kv_heads, group, dim).

                 keys  0 ...... prefix ... begin ... end
        query block    [ all visible ............][ ◣ ]     only the last square needs a mask
        """
        k = k_buffer.index_select(0, request.slots).permute(1, 2, 0)  # (kv_heads, dim, prefix + new)
        v = v_buffer.index_select(0, request.slots).transpose(0, 1)  # (kv_heads, prefix + new, dim)
        kv_heads, group, dim = q.shape[1:]
        for begin in range(0, request.new, QUERY_BLOCK):
            end = min(begin + QUERY_BLOCK, request.new)
            size, visible = end - begin, request.prefix + end
            rows = q[begin:end].permute(1, 2, 0, 3).reshape(kv_heads, group * size, dim)
            scores = torch.bmm(rows, k[:, :, :visible]).mul_(self.scale).view(kv_heads, group, size, visible)
            future = torch.ones(size, size, dtype=torch.bool, device=q.device).triu_(1)
            scores[..., visible - size :].masked_fill_(future, float("-inf"))
            weights = scores.softmax(dim=-1).view(kv_heads, group * size, visible)
            attended = torch.bmm(weights, v[:, :visible]).view(kv_heads, group, size, dim)
            out[begin:end] = attended.permute(2, 0, 1, 3)
