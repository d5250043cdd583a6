"""The scheduler as a process: build the model and its memory, say "ready", run the loop on real sockets.

    model config ─▶ weights ─▶ KV pool ─▶ graphs ─▶ rows, allocator, tree ─▶ worker ─▶ "ready" ─▶ event loop

With --tp and --pp each rank is such a process: it first meets the others (`distributed/rendezvous.py`), and in the loop
follows what rank 0 says (`rank_inbox.py`).

The order is SGLang's: the pool gets what the weights leave, captured steps refer to the pool, and so does the tree.
(The seeds build the tree first.)

A watchdog thread ends the process if a forward hangs: with work to do and no step for `--watchdog-timeout` seconds it
dumps every thread's stack and exits, and the parent takes the server down. Source: SGLang `scheduler.py`
(`run_scheduler_process`), `utils/watchdog.py`.
"""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import sys
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

import torch
import zmq

from tinysrt.distributed.parallel_state import SINGLE, ParallelState
from tinysrt.distributed.ranks import FIRST_SEAT, Seat
from tinysrt.distributed.rendezvous import join
from tinysrt.errors import StartupError
from tinysrt.ipc import IpcNames, Receiver, Sender
from tinysrt.managers.overlap_worker import overlap_worker
from tinysrt.managers.pp_loop import PipelineLoop, StageWorker
from tinysrt.managers.rank_inbox import FollowingInbox, LeadingInbox, NullOutbox, SharedJudge, agree
from tinysrt.managers.schedule_batch import StepMemory
from tinysrt.managers.scheduler import Scheduler
from tinysrt.managers.seats import Inbox, Limits, Outbox, StepInputs
from tinysrt.managers.tp_worker import TpWorker, Worker
from tinysrt.mem_cache.allocator import make_allocator
from tinysrt.mem_cache.chunk_cache import ChunkCache
from tinysrt.mem_cache.memory_pool import ReqToTokenPool
from tinysrt.mem_cache.radix_cache import RadixCache
from tinysrt.messages import BatchTokenIDOut, Message, ShutdownNotice, ToScheduler
from tinysrt.model_executor.model_config import ModelConfig
from tinysrt.model_executor.model_runner import ModelRunner, load_runner
from tinysrt.observe.progress import progress_bar
from tinysrt.observe.trace import Recorder
from tinysrt.server_args import ServerArgs
from tinysrt.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

SHORTEST_PROMPT_LIMIT = 8  # tokens; a server that takes less has no use, and its own warm-up would not fit
IDLE_WAIT_MS = 1000  # an idle scheduler looks around once a second (deadlines), else it sleeps in the poll


class SocketInbox:
    def __init__(self, receiver: Receiver[Message]):
        self.receiver = receiver

    def receive(self, *, block: bool) -> StepInputs:
        if block:
            self.receiver.wait(IDLE_WAIT_MS)
        messages = self.receiver.drain()
        return StepInputs(now=time.monotonic(), messages=messages)


class SocketOutbox:
    """Results go to the detokenizer, or with --skip-tokenizer-init straight to the TokenizerManager."""

    def __init__(self, context: zmq.Context, ipc_names: IpcNames, *, skip_detokenizer: bool):
        self.context = context
        self.default_reply_to = ipc_names.tokenizer_input
        self.tokenizers = {self.default_reply_to: Sender(context, self.default_reply_to)}
        self.detokenizer = Sender(context, ipc_names.detokenizer_input)
        self.skip_detokenizer = skip_detokenizer

    def to_detokenizer(self, message: BatchTokenIDOut) -> None:
        if self.skip_detokenizer:
            self.to_tokenizer(message)
        else:
            self.detokenizer.send(message)

    def to_tokenizer(self, message: Message, reply_to: str | None = None) -> None:
        endpoint = reply_to or self.default_reply_to
        if endpoint not in self.tokenizers:
            self.tokenizers[endpoint] = Sender(self.context, endpoint)
        self.tokenizers[endpoint].send(message)

    def close(self) -> None:
        self.detokenizer.send(ShutdownNotice())
        self.detokenizer.close()
        for sender in self.tokenizers.values():
            sender.close()


def build_scheduler(
    server_args: ServerArgs,
    *,
    inbox: Inbox,
    outbox: Outbox,
    trace: Recorder,
    parallel: ParallelState = SINGLE,
    dp_rank: int | None = None,
) -> tuple[Scheduler, dict[str, Any]]:
    """Load model and tokenizer, then assemble; also what the parent needs to know of it (the handshake)."""
    assert server_args.model_path is not None
    model_config = ModelConfig.of_server(server_args)
    tokenizer = None
    eos_ids = model_config.eos_token_ids
    if not server_args.skip_tokenizer_init:
        tokenizer = Tokenizer.load(
            server_args.tokenizer_path or server_args.model_path,
            mode=server_args.tokenizer_mode,
            trust_remote_code=server_args.trust_remote_code,
        )
        # Config, generation config and tokenizer are edited by different people: any of their end tokens ends a run.
        eos_ids = eos_ids | tokenizer.stop_ids
    with progress_bar() as on_progress:
        runner = load_runner(server_args, model_config, trace=trace, parallel=parallel, on_progress=on_progress)
    scheduler = assemble(
        server_args,
        runner,
        tokenizer=tokenizer,
        eos_ids=eos_ids,
        inbox=inbox,
        outbox=outbox,
        trace=trace,
        parallel=parallel,
        dp_rank=dp_rank,
    )
    limits = scheduler.limits
    if limits.max_req_input_len < SHORTEST_PROMPT_LIMIT:
        raise StartupError(
            f"no room for prompts: a KV pool of {limits.capacity} tokens (--max-total-tokens, --page-size) and a "
            f"context of {limits.context_len} (--context-length) leave {max(0, limits.max_req_input_len)} tokens for "
            f"one; {SHORTEST_PROMPT_LIMIT} is the least"
        )
    info = {
        "max_total_num_tokens": limits.capacity,
        "max_req_input_len": limits.max_req_input_len,
        "context_len": limits.context_len,
        "max_running_requests": limits.max_running_requests,
        "dtype": str(runner.dtype).removeprefix("torch."),
        "eos_token_ids": sorted(eos_ids),
    }
    return scheduler, info


