"""Normalization, rotation and gate, compiled for the CPU: one pass over memory each.

PyTorch needs some twenty operations for what these four do, and a decode step on one token spends more time in
starting small operations than in arithmetic. Each kernel reads a row, computes in float32 and writes it once. The
meaning is in `reference.py`; `numba_runtime.py` says how a kernel is started. Rows are independent, so a ticket is a
range of rows.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tinysrt.kernels.numba_runtime import (
    BF16,
    LOG2_E,
    as_float,
    bf16_at,
    draw_ticket,
    exp2,
    f32_at,
    float_bits,
    format_of,
    i64_at,
    inner,
    kernel,
    launch,
    narrow,
    split,
    widen,
)

ENOUGH = 8192  # elements worth a ticket: some microseconds


@inner
def _norm_rows(x, weight, y, begin, end, heads, weight_rows, dim, stride, eps):
    """Rows begin .. end of (tokens * heads): head h of token t starts at x[t * stride + h * dim]."""
    for row in range(begin, end):
        token, head = row // heads, row % heads
        source, target = token * stride + head * dim, row * dim
        scales = (head % weight_rows) * dim  # one weight row for all heads, or one each
        squares = np.float32(0.0)
        for i in range(dim):
            value = widen(x, source + i)
            squares += value * value
        factor = np.float32(1.0) / np.sqrt(squares / np.float32(dim) + eps)
        for i in range(dim):
            y[target + i] = narrow(y, widen(x, source + i) * factor * weight[scales + i])


@kernel
def _rms_norm(args):
    rows, heads, weight_rows, dim, stride, eps = args[6], args[7], args[8], args[9], args[10], as_float(args[11])
    weight = f32_at(args[4])
    while True:
        ticket = draw_ticket(args)
        if ticket >= args[1]:
            break
        begin, end = rows * ticket // args[1], rows * (ticket + 1) // args[1]
        if args[2] == BF16:
            x, y = bf16_at(args[3]), bf16_at(args[5])
            _norm_rows(x, weight, y, begin, end, heads, weight_rows, dim, stride, eps)
        else:
            x_, y_ = f32_at(args[3]), f32_at(args[5])
            _norm_rows(x_, weight, y_, begin, end, heads, weight_rows, dim, stride, eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    heads, dim = (x.shape[1] if x.dim() == 3 else 1), x.shape[-1]
    y = torch.empty(x.shape, dtype=x.dtype)
    rows = x.shape[0] * heads
    launch(
        _rms_norm, split(rows * dim, ENOUGH), format_of(x), x.data_ptr(), weight.data_ptr(), y.data_ptr(),
        rows, heads, weight.numel() // dim, dim, x.stride(0), float_bits(eps),
    )  # fmt: skip
    return y


@inner
def _add_norm_rows(x, residual, weight, y, begin, end, dim, eps):
    for row in range(begin, end):
        start = row * dim
        squares = np.float32(0.0)
        for i in range(start, start + dim):
            value = residual[i] + widen(x, i)
            residual[i] = value
            squares += value * value
        factor = np.float32(1.0) / np.sqrt(squares / np.float32(dim) + eps)
        for i in range(dim):
            y[start + i] = narrow(y, residual[start + i] * factor * weight[i])


@kernel
def _add_rms_norm(args):
    rows, dim, eps = args[7], args[8], as_float(args[9])
    residual, weight = f32_at(args[4]), f32_at(args[5])
    while True:
        ticket = draw_ticket(args)
        if ticket >= args[1]:
            break
        begin, end = rows * ticket // args[1], rows * (ticket + 1) // args[1]
        if args[2] == BF16:
            _add_norm_rows(bf16_at(args[3]), residual, weight, bf16_at(args[6]), begin, end, dim, eps)
        else:
            _add_norm_rows(f32_at(args[3]), residual, weight, f32_at(args[6]), begin, end, dim, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The residual is changed in place."""
    rows, dim = x.shape
    y = torch.empty(x.shape, dtype=x.dtype)
    launch(
        _add_rms_norm, split(rows * dim, ENOUGH), format_of(x), x.data_ptr(), residual.data_ptr(), weight.data_ptr(),
        y.data_ptr(), rows, dim, float_bits(eps),
    )  # fmt: skip
    return y, residual


