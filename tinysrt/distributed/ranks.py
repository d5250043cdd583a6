"""Which scheduler processes there are, and where each one sits.

    --tp 2 --pp 2 --nnodes 2              --tp 2 --dp 2, one machine
    node 0   TP0 PP0   TP1 PP0            replica 0   TP0   TP1
    node 1   TP0 PP1   TP1 PP1            replica 1   TP0   TP1         replicas never meet

The ranks of a stage are neighbors, because they talk most. This file imports no PyTorch: the process that starts the
others needs none.
"""

from __future__ import annotations

from dataclasses import dataclass

from tinysrt.server_args import ServerArgs


@dataclass(frozen=True)
class Seat:
    """Where one scheduler process sits among all of them."""

    tp_rank: int = 0
    pp_rank: int = 0
    dp_rank: int = 0
    local: int = 0  # its number on this machine: the GPU it takes

    @property
    def is_first(self) -> bool:
        """The rank of its replica that listens and answers."""
        return self.tp_rank == 0 and self.pp_rank == 0


FIRST_SEAT = Seat()


def seats_of_node(args: ServerArgs) -> list[Seat]:
    """The scheduler processes that this machine runs."""
    tp, pp = args.tensor_parallel_size, args.pipeline_parallel_size
    per_node = tp * pp // args.nnodes
    mine = range(args.node_rank * per_node, (args.node_rank + 1) * per_node)
    return [
        Seat(rank % tp, rank // tp, replica, replica * per_node + i)
        for replica in range(args.data_parallel_size)
        for i, rank in enumerate(mine)
    ]


def process_name(args: ServerArgs, seat: Seat) -> str:
    """As in `ps` and log lines: scheduler, scheduler-tp1, scheduler-dp0-pp1-tp1."""
    parts = [
        f"-{short}{rank}"
        for short, rank, size in (
            ("dp", seat.dp_rank, args.data_parallel_size),
            ("pp", seat.pp_rank, args.pipeline_parallel_size),
            ("tp", seat.tp_rank, args.tensor_parallel_size),
        )
        if size > 1
    ]
    return "scheduler" + "".join(parts)
