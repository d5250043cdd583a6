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

gpu_correct.py holds sections 2 to 5, gpu_speed.py the others. `--device cpu --size tiny` runs the sections that a CPU
can run on toy shapes with the reference kernels: that tests this bench, not the kernels.
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
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from tinysrt.bench import report
from tinysrt.bench.model_cost import Rates
from tinysrt.kernels.kernel_set import KernelSet, load_kernels

LAST_LINES = 40  # what a terminal, or whoever cuts the output, still shows
PASS, FAIL, SEEN, SKIPPED, MISSING = "pass", "FAIL", "", "skipped", "missing"

QWEN3_06B = dict(
    model_type="qwen3", vocab_size=151_936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28,
    num_attention_heads=16, num_key_value_heads=8, head_dim=128, tie_word_embeddings=True, rms_norm_eps=1e-6,
    rope_theta=1_000_000.0, max_position_embeddings=40_960, architectures=["Qwen3ForCausalLM"], dtype="bfloat16",
)  # fmt: skip
LLAMA3_8B = dict(
    model_type="llama", vocab_size=128_256, hidden_size=4096, intermediate_size=14_336, num_hidden_layers=32,
    num_attention_heads=32, num_key_value_heads=8, head_dim=128, tie_word_embeddings=False, rms_norm_eps=1e-5,
    rope_theta=500_000.0, max_position_embeddings=8192, architectures=["LlamaForCausalLM"], dtype="bfloat16",
)  # fmt: skip
TOY = dict(
    QWEN3_06B, vocab_size=40_960, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=32, max_position_embeddings=512, dtype="float32",
)  # fmt: skip


@dataclass(frozen=True)
class Sizes:
    models: dict[str, dict[str, Any]]  # name → config.json; the first one is used where one is enough
    dtypes: list[str]  # of the kernel cases
    head_dims: list[int]
    groups: list[int]
    longest: int  # positions of the longest request in the kernel cases
    vocab: int  # of the sampling case
    prompt: int  # section 3
    buckets: list[int]
    decode_batches: list[int]
    context: int
    prefills: list[tuple[int, int]]  # (requests, tokens)
    steps: int  # repetitions that are timed
    streams: int
    stream_prompt: int
    stream_tokens: int


FULL = Sizes(
    models={"Qwen3-0.6B": QWEN3_06B, "Llama-3-8B": LLAMA3_8B},
    dtypes=["bfloat16", "float16"],
    head_dims=[64, 128],
    groups=[1, 2, 3, 4, 8],
    longest=1025,
    vocab=151_936,
    prompt=300,
    buckets=[1, 2, 4, 8, 16, 64, 256],
    decode_batches=[1, 64, 256],
    context=1024,
    prefills=[(1, 8192), (8, 1024)],
    steps=20,
    streams=64,
    stream_prompt=512,
    stream_tokens=128,
)
TINY = Sizes(
    models={"toy": TOY},
    dtypes=["float32"],
    head_dims=[32],
    groups=[1, 3],
    longest=40,
    vocab=300,
    prompt=40,
    buckets=[1, 2, 4],
    decode_batches=[1, 4],
    context=64,
    prefills=[(1, 64), (2, 32)],
    steps=3,
    streams=4,
    stream_prompt=24,
    stream_tokens=6,
)


@dataclass(frozen=True)
class Line:
    """One row of the final table. `value`: an error, or percent of the floor."""

    section: str
    case: str
    measured: str = ""
    reference: str = ""
    value: str = ""
    verdict: str = SEEN


@dataclass
class Bench:
    """What the sections share. They only add lines and details; section 1 sets the rates."""

    device: torch.device
    sizes: Sizes
    kernels: KernelSet
    folder: Path  # for checkpoints and logs, removed at the end
    deadline: float  # time.monotonic()
    lines: list[Line] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)  # for the JSON file
    rates: Rates | None = None

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def backend(self) -> str:
        return self.kernels.name

    def say(self, line: Line) -> None:
        self.lines.append(line)
        print(" · ".join(part for part in asdict(line).values() if part), file=sys.stderr, flush=True)

    def verdict(self, section: str, case: str, right: bool, **more: str) -> None:
        self.say(Line(section, case, **more, verdict=PASS if right else FAIL))


class OutOfTime(Exception):
    pass


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
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        bench.say(Line(name, "", measured=f"{type(error).__name__}: {reason}"[:90], verdict=FAIL))
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


def passed(lines: Sequence[Line]) -> bool:
    return all(line.verdict != FAIL for line in lines) and any(line.verdict == PASS for line in lines)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tinysrt bench gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--time-limit", type=float, default=240.0, metavar="SECONDS", help="default 240")
    parser.add_argument("--out", default=".", metavar="DIR", help="folder of gpu-check.json; default: here")
    parser.add_argument("--sections", metavar="N", nargs="+", type=int, help="only these; default: all nine")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to test this bench")
    parser.add_argument("--size", choices=("full", "tiny"), default="full", help="tiny: toy shapes")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    from tinysrt.bench.gpu_correct import graphs, kernels_against_float64, model_against_transformers, overlap
    from tinysrt.bench.gpu_speed import decode, environment, peers, prefill, server

    cli = parse(argv)
    if cli.device == "cuda" and not torch.cuda.is_available():
        print("There is no GPU here (PyTorch finds no CUDA device): nothing was checked. skipped")
        return 0
    sections: dict[str, Section] = {
        "1 environment": environment,
        "2 kernels": kernels_against_float64,
        "3 model": model_against_transformers,
        "4 graphs": graphs,
        "5 overlap": overlap,
        "6 decode": decode,
        "7 prefill": prefill,
        "8 server": server,
        "9 peers": peers,
    }
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
    right = passed(bench.lines)
    out = Path(cli.out)
    out.mkdir(parents=True, exist_ok=True)
    figures = {"passed": right, "lines": [asdict(line) for line in bench.lines], "details": bench.details}
    args = argparse.Namespace(json=str(out / "gpu-check.json"))
    where = bench.details.get("gpu", cli.device)
    report.publish(args, "gpu", figures, argv=argv)
    console = Console(width=max(Console().width, 110))
    console.print(table(bench.lines[-(LAST_LINES - 4) :], f"{where}: {'passed' if right else 'NOT PASSED'}"))
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
