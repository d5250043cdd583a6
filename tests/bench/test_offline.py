from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.model_executor.harness import save_tiny_model
from tests.text.tiny_tokenizers import byte_level
from tinysrt.bench import offline
from tinysrt.bench.dialects import RunVoid
from tinysrt.bench.workloads import Draws
from tinysrt.errors import StartupError


class FakeEngine:
    def __init__(self, missing: int = 0) -> None:
        self.missing = missing
        self.asked: list[tuple[int, int]] = []

    def generate(self, input_ids: list[list[int]], sampling_params: list[dict[str, Any]]) -> list[dict[str, Any]]:
        tokens = [params["max_new_tokens"] for params in sampling_params]
        assert all(params["ignore_eos"] and params["temperature"] == 0 for params in sampling_params)
        self.asked = [(len(ids), n) for ids, n in zip(input_ids, tokens, strict=True)]
        return [{"meta_info": {"completion_tokens": n - self.missing}} for n in tokens]


def test_one_call_asks_for_all_requests_and_their_tokens_are_counted() -> None:
    engine: Any = FakeEngine()
    figures = offline.measure(engine, Draws(500, 0), 64)
    assert len(engine.asked) == 64 and all(32 <= a <= 512 and 32 <= b <= 128 for a, b in engine.asked)
    output = sum(b for _, b in engine.asked)
    assert figures["output_tok_s"] * figures["wall_s"] == pytest.approx(output)
    assert figures["total_tok_s"] * figures["wall_s"] == pytest.approx(output + sum(a for a, _ in engine.asked))


def test_a_token_too_few_voids_the_run() -> None:
    engine: Any = FakeEngine(missing=1)
    with pytest.raises(RunVoid, match="tokens instead of"):
        offline.measure(engine, Draws(500, 0), 8)


def test_arguments_are_checked_before_a_model_is_loaded() -> None:
    with pytest.raises(StartupError, match="--repeats must be at least 1"):
        offline.main(["--repeats", "0"])


@pytest.mark.e2e
def test_the_command_runs_an_engine_and_writes_its_record(tmp_path: Path) -> None:
    folder, file = tmp_path / "model", tmp_path / "out.json"
    tokenizer = byte_level().hf
    save_tiny_model("llama", folder, vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id)
    tokenizer.save_pretrained(folder)
    arguments = ["--model-path", str(folder), "--num-threads", "1", "--max-total-tokens", "4096", "--requests", "12"]
    assert offline.main([*arguments, "--scale", "0.3", "--repeats", "2", "--json", str(file)]) == 0
    record = json.loads(file.read_text())
    assert len(record["runs"]) == 2 and record["summary"]["output_tok_s"]["median"] > 0
