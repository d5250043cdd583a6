"""Paged attention on the CPU: online softmax over blocks of keys, in two shapes.

    decode   one query token per request. A ticket is one KV head of one request, or all of them where there are tickets
             enough. Memory is what costs: each key and value is read once, widened once, and used by all query heads of
             its group.
    extend   many query tokens of a request. Arithmetic is what costs: two matrix products per block of queries, for
             which processors have instructions that no loop reaches (AVX512-BF16). So PyTorch's oneDNN computes the
             products, and kernels do what lies around them: gather, weigh, hand out. (A prompt without a prefix is
             left to PyTorch whole.) Where there is AMX, `numba_tiles.py` does it all, twice as fast.

Decode keeps, for each query, the largest score so far `best`, the sum of weights `total` and the weighted sum of values
`mixed`, and walks over its keys once. A larger score scales down what has been summed:

    new_best = max(best, scores)     shrink = 2^(best - new_best)     weight_j = 2^(score_j - new_best)
    total = total * shrink + Σ weight_j       mixed = mixed * shrink + Σ weight_j * value_j

Powers of two, because their whole part is the exponent of a float; the queries are multiplied by log2(e) beforehand.
A block's slots come from the index table, so pages of any size may lie anywhere. Meaning: `reference.py`.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tinysrt.kernels.numba_runtime import (
    BF16,
    HIDDEN,
    LOG2_E,
    NO_WINDOW,
    as_float,
    bf16_at,
    clear,
    draw_ticket,
    exp2,
    f32_at,
    float_bits,
    format_of,
    i32_at,
    i64_at,
    inner,
    kernel,
    largest,
    launch,
    narrow,
    prefetch,
    scratch,
    tiles_work,
    unfolded,
    widen,
)

if tiles_work():  # elsewhere it does not compile
    from tinysrt.kernels.numba_tiles import extend_in_tiles

KEYS = 64  # keys per block: their scores of one query fill four AVX-512 registers
AHEAD = 8  # keys between asking for one and using it


@inner
def _shrink_and_weigh(scores, row, count, best, total, mixed, dim):
    """Turn the scores of one query into weights, and scale down what it has summed so far."""
    start = row * KEYS
    new_best = largest(scores, start, start + count, best[row])
    shrink = exp2(best[row] - new_best)
    best[row] = new_best
    weights = np.float32(0.0)
    for j in range(start, start + count):
        weight = exp2(scores[j] - new_best)
        scores[j] = weight
        weights += weight
    total[row] = total[row] * shrink + weights
    for d in range(row * dim, (row + 1) * dim):
        mixed[d] *= shrink


@unfolded
def _widen_four(buffer, slots, begin, last, stride, offset, dim, four):
    """The keys (or values) of positions begin .. begin + 3 as float32, side by side; beyond the end, the last again."""
    for i in range(4):
        where = np.int64(slots[min(begin + i, last - 1)]) * stride + offset
        for d in range(dim):
            four[i * dim + d] = widen(buffer, where + d)


@unfolded
def _score_four(query, row, four, dim, scores, at):
    a, b, c, e = np.float32(0.0), np.float32(0.0), np.float32(0.0), np.float32(0.0)
    for d in range(dim):
        value = query[row * dim + d]
        a += value * four[d]
        b += value * four[dim + d]
        c += value * four[2 * dim + d]
        e += value * four[3 * dim + d]
    scores[at], scores[at + 1], scores[at + 2], scores[at + 3] = a, b, c, e


@unfolded
def _mix_four(mixed, row, four, dim, scores, at):
    a, b, c, e = scores[at], scores[at + 1], scores[at + 2], scores[at + 3]
    for d in range(dim):
        mixed[row * dim + d] += a * four[d] + b * four[dim + d] + c * four[2 * dim + d] + e * four[3 * dim + d]


@unfolded
def _decode_heads(q, k, v, out, slots, first, last, start, kv_head, kv_heads, group, stride, dim, scale, room):
    """One request's query token with the query heads of `kv_heads` KV heads from `kv_head` on: q[start ...].

    Positions first .. last-1 are seen; a slot is `stride` numbers long. Keys and values are taken four at a time, so
    that a query is read, and a sum of values read and written, once for four of them.
    """
    query, four, scores, best, total, mixed = room
    for i in range(kv_heads * group * dim):
        query[i] = widen(q, start + i) * scale
        mixed[i] = np.float32(0.0)
    for row in range(kv_heads * group):
        best[row], total[row] = HIDDEN, np.float32(0.0)
    for begin in range(first, last, KEYS):
        count = min(KEYS, last - begin)
        for j in range(0, count, 4):
            # Slots lie anywhere, so the processor cannot guess them: name the keys needed soon and these keys' values.
            for i in range(begin + j, begin + j + 4):
                ahead = np.int64(slots[min(i + AHEAD, last - 1)]) * stride + kv_head * dim
                here = np.int64(slots[min(i, last - 1)]) * stride + kv_head * dim
                for line in range(0, kv_heads * dim, 16):
                    prefetch(k, ahead + line)
                    prefetch(v, here + line)
            for h in range(kv_heads):
                _widen_four(k, slots, begin + j, last, stride, (kv_head + h) * dim, dim, four)
                for row in range(h * group, (h + 1) * group):
                    _score_four(query, row, four, dim, scores, row * KEYS + j)
        for row in range(kv_heads * group):
            _shrink_and_weigh(scores, row, count, best, total, mixed, dim)
            for j in range(row * KEYS + count, row * KEYS + (count + 3) // 4 * 4):
                scores[j] = np.float32(0.0)
        for j in range(0, count, 4):
            for h in range(kv_heads):
                _widen_four(v, slots, begin + j, last, stride, (kv_head + h) * dim, dim, four)
                for row in range(h * group, (h + 1) * group):
                    _mix_four(mixed, row, four, dim, scores, row * KEYS + j)
    for row in range(kv_heads * group):
        for d in range(dim):
            out[start + row * dim + d] = narrow(out, mixed[row * dim + d] / total[row])


@kernel
def _decode_attention(args):
    rows, seq_lens = i64_at(args[7]), i64_at(args[8])
    heads, kv_heads, dim, width = args[10], args[11], args[12], args[13]
    scale, window, at_once = as_float(args[14]), args[15], args[16]
    group, stride = heads // kv_heads, kv_heads * dim
    most = at_once * group
    query, four, mixed = scratch(most * dim), scratch(4 * dim), scratch(most * dim)
    scores, best, total = scratch(most * KEYS), scratch(most), scratch(most)
    room = (query, four, scores, best, total, mixed)
    parts = kv_heads // at_once
    while True:
        ticket = draw_ticket(args)
        if ticket >= args[1]:
            break
        lane, kv_head = ticket // parts, ticket % parts * at_once
        slots = i32_at(args[6] + rows[lane] * width * 4)
        last = seq_lens[lane]
        first = max(0, last - window)
        start = (lane * heads + kv_head * group) * dim
        if args[2] == BF16:
            q, k, v, out = bf16_at(args[3]), bf16_at(args[4]), bf16_at(args[5]), bf16_at(args[9])
            if dim == 64:
                _decode_heads(q, k, v, out, slots, first, last, start, kv_head, at_once, group, stride, 64, scale, room)
            else:
                _decode_heads(
                    q, k, v, out, slots, first, last, start, kv_head, at_once, group, stride, dim, scale, room
                )
        else:
            q_, k_, v_, out_ = f32_at(args[3]), f32_at(args[4]), f32_at(args[5]), f32_at(args[9])
            _decode_heads(
                q_, k_, v_, out_, slots, first, last, start, kv_head, at_once, group, stride, dim, scale, room
            )


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
    lanes, heads, dim = q.shape
    kv_heads = k_buffer.shape[1]
    out = torch.empty(q.shape, dtype=q.dtype)
    # The heads of a slot lie side by side: take them together, unless that leaves threads without work.
    at_once = kv_heads if lanes >= 4 * torch.get_num_threads() else 1
    launch(
        _decode_attention, lanes * kv_heads // at_once, format_of(q), q.data_ptr(), k_buffer.data_ptr(),
        v_buffer.data_ptr(), table.data_ptr(), rows.data_ptr(), seq_lens.data_ptr(), out.data_ptr(),
        heads, kv_heads, dim, table.stride(0),
        float_bits(scale * float(LOG2_E)), window or NO_WINDOW, at_once,
    )  # fmt: skip
    return out


# ---- extend ------------------------------------------------------------------------------------------
#
#                          keys of the request: prefix and new tokens, gathered, KV head by KV head
#                          0 ........................ column ....... padded
#     block of queries     [ all visible ............ │ ◣            │ 0 0 ]   scores = queries · keysᵀ      (oneDNN)
#     row = token, head    [ weights: 2^(score - best)│ ◣  0   0   0 │ 0 0 ]   in place, sum in `totals`     (_weigh)
#     of its group                                                             mixed = weights · values      (oneDNN)
#                                                                              out = mixed / total           (_hand_out)

QUERIES = 256  # tokens of a block, at most,
SCORES = 1 << 24  # and as many as give so many scores
PIECE = 32  # a block has so many tokens or a multiple,
PADDING = 64  # keys likewise: oneDNN compiles a product anew for each shape, a millisecond each, so let them be few
WEIGHED = 16  # rows of a ticket
HANDED = 32  # tokens of a ticket


@inner
def _copy_head(source, target, slots, count, padded, stride, offset, dim):
    """One KV head of positions 0 .. count - 1, and zeros behind them: whatever lay there, times 0, might be NaN."""
    for j in range(count):
        where = np.int64(slots[j]) * stride + offset
        for d in range(dim):
            target[j * dim + d] = source[where + d]
    clear(target, count * dim, padded * dim)


@kernel
def _gather(args):
    """A ticket is one KV head's keys (even) or values (odd)."""
    slots, count, padded, kv_heads, dim = i32_at(args[7]), args[8], args[9], args[10], args[11]
    while True:
        ticket = draw_ticket(args)
        if ticket >= args[1]:
            break
        which, kv_head = ticket % 2, ticket // 2
        place = args[5 + which] + kv_head * padded * dim * args[2]
        stride, offset = kv_heads * dim, kv_head * dim
        if args[2] == BF16:
            _copy_head(bf16_at(args[3 + which]), bf16_at(place), slots, count, padded, stride, offset, dim)
        else:
            _copy_head(f32_at(args[3 + which]), f32_at(place), slots, count, padded, stride, offset, dim)


