"""What a forward must cost at least: bytes that have to be read, operations that have to be done.

    bytes = all linear weights + output head, once + context x KV bytes per token, for each request
    FLOPs = 2 x those parameters x tokens + 4 x layers x heads x head size x visible positions x tokens
    floor = the larger of bytes / bandwidth and FLOPs / matmul rate

The output head counts for rows that are sampled from, one per request. In a causal prefill a token sees half of the new
ones on average, with a sliding window at most the window. Of a mixture of experts a token computes with k experts,
while a batch reads every expert that anyone visits: E (1 - (1 - k/E)^tokens) of E, if choices are even and independent.

No activation is counted: they stay in the caches. So nothing can be faster, and nothing is quite as fast.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tinysrt.distributed.parallel_state import SINGLE
from tinysrt.kernels.kernel_set import REFERENCE
from tinysrt.mem_cache.memory_pool import KVPool
from tinysrt.model_executor.layers.linear import Linear
from tinysrt.model_executor.layers.moe import Experts, Router, SparseMoE
from tinysrt.model_executor.model_config import ModelConfig
from tinysrt.model_executor.models.registry import model_class


@dataclass(frozen=True)
class Rates:
    """What the machine does in a second (`machine_rates.py`)."""

    read: float  # bytes
    matmul: float  # FLOPs in the model's number format


@dataclass(frozen=True)
class Work:
    """One forward."""

    bytes: float
    flops: float

    def floor(self, rates: Rates) -> float:
        """Seconds that it takes at least."""
        return max(self.bytes / rates.read, self.flops / rates.matmul)

    def limited_by(self, rates: Rates) -> str:
        return "memory" if self.bytes / rates.read >= self.flops / rates.matmul else "compute"

    def as_dict(self, rates: Rates) -> dict[str, Any]:
        return {
            "bytes": self.bytes,
            "flops": self.flops,
            "floor_ms": self.floor(rates) * 1e3,
            "limited_by": self.limited_by(rates),
        }


@dataclass(frozen=True)
class ModelCost:
    dense: int  # parameters that every token meets: projections, dense MLPs, routers
    experts: int  # of all experts of all layers
    num_experts: int  # per layer; 0: none
    top_k: int
    head: int  # output head
    windows: list[int | None]  # per layer
    attention_width: int  # heads x head size
    kv_bytes: int  # per token and layer
    itemsize: int

    @classmethod
    def of(cls, config: ModelConfig, dtype: torch.dtype) -> ModelCost:
        """Counted on the model itself, built without memory."""
        with torch.device("meta"):
            model = model_class(config)(config, kernels=REFERENCE, parallel=SINGLE)
        modules = list(model.modules())
        dense = sum(m.weight.numel() for m in modules if isinstance(m, (Linear, Router)) and m is not model.lm_head)
        experts = sum(p.numel() for m in modules if isinstance(m, Experts) for p in m.parameters())
        sparse = next((m for m in modules if isinstance(m, SparseMoE)), None)
        return cls(
            dense=dense,
            experts=experts,
            num_experts=sparse.num_experts if sparse else 0,
            top_k=sparse.top_k if sparse else 0,
            head=config.vocab_size * config.hidden_size,
            windows=config.windows,
            attention_width=config.num_heads * config.head_dim,
            kv_bytes=KVPool.bytes_per_token(1, config.num_kv_heads, config.head_dim, dtype),
            itemsize=dtype.itemsize,
        )

    @property
    def weight_bytes(self) -> int:
        """All of them, as they lie in memory; a tied embedding is the head, another one is not read as a whole."""
        return (self.dense + self.experts + self.head) * self.itemsize

    @property
    def kv_bytes_per_token(self) -> int:
        return self.kv_bytes * len(self.windows)

    def decode(self, batch: int, context: int) -> Work:
        """One token for each of `batch` requests, each with `context` positions, its own included."""
        seen = sum(min(context, window or context) for window in self.windows)
        return self._work(tokens=batch, sampled=batch, attended=batch * seen, kv_read=batch * seen)

    def prefill(self, new: int, requests: int = 1, prefix: int = 0) -> Work:
        """`new` tokens for each of `requests` prompts, each after `prefix` cached ones."""
        attended = sum(_seen(new, prefix, window) for window in self.windows)
        kv_read = sum(min(prefix + new, (window or prefix) + new) for window in self.windows)
        return self._work(new * requests, requests, requests * attended, requests * kv_read)

    def _work(self, tokens: int, sampled: int, attended: int, kv_read: int) -> Work:
        """attended: (query, key) pairs of all layers; kv_read: positions of all layers."""
        share = self.top_k / self.num_experts if self.num_experts else 0.0
        visited = 1 - (1 - share) ** tokens
        read = self.dense + self.experts * visited + self.head
        multiplied = (self.dense + self.experts * share) * tokens + self.head * sampled
        return Work(
            bytes=read * self.itemsize + kv_read * self.kv_bytes,
            flops=2 * multiplied + 4 * self.attention_width * attended,
        )


def _seen(new: int, prefix: int, window: int | None) -> int:
    """Positions that the new tokens see, summed: token i sees prefix + i + 1, or the window."""
    if window is None or window >= prefix + new:
        return new * prefix + new * (new + 1) // 2
    growing = max(0, window - prefix)  # tokens that do not fill the window yet
    return growing * prefix + growing * (growing + 1) // 2 + (new - growing) * window
