"""The small kernels of a decoder layer in Triton: both norms, rope with KV store, the MLP's gate.

Each reads its input once and writes its output once; between two matmuls nothing else touches memory. A layer then has
four launches beside its matmuls and attention, where plain PyTorch has some twenty.

    rms_norm, add_rms_norm    one program a token (and a block of heads)
    rope_and_store            one program a token and a block of heads; a head is rotated and goes to q, is rotated and
                              goes to the K pool, or goes to the V pool as it is
    silu_and_mul              one program a token and a block of columns

All arithmetic is float32: every load is widened before it is used, every store narrows. Each launch is a
`torch.library.custom_op`, so that a graph capture, a fake tensor and a recorder see one operation with a name; the
function that checks the arguments and makes room for the result serves the launch and its fake alike.
`reference.py` says what each computes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tinysrt.kernels.triton_tiles import check_dtype, check_index, check_packed, check_same_device, check_shape

HEADS_PER_PROGRAM = 16
GATE_BLOCK = 1024


def _warps(elements: int) -> int:
    return min(max(elements // 512, 1), 16)


# ---- norms -----------------------------------------------------------------------------------------


@triton.jit
def rms_norm_kernel(
    x_ptr,  # (T, heads, dim), the last two axes packed
    weight_ptr,  # (heads, dim) or, with weight_stride 0, (dim,)
    y_ptr,  # (T, heads, dim) packed
    x_stride,
    weight_stride,
    heads,
    eps,
    DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
    d = tl.arange(0, BLOCK_D)[None, :]
    inside = (head < heads) & (d < DIM)
    x = tl.load(x_ptr + token * x_stride + head * DIM + d, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + head * weight_stride + d, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(x * x, axis=1)[:, None] / DIM
    y = x * (1.0 / tl.sqrt(mean + eps)) * weight
    tl.store(y_ptr + token * heads * DIM + head * DIM + d, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def add_rms_norm_kernel(
    x_ptr,  # (T, dim)
    residual_ptr,  # (T, dim) float32, becomes residual + x
    weight_ptr,  # (dim,)
    y_ptr,  # (T, dim)
    x_stride,
    eps,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    inside = d < DIM
    x = tl.load(x_ptr + token * x_stride + d, mask=inside, other=0.0).to(tl.float32)
    residual = tl.load(residual_ptr + token * DIM + d, mask=inside, other=0.0) + x
    weight = tl.load(weight_ptr + d, mask=inside, other=0.0).to(tl.float32)
    tl.store(residual_ptr + token * DIM + d, residual, mask=inside)
    mean = tl.sum(residual * residual, axis=0) / DIM
    y = residual * (1.0 / tl.sqrt(mean + eps)) * weight
    tl.store(y_ptr + token * DIM + d, y.to(y_ptr.dtype.element_ty), mask=inside)


def _rms_norm_room(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    check_same_device(x, weight)
    check_dtype(x=x, weight=weight)
    assert x.dim() in (2, 3), f"x has {x.dim()} axes"
    check_packed("x", x, x.dim() - 1)
    check_packed("weight", weight, weight.dim())
    check_shape("weight", weight, *x.shape[-weight.dim() :])
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


@torch.library.custom_op("tinysrt::rms_norm", mutates_args=())
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    y = _rms_norm_room(x, weight, eps)
    heads, dim = (1, x.shape[1]) if x.dim() == 2 else x.shape[1:]
    block_h = min(triton.next_power_of_2(heads), HEADS_PER_PROGRAM)
    block_d = triton.next_power_of_2(dim)
    rms_norm_kernel[(len(x), triton.cdiv(heads, block_h))](
        x,
        weight,
        y,
        x.stride(0),
        dim if weight.dim() == 2 else 0,
        heads,
        eps,
        DIM=dim,
        BLOCK_H=block_h,
        BLOCK_D=block_d,
        num_warps=_warps(block_h * block_d),
    )
    return y


rms_norm.register_fake(_rms_norm_room)


def _add_rms_norm_room(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    check_same_device(x, residual, weight)
    check_dtype(x=x, weight=weight)
    assert x.dim() == 2 and residual.dtype == torch.float32 and residual.is_contiguous()
    check_packed("x", x, 1)
    check_shape("residual", residual, *x.shape)
    check_shape("weight", weight, x.shape[1])
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


@torch.library.custom_op("tinysrt::add_rms_norm", mutates_args={"residual"})
def _add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    y = _add_rms_norm_room(x, residual, weight, eps)
    block = triton.next_power_of_2(x.shape[1])
    add_rms_norm_kernel[(len(x),)](
        x, residual, weight, y, x.stride(0), eps, DIM=x.shape[1], BLOCK_D=block, num_warps=_warps(block)
    )
    return y


_add_rms_norm.register_fake(_add_rms_norm_room)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(normed, residual + x); the sum replaces `residual` in place."""
    return _add_rms_norm(x, residual, weight, eps), residual


# ---- rope and KV store -----------------------------------------------------------------------------