@inner
def _weigh_row(scores, begin, end, width, scale):
    """Scores begin .. end - 1 become weights, the largest 1; the others, not seen, become 0. Returns their sum."""
    best = largest(scores, begin, end, HIDDEN)
    total = np.float32(0.0)
    for j in range(begin, end):
        weight = exp2((widen(scores, j) - best) * scale)
        total += weight
        scores[j] = narrow(scores, weight)
    clear(scores, 0, begin)
    clear(scores, end, width)
    return total


@kernel
def _weigh(args):
    """Row r of a head belongs to token r // group of the block, which sees columns up to column + r // group."""
    totals, rows, width, group = f32_at(args[4]), args[5], args[6], args[7]
    column, window, scale, all_rows = args[8], args[9], as_float(args[10]), args[11]
    while True:
        ticket = draw_ticket(args)
        if ticket >= args[1]:
            break
        for row in range(ticket * WEIGHED, min((ticket + 1) * WEIGHED, all_rows)):
            end = column + row % rows // group + 1
            begin = max(0, end - window)
            place = args[3] + row * width * args[2]
            if args[2] == BF16:
                totals[row] = _weigh_row(bf16_at(place), min(begin, width), min(end, width), width, scale)
            else:
                totals[row] = _weigh_row(f32_at(place), min(begin, width), min(end, width), width, scale)


