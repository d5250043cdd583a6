"""The native door: `/generate` in SGLang's own words, and everything an operator or a router asks of a server.

    /generate                              text or ids in, text and ids out; the other doors translate into it
    /health /ready /model_info …           what routers, probes and benchmarks poll
    /flush_cache /abort_request /pause …   control
    /tokenize /detokenize                  the tokenizer alone

A route reads its input strictly (`body.py`), calls the TokenizerManager, and writes the answer: nothing is decided
here. Fields that nobody knows are ignored on `/generate`, because routers add their own; a field that SGLang knows
and this server does not run is refused by name.

Invariant: a stream's status is decided by its first item, so a bad request is a 400 and never an error inside a 200.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec
from fastapi import APIRouter
from fastapi.responses import Response
from starlette.requests import Request

from tinysrt.entrypoints.body import convert, read_object
from tinysrt.entrypoints.errors import SSE_DONE, json_response, native_stream_error, sse
from tinysrt.entrypoints.openai_protocol import ChatRequest
from tinysrt.entrypoints.stream import EventStream, unless_disconnected
from tinysrt.errors import RequestError
from tinysrt.managers.generate_request import GenerateReqInput, refuse_unsupported_fields
from tinysrt.managers.server_control import ServerStatus, package_version
from tinysrt.managers.tokenizer_manager import TokenizerManager
from tinysrt.messages import LoadSnapshot
from tinysrt.server_args import ServerArgs

logger = logging.getLogger(__name__)

LOAD_SECTIONS = ("core", "memory", "queues", "spec", "lora", "disagg", "all")


class AbortBody(msgspec.Struct):
    rid: str = ""
    abort_all: bool = False


class PauseBody(msgspec.Struct):
    mode: str = "abort"


class TokenizeBody(msgspec.Struct):
    prompt: str | list[str] | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool = True


class DetokenizeBody(msgspec.Struct):
    tokens: list[int | list[int]]
    skip_special_tokens: bool = True


def build_router(tokenizer_manager: TokenizerManager, server_args: ServerArgs) -> APIRouter:
    api = NativeApi(tokenizer_manager, server_args)
    router = APIRouter()

    def route(handler: Any, *paths: str, methods: tuple[str, ...] = ("GET",)) -> None:
        for path in paths:
            router.add_api_route(path, handler, methods=list(methods), include_in_schema=False)

    route(api.root, "/", methods=("GET", "HEAD"))
    route(api.generate, "/generate", methods=("POST", "PUT"))
    route(api.health, "/health", "/health_generate")
    route(api.ready, "/ready")
    route(api.model_info, "/model_info", "/get_model_info")
    route(api.server_info, "/server_info", "/get_server_info")
    route(api.flush_cache, "/flush_cache", methods=("GET", "POST"))
    route(api.abort_request, "/abort_request", methods=("POST",))
    route(api.pause_generation, "/pause_generation", methods=("POST",))
    route(api.continue_generation, "/continue_generation", methods=("POST",))
    route(api.loads, "/v1/loads")
    route(api.get_load, "/get_load")
    route(api.tokenize, "/tokenize", "/v1/tokenize", methods=("POST",))
    route(api.detokenize, "/detokenize", "/v1/detokenize", methods=("POST",))
    return router


class NativeApi:
    def __init__(self, tokenizer_manager: TokenizerManager, server_args: ServerArgs):
        self.tokenizer_manager = tokenizer_manager
        self.control = tokenizer_manager.control
        self.server_args = server_args
        self._told: dict[str, None] = {}  # unknown fields that were logged

    async def _body(self, request: Request, *, allow_empty: bool = False) -> dict[str, Any]:
        return await read_object(request, self.server_args.max_request_bytes, allow_empty=allow_empty)

    async def root(self) -> Response:
        return Response("tinysrt is running", media_type="text/plain")

    # ---- generate --------------------------------------------------------------------------------

    async def generate(self, request: Request) -> Response:
        body = await self._body(request)
        refuse_unsupported_fields(body)
        self._tell_unknown(body)
        asked = convert(body, GenerateReqInput)
        if asked.stream:
            frames = self._frames(asked)
            return EventStream(await unless_disconnected(request, anext(frames)), frames)
        return json_response(await unless_disconnected(request, self._whole(asked)))

    def _tell_unknown(self, body: dict[str, Any]) -> None:
        """Each unknown name is logged once, and only so many: routers send the same ones with every request."""
        for name in body:
            if name not in GenerateReqInput.__struct_fields__ and name not in self._told and len(self._told) < 100:
                self._told[name] = None
                logger.info("Ignoring the unknown field %.80r of /generate", name)

    async def _whole(self, asked: GenerateReqInput) -> Any:
        async with aclosing(self.tokenizer_manager.generate_request(asked)) as answers:
            return await anext(answers)

    async def _frames(self, asked: GenerateReqInput) -> AsyncGenerator[bytes, None]:
        started = False
        try:
            async with aclosing(self.tokenizer_manager.generate_request(asked)) as answers:
                async for answer in answers:
                    yield sse(answer)
                    started = True
        except Exception as error:
            if not started:
                raise  # nothing is sent yet: the answer is a status
            if not isinstance(error, RequestError):
                logger.exception("A streamed answer failed")
                error = RequestError("Internal server error.", status=500)
            yield sse(native_stream_error(error))
        yield SSE_DONE

    # ---- health and information ------------------------------------------------------------------

    async def health(self) -> Response:
        return Response(status_code=200 if await self.control.health() else 503)

    async def ready(self) -> Response:
        up = self.control.status is ServerStatus.UP
        return Response(status_code=200 if up else 503)

    async def model_info(self) -> Response:
        return json_response(self.control.model_info())

    async def server_info(self) -> Response:
        return json_response(await self.control.server_info())

    async def loads(self, request: Request) -> Response:
        query = request.query_params
        sections = [name for name in query.get("include", "all").split(",") if name]
        unknown = [name for name in sections if name not in LOAD_SECTIONS]
        if unknown:
            raise RequestError(f"'include' does not know {unknown[0]!r}; it knows {', '.join(LOAD_SECTIONS)}.")
        rank = query.get("dp_rank")
        if rank is not None and not rank.isdecimal():
            raise RequestError("'dp_rank' must be a number.", param="dp_rank")
        loads = [
            _load(snapshot, sections)
            for snapshot in self.control.loads()
            if rank is None or snapshot.dp_rank == int(rank)
        ]
        match query.get("format", "json"):
            case "json":
                return json_response(self._loads_envelope(loads))
            case "prometheus":
                return Response(_prometheus(loads), media_type="text/plain; version=0.0.4")
            case other:
                raise RequestError(f"'format' is json or prometheus, not {other!r}.", param="format")

    def _loads_envelope(self, loads: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "timestamp": time.time(),
            "version": package_version(),
            "accelerator": self.server_args.device,
            "num_accelerators": self.server_args.ranks_on_this_machine() * self.server_args.nnodes,
            "loads": loads,
        }

    async def get_load(self) -> Response:
        """The route of older releases, which routers still ask; they add up `num_tokens`."""
        loads = [
            {
                "dp_rank": load.dp_rank,
                "num_reqs": load.num_running_reqs + load.num_waiting_reqs,
                "num_waiting_reqs": load.num_waiting_reqs,
                "num_tokens": load.num_used_tokens + load.num_waiting_uncached_tokens,
            }
            for load in self.control.loads()
        ]
        return json_response(loads)

    # ---- control ---------------------------------------------------------------------------------

    async def flush_cache(self, request: Request) -> Response:
        reply = await self.control.flush_cache(_seconds(request.query_params.get("timeout", "0")))
        return Response(reply.message + "\n", 200 if reply.success else 400, media_type="text/plain")

    async def abort_request(self, request: Request) -> Response:
        asked = convert(await self._body(request), AbortBody)
        self.tokenizer_manager.abort_request(asked.rid, asked.abort_all)
        return Response(status_code=200)

    async def pause_generation(self, request: Request) -> Response:
        asked = convert(await self._body(request, allow_empty=True), PauseBody)
        await self.control.pause_generation(asked.mode)
        return json_response({"status": "ok", "message": f"Generation is paused (mode {asked.mode})."})

    async def continue_generation(self, request: Request) -> Response:
        await self._body(request, allow_empty=True)
        await self.control.continue_generation()
        return json_response({"status": "ok", "message": "Generation continues."})

    # ---- the tokenizer alone ---------------------------------------------------------------------

    async def tokenize(self, request: Request) -> Response:
        """The ids that `/generate` would run for a text, or `/v1/chat/completions` for a chat."""
        body = await self._body(request)
        asked = convert(body, TokenizeBody)
        text = self.tokenizer_manager.text
        if (asked.prompt is None) == (asked.messages is None):
            message = "Exactly one of 'prompt' (a text or a list of texts) and 'messages' (a chat) is required."
            raise RequestError(message, param="prompt")
        if asked.messages is not None:
            chat = ChatRequest.from_body(body)
            options = chat.render_options(self.server_args)
            tokens: list[Any] = (await self.tokenizer_manager.render_chat(chat.messages, **options)).input_ids
            count: Any = len(tokens)
        elif isinstance(asked.prompt, list):
            tokens = await text.encode(asked.prompt, asked.add_special_tokens)
            count = [len(ids) for ids in tokens]
        else:
            tokens = (await text.encode([asked.prompt or ""], asked.add_special_tokens))[0]
            count = len(tokens)
        max_model_len = self.tokenizer_manager.model_config.context_len
        return json_response({"tokens": tokens, "count": count, "max_model_len": max_model_len})

    async def detokenize(self, request: Request) -> Response:
        asked = convert(await self._body(request), DetokenizeBody)
        tokens: list[Any] = asked.tokens
        is_list = bool(tokens) and isinstance(tokens[0], list)
        if any(isinstance(item, list) != is_list for item in tokens):
            raise RequestError("'tokens' must be a list of token ids, or a list of such lists.", param="tokens")
        vocab_size = self.tokenizer_manager.model_config.vocab_size
        batch = tokens if is_list else [tokens]
        if any(not 0 <= i < vocab_size for ids in batch for i in ids):
            raise RequestError(f"'tokens' must hold token ids from 0 to {vocab_size - 1}.", param="tokens")
        texts = await self.tokenizer_manager.text.decode(batch, asked.skip_special_tokens)
        return json_response({"text": texts if is_list else texts[0]})


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise RequestError("'timeout' must be a number of seconds, at least 0.", param="timeout")
    return seconds


def _load(load: LoadSnapshot, sections: list[str]) -> dict[str, Any]:
    total = load.max_total_num_tokens
    usage = load.num_used_tokens / total if total else 0.0
    entry: dict[str, Any] = {
        "dp_rank": load.dp_rank,
        "num_running_reqs": load.num_running_reqs,
        "num_waiting_reqs": load.num_waiting_reqs,
        "num_waiting_uncached_tokens": load.num_waiting_uncached_tokens,
        "num_used_tokens": load.num_used_tokens,
        "num_total_tokens": load.num_used_tokens + load.num_waiting_uncached_tokens,
        "max_total_num_tokens": total,
        "max_running_requests": load.max_running_requests,
        "token_usage": round(usage, 4),
        "gen_throughput": round(load.gen_throughput, 2),
        "cache_hit_rate": round(load.cache_hit_rate, 4),
        "utilization": round(load.num_running_reqs / max(load.max_running_requests, 1), 4),
    }
    if "queues" in sections or "all" in sections:
        entry["queues"] = {"waiting": load.num_waiting_reqs, "running": load.num_running_reqs}
    return entry


def _prometheus(loads: list[dict[str, Any]]) -> str:
    """One gauge a number, one line a replica. The names use an underscore where /metrics has a colon."""
    lines = []
    for name in [key for key in (loads[0] if loads else {}) if key not in ("dp_rank", "queues")]:
        lines.append(f"# TYPE sglang_{name} gauge")
        lines += [f'sglang_{name}{{dp_rank="{load["dp_rank"]}"}} {load[name]}' for load in loads]
    return "\n".join(lines) + "\n"
