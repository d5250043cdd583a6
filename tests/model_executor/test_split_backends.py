"""Prefill by one attention backend, decode by another, over one pool: the answers are those of transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.model_executor.harness import VOCAB, LittleScheduler, assert_greedy, make_runner, save_tiny_model


@pytest.mark.parametrize(("prefill", "decode"), [("numba", "torch_native"), ("torch_native", "numba")])
def test_one_backend_reads_what_the_other_has_written(prefill: str, decode: str, tmp_path: Path) -> None:
    reference = save_tiny_model("llama", tmp_path)
    runner = make_runner(tmp_path, prefill_attention_backend=prefill, decode_attention_backend=decode)
    scheduler = LittleScheduler(runner)
    generator = torch.Generator().manual_seed(3)
    rows = [scheduler.add(torch.randint(3, VOCAB, (n,), generator=generator).tolist()) for n in (30, 1, 60)]
    scheduler.prefill(rows)
    scheduler.decode(rows, 6)
    for row in rows:
        assert_greedy(reference, row, 6)
