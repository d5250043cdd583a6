"""`tinysrt bench radix`: does the prefix tree cost what it must, and no more when it is full?

Two questions, each asked of a small tree and of one with 40,000 leaves:

- a prompt of 4,096 tokens is matched and inserted, as admission and the end of its prefill do. Aim: below 1 ms;
- memory is short, and the least recently used leaf is evicted. The figure must not grow with the tree.

The tree is measured alone (`mem_cache/radix_tree.py`): no model, no requests, no other process.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import numpy as np
from rich.table import Table

from tinysrt.bench import report
from tinysrt.errors import StartupError
from tinysrt.mem_cache.radix_tree import RadixTree

_LEAF_TOKENS = 32  # a first half that others share, and a half of its own
_SHARED_HALVES = 200


@dataclass(frozen=True)
class Measured:
    operation: str
    page_size: int
    num_leaves: int
    median_us: float
    p99_us: float


def run_radix_bench(
    prompt_len: int = 4096,
    num_leaves: int = 40_000,
    page_sizes: Sequence[int] = (1, 16),
    repeats: int = 200,
) -> list[Measured]:
    rows: list[Measured] = []
    for page_size in page_sizes:
        for leaves in (max(1, num_leaves // 100), num_leaves):
            rows += measure(prompt_len, leaves, page_size, repeats)
    return rows


def table_of(rows: Sequence[Measured], prompt_len: int, repeats: int) -> Table:
    table = Table(title=f"Prefix tree, prompts of {prompt_len:,} tokens, {repeats} repeats")
    table.add_column("operation")
    for column in ("page", "leaves", "median µs", "99 % µs"):
        table.add_column(column, justify="right")
    for row in rows:
        figures = (f"{row.num_leaves:,}", f"{row.median_us:,.1f}", f"{row.p99_us:,.1f}")
        table.add_row(row.operation, str(row.page_size), *figures)
    return table


def measure(prompt_len: int, num_leaves: int, page_size: int, repeats: int) -> list[Measured]:
    tree = filled_tree(num_leaves, page_size)
    prompts = np.random.default_rng(0).integers(50_000, 100_000, size=(repeats, prompt_len))
    slots = np.arange(prompt_len, dtype=np.int32)

    def match_and_insert(i: int) -> None:
        tree.match(prompts[i, :-1])  # admission leaves the last token out
        tree.insert(prompts[i], slots)

    steps: list[tuple[str, Callable[[int], object]]] = [
        ("match + insert, new", match_and_insert),
        ("match + insert, cached", match_and_insert),  # the same prompts again
        ("evict one leaf", lambda i: tree.evict(1)),  # the oldest are the leaves of filled_tree
    ]
    rows: list[Measured] = []
    for operation, step in steps:
        times = [_microseconds(step, i) for i in range(repeats)]
        rows.append(
            Measured(operation, page_size, num_leaves, statistics.median(times), float(np.percentile(times, 99)))
        )
    return rows


def filled_tree(num_leaves: int, page_size: int) -> RadixTree:
    """Prompts in groups that share a first half; one leaf each."""
    rng = np.random.default_rng(1)
    tree = RadixTree(page_size)
    half = _LEAF_TOKENS // 2
    shared = rng.integers(0, 50_000, size=(_SHARED_HALVES, half))
    for i in range(num_leaves):
        own = np.concatenate([[i % 50_000, i // 50_000], rng.integers(0, 50_000, half - 2)])
        ids = np.concatenate([shared[i % _SHARED_HALVES], own])
        tree.insert(ids, np.arange(i * _LEAF_TOKENS, (i + 1) * _LEAF_TOKENS))
    return tree


def _microseconds(step: Callable[[int], object], i: int) -> float:
    gc.disable()  # a garbage collection would walk all nodes and be charged to the step it happens to hit
    try:
        begin = time.perf_counter()
        step(i)
        return (time.perf_counter() - begin) * 1e6
    finally:
        gc.enable()


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="tinysrt bench radix", description="Measure the prefix tree by itself.")
    parser.add_argument("--prompt-len", type=int, default=4096, help="tokens matched and inserted (default 4096)")
    parser.add_argument("--leaves", type=int, default=40_000, help="leaves in the large tree (default 40000)")
    parser.add_argument("--page-size", type=int, nargs="+", default=[1, 16], help="page sizes (default 1 16)")
    parser.add_argument("--repeats", type=int, default=200)
    report.add_output_flags(parser, plot=False)
    args = parser.parse_args(argv)
    report.check_output_flags(args)
    if min(args.prompt_len, args.leaves, *args.page_size, args.repeats) < 1:
        raise StartupError("--prompt-len, --leaves, --page-size and --repeats must be at least 1")
    rows = run_radix_bench(args.prompt_len, args.leaves, args.page_size, args.repeats)
    table = table_of(rows, args.prompt_len, args.repeats)
    report.publish(args, "radix", {"rows": [asdict(row) for row in rows]}, [table], argv=argv)
    return 0
