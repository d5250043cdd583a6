"""Decode attention in plain PyTorch that never looks at a length on the host: what a captured step can use.

The eager `torch_native` backend reads the lengths on the host, groups requests by them and gathers as many positions as
the longest has. A captured step cannot: its shapes are frozen. So this function gathers the *whole width* of the table
for every lane and masks what lies beyond the length. That is slow for a long context (a kernel that loops up to the
length, Numba's or Triton's, pays nothing for the width), but it is plain operators, for a tape to record and a reader
to follow.

    table row   [ 11 12 40 41  7  9  0 ...  0 ]        seq_len 4
    slots       [ 11 12 40 41  0  0  0 ...  0 ]        slot 0 instead of what the table still holds there:
    mask        [  0  0  0  0 -∞ -∞ -∞ ... -∞ ]        a NaN in a stranger's V would survive a weight of 0
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def masked_decode_attention(
    q: Tensor,  # (B, heads, dim)
    k_buffer: Tensor,  # (slots, kv_heads, dim)
    v_buffer: Tensor,
    table: Tensor,  # (rows, width) int32
    rows: Tensor,  # (B,) int64
    seq_lens: Tensor,  # (B,) int64
    scale: float,
    window: int | None = None,
) -> Tensor:
    """The same as `kernels.reference.decode_attention`: (B, heads, dim)."""
    batch, heads, dim = q.shape
    position = torch.arange(table.shape[1], device=q.device)
    hidden = position >= seq_lens.unsqueeze(1)  # (B, width)
    if window is not None:
        hidden = hidden | (position < seq_lens.unsqueeze(1) - window)
    slots = table.index_select(0, rows).masked_fill(hidden, 0).view(-1)
    shape = (batch, -1, *k_buffer.shape[1:])
    k = k_buffer.index_select(0, slots).view(shape).transpose(1, 2)  # (B, kv_heads, width, dim)
    v = v_buffer.index_select(0, slots).view(shape).transpose(1, 2)
    mask = torch.zeros(hidden.shape, dtype=q.dtype, device=q.device).masked_fill(hidden, float("-inf"))
    grouped = q.view(batch, k_buffer.shape[1], -1, dim)  # the group's query heads as query rows of their KV head
    attended = F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask[:, None, None], scale=scale)
    return attended.reshape(batch, heads, dim)
