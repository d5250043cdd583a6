"""Rotary position embedding: cosines and sines of every position, computed once at start-up.

Pair i of a head turns by position * frequency[i], frequency[i] = theta^(-2i/dim). The dot product of a rotated query
and a rotated key then depends on their distance only. Layers and forwards share one table; the kernel
`rope_and_store` looks positions up in it.

Scaling kinds stretch the frequencies so that a model reaches beyond the length it was first trained on. `default`,
`linear`, `llama3` and `yarn` are here; any other is refused by name at start-up, because ignoring it would change
answers.
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
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise StartupError("partial_rotary_factor (rotating a part of each head) is not supported")
    try:
        frequencies, scale = _frequencies(head_dim, rope)
    except KeyError as error:
        raise StartupError(f"config.json: rope scaling of type {rope['rope_type']!r} lacks {error}") from error
    angles = torch.arange(max_positions, dtype=torch.float32).unsqueeze(1) * frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=-1) * scale


def _frequencies(head_dim: int, rope: dict[str, Any]) -> tuple[Tensor, float]:
    """(dim / 2,) float32, and what cosines and sines are multiplied with."""
    kind = rope["rope_type"]
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / rope["rope_theta"] ** exponents
    if kind == "default":
        return frequencies, 1.0
    if kind == "linear":
        return frequencies / rope["factor"], 1.0
    if kind == "llama3":
        return _llama3(frequencies, rope), 1.0
    if kind == "yarn":
        return _yarn(frequencies, rope), _yarn_scale(rope)
    raise StartupError(f"rope scaling of type {kind!r} is not supported; supported: default, linear, llama3, yarn")


def _llama3(frequencies: Tensor, rope: dict[str, Any]) -> Tensor:
    """Long waves are stretched by `factor`, short ones are kept, those between are blended."""
    factor, low, high = rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"]
    trained_length = rope["original_max_position_embeddings"]
    wavelengths = 2 * math.pi / frequencies
    keep = ((trained_length / wavelengths - low) / (high - low)).clamp(0, 1)  # 1: short wave, 0: long wave
    return frequencies * (keep + (1 - keep) / factor)


def _yarn(frequencies: Tensor, rope: dict[str, Any]) -> Tensor:
    """As llama3, but the blend is linear in the pair's index: from the pair that turns `beta_fast` times within the
    trained length (kept) to the one that turns `beta_slow` times (stretched)."""
    pairs = len(frequencies)
    trained_length = rope["original_max_position_embeddings"]

    def pair_that_turns(times: float) -> float:
        return pairs * math.log(trained_length / (times * 2 * math.pi)) / math.log(rope["rope_theta"])

    first, last = pair_that_turns(rope.get("beta_fast") or 32), pair_that_turns(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * pairs - 1)
    width = last - first or 0.001
    keep = 1 - ((torch.arange(pairs, dtype=torch.float32) - first) / width).clamp(0, 1)
    return frequencies * (keep + (1 - keep) / rope["factor"])


def _yarn_scale(rope: dict[str, Any]) -> float:
    """Longer contexts flatten the softmax; larger queries and keys sharpen it again."""

    def scale(weight: float) -> float:
        return 1.0 if rope["factor"] <= 1 else 0.1 * weight * math.log(rope["factor"]) + 1.0

    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return scale(rope["mscale"]) / scale(rope["mscale_all_dim"])
    return scale(1.0)
