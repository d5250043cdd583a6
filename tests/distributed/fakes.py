"""Ranks that do nothing and die in various ways: importable, so that spawned children find them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from multiprocessing.connection import Connection

from tinysrt.errors import RankLost, StartupError
from tinysrt.ipc import IpcNames
from tinysrt.server_args import ServerArgs


def _is(name: str) -> bool:
    return multiprocessing.current_process().name.endswith(name)


def rank_1_is_killed(server_args: ServerArgs, ipc_names: IpcNames, pipe: Connection) -> None:
    """Rank 0 notices first."""
    pipe.send({"status": "ready", "max_req_input_len": 10})
    time.sleep(0.5)
    if _is("-tp0"):
        raise RankLost("connection closed by peer")
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)


def rank_0_has_lost_one_elsewhere(server_args: ServerArgs, ipc_names: IpcNames, pipe: Connection) -> None:
    pipe.send({"status": "ready", "max_req_input_len": 10})
    time.sleep(0.5)
    if _is("-tp0"):
        raise RankLost("connection closed by peer")
    time.sleep(600)


def rank_1_cannot_start(server_args: ServerArgs, ipc_names: IpcNames, pipe: Connection) -> None:
    if _is("-tp0"):
        raise RankLost("connection closed by peer")
    time.sleep(0.5)
    raise StartupError("no room for the weights")


def rank_1_hangs(server_args: ServerArgs, ipc_names: IpcNames, pipe: Connection) -> None:
    """It waits in a collective for a rank that is gone."""
    pipe.send({"status": "ready", "max_req_input_len": 10 if _is("-tp0") else 5})
    if _is("-tp0"):
        time.sleep(0.5)
        os._exit(3)
    time.sleep(600)


def replicas(server_args: ServerArgs, ipc_names: IpcNames, pipe: Connection) -> None:
    pipe.send({"status": "ready", "max_req_input_len": 10 + ipc_names.replica, "dtype": "float32"})
    time.sleep(600)
