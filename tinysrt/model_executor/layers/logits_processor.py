"""From hidden states to scores: which rows go through the output head, and what is kept of them.

The head is the largest matrix of a small model, so only rows that someone will read go through it:

    new tokens of a prefill      t0 t1 t2 │ t3 t4 t5 t6 │ t7          (three requests)
    sampled from                        ▲            ▲    ▲          the last row of each request
    input scores wanted                       ▲  ▲                   rows start.. of requests that ask for them

Row j of a request is the model's opinion on its *next* token, so it scores the token at j + 1. The last row of a
middle chunk therefore scores the first token of the next chunk, which is why the scheduler passes the targets in.

Input scores use the raw distribution; output scores (`sampler.py`) the one after penalties, bias and temperature.
A long prompt has rows x vocabulary scores, far more than its KV: they are made `ROWS_AT_A_TIME` and reduced to the few
numbers asked for before the next block. Source: SGLang `layers/logits_processor.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from tinysrt.model_executor.forward_batch_info import ForwardBatch, LogprobSpec
from tinysrt.model_executor.upload import to_device

Pair = tuple[float, int]  # (log probability, token id)
ROWS_AT_A_TIME = 128  # x 49,152 tokens x 4 bytes = 25 MB


@dataclass(frozen=True)
class Scores:
    """Log probabilities looked up for R rows. Width K is the largest top_logprobs_num, M the longest id list."""

    targets: Tensor  # (R,) the score of the row's own next token
    top_values: Tensor  # (R, K) best first
    top_ids: Tensor  # (R, K)
    chosen: Tensor  # (R, M) scores of the request's token_ids_logprob, padded

    def to(self, device: str | torch.device, non_blocking: bool = False) -> Scores:
        return Scores(*(t.to(device, non_blocking=non_blocking) for t in self._tensors()))

    def to_rows(self, spec: LogprobSpec, owners: list[int]) -> list[tuple[float, list[Pair], list[Pair]]]:
        """Per row, as plain numbers: (score of its target, top list, token_ids list), each as long as it was asked."""
        targets, values, ids, chosen = (t.tolist() for t in self._tensors())
        rows = []
        for row, owner in enumerate(owners):
            top = list(zip(values[row], ids[row], strict=True))[: spec.top_logprobs_num[owner]]
            named = spec.token_ids_logprob[owner] or []
            rows.append((targets[row], top, list(zip(chosen[row], named, strict=False))))  # the padding falls off
        return rows

    @staticmethod
    def concatenate(parts: list[Scores]) -> Scores:
        return Scores(*(torch.cat(column) for column in zip(*(part._tensors() for part in parts), strict=True)))

    def _tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.targets, self.top_values, self.top_ids, self.chosen


@dataclass(frozen=True)
class LogitsOutput:
    next_token_logits: Tensor  # (B, vocab) float32; the sampler edits them in place
    input_scores: Scores | None = None  # rows of all requests with input targets, concatenated


def compute_logits(hidden: Tensor, head: Callable[[Tensor], Tensor], batch: ForwardBatch) -> LogitsOutput:
    """`hidden`: (T, hidden_size), after the final norm. `head`: rows of it → float32 logits (`lm_head.py`)."""
    if batch.forward_mode.is_decode():
        return LogitsOutput(head(hidden))
    ends = list(accumulate(batch.extend_seq_lens))
    last_rows = to_device(ends, hidden.device) - 1
    sampled = head(hidden.index_select(0, last_rows))
    return LogitsOutput(sampled, _input_scores(hidden, head, batch, ends))


def _input_scores(
    hidden: Tensor, head: Callable[[Tensor], Tensor], batch: ForwardBatch, ends: list[int]
) -> Scores | None:
    spec = batch.logprob
    if spec is None or spec.input_start is None or spec.input_targets is None:
        return None
    rows: list[int] = []  # into `hidden`
    targets: list[int] = []
    for i, wanted in enumerate(spec.input_targets):
        first = ends[i] - batch.extend_seq_lens[i] + spec.input_start[i]
        rows += range(first, first + len(wanted))
        targets += wanted
    owners = input_score_owners(spec)
    if not rows:
        return None
    width = widths(spec, owners)
    blocks = []
    for begin in range(0, len(rows), ROWS_AT_A_TIME):
        block = slice(begin, begin + ROWS_AT_A_TIME)
        logits = head(hidden.index_select(0, to_device(rows[block], hidden.device)))
        wanted_ids = to_device(targets[block], hidden.device)
        blocks.append(look_up_scores(logits.log_softmax(dim=-1), wanted_ids, spec, owners[block], width))
    return Scores.concatenate(blocks)


def input_score_owners(spec: LogprobSpec) -> list[int]:
    """The request of each input score row, in the order of `LogitsOutput.input_scores`."""
    return [i for i, wanted in enumerate(spec.input_targets or []) for _ in wanted]


def widths(spec: LogprobSpec, owners: list[int]) -> tuple[int, int]:
    """(K, M) for rows that belong to these requests."""
    requests = set(owners)
    longest_top = max(spec.top_logprobs_num[i] for i in requests)
    return longest_top, max(len(spec.token_ids_logprob[i] or []) for i in requests)


def look_up_scores(
    logprobs: Tensor, targets: Tensor, spec: LogprobSpec, owners: list[int], width: tuple[int, int]
) -> Scores:
    """Reduce (R, vocab) log probabilities to what the requests `owners` (one per row) ask for."""
    top_width, ids_width = width
    top = logprobs.topk(top_width, dim=-1)
    padded = [(spec.token_ids_logprob[i] or []) for i in owners]
    ids = to_device([row + [0] * (ids_width - len(row)) for row in padded], logprobs.device, torch.int64)
    return Scores(
        targets=logprobs.gather(1, targets.unsqueeze(1)).squeeze(1),
        top_values=top.values,
        top_ids=top.indices,
        chosen=logprobs.gather(1, ids.view(len(owners), ids_width)),
    )
