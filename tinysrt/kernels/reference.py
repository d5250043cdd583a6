"""Every kernel in plain PyTorch: the definition that the fast ones are tested against, and the one to read first.

    rms_norm, add_rms_norm      the two normalizations of a decoder layer, the second with its residual addition
    rope_and_store              rotary position embedding of queries and keys; K and V into their slots
    silu_and_mul                the gate of the MLP
    decode_attention            one query token per request over its KV, found through the index table
    extend_attention            several query tokens per request, each sees its past and itself
    sample_tokens               temperature, softmax, top-k, top-p, min-p, one draw per row
    grouped_gemm                rows sorted by expert, each through its expert's matrix

All but `rope_and_store`, which fills slots, are pure functions of their arguments. KV is flat and token-major,
`(slots, kv_heads, head_dim)`; position p of request row r lives in slot `table[r, p]`. The attention functions here
take one request at a time and compute in float32, which is slow and hard to get wrong;
`model_executor/attention/torch_native.py` computes the same for whole batches. The other functions are fast enough to
be used as they are. `kernel_set.py` lists who else defines these functions.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) * weight over the last axis, computed in float32; y has x's format. `weight` is float32,
    (dim,), or (heads, dim) for (T, heads, dim)."""
    normed = F.rms_norm(x.float(), x.shape[-1:], weight if weight.dim() == 1 else None, eps)
    return (normed if weight.dim() == 1 else normed * weight).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The residual stream takes x in; the next block reads its normalized form. Returns (normed, new residual).

    residual and weight are float32, x and normed the model's dtype. Sixty bf16 roundings of the stream would double the
    error of the logits, enough to change greedy answers of a small model; the additions cost next to nothing.
    """
    residual = residual + x
    return rms_norm(residual, weight, eps).to(x.dtype), residual


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (x[i], x[i + dim/2]) of every head by its position's angle.

    x: (T, heads, dim). cos, sin: (T, 1, dim / 2) float32, in which the rotation is computed.
    """
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


def rope_and_store(
    qkv: Tensor,  # (T, heads + 2 * kv_heads, dim): query heads, key heads, value heads; rows may be apart
    positions: Tensor,  # (T,) int64
    rope_cache: Tensor,  # (max_positions, dim) float32: cosines in the left half, sines in the right
    k_buffer: Tensor,  # (slots, kv_heads, dim)
    v_buffer: Tensor,
    slots: Tensor,  # (T,) int64; only slot 0, the dummy, may occur twice
    num_heads: int,
) -> Tensor:
    """Rotate queries and keys, store K and V in their slots; returns the rotated queries, (T, heads, dim)."""
    kv_heads = k_buffer.shape[1]
    cos, sin = rope_cache[positions].unsqueeze(1).chunk(2, dim=-1)
    rotated = rotate(qkv[:, : num_heads + kv_heads], cos, sin)
    k_buffer.index_copy_(0, slots, rotated[:, num_heads:].to(k_buffer.dtype))
    v_buffer.index_copy_(0, slots, qkv[:, num_heads + kv_heads :].to(v_buffer.dtype))
    return rotated[:, :num_heads].contiguous()


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, where (T, 2 * n) holds gate in its left half and up in its right half."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def decode_attention(
    q: Tensor,  # (B, heads, dim): one token per request
    k_buffer: Tensor,  # (slots, kv_heads, dim)
    v_buffer: Tensor,
    table: Tensor,  # (rows, width) int32: slot of each position
    rows: Tensor,  # (B,) int64 request row; 0 for padding
    seq_lens: Tensor,  # (B,) int64 positions so far, the query's own included; 1 for padding
    scale: float,
    window: int | None = None,  # only the last so many positions are visible
) -> Tensor:
    starts = torch.arange(len(seq_lens) + 1, device=q.device)
    return extend_attention(q, k_buffer, v_buffer, table, rows, starts, seq_lens - 1, scale, window)


