"""`tinysrt bench roofline`: the fastest that a step can be on this machine, before anyone measures a step.

    machine   read rate and matmul rate, with 1 … n threads     (machine_rates.py)
    model     bytes and FLOPs of a decode step, of a prefill    (model_cost.py, from config.json)
    floor     the larger of bytes / read rate and FLOPs / matmul rate
    measured  with --measure: a real ModelRunner does the step  (steps.py)

A decode step below a few dozen requests is limited by memory: all weights are read for few rows. A prefill is limited
by the matmul rate. The percentage tells how much of a step is explained by what cannot be avoided; the rest is small
operations, attention, Python.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from rich.table import Table

from tinysrt.bench import machine_rates, report
from tinysrt.bench.model_cost import ModelCost, Rates, Work
from tinysrt.bench.steps import decode_batch, make_runner, median_ms, pool_bytes, prefill_batch
from tinysrt.errors import StartupError
from tinysrt.model_executor.model_config import DTYPES, ModelConfig, resolve_model_path
from tinysrt.model_executor.sizing import runtime_dtype, usable_cores
from tinysrt.server_args import ServerArgs
from tinysrt.text.demo_model import ensure_demo_model

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PREFILL_STEPS = 3


def machine_rows(device: torch.device, threads: Sequence[int], buffer_mib: int) -> list[dict[str, Any]]:
    """Rates by thread count; the last row, with all threads, is what floors are computed from."""
    rows = []
    for count in threads:
        torch.set_num_threads(count)
        rows.append(
            {
                "threads": count,
                "read_gb_s": machine_rates.read_rate(device, buffer_mib) / 1e9,
                "float32_gflop_s": machine_rates.matmul_rate(device, torch.float32) / 1e9,
                "bfloat16_gflop_s": machine_rates.matmul_rate(device, torch.bfloat16) / 1e9,
            }
        )
    return rows


def cases(cost: ModelCost, batch_sizes: Sequence[int], context: int, prefill: int) -> list[tuple[dict[str, Any], Work]]:
    """(what, its cost): a decode step of each batch size, and one prompt's prefill."""
    decodes = [({"phase": "decode", "batch": n, "context": context}, cost.decode(n, context)) for n in batch_sizes]
    return [*decodes, ({"phase": "prefill", "batch": 1, "context": prefill}, cost.prefill(prefill))]


def measured_ms(rows: list[dict[str, Any]], cli: argparse.Namespace, path: str, device: torch.device) -> None:
    """Add "measured_ms" and "percent" to each row."""
    largest = max(cli.batch_sizes)
    config = ModelConfig.from_pretrained(
        path,
        context_length=max(cli.context, cli.prefill),
        dtype=cli.dtype,
        load_format=cli.load_format,
    )
    args = ServerArgs(
        model_path=path,
        dtype=cli.dtype,
        device=device.type,
        load_format=cli.load_format,
        attention_backend=cli.attention_backend,
        num_threads=max(cli.threads),
        max_running_requests=largest,
        max_total_tokens=largest * config.context_len,
        kv_pool_bytes=pool_bytes(config, cli.dtype, device.type, largest),
    ).resolve()
    runner = make_runner(args, config)
    for row in rows:
        if row["phase"] == "decode":
            ms = median_ms(runner, decode_batch(runner, row["batch"], row["context"]), cli.steps)
        else:
            ms = median_ms(runner, prefill_batch(runner, row["context"]), PREFILL_STEPS)
        row |= {"measured_ms": ms, "percent": 100 * row["floor_ms"] / ms}


def tables(machine: list[dict[str, Any]], model: dict[str, Any], rows: list[dict[str, Any]]) -> list[Table]:
    rates = Table(title=f"This machine ({report.machine_line()})")
    for name in ("threads", "read GB/s", "float32 GFLOP/s", "bfloat16 GFLOP/s"):
        rates.add_column(name, justify="right")
    for entry in machine:
        rates.add_row(str(entry["threads"]), *(report.number(value) for value in list(entry.values())[1:]))
    floors = Table(
        title=f"{model['name']}, {model['dtype']}: {model['weight_bytes'] / 1e6:,.0f} MB of weights, "
        f"{model['kv_bytes_per_token']:,} bytes of KV per token"
    )
    floors.add_column("step", no_wrap=True)
    for name in ("MB", "GFLOP", "floor ms", "tokens/s", "limit"):
        floors.add_column(name, justify="right")
    measured = "measured_ms" in rows[0]
    if measured:
        floors.add_column("measured", justify="right")
        floors.add_column("reached", justify="right")
    for row in rows:
        decode = row["phase"] == "decode"
        tokens = row["batch"] if decode else row["context"]
        name = f"decode {row['batch']} at {row['context']}" if decode else f"prefill of {row['context']}"
        figures = [row["bytes"] / 1e6, row["flops"] / 1e9, row["floor_ms"], tokens / row["floor_ms"] * 1e3]
        cells = [*(report.number(value) for value in figures), row["limited_by"]]
        if measured:
            cells += [report.number(row["measured_ms"]), f"{row['percent']:.0f} %"]
        floors.add_row(name, *cells)
    return [rates, floors]


