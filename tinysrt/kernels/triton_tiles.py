"""What the Triton kernels ask of the chip: tile sizes by compute capability and head size, and the checks they share.

A tile is how much of the work one program holds at once. Larger tiles read K and V less often and need more registers
and shared memory; past the chip's limit the compiler spills registers to memory, or the launch fails. So the sizes are
a small table, kept per chip and head size, and not searched at run time: a search would cost seconds at start-up, would
pick differently from run to run, and cannot happen inside a captured graph.

`tests/kernels/test_triton_compile.py` compiles every entry for sm_80 and sm_90 and fails where one spills or does not
fit. SGLang picks its tiles in the same way (`layers/attention/triton_ops/`), by capability and head size.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Tile:
    """rows x columns of one program. Attention: query rows x positions; matmul: rows of x x rows of the weight."""

    rows: int
    columns: int
    warps: int
    stages: int  # how many loop iterations of loads are in flight


# Capability → head size rounded up to a power of two → tile. (8, 0) and (9, 0) have 163 and 227 KiB of shared memory
# a block; every other chip is served by (0, 0), whose tiles fit into 99 KiB.
DECODE = {
    (9, 0): {64: Tile(16, 64, 4, 3), 128: Tile(16, 64, 4, 3), 256: Tile(16, 32, 4, 3)},
    (8, 0): {64: Tile(16, 64, 4, 3), 128: Tile(16, 64, 4, 3), 256: Tile(16, 32, 4, 3)},
    (0, 0): {64: Tile(16, 64, 4, 3), 128: Tile(16, 32, 4, 3), 256: Tile(16, 16, 4, 3)},
}
EXTEND = {
    (9, 0): {64: Tile(128, 128, 8, 3), 128: Tile(128, 64, 8, 3), 256: Tile(64, 32, 8, 3)},
    (8, 0): {64: Tile(128, 64, 8, 3), 128: Tile(128, 32, 8, 3), 256: Tile(64, 16, 8, 3)},
    (0, 0): {64: Tile(64, 32, 4, 3), 128: Tile(64, 32, 4, 3), 256: Tile(32, 16, 4, 3)},
}
GROUPED = {(9, 0): Tile(64, 128, 8, 3), (8, 0): Tile(64, 128, 8, 3), (0, 0): Tile(64, 64, 4, 2)}
# float32 takes twice the room and runs beside the matrix units: it is here for exactness, not for speed.
ATTENTION_FLOAT32 = Tile(16, 16, 4, 2)
GROUPED_FLOAT32 = Tile(32, 32, 4, 1)


@functools.cache
def capability(device: torch.device) -> tuple[int, int]:
    """The row of the tables that serves this device; (0, 0) also for the interpreter, which runs on a CPU."""
    found = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    return found if found in DECODE else (0, 0)


def attention_tile(table: dict[tuple[int, int], dict[int, Tile]], q: Tensor) -> Tile:
    tiles = table[capability(q.device)]
    padded = max(triton.next_power_of_2(q.shape[-1]), 64)
    assert padded in tiles, f"head size {q.shape[-1]}: the kernels know sizes up to {max(tiles)}"
    return ATTENTION_FLOAT32 if q.dtype == torch.float32 else tiles[padded]


def grouped_tile(x: Tensor) -> Tile:
    return GROUPED_FLOAT32 if x.dtype == torch.float32 else GROUPED[capability(x.device)]


def check_dtype(**tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        assert tensor.dtype in DTYPES, f"{name} is {tensor.dtype}; the kernels know {DTYPES}"


def check_same_device(*tensors: Tensor) -> None:
    assert len({tensor.device for tensor in tensors}) == 1, f"devices differ: {[str(t.device) for t in tensors]}"


def check_shape(name: str, tensor: Tensor, *shape: int) -> None:
    assert tuple(tensor.shape) == shape, f"{name} is {tuple(tensor.shape)}, not {shape}"


def check_index(name: str, tensor: Tensor, *shape: int, dtype: torch.dtype = torch.int64) -> None:
    check_shape(name, tensor, *shape)
    assert tensor.dtype == dtype and tensor.is_contiguous(), f"{name} must be a contiguous {dtype}, is {tensor.dtype}"


def check_packed(name: str, tensor: Tensor, dims: int) -> None:
    """The last `dims` axes lie without gaps; the one before them may have any stride."""
    expected = 1
    for axis in range(tensor.dim() - 1, tensor.dim() - 1 - dims, -1):
        assert tensor.shape[axis] == 1 or tensor.stride(axis) == expected, f"{name} has strides {tensor.stride()}"
        expected *= tensor.shape[axis]
