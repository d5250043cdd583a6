"""`tinysrt chat`: talk to a model in the terminal, with streaming.

    --url given   ─▶ that server
    otherwise     ─▶ a server of our own on a free port, with the flags that were typed, stopped at the end

Both are spoken to over /v1/chat/completions, so the chat shows what any client gets: the chat template, the stream,
the cached prompt tokens. The conversation is kept here and sent whole each time; the server's radix cache is what
makes that cheap, and the line under each answer shows it.
"""

from __future__ import annotations

import argparse
import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console

from tinysrt.client import is_up, stream
from tinysrt.errors import StartupError
from tinysrt.processes import ask_kernel_to_die_with_parent
from tinysrt.server_args_cli import parse

HELP = "/new forgets the conversation, /system TEXT sets the system message, /quit (or Ctrl-D) leaves."
STOP_SECONDS = 10.0


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="tinysrt chat",
        description="Chat with a model. Without --url a server is started for it, and every flag of `tinysrt serve` "
        "may be given too.",
        usage="%(prog)s [flags]",
        allow_abbrev=False,
    )
    parser.add_argument("--url", help="a running server, such as http://127.0.0.1:30000")
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument("--max-new-tokens", type=int, default=512, metavar="N", help="longest answer (default 512)")
    parser.add_argument("--temperature", type=float, metavar="X", help="default: the model's")
    args, server_flags = parser.parse_known_args(argv)
    if args.url and server_flags:
        parser.error(f"with --url there is no server to give {' '.join(server_flags)} to")
    console = Console(highlight=False)
    with contextlib.nullcontext(args.url) if args.url else own_server(server_flags) as url:
        if not is_up(url):
            raise StartupError(f"no server is ready at {url}")
        Chat(console, url, args.system, args.max_new_tokens, args.temperature).run()
    return 0


class Chat:
    def __init__(self, console: Console, url: str, system: str | None, max_tokens: int, temperature: float | None):
        self.console = console
        self.url = url
        self.max_tokens = max_tokens
        self.temperature = temperature
        self.system = system
        self.messages: list[dict[str, str]] = []  # without the system message

    def run(self) -> None:
        self.console.print(HELP, style="dim")
        while (line := self._ask()) is not None:
            command, _, rest = line.partition(" ")
            if command == "/quit":
                return
            elif command == "/new":
                self.messages.clear()
            elif command == "/system":
                self.system = rest.strip() or None
            elif command.startswith("/"):
                self.console.print(HELP, style="dim")
            elif line:
                self.answer(line)

    def _ask(self) -> str | None:
        try:
            return self.console.input("[bold cyan]you ›[/] ").strip()
        except (EOFError, KeyboardInterrupt):
            self.console.print()
            return None

    def answer(self, text: str) -> None:
        """Send the conversation with `text` at its end, and print the answer as it comes. Ctrl-C stops it."""
        self.messages.append({"role": "user", "content": text})
        body: dict[str, Any] = {
            "model": "default",
            "messages": [{"role": "system", "content": self.system}] * bool(self.system) + self.messages,
            "max_completion_tokens": self.max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.temperature is not None:
            body["temperature"] = self.temperature
        pieces: list[str] = []
        usage: dict[str, Any] = {}
        started = time.monotonic()
        first = None
        self.console.print("[bold green]model ›[/] ", end="")
        events = stream(self.url, "/v1/chat/completions", body)
        try:
            for event in events:
                usage = event.get("usage") or usage
                for choice in event.get("choices", ()):
                    piece = choice["delta"].get("content") or ""
                    if piece and first is None:
                        first = time.monotonic() - started
                    pieces.append(piece)
                    self.console.print(piece, end="", markup=False, soft_wrap=True)
        except KeyboardInterrupt:
            self.console.print(" [dim](stopped)[/]", end="")
        except StartupError as error:  # this answer failed; the conversation goes on without it
            self.messages.pop()
            self.console.print(str(error), style="red", markup=False)
            return
        finally:
            events.close()  # type: ignore[attr-defined]  # a generator: closing it aborts the request
        self.console.print()
        self.messages.append({"role": "assistant", "content": "".join(pieces)})
        self.console.print(summary(usage, time.monotonic() - started, first), style="dim")


def summary(usage: dict[str, Any], seconds: float, first: float | None) -> str:
    """'42 tokens, 31 a second, first after 0.12 s; prompt 96 tokens, 80 of them cached'"""
    tokens = usage.get("completion_tokens")
    if tokens is None or first is None:
        return f"{seconds:.1f} s"
    rate = f"{(tokens - 1) / max(seconds - first, 1e-6):.0f} a second, " if tokens > 1 else ""
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    of_them = f", {cached} of them cached" if cached is not None else ""
    return f"{tokens} tokens, {rate}first after {first:.2f} s; prompt {usage['prompt_tokens']} tokens{of_them}"


@contextlib.contextmanager
def own_server(flags: Sequence[str]) -> Iterator[str]:
    """A server with these flags, on a free port of this machine; its URL once it is ready."""
    parse(flags, prog="tinysrt chat").check()  # a usage error is said here, before anything starts
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "tinysrt.launch_server", "--enable-cache-report", "--log-level", "warning"]
    server = subprocess.Popen(
        [*command, *flags, "--host", "127.0.0.1", "--port", str(port)],
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C in the chat stops an answer, not the server
        preexec_fn=ask_kernel_to_die_with_parent,  # a closed terminal window ends the chat without a word
    )
    url = f"http://127.0.0.1:{port}"
    try:
        while not is_up(url):
            if server.poll() is not None:
                raise StartupError("the server for this chat did not start; its last words are above")
            time.sleep(0.2)
        yield url
    finally:
        server.terminate()
        try:
            server.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
