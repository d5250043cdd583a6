"""Rotary position embedding: cosines and sines of every position, computed once at start-up.

Pair i of a head turns by position * frequency[i], frequency[i] = theta^(-2i/dim). The dot product of a rotated query
and a rotated key then depends on their distance only. Layers and forwards share one table; the kernel
`rope_and_store` looks positions up in it.

Scaling kinds stretch the frequencies so that a model reaches beyond the length it was first trained on. `default`,
`linear` and `llama3` are here; any other is refused by name at start-up, because ignoring it would change answers.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tinysrt.errors import StartupError


def rope_cache(head_dim: int, rope: dict[str, Any], max_positions: int) -> Tensor:
    """(max_positions, head_dim) float32: the cosines of each position's pairs in the left half, the sines in the
    right."""
    angles = torch.arange(max_positions, dtype=torch.float32).unsqueeze(1) * _frequencies(head_dim, rope)
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


def _frequencies(head_dim: int, rope: dict[str, Any]) -> Tensor:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
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
