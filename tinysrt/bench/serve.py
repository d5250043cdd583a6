"""`tinysrt bench serve`: the workloads W1 to W5 against a running server, or two servers in turn.

    tinysrt bench serve --url http://127.0.0.1:30000                     measure one that runs
    tinysrt bench serve --start "tinysrt serve --port {port}" …          start, measure, stop; again for each pair
    tinysrt bench serve --start "…" --compare-start "…" --compare-dialect openai --pairs 3

A comparison on a machine that other people use is a comparison of neighbors in time:

    pair 1:  A  A' B      pair 2:  A  B      pair 3:  A  B  …
             └──┴─ the noise floor: the same server against itself
             └─────┴─ a ratio                └──┴─ a ratio          quoted: the median of the ratios, and their range

A difference smaller than what A differs from itself is no difference. Both sides of a pair get the same prompts; every
pair has new ones, and so has A', because a prefix cache remembers.

Invariant: a run in which a request failed, or got another number of tokens than asked for, is void: it appears as such
in tables and record, enters no median, and makes the exit code 1.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import shutil
import signal
import sys
import tempfile
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import psutil
import uvloop
from rich.table import Table

from tinysrt.bench import report
from tinysrt.bench.connection import HttpFailed, call
from tinysrt.bench.dialects import DIALECTS, Client, RunVoid
from tinysrt.bench.managed import ManagedServer
from tinysrt.bench.workloads import FIGURES, WORKLOADS, Draws, Figures, warm_up
from tinysrt.errors import StartupError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

T = TypeVar("T")
ASK_TIMEOUT = 30.0  # seconds for a question about the server itself
DEFAULT_URL, DIALECT, OTHER = "http://127.0.0.1:30000", "sglang", "B"


@dataclass
class Side:
    """One of the two servers."""

    name: str
    url: str
    dialect: str
    start: str | None  # the command, if we start it
    model: str | None  # as requests name it; asked from the server if not given
    about: dict[str, Any] = field(default_factory=dict)  # what it says of itself
    outside: list[dict[str, Any]] = field(default_factory=list)  # start-up, memory, idle cost of each start


@dataclass
class Run:
    side: str
    pair: int
    repetition: int  # 1: the second A of a noise pair
    workload: str
    load: float = 0.0  # of the machine, when it began
    figures: Figures = field(default_factory=dict)
    void: str | None = None


@dataclass(frozen=True)
class Plan:
    workloads: list[str]
    pairs: int
    noise: int  # how many of the pairs run A twice
    seed: int
    scale: float
    vocab_size: int | None
    timeout: float
    logs: Path

    def order(self, sides: Sequence[Side]) -> Iterator[tuple[int, int, Side]]:
        """(pair, repetition, side), in the order in which they run."""
        for pair in range(self.pairs):
            yield pair, 0, sides[0]
            if pair < self.noise:
                yield pair, 1, sides[0]
            for side in sides[1:]:
                yield pair, 0, side


def measure(sides: Sequence[Side], plan: Plan) -> Iterator[Run]:
    """Every run, in the order of the plan. The vocabulary is the first server's: both sides get the same prompts."""
    vocab_size = plan.vocab_size
    greeted: list[str] = []  # sides that have answered once
    for pair, repetition, side in plan.order(sides):
        names = list(plan.workloads)
        try:
            with running(side, plan) as (url, server):
                run(introduce(side, url))
                vocab_size = vocab_size or vocabulary(side)
                client = Client(url, DIALECTS[side.dialect], side.model or "default", plan.timeout)
                if side.name not in greeted or server is not None:
                    run(greet(side, client, Draws(vocab_size, plan.seed + pair, 1000 + repetition, plan.scale)))
                    greeted.append(side.name)
                while names:
                    draws = Draws(vocab_size, plan.seed + pair, repetition, plan.scale, names[0])
                    yield one_run(client, draws, Run(side.name, pair, repetition, names.pop(0)))
                if server is not None:
                    side.outside.append(server.look())
        except StartupError as error:
            if side.name not in greeted:
                raise  # it has never worked: nothing to compare
            for name in names:  # it has, and the other rounds are not lost
                yield Run(side.name, pair, repetition, name, void=str(error))


