"""`tinysrt bench switches`: what each mechanism gives on this machine, measured by turning it off.

Every switch has a small workload of the kind it was invented for, and a figure that it is meant to improve; where it
has a price, the price is measured too. Off and on take turns with the same prompts:

    off  on  off'   off  on  off'   …        gain  = (off + off') / 2 on       above 1: better with it
                                             noise = off' / off                what a gain must stand out from

Predict before you run it: which of these help a *single* user? Which need many? Which only look good?

Invariant: nothing but the switch differs between the sides of a row: same model, same prompts, same process.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.table import Table

from tinysrt.bench import report
from tinysrt.bench.dialects import RunVoid
from tinysrt.bench.in_process import Played, Want, with_flags, with_scheduler
from tinysrt.bench.workloads import Draws
from tinysrt.errors import StartupError
from tinysrt.model_executor.model_config import DTYPES, ModelConfig
from tinysrt.model_executor.model_runner import ModelRunner, load_runner
from tinysrt.observe.trace import Recorder
from tinysrt.server_args import ServerArgs
from tinysrt.text.demo_model import ensure_demo_model

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Flags that the model runner itself reads: where they differ, each side loads a model of its own. In all others it is
# as the common flags say, whoever loads it: one made for a single request has no room for the other side's eight.
RUNNER_FLAGS = (
    "attention_backend", "page_size", "graph_capture", "enable_torch_compile", "cuda_graph_bs_decode", "num_threads",
    "dtype",
)  # fmt: skip
POOL_TOKENS = 12_288


# ---- workloads: what is played, made from one Draws -------------------------------------------------------


def shared_prefix(draws: Draws) -> list[Want]:
    """Eight questions about one long text."""
    prefix = draws.prompt(draws.size(384))
    return [Want(prefix + draws.prompt(draws.size(32)), draws.size(8)) for _ in range(8)]


def long_among_readers(draws: Draws) -> list[Want]:
    """Four streams decode; a prompt of 1,024 tokens arrives. The last Want is the newcomer."""
    readers = [Want(draws.prompt(draws.size(32)), max(8, draws.size(24))) for _ in range(4)]
    return [*readers, Want(draws.prompt(draws.size(1024)), 1, late=4)]


def many_short_prompts(draws: Draws) -> list[Want]:
    return [Want(draws.prompt(draws.size(24)), 1) for _ in range(32)]


def decode_of(batch: int, context: int = 128, steps: int = 40) -> Callable[[Draws], list[Want]]:
    def wants(draws: Draws) -> list[Want]:
        return [Want(draws.prompt(draws.size(context)), max(6, draws.size(steps))) for _ in range(batch)]

    return wants


def one_long_prompt(draws: Draws) -> list[Want]:
    return [Want(draws.prompt(draws.size(1024)), 1)]


# ---- figures: all are times, so less is better ------------------------------------------------------------


def wall(played: Played) -> float:
    return played.wall


def longest_gap(played: Played) -> float:
    return played.longest_gap(len(played.arrivals) - 1)


def last_ttft(played: Played) -> float:
    return played.ttft(len(played.arrivals) - 1)


def decode_step(played: Played) -> float:
    """Mean seconds per step while all decode: from the last one's second token to the first one's last."""
    begin, end = max(times[1] for times in played.arrivals), min(times[-1] for times in played.arrivals)
    return (end - begin) / (len(played.arrivals[0]) - 2)


Figure_ = Callable[[Played], float]


@dataclass(frozen=True)
class Switch:
    name: str
    off: dict[str, Any]  # flags beside the common ones
    on: dict[str, Any]
    wants: Callable[[Draws], list[Want]]
    figures: dict[str, Figure_]  # the first is what it is for; others may be its price
    quick: bool = True  # part of --quick


PAGES = dict(page_size=16)
NO_OVERLAP, OVERLAP = dict(disable_overlap_schedule=True), dict(disable_overlap_schedule=False)
NO_GRAPH, GRAPH = dict(disable_cuda_graph=True), dict(graph_capture="cuda")
COMPILED = dict(enable_torch_compile=True, cuda_graph_bs_decode=[1, 8])

SWITCHES = (
    Switch("radix cache", dict(disable_radix_cache=True), {}, shared_prefix, {"wall": wall}),
    Switch(
        "chunks, and readers ride along",
        dict(chunked_prefill_size=-1),
        dict(chunked_prefill_size=256, enable_mixed_chunk=True),
        long_among_readers,
        {"longest gap of a reader": longest_gap, "TTFT of the long prompt": last_ttft},
    ),
    Switch(
        "chunks alone",  # prefill still goes first, chunk after chunk: it is mixing that lets the readers in
        dict(chunked_prefill_size=-1),
        dict(chunked_prefill_size=256),
        long_among_readers,
        {"longest gap of a reader": longest_gap, "TTFT of the long prompt": last_ttft},
        quick=False,
    ),
    Switch("prompts packed", dict(prefill_max_requests=1), {}, many_short_prompts, {"wall of 32 prompts": wall}),
    Switch(
        "batching, 8 at once",
        dict(max_running_requests=1),
        {},
        decode_of(8, context=32, steps=16),
        {"wall": wall},
    ),
    Switch("overlap", NO_OVERLAP, OVERLAP, decode_of(8), {"decode step, batch 8": decode_step}),
    Switch("pages of 16", {}, PAGES, decode_of(8, context=256), {"decode step, batch 8": decode_step}, quick=False),
    Switch(
        "numba kernels, batch 1",
        dict(attention_backend="torch_native"),
        dict(attention_backend="numba"),
        decode_of(1, context=256),
        {"decode step, batch 1": decode_step},
        quick=False,
    ),
    Switch(
        "numba kernels, batch 8",
        dict(attention_backend="torch_native"),
        dict(attention_backend="numba"),
        decode_of(8, context=256),
        {"decode step, batch 8": decode_step, "wall": wall},
    ),
    Switch(
        "numba kernels, prefill",
        dict(attention_backend="torch_native"),
        dict(attention_backend="numba"),
        one_long_prompt,
        {"TTFT of 1,024 tokens": last_ttft},
        quick=False,
    ),
    Switch("CUDA graph, batch 1", NO_GRAPH, GRAPH, decode_of(1), {"decode step, batch 1": decode_step}),
    Switch("CUDA graph, batch 16", NO_GRAPH, GRAPH, decode_of(16), {"decode step, batch 16": decode_step}, quick=False),
    Switch("compiled step, batch 1", {}, COMPILED, decode_of(1), {"decode step, batch 1": decode_step}, quick=False),
    Switch("compiled step, batch 8", {}, COMPILED, decode_of(8), {"decode step, batch 8": decode_step}, quick=False),
)


# ---- measuring --------------------------------------------------------------------------------------------


class Bench:
    def __init__(self, args: ServerArgs, config: ModelConfig, *, pairs: int, seed: int = 0, scale: float = 1.0):
        self.args = args  # as typed: every side resolves its own
        self.config = config
        self.pairs = pairs
        self.seed = seed
        self.scale = scale
        self._runners: dict[str, ModelRunner] = {}

    def runner(self, args: ServerArgs) -> ModelRunner:
        """Loaded once for all rows that agree in what a runner reads."""
        flags = {name: getattr(args, name) for name in RUNNER_FLAGS}
        key = str(flags)
        if key not in self._runners:
            self._runners[key] = load_runner(with_flags(self.args, **flags), self.config, trace=Recorder("bench"))
        return self._runners[key]

    def measure(self, switch: Switch) -> list[dict[str, Any]]:
        """A row for each figure. A side that this machine cannot have is a StartupError."""
        args = [with_flags(self.args, **flags) for flags in (switch.off, switch.on)]
        rows = []
        for pair in range(-1, self.pairs):  # the first is a warm-up

            def play(one: ServerArgs, pair: int = pair) -> Played:
                wants = switch.wants(Draws(self.config.vocab_size, self.seed + 1 + pair, 0, self.scale))
                return with_scheduler(self.runner(one), one, lambda side: side.play(wants))

            off, on, again = play(args[0]), play(args[1]), play(args[0])
            if pair >= 0:
                rows.append((off, on, again))
        return [_row(switch.name, name, figure, rows) for name, figure in switch.figures.items()]


def _row(switch: str, name: str, figure: Figure_, rows: Sequence[tuple[Played, Played, Played]]) -> dict[str, Any]:
    seconds = [tuple(figure(played) for played in row) for row in rows]
    return {
        "switch": switch,
        "figure": name,
        "off_ms": 1e3 * statistics.median(off for off, _, _ in seconds),
        "on_ms": 1e3 * statistics.median(on for _, on, _ in seconds),
        "gain": report.spread([(off + again) / 2 / on for off, on, again in seconds]),
        "noise": report.spread([again / off for off, _, again in seconds]),
    }


def table_of(rows: Sequence[dict[str, Any]], pairs: int) -> Table:
    table = Table(title=f"each mechanism off and on, median of {pairs} pairs ({report.machine_line()})")
    table.add_column("switch")
    table.add_column("figure")
    for column in ("off, ms", "on, ms", "gain", "noise"):
        table.add_column(column, justify="right")
    for row in rows:
        if "skipped" in row:
            continue
        gain, noise = row["gain"], row["noise"]
        stands_out = gain["min"] > noise["max"] or gain["max"] < noise["min"]
        style = "" if not stands_out else "green" if gain["median"] > 1 else "red"
        table.add_row(
            row["switch"],
            row["figure"],
            report.number(row["off_ms"]),
            report.number(row["on_ms"]),
            _range(gain),
            _range(noise),
            style=style,
        )
    skipped = [f"not here: {row['switch']} ({row['skipped']})" for row in rows if "skipped" in row]
    table.caption = "\n".join(skipped) or None
    return table


def _range(found: dict[str, float]) -> str:
    return f"{found['median']:.2f} ({found['min']:.2f}–{found['max']:.2f})"


def draw(figure: Figure, rows: Sequence[dict[str, Any]]) -> None:
    shown = [row for row in rows if "gain" in row][::-1]
    axes = figure.subplots()
    labels = [f"{row['switch']}: {row['figure']}" for row in shown]
    medians = [row["gain"]["median"] for row in shown]
    lows = [row["gain"]["median"] - row["gain"]["min"] for row in shown]
    highs = [row["gain"]["max"] - row["gain"]["median"] for row in shown]
    axes.barh(labels, medians, xerr=[lows, highs])
    axes.axvline(1.0, color="black", linewidth=1)
    axes.set_xscale("log")
    axes.set_xlabel("off / on: above 1 it helps")


def run_switches(
    bench: Bench, switches: Sequence[Switch], *, say: Callable[[str], None] = lambda line: None
) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for number, switch in enumerate(switches, 1):
        say(f"{number} of {len(switches)}: {switch.name} …")  # a row takes a while, the first also loads the model
        begin = time.perf_counter()
        try:
            found = bench.measure(switch)
        except (StartupError, RunVoid) as error:  # no compiler, say: the others are measured all the same
            found = [{"switch": switch.name, "skipped": str(error)}]
        rows += found
        told = found[0].get("skipped") or f"gain {_range(found[0]['gain'])}"
        say(f"{switch.name:32} {told}   [{time.perf_counter() - begin:.0f} s]")
    return rows


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="tinysrt bench switches", description="Turn each mechanism off and on, and see what it gives here."
    )
    parser.add_argument("--model-path", help="default: the demo model")
    parser.add_argument("--dtype", default="auto", choices=("auto", *DTYPES))
    parser.add_argument("--num-threads", type=int, help="of the model (default: PyTorch's choice)")
    parser.add_argument("--only", nargs="+", metavar="WORD", help="switches whose name holds one of these")
    parser.add_argument("--list", action="store_true", help="name the switches and end")
    parser.add_argument("--quick", action="store_true", help="the most telling ones, fewer pairs: below a minute")
    parser.add_argument(
        "--compile", action="store_true", help="the compiled step too: a minute more, and a C++ compiler"
    )
    parser.add_argument("--pairs", type=int, help="default 3; with --quick 2")
    parser.add_argument("--scale", type=float, help="shrinks the workloads (default 1; with --quick 0.4)")
    parser.add_argument("--seed", type=int, default=0)
    report.add_output_flags(parser)
    args = parser.parse_args(argv)
    report.check_output_flags(args)
    chosen = [
        switch
        for switch in SWITCHES
        if (
            args.only is None
            and (switch.quick or not args.quick)
            or any(word in switch.name for word in args.only or ())
        )
        and (args.compile or switch.on is not COMPILED)
    ]
    if args.list:
        for switch in chosen:
            print(f"{switch.name:32} {', '.join(switch.figures)}")
        return 0
    pairs = (2 if args.quick else 3) if args.pairs is None else args.pairs
    scale = (0.4 if args.quick else 1.0) if args.scale is None else args.scale
    if not chosen or pairs < 1 or not scale > 0:
        raise StartupError(
            "no switch has such a name; --list tells them" if not chosen else "--pairs or --scale is too small"
        )
    server_args = ServerArgs(
        model_path=args.model_path or ensure_demo_model(),
        dtype=args.dtype,
        num_threads=args.num_threads,
        context_length=4096,
        max_total_tokens=POOL_TOKENS,
    )
    config = ModelConfig.from_pretrained(str(server_args.model_path), context_length=4096, dtype=args.dtype)
    bench = Bench(server_args, config, pairs=pairs, seed=args.seed, scale=scale)
    rows = run_switches(bench, chosen, say=lambda line: print(line, file=sys.stderr))
    figures = {"model": config.model_type, "dtype": args.dtype, "pairs": pairs, "scale": scale, "rows": rows}
    report.publish(args, "switches", figures, [table_of(rows, pairs)], lambda f: draw(f, rows), argv=argv)
    return 0
