"""Losing one's memory and computing it again is invisible."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from tests.equality.harness import Ask, Ledger, Model, RealEngine, Switches
from tests.equality.workloads import catalog, random_ids
from tinysrt.messages import ContinueGenerationReqInput, PauseGenerationReqInput

POOL = 608


@pytest.mark.parametrize("loop", ["normal", "overlap"])
@pytest.mark.parametrize("page", [1, 16])
def test_an_overloaded_pool(llama: Model, ledger: Ledger, loop: str, page: int) -> None:
    """FC-29: 12 streams of 40 + 120 tokens with scores in a pool of about 600."""
    generator = random.Random(9)
    asks = [
        Ask(f"r{i}", random_ids(generator, 40), at=2 * i, logprobs=True, start=0).having(max_new_tokens=120)
        for i in range(12)
    ]
    with RealEngine(llama, Switches(loop, page=page), capacity=POOL, schedule_conservativeness=0.05) as engine:
        answers = engine.play(asks)
        assert any(answer.meta.num_retractions for answer in answers.values() if answer.meta)
        for ask in asks:
            ledger.check(llama, ask, answers[ask.rid])
        asks = [replace(ask, at=0) for ask in asks[:3]]
        alone = {ask.rid: engine.play([ask])[ask.rid] for ask in asks}
    for ask in asks:
        ledger.check(llama, ask, alone[ask.rid])
        assert alone[ask.rid].ids == answers[ask.rid].ids


@pytest.mark.parametrize("mode", ["retract", "in_place"])
@pytest.mark.parametrize(
    "switches", [Switches("normal", page=16), Switches("late", chunk=16), Switches(mixed=True, chunk=64)], ids=str
)
def test_a_pause_after_any_step(llama: Model, ledger: Ledger, switches: Switches, mode: str) -> None:
    """Scripted: everything is paused, or sent back, after step 1, 2, 3 … of a short life; penalties and draws too."""
    prompts = catalog()
    asks = [
        Ask("plain", prompts[8], logprobs=True).having(max_new_tokens=9),
        Ask("long", prompts[13]).having(max_new_tokens=5),
        Ask("penalized", prompts[4], at=2).having(max_new_tokens=12, repetition_penalty=1.4, frequency_penalty=0.5),
        Ask("seeded", prompts[5], at=1).having(max_new_tokens=10, top_k=50, temperature=1.3, sampling_seed=5),
    ]
    for turn in range(1, 18, 1 if mode == "retract" else 3):
        with RealEngine(llama, switches) as engine:
            arriving = {ask.at: ask.message() for ask in asks[2:]}
            engine.step([asks[0].message(), asks[1].message()])
            for step in range(1, turn):
                engine.step([arriving.pop(step)] if step in arriving else [])
            engine.step([PauseGenerationReqInput(reply_to="", mode=mode)])
            engine.step([*arriving.values(), ContinueGenerationReqInput(reply_to="")])
            engine.finish()
            for ask in asks:
                ledger.check(llama, ask, engine.answer(ask.rid))
