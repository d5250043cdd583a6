"""KernelSet: the same functions three ways, chosen once at start-up and handed to whoever computes.

    torch_native   kernels/reference.py     plain PyTorch: the definition, runs everywhere, the one to read first
    numba          kernels/numba_*.py       CPU: loops that Numba compiles with its own LLVM, no compiler needed
    triton         kernels/triton_*.py      CUDA

Signatures and meanings are those of `kernels/reference.py`; tests hold the other two to it. Layers and attention
backends get the set through their constructors, so nothing looks up a kernel at run time. The fast sets are imported
only when they are asked for: a CPU server runs without triton.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from torch import Tensor

from tinysrt.errors import StartupError
from tinysrt.kernels import reference

Kernel = Callable[..., Tensor]
NAMES = ("torch_native", "numba", "triton")


@dataclass(frozen=True)
class KernelSet:
    name: str
    rms_norm: Kernel
    add_rms_norm: Callable[..., tuple[Tensor, Tensor]]
    rope_and_store: Kernel
    silu_and_mul: Kernel
    decode_attention: Kernel
    extend_attention: Kernel
    sample_tokens: Kernel
    grouped_gemm: Kernel
    # For layers/linear.py: x Wᵀ + b of a few rows as the set knows it better than PyTorch; None: it does not.
    few_rows_linear: Kernel | None = None
    few_rows: int = 0  # how many it takes

    @classmethod
    def of_module(cls, name: str, module: Any) -> KernelSet:
        """All kernels of a module that defines, or imports, each under its own name."""
        fields = cls.__dataclass_fields__.keys() - {"name", "few_rows_linear", "few_rows"}
        return cls(name, **{field: getattr(module, field) for field in fields})


REFERENCE = KernelSet.of_module("torch_native", reference)


def load_kernels(name: str, on_progress: Callable[[int, int], None] | None = None) -> KernelSet:
    """`on_progress(done, total)`: the Numba kernels are compiled here, once per installation; else loaded from disk."""
    if name == "torch_native":
        return REFERENCE
    if name == "numba":
        return _numba(on_progress)
    if name == "triton":
        return _triton()
    raise StartupError(f"there are no {name!r} kernels; there are {', '.join(NAMES)}")


NUMBA_MODULES = ("elementwise", "attention", "linear", "sampling")


def _numba(on_progress: Callable[[int, int], None] | None) -> KernelSet:
    modules = []
    for done, name in enumerate(NUMBA_MODULES):
        if on_progress is not None:
            on_progress(done, len(NUMBA_MODULES))
        try:
            modules.append(import_module(f"tinysrt.kernels.numba_{name}"))
        except ModuleNotFoundError as error:
            if error.name is None or error.name.split(".")[0] not in ("numba", "llvmlite"):
                raise
            raise StartupError("the numba kernels need the numba package: pip install numba") from error
    if on_progress is not None:
        on_progress(len(NUMBA_MODULES), len(NUMBA_MODULES))
    elementwise, attention, linear, sampling = modules
    return KernelSet(
        "numba",
        rms_norm=elementwise.rms_norm,
        add_rms_norm=elementwise.add_rms_norm,
        rope_and_store=elementwise.rope_and_store,
        silu_and_mul=elementwise.silu_and_mul,
        decode_attention=attention.decode_attention,
        extend_attention=attention.extend_attention,
        sample_tokens=sampling.sample_tokens,
        grouped_gemm=reference.grouped_gemm,
        few_rows_linear=linear.few_rows_linear,
        few_rows=linear.MOST_ROWS,
    )


def _triton() -> KernelSet:
    try:
        from tinysrt.kernels import triton_attention, triton_elementwise, triton_moe, triton_sampling
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != "triton":
            raise
        raise StartupError("the triton kernels need the triton package: pip install 'tinysrt[triton]'") from error
    return KernelSet(
        "triton",
        rms_norm=triton_elementwise.rms_norm,
        add_rms_norm=triton_elementwise.add_rms_norm,
        rope_and_store=triton_elementwise.rope_and_store,
        silu_and_mul=triton_elementwise.silu_and_mul,
        decode_attention=triton_attention.decode_attention,
        extend_attention=triton_attention.extend_attention,
        sample_tokens=triton_sampling.sample_tokens,
        grouped_gemm=triton_moe.grouped_gemm,
    )
