"""Prompts that step on every border: lengths around pages and chunks, shared prefixes, twins, and one of one token."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from tests.equality.harness import Ask, Model
from tests.model_executor.harness import VOCAB
from tinysrt.sampling_params import SamplingParams

LENGTH = 20  # longest output that the workloads ask for
LENGTHS = (1, 2, 3, 5, 9, 15, 16, 17, 31, 32, 33, 47, 64, 65, 100, 120)  # prompts of their own
SHARED = (16, 20, 33, 48, 64, 70)  # tokens of the first common prefix
SHARED_TOO = (7, 32, 40)  # of the second


def random_ids(generator: random.Random, length: int) -> list[int]:
    return [generator.randrange(8, VOCAB) for _ in range(length)]


def catalog() -> list[list[int]]:
    """32 prompts, the same for every model."""
    generator = random.Random(1)
    first, second = random_ids(generator, 80), random_ids(generator, 50)
    prompts = [random_ids(generator, length) for length in LENGTHS]
    prompts += [first[:length] + random_ids(generator, 4) for length in SHARED]
    prompts += [second[:length] + random_ids(generator, 9) for length in SHARED_TOO]
    prompts += [first[:48], second[:33], prompts[6], prompts[12], first[:64], first[:64] + second[:20], prompts[3]]
    assert len(prompts) == 32
    return prompts


def four_waves(model: Model) -> list[Ask]:
    """The catalog in four waves, the second while the first decodes. Limits differ, some end by a stop token. Some of
    the last wave want scores: nothing is mixed beside them, so the waves before have the mixed steps."""
    asks = []
    for index, prompt in enumerate(catalog()):
        wave = index % 4
        ask = Ask(f"r{index}", prompt, at=(0, 3, 9, 30)[wave], stream=index % 3 != 0)
        ask = ask.having(max_new_tokens=LENGTH if index % 2 else 1 + index * 7 % LENGTH)
        if index % 5 == 2:
            text = model.reference.greedy(prompt, LENGTH).ids
            ask = ask.having(stop_token_ids=[text[index % 11]])
        if index % 8 == 3:
            ask = replace(ask, logprobs=True, start=index % 16 % len(prompt), top=2)
        asks.append(ask)
    random.Random(2).shuffle(asks)
    return asks


def hot(index: int, **params: Any) -> SamplingParams:
    """Sampled at temperature 1.5, each with other filters: a neighbor that must not change others."""
    filters: dict[str, Any] = [{}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.05}, {"top_k": 40, "top_p": 0.9}][
        index % 5
    ]
    return SamplingParams(**{"temperature": 1.5, "sampling_seed": index, "max_new_tokens": 16, **filters, **params})
