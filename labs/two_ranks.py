"""What lab 5 runs on its ranks. Spawned processes import what they run, so it cannot stand in a notebook's cell.

The real thing: `tinysrt/processes.py`, `tinysrt/managers/scheduler_process.py`.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from tinysrt.bench.fake_model import ListInbox, ListOutbox
from tinysrt.distributed.parallel_state import ParallelState
from tinysrt.distributed.ranks import Seat
from tinysrt.distributed.rendezvous import join
from tinysrt.managers.scheduler_process import assemble
from tinysrt.messages import TokenizedGenerateReqInput
from tinysrt.model_executor.model_config import ModelConfig
from tinysrt.model_executor.model_runner import ModelRunner
from tinysrt.observe.trace import Recorder
from tinysrt.sampling_params import SamplingParams
from tinysrt.server_args import ServerArgs


@dataclass
class Rank:
    """What a function is given on each rank."""

    args: ServerArgs
    config: ModelConfig
    parallel: ParallelState
    runner: ModelRunner


class Ranks:
    """Processes, one a rank, that wait for work until `close`."""

    def __init__(self, folder: str, size: int):
        spawn = multiprocessing.get_context("spawn")
        self.meeting = tempfile.TemporaryDirectory()
        self.pipes, self.processes = [], []
        for number in range(size):
            ours, theirs = spawn.Pipe()
            process = spawn.Process(target=_work, args=(folder, size, number, self.meeting.name, theirs))
            process.start()
            self.pipes.append(ours)
            self.processes.append(process)

    def run(self, function: Callable[[Rank], Any]) -> list[Any]:
        """`function(rank)` on every rank at once; the answers in the order of ranks."""
        for pipe in self.pipes:
            pipe.send(function)
        return [pipe.recv() for pipe in self.pipes]

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.send(None)
        for process in self.processes:
            process.join()
        self.meeting.cleanup()


def _work(folder: str, size: int, number: int, meeting: str, pipe: Connection) -> None:
    rank = make_rank(folder, size, number, meeting)
    while (function := pipe.recv()) is not None:
        pipe.send(function(rank))


def make_rank(folder: str, size: int = 1, number: int = 0, meeting: str = "") -> Rank:
    args = ServerArgs(
        model_path=folder, device="cpu", dtype="float32", tensor_parallel_size=size, max_total_tokens=512,
        max_running_requests=8, num_threads=1, random_seed=0, disable_overlap_schedule=True,
        attention_backend="torch_native",
    ).resolve()  # fmt: skip
    config = ModelConfig.from_pretrained(folder, dtype="float32")
    parallel = join(args, Seat(tp_rank=number), meeting)
    return Rank(args, config, parallel, ModelRunner(args, config, trace=Recorder("lab"), parallel=parallel))


# ---- what the ranks do ---------------------------------------------------------------------------------


def shapes(rank: Rank) -> dict[str, Any]:
    """Sizes of what this rank holds. (The weights themselves are packed by now.)"""
    layer: Any = rank.runner.model.model.layers["0"]
    pool = rank.runner.kv_pool
    return {
        "q, k, v heads": [size // rank.config.head_dim for size in layer.self_attn.qkv_proj.output_sizes],
        "gate and up rows": layer.mlp.gate_up_proj.output_sizes,
        "embedding rows": len(rank.runner.model.model.embed_tokens.weight),  # type: ignore[union-attr]
        "KV bytes a token": sum(b[0].nbytes for b in (*pool.k_buffer, *pool.v_buffer)),
    }


def halves_of_a_sum(rank: Rank) -> tuple[list[float], list[float]]:
    """The first numbers of down_proj's product: before the all-reduce, and after."""
    mlp: Any = rank.runner.model.model.layers["0"].mlp
    x = torch.linspace(-1, 1, rank.config.hidden_size).unsqueeze(0)
    with torch.inference_mode():
        hidden = mlp.kernels.silu_and_mul(mlp.gate_up_proj(x))
        mine = super(type(mlp.down_proj), mlp.down_proj).forward(hidden)  # Linear's part: no all-reduce
        return mine[0, :4].tolist(), rank.parallel.all_reduce(mine)[0, :4].tolist()


def generate(rank: Rank) -> dict[str, Any]:
    """Two requests through this rank's scheduler; every rank gets the same list, as rank 0 would tell it."""
    group, calls = rank.parallel.tensors, {"all_reduce": 0, "all_gather": 0, "bytes": 0}
    if group is not None:
        exchange = group.all_gather

        def counted(x: torch.Tensor) -> list[torch.Tensor]:
            calls["bytes"] += x.nbytes
            return exchange(x)

        group.all_gather = counted  # type: ignore[method-assign]  # of an all-reduce too: it is built on this
    outbox = ListOutbox()
    messages: list[Any] = [
        TokenizedGenerateReqInput(
            rid=f"r{i}", reply_to="", input_ids=ids, sampling_params=SamplingParams(top_k=1, max_new_tokens=8)
        )
        for i, ids in enumerate(([5, 6, 7, 8, 9], [40, 41, 42]))
    ]
    scheduler = assemble(
        rank.args, rank.runner, tokenizer=None, eos_ids=frozenset(), inbox=ListInbox(messages), outbox=outbox,
        trace=Recorder("lab"), parallel=rank.parallel,
    )  # fmt: skip
    while True:
        scheduler.step_normal(scheduler.recv_requests())
        if scheduler.is_idle():
            break
    return {
        "tokens": [outbox.output_ids(f"r{i}") for i in range(2)],
        "forwards": scheduler.forward_count,
        "sent to each other rank": calls["bytes"],
    }


def time_of_a_sum(rank: Rank) -> tuple[float, float]:
    """Milliseconds of an all-reduce over one hidden state of SmolLM2: straight to each other, and gloo's own."""
    group: Any = rank.parallel.tensors
    x, options = torch.ones(576), dist.AllreduceOptions()
    best = []
    for reduce in (lambda: group.all_reduce(x), lambda: group.group.allreduce([x], options).wait()):
        times = []
        for _ in range(100):
            started = time.perf_counter()
            reduce()
            times.append(time.perf_counter() - started)
        best.append(1000 * sorted(times)[50])
    return best[0], best[1]
