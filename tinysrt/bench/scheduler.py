"""`tinysrt bench scheduler`: what one decode step costs the scheduler, without any model.

A fake model that answers at once stands in, so what is left is the loop itself: receive, choose the batch, allocate a
slot for each request, build the ForwardBatch, append the tokens, check for ends, make the messages. On a GPU overlap
hides this time if it is shorter than the forward; on a CPU it is added to every step.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from rich.table import Table

from tinysrt.bench import report
from tinysrt.bench.fake_model import FakeEngine
from tinysrt.errors import StartupError


def measure(
    *, batch_size: int, page_size: int, radix: bool, overlap: bool, steps: int, prompt: int = 128
) -> dict[str, Any]:
    """Decode `batch_size` requests for `steps` steps; milliseconds per step."""
    per_request = -(-(prompt + steps + 100) // page_size) * page_size
    engine = FakeEngine(
        check=False,
        max_total_num_tokens=2 * per_request * batch_size,
        max_running_requests=batch_size,
        context_len=2 * per_request,
        disable_overlap_schedule=not overlap,
        disable_radix_cache=not radix,
        page_size=page_size,
        chunked_prefill_size=-1,
        max_prefill_tokens=1 << 20,
    )
    for i in range(batch_size):
        ids = [(i * 7919 + j) % 1000 for j in range(prompt)]
        engine.add(f"r{i}", ids, max_new_tokens=steps + 50, ignore_eos=True)
    for _ in range(20):
        engine.step()
    assert len(engine.scheduler.seats.running_batch) == batch_size, "all requests decode before the clock starts"
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        engine.step()
        times.append((time.perf_counter() - start) * 1e3)
    engine.close()
    return {
        "batch_size": batch_size,
        "page_size": page_size,
        "radix": radix,
        "overlap": overlap,
        "min_ms": min(times),
        "median_ms": statistics.median(times),
        "p99_ms": sorted(times)[int(len(times) * 0.99)],
    }


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="tinysrt bench scheduler", description=__doc__.splitlines()[0])
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--steps", type=int, default=500)
    report.add_output_flags(parser, plot=False)
    args = parser.parse_args(argv)
    report.check_output_flags(args)
    if min(*args.batch_sizes, args.steps) < 1:
        raise StartupError("--batch-sizes and --steps must be at least 1")
    torch.set_num_threads(1)
    rows = [
        measure(batch_size=size, page_size=page, radix=radix, overlap=overlap, steps=args.steps)
        for size in args.batch_sizes
        for page, radix, overlap in ((1, True, False), (16, True, False), (1, False, False), (1, True, True))
    ]
    table = Table(title=f"scheduler time per decode step, fake model ({report.machine_line()})")
    for name in ("batch", "page", "radix", "overlap", "min ms", "median ms", "p99 ms"):
        table.add_column(name, justify="right")
    for row in rows:
        switches = [
            str(row["batch_size"]),
            str(row["page_size"]),
            *("on" if row[k] else "off" for k in ("radix", "overlap")),
        ]
        table.add_row(*switches, *(f"{row[k]:.3f}" for k in ("min_ms", "median_ms", "p99_ms")))
    report.publish(args, "scheduler", {"steps": args.steps, "rows": rows}, [table], argv=argv)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
