"""The OpenAI door: /v1/models, /v1/completions, /v1/chat/completions.

    body ─▶ ChatRequest / CompletionRequest ─▶ GenerateReqInput ─▶ TokenizerManager
                                                                        │ native outputs, one per token or so
    JSON or SSE ◀── ChatReply / CompletionReply ◀── Choice (what is new?) ◀┘

The door speaks OpenAI outside and native inside; a *reply* knows the two shapes of one API (whole, chunk), a `Choice`
knows how much of its output has been passed on. A streamed chat answer is, in this order:

    for every choice: role ─ text ─ text ─ …      choices interleave as their tokens come
    then, for every choice: finish_reason         so no client stops reading while another choice still talks
    then usage, with `choices: []`                only if asked for
    then [DONE]

Invariants: one id over all chunks; exactly one finish_reason per choice; streamed pieces join to the whole answer;
the first output is awaited before the 200 is sent, so that what can be refused is refused with a real 4xx.

SGLang: `entrypoints/openai/serving_chat.py`, `serving_completions.py`. There any model name is accepted and echoed.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter
from fastapi.responses import Response
from starlette.requests import Request

from tinysrt.entrypoints.body import read_object
from tinysrt.entrypoints.errors import SSE_DONE, json_response, openai_error_body, sse
from tinysrt.entrypoints.openai_protocol import (
    DEFAULT_COMPLETION_TOKENS,
    ChatRequest,
    CommonRequest,
    CompletionRequest,
    openai_name,
)
from tinysrt.entrypoints.openai_reply import ChatReply, Choice, CompletionReply, Reply, Usage
from tinysrt.entrypoints.stream import EventStream, unless_disconnected
from tinysrt.errors import RequestError
from tinysrt.managers.generate_request import GenerateReqInput
from tinysrt.managers.tokenizer_manager import TokenizerManager
from tinysrt.server_args import ServerArgs

logger = logging.getLogger(__name__)


def build_router(tokenizer_manager: TokenizerManager, server_args: ServerArgs) -> APIRouter:
    door = OpenAIDoor(tokenizer_manager, server_args)
    router = APIRouter()
    router.add_api_route("/v1/models", door.models, methods=["GET"])
    router.add_api_route("/v1/models/{name:path}", door.model, methods=["GET"])
    router.add_api_route("/v1/completions", door.completions, methods=["POST"])
    router.add_api_route("/v1/chat/completions", door.chat_completions, methods=["POST"])
    return router


class OpenAIDoor:
    def __init__(self, tokenizer_manager: TokenizerManager, server_args: ServerArgs):
        self.tokenizer_manager = tokenizer_manager
        self.server_args = server_args
        self.served_name = tokenizer_manager.served_model_name
        # SGLang's own clients say "default"; the path is what one types without --served-model-name.
        self.accepted_names = {self.served_name, server_args.model_path, "default", "", None}
        self.started = int(time.time())

    # ---- models ----------------------------------------------------------------------------------

    async def models(self) -> Response:
        return json_response({"object": "list", "data": [self._card()]})

    async def model(self, name: str) -> Response:
        self._check_model(name)
        return json_response(self._card())

    def _card(self) -> dict[str, Any]:
        return {
            "id": self.served_name,
            "object": "model",
            "created": self.started,
            "owned_by": "sglang",  # routers look here to see whose native API is spoken
            "root": self.served_name,
            "parent": None,
            "max_model_len": self.tokenizer_manager.model_config.context_len,
        }

    def _check_model(self, name: str | None) -> None:
        if name not in self.accepted_names:
            message = f"The model {str(name)[:128]!r} does not exist here; this server serves {self.served_name!r}."
            raise RequestError(message, status=404, param="model", code="model_not_found")

    # ---- completions -----------------------------------------------------------------------------

    async def completions(self, request: Request) -> Response:
        asked = CompletionRequest.from_body(await read_object(request, self.server_args.max_request_bytes))
        self._check_model(asked.model)
        prompts, many = asked.prompts()
        params = asked.sampling_params(self._limit(DEFAULT_COMPLETION_TOKENS))
        rid = asked.rid or f"cmpl-{uuid.uuid4().hex}"
        prompt: Any = prompts if many else prompts[0]
        is_text = isinstance(prompts[0], str)
        generate = GenerateReqInput(
            text=prompt if is_text else None,
            input_ids=None if is_text else prompt,
            sampling_params=params,
            rid=rid,
            stream=asked.stream,
            return_logprob=asked.logprobs is not None,
            logprob_start_len=0 if asked.echo else -1,
            top_logprobs_num=asked.logprobs or 0,
            extra_key=asked.extra_key,
            cache_salt=asked.cache_salt,
        )
        reply = CompletionReply(asked, rid, self.served_name, self.tokenizer_manager.require_tokenizer(), prompts)
        return await self._answer(request, asked, reply, generate)

    # ---- chat ------------------------------------------------------------------------------------

    async def chat_completions(self, request: Request) -> Response:
        asked = ChatRequest.from_body(await read_object(request, self.server_args.max_request_bytes))
        self._check_model(asked.model)
        options = asked.render_options(self.server_args)
        rendered = await self.tokenizer_manager.render_chat(asked.messages, **options)
        rid = asked.rid or f"chatcmpl-{uuid.uuid4().hex}"
        # Chat alone follows the model's generation_config.json, and has no limit but the context.
        params = asked.sampling_params(self._limit(None) | self.tokenizer_manager.chat_sampling_defaults())
        if rendered.stop:  # a JSON chat template brings its own
            asked_for = params.get("stop") or []
            params["stop"] = [*([asked_for] if isinstance(asked_for, str) else asked_for), *rendered.stop]
        generate = GenerateReqInput(
            input_ids=list(rendered.input_ids),
            sampling_params=params,
            rid=rid,
            stream=asked.stream,
            return_logprob=asked.logprobs,
            top_logprobs_num=asked.top_logprobs or 0,
            extra_key=asked.extra_key,
            cache_salt=asked.cache_salt,
        )
        reply = ChatReply(asked, rid, self.served_name, self.tokenizer_manager.require_tokenizer())
        return await self._answer(request, asked, reply, generate)

    # ---- both ------------------------------------------------------------------------------------

    def _limit(self, tokens: int | None) -> dict[str, Any]:
        """The API's own default; the operator's --preferred-sampling-params goes before it."""
        return {} if "max_new_tokens" in self.tokenizer_manager.preferred_params else {"max_new_tokens": tokens}

    async def _answer(
        self, request: Request, asked: CommonRequest, reply: Reply, generate: GenerateReqInput
    ) -> Response:
        try:
            if asked.stream:
                frames = self._frames(asked, reply, generate)
                return EventStream(await unless_disconnected(request, anext(frames)), frames)
            return json_response(await unless_disconnected(request, self._whole(asked, reply, generate)))
        except RequestError as exc:
            raise openai_name(exc, reply.prompt_field) from None

    async def _whole(self, asked: CommonRequest, reply: Reply, generate: GenerateReqInput) -> dict[str, Any]:
        async with aclosing(self._outputs(generate)) as outputs:
            found = await anext(outputs)
        usage = Usage(asked.samples, self.server_args.enable_cache_report)
        choices = []
        for index, output in enumerate(found if isinstance(found, list) else [found]):
            choice = Choice(index)
            text, logprobs = choice.take(output)
            usage.count(index, output["meta_info"])
            choices.append(reply.whole_choice(choice, text, logprobs))
        return reply.whole(choices, usage.to_json())

    async def _frames(
        self, asked: CommonRequest, reply: Reply, generate: GenerateReqInput
    ) -> AsyncGenerator[bytes, None]:
        options = asked.stream_options
        usage = Usage(asked.samples, self.server_args.enable_cache_report)
        every_chunk = bool(options and options.continuous_usage_stats)
        at_end = bool(options and options.include_usage) or self.server_args.stream_response_default_include_usage

        def chunk(choice: dict[str, Any]) -> bytes:
            return sse(reply.chunk([choice], usage.to_json() if every_chunk else None))

        choices: dict[int, Choice] = {}
        started = False
        try:
            async with aclosing(self._outputs(generate)) as outputs:
                async for output in outputs:
                    index = output.get("index", 0)
                    usage.count(index, output["meta_info"])
                    choice = choices.get(index)
                    if choice is None:
                        choice = choices[index] = Choice(index, deltas=self.server_args.incremental_streaming_output)
                        opening = reply.opening(choice)
                        if opening is not None:
                            started = True
                            yield chunk(opening)
                    text, logprobs = choice.take(output)
                    piece = reply.piece(choice, text, logprobs)
                    if piece is not None:
                        started = True
                        yield chunk(piece)
            for index in sorted(choices):
                yield chunk(reply.closing(choices[index]))
            if at_end:
                yield sse(reply.chunk([], usage.to_json()))
        except Exception as exc:
            if not started:
                raise  # nothing is sent yet: the door answers with a status
            yield sse(openai_error_body(_as_request_error(exc, reply)))
        yield SSE_DONE

    async def _outputs(self, generate: GenerateReqInput) -> AsyncGenerator[Any, None]:
        """Native outputs; one that was aborted with a status becomes the error that it stands for."""
        source: AsyncIterator[Any] = self.tokenizer_manager.generate_request(generate)
        try:
            async for output in source:
                for item in output if isinstance(output, list) else [output]:
                    reason = item["meta_info"]["finish_reason"]
                    if reason and reason["type"] == "abort" and reason.get("status_code"):
                        raise RequestError(reason["message"], status=reason["status_code"])
                yield output
        finally:
            if isinstance(source, AsyncGenerator):
                await source.aclose()


def _as_request_error(exc: Exception, reply: Reply) -> RequestError:
    if isinstance(exc, RequestError):
        return openai_name(exc, reply.prompt_field)
    logger.error("A streamed answer failed", exc_info=exc)
    return RequestError("Internal server error.", status=500)
