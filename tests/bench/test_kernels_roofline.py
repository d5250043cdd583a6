"""`bench kernels` and `bench roofline` on tiny models: the arithmetic of floors, and that each command measures."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch

from tests.model_executor.harness import edit_config, save_tiny_model
from tinysrt.bench import kernels, machine_rates, roofline, scheduler, steps, switches
from tinysrt.bench.model_cost import ModelCost, Rates, Work, _seen
from tinysrt.errors import StartupError
from tinysrt.kernels.kernel_set import REFERENCE
from tinysrt.model_executor.layers.linear import can_pack
from tinysrt.model_executor.model_config import ModelConfig
from tinysrt.server_args import ServerArgs


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    save_tiny_model("llama", folder)
    return folder


@pytest.fixture(scope="module")
def moe(tmp_path_factory):
    folder = tmp_path_factory.mktemp("moe")
    save_tiny_model("qwen3_moe-mixed", folder)
    return folder


# ---- floors ------------------------------------------------------------------------------------------


def test_the_worked_example_of_qwen3_0_6b():
    """A chip with 4.3 TB/s and 790 TFLOP/s in bf16: 0.305, 2.03 and 7.27 ms for a decode step of 1, 64 and 256 requests
    at 1,024 positions; 18.9 and 10.4 ms for prefills of 1 x 8,192 and 8 x 1,024 tokens."""
    layers, hidden, heads, kv_heads, dim, width, vocab = 28, 1024, 16, 8, 128, 3072, 151_936
    cost = ModelCost(
        dense=layers * (hidden * (heads + 2 * kv_heads) * dim + heads * dim * hidden + 3 * hidden * width),
        experts=0,
        num_experts=0,
        top_k=0,
        head=vocab * hidden,
        windows=[None] * layers,
        attention_width=heads * dim,
        kv_bytes=2 * kv_heads * dim * 2,
        itemsize=2,
    )
    rates = Rates(read=4.3e12, matmul=790e12)
    assert cost.kv_bytes_per_token == 112 * 1024
    decode = [cost.decode(batch, 1024).floor(rates) * 1e3 for batch in (1, 64, 256)]
    prefill = [work.floor(rates) * 1e3 for work in (cost.prefill(8192), cost.prefill(1024, requests=8))]
    assert [f"{ms:.3g}" for ms in decode] == ["0.305", "2.03", "7.27"]
    assert [f"{ms:.3g}" for ms in prefill] == ["18.9", "10.4"]
    assert cost.decode(256, 1024).limited_by(rates) == "memory" and cost.prefill(8192).limited_by(rates) == "compute"


def test_parameters_are_counted_on_the_model(llama, moe):
    config = ModelConfig.from_pretrained(str(llama))
    cost = ModelCost.of(config, torch.bfloat16)
    hidden, width, qkv = 48, 80, (6 + 2 * 2) * 8
    assert cost.dense == 3 * (hidden * qkv + hidden * hidden + 3 * hidden * width)
    assert cost.weight_bytes == 2 * (cost.dense + 300 * hidden) and cost.experts == 0
    assert cost.kv_bytes_per_token == 3 * 2 * 2 * 8 * 2
    mixed = ModelCost.of(ModelConfig.from_pretrained(str(moe)), torch.float32)
    assert mixed.experts == 5 * 3 * 48 * 20  # one sparse layer of four
    assert (mixed.num_experts, mixed.top_k) == (5, 2) and mixed.windows == [40] * 4


def test_a_batch_reads_the_experts_that_it_visits(moe):
    cost = ModelCost.of(ModelConfig.from_pretrained(str(moe)), torch.float32)
    kv = 40 * cost.kv_bytes_per_token
    one, many = cost.decode(1, 500), cost.decode(1000, 500)
    assert one.bytes == pytest.approx((cost.dense + cost.head + cost.experts * 2 / 5) * 4 + kv)
    assert many.bytes == pytest.approx((cost.dense + cost.head + cost.experts) * 4 + 1000 * kv)
    assert many.flops == pytest.approx(1000 * one.flops)  # a token computes with its own, whoever is beside it


@pytest.mark.parametrize("new,prefix,window", [(5, 0, None), (5, 7, None), (9, 2, 4), (9, 0, 4), (3, 8, 4), (4, 3, 50)])
def test_seen_positions_are_counted_one_by_one(new, prefix, window):
    assert _seen(new, prefix, window) == sum(min(prefix + i + 1, window or math.inf) for i in range(new))


def test_the_floor_is_the_slower_of_memory_and_compute():
    work = Work(bytes=100, flops=600)
    assert work.floor(Rates(read=10, matmul=100)) == 10 and work.limited_by(Rates(10, 100)) == "memory"
    assert work.floor(Rates(read=100, matmul=10)) == 60 and work.limited_by(Rates(100, 10)) == "compute"


# ---- measuring ---------------------------------------------------------------------------------------


def quick(monkeypatch) -> None:
    monkeypatch.setattr(machine_rates, "TRIES", 2)
    monkeypatch.setitem(machine_rates.MATMUL_SIZE, "cpu", 64)


def test_rates_are_rates(monkeypatch):
    quick(monkeypatch)
    device = torch.device("cpu")
    assert 1e7 < machine_rates.read_rate(device, buffer_mib=8) < 1e14
    assert 1e7 < machine_rates.matmul_rate(device, torch.float32) < 1e15
    assert machine_rates.buffer_bytes(10**9, device) < 2**50  # a quarter of what is free, whatever was asked


@pytest.mark.parametrize("measure", [False, True])
def test_bench_roofline_writes_floors_and_measured_steps(llama, tmp_path, capsys, monkeypatch, measure):
    pytest.importorskip("matplotlib")
    monkeypatch.setenv("COLUMNS", "120")
    quick(monkeypatch)
    words = ["--model-path", str(llama), "--dtype", "float32", "--buffer-mib", "8", "--threads", "1"]
    words += ["--batch-sizes", "1", "3", "--context", "40", "--prefill", "30", "--steps", "2"]
    words += ["--json", str(tmp_path / "r.json"), "--plot", str(tmp_path / "r.png")]
    assert roofline.main([*words, *(["--measure"] if measure else [])]) == 0
    record = json.loads((tmp_path / "r.json").read_text())
    assert [row["phase"] for row in record["rows"]] == ["decode", "decode", "prefill"]
    assert all(row["floor_ms"] > 0 for row in record["rows"])
    assert all((row.get("measured_ms", 0) > 0) == measure for row in record["rows"])
    assert record["machine"]["torch"] and record["model"]["dtype"] == "float32"
    assert (tmp_path / "r.png").stat().st_size > 1000
    shown = capsys.readouterr().out
    assert "decode 3 at 40" in shown and ("measured" in shown) == measure


def test_a_measured_step_is_a_real_one(llama):
    """The driver's prefill and decode give the same logits: what stands in the pool is what a step reads."""
    config = ModelConfig.from_pretrained(str(llama), context_length=20)
    args = ServerArgs(
        model_path=str(llama), device="cpu", max_running_requests=3, max_total_tokens=60, num_threads=1
    ).resolve()
    runner = steps.make_runner(args, config)
    assert runner.table[1:4, :20].flatten().tolist() == list(range(1, 61))
    whole = steps.prefill_batch(runner, 20, requests=3)
    logits = runner.forward(whole).next_token_logits
    last = replace(steps.decode_batch(runner, 3, 20), relay_lanes=None)
    runner.relay[1:4] = whole.input_ids.view(3, 20)[:, -1]
    torch.testing.assert_close(runner.forward(last).next_token_logits, logits)