@triton.jit
def rope_and_store_kernel(
    qkv_ptr,  # (T, heads + 2 kv_heads, dim), the last two axes packed
    positions_ptr,  # (T,) int64
    cache_ptr,  # (max_positions, dim) float32: cos of each pair, then sin
    q_ptr,  # (T, heads, dim) packed
    k_ptr,  # (slots, kv_heads, dim) packed
    v_ptr,
    slots_ptr,  # (T,) int64
    qkv_stride,
    heads,
    kv_heads,
    HALF: tl.constexpr,  # dim / 2
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,  # HALF rounded up to a power of two
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
    d = tl.arange(0, BLOCK_D)[None, :]
    inside = (head < heads + 2 * kv_heads) & (d < HALF)
    source = qkv_ptr + token * qkv_stride + head * (2 * HALF) + d
    first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)

    angles = cache_ptr + tl.load(positions_ptr + token) * (2 * HALF) + d
    rotates = head < heads + kv_heads  # value heads do not turn: the angle 0
    cos = tl.where(rotates, tl.load(angles, mask=d < HALF, other=0.0), 1.0)
    sin = tl.where(rotates, tl.load(angles + HALF, mask=d < HALF, other=0.0), 0.0)
    turned_first = (first * cos - second * sin).to(q_ptr.dtype.element_ty)
    turned_second = (second * cos + first * sin).to(q_ptr.dtype.element_ty)

    # [ query heads │ key heads │ value heads ]: three destinations, each store masked to its own heads
    slot = tl.load(slots_ptr + token)
    q_out = q_ptr + (token * heads + head) * (2 * HALF) + d
    k_out = k_ptr + (slot * kv_heads + head - heads) * (2 * HALF) + d
    v_out = v_ptr + (slot * kv_heads + head - heads - kv_heads) * (2 * HALF) + d
    is_q = inside & (head < heads)
    is_k = inside & (head >= heads) & rotates
    is_v = inside & (head >= heads + kv_heads)
    tl.store(q_out, turned_first, mask=is_q)
    tl.store(q_out + HALF, turned_second, mask=is_q)
    tl.store(k_out, turned_first, mask=is_k)
    tl.store(k_out + HALF, turned_second, mask=is_k)
    tl.store(v_out, turned_first, mask=is_v)
    tl.store(v_out + HALF, turned_second, mask=is_v)


def _rope_room(
    qkv: Tensor,
    positions: Tensor,
    rope_cache: Tensor,
    k_buffer: Tensor,
    v_buffer: Tensor,
    slots: Tensor,
    num_heads: int,
) -> Tensor:
    check_same_device(qkv, positions, rope_cache, k_buffer, v_buffer, slots)
    check_dtype(qkv=qkv)
    check_packed("qkv", qkv, 2)
    tokens, all_heads, dim = qkv.shape
    assert dim % 2 == 0 and k_buffer.dtype == v_buffer.dtype == qkv.dtype
    check_shape("qkv", qkv, tokens, num_heads + 2 * k_buffer.shape[1], dim)
    check_shape("v_buffer", v_buffer, *k_buffer.shape)
    assert k_buffer.is_contiguous() and v_buffer.is_contiguous()
    check_shape("rope_cache", rope_cache, len(rope_cache), dim)
    assert rope_cache.dtype == torch.float32 and rope_cache.is_contiguous()
    check_index("positions", positions, tokens)
    check_index("slots", slots, tokens)
    return torch.empty(tokens, num_heads, dim, dtype=qkv.dtype, device=qkv.device)


@torch.library.custom_op("tinysrt::rope_and_store", mutates_args={"k_buffer", "v_buffer"})
def rope_and_store(
    qkv: Tensor,
    positions: Tensor,
    rope_cache: Tensor,
    k_buffer: Tensor,
    v_buffer: Tensor,
    slots: Tensor,
    num_heads: int,
) -> Tensor:
    q = _rope_room(qkv, positions, rope_cache, k_buffer, v_buffer, slots, num_heads)
    half = qkv.shape[2] // 2
    block_h = min(triton.next_power_of_2(qkv.shape[1]), HEADS_PER_PROGRAM)
    block_d = triton.next_power_of_2(half)
    rope_and_store_kernel[(len(qkv), triton.cdiv(qkv.shape[1], block_h))](
        qkv,
        positions,
        rope_cache,
        q,
        k_buffer,
        v_buffer,
        slots,
        qkv.stride(0),
        num_heads,
        k_buffer.shape[1],
        HALF=half,
        BLOCK_H=block_h,
        BLOCK_D=block_d,
        num_warps=_warps(2 * block_h * block_d),
    )
    return q


rope_and_store.register_fake(_rope_room)


# ---- the MLP's gate --------------------------------------------------------------------------------


@triton.jit
def silu_and_mul_kernel(x_ptr, y_ptr, x_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    gate = tl.load(x_ptr + token * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + token * x_stride + WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    y = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(y_ptr + token * WIDTH + column, y.to(y_ptr.dtype.element_ty), mask=inside)


def _silu_room(gate_up: Tensor) -> Tensor:
    check_dtype(gate_up=gate_up)
    check_packed("gate_up", gate_up, 1)
    assert gate_up.dim() == 2 and gate_up.shape[1] % 2 == 0
    return torch.empty(len(gate_up), gate_up.shape[1] // 2, dtype=gate_up.dtype, device=gate_up.device)


@torch.library.custom_op("tinysrt::silu_and_mul", mutates_args=())
def silu_and_mul(gate_up: Tensor) -> Tensor:
    y = _silu_room(gate_up)
    width = y.shape[1]
    block = min(triton.next_power_of_2(width), GATE_BLOCK)
    silu_and_mul_kernel[(len(y), triton.cdiv(width, block))](
        gate_up, y, gate_up.stride(0), WIDTH=width, BLOCK=block, num_warps=_warps(2 * block)
    )
    return y


silu_and_mul.register_fake(_silu_room)
