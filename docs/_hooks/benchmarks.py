"""The benchmarks page: tables made from recorded runs, so that no figure on it was ever typed.

    docs/benchmarks/NAME.json   written by `tinysrt bench … --json`: figures, machine, versions, commit, command
    {{ benchmarks:targets }}    what was promised, and what the records say
    {{ benchmarks:records }}    every record as tables, and a link to the file
    {{ benchmarks:NAME }}       one of them, without a heading

`render` is a function of the records alone. A target whose record is not there is "not recorded", never a guess.
"""

from __future__ import annotations

import json
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
    "wall_s": "wall, s",
    "cached_tokens": "cached tokens",
    "ttft_p50_ms": "TTFT p50, ms",
    "ttft_p99_ms": "TTFT p99, ms",
    "itl_p50_ms": "ITL p50, ms",
    "itl_p99_ms": "ITL p99, ms",
    "drain_s": "last arrival to last token, s",
    "longest_gap_ms": "longest gap, ms",
    "long_ttft_s": "long prompt's TTFT, s",
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
        unit = "" if target.value else "×"
        measured, verdict = "", "not recorded"
        if (found := _measured(target, records.get(target.record))) is not None:
            measured, verdict = _spread(found, unit), target.met_by(found["median"])
        bounds = [f"{sign} {_number(bound)}{unit}" for bound in (target.must, target.aim)]
        lines.append([target.workload, TITLES[target.figure], target.peer, *bounds, measured, verdict])
    return table(["", "figure", "against", ">must", ">aim", ">measured", "verdict"], lines)


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
        f"{where}; {versions}; commit `{machine['commit']}`; finished {record['finished']}. "
        f"[The record]({folder}/{name}.json).\n",
    ]
    renderers: dict[str, Callable[[Record], str]] = {"serve": _serve, "switches": _switches, "offline": _offline}
    return "\n".join([*parts, renderers.get(record["bench"], _rows)(record)]) + "\n"


def _serve(record: Record) -> str:
    names = [side["name"] for side in record["sides"]]
    ratio = [f">{names[0]} / {names[1]}"] if len(names) == 2 else []
    lines = []
    for workload, figures in record["summary"].items():
        for figure, entry in figures.items():
            cells = [_spread(entry.get(name)) for name in names]
            cells += [_spread(entry.get("ratio"))] if ratio else []
            lines.append([workload, TITLES[figure], *cells, _spread(entry.get("noise"))])
    told = [table(["", "figure", *(f">{name}" for name in names), *ratio, ">noise"], lines)]
    void = [run for run in record["runs"] if run["void"]]
    if void:
        told.append("Void: " + "; ".join(f"{run['side']} {run['workload']}: {run['void']}" for run in void) + ".\n")
    outside = [
        [
            side["name"],
            f"`{side['start']}`" if side["start"] else side["url"],
            *(
                _spread(_of([look[key] for look in side["outside"]]))
                for key in ("start_s", "rss_mib", "idle_cpu_percent")
            ),
        ]
        for side in record["sides"]
    ]
    told.append(table(["server", "started as", ">ready after, s", ">memory, MiB", ">idle, % of a core"], outside))
    return "\n".join(told)


def _switches(record: Record) -> str:
    lines = []
    for row in record["rows"]:
        if "gain" in row:
            figures = [_number(row["off_ms"]), _number(row["on_ms"]), _spread(row["gain"]), _spread(row["noise"])]
            lines.append([row["switch"], row["figure"], *figures])
    skipped = [f"{row['switch']}: {row['skipped']}" for row in record["rows"] if "skipped" in row]
    told = table(["switch", "figure", ">off, ms", ">on, ms", ">gain", ">noise"], lines)
    return told + (f"\nNot measured: {'; '.join(skipped)}.\n" if skipped else "")


def _offline(record: Record) -> str:
    lines = [[name, _spread(found)] for name, found in record["summary"].items()]
    return table(["figure", ">value"], lines)


def _rows(record: Record) -> str:
    """Any other bench: its lists of flat rows, as they are."""
    told = []
    for rows in record.values():
        if isinstance(rows, list) and rows and all(isinstance(row, dict) for row in rows):
            columns = list(dict.fromkeys(key for row in rows for key in row))
            lines = [[_cell(row.get(column)) for column in columns] for row in rows]
            told.append(table([f">{column}" for column in columns], lines))
    return "\n".join(told)


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


def _spread(found: Mapping[str, float] | None, unit: str = "") -> str:
    if found is None:
        return "·"
    told = f"{_number(found['median'])}{unit}"
    return told if found["min"] == found["max"] else f"{told} ({_number(found['min'])}–{_number(found['max'])})"


def _cell(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "·"}[value]
    return _number(value) if isinstance(value, int | float) else str(value)


def _number(value: float) -> str:
    if value == int(value):
        return f"{int(value):,}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.{2 if abs(value) < 100 else 1}f}"
