"""Which attention backend goes with which kernels. A backend's name is its kernels' name (`--attention-backend`)."""

from __future__ import annotations

from tinysrt.model_executor.attention.base import AttentionBackend
from tinysrt.model_executor.attention.torch_native import TorchNativeBackend
from tinysrt.model_executor.attention.triton_backend import TritonBackend

BACKENDS: dict[str, type[AttentionBackend]] = {"torch_native": TorchNativeBackend, "triton": TritonBackend}


def backend_class(name: str) -> type[AttentionBackend]:
    return BACKENDS[name]
