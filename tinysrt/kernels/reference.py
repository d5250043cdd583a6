"""Every kernel in plain PyTorch: the definition that the fast ones are tested against, and the one to read first.

    rms_norm, add_rms_norm      the two normalizations of a decoder layer, the second with its residual addition
    apply_rope                  rotary position embedding, one call for query and key heads together
    silu_and_mul                the gate of the MLP
    decode_attention            one query token per request over its KV, found through the index table
    extend_attention            several query tokens per request, each sees its past and itself
    keep_top_k_top_p_min_p      which tokens of a distribution may be drawn
    draw                        inverse-transform sampling: one uniform number picks one token

All are pure functions of their arguments. KV is flat and token-major, `(slots, kv_heads, head_dim)`; position p of
request row r lives in slot `table[r, p]`. The attention functions here take one request at a time and compute in
float32, which is slow and hard to get wrong; `model_executor/attention/torch_native.py` computes the same for
whole batches. The small elementwise functions are fast enough to be used as they are.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) * weight over the last axis; `weight` is (dim,), or (heads, dim) for (T, heads, dim)."""
    normed = F.rms_norm(x, x.shape[-1:], weight if weight.dim() == 1 else None, eps)
    return normed if weight.dim() == 1 else normed * weight


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The residual stream takes x in; the next block reads its normalized form. Returns (normed, new residual).

    residual and weight are float32, x and normed the model's dtype. Sixty bf16 roundings of the stream would double the
    error of the logits, enough to change greedy answers of a small model; the additions cost next to nothing.
    """
    residual = residual + x
    return rms_norm(residual, weight, eps).to(x.dtype), residual


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (x[i], x[i + dim/2]) of every head by its position's angle.

    x: (T, heads, dim). cos, sin: (T, 1, dim), where the first half of `sin` is negated: then the rotation is one
    roll, one product and one multiply-add instead of slices and a concatenation, which cost as much as a small matmul.

        [a, b] * [cos, cos] + [b, a] * [-sin, sin] = [a cos - b sin, b cos + a sin]
    """
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, where (T, 2 * n) holds gate in its left half and up in its right half."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def decode_attention(
    q: Tensor,  # (B, heads, dim): one token per request
    k_buffer: Tensor,  # (slots, kv_heads, dim)
    v_buffer: Tensor,
    table: Tensor,  # (rows, width) int32: slot of each position
    rows: Tensor,  # (B,) request row
    seq_lens: list[int],  # visible positions, the query's own included
    scale: float,
) -> Tensor:
    return extend_attention(q, k_buffer, v_buffer, table, rows, [1] * len(seq_lens), [n - 1 for n in seq_lens], scale)


def extend_attention(
    q: Tensor,  # (T, heads, dim): the requests' new tokens, concatenated
    k_buffer: Tensor,
    v_buffer: Tensor,
    table: Tensor,
    rows: Tensor,
    extend_lens: list[int],  # new tokens per request
    prefix_lens: list[int],  # tokens before them
    scale: float,
) -> Tensor:
    outputs = []
    start = 0
    for row, new, prefix in zip(rows.tolist(), extend_lens, prefix_lens, strict=True):
        query = q[start : start + new].float()  # (new, heads, dim)
        slots = table[row, : prefix + new].long()
        group = q.shape[1] // k_buffer.shape[1]  # query heads that share a KV head
        key = k_buffer[slots].float().repeat_interleave(group, dim=1)  # (prefix + new, heads, dim)
        value = v_buffer[slots].float().repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", query, key) * scale
        # New token i sits at position prefix + i and sees positions 0 .. prefix + i.
        future = torch.ones(new, prefix + new, dtype=torch.bool, device=q.device).triu(prefix + 1)
        weights = scores.masked_fill(future, float("-inf")).softmax(dim=-1)
        outputs.append(torch.einsum("hqk,khd->qhd", weights, value).to(q.dtype))
        start += new
    return torch.cat(outputs)


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
