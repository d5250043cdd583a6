"""How the ranks of a replica find each other: the store through which they meet, and the groups that they form.

Ranks of one machine meet in a file in the server's private directory: no port, nobody else can join. Those of several
meet at `--dist-init-addr`, where rank 0 listens. The store only carries addresses; afterwards ranks talk directly, over
the loopback address or the network that leads to node 0. That network must be a private one: NCCL and gloo know neither
passwords nor encryption.

Source: SGLang `distributed/parallel_state.py`, `server_args.py::PortArgs`.
"""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist

from tinysrt.distributed.groups import GlooGroup, Group, Messenger, NcclGroup
from tinysrt.distributed.parallel_state import SINGLE, ParallelState
from tinysrt.distributed.ranks import Seat
from tinysrt.errors import StartupError
from tinysrt.server_args import ServerArgs

JOIN_TIMEOUT = timedelta(seconds=600)  # the other nodes may start much later


def join(args: ServerArgs, seat: Seat, directory: str) -> ParallelState:
    """Meet the other ranks of this replica; returns when all are there. `directory`: the server's own."""
    tp, pp = args.tensor_parallel_size, args.pipeline_parallel_size
    if args.device == "cuda":
        if seat.local >= torch.cuda.device_count():
            ranks = f"{args.ranks_on_this_machine()} ranks need as many GPUs on this machine"
            raise StartupError(f"{ranks}; PyTorch finds {torch.cuda.device_count()}")
        torch.cuda.set_device(seat.local)
    if tp * pp == 1:
        return replace(SINGLE, local=seat.local)
    rank = seat.pp_rank * tp + seat.tp_rank
    store, address = _store(args, seat, rank, tp * pp, directory)
    _wait_for_all(store, rank, tp * pp)
    messages = GlooGroup(dist.PrefixStore("all", store), rank, tp * pp, address)
    stage = dist.PrefixStore(f"stage{seat.pp_rank}", store)
    tensors: Group | None
    stages: Group | None
    if args.device == "cuda":
        tensors = NcclGroup(stage, seat.tp_rank, tp) if tp > 1 else None
        stages = NcclGroup(dist.PrefixStore("stages", store), rank, tp * pp) if pp > 1 else None
    else:
        # Two threads may talk at once, one about steps and one about tensors: a group each.
        tensors = GlooGroup(stage, seat.tp_rank, tp, address) if tp > 1 else None
        stages = GlooGroup(dist.PrefixStore("stages", store), rank, tp * pp, address) if pp > 1 else None
    return ParallelState(seat.tp_rank, tp, seat.pp_rank, pp, seat.local, tensors, stages, Messenger(messages))


def _wait_for_all(store: dist.Store, rank: int, size: int) -> None:
    """gloo would wait without an end for a machine that was never started."""
    store.set(f"rank{rank}", "here")
    try:
        store.wait([f"rank{other}" for other in range(size)], JOIN_TIMEOUT)
    except RuntimeError as error:
        missing = [other for other in range(size) if not store.check([f"rank{other}"])]
        seconds = JOIN_TIMEOUT.total_seconds()
        raise StartupError(f"after {seconds:g} s these of {size} ranks are still missing: {missing}") from error


def _store(args: ServerArgs, seat: Seat, rank: int, size: int, directory: str) -> tuple[dist.Store, str]:
    """The meeting place, and the address under which the others reach this machine."""
    if args.dist_init_addr is not None:
        host, _, digits = args.dist_init_addr.rpartition(":")
        host, port = host.strip("[]"), int(digits)
    elif args.nccl_port is not None:
        host, port = "127.0.0.1", args.nccl_port + seat.dp_rank
    else:
        path = os.path.join(directory, f"ranks-{seat.dp_rank}")
        store = dist.FileStore(path, size)
        store.set_timeout(JOIN_TIMEOUT)
        return store, "127.0.0.1"
    try:
        # A listener of our own: PyTorch's would be open to every network of this machine.
        listener = socket.create_server((host, port)) if rank == 0 else None
        tcp = dist.TCPStore(
            host, port, size, rank == 0, timeout=JOIN_TIMEOUT, wait_for_workers=False,
            master_listen_fd=listener.detach() if listener is not None else None,
        )  # fmt: skip
    except (OSError, RuntimeError) as error:
        raise StartupError(f"the ranks cannot meet at {host}:{port}: {_first_line(error)}") from error
    return tcp, _address_towards(host, port)


def _address_towards(host: str, port: int) -> str:
    """This machine's address on the network that leads to node 0. Connecting a UDP socket sends nothing."""
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
