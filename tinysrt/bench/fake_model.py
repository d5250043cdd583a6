"""A model that computes nothing, for tests, labs and the scheduler benchmark: real scheduler, real pools, no weights.

Its "KV cache" stores in each slot the token and the position that were written there, so it can check what a real model
can only get subtly wrong: at every forward, each sequence must find exactly its own tokens in the slots that the
request-to-token table names. Its next token is a hash of the whole sequence, so two runs agree on their outputs only if
they agree on every token before: overlap on or off, chunked or whole, retracted or not.

It has the three calls of `ModelRunner` (forward, sample, to_host), the device copy of the table and the token relay.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tinysrt.managers.overlap_worker import OverlapWorker
from tinysrt.managers.schedule_batch import StepMemory
from tinysrt.managers.scheduler import Scheduler
from tinysrt.managers.seats import Limits, StepInputs
from tinysrt.managers.tp_worker import TpWorker
from tinysrt.mem_cache.allocator import make_allocator
from tinysrt.mem_cache.chunk_cache import ChunkCache
from tinysrt.mem_cache.memory_pool import ReqToTokenPool
from tinysrt.mem_cache.radix_cache import RadixCache
from tinysrt.messages import BatchTokenIDOut, Message, TokenIDOut, TokenizedGenerateReqInput
from tinysrt.model_executor.forward_batch_info import ForwardBatch
from tinysrt.model_executor.step_result import InputScores, StepResult
from tinysrt.observe.trace import Recorder
from tinysrt.sampling_params import SamplingParams
from tinysrt.server_args import ServerArgs
from tinysrt.text.tokenizer import Tokenizer

NextToken = Callable[[np.ndarray], int]


def hashed_token(vocab_size: int, eos_id: int | None = None) -> NextToken:
    """The next token as a hash of the sequence; `eos_id` comes up about once in ten times."""

    def next_token(ids: np.ndarray) -> int:
        digest = zlib.crc32(ids.astype(np.int32).tobytes())
        if eos_id is not None and digest % 10 == 0:
            return eos_id
        return int(digest // 10 % vocab_size)

    return next_token


class FakeModelRunner:
    def __init__(
        self,
        *,
        max_total_num_tokens: int,
        max_running_requests: int,
        table_width: int,
        page_size: int = 1,
        vocab_size: int = 1000,
        next_token: NextToken | None = None,
        check: bool = True,
    ):
        self.max_total_num_tokens = max_total_num_tokens
        self.max_running_requests = max_running_requests
        self.vocab_size = vocab_size
        self.device = "cpu"
        self.next_token = next_token or hashed_token(vocab_size)
        self.check = check  # False: no look at the cache, token 7 always; for timing the scheduler alone
        self.table_width = table_width
        self.table = np.zeros((max_running_requests + 1) * table_width, np.int32)
        self.relay = np.zeros(max_running_requests + 1, np.int64)
        slots = max_total_num_tokens + page_size
        self.cached_token = np.full(slots, -1, np.int64)
        self.cached_position = np.full(slots, -1, np.int64)

    def forward(self, batch: ForwardBatch) -> list[np.ndarray] | None:
        """Write this step's tokens into the cache; return each request's whole sequence, read back from it."""
        if batch.table_update is not None:
            self.table[batch.table_update.flat_index.numpy()] = batch.table_update.slots.numpy()
        if not self.check:
            return None
        rows = batch.req_pool_indices.numpy()
        input_ids = batch.input_ids.numpy().copy()
        if batch.forward_mode.is_decode():
            input_ids = self.relay[rows]
        elif batch.relay_lanes is not None and batch.relay_rows is not None:
            input_ids[batch.relay_lanes.numpy()] = self.relay[batch.relay_rows.numpy()]
        slots = batch.out_cache_loc.numpy()
        assert slots.min() > 0 and rows.min() > 0, "slot 0 and row 0 belong to padding"
        assert len(np.unique(slots)) == len(slots), "two tokens of one step share a slot"
        assert batch.seq_lens.tolist() == batch.seq_lens_cpu, "a launched batch was edited"
        self.cached_token[slots] = input_ids
        self.cached_position[slots] = batch.positions.numpy()
        sequences = []
        for row, seq_len in zip(rows, batch.seq_lens_cpu, strict=True):
            where = self.table[row * self.table_width : row * self.table_width + seq_len]
            assert np.array_equal(self.cached_position[where], np.arange(seq_len)), f"row {row}: foreign KV"
            sequences.append(self.cached_token[where].copy())
        return sequences

    def sample(self, logits: list[np.ndarray] | None, batch: ForwardBatch) -> list[int]:
        rows = batch.req_pool_indices.numpy()
        tokens = [7] * len(rows) if logits is None else [self.next_token(ids) for ids in logits]
        self.relay[rows] = tokens
        return tokens

    def to_host(self, output: list[int], batch: ForwardBatch) -> StepResult:
        spec = batch.logprob
        if spec is None:
            return StepResult(next_token_ids=[[token] for token in output])
        scores: list[InputScores | None] = []
        for targets in spec.input_targets or [[]] * len(output):
            scores.append(InputScores([-float(t) for t in targets], [], []) if targets else None)
        return StepResult(
            next_token_ids=[[token] for token in output],
            output_logprobs=[[-float(token)] for token in output],
            input_scores=scores,
        )


@dataclass
class ListInbox:
    """Messages that a test or a notebook puts there by hand."""

    messages: list[Message]

    def receive(self, *, block: bool) -> StepInputs:
        taken, self.messages = self.messages, []
        return StepInputs(now=0.0, messages=taken)


class ListOutbox:
    """What the scheduler said, in order; `outs` collects the results by rid."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.outs: dict[str, list[TokenIDOut]] = {}

    def to_detokenizer(self, message: BatchTokenIDOut) -> None:
        for out in message.outs:
            self.outs.setdefault(out.meta.rid, []).append(out)

    def to_tokenizer(self, message: Message, reply_to: str | None = None) -> None:
        self.messages.append(message)

    def output_ids(self, rid: str) -> list[int]:
        return [token for out in self.outs.get(rid, []) for token in out.new_ids]


