"""Faults that users met with other servers, over HTTP with a real (random, tiny) model: see each test's first line."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.server import Server

pytestmark = pytest.mark.e2e

USER = [{"role": "user", "content": "é ñ ü 😀 你好"}]


@pytest.fixture(scope="module")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("openai")
    flags = ("--model-path", str(tiny_model), "--served-model-name", "tiny", "--dtype", "float32")
    with Server(folder, *flags, "--skip-server-warmup", "--enable-cache-report") as server:
        yield server.wait_ready()


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=120)


def complete(client: openai.OpenAI, **fields: Any) -> Any:
    return client.completions.create(**({"model": "tiny", "temperature": 0} | fields))


def joined(chunks: Any) -> str:
    return "".join(choice.text for chunk in chunks for choice in chunk.choices)


@pytest.mark.parametrize("prompt", ["😀 👍 😀 👍 😀", "é ñ ü é ñ ü", "你好世界。" * 4])
def test_characters_of_several_tokens_survive_streaming(client: openai.OpenAI, prompt: str) -> None:
    whole = complete(client, prompt=prompt, max_tokens=40).choices[0].text
    assert joined(complete(client, prompt=prompt, max_tokens=40, stream=True)) == whole


def test_a_prompt_that_ends_in_half_a_character_does_not_leak(server: Server, client: openai.OpenAI) -> None:
    with server.post("/tokenize", {"prompt": "Good morning 😀"}) as reply:
        ids = json.load(reply)["tokens"][:-1]
    whole = complete(client, prompt=ids, max_tokens=8).choices[0].text
    assert "Good morning" not in whole
    assert joined(complete(client, prompt=ids, max_tokens=8, stream=True)) == whole


def test_n_samples_are_apart_complete_and_counted_once(client: openai.OpenAI) -> None:
    fields: Any = {"model": "tiny", "messages": USER, "n": 3, "temperature": 1.2, "max_tokens": 16}
    whole = client.chat.completions.create(**fields, extra_body={"ignore_eos": True})
    texts = [choice.message.content for choice in whole.choices]
    assert len(set(texts)) > 1 and whole.usage is not None and whole.usage.completion_tokens == 48
    one = client.chat.completions.create(**(fields | {"n": 1}))
    assert one.usage is not None and whole.usage.prompt_tokens == one.usage.prompt_tokens
    stream = client.chat.completions.create(
        **fields, extra_body={"ignore_eos": True}, stream=True, stream_options={"include_usage": True}
    )
    finishes: dict[int, str] = {}
    usage = None
    for chunk in stream:
        usage = chunk.usage or usage
        finishes |= {choice.index: choice.finish_reason for choice in chunk.choices if choice.finish_reason}
    assert finishes == {0: "length", 1: "length", 2: "length"} and usage.completion_tokens == 48

    two = complete(client, prompt=["a b c", "d e"], n=2, max_tokens=16, extra_body={"ignore_eos": True})
    assert [choice.index for choice in two.choices] == [0, 1, 2, 3] and two.usage.completion_tokens == 64


def test_logprob_bytes_rebuild_the_text(client: openai.OpenAI) -> None:
    choice = client.chat.completions.create(
        model="tiny",
        messages=USER,
        logprobs=True,
        top_logprobs=2,
        max_tokens=32,
        temperature=0,  # type: ignore[arg-type]
    ).choices[0]
    entries = choice.logprobs.content
    assert b"".join(bytes(entry.bytes) for entry in entries).decode(errors="replace") == choice.message.content
    assert all(entry.top_logprobs[0].logprob == entry.logprob for entry in entries), "greedy is the best one"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 1, 5])
def test_echo_with_logprobs_scores_the_prompt(client: openai.OpenAI, max_tokens: int, stream: bool) -> None:
    prompt = "The quick brown fox, 你好."
    reply = complete(client, prompt=prompt, echo=True, logprobs=1, max_tokens=max_tokens, stream=stream)
    choices = [choice for chunk in reply for choice in chunk.choices] if stream else reply.choices
    text = "".join(choice.text for choice in choices)
    scored = [choice.logprobs for choice in choices if choice.logprobs]
    tokens = [token for part in scored for token in part.tokens]
    scores = [score for part in scored for score in part.token_logprobs]
    offsets = [offset for part in scored for offset in part.text_offset]
    assert text.startswith(prompt) and "".join(tokens) == text
    assert scores[0] is None and all(score is not None for score in scores[1:])
    assert all(text[offset:].startswith(token) for token, offset in zip(tokens, offsets, strict=True))


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_token_ends_the_text_without_cutting_it(client: openai.OpenAI, stream: bool) -> None:
    plain = complete(client, prompt="fox", max_tokens=6, logprobs=0).choices[0]
    with_ids = complete(client, prompt="fox", max_tokens=6, extra_body={"stop_token_ids": [2]}, stream=stream)
    assert (joined(with_ids) if stream else with_ids.choices[0].text) == plain.text


def test_a_seed_belongs_to_its_request(client: openai.OpenAI) -> None:
    def draw(**fields: Any) -> list[str]:
        reply = complete(client, prompt="fox", max_tokens=16, **({"temperature": 1.0} | fields))
        return [choice.text for choice in reply.choices]

    assert draw(seed=42) == draw(seed=42) == draw(seed=42, n=3)[:1] and draw(seed=42) != draw(seed=43)
    assert len({draw()[0] for _ in range(6)}) > 1
    for seed in (0, 2**31, -1):
        draw(seed=seed)


def test_a_repeated_prompt_is_cached_and_says_so(client: openai.OpenAI) -> None:
    first, second = (complete(client, prompt="the lazy dog " * 8, max_tokens=8) for _ in range(2))
    assert first.choices[0].text == second.choices[0].text
    cached = second.usage.prompt_tokens_details.cached_tokens
    assert 0 < cached <= second.usage.prompt_tokens - 1


def test_clients_that_go_away_leave_nothing_behind(server: Server) -> None:
    body = {"prompt": "fox", "max_tokens": 8000, "ignore_eos": True}
    for _ in range(3):
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body | {"stream": True}, timeout=60) as reply:
            next(reply.iter_raw())
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{server.url}/v1/completions", json=body, timeout=0.3)
    deadline = time.monotonic() + 10
    while httpx.post(f"{server.url}/flush_cache").status_code != 200:
        assert time.monotonic() < deadline, "something still runs for nobody"
        time.sleep(0.1)
