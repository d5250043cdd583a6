"""The benchmarks page: tables made from recorded runs, so that no figure on it was ever typed.

    docs/benchmarks/NAME.json   written by `tinysrt bench … --json`: figures, machine, versions, commit, command
    {{ benchmarks:targets }}    what was promised, and what the records say
    {{ benchmarks:records }}    every record as tables, and a link to the file
    {{ benchmarks:NAME }}       one of them, without a heading

Columns have names with units, numbers some three digits, ratios a ×. A wide table scrolls in a box of its own
(assets/site.css keeps numbers on one line).

`render` is a function of the records alone. A target whose record is not there is "not recorded", never a guess.
"""

from __future__ import annotations

import json
import math
import posixpath
import re
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

Record = Mapping[str, Any]
_MACRO = re.compile(r"^([ \t]*)\{\{ *benchmarks:([\w-]+) *\}\}$", re.M)

TITLES = {
    "ttft_ms": "TTFT, ms",
    "decode_tok_s": "decode, tok/s",
    "output_tok_s": "output, tok/s",
    "wall_s": "wall time, s",
    "cached_tokens": "cached tokens",
    "ttft_p50_ms": "TTFT p50, ms",
    "ttft_p99_ms": "TTFT p99, ms",
    "itl_p50_ms": "ITL p50, ms",
    "itl_p99_ms": "ITL p99, ms",
    "drain_s": "last arrival to last token, s",
    "longest_gap_ms": "longest gap, ms",
    "long_ttft_s": "long prompt's TTFT, s",
}

# Columns of other benches for which `heading` is not enough: name, and the size of its unit.
COLUMNS = {
    "read_gb_s": ("memory read, GB/s", 1.0),
    "float32_gflop_s": ("float32, GFLOP/s", 1.0),
    "bfloat16_gflop_s": ("bfloat16, GFLOP/s", 1.0),
    "context": ("context, tokens", 1.0),
    "bytes": ("read, MB", 1e6),
    "flops": ("computed, GFLOP", 1e9),
    "limited_by": ("limit", 1.0),
    "percent": ("reached, %", 1.0),
}


@dataclass(frozen=True)
class Target:
    """`must` and `aim` bound the ratio tinysrt / peer, or with `value` tinysrt's own figure."""

    record: str  # docs/benchmarks/NAME.json
    workload: str
    figure: str
    peer: str
    must: float
    aim: float
    at_most: bool = False
    value: bool = False

    def met_by(self, measured: float) -> str:
        def reached(bound: float) -> bool:
            return measured <= bound if self.at_most else measured >= bound

        return "aim reached" if reached(self.aim) else "met" if reached(self.must) else "**missed**"


VLLM, SGLANG = "vLLM CPU 0.32.0", "SGLang 0.5.23, torch_native"
TARGETS = (
    Target("vllm", "W1", "decode_tok_s", VLLM, 1.0, 1.3),
    Target("vllm-compiled", "W1", "decode_tok_s", VLLM + "; ours compiled", 1.2, 1.5),
    Target("vllm", "W1", "ttft_ms", VLLM, 1.5, 1.2, at_most=True),
    Target("vllm", "W2", "output_tok_s", VLLM, 0.65, 1.0),
    Target("vllm", "W3", "wall_s", VLLM, 1.5, 1.0, at_most=True),
    Target("vllm", "W3", "cached_tokens", "of 39,936", 26_112, 32_256, value=True),
    Target("vllm", "W3B", "wall_s", VLLM, 1.2, 0.9, at_most=True),
    Target("vllm", "W3B", "cached_tokens", "SGLang's 10,728", 10_728, 10_729, value=True),
    Target("vllm", "W4", "ttft_p50_ms", VLLM, 1.5, 1.0, at_most=True),
    Target("vllm", "W4", "itl_p50_ms", VLLM, 1.3, 1.0, at_most=True),
    Target("vllm-w5-512", "W5", "longest_gap_ms", VLLM + ", 512 tokens; ours 512", 1.4, 1.0, at_most=True),
    Target("vllm-w5-256", "W5", "longest_gap_ms", VLLM + ", 512 tokens; ours 256", 0.9, 0.6, at_most=True),
    Target("chunking-w5", "W5", "longest_gap_ms", "tinysrt without chunks", 0.3, 0.2, at_most=True),
    Target("sglang", "W1", "decode_tok_s", SGLANG, 2.0, 3.0),
    Target("sglang", "W2", "output_tok_s", SGLANG, 2.3, 3.0),
    Target("sglang", "W3", "wall_s", SGLANG, 0.4, 0.25, at_most=True),
    Target("sglang", "W3B", "wall_s", SGLANG, 0.5, 0.5, at_most=True),
    Target("sglang-w5", "W4", "ttft_p50_ms", SGLANG, 0.5, 0.5, at_most=True),
    Target("sglang-w5", "W4", "itl_p50_ms", SGLANG, 0.5, 0.5, at_most=True),
    Target("sglang-w5", "W5", "longest_gap_ms", SGLANG + "; ours mixed", 0.5, 0.5, at_most=True),
    Target("llamacpp", "W1", "decode_tok_s", "llama.cpp; ours compiled", 0.55, 0.7),
    Target("llamacpp", "W2", "output_tok_s", "llama.cpp", 1.2, 1.6),
)


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    if "{{ benchmarks:" not in markdown:
        return markdown
    records = read_records(Path(config.docs_dir) / "benchmarks")
    folder = posixpath.relpath("benchmarks", posixpath.dirname(page.file.src_uri) or ".")
    return _MACRO.sub(lambda match: textwrap.indent(render(match[2], records, folder), match[1]), markdown)


