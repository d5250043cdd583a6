"""What an attention backend is: `plan` once per forward, `attend` once per layer.

    plan(batch)                everything that is the same for all layers: which slots each request's positions live in,
                               how queries are grouped, masks. May look at host lists, may allocate.
    attend(layer, qkv, plan)   rotate queries and keys, store this layer's K and V in their slots, then attend. Nothing
                               but kernels.

The split is what makes graphs possible: `attend` runs inside a captured step, `plan` outside it, once, before the
capture. With `padded_size` the batch is such a step's: it has that many lanes, its tensors are the static buffers that
every replay fills anew, and the plan may be made of these tensors, of views of them and of their shapes, but of nothing
that was computed from their contents. `DecodeLanes` is such a plan. Lanes beyond the real batch belong to row 0 and
slot 0, which no request ever gets.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tinysrt.kernels.kernel_set import Kernel, KernelSet
from tinysrt.mem_cache.memory_pool import KVPool
from tinysrt.model_executor.forward_batch_info import ForwardBatch


@dataclass(frozen=True)
class DecodeLanes:
    """A decode step as device tensors alone, one element per lane."""

    positions: Tensor
    slots: Tensor
    rows: Tensor
    seq_lens: Tensor

    @classmethod
    def of(cls, batch: ForwardBatch) -> DecodeLanes:
        return cls(batch.positions, batch.out_cache_loc, batch.req_pool_indices, batch.seq_lens)


class AttentionBackend(ABC):
    @abstractmethod
    def plan(self, batch: ForwardBatch, padded_size: int | None = None) -> Any:
        """The forward's metadata, handed back to every `attend`. padded_size None: no graph, use it once."""

    @abstractmethod
    def attend(self, layer: int, qkv: Tensor, plan: Any) -> Tensor:
        """qkv: (T, heads + 2 * kv_heads, dim), not rotated. Returns (T, heads * dim)."""


class PoolAttention(AttentionBackend):
    """What the backends share that compute over the pool themselves."""

    def __init__(
        self,
        kernels: KernelSet,
        pool: KVPool,
        table: Tensor,  # (rows + 1, width) int32, the device copy
        rope_cache: Tensor,  # (max_positions, dim) float32
        num_heads: int,  # query heads of this rank
        scale: float,
        windows: list[int | None],  # one per layer of this rank; None: a token sees all before it
    ):
        self.kernels = kernels
        self.pool = pool
        self.table = table
        self.rope_cache = rope_cache
        self.num_heads = num_heads
        self.scale = scale
        self.windows = windows
        self.lanes_attention: Kernel = kernels.decode_attention  # for `attend_lanes`

    def rope_and_store(self, layer: int, qkv: Tensor, positions: Tensor, slots: Tensor) -> Tensor:
        """What every `attend` begins with. positions, slots: (T,) int64. Returns rotated queries, (T, heads, dim)."""
        k_buffer, v_buffer = self.pool.k_buffer[layer], self.pool.v_buffer[layer]
        return self.kernels.rope_and_store(qkv, positions, self.rope_cache, k_buffer, v_buffer, slots, self.num_heads)

    def attend_lanes(self, layer: int, qkv: Tensor, lanes: DecodeLanes) -> Tensor:
        """`attend` for a decode step whose kernel reads the lengths on the device; fit to be captured."""
        q = self.rope_and_store(layer, qkv, lanes.positions, lanes.slots)
        k_buffer, v_buffer = self.pool.k_buffer[layer], self.pool.v_buffer[layer]
        attended = self.lanes_attention(
            q, k_buffer, v_buffer, self.table, lanes.rows, lanes.seq_lens, self.scale, self.windows[layer]
        )
        return attended.view(len(qkv), -1)
