"""What an attention backend is: `plan` once per forward, `attend` once per layer.

    plan(batch)                everything that is the same for all layers: which slots each request's positions live in,
                               how queries are grouped, masks. May look at host lists, may allocate.
    attend(layer, qkv, plan)   rotate queries and keys, store this layer's K and V in their slots, then attend. Nothing
                               but kernels.

The split is what makes graphs possible: `attend` runs inside a captured graph, `plan` outside it, refilling the
buffers that the graph reads. `padded_size` is the number of lanes such a graph has; lanes beyond the batch belong to
row 0 and slot 0, which no request ever gets.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from torch import Tensor

from tinysrt.kernels.kernel_set import KernelSet
from tinysrt.mem_cache.memory_pool import KVPool
from tinysrt.model_executor.forward_batch_info import ForwardBatch


class AttentionBackend(ABC):
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

    @abstractmethod
    def plan(self, batch: ForwardBatch, padded_size: int | None = None) -> Any:
        """The forward's metadata, handed back to every `attend`. padded_size None: as many lanes as requests."""

    @abstractmethod
    def attend(self, layer: int, qkv: Tensor, plan: Any) -> Tensor:
        """qkv: (T, heads + 2 * kv_heads, dim), not rotated. Returns (T, heads * dim)."""

    def rope_and_store(self, layer: int, qkv: Tensor, positions: Tensor, slots: Tensor) -> Tensor:
        """What every `attend` begins with. positions, slots: (T,) int64. Returns rotated queries, (T, heads, dim)."""
        k_buffer, v_buffer = self.pool.k_buffer[layer], self.pool.v_buffer[layer]
        return self.kernels.rope_and_store(qkv, positions, self.rope_cache, k_buffer, v_buffer, slots, self.num_heads)