def read_records(folder: Path) -> dict[str, Record]:
    return {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in sorted(folder.glob("*.json"))}


def render(what: str, records: Mapping[str, Record], folder: str = "benchmarks") -> str:
    """`folder`: where the records lie, seen from the page."""
    if what == "targets":
        return targets(records)
    if what == "records":
        return "\n".join(f"### {name}\n\n{section(name, one, folder)}" for name, one in records.items())
    return section(what, records[what], folder) if what in records else "*(No run is recorded yet.)*\n"


# ---- targets -------------------------------------------------------------------------------------------


def targets(records: Mapping[str, Record]) -> str:
    lines = []
    for target in TARGETS:
        sign = "≤" if target.at_most else "≥"
        measured, verdict = "", "not recorded"
        if (found := _measured(target, records.get(target.record))) is not None:
            measured, verdict = _spread(found, ratio=not target.value), target.met_by(found["median"])
        bounds = [
            f"{sign} {_number(bound)}" if target.value else f"{sign} {_ratio(bound)}"
            for bound in (target.must, target.aim)
        ]
        figure = TITLES[target.figure] if target.value else TITLES[target.figure].partition(",")[0]
        lines.append([target.workload, figure, target.peer, *bounds, measured, verdict])
    return table(["workload", "figure", "against", ">must", ">aim", ">measured", "verdict"], lines)


def _measured(target: Target, record: Record | None) -> Mapping[str, float] | None:
    if record is None:
        return None
    entry = record["summary"].get(target.workload, {}).get(target.figure, {})
    found: Mapping[str, float] | None = entry.get(record["sides"][0]["name"] if target.value else "ratio")
    return found


# ---- records -------------------------------------------------------------------------------------------


def section(name: str, record: Record, folder: str) -> str:
    machine = record["machine"]
    versions = ", ".join(f"{key} {machine[key]}" for key in ("tinysrt", "python", "torch", "numba") if key in machine)
    where = f"{machine['cpu']}, {machine['cores']} cores ({', '.join(machine['features'])}), {machine['system']}"
    parts = [
        f"```bash\n{record['command']}\n```\n",
        f"{where}; {versions}; commit `{machine['commit']}`; finished {record['finished'].partition('T')[0]}. "
        f"[The record]({folder}/{name}.json).\n",
    ]
    renderers: dict[str, Callable[[Record], str]] = {
        "serve": _serve,
        "switches": _switches,
        "offline": _offline,
        "kernels": _kernels,
    }
    return "\n".join([*parts, renderers.get(record["bench"], _rows)(record)]) + "\n"


def _serve(record: Record) -> str:
    names = [side["name"] for side in record["sides"]]
    ratio = [f">{names[0]} / {names[1]}"] if len(names) == 2 else []
    lines = []
    for workload, figures in record["summary"].items():
        for figure, entry in figures.items():
            cells = [_spread(entry.get(name)) for name in names]
            cells += [_spread(entry.get("ratio"), ratio=True)] if ratio else []
            lines.append([workload, TITLES[figure], *cells, _spread(entry.get("noise"), ratio=True)])
    told = [table(["workload", "figure", *(f">{name}" for name in names), *ratio, ">noise"], lines)]
    void = [run for run in record["runs"] if run["void"]]
    if void:
        told.append("Void: " + "; ".join(f"{run['side']} {run['workload']}: {run['void']}" for run in void) + ".\n")
    outside = [
        [
            side["name"],
            *(
                _spread(_of([look[key] for look in side["outside"]]))
                for key in ("start_s", "rss_mib", "idle_cpu_percent")
            ),
        ]
        for side in record["sides"]
    ]
    told.append(table(["server", ">ready after, s", ">memory, MiB", ">idle, % of a core"], outside))
    told += [
        f"- {side['name']}: " + (f"`{side['start'].strip()}`" if side["start"] else side["url"])
        for side in record["sides"]
    ]
    return "\n".join(told) + "\n"


