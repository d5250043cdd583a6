"""`bench overlap` on a tiny model: what it refuses, and that a batch which cannot form ends it. No time is asserted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.model_executor.harness import make_runner, save_tiny_model
from tinysrt.bench import overlap
from tinysrt.bench.dialects import RunVoid
from tinysrt.bench.in_process import with_scheduler
from tinysrt.errors import StartupError
from tinysrt.server_args import ServerArgs

QUICK = ["--num-threads", "1", "--prompt", "8", "--steps", "2", "--pairs", "1"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny_model("llama", folder, max_position_embeddings=4096)  # with 300 token ids
    return folder


def test_the_command_measures_each_batch_size(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    words = ["--model-path", str(folder), *QUICK, "--batch-sizes", "1", "3", "--json", str(file)]
    assert overlap.main(words) == 0
    rows = json.loads(file.read_text())["rows"]
    assert [row["batch_size"] for row in rows] == [1, 3] and all(row["overlap_ms"] > 0 for row in rows)


def test_a_batch_larger_than_the_machine_allows_is_refused_before_anything_is_measured(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overlap, "measure", lambda *args, **more: pytest.fail("measured"))
    with pytest.raises(StartupError, match="--batch-sizes 128: at most 64"):
        overlap.main(["--model-path", str(folder), *QUICK, "--batch-sizes", "1", "128"])


@pytest.mark.parametrize("normal", [True, False])
def test_a_batch_that_the_pool_cannot_hold_voids_the_run(folder: Path, normal: bool) -> None:
    args = ServerArgs(
        model_path=str(folder), device="cpu", max_total_tokens=200, num_threads=1, disable_overlap_schedule=normal
    ).resolve()
    runner = make_runner(folder, max_total_tokens=200)
    assert with_scheduler(runner, args, lambda side: overlap.block(side, 4, 20, 3)) > 0
    with pytest.raises(RunVoid, match="8 requests of 36 tokens do not run together"):
        with_scheduler(runner, args, lambda side: overlap.block(side, 8, 20, 3))
