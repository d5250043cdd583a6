"""Whole engines and servers with several ranks and replicas, against Hugging Face; and what happens when one dies.

Starting one costs seconds, so each of them is asked many things in turn.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.distributed.test_ranks import VOCAB, assert_greedy, prompts
from tests.e2e.server import ROOT, STOP_SECONDS, Server, free_port
from tests.equality.reference import Reference
from tests.model_executor.harness import save_tiny_model
from tinysrt.entrypoints import engine as engine_module
from tinysrt.entrypoints.engine import Engine
from tinysrt.errors import RequestError, StartupError

pytestmark = pytest.mark.e2e

FLAGS: dict[str, Any] = dict(
    skip_tokenizer_init=True, device="cpu", dtype="float32", max_total_tokens=2000, num_threads=1, random_seed=1,
    schedule_policy="random", chunked_prefill_size=32, debug_invariants=True, log_level="warning",
)  # fmt: skip
GREEDY = {"temperature": 0, "max_new_tokens": 10, "ignore_eos": True}
ENDLESS = GREEDY | {"max_new_tokens": 400}


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Reference]:
    folder = tmp_path_factory.mktemp("qwen3")
    shape = dict(num_attention_heads=8, num_key_value_heads=2, vocab_size=VOCAB)
    return str(folder), Reference(save_tiny_model("qwen3", folder, **shape))


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a loaded machine it takes a process some seconds to leave."""
    monkeypatch.setattr(engine_module, "CHILDREN_GRACE_S", 60.0)


def ask(engine: Engine, asked: list[list[int]], **params: Any) -> list[dict[str, Any]]:
    answers = engine.generate(input_ids=asked, sampling_params=GREEDY | params)
    assert isinstance(answers, list)
    return answers


def check(engine: Engine, reference: Reference) -> None:
    """Answers equal Hugging Face's; aborts, flush, pause in every mode go through every rank."""
    asked = prompts(1)
    assert_greedy(reference, asked, [answer["output_ids"] for answer in ask(engine, asked)])
    stream = engine.generate(input_ids=asked[0], sampling_params=ENDLESS, stream=True)
    assert not isinstance(stream, (dict, list))
    next(stream)
    assert not engine.flush_cache(), "someone is running"
    stream.close()  # type: ignore[attr-defined]
    control = engine.tokenizer_manager.control
    for mode in ("abort", "retract", "in_place"):
        late: list[Any] = []
        thread = threading.Thread(target=lambda late=late: late.extend(ask(engine, asked[:3])))
        thread.start()
        time.sleep(0.1)
        engine._run(control.pause_generation(mode))
        engine._run(control.continue_generation())
        thread.join(60)
        complete = [answer["output_ids"] for answer in late if answer["meta_info"]["completion_tokens"] == 10]
        assert mode == "abort" or len(complete) == 3
    assert engine.flush_cache()
    assert all(state["num_cached_tokens"] == 0 for state in engine.get_server_info()["internal_states"])


def schedulers(engine: Engine) -> dict[str, psutil.Process]:
    return {child.name: psutil.Process(child.process.pid) for child in engine._launched.children}


def test_tensor_parallel_and_a_killed_rank(qwen3: tuple[str, Reference]) -> None:
    folder, reference = qwen3
    with Engine(model_path=folder, tp_size=2, **FLAGS) as engine:
        check(engine, reference)
        processes = schedulers(engine)
        before = sum(process.cpu_times().user for process in processes.values())
        time.sleep(1.5)
        assert sum(process.cpu_times().user for process in processes.values()) - before < 0.6, "idle ranks wait"
        failure: list[Exception] = []

        def until_it_fails() -> None:
            try:
                engine.generate(input_ids=[1, 2, 3], sampling_params=ENDLESS)
                engine.generate(input_ids=[1, 2, 3], sampling_params=ENDLESS)
            except RequestError as error:
                failure.append(error)

        thread = threading.Thread(target=until_it_fails)
        thread.start()
        time.sleep(0.2)
        os.kill(processes["scheduler-tp1"].pid, signal.SIGKILL)
        thread.join(30)
        assert "the scheduler-tp1 process was killed by SIGKILL" in str(failure[0])
        assert failure[0].status == 503  # type: ignore[attr-defined]
    assert not any(process.is_running() for process in processes.values())


def test_pipeline_parallel_and_a_goodbye(qwen3: tuple[str, Reference]) -> None:
    folder, reference = qwen3
    with Engine(model_path=folder, pp_size=2, **FLAGS) as engine:
        check(engine, reference)
        assert engine.get_server_info()["disable_overlap_schedule"] is True
        children = engine._launched.children
    assert [child.process.exitcode for child in children] == [0, 0, 0], "every rank has heard it"


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"tp_size": 2, "pp_size": 2}, {"tp_size": 4}, {"tp_size": 2, "dp_size": 2}])
def test_sizes_together(qwen3: tuple[str, Reference], sizes: dict[str, int]) -> None:
    folder, reference = qwen3
    with Engine(model_path=folder, nccl_port=free_port(), **sizes, **FLAGS) as engine:
        check(engine, reference)
        children = engine._launched.children
    assert all(child.process.exitcode == 0 for child in children)


