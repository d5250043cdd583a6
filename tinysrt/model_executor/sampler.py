"""Sampler: from logits to one token per request, in a fixed order of steps.

    logits ─ penalties ─ forbid stop ids ─ logit bias ─ ÷ temperature ─┬─ softmax ─ top-k, top-p, min-p ─ draw ─▶ token
                                                          log-softmax ─┴─▶ output log probabilities

- Each row is drawn by its own parameters. A greedy row takes the arg max even beside sampled ones, so a tie is never
  drawn; a batch with greedy rows only, no penalty and no bias is one arg max.
- Penalties look at output tokens only. The counts live on the device by request row and advance here, from the token
  relayed to this step, so they never lag, overlap or not. (SGLang 0.5.23 counts on the host: under overlap its
  penalties miss the newest token.)
- Output log probabilities are taken after temperature and before the filters (trap 67).
- A row whose logits are NaN or infinite yields token -1 and harms nobody else; the scheduler ends that request.

Greedy is never "temperature 0" here: the door has rewritten it to top_k 1 (trap 68).
Source: SGLang `layers/sampler.py`. The filters and the draw are defined in `kernels/reference.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tinysrt.kernels.kernel_set import REFERENCE, KernelSet
from tinysrt.kernels.reference import draw, keep_top_k_top_p_min_p
from tinysrt.model_executor.forward_batch_info import ForwardBatch
from tinysrt.model_executor.layers.logits_processor import LogitsOutput, Scores, look_up_scores, widths
from tinysrt.model_executor.sampling_batch_info import FilterStatics, PenaltyStatics, SamplingBatchInfo
from tinysrt.model_executor.upload import to_device

NAN_TOKEN = -1
CANDIDATES = 1024  # the filters first look at so many best tokens: six times faster than sorting 49,152


@dataclass(frozen=True)
class SampleOutput:
    """The result of one step, still on the device (on CUDA: on its way to pinned memory; `ready` says it arrived)."""

    next_token_ids: Tensor  # (B,) int64
    output_scores: Scores | None = None  # rows of the requests with return_logprob, in batch order
    input_scores: Scores | None = None
    ready: torch.cuda.Event | None = None


class PenaltyCounts:
    """How often each penalized request has produced each token: (capacity, vocab) on the device, grown when needed.

    A request row gets a line of its own the first time a penalized request uses it and keeps it; each new life of the
    row starts with `restart`. So only rows that were ever penalized cost memory.
    """

    def __init__(self, vocab_size: int, device: torch.device):
        self.counts = torch.zeros(0, vocab_size, device=device)  # float32: it multiplies logits
        self.lines: dict[int, int] = {}  # request row → line

    def restart(self, row: int, output_ids: list[int]) -> None:
        line = self.lines.setdefault(row, len(self.lines))
        if line == len(self.counts):
            grown = self.counts.new_zeros(max(4, 2 * line), self.counts.shape[1])
            grown[:line] = self.counts
            self.counts = grown
        self.counts[line] = 0.0
        if output_ids:
            ids = to_device(output_ids, self.counts.device)
            self.counts[line].index_add_(0, ids, torch.ones_like(ids, dtype=self.counts.dtype))

    def add(self, rows: list[int], token_ids: Tensor) -> None:
        lines = self.lines_of(rows)
        self.counts[lines, token_ids] += 1.0

    def lines_of(self, rows: list[int]) -> Tensor:
        return to_device([self.lines[row] for row in rows], self.counts.device)


class Sampler:
    def __init__(self, vocab_size: int, device: torch.device, kernels: KernelSet = REFERENCE):
        self.penalty_counts = PenaltyCounts(vocab_size, device)
        self.kernels = kernels

    def __call__(self, output: LogitsOutput, batch: ForwardBatch, relay: Tensor) -> SampleOutput:
        """`relay`: (rows,) last sampled token of each request row, as it was when this forward read it."""
        logits, info = output.next_token_logits, batch.sampling_info
        best, token_ids = logits.max(dim=-1) if info is None else self._sample(logits, info, relay)
        # A row with a NaN has NaN as its maximum; one with +inf has no distribution either.
        token_ids = token_ids.masked_fill(~best.isfinite(), NAN_TOKEN)
        return SampleOutput(token_ids, _output_scores(logits, token_ids, batch), output.input_scores)

    def _sample(self, logits: Tensor, info: SamplingBatchInfo, relay: Tensor) -> tuple[Tensor, Tensor]:
        """Edits `logits` into what the log probabilities are taken from. Returns (best logit, token) of each row."""
        statics = info.statics
        if statics.penalties is not None:
            assert info.penalty_starts is not None
            self._advance_counts(statics.penalties, info.penalty_starts, relay)
            self._penalize(logits, statics.penalties)
        if info.forbidden is not None:
            logits[info.forbidden] = float("-inf")
        if statics.bias is not None:
            logits.index_put_((statics.bias.lanes, statics.bias.token_ids), statics.bias.values, accumulate=True)
        best, greedy_ids = logits.max(dim=-1)
        if statics.temperatures is not None:
            # Scale from the maximum down: a tiny temperature then drives the rest to -inf, not the best to +inf.
            logits.sub_(best.unsqueeze(1)).div_(statics.temperatures)
        if statics.all_greedy:
            return best, greedy_ids
        assert info.uniforms is not None
        if self.kernels is not REFERENCE:
            return best, torch.where(statics.greedy, greedy_ids, self._draw_all(logits, info.uniforms, statics.filters))
        weights = logits.softmax(dim=-1).nan_to_num_(nan=0.0)  # a NaN row is replaced later; here it must not crash
        drawn = draw(weights, info.uniforms).clamp_(max=logits.shape[1] - 1)
        if statics.filters is not None:
            lanes = statics.filters.lanes
            drawn[lanes] = draw_filtered(weights[lanes], info.uniforms[lanes], statics.filters)
        return best, torch.where(statics.greedy, greedy_ids, drawn)

    def _draw_all(self, logits: Tensor, uniforms: Tensor, filters: FilterStatics | None) -> Tensor:
        """One kernel draws every row, with or without filters. `logits` are divided by their temperatures already."""
        rows, vocab_size = logits.shape
        ones = torch.ones(rows, device=logits.device)
        top_k, zeros = torch.full((rows,), vocab_size, device=logits.device), torch.zeros_like(ones)
        top_p, min_p = ones, zeros
        if filters is not None:
            top_k = top_k.index_copy(0, filters.lanes, filters.top_k.squeeze(1))
            top_p = top_p.index_copy(0, filters.lanes, filters.top_p.squeeze(1))
            min_p = min_p.index_copy(0, filters.lanes, filters.min_p.squeeze(1))
        return self.kernels.sample_tokens(logits, ones, top_k, top_p, min_p, uniforms.squeeze(1))

    def _advance_counts(self, penalties: PenaltyStatics, starts: list[list[int] | None], relay: Tensor) -> None:
        decoding = []
        for row, output_ids in zip(penalties.rows, starts, strict=True):
            if output_ids is None:
                decoding.append(row)
            else:
                self.penalty_counts.restart(row, output_ids)
        if decoding:
            self.penalty_counts.add(decoding, relay[to_device(decoding, relay.device)])

    def _penalize(self, logits: Tensor, penalties: PenaltyStatics) -> None:
        counts = self.penalty_counts.counts[self.penalty_counts.lines_of(penalties.rows)]  # (P, vocab)
        seen = counts > 0
        lanes = to_device(penalties.lanes, logits.device)
        rows = logits[lanes] - penalties.frequency * counts - penalties.presence * seen
        # Dividing a negative logit would raise it: multiply those (trap 66).
        scaled = torch.where(rows > 0, rows / penalties.repetition, rows * penalties.repetition)
        logits[lanes] = torch.where(seen, scaled, rows)


def draw_filtered(weights: Tensor, uniforms: Tensor, filters: FilterStatics) -> Tensor:
    """Draw from the tokens that top-k, top-p and min-p leave, in the order of their ids.

    Sorting a whole vocabulary costs more than the rest of the sampler, and nearly always some hundred tokens are left.
    So look at the `CANDIDATES` best first; that is enough when a candidate is dropped that is strictly worse than all
    kept ones, because then no token outside can be kept. Else sort everything. Both ways keep the same set, and the
    draw goes through it in the same order: a row's token does not depend on which way its neighbours needed.
    """
    vocab_size = weights.shape[1]
    if vocab_size > CANDIDATES and weights.device.type == "cpu":  # on a GPU the look at `enough` would be a sync
        values, ids = weights.topk(CANDIDATES, dim=-1)
        ids, kept, enough = _filter(values, ids, filters)
        if enough:
            return _draw_by_id(ids, kept, uniforms)
    ids = torch.arange(vocab_size, device=weights.device).expand_as(weights)
    ids, kept, _ = _filter(weights, ids, filters)
    return _draw_by_id(ids, kept, uniforms)


def _filter(values: Tensor, ids: Tensor, filters: FilterStatics) -> tuple[Tensor, Tensor, bool]:
    """(ids, kept weights, whether what is not among `values` is surely dropped); equal values rank by id."""
    ids, order = ids.sort(dim=-1)
    ranked, order = values.gather(1, order).sort(dim=-1, descending=True, stable=True)
    ids = ids.gather(1, order)
    keep = keep_top_k_top_p_min_p(ranked, filters.top_k, filters.top_p, filters.min_p)
    worst_kept = ranked.masked_fill(~keep, float("inf")).amin(dim=-1)
    enough = values.device.type == "cpu" and bool((worst_kept > ranked[:, -1]).all())
    return ids, ranked * keep, enough


def _draw_by_id(ids: Tensor, weights: Tensor, uniforms: Tensor) -> Tensor:
    ids, order = ids.sort(dim=-1)
    index = draw(weights.gather(1, order), uniforms).clamp_(max=ids.shape[1] - 1)
    return ids.gather(1, index.unsqueeze(1)).squeeze(1)


def _output_scores(logits: Tensor, token_ids: Tensor, batch: ForwardBatch) -> Scores | None:
    spec = batch.logprob
    if spec is None or not any(spec.return_logprob):
        return None
    lanes = [i for i, wanted in enumerate(spec.return_logprob) if wanted]
    index = to_device(lanes, logits.device)
    targets = token_ids[index].clamp(min=0)  # a NaN row has no token; its score is NaN all the same
    return look_up_scores(logits[index].log_softmax(dim=-1), targets, spec, lanes, widths(spec, lanes))