class FakeEngine:
    """A scheduler with a fake model, driven step by step. `step()` is one turn of the loop that the flags choose."""

    def __init__(
        self,
        *,
        max_total_num_tokens: int = 1000,
        max_running_requests: int = 16,
        context_len: int = 512,
        vocab_size: int = 1000,
        eos_ids: frozenset[int] = frozenset(),
        next_token: NextToken | None = None,
        check: bool = True,
        tokenizer: Tokenizer | None = None,
        trace: Recorder | None = None,
        **server_args: Any,
    ):
        args = replace(ServerArgs(model_path="fake"), **server_args)
        page_size = args.page_size or 1
        args = replace(args, page_size=page_size)
        self.runner = FakeModelRunner(
            max_total_num_tokens=max_total_num_tokens,
            max_running_requests=max_running_requests,
            table_width=context_len + 4,
            page_size=page_size,
            vocab_size=vocab_size,
            next_token=next_token,
            check=check,
        )
        pool = ReqToTokenPool(max_running_requests, context_len + 4)
        allocator = make_allocator(max_total_num_tokens, page_size)
        cache = ChunkCache if args.disable_radix_cache else RadixCache
        self.overlap = not args.disable_overlap_schedule  # nothing is resolved here: unset is on, as on CUDA
        self.inbox = ListInbox([])
        self.outbox = ListOutbox()
        self.scheduler = Scheduler(
            args,
            worker=OverlapWorker(self.runner) if self.overlap else TpWorker(self.runner),
            memory=StepMemory(pool, allocator, cache(pool, allocator, page_size)),
            limits=Limits(
                context_len=context_len,
                max_running_requests=max_running_requests,
                vocab_size=vocab_size,
                eos_ids=eos_ids,
                capacity=max_total_num_tokens,
                page_size=page_size,
                max_queued_requests=args.max_queued_requests,
            ),
            inbox=self.inbox,
            outbox=self.outbox,
            trace=trace or Recorder("scheduler"),
            tokenizer=tokenizer,
        )

    def add(self, rid: str, input_ids: list[int], *, stream: bool = True, **params: Any) -> None:
        """Queue a request for the next step; `params` are SamplingParams fields and fields of the message."""
        fields = TokenizedGenerateReqInput.__struct_fields__
        message_fields = {name: params.pop(name) for name in list(params) if name in fields}
        sampling = SamplingParams(**{"temperature": 1.0, "top_k": 1, **params})
        self.send(
            TokenizedGenerateReqInput(
                rid=rid, reply_to="", input_ids=input_ids, sampling_params=sampling, stream=stream, **message_fields
            )
        )

    def send(self, message: Message) -> None:
        self.inbox.messages.append(message)

    def step(self) -> None:
        inputs = self.inbox.receive(block=False)
        if self.overlap:
            self.scheduler.step_overlap(inputs)
        else:
            self.scheduler.step_normal(inputs)

    def run(self, max_steps: int = 10_000) -> int:
        """Step until nothing is left to do; returns the number of steps."""
        for steps in range(max_steps):
            if steps and self.scheduler.is_idle() and not self.inbox.messages:
                return steps
            self.step()
        raise AssertionError(f"not idle after {max_steps} steps: {self.scheduler.state()}")

    def output_ids(self, rid: str) -> list[int]:
        return self.outbox.output_ids(rid)

    def close(self) -> None:
        self.scheduler.worker.close()
