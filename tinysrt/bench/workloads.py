"""The workloads W1 to W5: what is asked of a server, and which figures come out.

    name   what                                                                             figures
    W1     one request, 128 in, 128 out, streamed (three times, one after another)          TTFT, decode tokens/s
    W2     64 requests at once, 32 to 512 in, 32 to 128 out                                 output tokens/s
    W3     48 at once: 6 groups of 8 share a 768-token prefix, 64-token suffix, 32 out      wall, cached tokens, TTFT
    W3B    8 conversations of 4 turns: a shared 256-token system part, 64 a turn, 32 out    wall, cached tokens
    W4     Poisson arrivals, 2 a second for 30 s, 256 in, 64 out, streamed                  TTFT and ITL, p50 and p99
    W5     8 streams (32 in, 256 out); once each has 16 tokens, a prompt of 4,096 arrives   longest gap, long TTFT

Prompts are token ids drawn uniformly from the vocabulary less its first three; greedy; without end tokens, so that
every server does the same work. Two generators: `shape` draws lengths, order and arrival times, `ids` the tokens. Two
runs with the same shape and other ids are the same work without one prompt in common, which is what an A/A pair needs.

Invariant: a figure is of the client's clock, and of a run in which every request got exactly the tokens it asked for.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from tinysrt.bench.dialects import Answer, Client, RunVoid
from tinysrt.bench.report import percentile
from tinysrt.errors import StartupError

T = TypeVar("T")
FIRST_ID = 3  # below: usually unknown, begin, end
Figures = dict[str, float | None]  # None: this server does not say


@dataclass(frozen=True)
class Figure:
    """What a name means, and which way is better."""

    title: str
    higher_is_better: bool = False


FIGURES = {
    "ttft_ms": Figure("TTFT, ms"),
    "decode_tok_s": Figure("decode, tok/s", True),
    "output_tok_s": Figure("output, tok/s", True),
    "wall_s": Figure("wall time, s"),
    "cached_tokens": Figure("cached tokens", True),
    "ttft_p50_ms": Figure("TTFT p50, ms"),
    "ttft_p99_ms": Figure("TTFT p99, ms"),
    "itl_p50_ms": Figure("ITL p50, ms"),
    "itl_p99_ms": Figure("ITL p99, ms"),
    "drain_s": Figure("last arrival to last token, s"),
    "longest_gap_ms": Figure("longest gap, ms"),
    "long_ttft_s": Figure("long prompt's TTFT, s"),
}


@dataclass
class Draws:
    """Everything that chance decides in one run."""

    vocab_size: int
    seed: int  # of the shape: both sides of a pair have the same
    repetition: int = 0  # other ids, same shape
    scale: float = 1.0  # below 1: a smaller workload of the same form, for a tiny model or a first look
    workload: str = ""  # other ids for each: none begins as another one does, and finds it in a cache
    shape: np.random.Generator = field(init=False)
    ids: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        if self.vocab_size <= FIRST_ID:
            raise StartupError(f"a vocabulary of {self.vocab_size} leaves no token to draw")
        self.shape = np.random.default_rng([self.seed, 0])
        self.ids = np.random.default_rng([self.seed, 1, self.repetition, *self.workload.encode()])

    def prompt(self, tokens: int) -> list[int]:
        return self.ids.integers(FIRST_ID, self.vocab_size, tokens).tolist()

    def size(self, full: float) -> int:
        return max(1, round(full * self.scale))

    def lengths(self, low: int, high: int, count: int) -> list[int]:
        return self.shape.integers(self.size(low), self.size(high) + 1, count).tolist()


async def w1(client: Client, draws: Draws) -> Figures:
    answers = []
    for _ in range(3):
        answers.append(await client.ask(draws.prompt(draws.size(128)), max(2, draws.size(128)), stream=True))
    spans = [(a.completion_tokens - 1, a.arrivals[-1] - a.arrivals[0]) for a in answers]
    rates = [tokens / span for tokens, span in spans if span > 0]  # not measurable: all came in one read
    return {
        "ttft_ms": 1e3 * statistics.median(a.ttft for a in answers),
        "decode_tok_s": statistics.median(rates) if rates else None,
    }


async def w2(client: Client, draws: Draws) -> Figures:
    count = draws.size(64)
    inputs, outputs = draws.lengths(32, 512, count), draws.lengths(32, 128, count)
    prompts = [draws.prompt(tokens) for tokens in inputs]
    begin, answers = await together(
        [client.ask(ids, tokens) for ids, tokens in zip(prompts, outputs, strict=True)],
    )
    wall = max(answer.end for answer in answers) - begin
    return {"output_tok_s": sum(outputs) / wall, "wall_s": wall}


async def w3(client: Client, draws: Draws) -> Figures:
    prompts = []
    for _ in range(max(2, draws.size(6))):
        prefix = draws.prompt(draws.size(768))
        prompts += [prefix + draws.prompt(draws.size(64)) for _ in range(max(2, draws.size(8)))]
    order = draws.shape.permutation(len(prompts))  # groups arrive mixed: no server's queue order is favored
    begin, answers = await together([client.ask(prompts[i], draws.size(32), stream=True) for i in order])
    return {
        "wall_s": max(answer.end for answer in answers) - begin,
        "cached_tokens": cached(answers),
        "ttft_p50_ms": 1e3 * percentile([answer.ttft for answer in answers], 50),
    }


async def w3b(client: Client, draws: Draws) -> Figures:
    system = draws.prompt(draws.size(256))
    turns = [[draws.prompt(draws.size(64)) for _ in range(4)] for _ in range(max(2, draws.size(8)))]

    async def converse(mine: list[list[int]]) -> list[Answer]:
        history, answers = list(system), []
        for words in mine:
            history += words
            answer = await client.ask(list(history), draws.size(32), want_ids=True)
            if answer.output_ids is None or len(answer.output_ids) != answer.completion_tokens:
                raise RunVoid("W3B feeds the answer back, and this server does not say its token ids")
            history += answer.output_ids
            answers.append(answer)
        return answers

    begin, conversations = await together([converse(mine) for mine in turns])
    answers = [answer for conversation in conversations for answer in conversation]
    return {"wall_s": max(answer.end for answer in answers) - begin, "cached_tokens": cached(answers)}


async def w4(client: Client, draws: Draws) -> Figures:
    seconds, rate = 30 * draws.scale, 2.0
    arrivals, at = [], 0.0
    while (at := at + float(draws.shape.exponential(1 / rate))) < seconds:
        arrivals.append(at)
    arrivals = arrivals or [0.0]
    prompts = [draws.prompt(draws.size(256)) for _ in arrivals]
    begin = time.perf_counter()

    async def arrive(at: float, ids: list[int]) -> Answer:
        await asyncio.sleep(begin + at - time.perf_counter())
        return await client.ask(ids, max(2, draws.size(64)), stream=True)

    _, answers = await together([arrive(at, ids) for at, ids in zip(arrivals, prompts, strict=True)])
    ttfts, gaps = [a.ttft for a in answers], [gap for a in answers for gap in a.gaps]
    return {
        "ttft_p50_ms": 1e3 * percentile(ttfts, 50),
        "ttft_p99_ms": 1e3 * percentile(ttfts, 99),
        "itl_p50_ms": 1e3 * percentile(gaps, 50) if gaps else None,
        "itl_p99_ms": 1e3 * percentile(gaps, 99) if gaps else None,
        "drain_s": max(a.end for a in answers) - begin - arrivals[-1],  # grows with every second if it is saturated
    }


async def w5(client: Client, draws: Draws) -> Figures:
    streams, threshold = max(2, draws.size(8)), draws.size(16)
    warm = asyncio.Event()
    counting = [0] * streams

    def watch(i: int) -> Callable[[Answer], None]:
        def on_event(answer: Answer) -> None:
            counting[i] = answer.completion_tokens
            if min(counting) >= threshold:
                warm.set()

        return on_event

    async def long() -> Answer:
        await warm.wait()
        return await client.ask(draws.prompt(draws.size(4096)), 2, stream=True)

    decoding = [client.ask(draws.prompt(draws.size(32)), draws.size(256), stream=True, on_event=watch(i))
                for i in range(streams)]  # fmt: skip
    _, (newcomer, *answers) = await together([long(), *decoding])
    gaps = [gap for answer in answers for gap in gaps_during(answer.arrivals, newcomer.sent, newcomer.arrivals[0])]
    return {"longest_gap_ms": 1e3 * max(gaps) if gaps else None, "long_ttft_s": newcomer.ttft}


def gaps_during(arrivals: list[float], begin: float, end: float) -> list[float]:
    """The gaps of a stream that lie, in part at least, between two moments."""
    pairs = zip(arrivals, arrivals[1:], strict=False)
    return [after - before for before, after in pairs if after > begin and before < end]


async def together(asks: list[Awaitable[T]]) -> tuple[float, list[T]]:
    """All at once; (begin, answers in order). The first that is void ends the others: they would prove nothing."""
    begin = time.perf_counter()
    tasks = [asyncio.ensure_future(ask) for ask in asks]
    try:
        return begin, list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def cached(answers: list[Answer]) -> float | None:
    """Prompt tokens that came from the server's cache; None unless it says so of every answer."""
    known = [answer.cached_tokens for answer in answers if answer.cached_tokens is not None]
    return float(sum(known)) if len(known) == len(answers) else None


WORKLOADS: dict[str, Callable[[Client, Draws], Coroutine[Any, Any, Figures]]] = {
    "W1": w1, "W2": w2, "W3": w3, "W3B": w3b, "W4": w4, "W5": w5,
}  # fmt: skip


async def warm_up(client: Client, draws: Draws) -> None:
    """Before anything is measured: one long prompt, then a small batch. Compilers and caches wake up."""
    await client.ask(draws.prompt(draws.size(256)), draws.size(8))
    await together([client.ask(draws.prompt(draws.size(48)), draws.size(8), stream=True) for _ in range(4)])
