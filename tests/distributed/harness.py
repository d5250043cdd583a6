"""Ranks as threads of one process. A group is an object like any other, so several fit; they talk over real gloo.

Each rank has a thread of its own, a model runner with its part of the weights, and a whole scheduler. `step` lets all
of them take one step and compares their states afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from tinysrt.bench.fake_model import ListInbox, ListOutbox
from tinysrt.distributed.parallel_state import ParallelState
from tinysrt.distributed.ranks import Seat
from tinysrt.distributed.rendezvous import join
from tinysrt.managers.pp_loop import PipelineLoop
from tinysrt.managers.rank_inbox import FollowingInbox, LeadingInbox
from tinysrt.managers.scheduler import Scheduler
from tinysrt.managers.scheduler_process import assemble
from tinysrt.messages import Message, TokenizedGenerateReqInput
from tinysrt.model_executor.model_config import ModelConfig
from tinysrt.model_executor.model_runner import ModelRunner
from tinysrt.observe.trace import Recorder
from tinysrt.sampling_params import SamplingParams
from tinysrt.server_args import ServerArgs
from tinysrt.text.tokenizer import Tokenizer

T = TypeVar("T")
SECONDS = 60.0  # a rank that waits longer for another one waits for ever


def in_ranks(tp: int, directory: Path, work: Callable[[ParallelState], T], pp: int = 1) -> list[T]:
    """`work` on every rank at once; the results in the order of ranks."""
    args = ServerArgs(tensor_parallel_size=tp, pipeline_parallel_size=pp, device="cpu")
    with ThreadPoolExecutor(tp * pp) as threads:
        futures = [
            threads.submit(lambda seat: work(join(args, seat, str(directory))), Seat(rank % tp, rank // tp))
            for rank in range(tp * pp)
        ]
        return [future.result(SECONDS) for future in futures]


class Rank:
    def __init__(self, args: ServerArgs, seat: Seat, directory: Path, tokenizer: Tokenizer | None):
        self.parallel = join(args, seat, str(directory))
        assert self.parallel.messages is not None and args.model_path is not None
        config = ModelConfig.from_pretrained(args.model_path, dtype=args.dtype, context_length=args.context_length)
        self.runner = ModelRunner(args, config, trace=Recorder("test"), parallel=self.parallel)
        self.list = ListInbox([])
        self.outbox = ListOutbox()
        leads = self.parallel.rank == 0
        inbox: Any = (
            LeadingInbox(self.list, self.parallel.messages) if leads else FollowingInbox(self.parallel.messages)
        )
        self.scheduler: Scheduler = assemble(
            args, self.runner, tokenizer=tokenizer, eos_ids=config.eos_token_ids, inbox=inbox, outbox=self.outbox,
            trace=Recorder("test"), parallel=self.parallel,
        )  # fmt: skip
        if self.parallel.pp_size > 1:
            self.advance = PipelineLoop(self.scheduler, self.parallel.pp_size).step
        else:
            overlap = not args.disable_overlap_schedule
            self.advance = self.scheduler.step_overlap if overlap else self.scheduler.step_normal

    def step(self) -> None:
        self.advance(self.scheduler.recv_requests())
        self.scheduler.check_invariants()

    def state(self) -> dict[str, Any]:
        """Everything that the ranks must agree on."""
        scheduler = self.scheduler
        return {
            "forwards": scheduler.forward_count,
            "ratio": scheduler.new_token_ratio,
            "queue": [req.rid for req in scheduler.seats.waiting_queue],
            "running": [[req.rid for req in seats.running_batch.reqs] for seats in scheduler.slots],
            "chunked": [seats.chunked_req and seats.chunked_req.rid for seats in scheduler.slots],
            "live": {
                rid: (req.stage, list(req.output_ids), req.kv.row, req.kv.committed_len)
                for rid, req in scheduler.live.items()
            },
            "free": scheduler.memory.allocator.available_size(),
            "table": scheduler.memory.pool.table.tobytes(),
        }


class Ranks:
    def __init__(
        self, folder: Path, directory: Path, *, tp: int = 1, pp: int = 1, tokenizer: Tokenizer | None = None,
        **flags: Any,
    ):  # fmt: skip
        values: dict[str, Any] = dict(
            model_path=str(folder), device="cpu", dtype="float32", tensor_parallel_size=tp, pipeline_parallel_size=pp,
            max_total_tokens=1024, max_running_requests=16, num_threads=1, random_seed=3,
        )  # fmt: skip
        self.args = ServerArgs(**(values | flags)).resolve()
        self.threads = [ThreadPoolExecutor(1) for _ in range(tp * pp)]
        seats = [Seat(rank % tp, rank // tp) for rank in range(tp * pp)]
        builds = [
            thread.submit(Rank, self.args, seat, directory, tokenizer)
            for thread, seat in zip(self.threads, seats, strict=True)
        ]
        self.ranks = [build.result(SECONDS) for build in builds]

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for rank, thread in zip(self.ranks, self.threads, strict=True):
            rank.scheduler.worker.close()
            thread.shutdown(wait=False)

    def step(self, messages: Sequence[Message] = ()) -> None:
        self.ranks[0].list.messages += messages
        turns = [thread.submit(rank.step) for thread, rank in zip(self.threads, self.ranks, strict=True)]
        for turn in turns:
            turn.result(SECONDS)
        first, *others = [rank.state() for rank in self.ranks]
        for rank, other in enumerate(others, start=1):
            assert other == first, f"rank {rank} has gone its own way"

    def run(self) -> None:
        for _ in range(2000):
            self.step()
            if self.ranks[0].scheduler.is_idle():
                return
        raise AssertionError("not idle")

    def generate(self, prompts: list[list[int]], max_new_tokens: int = 10, **params: Any) -> list[list[int]]:
        sampling = SamplingParams(**({"top_k": 1, "ignore_eos": True} | params), max_new_tokens=max_new_tokens)
        self.step([request(f"r{i}", prompt, sampling) for i, prompt in enumerate(prompts)])
        self.run()
        return [self.ranks[0].outbox.output_ids(f"r{i}") for i in range(len(prompts))]


def request(rid: str, prompt: list[int], params: SamplingParams) -> TokenizedGenerateReqInput:
    return TokenizedGenerateReqInput(rid=rid, reply_to="", input_ids=prompt, sampling_params=params)
