"""Which attention backend goes with which kernels, and two of them side by side.

A backend's name is its kernels' name (`--attention-backend`). `--prefill-attention-backend` and
`--decode-attention-backend` choose for one kind of batch: all backends keep KV in the same pool in the same format, so
one may read what another has written.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tinysrt.kernels.kernel_set import KernelSet
from tinysrt.model_executor.attention.base import AttentionBackend, PoolAttention
from tinysrt.model_executor.attention.kernel_backend import KernelBackend
from tinysrt.model_executor.attention.torch_native import TorchNativeBackend
from tinysrt.model_executor.forward_batch_info import ForwardBatch

BACKENDS: dict[str, type[PoolAttention]] = {
    "torch_native": TorchNativeBackend,
    "numba": KernelBackend,
    "triton": KernelBackend,
}


class SplitBackend(AttentionBackend):
    """Decode batches go to one backend, all others to another."""

    def __init__(self, prefill: AttentionBackend, decode: AttentionBackend):
        self.prefill = prefill
        self.decode = decode

    def plan(self, batch: ForwardBatch, padded_size: int | None = None) -> tuple[AttentionBackend, Any]:
        chosen = self.decode if batch.forward_mode.is_decode() else self.prefill
        return chosen, chosen.plan(batch, padded_size)

    def attend(self, layer: int, qkv: Tensor, plan: tuple[AttentionBackend, Any]) -> Tensor:
        chosen, its_plan = plan
        return chosen.attend(layer, qkv, its_plan)


def make_attention(prefill: KernelSet, decode: KernelSet, *rest: Any) -> AttentionBackend:
    """`rest`: what every backend takes behind its kernels."""
    backend = BACKENDS[decode.name](decode, *rest)
    return backend if prefill is decode else SplitBackend(BACKENDS[prefill.name](prefill, *rest), backend)
