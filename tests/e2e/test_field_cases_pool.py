"""Faults around the KV pool and the prefix cache, on real servers with a small pool and pages of 1 and of 16 tokens."""

from __future__ import annotations

import random
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.native import WITH_MARGINS, Native, assert_same_but_for_ties, at_once
from tests.e2e.server import Server

pytestmark = pytest.mark.e2e

POOL = 608  # 38 pages of 16
EOS = 2


@pytest.fixture(scope="module", params=[1, 16], ids=["page1", "page16"])
def small(request: pytest.FixtureRequest, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """(page size, client) of a server whose scheduler hopes too much and checks every slot after every step."""
    flags = ("--model-path", str(tiny_model), "--dtype", "float32", "--skip-server-warmup", "--debug-invariants")
    pool = ("--max-total-tokens", str(POOL), "--page-size", str(request.param), "--schedule-conservativeness", "0.1")
    with Server(tmp_path_factory.mktemp("pool"), *flags, *pool) as server:
        yield request.param, Native(server.wait_ready())


def ids(generator: random.Random, count: int) -> list[int]:
    return [generator.randrange(3, 400) for _ in range(count)]


@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33, 64, 128])
def test_fc25_a_prompt_that_is_wholly_cached_still_computes_its_last_token(small: Any, length: int) -> None:
    page, native = small
    prompt = ids(random.Random(length), length)
    cold, warm, again = (native(prompt, WITH_MARGINS) for _ in range(3))
    whole = (length - 1) // page * page  # pages that are full before the last token
    assert [answer["meta_info"]["cached_tokens"] for answer in (cold, warm, again)] == [0, whole, whole]
    for answer in (warm, again):
        assert_same_but_for_ties(cold, answer)

    grown = native([*prompt, *cold["output_ids"], 9])["meta_info"]
    known = length + len(cold["output_ids"]) - 1  # the last output token was never an input
    assert grown["prompt_tokens"] - 1 >= grown["cached_tokens"] == known // page * page
    middle = length // 2
    changed = [*prompt[:middle], (prompt[middle] + 1) % 400, *prompt[middle + 1 :]]
    assert native(changed)["meta_info"]["cached_tokens"] == middle // page * page

    samples = native(prompt, WITH_MARGINS, n=3)
    assert len(samples) == 3
    for sample in samples:
        assert_same_but_for_ties(cold, sample)
        assert sample["meta_info"]["prompt_tokens"] == length and sample["meta_info"]["cached_tokens"] == whole
    native.wait_until_idle()


def test_fc29_being_retracted_is_invisible(small: Any) -> None:
    _, native = small
    generator = random.Random(1)
    shared = ids(generator, 24)
    prompts = [shared + ids(generator, 16) if i % 3 == 0 else ids(generator, 40) for i in range(12)]
    params: dict[str, Any] = {"max_new_tokens": 120, "ignore_eos": False, "logit_bias": {str(EOS): -100}}
    alone = [native(prompt, WITH_MARGINS, **params) for prompt in prompts]
    native.wait_until_idle()

    # In a trickle: who runs already is charged by the ratio, newcomers in full, so only this order promises too much.
    scored = {"return_logprob": True, "logprob_start_len": 0}
    speaks = [threading.Event() for _ in prompts]

    def listen(i: int) -> list[Any]:
        if i:
            speaks[i - 1].wait(2.0)
        events = []
        for event in native.events(prompts[i], scored, **params):
            speaks[i].set()
            events.append(event)
        return events

    streams = at_once([lambda i=i: listen(i) for i in range(len(prompts))])
    assert sum(events[-1]["meta_info"]["num_retractions"] for events in streams) > 0
    for prompt, events, expected in zip(prompts, streams, alone, strict=True):
        assert_same_but_for_ties(expected, events[-1])
        for event in events:
            meta = event["meta_info"]
            assert [token for _, token, _ in meta["output_token_logprobs"]] == event["output_ids"]
            assert meta["prompt_tokens"] == 40 and meta["cached_tokens"] <= 39
        final = events[-1]["meta_info"]
        assert final["completion_tokens"] == 120 and final["finish_reason"] == {"type": "length", "length": 120}
        assert [token for _, token, _ in final["input_token_logprobs"]] == prompt
    native.wait_until_idle()


def test_a_prompt_that_can_never_fit_is_refused_with_the_limit_and_one_at_the_limit_runs(small: Any) -> None:
    """FC-28 too: beside a prompt that fits, it is still refused before anything is queued."""
    _, native = small
    reply = native.http.post("/generate", json=native.body([[7] * 10, [7] * POOL], {}, {"max_new_tokens": 1}))
    told = re.search(r"at most (\d+)", reply.json()["error"]["message"])
    assert reply.status_code == 400 and told is not None
    most = int(told[1])
    assert most > POOL - 50
    reply = native.http.post("/generate", json=native.body([[7] * 10, [7] * (most + 1)], {}, {"max_new_tokens": 1}))
    assert reply.status_code == 400 and native.http.post("/flush_cache").status_code == 200, "nothing was queued"
    answer = native([7] * most, max_new_tokens=500)["meta_info"]
    assert answer["finish_reason"]["type"] == "length" and answer["prompt_tokens"] == most
    assert answer["completion_tokens"] > 1
    native.wait_until_idle()


def test_random_load_on_a_small_pool_leaves_nothing(small: Any) -> None:
    """FC-30 end to end: mixed lengths, aborts and scores at once; every slot is checked after every step."""
    _, native = small
    generator = random.Random(2)
    stem = ids(generator, 50)

    def one(i: int) -> Any:
        prompt = stem[: generator.randrange(50)] + ids(generator, generator.choice([1, 15, 16, 17, 90, 200]))
        fields = {"return_logprob": True, "logprob_start_len": 0} if i % 5 == 0 else {}
        answer = native(prompt, fields, max_new_tokens=generator.choice([1, 15, 16, 17, 60]), ignore_eos=i % 2 == 0)
        return answer["meta_info"]["finish_reason"]["type"]

    assert set(at_once([lambda i=i: one(i) for i in range(40)])) <= {"length", "stop"}
    native.wait_until_idle()
