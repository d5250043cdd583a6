"""What an attention backend is: `plan` once per forward, `attend` once per layer.

    plan(batch)                  everything that is the same for all layers: which slots each request's positions live
                                 in, how queries are grouped, masks. May look at host lists, may allocate.
    attend(layer, q, k, v, plan) store this layer's new K and V in their slots, then attend. Nothing but kernels.

The split is what makes graphs possible later: `attend` runs inside a captured graph, `plan` outside it, refilling the
buffers that the graph reads. `padded_size` is the number of lanes such a graph has; lanes beyond the batch belong to
row 0 and slot 0, which no request ever gets.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from torch import Tensor

from tinysrt.model_executor.forward_batch_info import ForwardBatch


class AttentionBackend(ABC):
    @abstractmethod
    def plan(self, batch: ForwardBatch, padded_size: int | None = None) -> Any:
        """The forward's metadata, handed back to every `attend`. padded_size None: as many lanes as requests."""

    @abstractmethod
    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, plan: Any) -> Tensor:
        """q: (T, heads, dim), rotated; k, v: (T, kv_heads, dim). Returns (T, heads * dim)."""
