"""Stand-ins for the scheduler and the detokenizer: importable, so that spawned children find them."""

from __future__ import annotations

import os
import signal
import time
from multiprocessing.connection import Connection

from tinysrt.errors import StartupError
from tinysrt.ipc import IpcNames
from tinysrt.server_args import ServerArgs


def ready(server_args: ServerArgs, ipc_names: IpcNames, pipe: Connection) -> None:
    pipe.send({"status": "ready", "pid": os.getpid(), "max_total_num_tokens": 4096})
    time.sleep(600)


def ready_then_leaves(server_args: ServerArgs, ipc_names: IpcNames, pipe: Connection) -> None:
    pipe.send({"status": "ready", "pid": os.getpid()})
    time.sleep(0.5)


def ready_then_killed(server_args: ServerArgs, ipc_names: IpcNames, pipe: Connection) -> None:
    pipe.send({"status": "ready", "pid": os.getpid()})
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)


def loads_for_ever(server_args: ServerArgs, ipc_names: IpcNames, pipe: Connection) -> None:
    time.sleep(600)


def killed_while_loading(server_args: ServerArgs, ipc_names: IpcNames, pipe: Connection) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def leaves_without_a_word(server_args: ServerArgs, ipc_names: IpcNames, pipe: Connection) -> None:
    return


def says_error(server_args: ServerArgs, ipc_names: IpcNames, pipe: Connection) -> None:
    pipe.send({"status": "error", "message": "no such folder: nowhere"})


def raises_startup_error(server_args: ServerArgs, ipc_names: IpcNames, pipe: Connection) -> None:
    raise StartupError("the model is too large for this machine")


def raises_bug(server_args: ServerArgs, ipc_names: IpcNames, pipe: Connection) -> None:
    raise ValueError("two lines\nof trouble")


def writes_socket_then_ready(server_args: ServerArgs, ipc_names: IpcNames, pipe: Connection) -> None:
    open(os.path.join(ipc_names.directory, "scheduler"), "w").close()
    ready(server_args, ipc_names, pipe)
