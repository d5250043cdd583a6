"""Every kernel as it is launched, compiled for a chip that is not here, and what the machine code says.

`compiling(capability)` stands in for the driver: launches inside it compile, exactly what the launcher would on that
chip (types, constants, and which pointers and strides are divisible by 16), and run nothing. `inspect` reads the
machine code with the tools that ship with Triton.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from tinysrt.kernels import triton_tiles
from tinysrt.kernels.kernel_set import KernelSet

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
# Shared memory that one block may have, by capability.
SHARED_LIMIT = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024}
OPCODE = re.compile(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+ )?([A-Z][A-Z0-9_.]+)", re.MULTILINE)


class AbsentChip:
    """What Triton asks a driver for, to compile."""

    def __init__(self, capability: int):
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability  # kernels are cached by device: one cache per chip

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def compiling(capability: int) -> Iterator[list[Any]]:
    """The compiled kernels, in the order of their launches."""
    compiled: list[Any] = []
    launch, choose = JITFunction.run, triton_tiles.capability

    def compile_only(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        compiled.append(launch(self, *args, grid=grid, warmup=True, **kwargs))

    found = divmod(capability, 10)
    JITFunction.run = compile_only
    triton_tiles.capability = lambda device: found if found in triton_tiles.DECODE else (0, 0)
    driver.set_active(AbsentChip(capability))
    try:
        yield compiled
    finally:
        JITFunction.run, triton_tiles.capability = launch, choose
        driver._active = None


@dataclass(frozen=True)
class Code:
    kernel: str
    chip: int
    registers: int
    stack: int  # bytes per thread in local memory: spilled registers
    shared: int  # bytes per block
    instructions: Counter[str]
    ttir: str

    def count(self, pattern: str) -> int:
        return sum(n for name, n in self.instructions.items() if re.match(pattern, name))

    @property
    def spills(self) -> int:
        return self.count("LDL|STL")

    @property
    def matrix(self) -> str:
        """Which matrix instructions: wgmma works on 64 rows at once and reads shared memory, mma is older."""
        return "wgmma" if self.count("HGMMA") else "mma" if self.count("HMMA") else "–"

    @property
    def wide_loads(self) -> int:
        return self.count(r"LDG\.E\.128|LDGSTS\.E\.(BYPASS\.)?128")

    @property
    def narrow_copies(self) -> int:
        """Copies to shared memory of less than 128 bits, but for the slots (32 bits each)."""
        return self.count(r"LDGSTS\.E\.(64|BYPASS\.64)")


def inspect(kernel: Any) -> Code:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = run_tool("cuobjdump", "-res-usage", file.name)
        listing = run_tool("nvdisasm", "-c", file.name)
    used = {name: int(value) for name, value in re.findall(r"(REG|STACK):(\d+)", usage)}
    return Code(
        kernel=kernel.metadata.name.removesuffix("_kernel"),
        chip=kernel.metadata.target.arch,
        registers=used["REG"],
        stack=used["STACK"],
        shared=kernel.metadata.shared,
        instructions=Counter(OPCODE.findall(listing)),
        ttir=kernel.asm["ttir"],
    )


def run_tool(name: str, *arguments: str) -> str:
    return subprocess.run([TOOLS / name, *arguments], capture_output=True, text=True, check=True, timeout=60).stdout


# ---- the launches ----------------------------------------------------------------------------------


def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.zeros(*shape, dtype=dtype)


def attention_launches(
    kernels: KernelSet, dim: int, group: int, dtype: torch.dtype, window: int | None
) -> dict[str, Callable[[], Any]]:
    kv_heads, tokens = 2, 64
    pool, table = zeros(48, kv_heads, dim, dtype=dtype), zeros(4, 4096, dtype=torch.int32)
    q = zeros(tokens, kv_heads * group, dim, dtype=dtype)
    many, few = zeros(512), zeros(2)
    crowd = zeros(512, kv_heads * group, dim, dtype=dtype)  # so many requests that a split would not pay
    return {
        ", in splits": lambda: kernels.decode_attention(
            q, pool, pool, table, many[:tokens], many[:tokens], 0.1, window
        ),
        ", one split": lambda: kernels.decode_attention(crowd, pool, pool, table, many, many, 0.1, window),
        "": lambda: kernels.extend_attention(q, pool, pool, table, few, zeros(3), few, 0.1, window),
    }


def other_launches(kernels: KernelSet, dtype: torch.dtype) -> dict[str, Callable[[], Any]]:
    """In the shapes of an 8B model; the norm of heads in Qwen3-0.6B's."""
    x, weight = zeros(64, 4096, dtype=dtype), torch.ones(4096)
    heads, head_weight = zeros(64, 24, 128, dtype=dtype), torch.ones(24, 128)
    qkv, pool = zeros(64, 48, 128, dtype=dtype), zeros(48, 8, 128, dtype=dtype)
    row = torch.ones(4)
    return {
        "hidden 4096": lambda: kernels.rms_norm(x, weight, 1e-6),
        "24 heads of 128": lambda: kernels.rms_norm(heads, head_weight, 1e-6),
        "hidden 4096, sum": lambda: kernels.add_rms_norm(x, x.float(), weight, 1e-6),
        "width 14336": lambda: kernels.silu_and_mul(zeros(64, 2 * 14336, dtype=dtype)),
        "32 + 2 x 8 heads of 128": lambda: kernels.rope_and_store(
            qkv, zeros(64), torch.zeros(99, 128), pool, pool.clone(), zeros(64), 32
        ),
        "8 experts, 4096 to 768": lambda: kernels.grouped_gemm(x, zeros(8, 768, 4096, dtype=dtype), zeros(9)),
        "vocabulary 151,936": lambda: kernels.sample_tokens(
            torch.zeros(4, 151_936), row, zeros(4), row, row, row.double()
        ),
    }
