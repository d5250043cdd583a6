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

With --tp, --pp and --dp there is a scheduler process for each rank of each replica (`distributed/rendezvous.py`), and
with --dp a controller. When one rank dies the others of its group fail too, each with RankLost and an exit code that
says so: what is reported is the death that caused it. A rank that hangs in a collective instead is killed with the
rest.

Invariants, each with a test in tests/processes/ or tests/distributed/:
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
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any

from tinysrt.distributed.ranks import process_name, seats_of_node
from tinysrt.errors import RankLost, StartupError
from tinysrt.ipc import IpcNames
from tinysrt.observe.progress import progress_bar
from tinysrt.server_args import ServerArgs
from tinysrt.text.demo_model import ensure_demo_model

logger = logging.getLogger(__name__)

WATCH_PERIOD = 1.0  # seconds between looks at the stop flag; a death itself wakes the watcher at once
DEMO_MODEL_NAME = "SmolLM2-135M-Instruct"  # served under this name, not under its path in a cache folder
EXIT_RANK_LOST = 70  # "I only failed because another rank has"
BLAME_WAIT = 2.0  # seconds in which the rank that has failed first is looked for
PR_SET_PDEATHSIG = 1  # from <linux/prctl.h>
KEPT_BYTES = 1 << 30  # freed memory that a scheduler process does not give back

# What runs in a child: (server_args, ipc_names, pipe_writer). It returns when it was told to stop.
Entry = Callable[[ServerArgs, IpcNames, Connection], None]


@dataclasses.dataclass
class Child:
    name: str  # as in log lines and in `ps`: tinysrt::scheduler
    process: SpawnProcess
    pipe: Connection  # read end; closed once it has spoken
    leads: bool = False  # the scheduler process that knows what a replica can bear

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
        if code == EXIT_RANK_LOST:
            return "has lost a rank of its group, on another machine"
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

    def spawn(self, name: str, entry: Entry, ipc_names: IpcNames | None = None, *, leads: bool = False) -> None:
        context = multiprocessing.get_context("spawn")
        reader, writer = context.Pipe(duplex=False)
        # The kernel's "die with your parent" watches the *thread* that spawned. Only the main one surely lives on.
        by_main_thread = threading.current_thread() is threading.main_thread()
        arguments = (name, entry, self.server_args, ipc_names or self.ipc_names, writer, by_main_thread)
        process = context.Process(target=_run_child, args=arguments, name=f"tinysrt::{name}")
        process.start()
        writer.close()  # the child has its own copy now; ours would keep the pipe from ending with it
        self.children.append(Child(name, process, reader, leads))

    def wait_ready(self) -> dict[str, Any]:
        """Wait for every child's "ready" and return the scheduler's. The first bad news ends the launch."""
        loading, alive = list(self.children), list(self.children)
        lost: list[Child] = []  # have ended because another rank has: that one will tell more
        try:
            while loading or lost:
                # All ends, not only of those still loading: one that was ready first may die while the others load.
                waits = [child.pipe for child in loading] + [child.process.sentinel for child in alive]
                happened = wait(waits, BLAME_WAIT if lost else None)
                if not happened:
                    raise StartupError(_died_while_starting(lost[0]))
                for child in list(alive):
                    # The pipe first: a child that sends its error and exits has something better to say.
                    if child in loading and (child.pipe in happened or child.process.sentinel in happened):
                        ready = _read_ready(child)
                        loading.remove(child)
                        logger.debug("%s is ready: %s", child.name, ready)
                        if child.leads:
                            self.scheduler_info = _least(self.scheduler_info, ready)
                    if child.process.sentinel in happened:
                        if child.exit_code() != EXIT_RANK_LOST:
                            raise StartupError(_died_while_starting(child))
                        alive.remove(child)
                        lost.append(child)
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
        lost: Child | None = None  # the first that has ended because another one had
        # With `lost` there may be nobody left alive: a rank that leaves says goodbye to the detokenizer.
        while (alive or lost) and not self._stopping.is_set():
            ended = wait([child.process.sentinel for child in alive], BLAME_WAIT if lost else WATCH_PERIOD)
            failed = [c for c in alive if c.process.sentinel in ended and c.exit_code() != 0]  # 0 is a goodbye
            alive = [child for child in alive if child.process.sentinel not in ended]
            causes = [child for child in failed if child.exit_code() != EXIT_RANK_LOST]
            if not causes and lost and not ended:
                causes = [lost]
            if causes and not self._stopping.is_set():
                message = f"the {causes[0].name} process {causes[0].how_it_ended()}"
                logger.error("%s: the server goes down", message)
                on_death(message)
                return
            lost = lost or next(iter(failed), None)

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


