"""StepResult: what one forward says to the scheduler, on the host, as plain lists.

Every per-request field is a list of length B, in the order of the batch's requests. Tokens come as a *list per
request*: one token today, several once speculation accepts a run. Scores are natural-log probabilities.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class InputScores:
    """Scores of prompt tokens computed by one EXTEND forward for one request, aligned with its input_targets."""

    logprobs: list[float]
    top: list[list[tuple[float, int]]]  # (logprob, id) best first; empty when top_logprobs_num == 0
    token_ids: list[list[tuple[float, int]]]  # for token_ids_logprob; empty when not asked


@dataclass(frozen=True)
class StepResult:
    next_token_ids: list[list[int]]
    output_logprobs: list[list[float]] | None = None  # one per token of next_token_ids
    output_top: list[list[list[tuple[float, int]]] | None] | None = None
    output_token_ids: list[list[list[tuple[float, int]]] | None] | None = None
    input_scores: list[InputScores | None] | None = None
    cuda_graph: bool = False  # the forward was a replay of a captured step, whatever captured it
