"""`tinysrt bench overlap`: what the overlap loop costs or saves on this machine, with a real model.

One model, two schedulers, blocks of decode steps in turn: normal, overlap, normal, overlap ... The figure is the median
of the ratios of neighboring blocks, because a shared machine drifts; pairs of two normal blocks give the noise floor.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rich.table import Table

from tinysrt.bench import report
from tinysrt.bench.dialects import RunVoid
from tinysrt.bench.in_process import InProcess, with_scheduler
from tinysrt.bench.workloads import FIRST_ID
from tinysrt.errors import StartupError
from tinysrt.messages import AbortReq, FlushCacheReqInput, TokenizedGenerateReqInput
from tinysrt.model_executor.model_config import ModelConfig
from tinysrt.model_executor.model_runner import ModelRunner, load_runner
from tinysrt.observe.trace import Recorder
from tinysrt.sampling_params import SamplingParams
from tinysrt.server_args import ServerArgs
from tinysrt.text.demo_model import ensure_demo_model

WARM_UP = 5  # turns before the clock starts
SPARE = 8  # turns: a prefill joins the batch one or two later


def block(side: InProcess, batch_size: int, prompt: int, steps: int) -> float:
    """Seconds per decode step of `batch_size` requests; leaves everything free."""
    limits, tokens = side.scheduler.limits, WARM_UP + steps + SPARE
    for i in range(batch_size):
        ids = [(i * 7919 + j) % (limits.vocab_size - FIRST_ID) + FIRST_ID for j in range(prompt)]
        params = SamplingParams(max_new_tokens=tokens, top_k=1, ignore_eos=True)
        side.inbox.messages.append(
            TokenizedGenerateReqInput(rid=f"r{i}", reply_to="", input_ids=ids, sampling_params=params)
        )
    for _ in range(batch_size * prompt + SPARE):  # each turn computes a token of a prompt, at least
        if len(side.scheduler.seats.running_batch) == batch_size:
            break
        side.turn()
    for _ in range(WARM_UP):
        side.turn()
    start = time.perf_counter()
    for _ in range(steps):
        side.turn()
    seconds = (time.perf_counter() - start) / steps
    if len(side.scheduler.seats.running_batch) != batch_size:  # it never formed, or somebody has left it
        raise RunVoid(
            f"{batch_size} requests of {prompt + tokens} tokens do not run together: "
            f"at most {limits.max_running_requests} may, and the KV pool holds {limits.capacity} tokens"
        )
    side.inbox.messages += [AbortReq(abort_all=True), FlushCacheReqInput(reply_to="")]
    side.turn()
    return seconds


def measure(
    runner: ModelRunner, args: ServerArgs, *, batch_size: int, prompt: int, steps: int, pairs: int
) -> dict[str, Any]:
    kinds = [replace(args, disable_overlap_schedule=off) for off in (True, False, True)]

    def timed(kind: ServerArgs, steps: int) -> float:
        return with_scheduler(runner, kind, lambda side: block(side, batch_size, prompt, steps))

    for kind in kinds[:2]:
        timed(kind, 5)  # warm-up
    rows = [[timed(kind, steps) for kind in kinds] for _ in range(pairs)]
    return {
        "batch_size": batch_size,
        "normal_ms": statistics.median(row[0] for row in rows) * 1e3,
        "overlap_ms": statistics.median(row[1] for row in rows) * 1e3,
        "overlap_over_normal": statistics.median(2 * row[1] / (row[0] + row[2]) for row in rows),
        "normal_over_normal": statistics.median(row[2] / row[0] for row in rows),
    }


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="tinysrt bench overlap", description=__doc__.splitlines()[0])
    parser.add_argument("--model-path", help="default: the demo model")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompt", type=int, default=128, help="tokens")
    parser.add_argument("--steps", type=int, default=30, help="decode steps per block")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--num-threads", type=int)
    report.add_output_flags(parser, plot=False)
    cli = parser.parse_args(argv)
    report.check_output_flags(cli)
    if min(*cli.batch_sizes, cli.prompt, cli.steps, cli.pairs) < 1:
        raise StartupError("--batch-sizes, --prompt, --steps and --pairs must be at least 1")
    args = ServerArgs(
        model_path=cli.model_path or ensure_demo_model(), dtype=cli.dtype, num_threads=cli.num_threads
    ).resolve()
    config = ModelConfig.from_pretrained(str(args.model_path), context_length=4096, dtype=cli.dtype)
    runner = load_runner(args, config, trace=Recorder("bench"))
    largest, limit = max(cli.batch_sizes), runner.max_running_requests
    if largest > limit:
        raise StartupError(f"--batch-sizes {largest}: at most {limit} requests run at once on this machine")
    try:
        rows = [
            measure(runner, args, batch_size=size, prompt=cli.prompt, steps=cli.steps, pairs=cli.pairs)
            for size in cli.batch_sizes
        ]
    except RunVoid as error:
        raise StartupError(f"the run is void: {error}") from None
    table = Table(title=f"decode step, {runner.dtype}, {runner.num_threads} threads, median of {cli.pairs} pairs")
    for name in ("batch", "normal ms", "overlap ms", "overlap / normal", "normal / normal (noise)"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(str(row["batch_size"]), *(f"{row[key]:.3f}" for key in list(row)[1:]))
    figures = {"dtype": str(runner.dtype), "threads": runner.num_threads, "pairs": cli.pairs, "rows": rows}
    report.publish(cli, "overlap", figures, [table], argv=argv)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
