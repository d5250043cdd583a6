"""`tinysrt bench gpu`: everything that cannot be known without a GPU, checked on one in a few minutes.

    1 environment   what the chip does at best, measured now: the ceilings of all that follows
    2 kernels       every Triton kernel against float64; twice, bit for bit: a moving error is a race
    3 model         logits against transformers with the same weights: prefill, chunks, cached prefix, decode
    4 graphs        replay against the same step run eagerly, bit for bit; a step must not wait for the device
    5 overlap       on and off: the same tokens
    6 decode        time against the floor          7 prefill        time against the floor
    8 server        64 streams over loopback        9 peers          the same work by others, where installed

No argument is needed, no network and no weights: models are random, from a seed, in the shapes of Qwen3-0.6B and
Llama-3-8B. Sections run in this order, each by itself: one that fails does not stop the rest. The exit status is 0 only
if every line that can be right or wrong is right. Without a GPU nothing is checked, the word is "skipped", and the
status is 0, since nothing has failed.

gpu_correct.py holds sections 2 to 5, gpu_speed.py the others, gpu_bench.py what they share. `--device cpu --size tiny`
runs the sections on toy shapes with the reference kernels: that tests this bench, not the kernels.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import FrameType

import torch
from rich.console import Console
from rich.table import Table

from tinysrt.bench import gpu_correct, gpu_speed, report
from tinysrt.bench.gpu_bench import FAIL, FULL, PASS, SKIPPED, TINY, Bench, Line, first_line
from tinysrt.kernels.kernel_set import load_kernels

LAST_LINES = 40  # what a terminal, or whoever cuts the output, still shows


class OutOfTime(BaseException):
    """No Exception: whoever takes any error for a failure, of a kernel or of a peer, must not take this one."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises OutOfTime inside, once the time is up."""

    def ring(number: int, frame: FrameType | None) -> None:
        raise OutOfTime

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


Section = Callable[[Bench], None]


def run_section(bench: Bench, name: str, section: Section) -> None:
    """In its own try: what goes wrong becomes a line, and the next section runs."""
    left = bench.deadline - time.monotonic()
    if left <= 1:
        bench.say(Line(name, "", measured="no time left (--time-limit)", verdict=SKIPPED))
        return
    begin = time.monotonic()
    try:
        with time_limit(left):
            section(bench)
    except OutOfTime:
        bench.say(Line(name, "the rest", measured="no time left (--time-limit)", verdict=SKIPPED))
    except Exception as error:  # whatever it is, it belongs in the table
        traceback.print_exc()
        bench.say(Line(name, "", measured=first_line(error), verdict=FAIL))
    bench.details.setdefault("section_seconds", {})[name] = round(time.monotonic() - begin, 1)
    if bench.on_gpu:
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.empty_cache()


def table(lines: Sequence[Line], title: str) -> Table:
    made = Table(title=title, pad_edge=False, box=None, show_edge=False)
    for name in ("section", "case", "measured", "floor or reference", "percent or error", "verdict"):
        made.add_column(name, overflow="fold")
    for line in lines:
        made.add_row(*asdict(line).values())
    return made


def outcome(lines: Sequence[Line]) -> str:
    verdicts = {line.verdict for line in lines}
    return "NOT PASSED" if FAIL in verdicts else "passed" if PASS in verdicts else "nothing judged"


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tinysrt bench gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--time-limit", type=float, default=240.0, metavar="SECONDS", help="default 240")
    parser.add_argument("--out", default=".", metavar="DIR", help="folder of gpu-check.json; default: here")
    parser.add_argument("--sections", metavar="N", nargs="+", type=int, choices=range(1, 10), help="default: all")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to test this bench")
    parser.add_argument("--size", choices=("full", "tiny"), default="full", help="tiny: toy shapes")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    cli = parse(argv)
    if cli.device == "cuda" and not torch.cuda.is_available():
        print("There is no GPU here (PyTorch finds no CUDA device): nothing was checked. skipped")
        return 0
    sections: dict[str, Section] = {
        "1 environment": gpu_speed.environment,
        "2 kernels": gpu_correct.kernels_against_float64,
        "3 model": gpu_correct.model_against_transformers,
        "4 graphs": gpu_correct.graphs,
        "5 overlap": gpu_correct.overlap,
        "6 decode": gpu_speed.decode,
        "7 prefill": gpu_speed.prefill,
        "8 server": gpu_speed.server,
        "9 peers": gpu_speed.peers,
    }
    out = report.make_folder("--out", cli.out)  # now: if it cannot be, minutes of checks would be lost
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory(prefix="tinysrt-gpu-") as folder:
        bench = Bench(
            device=torch.device(cli.device),
            sizes=TINY if cli.size == "tiny" else FULL,
            kernels=load_kernels("triton" if cli.device == "cuda" else "torch_native"),
            folder=Path(folder),
            deadline=time.monotonic() + cli.time_limit,
        )
        for name, section in sections.items():
            if cli.sections is None or int(name[0]) in cli.sections:
                run_section(bench, name, section)
    said = outcome(bench.lines)
    figures = {"passed": said == "passed", "lines": [asdict(line) for line in bench.lines], "details": bench.details}
    args = argparse.Namespace(json=str(out / "gpu-check.json"))
    where = bench.details.get("gpu", cli.device)
    report.publish(args, "gpu", figures, argv=argv)
    console = Console(width=max(Console().width, 110))
    console.print(table(bench.lines[-(LAST_LINES - 4) :], f"{where}: {said}"))
    return 1 if said == "NOT PASSED" else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