def one_run(client: Client, draws: Draws, done: Run) -> Run:
    done.load = round(psutil.getloadavg()[0], 2)
    try:
        done.figures = run(WORKLOADS[done.workload](client, draws))
    except RunVoid as error:
        done.void = str(error)
    return done


async def greet(side: Side, client: Client, draws: Draws) -> None:
    try:
        await warm_up(client, draws)
    except RunVoid as error:
        raise StartupError(f"{side.name} does not answer as it should: {error}") from None


def run(work: Coroutine[Any, Any, T]) -> T:
    """On uvloop: the client shares the cores with the server that it measures."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


@contextmanager
def termination_as_interrupt() -> Iterator[None]:
    """SIGTERM (of `timeout`, say) ends the servers that we started and keeps the figures, as Ctrl-C does."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def running(side: Side, plan: Plan) -> Iterator[tuple[str, ManagedServer | None]]:
    if side.start is None:
        yield side.url.rstrip("/"), None
        return
    with ManagedServer(side.start, side.url, plan.logs / f"{side.name}.log") as server:
        yield server.url, server


async def introduce(side: Side, url: str) -> None:
    """Who is it? Fills `about`, and the model's name if the flags gave none. Servers know different paths of these."""
    for path, wanted in (
        ("/model_info", ("model_path", "vocab_size")),  # tinysrt, SGLang
        ("/server_info", ("version", "attention_backend", "dtype", "chunked_prefill_size", "num_threads", "page_size")),
        ("/version", ("version",)),  # vLLM
        ("/props", ("build_info", "total_slots", "model_path")),  # llama.cpp
    ):
        try:
            _, said = await call(url, "GET", path, timeout=ASK_TIMEOUT)
        except HttpFailed:
            continue
        if isinstance(said, dict):
            side.about |= {key: said[key] for key in wanted if key in said}
    try:
        _, said = await call(url, "GET", "/v1/models", timeout=ASK_TIMEOUT)
        card = said["data"][0]
    except HttpFailed as error:
        raise StartupError(f"{side.name} ({url}): {error}") from None
    except (KeyError, IndexError, TypeError):
        card = {}
    side.model = side.model or card.get("id")
    side.about.setdefault("model_path", card.get("root"))
    if n_vocab := (card.get("meta") or {}).get("n_vocab"):  # llama.cpp
        side.about["vocab_size"] = n_vocab


def vocabulary(side: Side) -> int:
    """From what the server says, or from its model's config.json if that lies on this machine."""
    if size := side.about.get("vocab_size"):
        return int(size)
    for folder in (side.about.get("model_path"), side.model):
        config = Path(str(folder)) / "config.json"
        if config.is_file() and (size := json.loads(config.read_text(encoding="utf-8")).get("vocab_size")):
            return int(size)
    raise StartupError(f"{side.name} does not say how large its vocabulary is: give --vocab-size")


# ---- what came out ---------------------------------------------------------------------------------------


def summarize(runs: Sequence[Run], sides: Sequence[Side]) -> dict[str, Any]:
    """workload → figure → medians of each side, ratios of the pairs (A / B) and of A with itself."""
    good = {(run.side, run.pair, run.repetition, run.workload): run.figures for run in runs if run.void is None}
    names = [side.name for side in sides]
    result: dict[str, Any] = {}
    for workload in dict.fromkeys(run.workload for run in runs):
        of_workload = {key[:3]: figures for key, figures in good.items() if key[3] == workload}
        figures: dict[str, Any] = {}
        for figure in FIGURES:
            values = {key: value for key, run in of_workload.items() if (value := run.get(figure)) is not None}
            mine = [[value for (side, _, repetition), value in values.items() if side == name and not repetition]
                    for name in names]  # fmt: skip
            if not any(mine):
                continue
            entry: dict[str, Any] = {
                name: report.spread(found) for name, found in zip(names, mine, strict=True) if found
            }
            noise = ratios(values, (names[0], 1), (names[0], 0))
            if noise:
                entry["noise"] = report.spread(noise)
            if len(names) == 2 and (found := ratios(values, (names[0], 0), (names[1], 0))):
                entry["ratio"] = report.spread(found)
            figures[figure] = entry
        result[workload] = figures
    return result


