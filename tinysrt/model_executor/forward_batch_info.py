"""ForwardBatch: the immutable snapshot that one forward pass runs on.

The scheduler's own state (`managers/schedule_batch.py`) is numpy and changes every step. What the model needs of
it is copied here once per launch, as tensors on the device, and never edited afterwards: with overlap the forward
may still be reading when the scheduler has moved on. `ScheduleBatch.to_forward_batch` builds it; this file only
defines it.

    T = number of tokens in this forward, B = number of requests
    EXTEND  request i contributes extend_seq_lens[i] new tokens, concatenated in request order
    DECODE  one token per request, T == B
    MIXED   an EXTEND batch whose last requests are decode rows of extend length 1

Two things travel in it that other engines keep as shared device state:

- `table_update`: the request-to-token table lives twice. The scheduler owns the host copy; the device copy is only
  ever changed by replaying, at the start of each forward, the writes made since the last launch. So the device sees
  the table exactly as it was when this batch was scheduled, whatever the scheduler does meanwhile.
- `relay_lanes`: with overlap the token sampled by step N is not on the host when step N+1 is launched. The model
  runner keeps the last sampled token of each request row in `relay`; lanes named here take their input id from there.

Source: SGLang `model_executor/forward_batch_info.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from tinysrt.model_executor.sampling_batch_info import SamplingBatchInfo


class ForwardMode(Enum):
    EXTEND = auto()  # prefill: new tokens after a (possibly empty) cached prefix
    DECODE = auto()
    MIXED = auto()  # a prefill with decode rows riding along

    def is_extend(self) -> bool:
        return self is not ForwardMode.DECODE

    def is_decode(self) -> bool:
        return self is ForwardMode.DECODE


@dataclass(frozen=True)
class TableUpdate:
    """Writes to the request-to-token table since the last launch, in order, no cell twice."""

    flat_index: Tensor  # (W,) int64, row * table_width + position
    slots: Tensor  # (W,) int32


@dataclass(frozen=True)
class LogprobSpec:
    """Which log probabilities this forward must return, one entry per request; None in ForwardBatch: none at all."""

    return_logprob: list[bool]
    top_logprobs_num: list[int]
    token_ids_logprob: list[list[int] | None]
    # EXTEND only. Offset, within this request's new tokens, of the first token to *score as a predecessor*:
    # rows start..extend_len-1 of the request's logits are input scores of the tokens at start+1.. ;
    # start == extend_len means none. A chunk's last row scores the first token of the next chunk.
    input_start: list[int] | None = None
    # EXTEND only. For each request, the ids that follow its new tokens' positions start..: what to look up.
    # Row j of the request scores input_targets[i][j - start]; shorter by one on the last chunk (its last row samples).
    input_targets: list[list[int]] | None = None


@dataclass(frozen=True)
class ForwardBatch:
    forward_mode: ForwardMode
    step: int  # forward counter, for the trace
    input_ids: Tensor  # (T,) int64; lanes in relay_lanes hold 0 and are filled on the device
    positions: Tensor  # (T,) int64, position of each token in its sequence
    out_cache_loc: Tensor  # (T,) int64, slot that each token's K and V are written to
    req_pool_indices: Tensor  # (B,) int64, request row in the table; row 0 is the padding row
    seq_lens: Tensor  # (B,) int64, tokens in the sequence once this forward has run
    seq_lens_cpu: list[int]  # the same on the host
    rows_cpu: list[int] = field(default_factory=list)  # req_pool_indices on the host, for the trace
    table_update: TableUpdate | None = None
    relay_lanes: Tensor | None = None  # (R,) int64, indices into input_ids; DECODE: all lanes (then None means all)
    relay_rows: Tensor | None = None  # (R,) int64, rows whose relayed token goes there
    # EXTEND and MIXED only
    extend_seq_lens: list[int] = field(default_factory=list)  # new tokens per request, sum == T
    extend_prefix_lens: list[int] = field(default_factory=list)  # tokens already in the cache per request
    sampling_info: SamplingBatchInfo | None = None
    logprob: LogprobSpec | None = None
    pinned: Tensor | None = None  # CUDA: the host memory that the tensors above are copied from, kept until they are

    @property
    def batch_size(self) -> int:
        return len(self.seq_lens_cpu)
