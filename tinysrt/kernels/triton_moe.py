"""grouped_gemm in Triton: rows sorted by expert, each through its expert's matrix, in one launch.

        rows of x   [ expert 0 │ expert 1 │ │ expert 3      ]      expert 2 got no row
        programs    [0][1]      [2]          [3][4][5]             a block never holds rows of two experts

How many rows each expert got is known to the device only. So the grid has as many programs as there could be blocks,
and each finds its expert from the offsets, in the manner of `extend_kernel` (`find_owner` explains the numbering).
SGLang sorts and pads the rows to whole blocks first (`layers/moe/fused_moe_triton`), which needs a kernel of its own.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tinysrt.kernels.triton_attention import find_owner
from tinysrt.kernels.triton_tiles import check_dtype, check_index, check_same_device, grouped_tile

BLOCK_K = 64  # of the inner dimension, per loop iteration


@triton.jit
def grouped_gemm_kernel(
    x_ptr,  # (N, inner) packed
    weight_ptr,  # (experts, outer, inner) packed
    offsets_ptr,  # (experts + 1,) int64
    y_ptr,  # (N, outer) packed
    experts,
    outer,
    INNER: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    block = tl.program_id(1)
    expert = find_owner(offsets_ptr, experts, block, BLOCK_M)
    start = tl.load(offsets_ptr + expert)
    end = tl.load(offsets_ptr + expert + 1)
    first = start + (block - start // BLOCK_M - expert) * BLOCK_M
    if first >= end:
        return
    row = first + tl.arange(0, BLOCK_M)  # int64
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    weight = weight_ptr + (expert.to(tl.int64) * outer + column)[:, None] * INNER
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for begin in range(0, INNER, BLOCK_K):
        inner = begin + k
        x_inside = (row < end)[:, None] & (inner < INNER)[None, :]
        w_inside = (column < outer)[:, None] & (inner < INNER)[None, :]
        x = tl.load(x_ptr + row[:, None] * INNER + inner[None, :], mask=x_inside, other=0.0)
        w = tl.load(weight + inner[None, :], mask=w_inside, other=0.0)
        acc = tl.dot(x, tl.trans(w), acc=acc, input_precision="ieee")
    inside = (row < end)[:, None] & (column < outer)[None, :]
    tl.store(y_ptr + row[:, None] * outer + column[None, :], acc.to(y_ptr.dtype.element_ty), mask=inside)


def _grouped_room(x: Tensor, weight: Tensor, group_offsets: Tensor) -> Tensor:
    check_same_device(x, weight, group_offsets)
    check_dtype(x=x)
    assert x.dim() == 2 and weight.dim() == 3 and x.dtype == weight.dtype and x.shape[1] == weight.shape[2]
    assert x.is_contiguous() and weight.is_contiguous()
    check_index("group_offsets", group_offsets, len(weight) + 1)
    return torch.empty(len(x), weight.shape[1], dtype=x.dtype, device=x.device)


@torch.library.custom_op("tinysrt::grouped_gemm", mutates_args=())
def grouped_gemm(x: Tensor, weight: Tensor, group_offsets: Tensor) -> Tensor:
    y = _grouped_room(x, weight, group_offsets)
    tile = grouped_tile(x)
    experts, outer, inner = weight.shape
    grouped_gemm_kernel[(triton.cdiv(outer, tile.columns), len(x) // tile.rows + experts)](
        x,
        weight,
        group_offsets,
        y,
        experts,
        outer,
        INNER=inner,
        BLOCK_M=tile.rows,
        BLOCK_N=tile.columns,
        BLOCK_K=BLOCK_K,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return y


grouped_gemm.register_fake(_grouped_room)