def extend_attention(
    q: Tensor,  # (T, heads, dim): the requests' new tokens, concatenated
    k_buffer: Tensor,
    v_buffer: Tensor,
    table: Tensor,
    rows: Tensor,  # (B,) int64
    starts: Tensor,  # (B + 1,) int64: request i owns q[starts[i] : starts[i + 1]]
    prefix_lens: Tensor,  # (B,) int64: tokens before them
    scale: float,
    window: int | None = None,
) -> Tensor:
    """(T, heads, dim). New token i of a request sits at position prefix + i and sees positions 0 .. prefix + i, or the
    last `window` of them."""
    outputs = [torch.empty_like(q[:0])]
    bounds = starts.tolist()
    for i, (row, prefix) in enumerate(zip(rows.tolist(), prefix_lens.tolist(), strict=True)):
        query = q[bounds[i] : bounds[i + 1]].float()  # (new, heads, dim)
        new = len(query)
        slots = table[row, : prefix + new].long()
        group = q.shape[1] // k_buffer.shape[1]  # query heads that share a KV head
        key = k_buffer[slots].float().repeat_interleave(group, dim=1)  # (prefix + new, heads, dim)
        value = v_buffer[slots].float().repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", query, key) * scale
        position = torch.arange(prefix, prefix + new, device=q.device).unsqueeze(1)
        seen_from = torch.arange(prefix + new, device=q.device)
        hidden = seen_from > position
        if window is not None:
            hidden |= seen_from <= position - window
        weights = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
        outputs.append(torch.einsum("hqk,khd->qhd", weights, value).to(q.dtype))
    return torch.cat(outputs)


def sample_tokens(
    logits: Tensor,  # (B, vocab) float32
    temperatures: Tensor,  # (B,) float32, above 0
    top_k: Tensor,  # (B,) int64; vocab or more: off
    top_p: Tensor,  # (B,) float32; 1: off
    min_p: Tensor,  # (B,) float32; 0: off
    uniforms: Tensor,  # (B,) float64 in [0, 1)
) -> Tensor:
    """(B,) int64: one token per row, drawn from what the filters leave of softmax(logits / temperature)."""
    # From the maximum down: a tiny temperature then drives the rest to -inf, not the best to +inf.
    scaled = (logits - logits.amax(dim=-1, keepdim=True)) / temperatures.unsqueeze(1)
    ranked, ids = scaled.softmax(dim=-1).sort(dim=-1, descending=True, stable=True)  # equal ones rank by id
    keep = keep_top_k_top_p_min_p(ranked, top_k.unsqueeze(1), top_p.unsqueeze(1), min_p.unsqueeze(1))
    weights = torch.zeros_like(ranked).scatter_(1, ids, ranked * keep)  # back in the order of ids
    return draw(weights, uniforms.unsqueeze(1)).clamp_(max=logits.shape[1] - 1)


def grouped_gemm(x: Tensor, weight: Tensor, group_offsets: Tensor) -> Tensor:
    """x: (N, in), rows sorted by group; weight: (groups, out, in); group_offsets: (groups + 1,) int64. Rows
    group_offsets[e] .. group_offsets[e + 1] are multiplied by weight[e].T. Returns (N, out)."""
    bounds = group_offsets.tolist()
    y = x.new_empty(len(x), weight.shape[1])
    for e, (begin, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
        if begin < end:
            y[begin:end] = F.linear(x[begin:end], weight[e])
    return y


def keep_top_k_top_p_min_p(sorted_probs: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Which entries of each row may be drawn. Rows are sorted, best first; top_k, top_p and min_p are (rows, 1).

    - top_k: rank below k;
    - top_p: the probability mass *before* the token is at most p. So the token that crosses p stays, and the best
      token always does (trap 65);
    - min_p: at least min_p times the best probability.
    """
    rank = torch.arange(sorted_probs.shape[-1], device=sorted_probs.device)
    mass_before = F.pad(sorted_probs.cumsum(dim=-1)[:, :-1], (1, 0))  # exactly 0 for the best token
    return (rank < top_k) & (mass_before <= top_p) & (sorted_probs >= min_p * sorted_probs[:, :1])


def draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """For each row, the first index at which the running sum exceeds uniform * total: P(i) = weights[i] / total.

    The sum runs in float64 over a fixed order (token id), so the result of a row depends on its weights and its
    uniform number alone. `uniforms` has at most 32 bits, so uniform * total stays below total after rounding and the
    last token with weight is the last that can be picked; a token of weight 0 never is.
    """
    running = weights.cumsum(dim=-1, dtype=torch.float64)
    return torch.searchsorted(running, running[:, -1:] * uniforms, right=True).squeeze(-1)