@pytest.mark.parametrize("family", ["llama", "moe"])
def test_bench_kernels_times_every_kernel_of_the_model(request, family, tmp_path, capsys):
    folder = request.getfixturevalue(family)
    words = ["--model-path", str(folder), "--kernels", "torch_native", "--batch-sizes", "1", "3", "--context", "20"]
    words += ["--prefill", "16", "--threads", "1", "--rounds", "2", "--json", str(tmp_path / "k.json")]
    assert kernels.main(words) == 0
    rows = json.loads((tmp_path / "k.json").read_text())["rows"]
    assert {(row["kernel"], row["phase"]) for row in rows} == {
        *(
            (name, phase)
            for name in ("add_rms_norm", "rope_and_store", "silu_and_mul", "linear")
            for phase in ("decode", "prefill")
        ),
        ("decode_attention", "decode"),
        ("extend_attention", "prefill"),
        ("sample_tokens", "decode"),
        *((("grouped_gemm", "decode"), ("grouped_gemm", "prefill")) if family == "moe" else ()),
    }
    for row in rows:
        assert row["speedup"]["reference"] == 1 and all(value > 0 for value in row["us"].values())
        assert all(error < 1e-4 for error in row["error"].values()), row
        own = row["kernel"].endswith("_attention") or row["kernel"] == "linear" and can_pack(torch.ones(1))
        assert ("torch_native" in row["us"]) == own
    assert "rope_and_store" in capsys.readouterr().out


