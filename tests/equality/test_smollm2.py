"""The demo model, in float32: SmolLM2's own words are Hugging Face's, alone and in a mixed batch of 32."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.equality.harness import Ask, Ledger, Model, RealEngine, Switches
from tests.equality.workloads import hot
from tinysrt.text.tokenizer import Tokenizer

pytestmark = pytest.mark.slow

LENGTH = 10
SYSTEM = "You are a helpful assistant that answers briefly, in one sentence.\n"
TEXTS = (
    "The",
    "Once upon a time",
    "def fibonacci(n):\n    ",
    "1, 2, 3, 5, 8, 13,",
    "Die Hauptstadt von Frankreich heißt",
    SYSTEM + "What is the capital of France?",
    SYSTEM + "What is the capital of Italy?",
    SYSTEM + "Name three colors.",
    SYSTEM,
    "Water boils at a temperature of " * 3,
    "The quick brown fox jumps over the lazy dog. " * 2,
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
)


@pytest.fixture(scope="module")
def prompts(smollm2: Model) -> list[list[int]]:
    tokenizer = Tokenizer.load(str(smollm2.folder))
    return [tokenizer.encode(text) for text in TEXTS]


def mixed_batch(prompts: list[list[int]]) -> list[Ask]:
    """32 requests from 12 prompts: other limits, some scored, some sampled, in three waves."""
    asks = []
    for i in range(32):
        prompt = prompts[i % len(prompts)]
        ask = Ask(f"r{i}", prompt, at=i // 12).having(max_new_tokens=LENGTH if i < 12 else 5 + i % 6)
        if i % 8 == 7:
            ask = replace(ask, params=hot(i, max_new_tokens=6))
        if 24 <= i < 30:
            ask = replace(ask, logprobs=True, start=max(0, len(prompt) - 12), top=2)
        asks.append(ask)
    return asks


@pytest.mark.parametrize(
    "switches",
    [
        Switches("normal", radix=False),
        Switches("overlap", chunk=64, page=16, policy="fcfs"),
        Switches("overlap", chunk=64, mixed=True, tight=True),
    ],
    ids=str,
)
def test_a_mixed_batch_of_32(smollm2: Model, ledger: Ledger, prompts: list[list[int]], switches: Switches) -> None:
    asks = mixed_batch(prompts)
    with RealEngine(smollm2, switches, capacity=320 if switches.tight else None) as engine:
        answers = engine.play(asks)
        assert any(a.meta.num_retractions for a in answers.values() if a.meta) == switches.tight
        assert (engine.modes["MIXED"] > 0) == switches.mixed
        assert engine.widest > 25 or switches.tight
    for ask in asks:
        ledger.check(smollm2, ask, answers[ask.rid])


def test_each_prompt_alone(smollm2: Model, ledger: Ledger, prompts: list[list[int]]) -> None:
    with RealEngine(smollm2, Switches("overlap", chunk=16)) as engine:
        for i, prompt in enumerate(prompts[:8]):
            ask = Ask(f"r{i}", prompt).having(max_new_tokens=LENGTH)
            ledger.check(smollm2, ask, engine.play([ask])[ask.rid])


def test_scores_of_prompt_and_output(smollm2: Model, ledger: Ledger, prompts: list[list[int]]) -> None:
    asks = [
        Ask(f"r{i}", prompt, logprobs=True, start=0, top=5, named=[0, 2, 49151]).having(max_new_tokens=4)
        for i, prompt in enumerate(prompts[1:6])
    ]
    with RealEngine(smollm2, Switches(chunk=16)) as engine:
        answers = engine.play(asks)
    for ask in asks:
        ledger.check(smollm2, ask, answers[ask.rid])