def _switches(record: Record) -> str:
    lines = []
    for row in record["rows"]:
        if "gain" in row:
            gains = [_spread(row[name], ratio=True) for name in ("gain", "noise")]
            lines.append([row["switch"], row["figure"], _number(row["off_ms"]), _number(row["on_ms"]), *gains])
    skipped = [f"{row['switch']}: {row['skipped']}" for row in record["rows"] if "skipped" in row]
    told = table(["switch", "figure", ">off, ms", ">on, ms", ">gain", ">noise"], lines)
    return told + (f"\nNot measured: {'; '.join(skipped)}.\n" if skipped else "")


def _offline(record: Record) -> str:
    lines = [[name, _spread(found)] for name, found in record["summary"].items()]
    return table(["figure", ">value"], lines)


def _kernels(record: Record) -> str:
    names = list(dict.fromkeys(name for row in record["rows"] for name in row["us"]))
    lines = []
    for row in record["rows"]:
        cells = [
            f"{_number(row['us'][name])} ({_ratio(row['speedup'][name])})" if name in row["us"] else "·"
            for name in names
        ]
        lines.append([row["phase"], row["kernel"], row["shape"], *cells])
    return table(["phase", "kernel", "shape", *(f">{name}, µs" for name in names)], lines)


def _rows(record: Record) -> str:
    """Any other bench: its lists of flat rows, a column for each key."""
    told = []
    for rows in record.values():
        if isinstance(rows, list) and rows and all(isinstance(row, dict) for row in rows):
            keys = list(dict.fromkeys(key for row in rows for key in row))
            words = {key for key in keys if any(isinstance(row.get(key), str) for row in rows)}
            columns = [heading(key) if key in words else f">{heading(key)}" for key in keys]
            told.append(
                table(columns, [[_cell(row.get(key), COLUMNS.get(key, ("", 1.0))[1]) for key in keys] for row in rows])
            )
    return "\n".join(told)


def heading(key: str) -> str:
    """`floor_ms` is said "floor, ms"."""
    if key in COLUMNS:
        return COLUMNS[key][0]
    stem, _, unit = key.rpartition("_")
    return f"{stem.replace('_', ' ')}, {unit}" if stem and unit in ("s", "ms", "us") else key.replace("_", " ")


# ---- cells ---------------------------------------------------------------------------------------------


def table(columns: list[str], lines: list[list[str]]) -> str:
    """A column whose name begins with > is flush right."""
    head = "| " + " | ".join(column.lstrip(">") for column in columns) + " |"
    rule = "|" + "|".join("---:" if column.startswith(">") else "---" for column in columns) + "|"
    body = ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]
    return "\n".join([head, rule, *body]) + "\n"


def _of(values: list[float]) -> Mapping[str, float] | None:
    ordered = sorted(values)
    return {"median": ordered[len(ordered) // 2], "min": ordered[0], "max": ordered[-1]} if values else None


def _spread(found: Mapping[str, float] | None, *, ratio: bool = False) -> str:
    """The median, and the range where there is one, with as many decimals as suit the median."""
    if found is None:
        return "·"
    median, low, high = (found[name] for name in ("median", "min", "max"))
    whole = not ratio and all(value == int(value) for value in (median, low, high))
    decimals = 0 if whole else _decimals(median)
    told = f"{median:,.{decimals}f}{'×' if ratio else ''}"
    return told if low == high else f"{told} ({low:,.{decimals}f}–{high:,.{decimals}f})"


def _cell(value: Any, unit: float = 1.0) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "·"}[value]
    return _number(value / unit if unit != 1 else value) if isinstance(value, int | float) else str(value)


def _number(value: float) -> str:
    """Three digits tell enough of a measurement; whole numbers stay whole."""
    return f"{value:,.{0 if value == int(value) else _decimals(value)}f}"


def _ratio(value: float) -> str:
    return f"{value:,.{_decimals(value)}f}×"


def _decimals(value: float) -> int:
    size = abs(value)
    return 0 if size >= 100 else 1 if size >= 10 else 2 if size >= 0.1 or not size else 1 - math.floor(math.log10(size))
