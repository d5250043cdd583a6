"""The processes of one server: spawn, handshake, watch, stop.

    main process                    scheduler             detokenizer
    launch ──── spawn ────────────▶ load the model
       │ ────── spawn ──────────────────────────────────▶ load the tokenizer
    (builds its TokenizerManager meanwhile)
    wait_ready ◀── pipe: ready ──── pools are allocated
       │       ◀── pipe: ready ───────────────────────── its socket is bound
    watch: a thread that looks at the exit codes
    stop:  wait a little for goodbyes, kill the rest, remove the socket directory

Each child has one pipe to its parent. It carries exactly one dict, `{"status": "ready", ...}` or
`{"status": "error", "message": one line}`, and is closed afterwards; all other traffic is ZMQ (`tinysrt/ipc.py`).
A child that is killed cannot say anything, so the parent waits for the pipe *and* for the end of the process.

Invariants, each with a test in tests/processes/:
- no orphan: whatever ends the main process, `kill -9` included, ends its children;
- no stale socket: the ipc directory goes with the server;
- a child that dies after "ready" with a code other than 0 is reported once, through `watch`, and takes the server down.

Children are spawned, never forked: a fork would copy the parent's threads' locks and CUDA state. They ignore SIGINT and
SIGTERM, because Ctrl-C and service managers signal the whole group while draining is for the main process to lead.

Source: SGLang `entrypoints/engine.py::_launch_subprocesses`, `utils/watchdog.py`. There a dying child sends SIGQUIT to
its parent, which kills the whole tree; here the parent watches, and answers its waiting clients first.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import dataclasses
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any

from tinysrt.errors import StartupError
from tinysrt.ipc import IpcNames
from tinysrt.observe.progress import progress_bar
from tinysrt.server_args import ServerArgs
from tinysrt.text.demo_model import ensure_demo_model

logger = logging.getLogger(__name__)

WATCH_PERIOD = 1.0  # seconds between looks at the stop flag; a death itself wakes the watcher at once
DEMO_MODEL_NAME = "SmolLM2-135M-Instruct"  # served under this name, not under its path in a cache folder
PR_SET_PDEATHSIG = 1  # from <linux/prctl.h>

# What runs in a child: (server_args, ipc_names, pipe_writer). It returns when it was told to stop.
Entry = Callable[[ServerArgs, IpcNames, Connection], None]


@dataclasses.dataclass
class Child:
    name: str  # as in log lines and in `ps`: tinysrt::scheduler
    process: SpawnProcess
    pipe: Connection  # read end; closed once it has spoken

    def exit_code(self) -> int:
        """Of a process that has ended. Another thread may be collecting it at this moment: then a beat later."""
        self.process.join()
        for _ in range(100):
            if self.process.exitcode is not None:
                return self.process.exitcode
            time.sleep(0.01)
        return 1  # collected by a stranger's os.wait(): nobody can tell any more

    def how_it_ended(self) -> str:
        code = self.exit_code()
        if code >= 0:
            return f"ended with exit code {code}"
        hint = " (out of memory?)" if -code == signal.SIGKILL else ""
        return f"was killed by {signal.Signals(-code).name}{hint}"


class Launched:
    """The children of one server and the directory of their sockets. `with` stops them at the end."""

    def __init__(self, server_args: ServerArgs, ipc_names: IpcNames):
        self.server_args = server_args
        self.ipc_names = ipc_names
        self.children: list[Child] = []
        self.scheduler_info: dict[str, Any] = {}  # what the scheduler said when it was ready
        self._stopping = threading.Event()
        self._watcher: threading.Thread | None = None
        # Registered after multiprocessing's own exit hook, so it runs before: that hook joins children, for ever.
        atexit.register(self.stop, 0.0)

    def spawn(self, name: str, entry: Entry) -> None:
        context = multiprocessing.get_context("spawn")
        reader, writer = context.Pipe(duplex=False)
        # The kernel's "die with your parent" watches the *thread* that spawned. Only the main one surely lives on.
        by_main_thread = threading.current_thread() is threading.main_thread()
        arguments = (name, entry, self.server_args, self.ipc_names, writer, by_main_thread)
        process = context.Process(target=_run_child, args=arguments, name=f"tinysrt::{name}")
        process.start()
        writer.close()  # the child has its own copy now; ours would keep the pipe from ending with it
        self.children.append(Child(name, process, reader))

    def wait_ready(self) -> dict[str, Any]:
        """Wait for every child's "ready" and return the scheduler's. The first bad news ends the launch."""
        loading = list(self.children)
        try:
            while loading:
                # All ends, not only of those still loading: one that was ready first may die while the others load.
                happened = wait([child.pipe for child in loading] + [child.process.sentinel for child in self.children])
                for child in self.children:
                    # The pipe first: a child that sends its error and exits has something better to say.
                    if child in loading and (child.pipe in happened or child.process.sentinel in happened):
                        ready = _read_ready(child)
                        loading.remove(child)
                        logger.debug("%s is ready: %s", child.name, ready)
                        if child.name == "scheduler":
                            self.scheduler_info = ready
                    elif child.process.sentinel in happened:
                        raise StartupError(_died_while_starting(child))
        except BaseException:  # KeyboardInterrupt too: nothing may stay behind
            self.stop(0.0)
            raise
        return self.scheduler_info

    def watch(self, on_death: Callable[[str], None]) -> None:
        """From now on report a child's unexpected death, once and from a thread of its own."""
        self._watcher = threading.Thread(target=self._watch, args=(on_death,), name="process-watch", daemon=True)
        self._watcher.start()

    def _watch(self, on_death: Callable[[str], None]) -> None:
        alive = list(self.children)
        while alive and not self._stopping.is_set():
            ended = wait([child.process.sentinel for child in alive], timeout=WATCH_PERIOD)
            for child in list(alive):
                if child.process.sentinel not in ended:
                    continue
                alive.remove(child)
                message = f"the {child.name} process {child.how_it_ended()}"
                if child.exit_code() != 0 and not self._stopping.is_set():  # 0 is a goodbye, not a crash
                    logger.error("%s: the server goes down", message)
                    on_death(message)
                    return

    def stop(self, grace: float = 5.0) -> None:
        """Give children that were told to end `grace` seconds for it, kill the rest, remove the sockets."""
        self._stopping.set()
        deadline = time.monotonic() + grace
        for child in self.children:
            child.process.join(max(deadline - time.monotonic(), 0.0))
        for child in self.children:
            if child.process.is_alive():
                child.process.kill()
        for child in self.children:
            child.process.join()
            child.pipe.close()
        self.ipc_names.remove()
        atexit.unregister(self.stop)

    def __enter__(self) -> Launched:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()


