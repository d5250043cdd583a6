"""Rotary position embedding: the angles of one forward, computed once and used by every layer.

Pair i of a head turns by position * frequency[i], frequency[i] = theta^(-2i/dim). The dot product of a rotated query
and a rotated key then depends on their distance only. Cosines and sines are the same in every layer, so they are made
once per forward (T x dim numbers, a few small operations) instead of being looked up in each.

Scaling kinds stretch the frequencies so that a model reaches beyond the length it was first trained on. `default`,
`linear` and `llama3` are here; any other is refused by name at start-up, because ignoring it would change answers.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tinysrt.errors import StartupError


class RotaryEmbedding:
    def __init__(self, head_dim: int, rope: dict[str, Any]):
        self.frequencies = _frequencies(head_dim, rope)  # (dim / 2,) float32

    def angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin, each (T, 1, dim), laid out for `kernels.apply_rope`: sin's first half is negated."""
        self.frequencies = self.frequencies.to(positions.device)  # moves once
        angles = positions.float().unsqueeze(1) * self.frequencies  # (T, dim / 2)
        cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
        return torch.cat((cos, cos), dim=-1).unsqueeze(1), torch.cat((-sin, sin), dim=-1).unsqueeze(1)


def _frequencies(head_dim: int, rope: dict[str, Any]) -> Tensor:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    # On the CPU by name: models are built on the meta device, where numbers have no value.
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64, device="cpu").float() / head_dim
    frequencies = 1.0 / rope["rope_theta"] ** exponents
    if kind == "default":
        return frequencies
    if kind == "linear":
        return frequencies / rope["factor"]
    if kind == "llama3":
        return _llama3(frequencies, rope)
    raise StartupError(f"rope scaling of type {kind!r} is not supported; supported: default, linear, llama3")


def _llama3(frequencies: Tensor, rope: dict[str, Any]) -> Tensor:
    """Long waves are stretched by `factor`, short ones are kept, those between are blended."""
    factor, low, high = rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"]
    trained_length = rope["original_max_position_embeddings"]
    wavelengths = 2 * math.pi / frequencies
    keep = ((trained_length / wavelengths - low) / (high - low)).clamp(0, 1)  # 1: short wave, 0: long wave
    return frequencies * (keep + (1 - keep) / factor)
