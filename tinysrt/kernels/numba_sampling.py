"""One token per row, without sorting the vocabulary. A ticket is a row.

All three filters keep a prefix of the tokens in the order of their logits (equal ones by id), so the only question is
where the prefix ends. Tokens are counted in buckets by their distance from the best logit:

    bucket     0   1   2   3   4 ...      best first
    tokens     1   0   4  11  38
    mass     1.0   0  .9 2.1 6.0          2^x each, the best one 1
                           ▲  the prefix ends in this bucket: top_k, top_p or min_p is crossed here

Order is decided by the logits, never by the weights: equal logits may get weights that differ in their last bit, one in
the vector part of a loop and one in its remainder. Better buckets are kept whole, worse ones dropped whole, and only
this one is sorted. Then one walk over the ids finds the token at which the running sum of kept weights exceeds the
row's uniform number. Sums are float64, in the order of ids, so a row's token depends on nothing but its own numbers.
Meaning: `reference.py`.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tinysrt.kernels.numba_runtime import (
    LOG2_E,
    bits_of,
    draw_ticket,
    exp2,
    f32_at,
    f64_at,
    i64_at,
    inner,
    kernel,
    largest,
    launch,
)

BUCKET_SHIFT = 19  # of the 23 bits behind the leading one 4 are kept, and the exponent
BUCKETS = (0x7F800000 >> BUCKET_SHIFT) + 1  # the last one: logits of -inf


@inner
def _bucket(distance):
    """Sixteen buckets for each doubling of the distance from the best logit."""
    return bits_of(distance) >> BUCKET_SHIFT


@inner
def _end_of_prefix(logits, weights, vocab, best, total, top_k, top_p, min_p):
    """Where the kept tokens end: (bucket, distance, id) of the last one. Distance -1: none of its bucket is kept."""
    counts, masses = np.zeros(BUCKETS, np.int64), np.zeros(BUCKETS, np.float64)
    lightest = np.full(BUCKETS, np.inf, np.float32)
    for i in range(vocab):
        bucket = _bucket(best - logits[i])
        counts[bucket] += 1
        masses[bucket] += weights[i]
        lightest[bucket] = min(lightest[bucket], weights[i])
    rank, mass, crossed = 0, 0.0, 0
    while crossed < BUCKETS - 1:
        if rank + counts[crossed] >= top_k or mass + masses[crossed] > top_p * total or lightest[crossed] < min_p:
            break
        rank += counts[crossed]
        mass += masses[crossed]
        crossed += 1
    members, distances = np.empty(counts[crossed], np.int64), np.empty(counts[crossed], np.float32)
    found = 0
    for i in range(vocab):
        distance = best - logits[i]
        if _bucket(distance) == crossed:
            members[found], distances[found] = i, distance
            found += 1
    last_distance, last_id = np.float32(-1.0), -1
    for place in np.argsort(distances, kind="mergesort"):  # stable: equal ones stay in the order of ids
        weight = weights[members[place]]
        if rank >= top_k or mass > top_p * total or weight < min_p:
            break
        last_distance, last_id = distances[place], members[place]
        rank += 1
        mass += weight
    return crossed, last_distance, last_id


@inner
def _sample_row(logits, weights, vocab, temperature, top_k, top_p, min_p, uniform):
    best = largest(logits, 0, vocab, logits[0])
    scale = LOG2_E / temperature
    total = 0.0
    for i in range(vocab):
        weights[i] = exp2((logits[i] - best) * scale)
        total += weights[i]
    if not np.isfinite(total):
        return 0  # no distribution: the sampler names such rows by their maximum
    if top_k < vocab or top_p < np.float32(1.0) or min_p > np.float32(0.0):
        crossed, last_distance, last_id = _end_of_prefix(logits, weights, vocab, best, total, top_k, top_p, min_p)
        total = 0.0
        for i in range(vocab):
            distance = best - logits[i]
            bucket = _bucket(distance)
            beyond = distance > last_distance or (distance == last_distance and i > last_id)
            if bucket > crossed or (bucket == crossed and beyond):
                weights[i] = np.float32(0.0)
            total += weights[i]
    goal, running, last = uniform * total, 0.0, 0
    for i in range(vocab):
        if weights[i] > np.float32(0.0):
            running += weights[i]
            last = i
            if running > goal:
                break
    return last


@kernel
def _sample_tokens(args):
    vocab = args[10]
    temperatures, top_k, top_p, min_p = f32_at(args[3]), i64_at(args[4]), f32_at(args[5]), f32_at(args[6])
    uniforms, ids = f64_at(args[7]), i64_at(args[8])
    while True:
        row = draw_ticket(args)
        if row >= args[1]:
            break
        logits, weights = f32_at(args[2] + row * vocab * 4), f32_at(args[9] + row * vocab * 4)
        ids[row] = _sample_row(
            logits, weights, vocab, temperatures[row], top_k[row], top_p[row], min_p[row], uniforms[row]
        )


def sample_tokens(
    logits: Tensor, temperatures: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniforms: Tensor
) -> Tensor:
    rows, vocab = logits.shape
    assert logits.is_contiguous() and logits.dtype == torch.float32 and uniforms.dtype == torch.float64
    ids, weights = torch.empty(rows, dtype=torch.int64), torch.empty_like(logits)
    launch(
        _sample_tokens, rows, logits.data_ptr(), temperatures.data_ptr(), top_k.data_ptr(), top_p.data_ptr(),
        min_p.data_ptr(), uniforms.data_ptr(), ids.data_ptr(), weights.data_ptr(), vocab,
    )  # fmt: skip
    return ids
