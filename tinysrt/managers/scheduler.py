"""The scheduler: which requests run next, one step at a time.

    recv_requests → process_input_requests → get_next_batch_to_run → run_batch → process_batch_result
         ▲                                                                              │
         └──────────────────────────────────────────────────────────────────────────────┘

A request sits in exactly one of six seats (`Seats`). A new one travels waiting_queue → new_batch = cur_batch →
last_batch → running_batch; a decoding one goes running_batch → cur_batch → running_batch, step after step; a long
prompt being cut into chunks stays in chunked_req until its last chunk.

`event_loop_normal` and `event_loop_overlap` are the same three verbs in another order:

    normal    schedule N │ launch N │ process N
    overlap   schedule N │ launch N │ process N−1        the forward of N runs while N−1 is processed

so with overlap scheduling does not know the tokens of the step before. Three rules make that safe:

- *Order.* Forwards run in launch order. A slot may be freed, handed out again or published in the tree as soon as the
  forward that uses it is launched: whoever reads it next runs later.
- *Lengths are known, tokens are not.* Input ids come from the relay on the device; a request that will end by length
  with the steps already launched is not decoded again; one that ends by a stop token runs one step too many, and that
  token is dropped (`BatchResultProcessor`).
- *Scarcity waits.* Before anything is retracted, flushed or paused, what is in flight is processed first.

This file holds no I/O: messages come from an `Inbox` and leave through an `Outbox`; `scheduler_process.py` connects
them to sockets. Source: SGLang `managers/scheduler.py`.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import Any

from tinysrt.errors import RequestError
from tinysrt.managers.batch_result_processor import BatchResultProcessor, InFlight, Judge, OutputStreamer
from tinysrt.managers.request_intake import make_req
from tinysrt.managers.request_life import Stage
from tinysrt.managers.schedule_batch import Req, ScheduleBatch, StepMemory
from tinysrt.managers.schedule_policy import AddReqResult, PrefillAdder, SchedulePolicy
from tinysrt.managers.scheduler_report import SchedulerReport
from tinysrt.managers.seats import Inbox, Limits, Outbox, Seats, StepInputs
from tinysrt.managers.tp_worker import Worker
from tinysrt.mem_cache.ownership import check_ownership
from tinysrt.messages import (
    AbortReq,
    ContinueGenerationReqInput,
    ContinueGenerationReqOutput,
    FinishAbort,
    FlushCacheReqInput,
    FlushCacheReqOutput,
    GetInternalStateReq,
    GetInternalStateReqOutput,
    HealthCheckOutput,
    LoadSnapshot,
    PauseGenerationReqInput,
    PauseGenerationReqOutput,
    ShutdownReq,
    TokenizedGenerateReqInput,
)
from tinysrt.model_executor.forward_batch_info import ForwardMode
from tinysrt.observe.trace import Recorder
from tinysrt.server_args import ServerArgs
from tinysrt.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

# What part of its max_new_tokens a running request is expected to use: starts high, falls as decoding goes well, jumps
# up after a retract. (0.7, 0.14 and 600 are SGLang's.)
INIT_NEW_TOKEN_RATIO = 0.7
MIN_NEW_TOKEN_RATIO_FACTOR = 0.14
NEW_TOKEN_RATIO_DECAY_STEPS = 600
# After a retract the survivors get room for so many steps each, so that the next one is not immediate.
RETRACT_DECODE_STEPS = 20
LOAD_SNAPSHOT_INTERVAL = 15  # decode steps


class Scheduler:
    def __init__(
        self,
        server_args: ServerArgs,
        *,
        worker: Worker,
        memory: StepMemory,
        limits: Limits,
        inbox: Inbox,
        outbox: Outbox,
        trace: Recorder,
        tokenizer: Tokenizer | None = None,
        device: Any = "cpu",
        judge: Judge | None = None,
        dp_rank: int | None = None,
    ):
        self.args = server_args
        self.worker = worker
        self.memory = memory
        self.limits = limits
        self.inbox = inbox
        self.outbox = outbox
        self.trace = trace
        self.tokenizer = tokenizer
        self.device = device

        chunk = server_args.chunked_prefill_size
        self.chunk_budget = chunk if chunk is not None and chunk > 0 else None
        self.policy = SchedulePolicy(server_args.schedule_policy, memory.tree, server_args.random_seed or 0)
        self.streamer = OutputStreamer(outbox.to_detokenizer, self._notify_abort, server_args.stream_interval, dp_rank)
        self.processor = BatchResultProcessor(
            tree=memory.tree,
            streamer=self.streamer,
            vocab_size=limits.vocab_size,
            nan_replacement_id=min(limits.eos_ids, default=0),
            on_end=self._forget,
            trace=trace,
            judge=judge,
        )
        self.init_new_token_ratio = min(1.0, INIT_NEW_TOKEN_RATIO * server_args.schedule_conservativeness)
        self.min_new_token_ratio = self.init_new_token_ratio * MIN_NEW_TOKEN_RATIO_FACTOR

        self.seats = Seats()  # whose turn it is
        self.slots = [self.seats]  # a pipeline has one for each microbatch (`pp_loop.py`), with one waiting queue
        self.in_flight: deque[InFlight] = deque()  # launched, not processed: at most two, for a moment
        self.live: dict[str, Req] = {}  # every request that has not ended, by rid
        self.new_token_ratio = self.init_new_token_ratio
        self.forward_count = 0
        self.now = 0.0
        self.running = True  # the event loop goes on
        self.paused = False
        self.pending_flush: tuple[float, FlushCacheReqInput] | None = None
        self.pending_health_checks: list[tuple[str, str]] = []  # (rid, reply_to)
        self.report = SchedulerReport(memory, limits, server_args.decode_log_interval, dp_rank)

    # ---- the loops --------------------------------------------------------------------------------

    def event_loop_normal(self) -> None:
        while self.running:
            self.step_normal(self.recv_requests())

    def event_loop_overlap(self) -> None:
        while self.running:
            self.step_overlap(self.recv_requests())
        self.drain()

    def step_normal(self, inputs: StepInputs) -> None:
        self.process_input_requests(inputs)
        self.seats = self.get_next_batch_to_run(self.seats)
        batch = self.seats.cur_batch
        if batch is not None:
            self.run_batch(batch)
            self.process_batch_result(self.in_flight.popleft())
        else:
            self.on_idle()
        self.seats.last_batch = batch

    def step_overlap(self, inputs: StepInputs) -> None:
        self.process_input_requests(inputs)
        self.seats = self.get_next_batch_to_run(self.seats)
        batch = self.seats.cur_batch
        previous = self.in_flight.popleft() if self.in_flight else None
        if batch is not None:
            self.run_batch(batch)
        if previous is not None:
            self.process_batch_result(previous)
        elif batch is None:
            self.on_idle()
        self.seats.last_batch = batch

    def recv_requests(self) -> StepInputs:
        """What arrived; blocks while there is nothing to do. The scheduler never spins."""
        nothing_to_do = self.paused or (not self.live and self.report.idle)
        return self.inbox.receive(block=nothing_to_do and not self.in_flight)

    # ---- messages ---------------------------------------------------------------------------------

    def process_input_requests(self, inputs: StepInputs) -> None:
        self.now = inputs.now
        for message in inputs.messages:
            match message:
                case TokenizedGenerateReqInput():
                    self.handle_generate_request(message)
                case AbortReq():
                    self.abort(message)
                case FlushCacheReqInput():
                    self.flush_cache(message)
                case PauseGenerationReqInput():
                    self.pause(message)
                case ContinueGenerationReqInput():
                    self.continue_generation(message)
                case GetInternalStateReq():
                    self.outbox.to_tokenizer(GetInternalStateReqOutput(internal_state=self.state()), message.reply_to)
                case ShutdownReq():
                    self.running = False
                case _:
                    raise TypeError(f"the scheduler got a {type(message).__name__}")
        if self.pending_flush is not None:
            self._try_pending_flush()

    def handle_generate_request(self, message: TokenizedGenerateReqInput) -> None:
        """One new request: into the waiting queue, or refused with a reason."""
        if message.is_health_check and self.paused:
            self.outbox.to_tokenizer(HealthCheckOutput(rid=message.rid), message.reply_to)
            return
        if message.is_health_check and self.live:
            # A busy scheduler proves its health by its next result, not by one more request.
            self.pending_health_checks.append((message.rid, message.reply_to))
            return
        try:
            if message.rid in self.live:
                raise RequestError(f"A request with rid {message.rid!r} is already running.", param="rid")
            req = make_req(message, self.limits, self.tokenizer, waiting=len(self.seats.waiting_queue))
        except RequestError as error:
            err_type = "ServiceUnavailable" if error.status == 503 else "BadRequestError"
            finish = FinishAbort(error.message, error.status, err_type)
            self.outbox.to_tokenizer(AbortReq(rid=message.rid, finish=finish), message.reply_to)
            return
        self.live[req.rid] = req
        self.seats.waiting_queue.append(req)
        if self.trace.on:
            self.trace.event("queued", rid=req.rid, prompt_len=req.prompt_len, waiting=len(self.seats.waiting_queue))

    def abort(self, message: AbortReq) -> None:
        """End the request of this name, or all of its batch; names match whole. In every state the same way: at once.
        A forward that still computes for it runs on harmlessly; its lane is skipped when the result comes."""
        if message.abort_all:
            victims = list(self.live.values())
        else:
            victims = [req for req in self.live.values() if message.rid and message.rid in (req.rid, req.batch_id)]
        for req in victims:
            self.end_with_abort(req, FinishAbort("Aborted by the client."))

    def end_with_abort(self, req: Req, reason: FinishAbort) -> None:
        """End a request between two results: out of its seat, `BatchResultProcessor.end` as at every end, last word."""
        if req.stage in (Stage.WAITING, Stage.RETRACTED):
            self.seats.waiting_queue.remove(req)
        for seats in self.slots:
            if req is seats.chunked_req:
                seats.chunked_req = None
        self.processor.end(req, reason)
        self.streamer.send_abort(req)

    def _forget(self, req: Req) -> None:
        """A request has ended: whoever waits for room may try again."""
        del self.live[req.rid]
        for seats in self.slots:
            seats.running_batch.is_full = False

    def _notify_abort(self, req: Req) -> None:
        assert isinstance(req.finish, FinishAbort)
        self.outbox.to_tokenizer(AbortReq(rid=req.rid, finish=req.finish), req.reply_to)

    # ---- choosing the next batch --------------------------------------------------------------------

    def get_next_batch_to_run(self, seats: Seats) -> Seats:
        """Prefill first: if a prefill can be built it runs, else the decoding requests do. Fills `cur_batch`."""
        seats.new_batch = seats.cur_batch = None
        if self.paused or not self.running:
            return seats
        self.merge_last_batch(seats)
        seats.new_batch = self.get_new_batch_prefill(seats)
        seats.cur_batch = seats.new_batch or self.update_running_batch(seats)
        if self.trace.on and seats.cur_batch is not None:
            self.trace.event("step", **self.report.seats_for_trace(seats, self.forward_count + 1))
        return seats

    def merge_last_batch(self, seats: Seats) -> None:
        """The step before was a prefill: its requests join those that decode, all but the one between chunks."""
        last, running = seats.last_batch, seats.running_batch
        seats.last_batch = None
        if last is not None and last.forward_mode.is_extend():
            last.filter_over(excluding=seats.chunked_req)
            if not last.is_empty():
                running.merge(last)
                if self.trace.on:
                    self.trace.event("merged", rids=[req.rid for req in last.reqs])
        # Every step, not only after merges: while only prefills run, ended requests must not linger.
        if running.filter_over():
            running.is_full = False

    def get_new_batch_prefill(self, seats: Seats) -> ScheduleBatch | None:
        """The next chunk of the chunked request, and as many waiting requests as fit beside it."""
        waiting, running = seats.waiting_queue, seats.running_batch
        if seats.chunked_req is None and (not waiting or running.is_full):
            return None
        mixed = self._decode_batch_to_mix(seats)
        adder = PrefillAdder(
            self.memory,
            running,
            new_token_ratio=self.new_token_ratio,
            input_budget=self.args.max_prefill_tokens,
            chunk_budget=self.chunk_budget,
            mixed_decode_tokens=len(mixed) if mixed is not None else 0,
            neighbors=self._holding_elsewhere(seats) if len(self.slots) > 1 else [],
        )
        if seats.chunked_req is not None:
            continuing = seats.chunked_req
            seats.chunked_req = adder.add_chunked_req(continuing)
            if seats.chunked_req is None:
                continuing.move_to(Stage.PREFILLING)
        if seats.chunked_req is None:  # a chunk that is not the last leaves no budget to others
            self._admit_from_queue(seats, adder)
        if not adder.can_run_list:
            return None
        batch = ScheduleBatch.for_extend(adder.can_run_list, self.memory)
        if mixed is not None and self._can_mix(batch, mixed):
            mixed.prepare_for_decode(self.memory)
            batch.mix_with_decode(mixed)
            seats.running_batch = ScheduleBatch()
        self.report.log_prefill(batch, seats)
        return batch

    def _admit_from_queue(self, seats: Seats, adder: PrefillAdder) -> None:
        """Sort the queue, then ask the adder for one request after the other; the first refusal ends the pass."""
        waiting, running = seats.waiting_queue, seats.running_batch
        already = len(adder.can_run_list)  # 1 with the last chunk of the chunked request, which has its row
        free_rows = min(self.limits.max_running_requests - len(running) - already, self.memory.pool.available_size())
        state = adder.budget_state() if already else AddReqResult.CONTINUE
        # Sorting is not free: not while nobody can be admitted anyway.
        worth_it = free_rows > 0 and state is AddReqResult.CONTINUE
        may_be_asked = self.policy.sort(waiting, beside=adder.can_run_list) if worth_it else 0
        if self.args.prefill_max_requests is not None:
            may_be_asked = min(may_be_asked, self.args.prefill_max_requests - already)
        if len(self.slots) > 1:  # microbatches of one size keep all stages busy
            share = -(-len(self.live) // len(self.slots))
            may_be_asked = min(may_be_asked, max(1, share - len(running) - already))
        for req in waiting[: max(0, min(may_be_asked, free_rows))]:
            if state is not AddReqResult.CONTINUE:
                break
            state = adder.add_one_req(req)
        admitted = adder.can_run_list[already:]
        del waiting[: len(admitted)]  # asked in order: those admitted stand in front
        out_of_rows = len(admitted) == max(0, free_rows)
        out_of_memory = state is AddReqResult.NO_TOKEN and not (running.is_empty() and not adder.can_run_list)
        if out_of_rows or out_of_memory:
            running.is_full = True
        for req in admitted:
            if not req.admitted_once:
                req.admitted_once = True
                req.cached_tokens = req.prefix_len
            req.move_to(Stage.CHUNKED if req is adder.new_chunked_req else Stage.PREFILLING)
            if self.trace.on:
                self.trace.event("matched", rid=req.rid, cached=req.prefix_len, prompt_len=req.prompt_len)
                self.trace.event("admitted", rid=req.rid, row=req.kv.row, extend=[req.prefix_len, req.extend_end])
        if adder.new_chunked_req is not None:
            seats.chunked_req = adder.new_chunked_req

    def _decode_batch_to_mix(self, seats: Seats) -> ScheduleBatch | None:
        """With --enable-mixed-chunk, the decoding requests ride along a chunked prefill."""
        if not self.args.enable_mixed_chunk or self.chunk_budget is None:
            return None
        running = seats.running_batch
        self._drop_those_that_end(running)
        if running.is_empty() or any(req.return_logprob for req in running.reqs):
            return None
        # They share the chunk budget; where they would leave less than a page of it, no prompt could ever move on.
        if self.chunk_budget - len(running) < self.limits.page_size:
            return None
        return running

    def _can_mix(self, prefill: ScheduleBatch, decode: ScheduleBatch) -> bool:
        """No scores on either side, and room for a token each; else the decode rows sit out this step."""
        if any(req.return_logprob for req in prefill.reqs):
            return False
        return self._has_decode_room(decode)

    def update_running_batch(self, seats: Seats) -> ScheduleBatch | None:
        """Prepare the next decode step of the running batch; None if there is none to run now."""
        running = seats.running_batch
        self._drop_those_that_end(running)
        if running.is_empty():
            return None
        if self._has_decode_room(running):
            decay = (self.init_new_token_ratio - self.min_new_token_ratio) / NEW_TOKEN_RATIO_DECAY_STEPS
            self.new_token_ratio = max(self.new_token_ratio - decay, self.min_new_token_ratio)
        elif self.in_flight:
            # Requests that end with the step in flight are about to give memory back: look again after it.
            return None
        else:
            self.retract(seats)
            if running.is_empty():
                return None
        running.prepare_for_decode(self.memory)
        return running

    def _drop_those_that_end(self, running: ScheduleBatch) -> None:
        """Who ends by length with what is already launched needs no more decoding; its result finishes it."""
        running.keep([req for req in running.reqs if not req.ends_with_launched_steps()])

    def retract(self, seats: Seats) -> None:
        """Send running requests back to the queue until the others have room for a decode step.

        The shortest output goes first, of equals the longest prompt: the least work is thrown away and the most memory
        won. One request always stays, so that something moves (of a pipeline's microbatches, in one of them); if even
        it has no room, the chunked request gives way, and at last it is aborted: it is larger than the pool.
        """
        assert not self.in_flight, "a result on its way would belong to a request that is no longer running"
        running, page = seats.running_batch, self.limits.page_size
        order = sorted(running.reqs, key=lambda req: (len(req.output_ids), -req.prompt_len))
        victims: list[Req] = []
        stay = 0 if self._holding_elsewhere(seats) else 1
        while len(order) > stay and not (victims and self._has_decode_room(running)):
            victims.append(self.send_back(seats, order.pop(0)))
            running.keep(in_lane_order(running, order))
        if not self._has_decode_room(running) and seats.chunked_req is not None:
            victims.append(self.send_back(seats, seats.chunked_req))
            seats.chunked_req = None
        if not running.is_empty() and not self._has_decode_room(running):
            (last,) = running.reqs
            running.keep([])
            self.end_with_abort(
                last,
                FinishAbort(f"The KV pool is too small for this request: {self.memory.report()}.", 500, "OutOfMemory"),
            )
        if not running.is_empty():
            produced = sum(len(req.output_ids) + RETRACT_DECODE_STEPS for req in running.reqs)
            allowed = sum(req.max_new_tokens for req in running.reqs) + 1
            self.new_token_ratio = min(1.0, produced / allowed)
        self.memory.make_room(len(running) * RETRACT_DECODE_STEPS * (1 if page == 1 else 2))
        logger.warning(
            "KV pool is full: retracted %d requests, %d go on, new token ratio %.3f",
            len(victims), len(running), self.new_token_ratio,
        )  # fmt: skip

    def _holding_elsewhere(self, seats: Seats) -> list[Req]:
        """Those who hold memory in other microbatches."""
        here = {id(req) for req in seats.running_batch.reqs} | {id(seats.chunked_req)}
        return [req for req in self.live.values() if req.kv.row is not None and id(req) not in here]

    def _has_decode_room(self, running: ScheduleBatch) -> bool:
        """A slot for everyone's next token; what nobody holds is evicted for it."""
        return self.memory.make_room(running.decode_tokens_needed(self.limits.page_size))

    def send_back(self, seats: Seats, req: Req) -> Req:
        """Into the queue; the caller takes it out of its seat."""
        req.reset_for_retract(self.memory.tree)
        seats.waiting_queue.append(req)
        self.report.retracted += 1
        if self.trace.on:
            self.trace.event("retracted", rid=req.rid, output_len=len(req.output_ids))
        return req

    # ---- running it -------------------------------------------------------------------------------

    def run_batch(self, batch: ScheduleBatch) -> None:
        """Launch the forward, remember it in `in_flight`, and publish the KV it writes."""
        self.forward_count += 1
        forward_batch = batch.to_forward_batch(
            self.forward_count, self.memory.pool.take_update(), vocab_size=self.limits.vocab_size, device=self.device
        )
        if self.trace.on:
            self.trace.event(
                "forward_launched",
                step=self.forward_count,
                mode=batch.forward_mode.name,
                rids=[req.rid for req in batch.reqs],
                tokens=len(batch.out_cache_loc),
            )
        handle = self.worker.launch(forward_batch)
        self.in_flight.append(
            InFlight.of(self.forward_count, batch, self.seats.chunked_req, forward_batch.logprob, handle)
        )
        # Launched is as good as computed for everyone who comes later, so the prompt's KV goes into the tree now:
        # with overlap the very next step can already share it.
        if batch.forward_mode.is_extend():
            for req in batch.reqs[: len(batch) - batch.num_decode_lanes]:
                self.memory.tree.cache_unfinished(req.kv, req.all_ids()[: req.extend_end])
                if self.trace.on and req is self.seats.chunked_req:
                    self.trace.event("chunked", rid=req.rid, done=req.extend_end, prompt_len=req.num_tokens)

    def process_batch_result(self, flight: InFlight) -> None:
        result = flight.handle.result()
        tokens = self.processor.process(flight, result)
        if self.trace.on:
            self.trace.event("forward_done", step=flight.step, tokens=tokens)
        for rid, reply_to in self.pending_health_checks:
            self.outbox.to_tokenizer(HealthCheckOutput(rid=rid), reply_to)
        self.pending_health_checks.clear()
        self.report.count(flight.forward_mode, tokens)
        if flight.forward_mode is ForwardMode.DECODE:
            self.report.log_decode(self.seats, self.now, cuda_graph=result.cuda_graph)
        if flight.forward_mode.is_extend() or self.report.decode_steps % LOAD_SNAPSHOT_INTERVAL == 0:
            self.outbox.to_tokenizer(self.load_snapshot())
        if self.args.debug_invariants:
            self.check_invariants()

    def drain(self) -> None:
        """Process everything in flight; afterwards the host knows every token that was computed."""
        while self.in_flight:
            self.process_batch_result(self.in_flight.popleft())

    # ---- idle, flush, pause -------------------------------------------------------------------------

    def is_idle(self) -> bool:
        return not self.live and not self.in_flight

    def on_idle(self) -> None:
        """No batch ran and none is in flight."""
        if self.live and not self.paused:
            self._reject_what_can_never_run()
        if self.live or self.report.idle:
            return
        self.report.idle = True
        self.new_token_ratio = self.init_new_token_ratio
        self.seats.running_batch.is_full = False
        self.check_invariants()
        self.outbox.to_tokenizer(self.load_snapshot())

    def _reject_what_can_never_run(self) -> None:
        """Nothing runs, and still the first waiting request was refused. Its size was checked on arrival, so this is
        our own bug; its client gets an answer all the same, and the queue moves on."""
        if any(not seats.running_batch.is_empty() or seats.last_batch is not None for seats in self.slots):
            return
        if not self.seats.waiting_queue:
            return
        req = self.seats.waiting_queue[0]
        logger.error("request %s cannot be admitted to an empty server: %s", req.rid, self.memory.report())
        self.end_with_abort(req, FinishAbort("This request cannot be scheduled.", 500, "InternalServerError"))

    def flush_cache(self, message: FlushCacheReqInput) -> None:
        """Empty the tree, if nothing is running; `timeout_s` > 0 waits for that, one such wait at a time."""
        if self._can_flush():
            self.drain()
            self._reset_cache()
            self.outbox.to_tokenizer(FlushCacheReqOutput(success=True, message="Cache flushed."), message.reply_to)
        elif message.timeout_s > 0 and self.pending_flush is None:
            self.pending_flush = (self.now + message.timeout_s, message)
        else:
            self._refuse_flush(message)

    def _try_pending_flush(self) -> None:
        assert self.pending_flush is not None
        deadline, message = self.pending_flush
        if self._can_flush():
            self.pending_flush = None
            self.flush_cache(message)
        elif self.now >= deadline:
            self.pending_flush = None
            self._refuse_flush(message)

    def _can_flush(self) -> bool:
        """Nobody holds KV. (While paused, requests may wait without any.)"""
        return not self.live or (self.paused and all(req.kv.row is None for req in self.live.values()))

    def _refuse_flush(self, message: FlushCacheReqInput) -> None:
        text = (
            f"Not flushed: {len(self.seats.running_batch)} requests are running and {len(self.seats.waiting_queue)} "
            "are waiting. Try again when the server is idle, or pass ?timeout=SECONDS."
        )
        self.outbox.to_tokenizer(FlushCacheReqOutput(success=False, message=text), message.reply_to)

    def _reset_cache(self) -> None:
        self.memory.tree.reset()
        self.memory.allocator.reset()
        self.memory.pool.reset()
        for seats in self.slots:
            seats.running_batch, seats.last_batch, seats.chunked_req = ScheduleBatch(), None, None

    def pause(self, message: PauseGenerationReqInput) -> None:
        self.drain()
        if message.mode == "abort":
            self.abort(AbortReq(abort_all=True))
        for seats in self.slots:
            self.merge_last_batch(seats)
            if message.mode == "retract":
                for req in [*seats.running_batch.reqs, *([seats.chunked_req] if seats.chunked_req else [])]:
                    self.send_back(seats, req)
                seats.running_batch, seats.chunked_req = ScheduleBatch(), None
            elif message.mode == "in_place":
                for req in self._holding(seats):
                    req.move_to(Stage.PAUSED)
        self.paused = True
        self.outbox.to_tokenizer(PauseGenerationReqOutput(success=True), message.reply_to)

    def continue_generation(self, message: ContinueGenerationReqInput) -> None:
        for seats in self.slots:
            for req in self._holding(seats):
                if req.stage is Stage.PAUSED:
                    req.move_to(Stage.CHUNKED if req is seats.chunked_req else Stage.RUNNING)
        self.paused = False
        self.outbox.to_tokenizer(ContinueGenerationReqOutput(success=True), message.reply_to)

    def _holding(self, seats: Seats) -> list[Req]:
        """Requests between steps that hold a row."""
        chunked = [seats.chunked_req] if seats.chunked_req is not None else []
        return [req for req in [*seats.running_batch.reqs, *chunked] if not req.is_over()]

    # ---- what it says of itself -----------------------------------------------------------------------

    def check_invariants(self) -> None:
        """Every KV slot and every row has exactly one owner; raises OwnershipError with a report."""
        check_ownership(
            self.memory.pool,
            self.memory.allocator,
            self.memory.tree,
            [req.kv for req in self.live.values() if req.kv.row is not None],
        )

    def load_snapshot(self) -> LoadSnapshot:
        return self.report.load_snapshot(len(self.live), self.seats, self.now)

    def state(self) -> dict[str, Any]:
        return {
            **self.report.internal_state(len(self.live), self.seats),
            "new_token_ratio": round(self.new_token_ratio, 4),
            "forward_count": self.forward_count,
            "paused": self.paused,
        }


def in_lane_order(batch: ScheduleBatch, wanted: list[Req]) -> list[Req]:
    """`wanted`, in the batch's lane order."""
    return [req for req in batch.reqs if req in wanted]
