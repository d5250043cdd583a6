"""`tinysrt bench offline`: how many tokens a second the Engine makes when everything is asked at once.

W2 without HTTP: 64 requests, 32 to 512 tokens in, 32 to 128 out, one call of `Engine.generate`. What is missing
against `bench serve` is the main process's parsing and writing; scheduler, model and detokenizer are the same
processes. So the difference between the two is what the doors cost.

Invariant: as everywhere, a run in which a request got another number of tokens than it asked for counts for nothing.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

from rich.table import Table

from tinysrt.bench import report
from tinysrt.bench.dialects import RunVoid
from tinysrt.bench.workloads import Draws
from tinysrt.entrypoints.engine import Engine
from tinysrt.errors import StartupError
from tinysrt.server_args_cli import add_flags, parse_with


def measure(engine: Engine, draws: Draws, requests: int) -> dict[str, float]:
    """One call with all requests."""
    count = draws.size(requests)
    inputs, outputs = draws.lengths(32, 512, count), draws.lengths(32, 128, count)
    prompts = [draws.prompt(tokens) for tokens in inputs]
    params = [{"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True} for tokens in outputs]
    begin = time.perf_counter()
    answers = engine.generate(input_ids=prompts, sampling_params=params)
    wall = time.perf_counter() - begin
    assert isinstance(answers, list), "a list was asked, so a list is the answer"
    for answer, asked in zip(answers, outputs, strict=True):
        if (got := answer["meta_info"]["completion_tokens"]) != asked:
            raise RunVoid(f"a request got {got} tokens instead of {asked}")
    return {
        "output_tok_s": sum(outputs) / wall,
        "total_tok_s": (sum(inputs) + sum(outputs)) / wall,
        "wall_s": wall,
    }


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="tinysrt bench offline", description="Throughput of the Engine: W2 without HTTP. Server flags apply."
    )
    parser.add_argument("--requests", type=int, default=64, help="at once (default 64)")
    parser.add_argument("--repeats", type=int, default=3, help="runs, each with new prompts (default 3)")
    parser.add_argument("--seed", type=int, default=0, help="of the first run (default 0)")
    parser.add_argument("--scale", type=float, default=1.0, help="shrinks the workload (default 1)")
    report.add_output_flags(parser)
    add_flags(parser, in_help=False)
    server_args, args = parse_with(parser, argv)
    server_args.check()
    report.check_output_flags(args)
    if args.requests < 1 or args.repeats < 1 or not args.scale > 0:
        raise StartupError("--requests and --repeats must be at least 1, and --scale above 0")
    with Engine(server_args=server_args) as engine:
        manager = engine.tokenizer_manager
        vocab_size, info = manager.model_config.vocab_size, engine.get_server_info()
        try:
            measure(engine, Draws(vocab_size, args.seed, 1000, args.scale / 4), args.requests)  # warm-up
            draws = [Draws(vocab_size, args.seed + i, 0, args.scale) for i in range(args.repeats)]
            runs = [measure(engine, each, args.requests) for each in draws]
        except RunVoid as error:
            raise StartupError(f"the run is void: {error}") from None
    summary = {name: report.spread([run[name] for run in runs]) for name in runs[0]}
    count = draws[0].size(args.requests)
    table = Table(title=f"{count} requests at once, {args.repeats} runs ({report.machine_line()})")
    for column in ("figure", "median", "min", "max"):
        table.add_column(column, justify="left" if column == "figure" else "right")
    for name, found in summary.items():
        table.add_row(name, *(report.number(found[key]) for key in ("median", "min", "max")))
    flags = {name: info.get(name) for name in ("model_path", "dtype", "attention_backend", "chunked_prefill_size")}
    figures: dict[str, Any] = {"flags": flags, "summary": summary, "runs": runs}

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        axes.bar([str(i + 1) for i in range(len(runs))], [run["output_tok_s"] for run in runs])
        axes.set_xlabel("run")
        axes.set_ylabel("output tokens a second")

    report.publish(args, "offline", figures, [table], draw, argv=argv)
    return 0
