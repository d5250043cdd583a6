"""numba and triton: attention by kernels that find their way through the index table; the defaults on CPU and CUDA.

A plan is device tensors and nothing else. The kernels find lengths, rows and where a request's tokens begin in them, so
on a GPU nothing waits for it, and a decode step can be captured as it is:

    DECODE           one lane per request                   decode_attention     `DecodeLanes` of the base class
    EXTEND, MIXED    [ several new tokens  |  one each ]     extend_attention | decode_attention
                       requests 0 .. n-1      the rest

The tail of a MIXED batch are decode rows: one token each, maybe over a long past. In `extend_attention` one program
would walk over all of that past alone; `decode_attention` cuts it into splits. Where the tail begins is read from the
host's lists, in `plan`: a prefill is never captured.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, takewhile

import torch
from torch import Tensor

from tinysrt.model_executor.attention.base import DecodeLanes, PoolAttention
from tinysrt.model_executor.forward_batch_info import ForwardBatch
from tinysrt.model_executor.upload import to_device


@dataclass(frozen=True)
class ExtendPlan:
    positions: Tensor  # (T,) int64, all tokens
    slots: Tensor  # (T,) int64
    tokens: int  # of the requests with several new tokens: q[:tokens] is theirs
    rows: Tensor  # (n,) int64
    starts: Tensor  # (n + 1,) int64
    prefix_lens: Tensor  # (n,) int64
    single_rows: Tensor  # (B - n,) int64, the requests behind them: one token each
    single_lens: Tensor  # (B - n,) int64


class KernelBackend(PoolAttention):
    def plan(self, batch: ForwardBatch, padded_size: int | None = None) -> DecodeLanes | ExtendPlan:
        if batch.forward_mode.is_decode():
            return DecodeLanes.of(batch)
        news = batch.extend_seq_lens
        n = len(news) - sum(1 for _ in takewhile(lambda new: new == 1, reversed(news)))
        numbers = to_device([0, *accumulate(news[:n]), *batch.extend_prefix_lens[:n]], batch.positions.device)
        return ExtendPlan(
            positions=batch.positions,
            slots=batch.out_cache_loc,
            tokens=sum(news[:n]),
            rows=batch.req_pool_indices[:n],
            starts=numbers[: n + 1],
            prefix_lens=numbers[n + 1 :],
            single_rows=batch.req_pool_indices[n:],
            single_lens=batch.seq_lens[n:],
        )

    def attend(self, layer: int, qkv: Tensor, plan: DecodeLanes | ExtendPlan) -> Tensor:
        if isinstance(plan, DecodeLanes):
            return self.attend_lanes(layer, qkv, plan)
        q = self.rope_and_store(layer, qkv, plan.positions, plan.slots)
        cache = self.pool.k_buffer[layer], self.pool.v_buffer[layer], self.table
        scale, window = self.scale, self.windows[layer]
        parts = []
        if plan.tokens:
            parts.append(
                self.kernels.extend_attention(
                    q[: plan.tokens], *cache, plan.rows, plan.starts, plan.prefix_lens, scale, window
                )
            )
        if plan.tokens < len(q):
            parts.append(
                self.kernels.decode_attention(
                    q[plan.tokens :], *cache, plan.single_rows, plan.single_lens, scale, window
                )
            )
        attended = parts[0] if len(parts) == 1 else torch.cat(parts)
        return attended.view(len(qkv), -1)