def test_a_wrong_kernel_shows_in_its_error():
    case = kernels.Case("silu_and_mul", "decode", "", lambda k: lambda: k.silu_and_mul(torch.ones(2, 8)))
    doubled = replace(REFERENCE, name="doubled", silu_and_mul=lambda x: 2 * REFERENCE.silu_and_mul(x))
    row = kernels.measure(case, {"doubled": doubled}, 1, torch.device("cpu"))
    assert row["error"] == {"reference": 0, "doubled": pytest.approx(1)}
    table = kernels.make_table([row], ["reference", "doubled"], "")
    assert list(table.columns[-1].cells) == ["wrong: error 1.0e+00"], "and no speed"
    assert kernels.is_wrong({"error": {"doubled": math.nan}}, "doubled")


def test_a_set_that_was_asked_for_and_is_not_there_is_an_error(monkeypatch):
    def refuse(name):
        raise StartupError(f"no {name}")

    monkeypatch.setattr(kernels, "load_kernels", refuse)
    with pytest.raises(StartupError, match="no numba"):
        kernels.candidates(torch.device("cpu"), "auto", ["torch_native", "numba"])
    sets, missing = kernels.candidates(torch.device("cpu"), "auto", None)
    assert not sets and missing == {"numba": "no numba"}
    assert kernels.candidates(torch.device("cuda"), "auto", None)[1] == {"triton": "no triton"}


@pytest.mark.parametrize(
    ("device", "dtype", "name", "why"),
    [
        ("cuda", "auto", "numba", "numba kernels run on cpu, not on cuda"),
        ("cpu", "auto", "triton", "triton kernels run on cuda, not on cpu"),
        ("cpu", "float16", "numba", "no numba kernels for float16"),
    ],
)
def test_a_set_that_does_not_fit_is_refused_by_name_before_it_is_loaded(monkeypatch, device, dtype, name, why):
    monkeypatch.setattr(kernels, "load_kernels", lambda name: pytest.fail(f"{name} was loaded"))
    with pytest.raises(StartupError, match=why):
        kernels.candidates(torch.device(device), dtype, [name])


def test_numba_is_left_out_of_float16_with_a_reason():
    assert kernels.candidates(torch.device("cpu"), "half", None) == (
        {},
        {"numba": "there are no numba kernels for half"},
    )


def test_flags_that_make_no_sense_are_refused(llama):
    with pytest.raises(StartupError, match="--batch-sizes must be at least 1"):
        roofline.main(["--batch-sizes", "0"])
    with pytest.raises(StartupError, match="at least 1"):
        kernels.main(["--rounds", "0"])
    for bench in (kernels, roofline, switches):
        with pytest.raises(SystemExit):
            bench.main(["--dtype", "float3"])
    with pytest.raises(StartupError, match="--measure"):
        roofline.main(["--attention-backend", "numba"])
    with pytest.raises(StartupError, match="at least 1"):
        scheduler.main(["--steps", "0"])
    with pytest.raises(StartupError, match="sliding"):
        edit_config(llama, sliding_window=5)
        roofline.main(["--model-path", str(llama), "--buffer-mib", "8"])