@inner
def _rotate_rows(qkv, positions, angles, k_buffer, v_buffer, slots, q, begin, end, heads, kv_heads, dim, stride):
    half = dim // 2
    for token in range(begin, end):
        cosines = positions[token] * dim
        sines = cosines + half
        for head in range(heads + kv_heads):
            source = token * stride + head * dim
            if head < heads:
                target = (token * heads + head) * dim
                for i in range(half):
                    a, b = widen(qkv, source + i), widen(qkv, source + half + i)
                    q[target + i] = narrow(q, a * angles[cosines + i] - b * angles[sines + i])
                    q[target + half + i] = narrow(q, b * angles[cosines + i] + a * angles[sines + i])
            else:
                target = (slots[token] * kv_heads + head - heads) * dim
                for i in range(half):
                    a, b = widen(qkv, source + i), widen(qkv, source + half + i)
                    k_buffer[target + i] = narrow(k_buffer, a * angles[cosines + i] - b * angles[sines + i])
                    k_buffer[target + half + i] = narrow(k_buffer, b * angles[cosines + i] + a * angles[sines + i])
        source, target = token * stride + (heads + kv_heads) * dim, slots[token] * kv_heads * dim
        for i in range(kv_heads * dim):
            v_buffer[target + i] = qkv[source + i]


@kernel
def _rope_and_store(args):
    tokens, heads, kv_heads, dim, stride = args[10], args[11], args[12], args[13], args[14]
    positions, angles, slots = i64_at(args[4]), f32_at(args[5]), i64_at(args[8])
    while True:
        ticket = draw_ticket(args)
        if ticket >= args[1]:
            break
        begin, end = tokens * ticket // args[1], tokens * (ticket + 1) // args[1]
        if args[2] == BF16:
            qkv, k, v, q = bf16_at(args[3]), bf16_at(args[6]), bf16_at(args[7]), bf16_at(args[9])
            _rotate_rows(qkv, positions, angles, k, v, slots, q, begin, end, heads, kv_heads, dim, stride)
        else:
            qkv_, k_, v_, q_ = f32_at(args[3]), f32_at(args[6]), f32_at(args[7]), f32_at(args[9])
            _rotate_rows(qkv_, positions, angles, k_, v_, slots, q_, begin, end, heads, kv_heads, dim, stride)


def rope_and_store(
    qkv: Tensor,
    positions: Tensor,
    rope_cache: Tensor,
    k_buffer: Tensor,
    v_buffer: Tensor,
    slots: Tensor,
    num_heads: int,
) -> Tensor:
    tokens, all_heads, dim = qkv.shape
    assert qkv.dtype == k_buffer.dtype and k_buffer.shape == v_buffer.shape
    q = torch.empty(tokens, num_heads, dim, dtype=qkv.dtype)
    launch(
        _rope_and_store, split(tokens * all_heads * dim, ENOUGH), format_of(qkv), qkv.data_ptr(), positions.data_ptr(),
        rope_cache.data_ptr(), k_buffer.data_ptr(), v_buffer.data_ptr(), slots.data_ptr(), q.data_ptr(),
        tokens, num_heads, k_buffer.shape[1], dim, qkv.stride(0),
    )  # fmt: skip
    return q


@inner
def _gate_rows(gate_up, y, begin, end, width):
    for row in range(begin, end):
        gate, up = 2 * row * width, (2 * row + 1) * width
        for i in range(width):
            value = widen(gate_up, gate + i)
            # sigmoid from the negative side: 2^-|x| never overflows
            small = exp2(-abs(value) * LOG2_E)
            sigmoid = (np.float32(1.0) if value >= 0 else small) / (np.float32(1.0) + small)
            y[row * width + i] = narrow(y, value * sigmoid * widen(gate_up, up + i))


@kernel
def _silu_and_mul(args):
    rows, width = args[5], args[6]
    while True:
        ticket = draw_ticket(args)
        if ticket >= args[1]:
            break
        begin, end = rows * ticket // args[1], rows * (ticket + 1) // args[1]
        if args[2] == BF16:
            _gate_rows(bf16_at(args[3]), bf16_at(args[4]), begin, end, width)
        else:
            _gate_rows(f32_at(args[3]), f32_at(args[4]), begin, end, width)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    y = torch.empty(rows, width, dtype=gate_up.dtype)
    launch(
        _silu_and_mul, split(rows * width, ENOUGH), format_of(gate_up), gate_up.data_ptr(), y.data_ptr(), rows, width
    )
    return y
