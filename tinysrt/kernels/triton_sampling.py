"""sample_tokens in Triton: softmax, top-k, top-p, min-p and the draw, one program per row, without sorting.

What the filters keep is always the best tokens down to some weight: ranks below k, mass before at most p and weights
above min_p times the best are each true down to a point and false after it. So the vocabulary needs no sort, only that
point, the smallest weight v of which

    count(weights > v) < k   and   sum(weights > v) <= p * total   and   v >= min_p * best

still holds. A positive float32 and its bit pattern, read as an integer, have the same order, so the search goes over
integers, two bits at a time from the top: fifteen passes over the row settle all thirty bits, exactly. A row without
filters skips it. Tokens that tie at v are kept in the order of their ids, as many as the conditions still allow.

The draw is the inverse transform in the order of ids: one uniform number picks the token at which the running sum of
the kept weights passes uniform * total. Nothing but the row's logits, parameters and number decides it.

SGLang calls FlashInfer here, which draws by rejection, in rounds. `reference.sample_tokens` sorts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tinysrt.kernels.triton_tiles import check_index, check_packed, check_same_device

BLOCK = 4096
TOP_BITS = 28  # weights are at most 1.0, bit pattern 0x3F800000: bits 28 and 29 are the highest that matter


@triton.jit
def weights_of(row_ptr, column, vocab, best, temperature):
    """softmax numerators, at most 1. Every pass computes them alike, to the bit."""
    logits = tl.load(row_ptr + column, mask=column < vocab, other=float("-inf"))
    return tl.exp((logits - best) / temperature)


@triton.jit
def sample_kernel(
    logits_ptr,  # (B, vocab) float32
    temperatures_ptr,  # (B,) float32
    top_k_ptr,  # (B,) int64
    top_p_ptr,  # (B,) float32
    min_p_ptr,  # (B,) float32
    uniforms_ptr,  # (B,) float64
    out_ptr,  # (B,) int64
    row_stride,
    vocab,
    BLOCK: tl.constexpr,
    TOP_BITS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * row_stride
    temperature = tl.load(temperatures_ptr + row)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    min_p = tl.load(min_p_ptr + row)
    column = tl.arange(0, BLOCK)

    best = tl.full((BLOCK,), float("-inf"), dtype=tl.float32)
    for begin in range(0, vocab, BLOCK):
        best = tl.maximum(best, tl.load(row_ptr + begin + column, mask=begin + column < vocab, other=float("-inf")))
    best = tl.max(best, axis=0)

    lowest = tl.zeros((), dtype=tl.int32)  # bit pattern of v
    tied = vocab.to(tl.int64)  # how many tokens of weight v are kept
    if (top_k < vocab) | (top_p < 1.0) | (min_p > 0.0):
        mass = tl.zeros((BLOCK,), dtype=tl.float32)
        for begin in range(0, vocab, BLOCK):
            mass += weights_of(row_ptr, begin + column, vocab, best, temperature)
        allowed = tl.sum(mass, axis=0) * top_p
        if top_p >= 1.0:
            allowed = float("inf")
        floor = tl.maximum(min_p, 0.0).to(tl.int32, bitcast=True)
        # `lowest` grows to the largest pattern that is *not* kept; one above it is v.
        for step in range(0, TOP_BITS + 2, 2):
            unit = 1 << (TOP_BITS - step)
            count_1 = tl.zeros((BLOCK,), dtype=tl.int32)
            count_2 = tl.zeros((BLOCK,), dtype=tl.int32)
            count_3 = tl.zeros((BLOCK,), dtype=tl.int32)
            mass_1 = tl.zeros((BLOCK,), dtype=tl.float32)
            mass_2 = tl.zeros((BLOCK,), dtype=tl.float32)
            mass_3 = tl.zeros((BLOCK,), dtype=tl.float32)
            for begin in range(0, vocab, BLOCK):
                weights = weights_of(row_ptr, begin + column, vocab, best, temperature)
                bits = weights.to(tl.int32, bitcast=True)
                above = bits > lowest + unit
                count_1 += above.to(tl.int32)
                mass_1 += tl.where(above, weights, 0.0)
                above = bits > lowest + 2 * unit
                count_2 += above.to(tl.int32)
                mass_2 += tl.where(above, weights, 0.0)
                above = bits > lowest + 3 * unit
                count_3 += above.to(tl.int32)
                mass_3 += tl.where(above, weights, 0.0)
            # All three conditions fail from some pattern downwards, so the digits that fail can be counted.
            keep_1 = (tl.sum(count_1, axis=0) < top_k) & (tl.sum(mass_1, axis=0) <= allowed)
            keep_2 = (tl.sum(count_2, axis=0) < top_k) & (tl.sum(mass_2, axis=0) <= allowed)
            keep_3 = (tl.sum(count_3, axis=0) < top_k) & (tl.sum(mass_3, axis=0) <= allowed)
            digits = 3 - (keep_1 & (lowest + unit >= floor)).to(tl.int32)
            digits -= (keep_2 & (lowest + 2 * unit >= floor)).to(tl.int32)
            digits -= (keep_3 & (lowest + 3 * unit >= floor)).to(tl.int32)
            lowest += digits * unit
        lowest += 1
        count = tl.zeros((BLOCK,), dtype=tl.int32)
        mass = tl.zeros((BLOCK,), dtype=tl.float32)
        for begin in range(0, vocab, BLOCK):
            weights = weights_of(row_ptr, begin + column, vocab, best, temperature)
            above = weights.to(tl.int32, bitcast=True) > lowest
            count += above.to(tl.int32)
            mass += tl.where(above, weights, 0.0)
        tied = top_k - tl.sum(count, axis=0)
        room = (allowed - tl.sum(mass, axis=0)) / lowest.to(tl.float32, bitcast=True)  # j tied ones before: j * v more
        tied = tl.minimum(tied, tl.minimum(room, 1.0e9).to(tl.int64) + 1)

    total = tl.zeros((BLOCK,), dtype=tl.float64)
    seen = tl.zeros((), dtype=tl.int64)  # tied tokens of smaller ids
    for begin in range(0, vocab, BLOCK):
        weights = weights_of(row_ptr, begin + column, vocab, best, temperature)
        bits = weights.to(tl.int32, bitcast=True)
        ties = (bits == lowest).to(tl.int32)
        kept = (bits > lowest) | ((bits == lowest) & (seen + tl.cumsum(ties, axis=0) <= tied))
        seen += tl.sum(ties, axis=0)
        total += tl.where(kept, weights, 0.0).to(tl.float64)
    target = tl.sum(total, axis=0) * tl.load(uniforms_ptr + row)

    # The first id whose running sum exceeds the target. Sums here are taken in another order than above, so the last
    # bits may differ: where no sum exceeds the target, it is the last id that has any weight.
    running = tl.zeros((), dtype=tl.float64)
    chosen = tl.full((), vocab, dtype=tl.int32)
    last = tl.zeros((), dtype=tl.int32)
    seen = tl.zeros((), dtype=tl.int64)
    for begin in range(0, vocab, BLOCK):
        weights = weights_of(row_ptr, begin + column, vocab, best, temperature)
        bits = weights.to(tl.int32, bitcast=True)
        ties = (bits == lowest).to(tl.int32)
        kept = (bits > lowest) | ((bits == lowest) & (seen + tl.cumsum(ties, axis=0) <= tied))
        seen += tl.sum(ties, axis=0)
        weights = tl.where(kept, weights, 0.0).to(tl.float64)
        sums = running + tl.cumsum(weights, axis=0)
        has_weight = weights > 0.0
        chosen = tl.minimum(chosen, tl.min(tl.where(has_weight & (sums > target), begin + column, vocab), axis=0))
        last = tl.maximum(last, tl.max(tl.where(has_weight, begin + column, 0), axis=0))
        running = tl.max(sums, axis=0)
    tl.store(out_ptr + row, tl.minimum(chosen, last).to(tl.int64))


def _sample_room(
    logits: Tensor, temperatures: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniforms: Tensor
) -> Tensor:
    check_same_device(logits, temperatures, top_k, top_p, min_p, uniforms)
    assert logits.dim() == 2 and logits.dtype == torch.float32
    check_packed("logits", logits, 1)
    for name, tensor in (("temperatures", temperatures), ("top_p", top_p), ("min_p", min_p)):
        check_index(name, tensor, len(logits), dtype=torch.float32)
    check_index("top_k", top_k, len(logits))
    check_index("uniforms", uniforms, len(logits), dtype=torch.float64)
    return torch.empty(len(logits), dtype=torch.int64, device=logits.device)


@torch.library.custom_op("tinysrt::sample_tokens", mutates_args=())
def sample_tokens(
    logits: Tensor, temperatures: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniforms: Tensor
) -> Tensor:
    """(B,) int64. A row of NaN yields some id of the vocabulary: whoever calls has to look for NaN anyway."""
    out = _sample_room(logits, temperatures, top_k, top_p, min_p, uniforms)
    vocab = logits.shape[1]
    block = min(triton.next_power_of_2(vocab), BLOCK)
    sample_kernel[(len(logits),)](
        logits,
        temperatures,
        top_k,
        top_p,
        min_p,
        uniforms,
        out,
        logits.stride(0),
        vocab,
        BLOCK=block,
        TOP_BITS=TOP_BITS,
        num_warps=max(block // 256, 1),
    )
    return out


sample_tokens.register_fake(_sample_room)
