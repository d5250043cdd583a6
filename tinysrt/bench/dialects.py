"""How each kind of server is asked for exactly so many tokens, and how its answer is read.

    Ask ── body() ──▶ JSON ──▶ server ──▶ whole answer, or events ── read() ──▶ Answer

    dialect    path              servers
    sglang     /generate         tinysrt, SGLang
    openai     /v1/completions   vLLM, SGLang, tinysrt: token ids as prompt, `ignore_eos` beside OpenAI's own
    llamacpp   /completion       llama.cpp's server

Invariant: an `Answer` counts what the server says it produced, not what we asked for: `Client.ask` compares the two,
and a difference voids the whole run.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol

from tinysrt.bench.connection import HttpFailed, call, events


class RunVoid(Exception):
    """A request did not get what it asked for: the run measures nothing, and the message says why."""


@dataclass(frozen=True)
class Ask:
    ids: list[int]
    max_tokens: int
    stream: bool = False
    want_ids: bool = False  # the answer's token ids are needed, not only their number


@dataclass
class Answer:
    sent: float  # perf_counter, before the first byte went out
    end: float = 0.0
    arrivals: list[float] = field(default_factory=list)  # of each event that brought tokens; one where not streamed
    completion_tokens: int = 0
    prompt_tokens: int | None = None
    cached_tokens: int | None = None  # None: the server does not say
    output_ids: list[int] | None = None  # of a whole answer, where the server gives them

    @property
    def ttft(self) -> float:
        return self.arrivals[0] - self.sent

    @property
    def gaps(self) -> list[float]:
        """Seconds between two events of the stream: what a reader waits. (Several tokens may come in one event.)"""
        return [after - before for before, after in zip(self.arrivals, self.arrivals[1:], strict=False)]

    def has(self, completion_tokens: int, at: float) -> None:
        """So many tokens are here now, all together."""
        if completion_tokens > self.completion_tokens:
            self.completion_tokens = completion_tokens
            self.arrivals.append(at)


class Dialect(Protocol):
    path: str

    def body(self, ask: Ask, model: str) -> dict[str, Any]: ...

    def read(self, event: dict[str, Any], at: float, answer: Answer) -> None:
        """Take in one event, or the whole answer."""


class SGLang:
    path = "/generate"

    def body(self, ask: Ask, model: str) -> dict[str, Any]:
        params = {"max_new_tokens": ask.max_tokens, "temperature": 0, "ignore_eos": True}
        return {"input_ids": ask.ids, "sampling_params": params, "stream": ask.stream}

    def read(self, event: dict[str, Any], at: float, answer: Answer) -> None:
        meta = event["meta_info"]
        answer.has(meta["completion_tokens"], at)
        answer.prompt_tokens, answer.cached_tokens = meta["prompt_tokens"], meta.get("cached_tokens")
        answer.output_ids = event.get("output_ids")


class OpenAI:
    path = "/v1/completions"

    def body(self, ask: Ask, model: str) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": model,
            "prompt": ask.ids,
            "max_tokens": ask.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": ask.stream,
        }
        if ask.stream:  # usage in every event where the server can, so that a token without text counts when it comes
            body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
        if ask.want_ids:
            body["return_token_ids"] = True  # vLLM's own; who does not know it ignores or refuses it
        return body

    def read(self, event: dict[str, Any], at: float, answer: Answer) -> None:
        usage, choices = event.get("usage"), event["choices"]
        if usage:
            if choices:
                answer.has(usage["completion_tokens"], at)
            else:
                # The last word of a stream: no token, only the sum. Events that were one token each may have been two.
                answer.completion_tokens = usage["completion_tokens"]
            answer.prompt_tokens = usage["prompt_tokens"]
            details = usage.get("prompt_tokens_details") or {}
            answer.cached_tokens = details.get("cached_tokens", answer.cached_tokens)
        elif choices and choices[0].get("text"):
            answer.has(answer.completion_tokens + 1, at)
        if choices:
            answer.output_ids = choices[0].get("token_ids") or answer.output_ids


class LlamaCpp:
    path = "/completion"

    def body(self, ask: Ask, model: str) -> dict[str, Any]:
        return {
            "prompt": ask.ids,
            "n_predict": ask.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "cache_prompt": True,
            "return_tokens": True,
            "stream": ask.stream,
        }

    def read(self, event: dict[str, Any], at: float, answer: Answer) -> None:
        if not event.get("stop"):
            answer.has(answer.completion_tokens + len(event["tokens"]), at)
            return
        answer.has(event["tokens_predicted"], at)
        answer.completion_tokens = event["tokens_predicted"]
        answer.prompt_tokens = event["tokens_evaluated"]
        answer.cached_tokens = event.get("timings", {}).get("cache_n")
        answer.output_ids = event.get("tokens") or None


DIALECTS: dict[str, Dialect] = {"sglang": SGLang(), "openai": OpenAI(), "llamacpp": LlamaCpp()}


@dataclass(frozen=True)
class Client:
    base: str  # http://host:port
    dialect: Dialect
    model: str = "default"
    timeout: float = 600.0  # seconds without a byte

    async def ask(
        self,
        ids: list[int],
        max_tokens: int,
        *,
        stream: bool = False,
        want_ids: bool = False,
        on_event: Callable[[Answer], None] | None = None,
    ) -> Answer:
        """One request from first byte to last; RunVoid unless it brings exactly `max_tokens` tokens."""
        ask = Ask(ids, max_tokens, stream, want_ids)
        body = self.dialect.body(ask, self.model)
        answer = Answer(sent=time.perf_counter())
        try:
            if stream:
                async with aclosing(events(self.base, self.dialect.path, body, timeout=self.timeout)) as stream_events:
                    async for at, event in stream_events:
                        self._read(event, at, answer)
                        if on_event is not None:
                            on_event(answer)
            else:
                at, whole = await call(self.base, "POST", self.dialect.path, body, timeout=self.timeout)
                self._read(whole, at, answer)
        except HttpFailed as error:
            raise RunVoid(str(error)) from None
        if answer.completion_tokens != max_tokens or not answer.arrivals:
            raise RunVoid(f"a request got {answer.completion_tokens} tokens instead of {max_tokens}")
        if answer.prompt_tokens not in (None, len(ids)):
            raise RunVoid(f"a prompt of {len(ids)} tokens became one of {answer.prompt_tokens}")
        answer.end = time.perf_counter()
        return answer

    def _read(self, event: Any, at: float, answer: Answer) -> None:
        """Servers may fail inside a 200."""
        if isinstance(event, dict) and event.get("error"):
            raise RunVoid(f"the server says: {event['error']}")
        try:
            self.dialect.read(event, at, answer)
        except (KeyError, TypeError, AttributeError) as error:  # the last: an answer that is no JSON object
            raise RunVoid(f"an answer that is none of this dialect ({error!r}): {str(event)[:200]}") from None