@inner
def _divide_row(mixed, out, at, total, dim):
    for d in range(dim):
        out[at + d] = narrow(out, widen(mixed, d) / total)


@kernel
def _hand_out(args):
    """Rows of `mixed`, (kv heads, tokens * group), to their places in `out`. A ticket: `HANDED` tokens of a KV head."""
    totals, rows, group, count, heads, dim = f32_at(args[5]), args[6], args[7], args[8], args[9], args[10]
    parts = args[1] * group // heads
    while True:
        ticket = draw_ticket(args)
        if ticket >= args[1]:
            break
        kv_head, first = ticket // parts, ticket % parts * HANDED
        for row in range(first * group, min(first + HANDED, count) * group):
            source = args[3] + (kv_head * rows + row) * dim * args[2]
            at = (row // group * heads + kv_head * group + row % group) * dim
            total = totals[kv_head * rows + row]
            if args[2] == BF16:
                _divide_row(bf16_at(source), bf16_at(args[4]), at, total, dim)
            else:
                _divide_row(f32_at(source), f32_at(args[4]), at, total, dim)


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
    if tiles_work() and q.dtype == torch.bfloat16 and q.shape[2] % 32 == 0:
        return extend_in_tiles(q, k_buffer, v_buffer, table, rows, starts, prefix_lens, scale, window)
    out = torch.empty_like(q)
    bounds = starts.tolist()
    for row, prefix, start, end in zip(rows.tolist(), prefix_lens.tolist(), bounds, bounds[1:], strict=False):
        mine = slice(start, end)
        if start == end:
            continue
        if prefix == 0 and (window is None or end <= start + window):
            _extend_alone(q[mine], k_buffer, v_buffer, table[row, : end - start], out[mine], scale)
        else:
            _extend_in_blocks(q[mine], k_buffer, v_buffer, table[row], prefix, out[mine], scale, window)
    return out


def _extend_alone(q: Tensor, k_buffer: Tensor, v_buffer: Tensor, slots: Tensor, out: Tensor, scale: float) -> None:
    """Nothing before these tokens: PyTorch's own causal attention, which starts faster than blocks do."""
    shape = len(q), k_buffer.shape[1], -1, q.shape[2]
    grouped = q.view(shape).permute(2, 1, 0, 3)  # (group, kv_heads, new, dim): the group's heads read the same keys
    k, v = (
        buffer.index_select(0, slots).transpose(0, 1).expand(len(grouped), -1, -1, -1)
        for buffer in (k_buffer, v_buffer)
    )
    attended = F.scaled_dot_product_attention(grouped, k, v, is_causal=True, scale=scale)
    out.view(shape).copy_(attended.permute(2, 1, 0, 3))


def _extend_in_blocks(
    q: Tensor,
    k_buffer: Tensor,
    v_buffer: Tensor,
    slots: Tensor,
    prefix: int,
    out: Tensor,
    scale: float,
    window: int | None,
) -> None:
    new, heads, dim = q.shape
    kv_heads, format_ = k_buffer.shape[1], format_of(q)
    group = heads // kv_heads
    first = 0 if window is None else max(0, prefix - window + 1)  # of the positions that these tokens see
    seen = prefix + new - first
    padded = _whole(seen, PADDING)
    keys, values = q.new_empty(2, kv_heads, padded, dim)
    launch(
        _gather, 2 * kv_heads, format_, k_buffer.data_ptr(), v_buffer.data_ptr(), keys.data_ptr(), values.data_ptr(),
        slots[first:].data_ptr(), seen, padded, kv_heads, dim,
    )  # fmt: skip
    queries = q.new_empty(kv_heads, _whole(new, PIECE), group, dim)
    queries[:, :new] = q.view(new, kv_heads, group, dim).transpose(0, 1)
    queries = queries.view(kv_heads, -1, dim)  # what its last rows give is never read
    keys = keys.transpose(1, 2)
    block = max(PIECE, min(QUERIES, SCORES // (heads * padded) // PIECE * PIECE))
    for begin in range(0, new, block):
        count = min(block, new - begin)
        column = prefix - first + begin
        width = min(padded, _whole(column + count, PADDING))
        scores = torch.bmm(queries[:, begin * group : (begin + block) * group], keys[:, :, :width])
        rows = scores.shape[1]
        totals = torch.empty(kv_heads * rows)
        launch(
            _weigh, -(-kv_heads * rows // WEIGHED), format_, scores.data_ptr(), totals.data_ptr(), rows, width, group,
            column, window or NO_WINDOW, float_bits(scale * float(LOG2_E)), kv_heads * rows,
        )  # fmt: skip
        mixed = torch.bmm(scores, values[:, :width])
        launch(
            _hand_out, -(-count // HANDED) * kv_heads, format_, mixed.data_ptr(), out[begin].data_ptr(),
            totals.data_ptr(), rows, group, count, heads, dim,
        )  # fmt: skip


def _whole(count: int, piece: int) -> int:
    return -(-count // piece) * piece
