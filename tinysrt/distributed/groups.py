"""How ranks talk: tensors over gloo (CPU) or NCCL (CUDA), bytes over gloo.

    Group       all_reduce, all_gather, send, receive: tensors that are part of the model's arithmetic
    Messenger   bytes to everyone else: what a step depends on, the tokens it gave

A group is a PyTorch process group, made from an explicit store and kept in an object. (The usual way,
`torch.distributed.init_process_group`, keeps a default group in the module and looks it up in every call.)

On a CPU a collective is small and latency is all: a decode step of a 30-layer model makes 60 all-reduces of a few
kilobytes. So each rank sends its part straight to every other and adds the parts up in the order of ranks, which also
makes the sum the same bits everywhere. gloo's own all-reduce hands the work to a thread first and goes round a ring of
ranks (lab 5 measures both). For many ranks and long prompts it would move less; that is what NCCL is for.

gloo waits in the kernel, so an idle rank costs nothing, and a send ends only once its receiver asks for the data: sends
are started and waited for later. When a rank dies its sockets close, and every wait for it fails at once: `RankLost`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from enum import IntEnum
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from tinysrt.errors import RankLost

# Nothing here times out: a server may be idle for weeks, and a rank that died closes its sockets.
FOREVER = timedelta(days=3650)
# To each other rank; a sender waits for its oldest send before it starts one more, and that is where it notices that a
# receiver is gone: an idle rank 0, which says something once a second, after so many seconds.
SENDS_IN_FLIGHT = 16
FRAME = 4096  # bytes; what is longer follows in a second piece


class Tag(IntEnum):
    """Conversations that two ranks may have at the same time; each keeps its own order."""

    TENSOR = 1
    STEP = 2  # rank 0 → all: what this step depends on
    TOKENS = 3  # last stage → all: what a forward gave
    VERDICT = 4  # rank 0 → all: what only one rank may decide
    START = 5  # all ↔ all, at start-up


class Group(Protocol):
    def all_reduce(self, x: Tensor) -> Tensor: ...

    def all_gather(self, x: Tensor) -> list[Tensor]: ...

    def send(self, x: Tensor, to: int) -> None: ...

    def receive(self, x: Tensor, source: int) -> None: ...


class GlooGroup:
    """`address`: of this machine, where the other ranks reach it."""

    def __init__(self, store: dist.Store, rank: int, size: int, address: str):
        gloo: Any = dist.ProcessGroupGloo  # its methods are missing from the type stubs
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=address)]
        options._timeout = FOREVER
        options._threads = 1
        with _loss_noticed():
            self.group: Any = gloo(store, rank, size, options)
        self.rank = rank
        self.size = size
        self._sending: deque[tuple[Any, Tensor]] = deque()

    def all_reduce(self, x: Tensor) -> Tensor:
        first, *rest = self.all_gather(x)
        total = first.float()  # a copy for 16-bit numbers: rounded once, at the end
        for part in rest:
            total = total + part
        return total.to(x.dtype)

    def all_gather(self, x: Tensor) -> list[Tensor]:
        mine = x.contiguous()
        parts = [mine if rank == self.rank else torch.empty_like(mine) for rank in range(self.size)]
        others = [rank for rank in range(self.size) if rank != self.rank]
        with _loss_noticed():
            waits = [self.group.recv([parts[rank]], rank, Tag.TENSOR) for rank in others]
            waits += [self.group.send([mine], rank, Tag.TENSOR) for rank in others]
            for wait in waits:
                wait.wait()
        return parts

    def send(self, x: Tensor, to: int, tag: Tag = Tag.TENSOR) -> None:
        """Returns at once; `x` must not change afterwards."""
        x = x.contiguous()
        with _loss_noticed():
            while len(self._sending) >= SENDS_IN_FLIGHT * (self.size - 1):
                self._sending.popleft()[0].wait()
            self._sending.append((self.group.send([x], to, tag), x))

    def receive(self, x: Tensor, source: int, tag: Tag = Tag.TENSOR) -> None:
        with _loss_noticed():
            self.group.recv([x], source, tag).wait()

    def finish(self) -> None:
        """Wait until everything sent has arrived; before a process leaves."""
        with _loss_noticed():
            while self._sending:
                self._sending.popleft()[0].wait()


class NcclGroup:
    """The waits are the stream's: the host goes on, and kernels run after what they need has arrived."""

    def __init__(self, store: dist.Store, rank: int, size: int):
        nccl: Any = dist.ProcessGroupNCCL
        options = nccl.Options()
        options._timeout = FOREVER
        self.size = size
        self.group: Any = nccl(store, rank, size, options)

    def all_reduce(self, x: Tensor) -> Tensor:
        self.group.allreduce([x]).wait()  # sums
        return x

    def all_gather(self, x: Tensor) -> list[Tensor]:
        gathered = x.new_empty(self.size, *x.shape)
        self.group._allgather_base(gathered, x.contiguous()).wait()
        return list(gathered)

    def send(self, x: Tensor, to: int) -> None:
        self.group.send([x.contiguous()], to, 0).wait()

    def receive(self, x: Tensor, source: int) -> None:
        self.group.recv([x], source, 0).wait()


class Messenger:
    """Bytes between all ranks. Encoded by the caller with msgpack: nothing is unpickled."""

    def __init__(self, group: GlooGroup):
        self.group = group

    def tell_all(self, data: bytes, tag: Tag) -> None:
        """To every other rank; returns at once."""
        for to in range(self.group.size):
            if to != self.group.rank:
                self.tell(to, data, tag)

    def tell(self, to: int, data: bytes, tag: Tag) -> None:
        frame = torch.zeros(FRAME, dtype=torch.uint8)
        frame[:8] = torch.tensor([len(data)]).view(torch.uint8)
        head, rest = data[: FRAME - 8], data[FRAME - 8 :]
        if head:
            frame[8 : 8 + len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        self.group.send(frame, to, tag)
        if rest:
            self.group.send(torch.frombuffer(bytearray(rest), dtype=torch.uint8), to, tag)

    def hear(self, source: int, tag: Tag) -> bytes:
        """The next message of `source`; blocks, for weeks if need be."""
        frame = torch.empty(FRAME, dtype=torch.uint8)
        self.group.receive(frame, source, tag)
        length = int(frame[:8].view(torch.int64))
        head = frame[8 : 8 + length].numpy().tobytes()
        if length <= len(head):
            return head
        rest = torch.empty(length - len(head), dtype=torch.uint8)
        self.group.receive(rest, source, tag)
        return head + rest.numpy().tobytes()

    def exchange(self, data: bytes) -> list[bytes]:
        """What every rank says, in the order of ranks; all must call."""
        self.tell_all(data, Tag.START)
        return [data if rank == self.group.rank else self.hear(rank, Tag.START) for rank in range(self.group.size)]

    def finish(self) -> None:
        self.group.finish()


@contextmanager
def _loss_noticed() -> Iterator[None]:
    """gloo knows one kind of error: a socket that closed, because the process at its other end has."""
    try:
        yield
    except RuntimeError as error:
        raise RankLost(str(error).splitlines()[0].partition(". ")[0]) from error  # the rest is advice for others
