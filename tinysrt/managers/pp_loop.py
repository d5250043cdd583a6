"""Pipeline parallel: the stages of one model at work on different microbatches at the same time.

A stage needs what the stage before computed, and the first stage needs the tokens that the last one sampled. One batch
would therefore keep one stage busy and the others waiting. So the running requests are dealt out to as many
microbatches as there are stages, each with seats of its own (`Seats`), and the loop goes round them:

    slot            0        1        0        1        0              two stages, two slots
    stage 0    ... │ F(0) ──┐│ F(1) ──┐│ F(0)  ──┐│ F(1) ...           F: forward through this stage's layers
                        ┌───┼┼─────▲  ││   ▲                            hidden states go down, tokens go up
    stage 1             ▼ F(0) S ──┘▼ F(1) S ──┘                        S: sample, tell everyone

Every rank runs the whole scheduler on the same inputs (`rank_inbox.py`) and so takes the same decisions; what differs
is the worker. A turn of the loop, for the slot whose turn it is:

    recv_requests → process_input_requests → process_batch_result of this slot's launch one round ago
                  → get_next_batch_to_run(its seats) → run_batch

Processing comes before scheduling: with a round between launch and result there is nothing left to overlap. Waiting
requests are common to all slots, memory too. Forwards run in launch order on every stage, so *Order* and *Scarcity*
hold as in `scheduler.py`.

Source: SGLang `managers/scheduler_pp_mixin.py`, where requests and results travel from stage to stage too.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from tinysrt.distributed.groups import Messenger, Tag
from tinysrt.distributed.parallel_state import ParallelState
from tinysrt.managers.scheduler import Scheduler
from tinysrt.managers.seats import Seats, StepInputs
from tinysrt.managers.tp_worker import FinishedStep, Runner, StepHandle
from tinysrt.model_executor.forward_batch_info import ForwardBatch
from tinysrt.model_executor.step_result import StepResult

_encode = msgspec.msgpack.encode
_decoder = msgspec.msgpack.Decoder(StepResult)


class PipelineLoop:
    """Drives a Scheduler over `slots` microbatches."""

    def __init__(self, scheduler: Scheduler, slots: int):
        self.scheduler = scheduler
        queue = scheduler.seats.waiting_queue
        scheduler.slots = [scheduler.seats, *(Seats(waiting_queue=queue) for _ in range(slots - 1))]
        self.launched: list[int | None] = [None] * slots  # the step that each slot has in flight
        self.slot = 0
        self.empty_turns = 0  # since a batch was launched; a whole round of them means that nothing can run

    def event_loop(self) -> None:
        while self.scheduler.running:
            self.step(self.scheduler.recv_requests())
        self.scheduler.drain()

    def step(self, inputs: StepInputs) -> None:
        """One turn of the slot whose turn it is."""
        scheduler, slot = self.scheduler, self.slot
        scheduler.process_input_requests(inputs)
        seats = scheduler.seats = scheduler.slots[slot]
        # Slots launch in turn, so what this one has in flight is the oldest (unless a drain has processed it already).
        if scheduler.in_flight and scheduler.in_flight[0].step == self.launched[slot]:
            scheduler.process_batch_result(scheduler.in_flight.popleft())
        self.launched[slot] = None
        scheduler.get_next_batch_to_run(seats)
        if seats.cur_batch is not None:
            scheduler.run_batch(seats.cur_batch)
            self.launched[slot] = scheduler.forward_count
        # A pause does not count: what other slots hold may go on when it ends.
        self.empty_turns = 0 if seats.cur_batch is not None or scheduler.paused else self.empty_turns + 1
        seats.last_batch = seats.cur_batch
        if self.empty_turns >= len(scheduler.slots) and not scheduler.in_flight and not self._make_way():
            scheduler.on_idle()
        self.slot = (slot + 1) % len(scheduler.slots)

    def _make_way(self) -> bool:
        """Nothing can run. Prompts half computed, one in each slot, may fill the pool between them; then the one that
        is furthest stays, and the others wait for it in the queue."""
        stuck = [(seats.chunked_req, seats) for seats in self.scheduler.slots if seats.chunked_req is not None]
        stuck.sort(key=lambda entry: entry[0].kv.committed_len)
        for req, seats in stuck[:-1]:
            self.scheduler.send_back(seats, req)
            seats.chunked_req = None
        return len(stuck) > 1


class StageRunner(Runner, Protocol):
    def remember(self, batch: ForwardBatch, tokens: list[int]) -> None:
        """Tokens sampled elsewhere: the next step's input."""


class StageWorker:
    """One stage's worker. The last stage samples and tells the others; they hear it when they ask for the result."""

    def __init__(self, runner: StageRunner, parallel: ParallelState):
        assert parallel.messages is not None
        self.runner = runner
        self.parallel = parallel
        self.messages = parallel.messages

    def launch(self, batch: ForwardBatch, *, delay_sampling: bool = False) -> StepHandle:
        assert not delay_sampling, "sampling waits for a step of the overlapped loop, and a pipeline has none"
        if not self.parallel.is_last_stage:
            self.runner.forward(batch)
            return AwaitedStep(self.runner, batch, self.messages, self._teller())
        step = FinishedStep(self.runner, batch, delay_sampling=False)
        if self.parallel.rank == self._teller():
            result = _encode(step.result())
            for rank in range(self._teller()):
                self.messages.tell(rank, result, Tag.TOKENS)
        return step

    def _teller(self) -> int:
        """The first rank of the last stage; its neighbors there have sampled the same tokens themselves."""
        return self.parallel.world_size - self.parallel.tp_size

    def close(self) -> None:
        pass


class AwaitedStep:
    """Handle of a forward whose tokens another stage samples."""

    def __init__(self, runner: StageRunner, batch: ForwardBatch, messages: Messenger, teller: int):
        self.runner = runner
        self.batch = batch
        self.messages = messages
        self.teller = teller

    def finish_sampling(self) -> None:
        pass

    def result(self) -> StepResult:
        result = _decoder.decode(self.messages.hear(self.teller, Tag.TOKENS))
        self.runner.remember(self.batch, [tokens[-1] for tokens in result.next_token_ids])
        return result
