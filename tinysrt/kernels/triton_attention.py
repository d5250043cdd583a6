"""Attention over the paged KV in Triton: decode in splits with a merge, ragged extend after a prefix.

KV is flat and token-major, `(slots, kv_heads, dim)`; position p of request row r lives in slot `table[r, p]`. Both
kernels walk over positions in blocks, look the block's slots up, gather K and V, and keep an online softmax: the best
score so far, the sum of weights and the weighted sum of V, the latter two rescaled whenever a better score appears.

    attend_block       one block of positions against a tile of query rows; the only place that touches K and V
    decode_kernel      a program = (request, KV head, split): the heads that share a KV head are the rows of its tile
    merge_kernel       the splits of one query head, weighted by the sums they saw
    extend_kernel      a program = (block of a request's new tokens, KV head): rows are tokens x heads of the group

        decode   positions  0 ................................ len       B x kv_heads programs are too few to fill a
                 splits     [   0   |   1   |   2   |   3    ]           chip when B is small, so the positions are cut

The number of splits follows from shapes alone (`split_count`), never from lengths: the grid of a captured graph is
frozen, and lengths live on the device. A split that has nothing to do says so with a weight of 0.

Scores are kept in units of log2 (`scale * log2(e)` is one factor), because the chip's own exponential is 2^x. SGLang's
twins are `layers/attention/triton_ops/decode_attention.py` and `extend_attention.py`.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from tinysrt.kernels.triton_tiles import (
    DECODE,
    EXTEND,
    attention_tile,
    check_dtype,
    check_index,
    check_packed,
    check_same_device,
    check_shape,
)

MAX_SPLITS = 32
MIN_SPLIT = 128  # positions; below that the merge costs more than the split saves
PROGRAMS_WANTED = 1024  # some eight for each of the 108 to 132 processors of a large chip
# Lower than any score, and finite: inf - inf is NaN. What a row gathers before it has seen a position is multiplied by
# 2^(HIDDEN - best) = 0 as soon as it sees one.
HIDDEN: tl.constexpr = tl.constexpr(-1.0e30)


@triton.jit
def attend_block(
    q,  # (ROWS, BLOCK_D)
    acc,  # (ROWS, BLOCK_D) float32: weighted sum of V so far
    best,  # (ROWS,) float32: best score so far, in log2 units
    total,  # (ROWS,) float32: sum of weights so far
    k_ptr,  # of this KV head
    v_ptr,
    table_row,
    begin,  # first position of the block
    end,  # first position that nobody in the tile sees
    position,  # (ROWS,) int32: the row's own position; it sees itself and what comes before
    scale,
    slot_stride,
    window,
    HEAD_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TAIL: tl.constexpr,  # the block may reach beyond `end`
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
):
    n = begin + tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    if TAIL:
        slots = tl.load(table_row + n, mask=n < end, other=0).to(tl.int64)
        inside = (n < end)[:, None] & (d < HEAD_DIM)[None, :]
        offsets = slots[:, None] * slot_stride + d[None, :]
        k = tl.load(k_ptr + offsets, mask=inside, other=0.0)
        v = tl.load(v_ptr + offsets, mask=inside, other=0.0)
    else:
        slots = tl.load(table_row + n).to(tl.int64)
        offsets = slots[:, None] * slot_stride + d[None, :]
        if HEAD_DIM == BLOCK_D:
            k = tl.load(k_ptr + offsets)
            v = tl.load(v_ptr + offsets)
        else:
            inside = (d < HEAD_DIM)[None, :]
            k = tl.load(k_ptr + offsets, mask=inside, other=0.0)
            v = tl.load(v_ptr + offsets, mask=inside, other=0.0)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    if TAIL:
        scores = tl.where((n < end)[None, :], scores, HIDDEN)
    if CAUSAL:
        scores = tl.where(n[None, :] <= position[:, None], scores, HIDDEN)
    if WINDOW:
        scores = tl.where(n[None, :] > position[:, None] - window, scores, HIDDEN)
    new_best = tl.maximum(best, tl.max(scores, axis=1))
    weights = tl.exp2(scores - new_best[:, None])
    rescale = tl.exp2(best - new_best)
    total = total * rescale + tl.sum(weights, axis=1)
    acc = tl.dot(weights.to(v.dtype), v, acc=acc * rescale[:, None], input_precision="ieee")
    return acc, new_best, total


# ---- decode ----------------------------------------------------------------------------------------


@triton.jit
def decode_kernel(
    q_ptr,  # (B, heads, dim), the last two axes packed
    k_ptr,  # (slots, kv_heads, dim) packed
    v_ptr,
    table_ptr,  # (rows, width) int32
    rows_ptr,  # (B,) int64
    lens_ptr,  # (B,) int64
    out_ptr,  # (B, heads, dim); with several splits the partial results, (B, heads, SPLITS, dim) float32
    weight_ptr,  # (B, heads, SPLITS) float32: log2 of the weight each split saw
    scale,
    q_stride,
    slot_stride,
    table_stride,
    window,
    HEAD_DIM: tl.constexpr,
    GROUP: tl.constexpr,  # query heads per KV head
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WINDOW: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    heads = tl.num_programs(1) * GROUP
    length = tl.load(lens_ptr + request).to(tl.int32)
    first = 0
    if WINDOW:
        first = tl.maximum(length - window, 0)
    share = tl.cdiv(tl.cdiv(length - first, SPLITS), BLOCK_N) * BLOCK_N  # positions per split, whole blocks
    begin = first + split * share
    end = tl.minimum(begin + share, length)

    r = tl.arange(0, ROWS)
    d = tl.arange(0, BLOCK_D)
    head = kv_head * GROUP + r
    q_inside = (r < GROUP)[:, None] & (d < HEAD_DIM)[None, :]
    q = tl.load(q_ptr + request * q_stride + head[:, None] * HEAD_DIM + d[None, :], mask=q_inside, other=0.0)
    table_row = table_ptr + tl.load(rows_ptr + request) * table_stride
    k_head = k_ptr + kv_head * HEAD_DIM
    v_head = v_ptr + kv_head * HEAD_DIM

    acc = tl.zeros((ROWS, BLOCK_D), dtype=tl.float32)
    best = tl.full((ROWS,), HIDDEN, dtype=tl.float32)
    total = tl.zeros((ROWS,), dtype=tl.float32)
    position = tl.full((ROWS,), 0, dtype=tl.int32) + length - 1
    # Every block but the last is whole, but one loop keeps the loads of the last in the same pipeline.
    for block in range(begin, end, BLOCK_N):
        acc, best, total = attend_block(
            q, acc, best, total, k_head, v_head, table_row, block, end, position, scale, slot_stride, window,
            HEAD_DIM, BLOCK_N, BLOCK_D, TAIL=True, CAUSAL=False, WINDOW=False,
        )  # fmt: skip
    row = (request * heads + head) * SPLITS + split
    seen = total > 0.0  # then it is at least 1
    total = tl.where(seen, total, 1.0)
    acc = acc / total[:, None]
    tl.store(out_ptr + row[:, None] * HEAD_DIM + d[None, :], acc.to(out_ptr.dtype.element_ty), mask=q_inside)
    if SPLITS > 1:
        tl.store(weight_ptr + row, tl.where(seen, best + tl.log2(total), HIDDEN), mask=r < GROUP)


@triton.jit
def merge_kernel(
    partial_ptr,  # (B * heads, SPLITS, dim) float32
    weight_ptr,  # (B * heads, SPLITS) float32, log2
    out_ptr,  # (B * heads, dim)
    HEAD_DIM: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS)
    d = tl.arange(0, BLOCK_D)
    weight = tl.load(weight_ptr + row * SPLITS + split)
    weight = tl.exp2(weight - tl.max(weight, axis=0))  # an empty split: 2^(-1e30) = 0
    inside = (weight > 0.0)[:, None] & (d < HEAD_DIM)[None, :]
    partial = tl.load(partial_ptr + (row * SPLITS + split)[:, None] * HEAD_DIM + d[None, :], mask=inside, other=0.0)
    out = tl.sum(partial * weight[:, None], axis=0) / tl.sum(weight, axis=0)
    tl.store(out_ptr + row * HEAD_DIM + d, out.to(out_ptr.dtype.element_ty), mask=d < HEAD_DIM)


def split_count(batch_size: int, kv_heads: int, width: int) -> int:
    """A power of two, from shapes alone: enough programs to fill a chip, no split shorter than is worth it."""
    wanted = PROGRAMS_WANTED // max(batch_size * kv_heads, 1)
    possible = width // MIN_SPLIT
    return 1 << max(min(wanted, possible, MAX_SPLITS), 1).bit_length() - 1


def _attention_room(q: Tensor, k_buffer: Tensor, v_buffer: Tensor, table: Tensor, rows: Tensor) -> Tensor:
    check_same_device(q, k_buffer, v_buffer, table, rows)
    check_dtype(q=q)
    assert q.dim() == k_buffer.dim() == 3 and q.dtype == k_buffer.dtype == v_buffer.dtype
    check_packed("q", q, 2)
    check_shape("k_buffer", k_buffer, len(k_buffer), k_buffer.shape[1], q.shape[2])
    check_shape("v_buffer", v_buffer, *k_buffer.shape)
    assert k_buffer.is_contiguous() and v_buffer.is_contiguous() and q.shape[1] % k_buffer.shape[1] == 0
    assert table.dtype == torch.int32 and table.dim() == 2
    check_packed("table", table, 1)
    check_index("rows", rows, len(rows))
    return torch.empty(q.shape, dtype=q.dtype, device=q.device)


def _decode_room(
    q: Tensor,
    k_buffer: Tensor,
    v_buffer: Tensor,
    table: Tensor,
    rows: Tensor,
    seq_lens: Tensor,
    scale: float,
    window: int | None = None,
) -> Tensor:
    check_same_device(q, seq_lens)
    check_index("rows", rows, len(q))
    check_index("seq_lens", seq_lens, len(q))
    assert window is None or window > 0
    return _attention_room(q, k_buffer, v_buffer, table, rows)


@torch.library.custom_op("tinysrt::decode_attention", mutates_args=())
def decode_attention(
    q: Tensor,
    k_buffer: Tensor,
    v_buffer: Tensor,
    table: Tensor,
    rows: Tensor,
    seq_lens: Tensor,
    scale: float,
    window: int | None = None,
) -> Tensor:
    out = _decode_room(q, k_buffer, v_buffer, table, rows, seq_lens, scale, window)
    batch, heads, dim = q.shape
    kv_heads = k_buffer.shape[1]
    tile = attention_tile(DECODE, q)
    splits = split_count(batch, kv_heads, table.shape[1])
    partial, weight = out, out  # one split: its result is the result, and nothing is weighted
    if splits > 1:
        partial = torch.empty(batch, heads, splits, dim, dtype=torch.float32, device=q.device)
        weight = torch.empty(batch, heads, splits, dtype=torch.float32, device=q.device)
    block_d = max(triton.next_power_of_2(dim), 16)
    decode_kernel[(batch, kv_heads, splits)](
        q,
        k_buffer,
        v_buffer,
        table,
        rows,
        seq_lens,
        partial,
        weight,
        scale * math.log2(math.e),
        q.stride(0),
        k_buffer.stride(0),
        table.stride(0),
        window or 0,
        HEAD_DIM=dim,
        GROUP=heads // kv_heads,
        SPLITS=splits,
        ROWS=max(triton.next_power_of_2(heads // kv_heads), tile.rows),  # a matrix instruction has 16 rows at least
        BLOCK_N=tile.columns,
        BLOCK_D=block_d,
        WINDOW=window is not None,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    if splits > 1:
        merge_kernel[(batch * heads,)](
            partial, weight, out, HEAD_DIM=dim, SPLITS=splits, BLOCK_D=block_d, num_warps=4 if splits > 4 else 1
        )
    return out


decode_attention.register_fake(_decode_room)


# ---- extend ----------------------------------------------------------------------------------------


@triton.jit
def find_owner(starts_ptr, count, block, BLOCK: tl.constexpr):
    """Which of `count` consecutive ranges a block of rows belongs to, when each range begins a block of its own.

    Range i owns rows starts[i] .. starts[i + 1]. Number its first block starts[i] // BLOCK + i: it then has at least
    as many numbers as it has blocks, no two ranges share one, and the numbers end at rows // BLOCK + count, which the
    host knows without knowing the starts. A number that is too many finds itself beyond its range and does nothing.
    """
    owner = -1
    for begin in range(0, count, 128):
        i = begin + tl.arange(0, 128)
        first = tl.load(starts_ptr + i, mask=i < count, other=0) // BLOCK + i
        owner += tl.sum(((i < count) & (first <= block)).to(tl.int32), axis=0)
    return owner


@triton.jit
def extend_kernel(
    q_ptr,  # (T, heads, dim), the last two axes packed
    k_ptr,  # (slots, kv_heads, dim) packed
    v_ptr,
    table_ptr,  # (rows, width) int32
    rows_ptr,  # (B,) int64
    starts_ptr,  # (B + 1,) int64
    prefix_ptr,  # (B,) int64
    out_ptr,  # (T, heads, dim) packed
    scale,
    requests,
    q_stride,
    slot_stride,
    table_stride,
    window,
    HEAD_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WINDOW: tl.constexpr,
):
    TOKENS: tl.constexpr = ROWS // GROUP  # of one request, in this program
    # A request's last tokens see the most positions: they start first, so that none of them is left for the end.
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    heads = tl.num_programs(1) * GROUP
    request = find_owner(starts_ptr, requests, block, TOKENS)
    start = tl.load(starts_ptr + request)
    new = (tl.load(starts_ptr + request + 1) - start).to(tl.int32)
    first = ((block - start // TOKENS - request) * TOKENS).to(tl.int32)  # of its new tokens, the first one here
    if first >= new:
        return
    prefix = tl.load(prefix_ptr + request).to(tl.int32)

    r = tl.arange(0, ROWS)
    d = tl.arange(0, BLOCK_D)
    token = first + r // GROUP
    head = kv_head * GROUP + r % GROUP
    inside = ((token < new) & (r < TOKENS * GROUP))[:, None] & (d < HEAD_DIM)[None, :]
    q_offset = (start + token)[:, None] * q_stride + head[:, None] * HEAD_DIM + d[None, :]
    q = tl.load(q_ptr + q_offset, mask=inside, other=0.0)
    table_row = table_ptr + tl.load(rows_ptr + request) * table_stride
    k_head = k_ptr + kv_head * HEAD_DIM
    v_head = v_ptr + kv_head * HEAD_DIM

    position = prefix + token
    end = prefix + tl.minimum(first + TOKENS, new)
    begin = 0
    whole = (prefix + first + 1) // BLOCK_N * BLOCK_N  # blocks up to here are visible to every row
    if WINDOW:
        begin = tl.maximum(prefix + first - window + 1, 0)
        whole = begin  # the oldest positions are hidden from the last rows: every block needs its mask
    acc = tl.zeros((ROWS, BLOCK_D), dtype=tl.float32)
    best = tl.full((ROWS,), HIDDEN, dtype=tl.float32)
    total = tl.zeros((ROWS,), dtype=tl.float32)
    #              positions  0 ....... prefix ... whole ........ end
    #              rows       [ all visible            ][ ◣ masked ]
    for n in range(begin, whole, BLOCK_N):
        acc, best, total = attend_block(
            q, acc, best, total, k_head, v_head, table_row, n, end, position, scale, slot_stride, window,
            HEAD_DIM, BLOCK_N, BLOCK_D, TAIL=False, CAUSAL=False, WINDOW=False,
        )  # fmt: skip
    for n in range(whole, end, BLOCK_N):
        acc, best, total = attend_block(
            q, acc, best, total, k_head, v_head, table_row, n, end, position, scale, slot_stride, window,
            HEAD_DIM, BLOCK_N, BLOCK_D, TAIL=True, CAUSAL=True, WINDOW=WINDOW,
        )  # fmt: skip
    out = acc / total[:, None]
    out_offset = ((start + token) * heads + head)[:, None] * HEAD_DIM + d[None, :]
    tl.store(out_ptr + out_offset, out.to(out_ptr.dtype.element_ty), mask=inside)


def _extend_room(
    q: Tensor,
    k_buffer: Tensor,
    v_buffer: Tensor,
    table: Tensor,
    rows: Tensor,
    starts: Tensor,
    prefix_lens: Tensor,
    scale: float,
    window: int | None = None,
) -> Tensor:
    check_same_device(q, starts, prefix_lens)
    check_index("starts", starts, len(rows) + 1)
    check_index("prefix_lens", prefix_lens, len(rows))
    assert window is None or window > 0
    return _attention_room(q, k_buffer, v_buffer, table, rows)


@torch.library.custom_op("tinysrt::extend_attention", mutates_args=())
def extend_attention(
    q: Tensor,
    k_buffer: Tensor,
    v_buffer: Tensor,
    table: Tensor,
    rows: Tensor,
    starts: Tensor,
    prefix_lens: Tensor,
    scale: float,
    window: int | None = None,
) -> Tensor:
    out = _extend_room(q, k_buffer, v_buffer, table, rows, starts, prefix_lens, scale, window)
    tokens, heads, dim = q.shape
    kv_heads = k_buffer.shape[1]
    group = heads // kv_heads
    tile = attention_tile(EXTEND, q)
    tile_rows = max(tile.rows, triton.next_power_of_2(group))
    extend_kernel[(tokens // (tile_rows // group) + len(rows), kv_heads)](
        q,
        k_buffer,
        v_buffer,
        table,
        rows,
        starts,
        prefix_lens,
        out,
        scale * math.log2(math.e),
        len(rows),
        q.stride(0),
        k_buffer.stride(0),
        table.stride(0),
        window or 0,
        HEAD_DIM=dim,
        GROUP=group,
        ROWS=tile_rows,
        BLOCK_N=tile.columns,
        BLOCK_D=max(triton.next_power_of_2(dim), 16),
        WINDOW=window is not None,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return out


extend_attention.register_fake(_extend_room)
