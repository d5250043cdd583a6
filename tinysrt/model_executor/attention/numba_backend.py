"""numba: attention on a CPU; the default there.

    one new token     `kernels/numba_attention.py`: reads each key and value once, at its place in the pool; nothing is
                      gathered, padded or sorted by length
    several           as in torch_native: the matrix products of a prefill run in PyTorch, whose oneDNN uses matrix
                      instructions (AMX, AVX512-BF16) that no loop reaches. The Numba `extend_attention` does the same
                      work, three to five times slower on a CPU that has them; tests hold it to the reference.

So a decode plan is the batch's own tensors, whatever the lengths, and can be captured as it is; a prefill batch is a
torch_native plan without its decode rows, and those: a decode row that rides along, or a prompt of which all but the
last token was cached.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from tinysrt.model_executor.attention.base import DecodeLanes
from tinysrt.model_executor.attention.torch_native import Plan, TorchNativeBackend
from tinysrt.model_executor.forward_batch_info import ForwardBatch


@dataclass(frozen=True)
class ExtendPlan:
    several: Plan
    single: Tensor | None  # (n,) int64: rows of q that belong to requests with one new token; None: there are none
    rows: Tensor  # (n,) int64, of these requests
    seq_lens: Tensor  # (n,) int64


class NumbaBackend(TorchNativeBackend):
    def plan(self, batch: ForwardBatch, padded_size: int | None = None) -> DecodeLanes | ExtendPlan:  # type: ignore[override]
        if batch.forward_mode.is_decode():
            return DecodeLanes.of(batch)
        ends = accumulate(batch.extend_seq_lens)
        single = [
            (i, end - 1) for i, (new, end) in enumerate(zip(batch.extend_seq_lens, ends, strict=True)) if new == 1
        ]
        requests = torch.tensor([i for i, _ in single], dtype=torch.int64)
        return ExtendPlan(
            several=self.plan_several(batch),
            single=torch.tensor([lane for _, lane in single]) if single else None,
            rows=batch.req_pool_indices[requests],
            seq_lens=batch.seq_lens[requests],
        )

    def attend(self, layer: int, qkv: Tensor, plan: DecodeLanes | ExtendPlan) -> Tensor:  # type: ignore[override]
        if isinstance(plan, DecodeLanes):
            return self.attend_lanes(layer, qkv, plan)
        q = self.rope_and_store(layer, qkv, plan.several.positions, plan.several.out_cache_loc)
        out = self.attend_several(layer, q, plan.several)
        if plan.single is not None:
            k_buffer, v_buffer = self.pool.k_buffer[layer], self.pool.v_buffer[layer]
            lanes = q.index_select(0, plan.single)
            attended = self.kernels.decode_attention(
                lanes, k_buffer, v_buffer, self.table, plan.rows, plan.seq_lens, self.scale, self.windows[layer]
            )
            out.index_copy_(0, plan.single, attended)
        return out.view(len(q), -1)
