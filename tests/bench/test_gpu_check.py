"""`tinysrt bench gpu` without a GPU: what it says then, and its checks on toy shapes with the reference kernels."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tinysrt.bench import gpu, gpu_correct, gpu_speed, machine_rates
from tinysrt.bench.gpu import outcome, run_section
from tinysrt.bench.gpu_bench import FAIL, MISSING, PASS, SKIPPED, TINY, Bench, Line
from tinysrt.errors import StartupError
from tinysrt.kernels.kernel_set import REFERENCE
from tinysrt.model_executor.sampler import Sampler

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


def test_the_sections_that_measure_on_toy_shapes(tmp_path, capsys, monkeypatch):
    """They judge nothing, so nothing fails; and they measure the rates themselves where section 1 was not asked for."""
    torch.set_num_threads(1)
    monkeypatch.setattr(machine_rates, "TRIES", 2)
    monkeypatch.setitem(machine_rates.MATMUL_SIZE, "cpu", 64)
    assert gpu.main([*TOY, "--out", str(tmp_path), "--sections", "6", "7"]) == 0
    assert "nothing judged" in capsys.readouterr().out
    record = json.loads((tmp_path / "gpu-check.json").read_text())
    assert not record["passed"] and record["details"]["rates"]["read"] > 0
    assert [row["batch"] for row in record["details"]["decode"]] == TINY.decode_batches
    assert [(row["requests"], row["tokens"]) for row in record["details"]["prefill"]] == TINY.prefills
    assert all(line["verdict"] == "" for line in record["lines"])


def test_a_record_that_cannot_be_written_is_told_before_anything_is_checked():
    with pytest.raises(StartupError, match="--out /dev/null/here"):
        gpu.main([*TOY, "--out", "/dev/null/here"])


@pytest.mark.parametrize("section", ["0", "10", "12"])
def test_a_section_that_there_is_not_is_refused(section, capsys):
    with pytest.raises(SystemExit):
        gpu.main([*TOY, "--sections", section])
    assert "invalid choice" in capsys.readouterr().err


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
    assert outcome(bench.lines) == "NOT PASSED"
    assert "moves" in next(line.measured for line in bench.lines if line.case == "silu_and_mul")


def test_a_kernel_that_raises_is_wrong_and_the_others_are_judged(bench):
    def broken(x, weight, eps):
        raise ValueError("no tile fits\nmore words")

    bench.kernels = replace(REFERENCE, rms_norm=broken)
    gpu_correct.kernels_against_float64(bench)
    lines = {line.case: line for line in bench.lines}
    wrong = lines.pop("rms_norm")
    assert wrong.verdict == FAIL and wrong.measured.endswith("ValueError: no tile fits")
    assert {line.verdict for line in lines.values()} == {PASS} and "decode_attention" in lines


def test_the_end_of_the_time_is_no_fault_of_the_kernel_that_runs(bench):
    bench.kernels = replace(REFERENCE, rms_norm=lambda x, weight, eps: time.sleep(60))
    bench.deadline = time.monotonic() + 3
    run_section(bench, "2 kernels", gpu_correct.kernels_against_float64)
    assert [line.verdict for line in bench.lines] == [SKIPPED]


def test_what_is_expected_of_the_sampling_kernel_lies_on_its_device(bench):
    bench.device = torch.device("meta")
    *_, call, expected = gpu_correct.sampling_case(bench)
    assert expected.device == call().device


def test_sampled_steps_are_watched_for_waiting_too(bench, monkeypatch):
    seen = set()

    def sample(self, logits, info, relay, original=Sampler._sample):
        statics = info.statics
        if None not in (statics.temperatures, statics.filters, statics.penalties, statics.bias):
            seen.add(info.penalty_starts[0] is None)
        return original(self, logits, info, relay)

    monkeypatch.setattr(Sampler, "_sample", sample)
    gpu_correct.graphs(bench)
    assert seen == {False, True}  # a prefill, which starts the counts, and a decode step, which adds to them
    assert bench.lines[-1].case == "no step waits for the device" and bench.lines[-1].verdict == PASS


def test_nan_is_an_error():
    nan = torch.tensor([float("nan"), 0.0])
    assert not gpu_correct.error(nan, torch.ones(2)) <= 1
    right = torch.tensor([1.0, 0.0])
    worst, _ = gpu_correct.compare_logits([(0, right), (0, nan), (0, right)], right.unsqueeze(0))
    assert not worst <= 1, "one NaN among good rows"


def test_a_kernel_that_gives_nan_fails_and_the_record_is_json(tmp_path, monkeypatch):
    broken = replace(REFERENCE, rms_norm=lambda x, weight, eps: torch.full_like(x, float("nan")))
    monkeypatch.setattr(gpu, "load_kernels", lambda name: broken)
    assert gpu.main([*TOY, "--out", str(tmp_path), "--sections", "2"]) == 1
    text = (tmp_path / "gpu-check.json").read_text()
    record = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert record["details"]["kernels"]["rms_norm"][0][1:] == [None, "too far off"] and not record["passed"]


def test_tokens_of_requests_that_never_end_are_not_compared():
    stuck = SimpleNamespace(
        inbox=SimpleNamespace(messages=[]), outbox=SimpleNamespace(output_ids=lambda rid: []), turn=lambda: None
    )
    with pytest.raises(RuntimeError, match="have not ended"):
        gpu_correct.answers(stuck, 2, 3)


def test_a_section_that_fails_does_not_stop_the_rest(bench):
    def broken(bench: Bench) -> None:
        raise ValueError("no such thing\nmore words")

    run_section(bench, "1 broken", broken)
    run_section(bench, "2 fine", lambda bench: bench.verdict("2 fine", "works", True))
    assert [(line.section, line.verdict) for line in bench.lines] == [("1 broken", FAIL), ("2 fine", PASS)]
    assert bench.lines[0].measured == "ValueError: no such thing"
    assert outcome(bench.lines) == "NOT PASSED"


def test_a_section_ends_with_the_time_limit(bench):
    bench.deadline = time.monotonic() + 1.2
    run_section(bench, "1 slow", lambda bench: time.sleep(60))
    run_section(bench, "2 late", lambda bench: bench.verdict("2 late", "never runs", True))
    assert [(line.section, line.verdict) for line in bench.lines] == [("1 slow", SKIPPED), ("2 late", SKIPPED)]
    assert outcome(bench.lines) == "nothing judged"


def test_a_best_token_may_differ_only_where_its_lead_is_within_the_error():
    expected = torch.tensor([[1.0, 0.999, 0.0], [2.0, 1.0, 0.0]])
    near = torch.tensor([0.999, 1.0, 0.0])
    assert gpu_correct.compare_logits([(0, near)], expected)[1]
    assert gpu_correct.compare_logits([(1, expected[1])], expected) == (0.0, True)


def test_the_table_fits_the_last_lines_of_a_terminal():
    lines = [Line("6 decode", f"case {i}", "1 ms", "2 ms", "50 %") for i in range(100)]
    assert gpu.table(lines[-(gpu.LAST_LINES - 4) :], "title").row_count <= gpu.LAST_LINES - 4
