"""The benchmarks page says what the records say."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.docs.conftest import ROOT, load
from tinysrt.bench.serve import Run, Side, summarize
from tinysrt.bench.workloads import FIGURES


@pytest.fixture(scope="module")
def page() -> ModuleType:
    pytest.importorskip("mkdocs", reason="the docs extra is not installed")
    return load(ROOT / "docs" / "_hooks" / "benchmarks.py")


MACHINE = dict(cpu="Test CPU", cores=2, features=["avx2"], system="Linux", commit="abc", tinysrt="0.1", python="3.11")


def record(**ratios: float) -> dict[str, Any]:
    """Ours against theirs; `W1_decode_tok_s=2.0`: twice of theirs in both pairs."""
    runs = []
    for name, ratio in ratios.items():
        workload, _, figure = name.partition("_")
        for pair in range(2):
            runs.append(Run("ours", pair, 0, workload, 0.0, {figure: 10.0 * ratio * (pair + 1)}))
            runs.append(Run("theirs", pair, 0, workload, 0.0, {figure: 10.0 * (pair + 1)}))
    look = dict(start_s=4.5, rss_mib=900, idle_cpu_percent=0.5)
    sides = [Side("ours", "http://x", "sglang", "tinysrt serve", None, outside=[look, look]),
             Side("theirs", "http://y", "openai", None, None)]  # fmt: skip
    return {
        "bench": "serve", "command": "tinysrt bench serve", "finished": "2026-01-01", "machine": MACHINE,
        "sides": [vars(side) for side in sides], "runs": [vars(run) for run in runs], "summary": summarize(runs, sides),
    }  # fmt: skip


def lines(text: str, *words: str) -> list[str]:
    return [line for line in text.splitlines() if all(word in line for word in words)]


def test_a_ratio_is_judged_by_its_bounds(page: ModuleType) -> None:
    for ratio, verdict in ((0.9, "**missed**"), (1.1, "met"), (1.4, "aim reached")):
        (line,) = lines(page.targets({"vllm": record(W1_decode_tok_s=ratio)}), "| W1 | decode |", "≥ 1.00×", "vLLM")
        assert line.endswith(f"| {ratio:.2f}× | {verdict} |")
    (line,) = lines(page.targets({"vllm": record(W3_wall_s=1.2)}), "| W3 |", "wall", "vLLM")
    assert "≤ 1.50×" in line and line.endswith("| met |")
    (line,) = lines(page.targets({"vllm": record(W3_cached_tokens=3000.0)}), "| W3 |", "cached")
    assert "45,000 (30,000–60,000) | aim reached |" in line  # our own figure, whatever the other one's


def test_without_a_record_nothing_is_claimed(page: ModuleType) -> None:
    assert page.render("switches", {}) == "*(No run is recorded yet.)*\n"
    judged = lines(page.targets({}), "not recorded")
    assert len(judged) == len(page.TARGETS)


def test_every_figure_has_the_title_that_the_bench_prints(page: ModuleType) -> None:
    assert {name: figure.title for name, figure in FIGURES.items()} == page.TITLES
    assert {target.figure for target in page.TARGETS} <= set(FIGURES)


def test_a_record_is_shown_with_its_machine_its_command_and_its_void_runs(page: ModuleType) -> None:
    made = record(W2_output_tok_s=1.5)
    made["runs"][0]["void"] = "a request got 3 tokens instead of 4"
    text = page.render("records", {"vllm": made})
    assert "### vllm" in text and "Test CPU, 2 cores" in text and "```bash\ntinysrt bench serve\n```" in text
    assert "| workload | figure | ours | theirs | ours / theirs | noise |" in text
    assert "| W2 | output, tok/s | 22.5 (15.0–30.0) | 15 (10–20) | 1.50× | · |" in text
    assert "Void: ours W2: a request got 3 tokens instead of 4." in text
    assert "| ours | 4.50 | 900 | 0.50 |" in text and "\n- ours: `tinysrt serve`\n- theirs: http://y\n" in text


def test_switches_and_other_records_become_tables(page: ModuleType) -> None:
    common = dict(command="c", finished="f", machine=MACHINE)
    spread = dict(median=2.0, min=1.5, max=2.5)
    row = dict(switch="radix cache", figure="wall", off_ms=20.0, on_ms=10.0, gain=spread, noise=spread)
    skipped = dict(switch="numba kernels", skipped="no numba")
    text = page.render("records", {"switches": dict(common, bench="switches", rows=[row, skipped])})
    assert "| radix cache | wall | 20 | 10 | 2.00× (1.50–2.50) | 2.00× (1.50–2.50) |" in text
    assert "Not measured: numba kernels: no numba." in text
    us, speedup = dict(reference=12.5, numba=5.0), dict(reference=1.0, numba=2.5)
    rows = [dict(kernel="silu_and_mul", phase="decode", shape="1 x 3072", us=us, speedup=speedup)]
    text = page.render("kernels", {"kernels": dict(common, bench="kernels", rows=rows)})
    assert "| phase | kernel | shape | reference, µs | numba, µs |" in text
    assert "| decode | silu_and_mul | 1 x 3072 | 12.5 (1.00×) | 5 (2.50×) |" in text
    rows = [dict(phase="decode", batch=8, bytes=280_756_000, floor_ms=4.751, limited_by="memory")]
    text = page.render("roofline", {"roofline": dict(common, bench="roofline", rows=rows)}, "../b")
    assert "(../b/roofline.json)" in text and "| phase | batch | read, MB | floor, ms | limit |" in text
    assert "|---|---:|---:|---:|---|" in text and "| decode | 8 | 281 | 4.75 | memory |" in text


@pytest.mark.parametrize(
    ("value", "number", "ratio"),
    [
        (1, "1", "1.00×"),
        (0.98193, "0.98", "0.98×"),
        (39.6049, "39.6", "39.6×"),
        (1703.7, "1,704", "1,704×"),
        (0.00412, "0.0041", "0.0041×"),
        (0.0, "0", "0.00×"),
    ],
)
def test_numbers_have_the_digits_that_say_something(page: ModuleType, value: float, number: str, ratio: str) -> None:
    assert (page._number(value), page._ratio(value)) == (number, ratio)


def test_the_committed_records_are_whole(page: ModuleType) -> None:
    records = page.read_records(ROOT / "docs" / "benchmarks")
    shown = page.render("targets", records) + page.render("records", records)
    heads = [
        line for line, rule in zip(shown.splitlines(), shown.splitlines()[1:], strict=False) if rule.startswith("|--")
    ]
    assert heads and [head for head in heads if "_" in head or "|  |" in head] == [], "columns have names and units"
    for name, one in records.items():
        assert one["machine"]["commit"], name
        assert "/root/" not in Path(ROOT / "docs" / "benchmarks" / f"{name}.json").read_text()