def draw(figure: Figure, rates: Rates, rows: list[dict[str, Any]]) -> None:
    """Operations per second over operations per byte: the roof, each step below it, and where it was measured."""
    axes = figure.subplots()
    intensities = [row["flops"] / row["bytes"] for row in rows]
    ridge = rates.matmul / rates.read
    ends = [min([*intensities, ridge]) / 2, ridge, max([*intensities, ridge]) * 2]
    axes.plot(ends, [min(x * rates.read, rates.matmul) / 1e9 for x in ends], color="black", label="roof")
    for row, intensity in zip(rows, intensities, strict=True):
        name = f"{row['phase']} {row['batch'] if row['phase'] == 'decode' else row['context']}"
        roof = row["flops"] / row["floor_ms"] / 1e6
        axes.plot(intensity, roof, "o", color="black", fillstyle="none")
        axes.annotate(name, (intensity, roof), textcoords="offset points", xytext=(4, 6), fontsize=8)
        if "measured_ms" in row:
            axes.plot(intensity, row["flops"] / row["measured_ms"] / 1e6, "x", color="tab:red")
    axes.set(xscale="log", yscale="log", xlabel="FLOPs per byte read", ylabel="GFLOP/s")
    if "measured_ms" in rows[0]:
        axes.plot([], [], "x", color="tab:red", label="measured")
    axes.legend()


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tinysrt bench roofline", description=__doc__.splitlines()[0])
    parser.add_argument("--model-path", help="folder or hub id; default: the demo model")
    parser.add_argument("--dtype", default="auto", choices=("auto", *DTYPES))
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8, 32, 64], help="requests of a decode step")
    parser.add_argument("--context", type=int, default=512, help="positions of each request that decodes")
    parser.add_argument("--prefill", type=int, default=512, help="tokens of the prompt")
    parser.add_argument("--threads", type=int, nargs="+", help="default: 1 and all cores; the most set the floors")
    parser.add_argument("--buffer-mib", type=int, default=machine_rates.BUFFER_MIB, help="must exceed the caches")
    parser.add_argument("--measure", action="store_true", help="run the steps too (loads the model)")
    parser.add_argument("--steps", type=int, default=20, help="repetitions of a measured decode step")
    parser.add_argument("--attention-backend", help="of the measured steps; default: the server's")
    parser.add_argument(
        "--load-format", default="auto", choices=("auto", "dummy"), help="dummy: random weights, no file"
    )
    report.add_output_flags(parser)
    cli = parser.parse_args(argv)
    report.check_output_flags(cli)
    cli.threads = sorted(set(cli.threads or [1, usable_cores()]))
    for name in ("batch_sizes", "threads", "context", "prefill", "buffer_mib", "steps"):
        value = getattr(cli, name)
        if min(value if isinstance(value, list) else [value]) < 1:
            raise StartupError(f"--{name.replace('_', '-')} must be at least 1")
    if cli.attention_backend and not cli.measure:
        raise StartupError("--attention-backend is of the measured steps: give --measure too")
    if cli.device == "cuda" and not torch.cuda.is_available():
        raise StartupError("--device cuda: PyTorch sees no CUDA device here")
    return cli


def main(argv: Sequence[str]) -> int:
    cli = parse(argv)
    device = torch.device(cli.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    weights = cli.measure and cli.load_format != "dummy"
    path = str(resolve_model_path(cli.model_path or ensure_demo_model(), weights=weights))
    config = ModelConfig.from_pretrained(path, dtype=cli.dtype, load_format="auto" if weights else "dummy")
    dtype = runtime_dtype(cli.dtype, config.dtype, device)
    cost = ModelCost.of(config, dtype)
    machine = machine_rows(device, cli.threads if device.type == "cpu" else cli.threads[-1:], cli.buffer_mib)
    # float16 runs at the rate of bfloat16 where it runs at all.
    rate = "float32_gflop_s" if dtype == torch.float32 else "bfloat16_gflop_s"
    rates = Rates(read=machine[-1]["read_gb_s"] * 1e9, matmul=machine[-1][rate] * 1e9)
    rows = [what | work.as_dict(rates) for what, work in cases(cost, cli.batch_sizes, cli.context, cli.prefill)]
    if cli.measure:
        measured_ms(rows, cli, path, device)
    model = {
        "name": config.path.name,
        "dtype": str(dtype).removeprefix("torch."),
        "weight_bytes": cost.weight_bytes,
        "kv_bytes_per_token": cost.kv_bytes_per_token,
    }
    figures = {"device": device.type, "rates": machine, "model": model, "rows": rows}
    report.publish(
        cli, "roofline", figures, tables(machine, model, rows), lambda figure: draw(figure, rates, rows), argv=argv
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
