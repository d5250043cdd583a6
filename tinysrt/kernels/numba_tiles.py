"""Attention of many query tokens on a processor with AMX: matrix products in tiles, as a GPU's tensor cores do them.

AMX has eight registers of 1 KB, each a tile of 16 rows, and one instruction that counts here:

    C (16 x 16 float32)  +=  A (16 x 32 bf16) · B (32 x 16 bf16)        16,384 products and sums in 16 cycles

B lies in memory as 16 rows of pairs, because the instruction multiplies two neighbours of a row of A at a time:

    row p of B     [ b(2p, 0) b(2p+1, 0) │ b(2p, 1) b(2p+1, 1) │ ... │ b(2p, 15) b(2p+1, 15) ]        64 bytes

So a layer is two launches. `_pack` copies the keys and values that are seen out of the pool, slot by slot, into such
tiles. `_attend` is FlashAttention: a ticket is `ROWS` query rows of one KV head, a row being one query head of one
token (rows of a token lie side by side; they read the same keys). It walks over the keys in blocks of `KEYS`:

    scores = queries · keysᵀ               (ROWS x KEYS, float32: they never leave this core's cache)
    weights = 2^(scores - best)            rounded to bf16; a token's own future weighs 0
    mixed = mixed * shrink + weights · values

What `numba_attention.py` does for other processors writes the scores of a whole block of queries to memory and reads
them back, twice. Source: FlashAttention-2 (Dao 2023); Intel's manual of the instruction set, chapter on AMX.
"""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from torch import Tensor

from tinysrt.kernels.numba_runtime import (
    HIDDEN,
    LOG2_E,
    NO_WINDOW,
    as_float,
    bf16_at,
    clear,
    draw_ticket,
    f32_at,
    float_bits,
    i32_at,
    i64_at,
    inner,
    kernel,
    largest,
    launch,
    narrow,
    scratch,
    tiles_work,
    two_to_the,
)

assert tiles_work(), "whoever imports this has asked"

ROWS = 32  # of queries at once: two tiles
KEYS = 256  # of a block: their scores for `ROWS` queries fill 32 KB
SIDE = 32  # keys are padded to a multiple of this
TILE = 1024  # bytes


# ---- the instructions --------------------------------------------------------------------------------
#
#     registers   [ 0 1 ]  sums, 32 x 32       [ 4 ]  rows of A, 32 x 32        [ 6 7 ]  columns of B, 32 x 32
#                 [ 2 3 ]                      [ 5 ]

_I8, _I64 = ir.IntType(8), ir.IntType(64)
_BYTES = _I8.as_pointer()
_SHAPES = bytes([1, *[0] * 15, *[64, 0] * 8, *[0] * 16, *[16] * 8, *[0] * 8])  # each register: 16 rows of 64 bytes


def _emit(builder, name, *operands):
    kind = ir.FunctionType(ir.VoidType(), [operand.type for operand in operands])
    builder.call(builder.module.declare_intrinsic(f"llvm.x86.{name}", (), kind), operands)


def _each_sum(builder, name, address, stride):
    """Load or store the four tiles of sums: float32, 32 rows, `stride` bytes apart."""
    for register, right, down in (0, 0, 0), (1, 64, 0), (2, 0, 16), (3, 64, 16):
        place = builder.add(builder.add(address, _I64(right)), builder.mul(stride, _I64(down)))
        _emit(builder, name, _I8(register), builder.inttoptr(place, _BYTES), stride)


def _action(emit):
    @intrinsic
    def action(typingctx):
        def generate(context, builder, signature, values):
            emit(context, builder)
            return context.get_dummy_value()

        return types.void(), generate

    return action


def _action_on_sums(name):
    @intrinsic
    def action(typingctx, address, stride):
        def generate(context, builder, signature, values):
            _each_sum(builder, name, *values)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), generate

    return action


tiles_begin = _action(
    lambda context, builder: _emit(builder, "ldtilecfg", context.insert_const_bytes(builder.module, _SHAPES))
)
# Until then Linux saves 8 KB more whenever this thread loses its core.
tiles_end = _action(lambda context, builder: _emit(builder, "tilerelease"))
clear_sums = _action(lambda context, builder: [_emit(builder, "tilezero", _I8(register)) for register in range(4)])
load_sums, store_sums = _action_on_sums("tileloadd64"), _action_on_sums("tilestored64")