def launch(server_args: ServerArgs, scheduler: Entry | None = None, detokenizer: Entry | None = None) -> Launched:
    """Start the children of a server and return at once; `wait_ready` follows. Tests bring their own entries."""
    if scheduler is None or detokenizer is None:
        from tinysrt.managers.detokenizer_manager import run_detokenizer_process
        from tinysrt.managers.scheduler_process import run_scheduler_process

        scheduler, detokenizer = scheduler or run_scheduler_process, detokenizer or run_detokenizer_process
    launched = Launched(server_args, IpcNames.create())
    try:
        launched.spawn("scheduler", scheduler)  # first: loading the model takes longest
        launched.spawn("detokenizer", detokenizer)
    except BaseException:
        launched.stop(0.0)
        raise
    return launched


def prepare(server_args: ServerArgs) -> ServerArgs:
    """Before anything is spawned: logging, the demo model where none is named, and the resolved record, logged."""
    setup_logging(server_args, "main")
    if server_args.model_path is None:
        with progress_bar() as on_progress:
            path = ensure_demo_model(on_progress=on_progress)
        name = server_args.served_model_name or DEMO_MODEL_NAME
        server_args = dataclasses.replace(server_args, model_path=path, served_model_name=name)
    resolved = server_args.resolve()
    logger.info("server_args: %s", resolved.describe())
    return resolved


def setup_logging(server_args: ServerArgs, process: str) -> None:
    """One line format for all processes, on stderr. A program that embeds the Engine keeps its own handlers."""
    logging.basicConfig(
        level=server_args.log_level.upper(),
        format=f"[%(asctime)s {process}] %(message)s",
        datefmt="%H:%M:%S",
        stream=sys.stderr,
    )


def _read_ready(child: Child) -> dict[str, Any]:
    message: dict[str, Any] = {}
    with contextlib.suppress(EOFError):  # the pipe ended without a word
        if child.pipe.poll():
            message = child.pipe.recv()
    child.pipe.close()
    if message.get("status") == "ready":
        return message
    if message.get("status") == "error":
        raise StartupError(message["message"])
    raise StartupError(_died_while_starting(child))


def _died_while_starting(child: Child) -> str:
    return f"the {child.name} process {child.how_it_ended()} while the server was starting"


# ---- in the child ---------------------------------------------------------------------------------


def _run_child(
    name: str, entry: Entry, server_args: ServerArgs, ipc_names: IpcNames, pipe: Connection, by_main_thread: bool
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # The detokenizer waits in Python only, so its watcher always gets to remove the sockets; the scheduler may be deep
    # in a kernel, so the operating system ends it.
    _die_with_parent(ipc_names, ask_kernel=by_main_thread and name == "scheduler")
    with contextlib.suppress(ImportError):  # a nicety
        from setproctitle import setproctitle

        setproctitle(f"tinysrt::{name}")
    setup_logging(server_args, name)
    try:
        entry(server_args, ipc_names, pipe)
    except Exception as error:
        if not isinstance(error, StartupError):  # a StartupError is one line, and the parent prints it
            logger.exception("the %s process fails", name)
        with contextlib.suppress(OSError):  # after "ready" nobody reads the pipe; the exit code tells
            pipe.send({"status": "error", "message": _one_line(name, error)})
        sys.exit(1)


def _one_line(name: str, error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, StartupError) else f"the {name} process failed: {type(error).__name__}: {text}"


def ask_kernel_to_die_with_parent() -> None:
    """This process gets SIGKILL when the thread that started it ends. Linux only; elsewhere nothing happens."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _die_with_parent(ipc_names: IpcNames, *, ask_kernel: bool) -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "runs in a spawned child"
    if ask_kernel:
        ask_kernel_to_die_with_parent()

    def watch_parent() -> None:
        wait([parent.sentinel])  # a pipe that the parent holds open; it ends with the parent, however that dies
        ipc_names.remove()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch_parent, name="parent-watch", daemon=True).start()