def test_replicas(qwen3: tuple[str, Reference]) -> None:
    folder, reference = qwen3
    with Engine(model_path=folder, dp_size=2, **FLAGS) as engine:
        check(engine, reference)
        asked = prompts(2)
        answers = ask(engine, asked)
        assert sorted(answer["meta_info"]["dp_rank"] for answer in answers) == [0, 0, 0, 1, 1, 1]
        assert_greedy(reference, asked, [answer["output_ids"] for answer in answers])
        pinned = engine.generate(input_ids=asked, sampling_params=GREEDY, data_parallel_rank=1)
        assert isinstance(pinned, list) and {answer["meta_info"]["dp_rank"] for answer in pinned} == {1}
        with pytest.raises(RequestError, match="'data_parallel_rank' must be between 0 and 1, got 2"):
            engine.generate(input_ids=asked, sampling_params=GREEDY, data_parallel_rank=2)
        samples = ask(engine, [asked[4]], n=4)
        assert len({answer["meta_info"]["dp_rank"] for answer in samples}) == 1, "they share the prompt's prefix"
        assert all(answer["meta_info"]["cached_tokens"] == len(asked[4]) - 1 for answer in samples)
        control = engine.tokenizer_manager.control
        assert [state["dp_rank"] for state in engine.get_server_info()["internal_states"]] == [0, 1]
        assert [load.dp_rank for load in control.loads()] == [0, 1]
        streams = [
            engine.generate(input_ids=[5, 6], sampling_params=ENDLESS, stream=True, rid=f"s{i}") for i in range(4)
        ]
        for stream in streams:
            next(stream)  # type: ignore[call-overload]
        engine.abort_request("s1")
        reasons = [list(stream)[-1]["meta_info"]["finish_reason"]["type"] for stream in streams]  # type: ignore[arg-type]
        assert reasons == ["length", "abort", "length", "length"]
        children = engine._launched.children
    assert all(child.process.exitcode == 0 for child in children)


def test_a_model_that_does_not_divide_is_refused_in_one_line(qwen3: tuple[str, Reference]) -> None:
    with pytest.raises(StartupError, match="^--tp 3 does not divide the attention heads, 8; these do: 1, 2, 4, 8$"):
        Engine(model_path=qwen3[0], tp_size=3, **FLAGS)


@pytest.fixture
def nodes(qwen3: tuple[str, Reference], tmp_path: Path) -> Iterator[tuple[Server, subprocess.Popen[bytes]]]:
    """Two "machines" on the loopback address: node 0 serves."""
    flags = ["--model-path", qwen3[0], "--tp", "2", "--nnodes", "2", "--dist-init-addr", f"127.0.0.1:{free_port()}"]
    flags += ["--device", "cpu", "--dtype", "float32", "--max-total-tokens", "2000", "--skip-tokenizer-init"]
    node_1 = subprocess.Popen(
        [sys.executable, "-m", "tinysrt.launch_server", *flags, "--node-rank", "1"],
        cwd=ROOT,
        stderr=open(tmp_path / "node-1", "w"),
    )
    with Server(tmp_path, *flags) as node_0, node_1:
        try:
            yield node_0.wait_ready(), node_1
        finally:
            node_1.kill()


def test_two_nodes_answer_and_leave_together(
    nodes: tuple[Server, subprocess.Popen[bytes]], qwen3: tuple[str, Reference]
) -> None:
    node_0, node_1 = nodes
    asked = prompts(3, (5, 30))
    with node_0.post("/generate", {"input_ids": asked, "sampling_params": GREEDY}) as response:
        assert_greedy(qwen3[1], asked, [answer["output_ids"] for answer in json.load(response)])
    assert [child.name() for child in psutil.Process(node_1.pid).children() if "scheduler" in str(child.cmdline())]
    node_0.process.send_signal(signal.SIGTERM)
    assert node_0.exit_code() == 0
    assert node_1.wait(STOP_SECONDS) == 0


@pytest.mark.slow
def test_a_node_that_dies_takes_the_others_along(nodes: tuple[Server, subprocess.Popen[bytes]]) -> None:
    node_0, node_1 = nodes
    node_1.kill()
    assert node_0.exit_code() == 1
    assert "has lost a rank of its group, on another machine" in node_0.log.read_text()
    assert node_0.leftovers() == []
