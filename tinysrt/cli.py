"""The `tinysrt` command: one word chooses what to do, the rest belongs to that command.

A command is a function of its arguments that returns an exit code. What a user can cause ends as one line on stderr:
exit code 2 for a usage error (argparse), 1 for a StartupError or a RequestError, 130 for Ctrl-C. A command's imports
stand inside it, so that `tinysrt --help` needs neither PyTorch nor a model.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import tinysrt
from tinysrt.errors import RequestError, StartupError


def serve(argv: Sequence[str]) -> int:
    """serve a model over HTTP"""
    from tinysrt.server_args_cli import parse

    server_args = parse(argv)
    server_args.check()
    from tinysrt.entrypoints import http_server

    return http_server.serve(server_args)


def generate(argv: Sequence[str]) -> int:
    """complete one prompt, here or on a running server"""
    from tinysrt.server_args import ServerArgs
    from tinysrt.server_args_cli import add_flags, parse_with

    parser = argparse.ArgumentParser(prog="tinysrt generate", description="Complete a prompt and print the text.")
    parser.add_argument("prompt", nargs="?", help="the text to go on from; read from stdin when absent")
    parser.add_argument("--url", help="ask this running server instead of loading a model here")
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="tokens to add (default 128)")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="X", help="default 0: greedy")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="X", help="default 1: all of the vocabulary")
    parser.add_argument("--seed", type=int, metavar="N", help="makes sampling repeatable")
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="stop before this; may be repeated")
    add_flags(parser, in_help=False)
    server_args, args = parse_with(parser, argv)
    if args.url and server_args != ServerArgs():
        parser.error("--url asks a server that runs: leave out the flags of the server")
    server_args.check()
    prompt = sys.stdin.read() if args.prompt is None else args.prompt
    params: dict[str, Any] = {
        "max_new_tokens": args.max_new_tokens,
        "temperature": args.temperature,
        "top_p": args.top_p,
        "stop": args.stop,
    }
    if args.seed is not None:
        params["sampling_seed"] = args.seed
    if args.url:
        from tinysrt.client import stream

        print_growing(stream(args.url, "/generate", {"text": prompt, "sampling_params": params, "stream": True}))
        return 0
    from tinysrt.entrypoints.engine import Engine

    with Engine(server_args=server_args) as engine:
        print_growing(engine.generate(prompt=prompt, sampling_params=params, stream=True))
    return 0


def print_growing(chunks: Any) -> None:
    """Print a stream whose chunks hold all the text so far."""
    shown = 0
    for chunk in chunks:
        text = chunk["text"]
        print(text[shown:], end="", flush=True)
        shown = len(text)
    print()


def chat(argv: Sequence[str]) -> int:
    """talk to a model in the terminal"""
    from tinysrt import chat as chat_module

    return chat_module.main(argv)


def demo_model(argv: Sequence[str]) -> int:
    """fetch the demo model and print its folder"""
    parser = argparse.ArgumentParser(
        prog="tinysrt demo-model", description="Fetch the demo model once; print its folder."
    )
    parser.add_argument("--cache-dir", metavar="DIR", help="default: $TINYSRT_CACHE or ~/.cache/tinysrt")
    parser.add_argument("--verify", action="store_true", help="check every checksum again")
    args = parser.parse_args(argv)
    from tinysrt.observe.progress import progress_bar
    from tinysrt.text.demo_model import ensure_demo_model

    with progress_bar() as on_progress:
        path = ensure_demo_model(args.cache_dir, on_progress, verify=args.verify)
    print(path)
    return 0


def bench(argv: Sequence[str]) -> int:
    """measure a server, a mechanism, a part: `tinysrt bench --help`"""
    parser = argparse.ArgumentParser(
        prog="tinysrt bench",
        description="Measure a server, a mechanism or one part by itself.",
        epilog="\n".join(["parts:", *(f"  {name:12} {about}" for name, about in BENCHES.items())])
        + "\n\n`tinysrt bench PART --help` tells a part's flags.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("part", choices=BENCHES, metavar="PART", help="one of the parts below")
    part = importlib.import_module(f"tinysrt.bench.{parser.parse_args(argv[:1]).part}")
    return int(part.main(argv[1:]))


# Each is a module of tinysrt/bench/ with a `main(argv)`.
BENCHES = {
    "serve": "a running server, or two in turn: the workloads W1 to W5",
    "offline": "the Engine's throughput, no HTTP",
    "switches": "each mechanism off and on: what it gives on this machine",
    "scheduler": "one decode step without any model",
    "radix": "the prefix tree alone",
    "overlap": "the overlapped loop against the normal one",
    "kernels": "each kernel of each set, on a model's shapes",
    "gpu": "checks the GPU half on a GPU: right or wrong first, then times against floors",
    "roofline": "what this machine can do, and the floor of a step",
}
COMPUTING = ("switches", "overlap", "kernels", "roofline")  # a model's steps, in this process


def _with_memory_of_a_scheduler() -> None:
    """Start this command anew, once: steps of a model in this process would take longer than in a server, whose
    scheduler has its memory in huge pages."""
    from tinysrt.processes import malloc_for_steps

    before = os.environ.get("GLIBC_TUNABLES")
    with malloc_for_steps():
        if os.environ.get("GLIBC_TUNABLES") != before:
            os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def trace(argv: Sequence[str]) -> int:
    """record what a run does, step by step"""
    from tinysrt import trace_command

    return trace_command.main(argv)


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "serve": serve,
    "generate": generate,
    "chat": chat,
    "demo-model": demo_model,
    "bench": bench,
    "trace": trace,
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="tinysrt",
        description="A complete, fast, readable SGLang Runtime in Python.",
        epilog="\n".join(["commands:", *(f"  {name:12} {run.__doc__}" for name, run in COMMANDS.items())])
        + "\n\n`tinysrt COMMAND --help` tells a command's flags.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"tinysrt {tinysrt.__version__}")
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help="one of the commands below")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="the command's own")
    args = parser.parse_args(argv)
    if argv is None and args.command == "bench" and args.arguments[:1] and args.arguments[0] in COMPUTING:
        _with_memory_of_a_scheduler()
    try:
        return COMMANDS[args.command](args.arguments)
    except (StartupError, RequestError) as error:
        print(f"tinysrt: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
