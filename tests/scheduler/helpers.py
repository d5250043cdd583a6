"""Small builders for the scheduler's unit tests: a memory with some free and some cached tokens, and requests."""

from __future__ import annotations

from typing import Any

import numpy as np

from tinysrt.managers.request_life import Stage
from tinysrt.managers.schedule_batch import Req, ScheduleBatch, StepMemory
from tinysrt.managers.schedule_policy import PrefillAdder
from tinysrt.mem_cache.allocator import make_allocator
from tinysrt.mem_cache.chunk_cache import ChunkCache
from tinysrt.mem_cache.memory_pool import ReqToTokenPool
from tinysrt.mem_cache.radix_cache import RadixCache
from tinysrt.messages import TokenizedGenerateReqInput
from tinysrt.sampling_params import SamplingParams


def make_memory(free: int, *, page_size: int = 1, radix: bool = True, width: int = 200_000) -> StepMemory:
    pool = ReqToTokenPool(8, width)
    allocator = make_allocator(-(-free // page_size) * page_size, page_size)
    cache = RadixCache if radix else ChunkCache
    return StepMemory(pool, allocator, cache(pool, allocator, page_size))


def make_req(
    rid: str, prompt: int | list[int], *, max_new_tokens: int = 10, produced: int = 0, start: int = 0, **params: Any
) -> Req:
    """A request with a prompt of so many distinct ids (from `start` on), or of these ids."""
    ids = list(range(start, start + prompt)) if isinstance(prompt, int) else prompt
    message = TokenizedGenerateReqInput(rid=rid, reply_to="", input_ids=ids, sampling_params=SamplingParams(**params))
    req = Req(message, eos_ids=frozenset({256}), max_new_tokens=max_new_tokens)
    req.output_ids = [1] * produced
    return req


def running(*reqs: Req) -> ScheduleBatch:
    for req in reqs:
        req.stage = Stage.RUNNING
    return ScheduleBatch(
        reqs=list(reqs), seq_lens=np.array([r.num_tokens for r in reqs], np.int64), rows=np.zeros(len(reqs), np.int64)
    )


def make_adder(memory: StepMemory, decode: ScheduleBatch | None = None, **budgets: Any) -> PrefillAdder:
    settings: dict[str, Any] = {"new_token_ratio": 0.7, "input_budget": 16384, "chunk_budget": 8192, **budgets}
    return PrefillAdder(memory, decode or ScheduleBatch(), **settings)