@contextlib.contextmanager
def malloc_for_steps() -> Iterator[None]:
    """A child started meanwhile has a C library that hands out memory as a forward on a CPU wants it:

    - in pages of 2 MB, where Linux gives them on request ("madvise"). A decode step reads every weight once; in pages
      of 4 KB each page costs a look-up that the processor's cache of addresses does not hold, and at which reading
      ahead stops: the matmuls of a step take a third longer and more;
    - from what has been freed before, up to a gigabyte. A prefill needs megabytes for each layer's intermediates, and
      to get them fresh from the kernel, zeroed page by page, takes as long as to fill them;
    - from one heap for all threads. Heaps of other threads are given back whenever they are empty, whatever is said
      above: now and then a chunk of a long prompt took 300 ms instead of 200.

    The library (glibc) reads the variable when a process starts; others (musl, macOS) ignore it.
    """
    name = "GLIBC_TUNABLES"
    before = os.environ.get(name)
    if before is None:
        wanted = dict(hugetlb=1, mmap_threshold=KEPT_BYTES, trim_threshold=KEPT_BYTES, arena_max=1)
        os.environ[name] = ":".join(f"glibc.malloc.{key}={value}" for key, value in wanted.items())
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)


def launch(server_args: ServerArgs, scheduler: Entry | None = None, detokenizer: Entry | None = None) -> Launched:
    """Start the children of a server and return at once; `wait_ready` follows. Tests bring their own entries. A machine
    that is not the first of several has schedulers only."""
    if scheduler is None or detokenizer is None:
        from tinysrt.managers.detokenizer_manager import run_detokenizer_process
        from tinysrt.managers.scheduler_process import run_scheduler_process

    ipc_names = IpcNames.create()
    launched = Launched(server_args, ipc_names)
    replicas = server_args.data_parallel_size
    try:
        for seat in seats_of_node(server_args):  # first: loading the model takes longest
            entry = scheduler or partial(run_scheduler_process, seat=seat)
            names = ipc_names if replicas == 1 else ipc_names.of_replica(seat.dp_rank)
            with malloc_for_steps() if server_args.device == "cpu" else contextlib.nullcontext():
                launched.spawn(process_name(server_args, seat), entry, names, leads=seat.is_first)
        if replicas > 1:
            from tinysrt.managers.data_parallel_controller import run_data_parallel_controller_process

            launched.spawn("dp-controller", run_data_parallel_controller_process)
        if server_args.node_rank == 0:
            launched.spawn("detokenizer", detokenizer or run_detokenizer_process)
    except BaseException:
        launched.stop(0.0)
        raise
    return launched


def run_node(server_args: ServerArgs) -> int:
    """A machine that is not node 0: its ranks run until node 0 says goodbye; the exit code."""
    with launch(server_args) as launched:
        launched.wait_ready()
        logger.info("Node %d is ready; node 0 serves", server_args.node_rank)
        failed = threading.Event()
        launched.watch(lambda message: failed.set())
        while not failed.wait(WATCH_PERIOD):
            if not any(child.process.is_alive() for child in launched.children):
                return 0
        launched.stop(0.0)
        return 1


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
    if child.exit_code() == EXIT_RANK_LOST:
        return {}
    raise StartupError(_died_while_starting(child))


def _least(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """What holds for every replica: of the limits the lowest."""
    return other | {
        name: min(one[name], value) for name, value in other.items() if name in one and name.startswith("max_")
    }


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
    _die_with_parent(ipc_names, ask_kernel=by_main_thread and name.startswith("scheduler"))
    with contextlib.suppress(ImportError):  # a nicety
        from setproctitle import setproctitle

        setproctitle(f"tinysrt::{name}")
    setup_logging(server_args, name)
    try:
        entry(server_args, ipc_names, pipe)
    except RankLost as error:
        logger.info("the %s process ends, because another rank has: %s", name, error)
        sys.exit(EXIT_RANK_LOST)
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
