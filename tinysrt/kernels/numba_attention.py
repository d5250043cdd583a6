"""Paged attention on the CPU: online softmax over blocks of keys, in two shapes.

    decode   one query token per request. A ticket is one KV head of one request. Memory is what costs: each key and
             value is read once, widened once, and used by all query heads of its group.
    extend   many query tokens. A ticket is one KV head of `QUERIES` tokens of one request. Arithmetic is what costs:
             a block of keys is laid out transposed, so that scores of 64 keys grow side by side in vector registers.

Both keep, for each query, the largest score so far `best`, the sum of weights `total` and the weighted sum of values
`mixed`, and walk over its keys once. A larger score scales down what has been summed:

    new_best = max(best, scores)     shrink = 2^(best - new_best)     weight_j = 2^(score_j - new_best)
    total = total * shrink + Σ weight_j       mixed = mixed * shrink + Σ weight_j * value_j

Powers of two, because their whole part is the exponent of a float; the queries are multiplied by log2(e) beforehand.
A block's slots come from the index table, so pages of any size may lie anywhere. Meaning: `reference.py`.
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
    i32_at,
    i64_at,
    inner,
    kernel,
    largest,
    launch,
    narrow,
    prefetch,
    scratch,
    unfolded,
    widen,
)

KEYS = 64  # keys per block: their scores of one query fill four AVX-512 registers
QUERIES = 16  # query tokens per ticket of an extend
AHEAD = 8  # keys between asking for one and using it
HIDDEN = np.float32(-1e30)  # score of a key that is not seen; finite, because -inf - -inf is no number
NO_WINDOW = 1 << 62


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


@inner
def _extend_block(q, k, v, out, slots, position, token, tokens, kv_head, group, kv_heads, dim, scale, window, room):
    """Query tokens token .. token + tokens - 1 of q, the first at `position`, with the heads of one KV head.

    Row r of the scratch is query head r % group of the token r // group. A block of keys may be seen by a part of the
    rows only: the causal diagonal, or the edge of a window, crosses it. Its other scores are hidden.
    """
    query, keys, scores, best, total, mixed = room
    heads = kv_heads * group
    count_rows = tokens * group
    for r in range(count_rows):
        start = ((token + r // group) * heads + kv_head * group + r % group) * dim
        for d in range(dim):
            query[r * dim + d] = widen(q, start + d) * scale
            mixed[r * dim + d] = np.float32(0.0)
        best[r], total[r] = HIDDEN, np.float32(0.0)
    for begin in range(max(0, position - window + 1), position + tokens, KEYS):
        count = min(KEYS, position + tokens - begin)
        for j in range(count):
            where = (np.int64(slots[begin + j]) * kv_heads + kv_head) * dim
            for d in range(dim):
                keys[d * KEYS + j] = widen(k, where + d)
        for r in range(count_rows):
            row = r * KEYS
            for j in range(count):
                scores[row + j] = np.float32(0.0)
            for d in range(0, dim, 2):  # two at a time: half the trips of a score to memory. `dim` is even: it rotates.
                a, b = query[r * dim + d], query[r * dim + d + 1]
                for j in range(count):
                    scores[row + j] += a * keys[d * KEYS + j] + b * keys[(d + 1) * KEYS + j]
            mine = position + r // group
            if begin + count > mine + 1 or begin <= mine - window:
                for j in range(count):
                    if begin + j > mine or begin + j <= mine - window:
                        scores[row + j] = HIDDEN
        for r in range(count_rows):
            _shrink_and_weigh(scores, r, count, best, total, mixed, dim)
        for j in range(count):
            where = (np.int64(slots[begin + j]) * kv_heads + kv_head) * dim
            for d in range(dim):
                keys[j * dim + d] = widen(v, where + d)
        for r in range(count_rows):
            row, target = r * KEYS, r * dim
            for j in range(0, count - 1, 2):
                a, b = scores[row + j], scores[row + j + 1]
                for d in range(dim):
                    mixed[target + d] += a * keys[j * dim + d] + b * keys[(j + 1) * dim + d]
            if count % 2:
                a = scores[row + count - 1]
                for d in range(dim):
                    mixed[target + d] += a * keys[(count - 1) * dim + d]
    for r in range(count_rows):
        start = ((token + r // group) * heads + kv_head * group + r % group) * dim
        for d in range(dim):
            out[start + d] = narrow(out, mixed[r * dim + d] / total[r])


@kernel
def _extend_attention(args):
    table, rows, starts, prefix_lens = args[6], i64_at(args[7]), i64_at(args[8]), i64_at(args[9])
    heads, kv_heads, dim, width = args[11], args[12], args[13], args[14]
    scale, window, requests = as_float(args[15]), args[16], args[17]
    group = heads // kv_heads
    most = QUERIES * group
    query, keys, mixed = scratch(most * dim), scratch(KEYS * dim), scratch(most * dim)
    scores, best, total = scratch(most * KEYS), scratch(most), scratch(most)
    room = (query, keys, scores, best, total, mixed)
    while True:
        ticket = draw_ticket(args)
        if ticket >= args[1]:
            break
        # Latest tokens first: they see the most keys, and a long ticket should not be the last one drawn.
        block, kv_head = (args[1] - 1 - ticket) // kv_heads, ticket % kv_heads
        request = 0
        while request < requests:
            blocks = (starts[request + 1] - starts[request] + QUERIES - 1) // QUERIES
            if block < blocks:
                break
            block -= blocks
            request += 1
        if request == requests:
            continue  # the number of tickets is an upper bound
        offset = block * QUERIES
        token = starts[request] + offset
        tokens = min(QUERIES, starts[request + 1] - token)
        position = prefix_lens[request] + offset
        slots = i32_at(table + rows[request] * width * 4)
        if args[2] == BF16:
            q, k, v, out = bf16_at(args[3]), bf16_at(args[4]), bf16_at(args[5]), bf16_at(args[10])
            _extend_block(
                q, k, v, out, slots, position, token, tokens, kv_head, group, kv_heads, dim, scale, window, room
            )
        else:
            q_, k_, v_, out_ = f32_at(args[3]), f32_at(args[4]), f32_at(args[5]), f32_at(args[10])
            _extend_block(
                q_, k_, v_, out_, slots, position, token, tokens, kv_head, group, kv_heads, dim, scale, window, room
            )


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
    tokens, heads, dim = q.shape
    kv_heads, requests = k_buffer.shape[1], len(rows)
    out = torch.empty(q.shape, dtype=q.dtype)
    most_blocks = tokens // QUERIES + requests  # each request has at most one block that is not full
    launch(
        _extend_attention, most_blocks * kv_heads, format_of(q), q.data_ptr(), k_buffer.data_ptr(), v_buffer.data_ptr(),
        table.data_ptr(), rows.data_ptr(), starts.data_ptr(), prefix_lens.data_ptr(), out.data_ptr(), heads, kv_heads,
        dim, table.stride(0), float_bits(scale * float(LOG2_E)), window or NO_WINDOW, requests,
    )  # fmt: skip
    return out
