"""A client of `/generate` for the tests: one call, a stream whose promises are checked, several at once."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from tests.e2e.server import Server

Prompt = str | list[Any]
TIE = 1e-3  # float32: two best tokens this close in log probability may change places with the batch around them


class Native:
    def __init__(self, server: Server):
        self.url = server.url
        self.http = httpx.Client(base_url=server.url, timeout=120)

    def body(self, prompt: Prompt, fields: dict[str, Any], params: dict[str, Any]) -> dict[str, Any]:
        """Greedy and endless, unless `params` say otherwise."""
        first: Any = prompt[0] if isinstance(prompt, list) else prompt
        name = "text" if isinstance(first, str) else "input_ids"
        params = {"temperature": 0, "ignore_eos": True, "max_new_tokens": 16} | params
        return {name: prompt, "sampling_params": params} | fields

    def __call__(self, prompt: Prompt, fields: dict[str, Any] | None = None, **params: Any) -> Any:
        reply = self.http.post("/generate", json=self.body(prompt, fields or {}, params))
        assert reply.status_code == 200, reply.text
        return reply.json()

    def stream(self, prompt: Prompt, fields: dict[str, Any] | None = None, **params: Any) -> list[Any]:
        """All events of a stream."""
        return list(self.events(prompt, fields, **params))

    def events(self, prompt: Prompt, fields: dict[str, Any] | None = None, **params: Any) -> Iterator[Any]:
        """Event by event; what was sent before must stay a prefix, and the end must be told."""
        body = self.body(prompt, (fields or {}) | {"stream": True}, params)
        last: Any = None
        with httpx.stream("POST", self.url + "/generate", json=body, timeout=120) as reply:
            assert reply.status_code == 200
            for line in reply.iter_lines():
                if not line:
                    continue
                data = line.removeprefix("data: ")
                if data == "[DONE]":
                    assert last is not None and last["meta_info"]["finish_reason"] is not None
                    return
                event = json.loads(data)
                assert "error" not in event, event
                if last is not None:
                    assert event["text"].startswith(last["text"])
                    assert event["output_ids"][: len(last["output_ids"])] == last["output_ids"]
                last = event
                yield event
        raise AssertionError("the stream ended without [DONE]")

    def both(self, prompt: Prompt, fields: dict[str, Any] | None = None, **params: Any) -> Any:
        """The answer, which the stream must give too."""
        plain = self(prompt, fields, **params)
        streamed = self.stream(prompt, fields, **params)[-1]
        assert streamed["text"] == plain["text"] and streamed["output_ids"] == plain["output_ids"]
        assert streamed["meta_info"]["finish_reason"] == plain["meta_info"]["finish_reason"]
        return plain

    def text_of(self, ids: list[int]) -> str:
        return str(self.http.post("/detokenize", json={"tokens": ids}).json()["text"])

    def ids_of(self, text: str) -> list[int]:
        return list(self.http.post("/tokenize", json={"prompt": text}).json()["tokens"])

    def state(self) -> Any:
        return self.http.get("/server_info").json()["internal_states"][0]

    def wait_until_idle(self, seconds: float = 10.0) -> None:
        """Nothing runs or waits, nothing but the cache holds memory, and the cache can be emptied."""
        deadline = time.monotonic() + seconds
        while (flush := self.http.post("/flush_cache")).status_code != 200:
            assert time.monotonic() < deadline, flush.text
            time.sleep(0.05)
        state = self.state()
        busy = ("num_running_reqs", "num_waiting_reqs", "num_used_tokens", "num_cached_tokens")
        assert not any(state[name] for name in busy), state


def at_once(calls: list[Callable[[], Any]]) -> list[Any]:
    """The results of calls that are made at the same time, in order."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


WITH_MARGINS = {"return_logprob": True, "top_logprobs_num": 2}


def assert_same_but_for_ties(alone: Any, other: Any) -> None:
    """`alone` was asked for WITH_MARGINS. From a position on where its two best tokens tie, anything goes."""
    best_two = alone["meta_info"]["output_top_logprobs"]
    for token, got, ((first, _, _), (second, _, _)) in zip(
        alone["output_ids"], other["output_ids"], best_two, strict=True
    ):
        if token != got:
            assert first - second < TIE, f"{got} instead of {token}"
            return
    assert other["text"] == alone["text"]
