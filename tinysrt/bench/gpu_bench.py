"""What the sections of `tinysrt bench gpu` share: sizes, lines of the final table, and the clock. (`gpu.py` begins.)"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from tinysrt.bench import machine_rates
from tinysrt.bench.model_cost import Rates
from tinysrt.kernels.kernel_set import KernelSet
from tinysrt.model_executor.forward_batch_info import ForwardBatch
from tinysrt.model_executor.model_runner import ModelRunner

WARM_UP = 3
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


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip()}".splitlines()[0][:90]


@dataclass
class Bench:
    """What the sections share. They only add lines and details; the first that needs the rates sets them."""

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


@torch.inference_mode()
def timed_ms(work: Callable[[], Any], device: torch.device, steps: int) -> float:
    """Median of single calls."""
    for _ in range(WARM_UP):
        work()
    return statistics.median(machine_rates.seconds(work, device) for _ in range(steps)) * 1e3


def step_ms(runner: ModelRunner, batch: ForwardBatch, steps: int) -> float:
    return timed_ms(lambda: runner.forward(batch), runner.device, steps)