def assemble(
    server_args: ServerArgs,
    runner: ModelRunner,
    *,
    tokenizer: Tokenizer | None,
    eos_ids: frozenset[int],
    inbox: Inbox,
    outbox: Outbox,
    trace: Recorder,
    parallel: ParallelState = SINGLE,
    dp_rank: int | None = None,
) -> Scheduler:
    """Around a loaded model: rows, allocator, tree, worker, scheduler, as the flags say."""
    page_size = server_args.page_size or 1
    limits = Limits(
        context_len=runner.config.context_len,
        max_running_requests=runner.max_running_requests,
        vocab_size=runner.vocab_size,
        eos_ids=eos_ids,
        capacity=runner.max_total_num_tokens,
        page_size=page_size,
        max_queued_requests=server_args.max_queued_requests,
    )
    pool = ReqToTokenPool(runner.max_running_requests, runner.table_width)
    allocator = make_allocator(runner.max_total_num_tokens, page_size)
    cache = ChunkCache if server_args.disable_radix_cache else RadixCache
    worker: Worker
    if parallel.pp_size > 1:
        worker = StageWorker(runner, parallel)
    else:
        worker = TpWorker(runner) if server_args.disable_overlap_schedule else overlap_worker(runner)
    return Scheduler(
        server_args,
        worker=worker,
        memory=StepMemory(pool, allocator, cache(pool, allocator, page_size)),
        limits=limits,
        inbox=inbox,
        outbox=outbox,
        trace=trace,
        tokenizer=tokenizer,
        device=runner.device,
        judge=SharedJudge(parallel),
        dp_rank=dp_rank,
    )


def run_scheduler_process(
    server_args: ServerArgs, ipc_names: IpcNames, pipe: Connection, seat: Seat = FIRST_SEAT
) -> None:
    """Entry of the child process; returns after a ShutdownReq."""
    # Of this thread, which schedules; whichever computes sets its own (`openmp_team.py`). PyTorch gives each thread the
    # process-wide count at its first use: asking is one, so what other threads set later does not reach this one.
    torch.set_num_threads(1)
    torch.get_num_threads()
    if not seat.is_first:  # all ranks would log the same
        logging.getLogger("tinysrt").setLevel(logging.WARNING)
    parallel = join(server_args, seat, ipc_names.directory)
    server_args = agree(server_args, parallel)
    name = "scheduler" if server_args.data_parallel_size == 1 else f"scheduler-dp{seat.dp_rank}"
    trace = Recorder(name, server_args.trace_dir if seat.is_first else None)
    context = zmq.Context()
    inbox: Inbox
    outbox: SocketOutbox | NullOutbox
    receiver: Receiver[Message] | None = None
    if seat.is_first:
        receiver = Receiver(context, ipc_names.scheduler_input, ToScheduler)
        inbox = SocketInbox(receiver)
        outbox = SocketOutbox(context, ipc_names, skip_detokenizer=server_args.skip_tokenizer_init)
        if parallel.messages is not None:
            inbox = LeadingInbox(inbox, parallel.messages)
    else:
        assert parallel.messages is not None
        inbox, outbox = FollowingInbox(parallel.messages), NullOutbox()
    started = time.monotonic()
    dp_rank = seat.dp_rank if server_args.data_parallel_size > 1 else None
    scheduler, info = build_scheduler(
        server_args, inbox=inbox, outbox=outbox, trace=trace, parallel=parallel, dp_rank=dp_rank
    )
    info["load_seconds"] = round(time.monotonic() - started, 2)
    # What start-up made stays: the collector need not look at it again. Before "ready": the first request would wait.
    gc.collect()
    gc.freeze()
    pipe.send({"status": "ready", **info})
    _start_watchdog(scheduler, server_args.watchdog_timeout)
    try:
        if parallel.pp_size > 1:
            PipelineLoop(scheduler, parallel.pp_size).event_loop()
        elif server_args.disable_overlap_schedule:
            scheduler.event_loop_normal()
        else:
            scheduler.event_loop_overlap()
        if parallel.messages is not None:
            parallel.messages.finish()  # the others have heard the goodbye too
    finally:
        scheduler.worker.close()
        outbox.close()
        if receiver is not None:
            receiver.close()
        trace.close()
    context.term()


def _start_watchdog(scheduler: Scheduler, timeout: float | None) -> None:
    if not timeout or timeout <= 0:
        return

    def watch() -> None:
        last, since = -1, time.monotonic()
        while True:
            time.sleep(min(timeout / 2, 10.0))
            progress = scheduler.forward_count
            if progress != last or not scheduler.in_flight and not scheduler.live or scheduler.paused:
                last, since = progress, time.monotonic()
            elif time.monotonic() - since > timeout:
                logger.error("no forward finished for %.0f s: the scheduler hangs", timeout)
                faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
                os._exit(1)

    threading.Thread(target=watch, name="watchdog", daemon=True).start()
