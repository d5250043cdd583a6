"""SamplingBatchInfo: how the tokens of one forward are to be drawn.

Two parts, because they change at different rates:

    SamplingStatics     depends on *which* requests are in the batch: temperatures, penalties, biases, seeds as tensors.
                        Built when the composition changes, reused by every decode step until it changes again.
    SamplingBatchInfo   one step: the statics plus one uniform number per row, the rows whose stop tokens are still
                        forbidden, and what the penalty counts must do. Made by `SamplingStatics.at_step`.

Both are frozen. With overlap a forward may still be sampling when the scheduler has merged or filtered the batch, so
nothing here is ever edited: a merged batch builds new statics from its request list.

A draw depends on (seed, position) and on nothing else: the uniform number is a hash of the two. The same request gives
the same tokens alone or in company, before or after a retract. SGLang keys its noise the same way, but only under
`--enable-deterministic-inference`; 0.5.23 merges and filters this object tensor by tensor instead of rebuilding it.
Source: SGLang `sampling/sampling_batch_info.py`. Read on in `sampler.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tinysrt.model_executor.upload import to_device
from tinysrt.sampling_params import SamplingParams


@dataclass(frozen=True)
class FilterStatics:
    """The rows that restrict what may be drawn. R = number of such rows."""

    lanes: Tensor  # (R,) int64, position in the batch
    top_k: Tensor  # (R, 1) int64, clipped to the vocabulary
    top_p: Tensor  # (R, 1) float32
    min_p: Tensor  # (R, 1) float32


@dataclass(frozen=True)
class PenaltyStatics:
    """The rows with a frequency, presence or repetition penalty. P = number of such rows."""

    lanes: list[int]  # position in the batch
    rows: list[int]  # request row: the counts on the device are kept by it
    frequency: Tensor  # (P, 1) float32
    presence: Tensor  # (P, 1)
    repetition: Tensor  # (P, 1)


@dataclass(frozen=True)
class BiasStatics:
    """All logit_bias entries of the batch as coordinates and values."""

    lanes: Tensor  # (N,) int64
    token_ids: Tensor  # (N,) int64
    values: Tensor  # (N,) float32


@dataclass(frozen=True)
class MinNewTokens:
    """A row whose stop tokens are forbidden until its sequence is `until` tokens long."""

    lane: int
    until: int
    stop_ids: list[int]


@dataclass(frozen=True)
class SamplingStatics:
    device: torch.device | str
    seeds: np.ndarray  # (B,) uint64
    all_greedy: bool
    greedy: Tensor  # (B,) bool
    temperatures: Tensor | None  # (B, 1) float32; None: all 1
    filters: FilterStatics | None
    penalties: PenaltyStatics | None
    bias: BiasStatics | None
    min_new_tokens: list[MinNewTokens]

    def at_step(
        self, seq_lens: Sequence[int], output_ids: Sequence[Sequence[int] | None] | None = None
    ) -> SamplingBatchInfo:
        """The info of one forward.

        seq_lens: each sequence's length once the forward has run, so the position of the token to be drawn.
        output_ids: None for DECODE. For EXTEND and MIXED, per request, the ids it has produced so far (a fresh request:
        none; a retracted one: all it had): its penalty counts start from these. None in the list: a decode row.
        """
        masked = [entry for entry in self.min_new_tokens if seq_lens[entry.lane] < entry.until]
        return SamplingBatchInfo(
            statics=self,
            uniforms=None if self.all_greedy else self._tensor(uniforms(self.seeds, seq_lens)).unsqueeze(1),
            forbidden=self._coordinates([(entry.lane, entry.stop_ids) for entry in masked]) if masked else None,
            penalty_starts=self._penalty_starts(output_ids),
        )

    def _penalty_starts(self, output_ids: Sequence[Sequence[int] | None] | None) -> list[list[int] | None] | None:
        if self.penalties is None:
            return None
        if output_ids is None:
            return [None] * len(self.penalties.lanes)
        starts = [output_ids[lane] for lane in self.penalties.lanes]
        return [None if ids is None else list(ids) for ids in starts]  # a copy: the request appends to its own list

    def _coordinates(self, entries: list[tuple[int, list[int]]]) -> tuple[Tensor, Tensor]:
        lanes = np.repeat([lane for lane, _ in entries], [len(ids) for _, ids in entries]).astype(np.int64)
        token_ids = np.array([i for _, ids in entries for i in ids], dtype=np.int64)
        return self._tensor(lanes), self._tensor(token_ids)

    def _tensor(self, array: np.ndarray) -> Tensor:
        return to_device(array, self.device)


@dataclass(frozen=True)
class SamplingBatchInfo:
    statics: SamplingStatics
    uniforms: Tensor | None  # (B, 1) float64 in [0, 1); None when every row is greedy
    forbidden: tuple[Tensor, Tensor] | None  # (lanes, token ids) set to -inf: stop tokens below min_new_tokens
    # Per row of statics.penalties: the ids its counts restart from, or None: count the row's relayed input token.
    penalty_starts: list[list[int] | None] | None

    @staticmethod
    def for_requests(
        params: list[SamplingParams],
        rows: list[int],
        prompt_lens: list[int],
        stop_ids: list[frozenset[int]],
        vocab_size: int,
        device: torch.device | str,
    ) -> SamplingStatics:
        """The statics of a batch. `params` are normalized and verified; `stop_ids`: eos and stop_token_ids each."""
        greedy = [p.is_greedy for p in params]
        temperatures = None
        if any(p.temperature != 1.0 for p in params):
            temperatures = to_device([[p.temperature] for p in params], device)
        assert all(p.sampling_seed is not None for p in params if not p.is_greedy), "the door draws missing seeds"
        return SamplingStatics(
            device=device,
            seeds=np.array([(p.sampling_seed or 0) & (2**64 - 1) for p in params], dtype=np.uint64),
            all_greedy=all(greedy),
            greedy=to_device(greedy, device, torch.bool),
            temperatures=temperatures,
            filters=_filters(params, vocab_size, device),
            penalties=_penalties(params, rows, device),
            bias=_bias(params, device),
            min_new_tokens=[
                MinNewTokens(lane, prompt_lens[lane] + p.min_new_tokens, sorted(stop_ids[lane]))
                for lane, p in enumerate(params)
                if p.min_new_tokens > 0 and stop_ids[lane]
            ],
        )


def _filters(params: list[SamplingParams], vocab_size: int, device: torch.device | str) -> FilterStatics | None:
    lanes = [
        lane
        for lane, p in enumerate(params)
        if not p.is_greedy and (p.top_k < vocab_size or p.top_p < 1.0 or p.min_p > 0.0)
    ]
    if not lanes:
        return None
    chosen = [params[lane] for lane in lanes]
    return FilterStatics(
        lanes=to_device(lanes, device),
        top_k=to_device([[min(p.top_k, vocab_size)] for p in chosen], device),
        top_p=to_device([[p.top_p] for p in chosen], device),
        min_p=to_device([[p.min_p] for p in chosen], device),
    )


def _penalties(params: list[SamplingParams], rows: list[int], device: torch.device | str) -> PenaltyStatics | None:
    lanes = [
        lane
        for lane, p in enumerate(params)
        if p.frequency_penalty != 0.0 or p.presence_penalty != 0.0 or p.repetition_penalty != 1.0
    ]
    if not lanes:
        return None
    chosen = [params[lane] for lane in lanes]
    return PenaltyStatics(
        lanes=lanes,
        rows=[rows[lane] for lane in lanes],
        frequency=to_device([[p.frequency_penalty] for p in chosen], device),
        presence=to_device([[p.presence_penalty] for p in chosen], device),
        repetition=to_device([[p.repetition_penalty] for p in chosen], device),
    )


def _bias(params: list[SamplingParams], device: torch.device | str) -> BiasStatics | None:
    entries = [(lane, i, value) for lane, p in enumerate(params) for i, value in sorted((p.logit_bias or {}).items())]
    if not entries:
        return None
    lanes, token_ids, values = zip(*entries, strict=True)
    return BiasStatics(
        lanes=to_device(lanes, device),
        token_ids=to_device(token_ids, device),
        values=to_device(values, device, torch.float32),
    )


def uniforms(seeds: np.ndarray, positions: Sequence[int]) -> np.ndarray:
    """One number in [0, 1) per row, a hash of (seed, position): splitmix64 over both. 32 bits, as float64.

    Hashing the seed first keeps neighbouring seeds from sharing a stream shifted by one position.
    """
    with np.errstate(over="ignore"):  # wrapping around is what the arithmetic is for
        mixed = _splitmix64(_splitmix64(seeds) + np.asarray(positions, dtype=np.uint64))
    return (mixed >> np.uint64(32)).astype(np.float64) / 2.0**32


def _splitmix64(x: np.ndarray) -> np.ndarray:
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
