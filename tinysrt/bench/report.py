"""What every bench does with its figures: a table for people, a JSON file for programs, a plot where asked.

    figures (dict) ──┬─▶ tables (rich)      always, unless the JSON goes to stdout
                     ├─▶ --json [FILE]      with machine, versions, commit, command and load: a record
                     └─▶ --plot FILE        matplotlib, imported here and only then

A figure without its machine is an anecdote, so `record` is the only writer of JSON and always adds it. The committed
records in docs/benchmarks/ are such files; docs/_hooks/benchmarks.py turns them into the page's tables.

Invariant: nothing is measured here, and nothing here changes what was measured.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import math
import os
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
from rich.console import Console
from rich.table import Table

import tinysrt
from tinysrt.errors import StartupError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INSTALL_PLOT = "pip install 'tinysrt[bench]'"
CPU_FEATURES = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")  # what decides how fast a matmul may be
PACKAGES = ("torch", "numba", "triton")

# Draws into an empty figure.
Draw = Callable[["Figure"], None]


# ---- flags ---------------------------------------------------------------------------------------------


def add_output_flags(parser: argparse.ArgumentParser, *, plot: bool = True) -> None:
    """`--json` and `--plot`, the same for every bench."""
    where = "write the record there as well; without FILE it goes to stdout, instead of the tables"
    parser.add_argument("--json", nargs="?", const="-", metavar="FILE", help=where)
    if plot:
        parser.add_argument("--plot", metavar="FILE", help=f"draw it there (.png, .svg); needs {INSTALL_PLOT}")


def check_output_flags(args: argparse.Namespace) -> None:
    """Before minutes of measuring: can the results be written?"""
    if getattr(args, "plot", None):
        _figure_class()
    for file in (args.json, getattr(args, "plot", None)):
        if file not in (None, "-") and not Path(file).resolve().parent.is_dir():
            raise StartupError(f"no such folder: {Path(file).resolve().parent}")


def make_folder(flag: str, path: str) -> Path:
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StartupError(f"{flag} {path}: {error.strerror}") from None
    return Path(path)


def publish(
    args: argparse.Namespace,
    part: str,
    figures: dict[str, Any],
    tables: Sequence[Table] = (),
    draw: Draw | None = None,
    *,
    argv: Sequence[str],
) -> None:
    """Say what was measured, in each form that the flags ask for."""
    if args.json != "-":
        console = Console()
        if not console.is_terminal:
            console = Console(width=140)  # in a file or a pipe nothing is gained by 80 columns
        for table in tables:
            console.print(table)
    if args.json is not None:
        text = json.dumps(record(part, figures, argv), indent=1, allow_nan=False)
        if args.json == "-":
            print(text)
        else:
            Path(args.json).write_text(text + "\n", encoding="utf-8")
    if draw is not None and getattr(args, "plot", None):
        plot(args.plot, draw)


# ---- the record ------------------------------------------------------------------------------------------


def record(part: str, figures: dict[str, Any], argv: Sequence[str]) -> dict[str, Any]:
    """Six digits are more than any clock here deserves; a home folder is nobody's business."""
    whole = {
        "bench": part,
        "command": shlex.join(["tinysrt", "bench", part, *argv]),
        "finished": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        **figures,
    }
    tidied: dict[str, Any] = _tidy(whole)
    return tidied


def _tidy(value: Any) -> Any:
    match value:
        case dict():
            return {key: _tidy(item) for key, item in value.items()}
        case list() | tuple():
            return [_tidy(item) for item in value]
        case float():
            return float(f"{value:.6g}") if math.isfinite(value) else None  # JSON has no word for it
        case str():
            return value.replace(str(Path.home()), "~")
    return value


def machine() -> dict[str, Any]:
    """Where figures were taken, as far as it decides them."""
    return {
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "features": cpu_features(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpus": gpu_names(),
        "system": f"{platform.system()} {platform.machine()}",
        "load": round(psutil.getloadavg()[0], 2),  # of the last minute: our own work is in it
        "python": platform.python_version(),
        "tinysrt": tinysrt.__version__,
        "commit": commit(),
        **{name: version for name in PACKAGES if (version := package_version(name))},
    }


def machine_line() -> str:
    """One line for a table's title."""
    here = machine()
    return f"{here['cpu']}, {here['cores']} cores, Python {here['python']}, torch {here.get('torch', '?')}"


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def cpu_features() -> list[str]:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return []
    words = set(next((line for line in text.splitlines() if line.startswith("flags")), "").split())
    return [feature for feature in CPU_FEATURES if feature in words]


def gpu_names() -> list[str]:
    import torch  # not at the top: `bench serve` measures a server, and needs no PyTorch of its own until it reports

    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]


def commit() -> str | None:
    """Of the checkout this package lies in; "+" where files differ from it."""

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", *words], cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10, check=True
        ).stdout.strip()

    try:
        return git("rev-parse", "--short=12", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def package_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


# ---- numbers -----------------------------------------------------------------------------------------------


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear between the two nearest ranks, as NumPy's default; the values need no order."""
    if not values:
        raise ValueError("no values")
    ordered = sorted(values)
    rank = (len(ordered) - 1) * percent / 100
    low = int(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def number(value: float | None) -> str:
    """Four significant digits at most, and no digits that mean nothing."""
    if value is None or not math.isfinite(value):
        return "·"
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.{3 if abs(value) < 10 else 2 if abs(value) < 100 else 1}f}"


# ---- plots -------------------------------------------------------------------------------------------------


def plot(file: str, draw: Draw) -> None:
    figure = _figure_class()(figsize=(9, 5), layout="constrained")
    draw(figure)
    try:
        figure.savefig(file, dpi=150)
    except (OSError, ValueError) as error:  # an unknown suffix is a ValueError
        raise StartupError(f"--plot {file}: {error}") from None
    print(f"drawn: {file}", file=sys.stderr)


def _figure_class() -> type[Figure]:
    """`Figure` by itself, without pyplot: no global state, no display."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise StartupError(f"--plot needs matplotlib: {INSTALL_PLOT}") from None
    return Figure