@intrinsic
def add_product(typingctx, a, stride, left, right):
    """sums += A · B. A: 32 rows of 32 bf16, `stride` bytes apart; B: two packed tiles, its left and right columns."""

    def generate(context, builder, signature, values):
        a, stride, left, right = values
        lower = builder.add(a, builder.mul(stride, _I64(16)))
        for register, place, step in (4, a, stride), (5, lower, stride), (6, left, _I64(64)), (7, right, _I64(64)):
            _emit(builder, "tileloadd64", _I8(register), builder.inttoptr(place, _BYTES), step)
        for register, rows, columns in (0, 4, 6), (1, 4, 7), (2, 5, 6), (3, 5, 7):
            _emit(builder, "tdpbf16ps", _I8(register), _I8(rows), _I8(columns))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.int64), generate


@intrinsic
def address_of(typingctx, pointer):
    def generate(context, builder, signature, values):
        return builder.ptrtoint(values[0], _I64)

    return types.int64(pointer), generate


class _BFloat(ir.Type):
    """bf16 to LLVM, which then has the processor round sixteen of them at once."""

    def _to_string(self):
        return "bfloat"


@intrinsic
def rounded(typingctx, value):
    """A float32 as bf16. Like `narrow`, but what is smaller than a float32 of full precision (1e-38) becomes 0."""

    def generate(context, builder, signature, values):
        return builder.bitcast(builder.fptrunc(values[0], _BFloat()), ir.IntType(16))

    return types.uint16(types.float32), generate


@intrinsic
def pair_of(typingctx, pointer, low, high):
    """pointer[low] and pointer[high], two bf16, as one word."""

    def generate(context, builder, signature, values):
        pointer, *places = values
        i32 = ir.IntType(32)
        low, high = (builder.zext(builder.load(builder.gep(pointer, [place])), i32) for place in places)
        return builder.or_(low, builder.shl(high, i32(16)))

    return types.int32(pointer, types.int64, types.int64), generate


# ---- the kernels -------------------------------------------------------------------------------------
#
#     args   [ .. │ 2 requests │ 3 rows of the table │ 4 starts │ 5 prefix lengths │ 6 first tiles │ 7 first tickets │
#              8 q │ 9 packed keys │ 10 packed values │ 11 kv heads │ 12 group │ 13 dim │ 14 window │ 15 ... own ]
#
# Packed tiles of a request, KV head by KV head:    keys    [ 16 keys: 32 numbers, 32 numbers .. │ 16 keys .. ]
#                                                   values  [ 32 keys: 16 numbers, 16 numbers .. │ 32 keys .. ]
# Both hold the same number of bytes: padded keys * dim * 2, which are `padded / 32 * dim / 16` tiles.


@inner
def _first_seen(prefix, window):
    """The first position that a token at `prefix` sees."""
    return max(0, prefix - window + 1)


@inner
def _whole(count, piece):
    return (count + piece - 1) // piece * piece


