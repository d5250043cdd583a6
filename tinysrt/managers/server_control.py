"""What is asked of a running server besides text: is it well, how busy is it, flush, pause, continue.

    door ─▶ ServerControl ── *Req message ─▶ Scheduler ── *ReqOutput ─▶ receive loop ─▶ ServerControl.handle

The TokenizerManager owns one and passes it every message that is not output of a request. It owns the gate at
which requests wait while generation is paused, the server's status, and the last load each scheduler has pushed.

Health is a real request: one token from one id, marked so that nothing counts it. An idle scheduler runs it, so
the answer proves all three processes. A busy one acknowledges it after the next batch instead; any output that
arrives meanwhile proves the same. Load snapshots do not count: they bypass the detokenizer.

SGLang spreads this over `tokenizer_control_mixin.py` and `http_server.py`.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import msgspec

from tinysrt.errors import RequestError
from tinysrt.managers.communicator import Communicator
from tinysrt.managers.request_state import ReqState, Waiter
from tinysrt.messages import (
    ContinueGenerationReqInput,
    ContinueGenerationReqOutput,
    FlushCacheReqInput,
    FlushCacheReqOutput,
    GetInternalStateReq,
    GetInternalStateReqOutput,
    HealthCheckOutput,
    LoadSnapshot,
    Message,
    PauseGenerationReqInput,
    PauseGenerationReqOutput,
    TokenizedGenerateReqInput,
)
from tinysrt.model_executor.model_config import ModelConfig
from tinysrt.sampling_params import SamplingParams
from tinysrt.server_args import ServerArgs

logger = logging.getLogger(__name__)

HEALTH_RID_PREFIX = "HEALTH_CHECK"
HEALTH_TIMEOUT_S = 20.0
FLUSH_GRACE_S = 1.5  # with overlap the scheduler is idle one step after the last answer has left
PAUSE_MODES = ("abort", "retract", "in_place")


class ServerStatus(StrEnum):
    STARTING = "starting"  # until the warm-up request was answered
    UP = "up"
    UNHEALTHY = "unhealthy"  # the last health probe was not answered
    DRAINING = "draining"  # SIGTERM came: nothing new


class ServerControl:
    def __init__(
        self,
        server_args: ServerArgs,
        model_config: ModelConfig,
        *,
        reply_to: str,
        send: Callable[[Message], None],
        abort_all: Callable[[], None],
        live: dict[str, ReqState],
    ):
        """`live`: the TokenizerManager's table, only read here."""
        self.server_args = server_args
        self.model_config = model_config
        self.reply_to = reply_to
        self.send = send
        self.abort_all = abort_all
        self.live = live
        self.status = ServerStatus.STARTING
        self.scheduler_info: dict[str, Any] = {}  # the scheduler's ready message; set once, after the handshake
        self.started = time.time()

        self.paused = False
        self._held: list[Waiter] = []  # requests at the gate
        replicas = server_args.data_parallel_size
        self._flush: Communicator[FlushCacheReqOutput] = Communicator(send, replicas)
        self._pause: Communicator[PauseGenerationReqOutput] = Communicator(send, replicas)
        self._continue: Communicator[ContinueGenerationReqOutput] = Communicator(send, replicas)
        self._state: Communicator[GetInternalStateReqOutput] = Communicator(send, replicas)
        self._gone = False  # a child died: nothing is going to answer
        self._loads: dict[int, LoadSnapshot] = {}  # by dp_rank, the latest
        self._probe_rids: dict[str, None] = {}  # health requests that the scheduler still has to answer
        self._probe: asyncio.Task[bool] | None = None  # in flight; probes that come meanwhile share it
        self._sign_of_life = asyncio.Event()

    # ---- messages from the scheduler -----------------------------------------------------------------

    def handle(self, message: Message) -> None:
        match message:
            case LoadSnapshot():
                self._loads[message.dp_rank] = message
            case HealthCheckOutput():
                self._probe_rids.pop(message.rid, None)
                self._sign_of_life.set()
            case FlushCacheReqOutput():
                self._flush.answer(message)
            case PauseGenerationReqOutput():
                self._pause.answer(message)
            case ContinueGenerationReqOutput():
                self._continue.answer(message)
            case GetInternalStateReqOutput():
                self._state.answer(message)
            case _:
                raise AssertionError(f"nobody handles {type(message).__name__}")

    def saw_output(self) -> None:
        self._sign_of_life.set()

    def take_probe(self, rid: str, finished: bool) -> bool:
        """Is this news of a health probe? Then nobody else wants it, and with the end of it the rid is forgotten."""
        known = rid in self._probe_rids
        if finished:
            self._probe_rids.pop(rid, None)
        return known

    def fail(self, error: RequestError) -> None:
        """The scheduler is gone for good."""
        for communicator in (self._flush, self._pause, self._continue, self._state):
            communicator.fail(error)
        self.status = ServerStatus.UNHEALTHY
        self._gone = True
        self._sign_of_life.set()
        self._open_gate()

    # ---- health --------------------------------------------------------------------------------------

    async def health(self, timeout: float = HEALTH_TIMEOUT_S) -> bool:
        """True if a scheduler and a detokenizer answer. Starting and draining servers are not to be sent requests."""
        if self._gone or self.status in (ServerStatus.STARTING, ServerStatus.DRAINING):
            return False
        if self._probe is None or self._probe.done():
            self._probe = asyncio.ensure_future(self._run_probe(timeout))
        alive = await asyncio.shield(self._probe)
        if self.status in (ServerStatus.UP, ServerStatus.UNHEALTHY):  # draining may have begun meanwhile
            self.status = ServerStatus.UP if alive else ServerStatus.UNHEALTHY
        return alive and self.status is ServerStatus.UP

    async def _run_probe(self, timeout: float) -> bool:
        try:
            async with asyncio.timeout(timeout):
                if self.paused:  # runs nothing, but a scheduler that is alive still talks
                    await self.get_internal_state()
                    return True
                self._sign_of_life.clear()
                rid = f"{HEALTH_RID_PREFIX}_{uuid.uuid4().hex}"
                self._probe_rids[rid] = None
                params = SamplingParams(max_new_tokens=1, temperature=0.0, sampling_seed=0).normalize()
                probe = TokenizedGenerateReqInput(
                    rid=rid, reply_to=self.reply_to, input_ids=[0], sampling_params=params, is_health_check=True
                )
                self.send(probe)
                await self._sign_of_life.wait()
                return not self._gone
        except (TimeoutError, RequestError) as error:
            logger.error("Health check failed: %s", error or f"no answer within {timeout:g} s")
            return False

    # ---- pause and continue --------------------------------------------------------------------------

    async def pause_generation(self, mode: str = "abort") -> None:
        """Hold new requests at the gate, and what runs: `abort` ends it, `retract` queues it again, `in_place`
        leaves it where it is."""
        if mode not in PAUSE_MODES:
            raise RequestError(f"'mode' must be one of {', '.join(PAUSE_MODES)}, got {mode!r}.", param="mode")
        self.paused = True
        if mode == "abort":
            self.abort_all()
            while any(state.dispatched for state in self.live.values()):
                await asyncio.sleep(0.02)
        replies = await self._pause.call(PauseGenerationReqInput(reply_to=self.reply_to, mode=mode))
        failure = next((reply for reply in replies if not reply.success), None)
        if failure is not None:
            self._open_gate()
            raise RequestError(failure.message)

    async def continue_generation(self) -> None:
        replies = await self._continue.call(ContinueGenerationReqInput(reply_to=self.reply_to))
        failure = next((reply for reply in replies if not reply.success), None)
        if failure is not None:
            raise RequestError(failure.message)
        self._open_gate()

    async def gate(self, states: list[ReqState], waiter: Waiter) -> None:
        """Hold these samples while generation is paused; those that are aborted meanwhile need not wait."""
        while self.paused and any(state.finish is None for state in states):
            self._held.append(waiter)
            await waiter.wake_up()

    def _open_gate(self) -> None:
        self.paused = False
        held, self._held = self._held, []
        for waiter in held:
            waiter.event.set()

    # ---- cache, load, state --------------------------------------------------------------------------

    async def flush_cache(self, timeout: float = 0.0) -> FlushCacheReqOutput:
        """Empty the prefix cache. Refused while requests run; `timeout`: wait so many seconds for them to end."""
        if not any(not state.abandoned for state in self.live.values()):
            timeout = max(timeout, FLUSH_GRACE_S)  # nobody waits for anything: what is left is the step in flight
        replies = await self._flush.call(FlushCacheReqInput(reply_to=self.reply_to, timeout_s=timeout))
        return next((reply for reply in replies if not reply.success), replies[0])

    async def get_internal_state(self) -> list[dict[str, Any]]:
        """One entry for each data-parallel replica."""
        replies = await self._state.call(GetInternalStateReq(reply_to=self.reply_to))
        return sorted((reply.internal_state for reply in replies), key=lambda state: state.get("dp_rank", 0))

    def loads(self) -> list[LoadSnapshot]:
        """What each scheduler last said about its load; nothing to wait for. Before its first word it is idle."""
        info = self.scheduler_info
        idle = LoadSnapshot(
            max_total_num_tokens=info.get("max_total_num_tokens", 0),
            max_running_requests=info.get("max_running_requests", 0),
        )
        return [
            self._loads.get(rank) or msgspec.structs.replace(idle, dp_rank=rank)
            for rank in range(self.server_args.data_parallel_size)
        ]

    # ---- what this server is -------------------------------------------------------------------------

    def model_info(self) -> dict[str, Any]:
        args, config = self.server_args, self.model_config
        return {
            "model_path": args.model_path,
            "served_model_name": args.served_model_name or args.model_path,
            "tokenizer_path": args.tokenizer_path or args.model_path,
            "is_generation": True,
            "preferred_sampling_params": args.preferred_sampling_params,
            "weight_version": "default",
            "load_format": args.load_format,
            "reasoning_parser": args.reasoning_parser,
            "tool_call_parser": args.tool_call_parser,
            "disaggregation_mode": "null",
            "has_image_understanding": False,
            "has_audio_understanding": False,
            "model_type": config.model_type,
            "architectures": config.architectures,
        }

    async def server_info(self) -> dict[str, Any]:
        """All resolved flags, flat, under our names and SGLang's short ones, and what the scheduler says of itself."""
        return {
            **self.server_args.to_info(),
            **{name: value for name, value in self.scheduler_info.items() if name != "status"},
            "status": self.status.value,
            "startup_time": self.started,
            "internal_states": await self.get_internal_state(),
            "version": package_version(),
        }


def package_version() -> str:
    try:
        return version("tinysrt")
    except PackageNotFoundError:  # run from a source tree that was never installed
        return "0+unknown"
