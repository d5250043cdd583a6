"""TokenizerManager: from a client's words to the scheduler's ids, and back.

It lives in the main process on the asyncio loop of the HTTP server, between the doors (`tinysrt/entrypoints/`) and
the sockets:

    generate_request   normalize ▶ register ▶ tokenize ▶ check lengths ▶ gate ▶ send ▶ wait ▶ answer
    receive loop       BatchStrOut ▶ ReqState.update ▶ wake the waiter

Two coroutines meet in the table `rid_to_state`: the client's, which waits, and the one receive loop, which feeds
it. One rule keeps the table clean. A state is entered before anything slow is done, so that a name is taken once,
and leaves in exactly one of two ways:

    never sent to the scheduler    the client's coroutine removes it, whatever went wrong
    sent                           the receive loop removes it when the scheduler says that it is over; if the client
                                   has left, an AbortReq goes out and the state stays until that answer

So a table that is empty means a scheduler that owes nothing. Unknown rids are normal (two senders share our
input, so an abort may overtake text): they are logged and dropped.

SGLang: `managers/tokenizer_manager.py`. Beside this file: `generate_request.py` (what a request may say),
`request_state.py` (how an answer grows), `text_worker.py` (text work in threads), `server_control.py` (what is asked
of a running server besides text: health, flush, pause, …). Next on the journey: `scheduler.py::recv_requests`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import random
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from tinysrt.errors import RequestError, StartupError
from tinysrt.ipc import AsyncReceiver, IpcNames, Sender
from tinysrt.managers.generate_request import (
    GenerateBatch,
    GenerateReqInput,
    LengthLimits,
    fit_length,
    refuse_far_too_long,
    refuse_what_needs_a_tokenizer,
)
from tinysrt.managers.request_state import ReqState, Waiter
from tinysrt.managers.server_control import ServerControl, ServerStatus
from tinysrt.managers.text_worker import TextWorker
from tinysrt.messages import (
    AbortReq,
    BatchStrOut,
    BatchTokenIDOut,
    FinishAbort,
    Message,
    StrOut,
    TokenIDOut,
    TokenizedGenerateReqInput,
    ToTokenizer,
)
from tinysrt.model_executor.model_config import ModelConfig
from tinysrt.observe.trace import Recorder
from tinysrt.sampling_params import SamplingParams
from tinysrt.server_args import ServerArgs
from tinysrt.text.chat_template import RenderedPrompt
from tinysrt.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

HIDDEN = -1  # index of a copy that only warms the prefix cache


class TokenizerManager:
    def __init__(
        self,
        server_args: ServerArgs,
        ipc_names: IpcNames,
        *,
        model_config: ModelConfig,
        trace: Recorder,
        text: TextWorker | None = None,
    ):
        """Bind both sockets and load what turns text into ids (or take `text`, which is loaded already)."""
        self.server_args = server_args
        self.model_config = model_config
        self.trace = trace
        self.served_model_name = server_args.served_model_name or str(server_args.model_path)
        self.preferred_params = _checked_defaults(server_args.preferred_sampling_params, model_config.vocab_size)
        self.text = text or TextWorker.load(server_args)
        self.tokenizer, self.chat_template = self.text.tokenizer, self.text.chat_template

        # Each sample carries a seed of its own, so no neighbor in a batch can change what it draws. (In SGLang a batch
        # draws from one generator, unless --enable-deterministic-inference is on.)
        self._seeds = random.Random(server_args.random_seed)
        self.reply_to = ipc_names.tokenizer_input
        self._context = zmq.asyncio.Context()
        self._sender = Sender(self._context, ipc_names.scheduler_input, bind=True)
        self._receiver: AsyncReceiver[Message] = AsyncReceiver(
            self._context, ipc_names.tokenizer_input, ToTokenizer, bind=True
        )
        self._receive_task: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._fatal: str | None = None  # why nothing will ever be answered again

        self.rid_to_state: dict[str, ReqState] = {}
        self.on_fatal: Callable[[str], None] | None = None  # set by who can stop the server, for our own failure
        self.control = ServerControl(
            server_args,
            model_config,
            reply_to=self.reply_to,
            send=self.send,
            abort_all=lambda: self.abort_request(abort_all=True),
            live=self.rid_to_state,
        )

    # ---- a request, from the door to the answer ------------------------------------------------------

    async def generate_request(self, obj: GenerateReqInput) -> AsyncGenerator[Any, None]:
        """Run `obj` and yield its answer, an object or (batch, n > 1) a list; streams yield objects as they come.

        In a stream a RequestError comes before the first item or not at all, so whoever streams fetches the first
        item before promising a 200. Later a sample that fails ends with an object whose finish_reason is an abort
        with a `status_code`. Without a stream that is raised instead. An abort that the client itself asked for is
        no error: the text so far is the answer.

        Closing or cancelling this generator aborts what still runs; the doors do it when a client disconnects.
        """
        self.start()
        self._refuse_if_closing()
        batch = obj.normalize(
            vocab_size=self.model_config.vocab_size,
            max_batch_size=self.server_args.max_batch_size,
            preferred=self.preferred_params,
            replicas=self.server_args.data_parallel_size,
        )
        waiter = Waiter()
        states = self._register(batch, waiter)
        try:
            await self._tokenize(batch)
            if batch.prompts[0].params.n > 1 and not self.server_args.disable_radix_cache:
                await self._warm_prefixes(batch, waiter)
            await self.control.gate(states, waiter)
            self._dispatch(states)
            async for answer in self._answers(batch, states, waiter):
                yield answer
        finally:
            self._leave(states)

    def _refuse_if_closing(self) -> None:
        if self._fatal is not None:
            raise RequestError(self._fatal, status=503)
        if self.control.status is ServerStatus.DRAINING:
            raise RequestError("The server is shutting down.", status=503)

    def _register(self, batch: GenerateBatch, waiter: Waiter) -> list[ReqState]:
        states = [
            ReqState(rid, prompt, prompt.first_index + j, waiter)
            for prompt in batch.prompts
            for j, rid in enumerate(prompt.sample_rids)
        ]
        self._enter(states)
        if self.trace.on:
            for state in states:
                self.trace.event("request_received", rid=state.rid, stream=batch.stream)
        return states

    def _enter(self, states: list[ReqState]) -> None:
        """Take all these names, or none."""
        for state in states:
            if state.rid in self.rid_to_state:
                raise RequestError(f"A request with rid {state.rid!r} is still running.", param="rid")
        self.rid_to_state.update((state.rid, state) for state in states)

    async def _tokenize(self, batch: GenerateBatch) -> None:
        """Ids for every prompt, and the checks that need them: all before anything is sent."""
        if self.tokenizer is None:
            for prompt in batch.prompts:
                refuse_what_needs_a_tokenizer(prompt)
        limits = self._length_limits()
        todo = [prompt for prompt in batch.prompts if prompt.input_ids is None]
        if todo:
            tokenizer, texts = self.require_tokenizer(), [prompt.text or "" for prompt in todo]
            for text in texts:
                refuse_far_too_long(tokenizer.fewest_tokens(text), limits, "text")
            if limits.auto_truncate:  # what will be cut off is not worth seconds and gigabytes either
                texts = [tokenizer.beginning(text, limits.too_long) for text in texts]
            encoded = await self.text.encode(texts)
            for prompt, ids in zip(todo, encoded, strict=True):
                prompt.input_ids = ids
        for prompt in batch.prompts:
            fit_length(prompt, limits)
            if self.trace.on:
                for rid in prompt.sample_rids:
                    self.trace.event("tokenized", rid=rid, prompt_tokens=len(prompt.ids))

    def _length_limits(self) -> LengthLimits:
        context = self.model_config.context_len
        return LengthLimits(
            context_len=context,
            max_input_len=self.control.scheduler_info.get("max_req_input_len", context),
            auto_truncate=self.server_args.allow_auto_truncate,
        )

    async def _warm_prefixes(self, batch: GenerateBatch, waiter: Waiter) -> None:
        """n > 1: n samples sent at once would each compute the prompt. A hidden copy that produces nothing goes
        ahead, and leaves the prompt in the prefix cache for them."""
        hidden = []
        for prompt in batch.prompts:
            params = msgspec.structs.replace(prompt.params, max_new_tokens=0, min_new_tokens=0)
            copy = dataclasses.replace(prompt, params=params, stream=False, return_logprob=False)
            hidden.append(ReqState(f"{prompt.rid}-prefix", copy, HIDDEN, waiter))
        self._enter(hidden)
        try:
            await self.control.gate(hidden, waiter)
            self._dispatch(hidden)
            while any(state.finish is None for state in hidden):
                await waiter.wake_up()
        finally:
            self._leave(hidden)
        for state in hidden:
            failure = state.failure()
            if failure is not None:
                raise failure

    def _dispatch(self, states: list[ReqState]) -> None:
        for state in states:
            if state.finish is not None:  # aborted before it was sent; its waiter has the news already
                continue
            prompt = state.prompt
            message = TokenizedGenerateReqInput(
                rid=state.rid,
                batch_id=prompt.batch_id,
                reply_to=self.reply_to,
                input_ids=prompt.ids,
                sampling_params=self._params_of(state),
                stream=prompt.stream,
                return_logprob=prompt.return_logprob,
                logprob_start_len=prompt.logprob_start_len if prompt.return_logprob else -1,
                top_logprobs_num=prompt.top_logprobs_num if prompt.return_logprob else 0,
                token_ids_logprob=prompt.token_ids_logprob if prompt.return_logprob else None,
                cache_namespace=prompt.cache_namespace,
                data_parallel_rank=prompt.data_parallel_rank,
                received_ns=state.created_ns,
            )
            self.send(message)
            state.dispatched = True
            if self.trace.on:
                self.trace.event("sent", rid=state.rid)

    def _params_of(self, state: ReqState) -> SamplingParams:
        """One sample, one seed: drawn if none was given, counted up over the n samples of a prompt if one was."""
        params, number = state.prompt.params, state.index - state.prompt.first_index
        if params.sampling_seed is None:
            seed = self._seeds.getrandbits(63)
        else:
            seed = (params.sampling_seed + number + 2**63) % 2**64 - 2**63  # stays a signed 64-bit number
        return msgspec.structs.replace(params, n=1, sampling_seed=seed)

    async def _answers(self, batch: GenerateBatch, states: list[ReqState], waiter: Waiter) -> AsyncIterator[Any]:
        answers: list[Any] = [None] * len(states)
        running, started = len(states), False
        while running:
            state = await waiter.next_news()
            if state.index == HIDDEN:
                continue
            finished = state.finish is not None
            running -= finished
            failure = state.failure()
            if failure is not None and not started:
                raise failure
            if batch.stream:
                started = True
                yield self._respond(state, batch)
            elif finished:
                answers[state.index] = self._respond(state, batch)
        if not batch.stream:
            yield answers[0] if batch.is_single else answers

    def _respond(self, state: ReqState, batch: GenerateBatch) -> dict[str, Any]:
        if self.trace.on:
            chars = len(state.text) - state.sent_chars
            self.trace.event("text_sent", rid=state.rid, chars=chars, finished=state.finish is not None)
        return state.respond(
            incremental=batch.stream and self.server_args.incremental_streaming_output,
            with_text=self.tokenizer is not None,
            with_index=batch.stream and not batch.is_single,
        )

    def _leave(self, states: list[ReqState]) -> None:
        """The client's coroutine is done, well or not: nothing of it may stay behind."""
        for state in states:
            if self.rid_to_state.get(state.rid) is not state:
                continue  # over, and removed by the receive loop
            if not state.dispatched or self._fatal is not None:
                del self.rid_to_state[state.rid]
            else:
                state.abandoned = True
                try:
                    self._request_abort(state)
                except RequestError as error:  # we are cleaning up: what went wrong before is the better story
                    logger.warning("Could not abort %r: %s", state.rid, error.message)

    # ---- aborts --------------------------------------------------------------------------------------

    def abort_request(self, rid: str = "", abort_all: bool = False) -> None:
        """End the request named exactly `rid`, or all samples that go by that name; an unknown one changes nothing.

        (SGLang's scheduler matches by prefix: aborting `req-1` there also ends `req-10`, and "" everyone.)
        """
        if abort_all:
            named = list(self.rid_to_state.values())
        else:
            named = [s for s in self.rid_to_state.values() if rid in (s.rid, s.prompt.rid, s.prompt.batch_id)]
        if not named or not (rid or abort_all):
            logger.info("Nothing to abort under the name %r", rid)
            return
        for state in named:
            self._request_abort(state)

    def _request_abort(self, state: ReqState) -> None:
        if state.dispatched:
            if not state.abort_sent:
                state.abort_sent = True
                self.send(AbortReq(rid=state.rid))
        elif state.finish is None:
            self._end(state, FinishAbort("Aborted before it was scheduled."))
            state.waiter.event.set()

    def _end(self, state: ReqState, finish: FinishAbort) -> None:
        self.rid_to_state.pop(state.rid, None)
        state.end(finish)

    # ---- the receive loop ----------------------------------------------------------------------------

    def start(self) -> None:
        """Start receiving, on the loop that calls; later calls change nothing."""
        if self._receive_task is None:
            self._loop = asyncio.get_running_loop()
            self._receive_task = asyncio.ensure_future(self._receive_loop())

    async def _receive_loop(self) -> None:
        try:
            while True:
                await self.handle(await self._receiver.receive())
        except asyncio.CancelledError:
            raise
        except Exception:
            # Our own bug. A server that no longer listens would let every client wait forever.
            logger.exception("The TokenizerManager's receive loop failed")
            self._fail_everyone("The server has failed internally.")
            if self.on_fatal is not None:
                self.on_fatal("the TokenizerManager's receive loop failed")

    async def handle(self, message: Message) -> None:
        match message:
            case BatchStrOut() | BatchTokenIDOut():
                await self._handle_outputs(list(message.outs))
            case AbortReq():
                self._handle_abort(message)
            case _:
                self.control.handle(message)

    async def _handle_outputs(self, outs: list[StrOut | TokenIDOut]) -> None:
        """Waking is done in groups: enough clients to keep the loop busy, few enough that none waits for all."""
        self.control.saw_output()
        ready: list[ReqState] = []
        for out in outs:
            state = self.rid_to_state.get(out.meta.rid)
            if state is None:
                if not self.control.take_probe(out.meta.rid, finished=out.meta.finish is not None):
                    logger.info("Output for unknown rid %r dropped", out.meta.rid)
                continue
            if out.meta.finish is not None:
                del self.rid_to_state[state.rid]  # before the waiter knows: from now on the name is free
            if state.abandoned:
                continue
            state.update(out, self.tokenizer.token_text if self.tokenizer is not None else None)
            ready.append(state)
            if len(ready) >= self.server_args.batch_notify_size:
                _wake(ready)
                ready = []
                await asyncio.sleep(0)
        _wake(ready)

    def _handle_abort(self, message: AbortReq) -> None:
        state = self.rid_to_state.get(message.rid)
        if state is None:
            if not self.control.take_probe(message.rid, finished=True):
                logger.info("Abort of unknown rid %r dropped", message.rid)
            return
        self._end(state, message.finish or FinishAbort("Aborted."))
        state.waiter.event.set()

    # ---- the end of the server -----------------------------------------------------------------------

    def handle_child_death(self, message: str) -> None:
        """A scheduler or detokenizer is gone: answer everyone, now and later. May be called from any thread."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._fail_everyone, message)
        else:
            self._fail_everyone(message)

    def _fail_everyone(self, message: str) -> None:
        self._fatal = self._fatal or message
        self.control.fail(RequestError(message, status=503))
        for state in list(self.rid_to_state.values()):
            self._end(state, FinishAbort(message, status_code=503, err_type="ServiceUnavailable"))
            state.waiter.event.set()

    async def drain(self, timeout: float) -> bool:
        """Take nothing new and let what runs finish; after `timeout` seconds abort the rest. True if none was."""
        self.control.status = ServerStatus.DRAINING
        if await self._until_idle(timeout):
            return True
        self.abort_request(abort_all=True)
        await self._until_idle(2.0)  # the scheduler's answers, so that clients get their text so far
        return False

    async def _until_idle(self, timeout: float) -> bool:
        deadline = asyncio.get_running_loop().time() + timeout
        while self.rid_to_state and self._fatal is None:
            if asyncio.get_running_loop().time() >= deadline:
                return False
            await asyncio.sleep(0.05)
        return True

    def close(self) -> None:
        """Stop receiving and close the sockets. The loop must have ended, or be the one that calls."""
        if self._receive_task is not None and self._loop is not None and not self._loop.is_closed():
            self._receive_task.cancel()
        self.text.close()
        self._sender.close()
        self._receiver.close()
        self._context.term()
        self.trace.close()

    # ---- what the doors use --------------------------------------------------------------------------

    def send(self, message: Message) -> None:
        try:
            self._sender.send(message)
        except zmq.Again:
            raise RequestError("The scheduler does not answer.", status=503) from None

    async def render_chat(self, messages: list[dict[str, Any]], **options: Any) -> RenderedPrompt:
        tokenizer = self.require_tokenizer()
        fewest = sum(tokenizer.fewest_tokens(message["content"]) for message in messages)
        refuse_far_too_long(fewest, self._length_limits(), "messages")
        return await self.text.render_chat(messages, **options)

    def require_tokenizer(self) -> Tokenizer:
        return self.text.require_tokenizer()

    def chat_sampling_defaults(self) -> dict[str, Any]:
        """Sampling defaults of the model's own generation_config.json (`--sampling-defaults model`), in native words.

        For chat completions only: `/generate` and `/v1/completions` keep their documented defaults. They lie under
        what the request says, and an operator's `--preferred-sampling-params` goes before the model's author.
        """
        if self.server_args.sampling_defaults != "model":
            return {}
        defaults = {k: v for k, v in self.model_config.generation_defaults.items() if k not in self.preferred_params}
        if defaults.get("top_k") == 0:  # how generation_config says "off"
            defaults["top_k"] = -1
        return defaults


def _wake(states: list[ReqState]) -> None:
    for state in states:
        state.waiter.event.set()


def _checked_defaults(preferred: dict[str, Any] | None, vocab_size: int) -> dict[str, Any]:
    try:
        SamplingParams.from_dict(preferred or {}).normalize().verify(vocab_size)
    except RequestError as error:
        raise StartupError(f"--preferred-sampling-params: {error.message}") from None
    return preferred or {}
