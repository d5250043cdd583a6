"""KernelSet: the same functions three ways, chosen once at start-up and handed to whoever computes.

    torch_native   kernels/reference.py     plain PyTorch: the definition, runs everywhere, the one to read first
    numba          kernels/numba_*.py       CPU: loops that Numba compiles with its own LLVM, no compiler needed
    triton         kernels/triton_*.py      CUDA

Signatures and meanings are those of `kernels/reference.py`; tests hold the other two to it. Layers and attention
backends get the set through their constructors, so nothing looks up a kernel at run time. The fast sets are imported
only when they are asked for: a CPU server runs without triton.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, fields
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
    def of_modules(cls, name: str, *modules: Any, **own: Any) -> KernelSet:
        """Each kernel from the module that has one of its name; `own`: what is said otherwise."""
        defined = {field: getattr(module, field) for module in modules for field in KERNELS if hasattr(module, field)}
        return cls(name, **defined | own)


KERNELS = [field.name for field in fields(KernelSet) if field.default is MISSING and field.name != "name"]
REFERENCE = KernelSet.of_modules("torch_native", reference)


def load_kernels(name: str, on_progress: Callable[[int, int], None] | None = None) -> KernelSet:
    """`on_progress(done, total)`: the Numba kernels are compiled here, once per installation; else loaded from disk."""
    if name == "torch_native":
        return REFERENCE
    if name == "numba":
        names = "numba_elementwise", "numba_attention", "numba_linear", "numba_sampling"
        modules = _import(names, "numba", "pip install numba", on_progress)
        linear = modules[2]
        own = dict(few_rows_linear=linear.few_rows_linear, few_rows=linear.MOST_ROWS)
        return KernelSet.of_modules(name, *modules, grouped_gemm=reference.grouped_gemm, **own)
    if name == "triton":
        names = "triton_elementwise", "triton_attention", "triton_sampling", "triton_moe"
        return KernelSet.of_modules(name, *_import(names, "triton", "pip install 'tinysrt[triton]'"))
    raise StartupError(f"there are no {name!r} kernels; there are {', '.join(NAMES)}")


def _import(
    names: Sequence[str], package: str, install: str, on_progress: Callable[[int, int], None] | None = None
) -> list[Any]:
    """These modules of this package; they need a package that may not be there."""
    modules = []
    for done, name in enumerate(names):
        if on_progress is not None:
            on_progress(done, len(names))
        try:
            modules.append(import_module(f"tinysrt.kernels.{name}"))
        except ModuleNotFoundError as error:
            if error.name is None or error.name.split(".")[0] not in (package, "llvmlite"):
                raise
            raise StartupError(f"the {package} kernels need the {package} package: {install}") from error
    if on_progress is not None:
        on_progress(len(names), len(names))
    return modules
