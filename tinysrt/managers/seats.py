"""What the scheduler is built around: the six seats, the limits, and the border to the outside.

Only definitions; `scheduler.py` moves requests between the seats. The scheduler itself does no I/O: what comes in is
one `StepInputs` per step, what goes out leaves through an `Outbox`. `scheduler_process.py` connects both to sockets,
tests and labs to plain lists (`tinysrt/bench/fake_model.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from tinysrt.managers.schedule_batch import Req, ScheduleBatch
from tinysrt.messages import BatchTokenIDOut, Message


@dataclass(frozen=True)
class StepInputs:
    """Everything from outside that this step may depend on, as one value that rank 0 can broadcast."""

    now: float  # seconds, time.monotonic()
    messages: list[Message]


class Inbox(Protocol):
    def receive(self, *, block: bool) -> StepInputs:
        """All messages that are here; with `block`, wait until there is one (or it is time to look around)."""


class Outbox(Protocol):
    def to_detokenizer(self, message: BatchTokenIDOut) -> None: ...

    def to_tokenizer(self, message: Message, reply_to: str | None = None) -> None:
        """`reply_to` None: whoever is there (load snapshots)."""


@dataclass
class Seats:
    """Where a request can sit. One object, so that a pipeline can hold one per microbatch.

    waiting_queue  not started, or retracted; re-sorted by the policy each time a prefill is built
    new_batch      this step's prefill; think prefill_batch
    running_batch  prefilled, decoding; think decode_batch. Who is retracted is taken from here
    cur_batch      what this step launches: new_batch if there is one, else running_batch
    last_batch     the step before's cur_batch; a prefill in it joins running_batch at the start of this step
    chunked_req    the one request between chunks: in neither the queue nor running_batch, but holding a row and KV
    """

    waiting_queue: list[Req] = field(default_factory=list)
    new_batch: ScheduleBatch | None = None
    running_batch: ScheduleBatch = field(default_factory=ScheduleBatch)
    cur_batch: ScheduleBatch | None = None
    last_batch: ScheduleBatch | None = None
    chunked_req: Req | None = None


@dataclass(frozen=True)
class Limits:
    """What a request may ask for, fixed at start-up. Tokens."""

    context_len: int
    max_running_requests: int
    vocab_size: int
    eos_ids: frozenset[int]
    capacity: int  # KV pool
    page_size: int
    max_queued_requests: int | None = None

    @property
    def max_req_len(self) -> int:
        """Prompt and output together."""
        return min(self.context_len - 1, self.capacity - 1)

    @property
    def max_req_input_len(self) -> int:
        """Room for a few output tokens, and in the pool for whole pages and one to go on in. The TokenizerManager
        refuses longer prompts, so that a batch with one such item is refused before any of it is sent."""
        whole_pages = (self.capacity - self.page_size - 1) // self.page_size * self.page_size
        return min(self.max_req_len - 5, whole_pages)

    def clip_max_new_tokens(self, input_len: int, wanted: int | None) -> int:
        """How many tokens a prompt of this length may produce; negative: it does not fit at all."""
        rounded = -(-input_len // self.page_size) * self.page_size
        room = min(self.max_req_len - input_len - 1, self.capacity - rounded - self.page_size - 1)
        return room if wanted is None else min(wanted, room)
