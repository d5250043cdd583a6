"""What Hugging Face gives: the tokens and scores that tinysrt's are compared with.

Plain greedy decoding is `transformers`' own `generate`. Everything else (sampling, penalties, bias, min_new_tokens) is
a naive loop over Hugging Face's logits, one token and one Python step at a time, written from the definitions and
sharing no code with the sampler but the hash that turns (seed, position) into a number.

Results are cached, so that each is computed once per session, however many configurations are compared with it.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from tinysrt.model_executor.sampling_batch_info import uniforms
from tinysrt.sampling_params import SamplingParams

# A token may differ only where the reference itself is undecided: the two best logits are this close, or (when drawing)
# the random number is this close to the border between two tokens. Float32 sums in another order differ by about 1e-5.
TIE = 1e-4


@dataclass(frozen=True)
class Trace:
    """A decoded text. Row k of `scores` is what token k was taken from: logits after penalties, bias, temperature."""

    ids: list[int]
    scores: Tensor  # (n, vocab)
    margins: list[float]  # how far token k is from being another one

    def until(self, length: int, stop_ids: frozenset[int]) -> Trace:
        """The first `length` tokens, or up to and with the first stop token."""
        ends = [k + 1 for k, token in enumerate(self.ids[:length]) if token in stop_ids]
        end = min([length, *ends])
        return Trace(self.ids[:end], self.scores[:end], self.margins[:end])


class Reference:
    def __init__(self, model: Any):
        self.model = model.eval()
        arguments = inspect.signature(model.forward).parameters
        self.cache_argument = "cache" if "cache" in arguments else "past_key_values"  # its name in older transformers
        self.greedy_traces: dict[tuple[int, ...], Trace] = {}
        self.naive_traces: dict[Any, Trace] = {}
        self.forwards: dict[tuple[int, ...], Tensor] = {}

    def decode(
        self, prompt: Sequence[int], length: int, params: SamplingParams, produced: Sequence[int], stops: frozenset[int]
    ) -> Trace:
        """The next tokens after prompt + produced, until `length` tokens or a stop token."""
        if length == 0:
            return Trace([], torch.empty(0, 1), [])
        if is_plain_greedy(params):
            return self.greedy([*prompt, *produced], length).until(length, stops)
        # How long the text may be does not change it; which tokens are forbidden at first does.
        how = msgspec.structs.replace(params, max_new_tokens=None, stop_token_ids=[], ignore_eos=False)
        forbidden = stops if params.min_new_tokens else frozenset()
        key = (tuple(prompt), tuple(produced), repr(how), forbidden)
        known = self.naive_traces.get(key)
        if known is None or len(known.ids) < length:
            known = self.naive_traces[key] = self._naive(list(prompt), length, params, list(produced), stops)
        return known.until(length, stops)

    def greedy(self, prompt: Sequence[int], length: int) -> Trace:
        """`generate` with no end token."""
        known = self.greedy_traces.get(tuple(prompt))
        if known is None or len(known.ids) < length:
            output = self.generate(prompt, length, eos_token_id=None)
            logits = torch.stack([step[0] for step in output.logits])
            best = logits.topk(2).values
            known = Trace(output.sequences[0, len(prompt) :].tolist(), logits, (best[:, 0] - best[:, 1]).tolist())
            self.greedy_traces[tuple(prompt)] = known
        return known.until(length, frozenset())

    @torch.inference_mode()
    def generate(self, prompt: Sequence[int], length: int, eos_token_id: int | list[int] | None) -> Any:
        ids = torch.tensor([list(prompt)])
        return self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=length,
            do_sample=False,
            eos_token_id=eos_token_id,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )

    @torch.inference_mode()
    def logprobs(self, ids: Sequence[int]) -> Tensor:
        """(len(ids), vocab): row i is the log distribution of the token at i + 1."""
        key = tuple(ids)
        if key not in self.forwards:
            self.forwards[key] = self.model(torch.tensor([list(ids)])).logits[0].float().log_softmax(-1)
        return self.forwards[key]

    @torch.inference_mode()
    def _naive(
        self, prompt: list[int], length: int, params: SamplingParams, produced: list[int], stops: frozenset[int]
    ) -> Trace:
        trace = Trace([], torch.empty(0), [])
        rows: list[Tensor] = []
        step = self.model(torch.tensor([prompt + produced]), use_cache=True)
        while len(trace.ids) < length:
            row = adjusted(step.logits[0, -1], produced, params, stops)
            position = len(prompt) + len(produced)
            token, margin = best(row) if params.is_greedy else drawn(row, params, position)
            rows.append(row)
            trace.ids.append(token)
            trace.margins.append(margin)
            produced = [*produced, token]
            step = self.model(torch.tensor([[token]]), **{self.cache_argument: step.past_key_values}, use_cache=True)
        return Trace(trace.ids, torch.stack(rows), trace.margins)


def is_plain_greedy(params: SamplingParams) -> bool:
    return (
        params.is_greedy
        and params.frequency_penalty == params.presence_penalty == params.min_new_tokens == 0
        and params.repetition_penalty == params.temperature == 1.0
        and not params.logit_bias
    )


def adjusted(logits: Tensor, produced: list[int], params: SamplingParams, stops: frozenset[int]) -> Tensor:
    """Penalties on what was produced, forbidden stop tokens, bias, temperature: in this order."""
    row = logits.double().tolist()
    for token, count in Counter(produced).items():
        row[token] -= params.frequency_penalty * count + params.presence_penalty
        row[token] *= 1 / params.repetition_penalty if row[token] > 0 else params.repetition_penalty
    if len(produced) < params.min_new_tokens:
        for token in stops:
            row[token] = -float("inf")
    for token, bias in (params.logit_bias or {}).items():
        row[token] += bias
    return torch.tensor(row, dtype=torch.float64) / params.temperature


def best(row: Tensor) -> tuple[int, float]:
    values, ids = row.topk(2)
    return int(ids[0]), float(values[0] - values[1])


def drawn(row: Tensor, params: SamplingParams, position: int) -> tuple[int, float]:
    """One draw: keep by top_k, top_p and min_p, then walk through what is left until the sum passes the number."""
    probs = row.softmax(-1).tolist()
    ranking = sorted(range(len(probs)), key=lambda token: (-probs[token], token))
    kept: set[int] = set()
    borders = []  # distances from keeping another set
    mass = 0.0
    for rank, token in enumerate(ranking):
        if rank >= params.top_k or mass > params.top_p or probs[token] < params.min_p * probs[ranking[0]]:
            break
        kept.add(token)
        mass += probs[token]
        if params.top_p < 1:
            borders.append(abs(mass - params.top_p))
        if rank + 1 == params.top_k < len(ranking):
            borders.append(probs[token] - probs[ranking[rank + 1]])
        if params.min_p > 0:
            borders += [abs(probs[t] - params.min_p * probs[ranking[0]]) for t in ranking[rank : rank + 2]]
    seed = np.array([(params.sampling_seed or 0) & (2**64 - 1)], dtype=np.uint64)
    goal = float(uniforms(seed, [position])[0]) * mass
    running = 0.0
    for token in sorted(kept):
        running += probs[token]
        if running > goal:
            edges = [abs(running - goal) / mass, abs(running - probs[token] - goal) / mass]
            return token, min(edges + borders)
    raise AssertionError("a number below the whole mass falls on some token")
