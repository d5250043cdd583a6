"""A TokenizerManager that reads from a script, and a real HTTP server around it.

The doors see the real interface (`generate_request`, `render_chat`, …), real request checks and a real socket; only
the model is missing: token by token, each sample "generates" the next text of `script.answers`.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import uvicorn
from fastapi import FastAPI

from tinysrt.entrypoints.http_server import build_app
from tinysrt.errors import RequestError
from tinysrt.managers.generate_request import GenerateReqInput, Prompt
from tinysrt.managers.server_control import ServerStatus
from tinysrt.server_args import ServerArgs

VOCAB_SIZE, END = 257, 256


class ByteTokenizer:
    """Token i < 256 is the byte i; 256 is the special token <end>."""

    all_special_ids = [END]

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return b"".join(self.token_bytes(i) for i in ids if i != END or not skip_special_tokens).decode(
            errors="replace"
        )

    def token_bytes(self, token_id: int) -> bytes:
        return b"<end>" if token_id == END else bytes([token_id])

    def token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode(errors="replace")


@dataclass
class Script:
    """What the next requests get, and what the doors asked for."""

    answers: list[str] = field(default_factory=lambda: ["Hello"])  # sample i says answers[i % len]
    fail_at_start: RequestError | None = None
    fail_after: tuple[int, Exception] | None = None  # after so many outputs
    abort_after: int | None = None
    pause: float = 0.0  # seconds between two tokens
    requests: list[GenerateReqInput] = field(default_factory=list)
    rendered: list[tuple[list[dict[str, Any]], dict[str, Any]]] = field(default_factory=list)
    closed: threading.Event = field(default_factory=threading.Event)  # a generator has ended


class FakeTokenizerManager:
    def __init__(self, server_args: ServerArgs):
        self.server_args = server_args
        self.script = Script()
        self.tokenizer = ByteTokenizer()
        self.control = SimpleNamespace(
            status=ServerStatus.UP, model_info=lambda: {"model_path": server_args.model_path}
        )
        self.served_model_name = server_args.served_model_name
        self.preferred_params = server_args.preferred_sampling_params or {}
        self.model_config = SimpleNamespace(vocab_size=VOCAB_SIZE, context_len=512)

    def chat_sampling_defaults(self) -> dict[str, Any]:
        return {"temperature": 0.6, "top_p": 0.9}

    def require_tokenizer(self) -> ByteTokenizer:
        return self.tokenizer

    async def render_chat(self, messages: list[dict[str, Any]], **options: Any) -> Any:
        self.script.rendered.append((messages, options))
        text = "".join(f"{m['role']}:{m['content']}\n" for m in messages)
        return SimpleNamespace(text=text, input_ids=self.tokenizer.encode(text), stop=[])

    async def generate_request(self, obj: GenerateReqInput) -> AsyncGenerator[Any, None]:
        script = self.script
        script.requests.append(obj)
        try:
            if script.fail_at_start is not None:
                raise script.fail_at_start
            batch = obj.normalize(vocab_size=VOCAB_SIZE, max_batch_size=64)
            samples = [
                Sample(prompt, prompt.first_index + j, script.answers[(prompt.first_index + j) % len(script.answers)])
                for prompt in batch.prompts
                for j in range(prompt.params.n)
            ]
            for sample in samples:
                if sample.prompt.input_ids is None:
                    sample.prompt.input_ids = self.tokenizer.encode(sample.prompt.text or "")
            sent = 0
            last: dict[int, Any] = {}
            while any(sample.finish is None for sample in samples):  # samples take turns
                for sample in samples:
                    if sample.finish is not None:
                        continue
                    await asyncio.sleep(script.pause)
                    last[sample.index] = sample.step(aborted=sent == script.abort_after)
                    if batch.stream:
                        yield last[sample.index] | ({} if batch.is_single else {"index": sample.index})
                    sent += 1
                    if script.fail_after is not None and sent >= script.fail_after[0]:
                        raise script.fail_after[1]
            if not batch.stream:
                yield last[0] if batch.is_single else [last[i] for i in sorted(last)]
        finally:
            script.closed.set()


class Sample:
    def __init__(self, prompt: Prompt, index: int, answer: str):
        self.prompt, self.index = prompt, index
        self.todo = [*answer.encode(), END]
        self.ids: list[int] = []
        self.finish: dict[str, Any] | None = None

    def step(self, aborted: bool = False) -> dict[str, Any]:
        limit = self.prompt.params.max_new_tokens
        if limit != 0:
            self.ids.append(self.todo[len(self.ids)])
        text = bytes(i for i in self.ids if i != END).decode(errors="ignore")
        stop = next((s for s in self.prompt.params.stop if s in text), None)
        if aborted:
            self.finish = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
        elif stop is not None:
            self.finish = {"type": "stop", "matched": stop}
            text = text[: text.index(stop)]
        elif self.ids[-1:] == [END]:
            self.finish = {"type": "stop", "matched": END}
        elif limit is not None and len(self.ids) >= limit:
            self.finish = {"type": "length", "length": limit}
            text = bytes(i for i in self.ids if i != END).decode(errors="replace")
        return {"text": text, "output_ids": list(self.ids), "meta_info": self.meta()}

    def meta(self) -> dict[str, Any]:
        prompt = self.prompt
        meta: dict[str, Any] = {
            "id": prompt.rid,
            "finish_reason": self.finish,
            "prompt_tokens": len(prompt.ids),
            "completion_tokens": len(self.ids),
            "cached_tokens": len(prompt.ids) - 1,
        }
        if prompt.return_logprob:
            start = prompt.logprob_start_len
            scored = prompt.ids[start:] if start >= 0 else []
            meta["input_token_logprobs"] = [[score(i) if k else None, i, None] for k, i in enumerate(scored)]
            meta["output_token_logprobs"] = [[score(i), i, None] for i in self.ids]
            if prompt.top_logprobs_num:
                meta["input_top_logprobs"] = [top(i, prompt) if k else None for k, i in enumerate(scored)]
                meta["output_top_logprobs"] = [top(i, prompt) for i in self.ids]
        return meta


def score(token_id: int) -> float:
    return float("-inf") if token_id == ord("~") else -token_id / 1000


def top(token_id: int, prompt: Prompt) -> list[list[Any]]:
    """The chosen token first, then its neighbors."""
    return [[score(token_id) - k, (token_id + k) % VOCAB_SIZE, None] for k in range(prompt.top_logprobs_num)]


def make_app(**flags: Any) -> tuple[FastAPI, FakeTokenizerManager]:
    args = ServerArgs(**{"model_path": "some/model", "served_model_name": "tiny", "max_request_bytes": 10_000} | flags)
    manager = FakeTokenizerManager(args)
    return build_app(manager, args), manager  # type: ignore[arg-type]


@contextlib.contextmanager
def running(app: FastAPI) -> Iterator[str]:
    """`app` behind Uvicorn on a free port; yields the base URL."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = uvicorn.Config(app, log_level="warning", lifespan="off", loop="uvloop", http="httptools")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = server.force_exit = True
            thread.join(10)