def ratios(values: dict[tuple[str, int, int], float], over: tuple[str, int], under: tuple[str, int]) -> list[float]:
    """(side, repetition) against (side, repetition), pair by pair. A pair with a missing or zero half is left out."""
    found = []
    for pair in sorted({pair for _, pair, _ in values}):
        top, bottom = values.get((over[0], pair, over[1])), values.get((under[0], pair, under[1]))
        if top is not None and bottom:
            found.append(top / bottom)
    return found


def one_line(run: Run) -> str:
    told = run.void and f"VOID: {run.void}"
    told = told or ", ".join(f"{FIGURES[name].title} {report.number(value)}" for name, value in run.figures.items())
    return f"pair {run.pair + 1}{'′' if run.repetition else ''} {run.side:12} {run.workload:4} {told}"


def tables(summary: dict[str, Any], sides: Sequence[Side]) -> list[Table]:
    compared = len(sides) == 2
    table = Table(title=f"median of the runs ({report.machine_line()})")
    table.add_column("workload")
    table.add_column("figure")
    for side in sides:
        table.add_column(side.name, justify="right")
    if compared:
        table.add_column(f"{sides[0].name} / {sides[1].name}", justify="right")
    table.add_column("noise (A / A)", justify="right")
    for workload, figures in summary.items():
        for figure, entry in figures.items():
            better = "↑" if FIGURES[figure].higher_is_better else "↓"
            cells = [workload, f"{FIGURES[figure].title} {better}"]
            cells += [_cell(entry.get(side.name)) for side in sides]
            cells += [_cell(entry.get("ratio"))] if compared else []
            table.add_row(*cells, _cell(entry.get("noise")))
        table.add_section()
    return [table]


def _cell(values: dict[str, float] | None) -> str:
    if values is None:
        return "·"
    told = report.number(values["median"])
    return (
        told
        if values["min"] == values["max"]
        else f"{told} ({report.number(values['min'])}–{report.number(values['max'])})"
    )


def draw(figure: Figure, summary: dict[str, Any], sides: Sequence[Side]) -> None:
    """One bar a figure: how much better A is than B (above 1: better), with the range of the pairs."""
    bars = [
        (f"{workload} {FIGURES[name].title}", FIGURES[name].higher_is_better, entry["ratio"])
        for workload, figures in summary.items()
        for name, entry in figures.items()
        if "ratio" in entry
    ]
    axes = figure.subplots()
    if not bars:  # one server alone: its figures, each on its own scale
        rows = [(f"{workload} {FIGURES[name].title}", entry[sides[0].name]["median"])
                for workload, figures in summary.items() for name, entry in figures.items()]  # fmt: skip
        axes.barh([label for label, _ in rows], [value for _, value in rows])
        axes.set_xscale("log")
        axes.set_title(sides[0].name)
        return
    medians, lows, highs = [], [], []
    for _, higher, ratio in bars:
        ends = sorted(ratio[key] if higher else 1 / ratio[key] for key in ("min", "max"))
        middle = ratio["median"] if higher else 1 / ratio["median"]
        medians.append(middle)
        lows.append(middle - ends[0])
        highs.append(ends[1] - middle)
    axes.barh([label for label, _, _ in bars], medians, xerr=[lows, highs])
    axes.axvline(1.0, color="black", linewidth=1)
    axes.set_xlabel(f"times better: {sides[0].name} against {sides[1].name}")


