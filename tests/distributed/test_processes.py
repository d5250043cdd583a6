"""Which rank is named when several die, and that none is left behind."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.distributed import fakes
from tests.processes.fakes import ready
from tests.processes.test_processes import SECONDS, assert_nothing_is_left
from tinysrt.distributed.ranks import Seat, process_name, seats_of_node
from tinysrt.errors import StartupError
from tinysrt.managers.data_parallel_controller import Envelope, RoundRobin
from tinysrt.processes import Entry, launch
from tinysrt.server_args import ServerArgs

TWO_RANKS = ServerArgs(tensor_parallel_size=2)


@pytest.mark.parametrize(
    ("scheduler", "message"),
    [
        (fakes.rank_1_is_killed, "the scheduler-tp1 process was killed by SIGKILL (out of memory?)"),
        (fakes.rank_1_hangs, "the scheduler-tp0 process ended with exit code 3"),
        (
            fakes.rank_0_has_lost_one_elsewhere,
            "the scheduler-tp0 process has lost a rank of its group, on another machine",
        ),
    ],
)
def test_the_rank_that_died_first_is_named_and_no_other_is_left(scheduler: Entry, message: str) -> None:
    with launch(TWO_RANKS, scheduler, ready) as launched:
        assert [child.name for child in launched.children] == ["scheduler-tp0", "scheduler-tp1", "detokenizer"]
        launched.wait_ready()
        told: list[str] = []
        event = threading.Event()
        launched.watch(lambda text: (told.append(text), event.set()))
        assert event.wait(SECONDS)
        launched.stop(0.0)
    assert told == [message]
    assert_nothing_is_left(launched)


def test_a_rank_that_cannot_start_ends_the_launch_with_its_own_reason() -> None:
    launched = launch(TWO_RANKS, fakes.rank_1_cannot_start, ready)
    with pytest.raises(StartupError, match="^no room for the weights$"):
        launched.wait_ready()
    assert_nothing_is_left(launched)


def test_what_the_weakest_replica_bears_holds_for_all() -> None:
    with launch(ServerArgs(data_parallel_size=3), fakes.replicas, ready) as launched:
        assert [child.name for child in launched.children] == [
            "scheduler-dp0", "scheduler-dp1", "scheduler-dp2", "dp-controller", "detokenizer",
        ]  # fmt: skip
        info = launched.wait_ready()
        assert info["max_req_input_len"] == 10 and info["dtype"] == "float32"
        launched.stop(0.0)
    assert_nothing_is_left(launched)


def test_nodes_share_the_ranks_evenly() -> None:
    args = [
        ServerArgs(
            tensor_parallel_size=2, pipeline_parallel_size=2, nnodes=2, node_rank=node, dist_init_addr="127.0.0.1:1"
        )
        for node in range(2)
    ]
    assert seats_of_node(args[0]) == [Seat(0, 0, 0, 0), Seat(1, 0, 0, 1)]
    assert seats_of_node(args[1]) == [Seat(0, 1, 0, 0), Seat(1, 1, 0, 1)]
    assert process_name(args[1], seats_of_node(args[1])[1]) == "scheduler-pp1-tp1"
    replicas = ServerArgs(tensor_parallel_size=2, data_parallel_size=2)
    assert [seat.local for seat in seats_of_node(replicas)] == [0, 1, 2, 3], "a GPU each"


def test_requests_go_round_and_everything_else_goes_to_all() -> None:
    routing = RoundRobin(3)
    request, control = Envelope("TokenizedGenerateReqInput"), Envelope("AbortReq")
    assert [routing.route(request) for _ in range(4)] == [[0], [1], [2], [0]]
    assert routing.route(control) == [0, 1, 2]
    assert routing.route(Envelope("TokenizedGenerateReqInput", data_parallel_rank=0)) == [0]
    assert routing.route(request) == [1], "one that names its replica takes nobody's turn"


def test_the_process_that_starts_the_others_imports_no_pytorch() -> None:
    """Every child imports it as well, and waits for it."""
    code = "import sys, tinysrt.processes, tinysrt.managers.data_parallel_controller; print('torch' in sys.modules)"
    root = Path(__file__).parents[2]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True).stdout == "False\n"
