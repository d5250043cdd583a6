"""One tiny model, and runners for it that capture in one way or another."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.model_executor.harness import make_runner, save_tiny_model
from tinysrt.model_executor.cuda_graph_runner import CudaGraphRunner
from tinysrt.model_executor.model_runner import ModelRunner
from tinysrt.server_args import ServerArgs

MakeRunner = Callable[..., ModelRunner]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("graph-llama")
    save_tiny_model("llama", path)
    return path


def capturing_runner(folder: Path, kind: str, **args: object) -> ModelRunner:
    settings = {"max_running_requests": 16, "max_total_tokens": 1024, "graph_capture": kind, **args}
    runner = make_runner(folder, **settings)
    runner.capture_graphs(ServerArgs(model_path=str(folder), device="cpu", **settings).resolve())
    return runner


def graphs_of(runner: ModelRunner) -> CudaGraphRunner:
    assert runner.graphs is not None
    return runner.graphs