@inner
def _place(start, row, kv_heads, kv_head, group):
    """Where in q and out, (tokens, heads), a request's query row of a KV head is."""
    return ((start + row // group) * kv_heads + kv_head) * group + row % group


@inner
def _request_of(ticket, firsts, requests):
    request = 0
    while request + 1 < requests and firsts[request + 1] <= ticket:
        request += 1
    return request


@inner
def _pack_keys(source, target, slots, count, stride, offset, words):
    """Tile of 16 keys and 32 numbers of each, in words of two numbers: row p holds word p of each key."""
    for key in range(count):
        where = np.int64(slots[key]) * stride + offset
        at = key // 16 * words * 16 + key % 16
        for word in range(words):
            target[at + word * 16] = source[where + word]


@inner
def _pack_values(source, target, slots, count, stride, offset, dim):
    """Tile of 32 keys and 16 numbers of each: row p holds keys 2p and 2p+1, in words of a number of each. Behind the
    last key: zeros, for whatever lay there, times 0, might be NaN."""
    for pair in range(_whole(count, SIDE) // 2):
        at = pair // 16 * dim * 16 + pair % 16 * 16
        key = pair * 2
        if key + 1 < count:
            one, two = np.int64(slots[key]) * stride + offset, np.int64(slots[key + 1]) * stride + offset
            for d in range(0, dim, 16):
                for c in range(16):
                    target[at + d * 16 + c] = pair_of(source, one + d + c, two + d + c)
        else:
            for d in range(0, dim, 16):
                for c in range(16):
                    target[at + d * 16 + c] = 0
            if key < count:
                one = np.int64(slots[key]) * stride + offset
                for d in range(0, dim, 16):
                    for c in range(16):
                        target[at + d * 16 + c] = np.int32(source[one + d + c])


@kernel
def _pack(args):
    """A ticket is the keys or the values of one KV head of one request."""
    rows, starts, prefixes, tiles = i64_at(args[3]), i64_at(args[4]), i64_at(args[5]), i64_at(args[6])
    kv_heads, dim, window, width = args[11], args[13], args[14], args[16]
    while True:
        ticket = draw_ticket(args)
        if ticket >= args[1]:
            break
        request, kv_head = ticket // 2 // kv_heads, ticket // 2 % kv_heads
        first = _first_seen(prefixes[request], window)
        count = prefixes[request] + starts[request + 1] - starts[request] - first
        slots = i32_at(args[15] + (rows[request] * width + first) * 4)
        place = tiles[request] * kv_heads * TILE + kv_head * _whole(count, SIDE) * dim * 2
        if ticket % 2 == 0:
            words = dim // 2
            _pack_keys(
                i32_at(args[17]), i32_at(args[9] + place), slots, count, kv_heads * words, kv_head * words, words
            )
        else:
            _pack_values(bf16_at(args[18]), i32_at(args[10] + place), slots, count, kv_heads * dim, kv_head * dim, dim)


@inner
def _power(x):
    """2^x for x <= 0 to a relative error of 3e-6, a thousandth of what rounding to bf16 takes, and exactly 1 for 0: by
    that, sums shrink in each block where nothing larger came. NaN stays NaN."""
    x = np.float32(-126.0) if x < np.float32(-126.0) else x
    whole = np.int32(x)
    part = x - np.float32(whole)
    power = np.float32(0.00683189)
    power = power * part + np.float32(0.05322358)
    power = power * part + np.float32(0.23945674)
    power = power * part + np.float32(0.69306357)
    power = power * part + np.float32(1.0)
    return power * two_to_the(whole)


@inner
def _weigh_row(scores, weights, begin, end, width, scale, best, total, row):
    """Scores of a row become weights, of which begin .. end - 1 are seen; returns what to shrink earlier sums by."""
    new_best = best[row]
    if begin < end:
        new_best = max(new_best, largest(scores, begin, end, HIDDEN) * scale)
    shrink = _power(best[row] - new_best)
    best[row] = new_best
    summed = np.float32(0.0)
    for j in range(begin, end):
        weight = _power(scores[j] * scale - new_best)
        summed += weight
        weights[j] = rounded(weight)
    total[row] = total[row] * shrink + summed
    clear(weights, 0, begin)
    clear(weights, end, width)
    return shrink


@inner
def _multiply_queries(queries, keys, width, dim, scores):
    """scores (ROWS, KEYS), columns 0 .. width - 1 = queries (ROWS, dim) · packed keysᵀ. All are addresses."""
    for key in range(0, width, 32):
        clear_sums()
        for d in range(0, dim, 32):
            left = keys + (key // 16 * (dim // 32) + d // 32) * TILE
            add_product(queries + d * 2, dim * 2, left, left + dim // 32 * TILE)
        store_sums(scores + key * 4, KEYS * 4)


@inner
def _add_values(weights, values, width, dim, mixed):
    """mixed (ROWS, dim) += weights (ROWS, KEYS), columns 0 .. width - 1, · packed values."""
    for d in range(0, dim, 32):
        load_sums(mixed + d * 4, dim * 4)
        for key in range(0, width, 32):
            left = values + (key // 32 * (dim // 16) + d // 16) * TILE
            add_product(weights + key * 2, KEYS * 2, left, left + TILE)
        store_sums(mixed + d * 4, dim * 4)


@kernel
def _attend(args):
    starts, prefixes, tiles, tickets = i64_at(args[4]), i64_at(args[5]), i64_at(args[6]), i64_at(args[7])
    q, out, scale = bf16_at(args[8]), bf16_at(args[15]), as_float(args[16])
    kv_heads, group, dim, window = args[11], args[12], args[13], args[14]
    best, total, mixed = scratch(ROWS), scratch(ROWS), scratch(ROWS * dim)
    scores = address_of(scratch(ROWS * KEYS))
    weights, queries = address_of(scratch(ROWS * KEYS // 2)), address_of(scratch(ROWS * dim // 2))
    tiles_begin()
    while True:
        ticket = draw_ticket(args)
        if ticket >= args[1]:
            break
        request = _request_of(ticket, tickets, args[2])
        new = starts[request + 1] - starts[request]
        in_request, per_head = ticket - tickets[request], _whole(new * group, ROWS) // ROWS
        kv_head, first_row = in_request // per_head, in_request % per_head * ROWS
        count = min(ROWS, new * group - first_row)
        for row in range(ROWS):
            best[row], total[row] = HIDDEN, np.float32(0.0)
            at = _place(starts[request], min(first_row + row, new * group - 1), kv_heads, kv_head, group) * dim
            target = bf16_at(queries + row * dim * 2)
            for d in range(dim):
                target[d] = q[at + d]
                mixed[row * dim + d] = np.float32(0.0)
        # Columns count from the first position that is packed. Row r sees columns up to before + r // group.
        before = prefixes[request] - _first_seen(prefixes[request], window)
        size = _whole(before + new, SIDE) * dim * 2  # bytes
        packed = tiles[request] * kv_heads * TILE + kv_head * size
        end = before + (first_row + count - 1) // group + 1
        begin = max(0, before + first_row // group + 1 - window) // SIDE * SIDE
        for block in range(begin, end, KEYS):
            width = min(KEYS, _whole(end - block, SIDE))
            _multiply_queries(queries, args[9] + packed + block * dim * 2, width, dim, scores)
            for row in range(ROWS):
                last = before + (first_row + row) // group + 1 - block
                shrink = _weigh_row(
                    f32_at(scores + row * KEYS * 4), bf16_at(weights + row * KEYS * 2),
                    min(max(0, last - window), width), max(0, min(last, width)), width, scale, best, total, row,
                )  # fmt: skip
                for d in range(row * dim, (row + 1) * dim):
                    mixed[d] *= shrink
            _add_values(weights, args[10] + packed + block * dim * 2, width, dim, address_of(mixed))
        for row in range(count):
            at = _place(starts[request], first_row + row, kv_heads, kv_head, group) * dim
            for d in range(dim):
                out[at + d] = narrow(out, mixed[row * dim + d] / total[row])
    tiles_end()


def extend_in_tiles(
    q: Tensor,
    k_buffer: Tensor,
    v_buffer: Tensor,
    table: Tensor,
    rows: Tensor,
    starts: Tensor,
    prefix_lens: Tensor,
    scale: float,
    window: int | None,
) -> Tensor:
    """As `reference.extend_attention`, for bf16 and head sizes that are a multiple of 32."""
    assert q.dtype == k_buffer.dtype == v_buffer.dtype == torch.bfloat16
    assert q.is_contiguous() and k_buffer.is_contiguous() and v_buffer.is_contiguous()
    heads, dim = q.shape[1:]
    kv_heads, requests = k_buffer.shape[1], len(rows)
    group, seen_by_one = heads // kv_heads, window or NO_WINDOW
    out = torch.empty_like(q)
    bounds, prefixes = starts.tolist(), prefix_lens.tolist()
    news = [end - start for start, end in zip(bounds, bounds[1:], strict=False)]
    seen = [new + min(before, seen_by_one - 1) for new, before in zip(news, prefixes, strict=True)]
    tiles = [0, *accumulate(-(-count // SIDE) * (dim // 16) for count in seen)]
    tickets = [0, *accumulate(-(-new * group // ROWS) * kv_heads for new in news)]
    firsts = torch.tensor([tiles, tickets])
    packed = torch.empty(2, tiles[-1] * kv_heads * TILE // 2, dtype=q.dtype)
    shared = (
        requests, rows.data_ptr(), starts.data_ptr(), prefix_lens.data_ptr(), firsts[0].data_ptr(),
        firsts[1].data_ptr(), q.data_ptr(), packed[0].data_ptr(), packed[1].data_ptr(), kv_heads, group, dim,
        seen_by_one,
    )  # fmt: skip
    launch(
        _pack, 2 * kv_heads * requests, *shared, table.data_ptr(), table.stride(0), k_buffer.data_ptr(),
        v_buffer.data_ptr(),
    )  # fmt: skip
    launch(_attend, tickets[-1], *shared, out.data_ptr(), float_bits(scale * float(LOG2_E)))
    return out
