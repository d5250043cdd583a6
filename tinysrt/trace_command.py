"""`tinysrt trace "prompt" -o run.jsonl`: run prompts with the recorder on, and show what happened.

    prompts ─▶ Engine(trace_dir=…) ─▶ one file per process ─▶ merge ─▶ run.jsonl ─┬▶ --text      tables in the terminal
                                                                                 └▶ --perfetto  ui.perfetto.dev

Several prompts run as one batch, so that their steps interleave. Every flag of the server may be given too: trace the
same prompt with and without `--disable-radix-cache` and compare. A running server records with `--trace-dir DIR`
instead, and `--from DIR` shows such a folder (or a merged file) without running anything.
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console

from tinysrt.errors import StartupError
from tinysrt.observe.merge import Event, TraceFormatError, load, merge, rids
from tinysrt.observe.perfetto import export_perfetto
from tinysrt.observe.render import render_request, render_seats
from tinysrt.server_args import ServerArgs
from tinysrt.server_args_cli import add_flags, parse_with


def main(argv: Sequence[str], engine_class: Callable[..., Any] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tinysrt trace", description="Record and show what a run does.")
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="text to complete; several run as one batch")
    parser.add_argument("-o", "--out", default=None, metavar="FILE", help="write the merged trace here (JSON lines)")
    parser.add_argument("--perfetto", metavar="FILE", help="also write the Chrome trace format, for ui.perfetto.dev")
    parser.add_argument("--text", action="store_true", help="print each request's life and the seats, step by step")
    parser.add_argument("--max-new-tokens", type=int, metavar="N", help="tokens a prompt (default 16)")
    parser.add_argument("--temperature", type=float, metavar="X", help="default 0: greedy")
    parser.add_argument("--from", dest="source", metavar="PATH", help="show this trace instead of running prompts")
    add_flags(parser, in_help=False)
    server_args, args = parse_with(parser, argv)
    server_args.check()
    if bool(args.prompts) == (args.source is not None):
        parser.error("give at least one PROMPT, or --from PATH")
    sampling = {"max_new_tokens": args.max_new_tokens, "temperature": args.temperature}
    if args.source is not None and (server_args != ServerArgs() or set(sampling.values()) != {None}):
        parser.error("--from runs nothing: leave out sampling and the flags of the server")
    console = Console()
    try:
        if args.source is None:
            events = record(server_args, args.prompts, args.out, sampling, engine_class)
        else:
            events = load(args.source) if args.out is None else merge(args.source, args.out)
        if args.perfetto:
            export_perfetto(events, args.perfetto)
    except (TraceFormatError, OSError) as exc:
        raise StartupError(str(exc)) from exc
    show(events, console, tables=args.text or not (args.out or args.perfetto))
    return 0


def record(
    server_args: ServerArgs,
    prompts: list[str],
    out: str | None,
    sampling: dict[str, Any],
    engine_class: Callable[..., Any] | None = None,
) -> list[Event]:
    """Run `prompts` to their end in an engine of their own; the events, oldest first, also in `out` if given."""
    sampling = {"max_new_tokens": 16, "temperature": 0.0} | {k: v for k, v in sampling.items() if v is not None}
    with tempfile.TemporaryDirectory(prefix="tinysrt-trace-") as scratch:
        directory = server_args.trace_dir or scratch
        traced = dataclasses.replace(server_args, trace_dir=directory)
        with (engine_class or _engine())(server_args=traced) as engine:
            engine.generate(prompt=prompts, sampling_params=sampling)
        # The processes have ended, so their files are complete.
        return load(directory) if out is None else merge(directory, out)


def _engine() -> Callable[..., Any]:
    from tinysrt.entrypoints.engine import Engine  # heavy: --help and --from do without

    return Engine


def show(events: list[Event], console: Console, *, tables: bool) -> None:
    requests = rids(events)
    if tables:
        for rid in requests:
            console.print(render_request(events, rid), "")
        console.print(render_seats(events), "")
    processes = dict.fromkeys(event["p"] for event in events)
    console.print(f"{len(events)} events of {len(requests)} request(s) from {', '.join(processes) or 'nobody'}.")
