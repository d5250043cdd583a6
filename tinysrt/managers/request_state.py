"""What the TokenizerManager knows of one running sample, and the answer it makes of it.

    BatchStrOut item ─▶ ReqState.update ─▶ (accumulates) ─▶ ReqState.respond ─▶ {"text", "output_ids", "meta_info"}
                             │                                   ▲
                             └── tells its Waiter ───────────────┘ the coroutine of the request wakes up

News arrives as deltas and is accumulated at once. The waiting coroutine builds an answer only when it gets to
run: everything so far (the default), or everything since the last answer (`--incremental-streaming-output`).
So a slow client gets fewer, larger chunks, and nothing is lost or queued up for it.

Invariant: what `respond` returns is a copy; later news never changes an answer already given.

SGLang keeps a list of finished response dicts per request (`out_list`) and merges it when the client is slow.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tinysrt.errors import RequestError
from tinysrt.managers.generate_request import Prompt
from tinysrt.messages import FinishAbort, FinishReason, Logprobs, OutputMeta, StrOut, TokenIDOut

TokenText = Callable[[int], str]
Entry = list[Any]  # [logprob, token id, text or None], SGLang's triple
Entries = list[list[Entry] | None]  # alternatives per position; None where there is no score


@dataclass
class Waiter:
    """The coroutine behind one client call: woken when any of its samples has news."""

    event: asyncio.Event = field(default_factory=asyncio.Event)
    news: deque[ReqState] = field(default_factory=deque)  # each sample at most once, oldest news first

    async def wake_up(self) -> None:
        await self.event.wait()
        self.event.clear()

    async def next_news(self) -> ReqState:
        """The sample that has waited longest with its news. Taken one by one: while the caller hands on the answer of
        one, news of another that still stands in line is added to what it has to say, and not announced twice
        (test_news_that_comes_while_another_answer_is_handed_on)."""
        while not self.news:
            await self.wake_up()
        state = self.news.popleft()
        state.has_news = False
        return state


@dataclass
class ReqState:
    """One sample of a prompt. Written by the TokenizerManager's receive loop, read by the request's coroutine."""

    rid: str
    prompt: Prompt
    index: int  # place in the answer
    waiter: Waiter
    created_ns: int = field(default_factory=time.monotonic_ns)
    dispatched: bool = False  # the scheduler has it: from now on the end comes from there
    abort_sent: bool = False  # once is enough
    abandoned: bool = False  # nobody listens; kept until the scheduler says that it is over
    finish: FinishReason | None = None
    has_news: bool = False

    # Accumulated output
    meta: OutputMeta | None = None  # the latest
    text: str = ""
    output_ids: list[int] = field(default_factory=list)
    output_logprobs: list[Entry] = field(default_factory=list)
    output_top: Entries = field(default_factory=list)
    output_wanted: Entries = field(default_factory=list)
    input_logprobs: list[Entry] = field(default_factory=list)
    input_top: Entries = field(default_factory=list)
    input_wanted: Entries = field(default_factory=list)
    # How much of it an incremental answer has given away already
    sent_chars: int = 0
    sent_ids: int = 0

    def update(self, out: StrOut | TokenIDOut, token_text: TokenText | None) -> None:
        self.meta = out.meta
        if isinstance(out, StrOut):
            self.text += out.text
        self.output_ids += out.new_ids
        if out.meta.logprobs is not None:
            self._add_logprobs(out.meta.logprobs, out.new_ids, token_text)
        self.finish = out.meta.finish
        self.tell()

    def end(self, finish: FinishAbort) -> None:
        """It is over without another output: refused, aborted while waiting, or the scheduler is gone."""
        self.finish = finish
        self.tell()

    def tell(self) -> None:
        """Queue the news; the receive loop wakes the waiter when it has a group (`--batch-notify-size`)."""
        if not self.has_news:
            self.has_news = True
            self.waiter.news.append(self)

    def failure(self) -> RequestError | None:
        """The error that this sample's end stands for. An abort that the client asked for is not one."""
        if isinstance(self.finish, FinishAbort) and self.finish.status_code is not None:
            return RequestError(self.finish.message, status=self.finish.status_code)
        return None

    def respond(self, *, incremental: bool, with_text: bool, with_index: bool) -> dict[str, Any]:
        chars, ids = (self.sent_chars, self.sent_ids) if incremental else (0, 0)
        self.sent_chars, self.sent_ids = len(self.text), len(self.output_ids)
        answer: dict[str, Any] = {"text": self.text[chars:]} if with_text else {}
        answer |= {"output_ids": self.output_ids[ids:], "meta_info": self._meta_info(ids)}
        if self.prompt.return_prompt_token_ids:
            answer["prompt_token_ids"] = self.prompt.ids
        if with_index:
            answer["index"] = self.index
        return answer

    def _meta_info(self, first: int) -> dict[str, Any]:
        """`first`: the output token that a list of the answer begins with."""
        meta, prompt = self.meta, self.prompt
        info: dict[str, Any] = {
            "id": self.rid,
            "finish_reason": None if self.finish is None else self.finish.to_json(),
            "prompt_tokens": meta.prompt_tokens if meta else len(prompt.input_ids or []),
            "completion_tokens": meta.completion_tokens if meta else 0,
            "reasoning_tokens": 0,
            "cached_tokens": meta.cached_tokens if meta else 0,
            "cached_tokens_details": None,
            "num_retractions": meta.num_retractions if meta else 0,
            "weight_version": "default",
            "dp_rank": meta.dp_rank if meta else None,
        }
        if prompt.return_logprob:
            info["input_token_logprobs"] = self.input_logprobs[:]
            info["output_token_logprobs"] = self.output_logprobs[first:]
            info["output_token_logprobs_length"] = len(self.output_logprobs)
            if prompt.top_logprobs_num > 0:
                info["input_top_logprobs"] = self.input_top[:]
                info["output_top_logprobs"] = self.output_top[first:]
            if prompt.token_ids_logprob is not None:
                info["input_token_ids_logprobs"] = self.input_wanted[:]
                info["output_token_ids_logprobs"] = self.output_wanted[first:]
        if self.finish is not None:
            info["e2e_latency"] = (time.monotonic_ns() - self.created_ns) / 1e9
            info["response_sent_to_client_ts"] = time.time()
        return info

    def _add_logprobs(self, scores: Logprobs, new_ids: list[int], token_text: TokenText | None) -> None:
        text = token_text if self.prompt.return_text_in_logprobs else None

        def entry(logprob: float | None, token: int) -> Entry:
            return [logprob, token, None if text is None else text(token)]

        def entries(positions: list[list[tuple[float, int]] | None]) -> Entries:
            return [None if p is None else [entry(logprob, token) for logprob, token in p] for p in positions]

        self.output_logprobs += [entry(logprob, token) for logprob, token in zip(scores.output, new_ids, strict=True)]
        self.output_top += entries(scores.output_top)
        self.output_wanted += entries(scores.output_ids)
        if scores.input is not None:
            self.input_logprobs = [entry(logprob, token) for logprob, token in scores.input]
            self.input_top = entries(scores.input_top or [])
            self.input_wanted = entries(scores.input_ids or [])