# ---- the command -----------------------------------------------------------------------------------------


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="tinysrt bench serve",
        description="Measure a server, or two in turn, with the workloads W1 to W5.",
        epilog="With --start the server is started for each round and stopped after it; {port} in the command is a "
        "free port, and the default URL follows it.",
    )
    for prefix, who, name in (("", "the server", "A"), ("compare-", "the other server", OTHER)):
        group = parser.add_argument_group(who)
        here = "none: no comparison" if prefix else DEFAULT_URL
        spelling = "--compare" if prefix else "--url"
        group.add_argument(
            spelling, dest=f"{prefix}url".replace("-", "_"), metavar="URL", help=f"where (default {here})"
        )
        group.add_argument(f"--{prefix}start", metavar="COMMAND", help="start it with this command")
        group.add_argument(f"--{prefix}name", metavar="NAME", default=name, help=f"in tables (default {name})")
        group.add_argument(f"--{prefix}dialect", choices=DIALECTS, default=DIALECT, help=f"default {DIALECT}")
        group.add_argument(f"--{prefix}model", metavar="NAME", help="as requests name it (default: asked from it)")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=["W1", "W2", "W3"], metavar="W",
                        help=f"of {', '.join(WORKLOADS)} (default W1 W2 W3)")  # fmt: skip
    parser.add_argument("--pairs", type=int, default=3, help="rounds (default 3)")
    parser.add_argument("--noise", type=int, help="rounds that run the first server twice (default 1 in a comparison)")
    parser.add_argument("--seed", type=int, default=0, help="of the first round; each round adds one")
    parser.add_argument("--scale", type=float, default=1.0, help="shrinks every workload (default 1: as specified)")
    parser.add_argument("--vocab-size", type=int, metavar="N", help="default: asked from the first server")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds without a byte (default 600)")
    parser.add_argument(
        "--logs",
        metavar="DIR",
        help="folder for logs of started servers (default: a temporary one, kept if a run is void)",
    )
    report.add_output_flags(parser)
    args = parser.parse_args(argv)
    report.check_output_flags(args)
    sides, plan = sides_of(args), plan_of(args)
    runs: list[Run] = []
    try:
        with termination_as_interrupt():
            for done in measure(sides, plan):
                runs.append(done)
                print(one_line(done), file=sys.stderr)
    except KeyboardInterrupt:
        if not runs:
            raise
        print("interrupted: what follows is of the runs until now", file=sys.stderr)
    summary = summarize(runs, sides)
    figures = {
        "sides": [dataclasses.asdict(side) for side in sides],
        "summary": summary,
        "runs": [dataclasses.asdict(run) for run in runs],
    }
    report.publish(args, "serve", figures, tables(summary, sides), lambda f: draw(f, summary, sides), argv=argv)
    void = [run for run in runs if run.void is not None]
    if void:
        print(f"{len(void)} of {len(runs)} runs are void:", file=sys.stderr)
        for run in void:
            print("  " + one_line(run), file=sys.stderr)
    elif args.logs is None:
        shutil.rmtree(plan.logs)  # nothing went wrong: nobody will look
    return 1 if void else 0


def sides_of(args: argparse.Namespace) -> list[Side]:
    def url(given: str | None, start: str | None, default: str) -> str:
        return given or ("http://127.0.0.1:{port}" if start and "{port}" in start else default)

    sides = [Side(args.name, url(args.url, args.start, DEFAULT_URL), args.dialect, args.start, args.model)]
    if args.compare_url or args.compare_start:
        if args.name == args.compare_name:
            raise StartupError(f"both servers are called {args.name}: give --compare-name another")
        where = url(args.compare_url, args.compare_start, "")
        if not where:
            raise StartupError("--compare-start needs {port} in its command, or --compare URL")
        sides.append(Side(args.compare_name, where, args.compare_dialect, args.compare_start, args.compare_model))
    elif args.compare_model or args.compare_name != OTHER or args.compare_dialect != DIALECT:
        raise StartupError("there is no other server to compare with: give --compare URL or --compare-start")
    return sides


def plan_of(args: argparse.Namespace) -> Plan:
    if args.pairs < 1 or not args.scale > 0:
        raise StartupError("--pairs must be at least 1, and --scale above 0")
    compared = bool(args.compare_url or args.compare_start)
    logs = report.make_folder("--logs", args.logs or tempfile.mkdtemp(prefix="tinysrt-bench-"))
    return Plan(
        workloads=args.workloads,
        pairs=args.pairs,
        noise=min(args.pairs, (1 if compared else 0) if args.noise is None else args.noise),
        seed=args.seed,
        scale=args.scale,
        vocab_size=args.vocab_size,
        timeout=args.timeout,
        logs=logs,
    )
