"""Scores equal Hugging Face's log-softmax within 1e-3, however prompt and output reached the model."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.equality.conftest import TINY_FAMILIES
from tests.equality.harness import Ask, Ledger, Model, RealEngine, Switches
from tests.equality.workloads import catalog, random_ids
from tinysrt.messages import AbortReq, ContinueGenerationReqInput, PauseGenerationReqInput

SWITCHES = [
    Switches("normal"),
    Switches("overlap", radix=False, chunk=16),
    Switches("late", chunk=64, page=16, mixed=True, policy="fcfs"),
    Switches("overlap", chunk=16, page=16, tight=True),
]
PROMPT = random_ids(random.Random(8), 60)


@pytest.mark.parametrize("switches", SWITCHES, ids=str)
@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_scored_requests_beside_others(
    models: Callable[[str], Model], ledger: Ledger, family: str, switches: Switches
) -> None:
    """Input scores, output scores, top lists and named tokens, from every kind of start, beside requests with none."""
    model = models(family)
    asks = []
    for i, prompt in enumerate(catalog()):
        ask = Ask(f"r{i}", prompt, at=i % 6, stream=i % 3 > 0).having(max_new_tokens=i % 9)
        if i % 2:
            starts = (-1, 0, len(prompt) - 1, len(prompt) // 2, len(prompt))
            ask = replace(ask, logprobs=True, start=starts[i % 5], top=i % 4, named=[i, 7] if i % 3 else None)
        asks.append(ask)
    with RealEngine(model, switches, capacity=320 if switches.tight else None) as engine:
        answers = engine.play(asks)
    for ask in asks:
        ledger.check(model, ask, answers[ask.rid])


@pytest.mark.parametrize("start", [0, 1, 30, 59])
@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("chunk", [-1, 16])
def test_a_warm_prompt_is_scored_whole(llama: Model, ledger: Ledger, start: int, page: int, chunk: int) -> None:
    """Trap 3: the cache may supply only what comes before the first score; one entry per prompt token. Trap 4: the
    first is null, the others are P(token | those before)."""
    plain = Ask("warm", PROMPT).having(max_new_tokens=4)
    scored = replace(plain, rid="scored", logprobs=True, start=start, top=2)
    with RealEngine(llama, Switches(page=page, chunk=chunk)) as engine:
        for ask in (plain, scored, scored):
            answer = engine.play([ask])[ask.rid]
            ledger.check(llama, ask, answer)
            if ask is scored:
                assert answer.input is not None and len(answer.input) == 60 - start
                assert answer.cached_tokens == start // page * page


@pytest.mark.parametrize("switches", SWITCHES[:3], ids=str)
def test_prefill_scores_equal_decode_scores_of_the_same_text(llama: Model, ledger: Ledger, switches: Switches) -> None:
    for i, prompt in enumerate([PROMPT[:11], PROMPT[:32], PROMPT]):
        decoded = Ask(f"d{i}", prompt, logprobs=True, top=3, named=[9]).having(max_new_tokens=18)
        with RealEngine(llama, switches) as engine:
            first = engine.play([decoded])[decoded.rid]
            again = replace(decoded, rid=f"p{i}", prompt=prompt + first.ids, start=len(prompt) - 1)
            second = engine.play([again.having(max_new_tokens=0)])[again.rid]
        assert second.input is not None and second.input_top is not None and second.input_named is not None
        assert [token for _, token in second.input[1:]] == first.ids and second.ids == []
        assert [score for score, _ in second.input[1:]] == pytest.approx(first.logprobs, abs=1e-3)
        for a, b in zip([*first.top, *first.named], [*second.input_top[1:], *second.input_named[1:]], strict=True):
            assert [token for _, token in a] == [token for _, token in b]
            assert [score for score, _ in a] == pytest.approx([score for score, _ in b], abs=1e-3)
        ledger.check(llama, decoded, first)


@pytest.mark.parametrize("loop", ["normal", "overlap"])
def test_a_prompt_that_loses_its_memory_between_two_chunks_is_scored_once(
    llama: Model, ledger: Ledger, loop: str
) -> None:
    """The scores of its first chunks are collected again, not twice."""
    scored = Ask("a", PROMPT, logprobs=True, start=3, top=2).having(max_new_tokens=6)
    for turn in range(1, 6):
        with RealEngine(llama, Switches(loop, chunk=16)) as engine:
            engine.step([scored.message()])
            for _ in range(turn):
                engine.step()
            engine.step([PauseGenerationReqInput(reply_to="", mode="retract"), ContinueGenerationReqInput(reply_to="")])
            engine.finish()
            answer = engine.answer("a")
        ledger.check(llama, scored, answer)
        assert answer.meta is not None and answer.meta.num_retractions == 1


def test_a_scored_request_that_is_aborted_keeps_as_many_scores_as_tokens(llama: Model, ledger: Ledger) -> None:
    scored = Ask("a", PROMPT[:20], logprobs=True, start=0).having(max_new_tokens=30)
    for turn in range(1, 12, 2):
        with RealEngine(llama, Switches("late", chunk=16)) as engine:
            engine.step([scored.message()])
            for _ in range(turn):
                engine.step()
            engine.step([AbortReq(rid="a")])
            engine.finish()
            answer = engine.answer("a")
        ledger.check(llama, scored, answer, whole=False)
