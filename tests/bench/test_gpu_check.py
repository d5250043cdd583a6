"""`tinysrt bench gpu` without a GPU: what it says then, and its checks on toy shapes with the reference kernels."""

from __future__ import annotations

import json
import time
from dataclasses import replace

import pytest
import torch

from tinysrt.bench import gpu, gpu_correct, gpu_speed
from tinysrt.bench.gpu import passed, run_section
from tinysrt.bench.gpu_bench import FAIL, MISSING, PASS, SKIPPED, TINY, Bench, Line
from tinysrt.kernels.kernel_set import REFERENCE

TOY = ["--device", "cpu", "--size", "tiny", "--time-limit", "1000"]
needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


@pytest.fixture
def bench(tmp_path) -> Bench:
    torch.manual_seed(0)
    return Bench(torch.device("cpu"), TINY, REFERENCE, tmp_path, time.monotonic() + 200)


@needs_no_gpu
def test_without_a_gpu_nothing_is_checked_and_nothing_has_failed(capsys, tmp_path):
    assert gpu.main(["--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "skipped" in said and "passed" not in said
    assert list(tmp_path.iterdir()) == []


def test_the_correctness_sections_on_toy_shapes(tmp_path, capsys):
    torch.set_num_threads(1)
    sections = ["2", "3", "4", "5"]
    assert gpu.main([*TOY, "--out", str(tmp_path), "--sections", *sections]) == 0
    record = json.loads((tmp_path / "gpu-check.json").read_text())
    assert record["passed"] and record["machine"]["torch"]
    verdicts = {line["section"] for line in record["lines"] if line["verdict"] == PASS}
    assert verdicts == {"2 kernels", "3 model", "4 graphs", "5 overlap"}
    assert len(capsys.readouterr().out.splitlines()) <= gpu.LAST_LINES


@pytest.mark.slow
def test_the_sections_that_measure_on_toy_shapes(tmp_path):
    torch.set_num_threads(1)
    assert gpu.main([*TOY, "--out", str(tmp_path), "--sections", "1", "4", "6", "7"]) == 0
    record = json.loads((tmp_path / "gpu-check.json").read_text())
    assert [row["batch"] for row in record["details"]["decode"]] == TINY.decode_batches
    assert [(row["requests"], row["tokens"]) for row in record["details"]["prefill"]] == TINY.prefills
    assert all(line["verdict"] in (PASS, "") for line in record["lines"])


@pytest.mark.e2e
def test_the_server_section_on_toy_shapes(tmp_path):
    assert gpu.main([*TOY, "--out", str(tmp_path), "--sections", "8"]) == 0
    record = json.loads((tmp_path / "gpu-check.json").read_text())
    assert [row["round"] for row in record["details"]["server"]] == ["first round", "second round"]
    assert record["details"]["server"][1]["cached"] > 0.5


def test_a_peer_that_is_absent_or_fails_is_no_failure_of_ours(bench, monkeypatch):
    def absent(bench: Bench, name: str) -> None:
        raise ImportError("no module of this name")

    def broken(bench: Bench, name: str) -> None:
        raise TypeError("another signature")

    monkeypatch.setattr(gpu_speed, "flash_attention", absent)
    monkeypatch.setattr(gpu_speed, "varlen_attention", broken)
    monkeypatch.setattr(gpu_speed, "continuous_batching", absent)
    gpu_speed.peers(bench)
    assert [line.verdict for line in bench.lines] == [MISSING, SKIPPED, MISSING]


def test_a_wrong_kernel_fails_and_so_does_one_that_moves(bench):
    def wrong(x, weight, eps):
        return REFERENCE.rms_norm(x, weight, eps) * 1.001

    def moving(gate_up):
        return REFERENCE.silu_and_mul(gate_up) + torch.rand(()) * 1e-7

    bench.kernels = replace(REFERENCE, rms_norm=wrong, silu_and_mul=moving)
    gpu_correct.kernels_against_float64(bench)
    verdicts = {line.case: line.verdict for line in bench.lines}
    assert verdicts["rms_norm"] == verdicts["silu_and_mul"] == FAIL
    assert verdicts["decode_attention"] == verdicts["sample_tokens"] == PASS
    assert not passed(bench.lines)


def test_nan_is_an_error():
    assert not gpu_correct.error(torch.tensor([float("nan")]), torch.ones(1)) <= 1


def test_a_section_that_fails_does_not_stop_the_rest(bench):
    def broken(bench: Bench) -> None:
        raise ValueError("no such thing\nmore words")

    run_section(bench, "1 broken", broken)
    run_section(bench, "2 fine", lambda bench: bench.verdict("2 fine", "works", True))
    assert [(line.section, line.verdict) for line in bench.lines] == [("1 broken", FAIL), ("2 fine", PASS)]
    assert bench.lines[0].measured == "ValueError: no such thing"
    assert not passed(bench.lines)


def test_a_section_ends_with_the_time_limit(bench):
    bench.deadline = time.monotonic() + 1.2
    run_section(bench, "1 slow", lambda bench: time.sleep(60))
    run_section(bench, "2 late", lambda bench: bench.verdict("2 late", "never runs", True))
    assert [(line.section, line.verdict) for line in bench.lines] == [("1 slow", SKIPPED), ("2 late", SKIPPED)]
    assert not passed(bench.lines), "nothing was checked"


def test_a_best_token_may_differ_only_where_its_lead_is_within_the_error():
    expected = torch.tensor([[1.0, 0.999, 0.0], [2.0, 1.0, 0.0]])
    near = torch.tensor([0.999, 1.0, 0.0])
    assert gpu_correct.compare_logits([(0, near)], expected)[1]
    assert gpu_correct.compare_logits([(1, expected[1])], expected) == (0.0, True)


def test_the_table_fits_the_last_lines_of_a_terminal():
    lines = [Line("6 decode", f"case {i}", "1 ms", "2 ms", "50 %") for i in range(100)]
    assert gpu.table(lines[-(gpu.LAST_LINES - 4) :], "title").row_count <= gpu.LAST_LINES - 4
