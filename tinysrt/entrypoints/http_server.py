"""The HTTP server: one application with all doors, and the life of the process that serves it.

    serve    reserve the port ▶ resolve flags ▶ spawn scheduler and detokenizer ▶ build the TokenizerManager meanwhile
             ▶ wait until both are ready ▶ watch them ▶ Uvicorn ▶ warm-up request ▶ "ready to roll"
    stop     SIGTERM: drain (503 for what is new, --drain-timeout for what runs), then stop. Again, or SIGINT: now.
    crash    a child dies: every waiting client is answered 503, the rest is stopped, exit code 1

The port is reserved first, because a model takes long to load and "port in use" should not; nothing listens on it
until requests can be served. Flags come after it, since resolving them may fetch the demo model.

Invariants: whatever goes wrong on a route ends in a body of that route's own API, without a traceback or a file path
(`build_app`); however `serve` ends, no child, socket or ipc directory is left behind.

SGLang: `entrypoints/http_server.py`, `utils/watchdog.py`. Its order is the same, its CORS is open to every web page.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import http.client
import json
import logging
import signal
import socket
import ssl
import threading
import time
from collections.abc import Generator, Iterator
from typing import Any

import uvicorn
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from tinysrt.entrypoints import native_api, openai_api
from tinysrt.entrypoints.errors import error_response
from tinysrt.errors import RequestError, StartupError
from tinysrt.managers.server_control import ServerStatus
from tinysrt.managers.tokenizer_manager import TokenizerManager
from tinysrt.messages import ShutdownReq
from tinysrt.model_executor.model_config import ModelConfig
from tinysrt.observe.trace import Recorder
from tinysrt.processes import launch, prepare, run_node
from tinysrt.server_args import ServerArgs

logger = logging.getLogger(__name__)

KEEP_ALIVE_S = 75  # longer than clients keep idle connections, so that none sends into one we just closed
ANSWERED_S = 2  # after the last answer was made: time to write it out before connections are cut
CHILDREN_GRACE_S = 5.0  # for children that were told to end
WARM_UP_TRIES, WARM_UP_TIMEOUT_S = 120, 600.0


# ---- the application ---------------------------------------------------------------------------------


def build_app(tokenizer_manager: TokenizerManager, server_args: ServerArgs) -> FastAPI:
    # FastAPI's own documentation pages are off: they load scripts from another host.
    app = FastAPI(
        title="tinysrt", docs_url=None, redoc_url=None, openapi_url=None, root_path=server_args.fastapi_root_path
    )
    app.include_router(native_api.build_router(tokenizer_manager, server_args))
    app.include_router(openai_api.build_router(tokenizer_manager, server_args))
    for kind in (RequestError, HTTPException, RequestValidationError, ClientDisconnect, Exception):
        app.add_exception_handler(kind, _answer_error)
    return app


async def _answer_error(request: Request, exc: Exception) -> Response:
    """Every failure, in the words and the shape of the API that was called."""
    path = request.url.path
    if isinstance(exc, ClientDisconnect):
        return Response(status_code=499)  # nobody reads it
    if isinstance(exc, HTTPException):  # Starlette's own: no such route, or not with this method
        what = {404: f"There is no {path[:128]} here.", 405: f"{path[:128]} does not take {request.method}."}
        response = error_response(path, RequestError(what.get(exc.status_code, exc.detail), status=exc.status_code))
        response.headers.update(exc.headers or {})  # 405 says in Allow what it takes
        return response
    if isinstance(exc, RequestValidationError):  # from a declared query parameter
        exc = RequestError("; ".join(f"{e['loc'][-1]}: {e['msg']}" for e in exc.errors()))
    if not isinstance(exc, RequestError):
        # The traceback goes to the log (Starlette raises on after this answer), never to the client.
        exc = RequestError("Internal server error.", status=500)
    return error_response(path, exc)


# ---- the process -------------------------------------------------------------------------------------


def serve(server_args: ServerArgs) -> int:
    """Serve until told to stop; the exit code. StartupError: it cannot start, in one line."""
    if server_args.node_rank > 0:  # node 0 serves; this machine only computes
        try:
            with _sigterm_interrupts():
                return run_node(prepare(server_args))
        except KeyboardInterrupt:
            return 130
    with _reserved_port(server_args.host, server_args.port) as listener:
        try:
            with _sigterm_interrupts():
                return _serve(prepare(server_args), listener)
        except KeyboardInterrupt:
            logger.info("Stopped before the server was ready")
            return 130


def _serve(server_args: ServerArgs, listener: socket.socket) -> int:
    launched, tokenizer_manager = launch(server_args), None
    grace = 0.0  # until there is someone to tell the children that it is over
    try:
        model_config = ModelConfig.of_server(server_args)
        trace = Recorder("tokenizer", server_args.trace_dir)
        tokenizer_manager = TokenizerManager(server_args, launched.ipc_names, model_config=model_config, trace=trace)
        tokenizer_manager.control.scheduler_info = launched.wait_ready()
        server = HttpServer(build_app(tokenizer_manager, server_args), tokenizer_manager, server_args, listener)
        launched.watch(server.child_died)
        server.run(sockets=[listener])
        if server.exit_code == 0:
            tokenizer_manager.send(ShutdownReq())
            grace = CHILDREN_GRACE_S
        return server.exit_code
    finally:
        if tokenizer_manager is not None:
            tokenizer_manager.close()
        launched.stop(grace)


class HttpServer(uvicorn.Server):
    """Uvicorn, with a warm-up after the start, and our meaning of signals."""

    def __init__(
        self, app: FastAPI, tokenizer_manager: TokenizerManager, server_args: ServerArgs, listener: socket.socket
    ):
        level = server_args.log_level_http or server_args.log_level
        super().__init__(
            uvicorn.Config(
                app,
                loop="uvloop",
                http="httptools",
                lifespan="off",
                log_config=None,  # our format, on our stream
                log_level=level,
                access_log=level in ("debug", "info"),
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=ANSWERED_S,
                ssl_keyfile=server_args.ssl_keyfile,
                ssl_certfile=server_args.ssl_certfile,
            )
        )
        self.tokenizer_manager = tokenizer_manager
        self.server_args = server_args
        self.listener = listener
        self.exit_code = 0
        self.loop: asyncio.AbstractEventLoop | None = None
        self._drain: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self.loop = asyncio.get_running_loop()
        self.tokenizer_manager.on_fatal = self.child_died
        self.tokenizer_manager.start()
        self.listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # see _reserved_port
        await super().startup(sockets)
        if self.server_args.skip_server_warmup:
            self._up()
        else:
            threading.Thread(target=self._warm_up, name="warm-up", daemon=True).start()

    # ---- stopping ----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self.drain)
        loop.add_signal_handler(signal.SIGINT, self.stop_now)
        try:
            yield
        finally:
            loop.remove_signal_handler(signal.SIGTERM)
            loop.remove_signal_handler(signal.SIGINT)

    def drain(self) -> None:
        """Take nothing new, let what runs finish, then stop. Asked again: stop now."""
        if self._drain is not None:
            self.stop_now()
            return
        logger.info("Draining: running requests have %g s to finish", self.server_args.drain_timeout)
        self._drain = asyncio.ensure_future(self._drain_and_stop())

    async def _drain_and_stop(self) -> None:
        if not await self.tokenizer_manager.drain(self.server_args.drain_timeout):
            logger.warning("Aborted what still ran after %g s", self.server_args.drain_timeout)
        self.should_exit = True

    def stop_now(self) -> None:
        logger.info("Stopping now")
        self._fail_clients("The server is shutting down.")

    def child_died(self, message: str) -> None:
        """From any thread: nothing can be answered any more."""
        self.exit_code = 1
        if self.loop is None or self.loop.is_closed():
            self.should_exit = True  # noticed as soon as Uvicorn has started
        else:
            self.loop.call_soon_threadsafe(self._fail_clients, f"The server has failed: {message}.")

    def _fail_clients(self, message: str) -> None:
        """Every waiting client gets its answer, a 503; then Uvicorn closes what is left after ANSWERED_S."""
        self.tokenizer_manager.handle_child_death(message)
        self.should_exit = True

    # ---- warming up --------------------------------------------------------------------------------

    def _warm_up(self) -> None:
        """One real request through every process, before anyone is told that the server is up. On its own thread."""
        assert self.loop is not None
        try:
            self._until_it_answers()
            status, answer = self._request("POST", "/generate", self._warm_up_body(), WARM_UP_TIMEOUT_S)
            if status != 200:
                raise RuntimeError(f"/generate answered {status}: {answer[:200]}")
            self.loop.call_soon_threadsafe(self._up)
        except Exception as exc:
            if not self.should_exit and self._drain is None:
                logger.error("The warm-up request failed: %s", exc)
                self.child_died("the warm-up request failed")

    def _until_it_answers(self) -> None:
        for _ in range(WARM_UP_TRIES):
            with contextlib.suppress(OSError, http.client.HTTPException):
                if self._request("GET", "/model_info", None, 5.0)[0] == 200:
                    return
            time.sleep(1.0)
        raise RuntimeError("/model_info does not answer")

    def _warm_up_body(self) -> dict[str, Any]:
        prompt = (
            {"input_ids": [10, 11, 12]}
            if self.server_args.skip_tokenizer_init
            else {"text": "The capital of France is"}
        )
        return prompt | {"sampling_params": {"temperature": 0, "max_new_tokens": 8}}

    def _request(self, method: str, path: str, body: dict[str, Any] | None, timeout: float) -> tuple[int, str]:
        host, port = _loopback(self.server_args.host), self.listener.getsockname()[1]
        connection: http.client.HTTPConnection
        if self.server_args.ssl_certfile is None:
            connection = http.client.HTTPConnection(host, port, timeout=timeout)
        else:  # our own certificate names the public host, not the loopback
            context = ssl._create_unverified_context()
            connection = http.client.HTTPSConnection(host, port, timeout=timeout, context=context)
        with contextlib.closing(connection):
            headers = {"Content-Type": "application/json"} if body is not None else {}
            connection.request(method, path, json.dumps(body) if body is not None else None, headers)
            response = connection.getresponse()
            return response.status, response.read().decode(errors="replace")

    def _up(self) -> None:
        if self.tokenizer_manager.control.status is not ServerStatus.STARTING:
            return  # draining already
        self.tokenizer_manager.control.status = ServerStatus.UP
        # What is alive now lives as long as the server: the collector need not look at it again.
        gc.collect()
        gc.freeze()
        logger.info("The server is fired up and ready to roll!")
        logger.info("Try it:\n\n  %s\n", self._curl_line())

    def _curl_line(self) -> str:
        host = _loopback(self.server_args.host)
        host = f"[{host}]" if ":" in host else host
        scheme = "http" if self.server_args.ssl_certfile is None else "https"
        if self.server_args.skip_tokenizer_init:
            path, body = "/generate", '{"input_ids": [10, 11, 12]}'
        else:
            path = "/v1/chat/completions"
            # A question whose answer is no close call: number formats and kernels must not turn it.
            ask = '{"role": "user", "content": "What color is the sky?"}'
            body = f'{{"messages": [{ask}], "temperature": 0, "max_tokens": 64}}'
        url = f"{scheme}://{host}:{self.listener.getsockname()[1]}{path}"
        return f"curl {url} -H 'Content-Type: application/json' -d '{body}'"


@contextlib.contextmanager
def _reserved_port(host: str, port: int) -> Iterator[socket.socket]:
    """A bound socket that does not listen yet. StartupError if someone else has the port."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as exc:
        raise StartupError(f"cannot listen on --host {host!r}: {exc.strerror}") from None
    with socket.socket(family, kind, proto) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of the last run may linger
        try:
            listener.bind(address)
        except OSError as exc:
            advice = "; choose another --port" if exc.errno in (errno.EADDRINUSE, errno.EACCES) else ""
            raise StartupError(f"cannot listen on {host}:{port}: {exc.strerror}{advice}") from None
        # As long as nobody listens, Linux lets two sockets that both say "reuse" have the port. Ours stops saying so.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        yield listener


@contextlib.contextmanager
def _sigterm_interrupts() -> Iterator[None]:
    """While there is no event loop yet, SIGTERM ends the start-up as Ctrl-C does: everything is cleaned up."""

    def interrupt(signum: int, frame: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _loopback(host: str) -> str:
    return {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
