"""`tinysrt bench kernels`: every kernel of every set, on the shapes of a model, timed in turns.

    reference      kernels/reference.py: the definition
    torch_native   the same, but for attention (what the backend torch_native computes for whole batches) and for the
                   projections (packed for oneDNN, where that exists)
    numba          on a CPU      ┐ only where its package is installed;
    triton         on CUDA       ┘ --kernels names what must be there

One round times each candidate once, so that whatever else the machine does meets all of them alike; a figure is the
median of the rounds. Before the clock starts each result is compared with the reference's: a fast wrong kernel is no
gain. Requests differ in length, from half of the context to one and a half, and lie at random places of the KV pool.
The pool has as many layers as fit, so that a call does not find its KV in the cache where the last call left it.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from tinysrt.bench import report
from tinysrt.bench.machine_rates import seconds
from tinysrt.bench.steps import make_batch
from tinysrt.errors import StartupError
from tinysrt.kernels.kernel_set import NAMES, REFERENCE, KernelSet, load_kernels
from tinysrt.mem_cache.memory_pool import KVPool
from tinysrt.model_executor.attention.torch_native import TorchNativeBackend
from tinysrt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from tinysrt.model_executor.layers.linear import Linear, can_pack
from tinysrt.model_executor.layers.moe import group_by_expert
from tinysrt.model_executor.layers.rotary import rope_cache
from tinysrt.model_executor.model_config import DTYPES, ModelConfig, resolve_model_path
from tinysrt.model_executor.sizing import runtime_dtype, usable_cores
from tinysrt.text.demo_model import ensure_demo_model

POOL_BYTES = 256 * 2**20  # of all layers of the bench's KV pool together
LINEAR_BYTES = 64 * 2**20  # of the layers of its projection
WRONG = 0.05  # an error above it: no rounding of any format explains it
SAMPLE_SECONDS = 1e-3  # a faster kernel is called several times in a row

Call = Callable[[], Any]


@dataclass(frozen=True)
class Case:
    kernel: str
    phase: str  # decode or prefill
    shape: str
    # The kernel of a set with its arguments, ready to be called; None: this set has none for them.
    make: Callable[[KernelSet], Call | None]
    torch_native: Call | None = None  # where the backend of this name does not call the reference


class Scene:
    """A model's shapes on a device, and the KV of the longest batch."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device, rows: int, width: int):
        self.config, self.dtype, self.device = config, dtype, device
        self.scale = config.head_dim**-0.5
        per_layer = KVPool.bytes_per_token(1, config.num_kv_heads, config.head_dim, dtype) * rows * width
        layers = max(1, min(config.num_layers, POOL_BYTES // per_layer))
        self.pool = KVPool(rows * width, 1, layers, config.num_kv_heads, config.head_dim, dtype, device)
        for buffer in (*self.pool.k_buffer, *self.pool.v_buffer):
            buffer.normal_()
        slots = torch.randperm(rows * width, dtype=torch.int32) + 1
        self.table = torch.zeros(rows + 1, width, dtype=torch.int32)
        self.table[1:] = slots.view(rows, width)
        self.table = self.table.to(device)
        self.rope_cache = rope_cache(config.head_dim, config.rope, width).to(device)

    def random(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(*shape, device=self.device).to(dtype or self.dtype)

    def layers(self) -> Iterator[tuple[Tensor, Tensor]]:
        """K and V buffers of one layer after the other, for ever."""
        return itertools.cycle(zip(self.pool.k_buffer, self.pool.v_buffer, strict=True))

    def batch(self, news: list[int], prefixes: list[int], mode: ForwardMode) -> ForwardBatch:
        return make_batch(self.table, self.config.vocab_size, news, prefixes, mode)


# ---- the cases -----------------------------------------------------------------------------------------


def decode_cases(scene: Scene, batch_size: int, context: int) -> list[Case]:
    lens = [context] if batch_size == 1 else torch.linspace(context / 2, context * 3 / 2, batch_size).int().tolist()
    batch = scene.batch([1] * batch_size, [length - 1 for length in lens], ForwardMode.DECODE)
    q = scene.random(batch_size, scene.config.num_heads, scene.config.head_dim)

    def attention(kernels: KernelSet) -> Call:
        layers = scene.layers()
        rows, ends = batch.req_pool_indices, batch.seq_lens
        return lambda: kernels.decode_attention(q, *next(layers), scene.table, rows, ends, scene.scale, None)

    shape = f"{batch_size} x {context}"
    return [
        *token_cases(scene, "decode", batch),
        linear_case(scene, "decode", batch_size),
        Case("decode_attention", "decode", shape, attention, backend_call(scene, batch, q)),
        sampling_case(scene, batch_size),
        *expert_cases(scene, "decode", batch_size),
    ]


def prefill_cases(scene: Scene, new: int, prefix: int) -> list[Case]:
    batch = scene.batch([new], [prefix], ForwardMode.EXTEND)
    q = scene.random(new, scene.config.num_heads, scene.config.head_dim)
    starts = torch.tensor([0, new], device=scene.device)
    prefixes = torch.tensor([prefix], device=scene.device)

    def attention(kernels: KernelSet) -> Call:
        layers = scene.layers()
        rows = batch.req_pool_indices
        return lambda: kernels.extend_attention(
            q, *next(layers), scene.table, rows, starts, prefixes, scene.scale, None
        )

    case = Case("extend_attention", "prefill", f"{new} after {prefix}", attention, backend_call(scene, batch, q))
    if prefix:
        return [case]  # nothing else looks at the prefix
    linear = linear_case(scene, "prefill", new)
    return [*token_cases(scene, "prefill", batch), linear, case, *expert_cases(scene, "prefill", new)]


def backend_call(scene: Scene, batch: ForwardBatch, q: Tensor) -> Call:
    """Attention as the backend torch_native computes it; rope and KV store, which come with it, left out."""
    layers, heads = len(scene.pool.k_buffer), scene.config.num_heads
    kernels = replace(REFERENCE, rope_and_store=lambda *_: q)
    backend = TorchNativeBackend(
        kernels, scene.pool, scene.table, scene.rope_cache, heads, scene.scale, [None] * layers
    )
    plan = backend.plan(batch)
    turns = itertools.cycle(range(layers))
    return lambda: backend.attend(next(turns), q, plan)


def token_cases(scene: Scene, phase: str, batch: ForwardBatch) -> list[Case]:
    """What treats each token by itself."""
    config, tokens = scene.config, len(batch.input_ids)
    heads = config.num_heads + 2 * config.num_kv_heads
    x = scene.random(tokens, config.hidden_size)
    weight = torch.ones(config.hidden_size, device=scene.device)
    qkv = scene.random(tokens, heads, config.head_dim)
    gate_up = scene.random(tokens, 2 * config.intermediate_size)

    def add_rms_norm(kernels: KernelSet) -> Call:
        residual = torch.zeros(x.shape, device=scene.device)  # its own: a kernel may write into it
        return lambda: kernels.add_rms_norm(x, residual, weight, config.rms_norm_eps)

    def rope_and_store(kernels: KernelSet) -> Call:
        layers, slots = scene.layers(), batch.out_cache_loc
        return lambda: kernels.rope_and_store(
            qkv, batch.positions, scene.rope_cache, *next(layers), slots, config.num_heads
        )

    return [
        Case("add_rms_norm", phase, f"{tokens} x {config.hidden_size}", add_rms_norm),
        Case("rope_and_store", phase, f"{tokens} x {heads} x {config.head_dim}", rope_and_store),
        Case(
            "silu_and_mul",
            phase,
            f"{tokens} x {2 * config.intermediate_size}",
            lambda kernels: lambda: kernels.silu_and_mul(gate_up),
        ),
    ]


def linear_case(scene: Scene, phase: str, tokens: int) -> Case:
    """Gate and up together, the largest projection of a layer: as F.linear, packed, and by a set's own kernel."""
    config = scene.config
    x = scene.random(tokens, config.hidden_size)
    outputs = 2 * config.intermediate_size
    copies = LINEAR_BYTES // (outputs * config.hidden_size * scene.dtype.itemsize)
    weights = [scene.random(outputs, config.hidden_size) * 0.02 for _ in range(max(1, min(copies, config.num_layers)))]

    def call(kernels: KernelSet | None) -> Call:
        layers = []
        for weight in weights:
            layers.append(Linear(config.hidden_size, [outputs]))
            layers[-1].weight = torch.nn.Parameter(weight, requires_grad=False)
            if kernels is not None:
                layers[-1].pack(kernels)
        turns = itertools.cycle(layers)
        return lambda: next(turns)(x)

    def make(kernels: KernelSet) -> Call | None:
        if kernels is REFERENCE:
            return call(None)
        own = tokens <= kernels.few_rows and scene.dtype == torch.bfloat16
        return call(kernels) if own else None

    packed = call(REFERENCE) if can_pack(weights[0]) else None
    return Case("linear", phase, f"{tokens} x {config.hidden_size} x {outputs}", make, packed)


def sampling_case(scene: Scene, rows: int) -> Case:
    logits = scene.random(rows, scene.config.vocab_size, dtype=torch.float32) * 3
    filters = [torch.full((rows,), value, device=scene.device) for value in (0.8, 50, 0.95, 0.02)]
    uniforms = torch.rand(rows, dtype=torch.float64, device=scene.device)
    return Case(
        "sample_tokens",
        "decode",
        f"{rows} x {scene.config.vocab_size}",
        lambda kernels: lambda: kernels.sample_tokens(logits, *filters, uniforms),
    )


def expert_cases(scene: Scene, phase: str, tokens: int) -> list[Case]:
    """Only a mixture of experts has them: gate and up of its experts, visited at random."""
    hf = scene.config.hf_config
    experts, width = getattr(hf, "num_experts", 0), getattr(hf, "moe_intermediate_size", 0)
    if not experts:
        return []
    chosen = torch.rand(tokens, experts).topk(hf.num_experts_per_tok).indices.to(scene.device)
    order, offsets = group_by_expert(chosen, experts)
    x = scene.random(len(order), scene.config.hidden_size)
    weight = torch.empty(experts, 2 * width, scene.config.hidden_size, dtype=scene.dtype, device=scene.device)
    weight.normal_(0, 0.02)
    shape = f"{len(order)} x {experts} x {2 * width} x {scene.config.hidden_size}"
    return [
        Case("grouped_gemm", phase, shape, lambda kernels: lambda: kernels.grouped_gemm(x, weight, offsets)),
    ]


# ---- measuring -----------------------------------------------------------------------------------------


RUNS_ON = {"numba": "cpu", "triton": "cuda"}  # torch_native runs everywhere


def candidates(
    device: torch.device, dtype: str, asked: Sequence[str] | None
) -> tuple[dict[str, KernelSet], dict[str, str]]:
    """(sets to time beside the reference, why others are not there). `dtype` as typed: on a CPU auto is not float16."""
    sets: dict[str, KernelSet] = {}
    missing: dict[str, str] = {}
    fitting = [name for name, where in RUNS_ON.items() if where == device.type]
    for name in fitting if asked is None else asked:
        if name == "torch_native":
            continue  # always there
        try:
            if name not in fitting:
                raise StartupError(f"the {name} kernels run on {RUNS_ON[name]}, not on {device.type}")
            if name == "numba" and dtype in ("half", "float16"):
                raise StartupError(f"there are no numba kernels for {dtype}")
            sets[name] = load_kernels(name)
        except StartupError as error:
            if asked is not None:
                raise
            missing[name] = str(error)
    return sets, missing


def measure(case: Case, sets: dict[str, KernelSet], rounds: int, device: torch.device) -> dict[str, Any]:
    made = {"reference": case.make(REFERENCE), "torch_native": case.torch_native}
    made |= {name: case.make(kernels) for name, kernels in sets.items()}
    calls = {name: call for name, call in made.items() if call is not None}
    results = {name: flat(call()) for name, call in calls.items()}  # all of the same layer
    errors = {name: difference(case.kernel, result, results["reference"]) for name, result in results.items()}
    repeats = {name: max(1, int(SAMPLE_SECONDS / seconds(call, device))) for name, call in calls.items()}
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            samples[name].append(seconds(lambda: [call() for _ in range(repeats[name])], device) / repeats[name])  # noqa: B023
    micro = {name: statistics.median(values) * 1e6 for name, values in samples.items()}
    return {
        "kernel": case.kernel,
        "phase": case.phase,
        "shape": case.shape,
        "us": micro,
        "min_us": {name: min(values) * 1e6 for name, values in samples.items()},
        "speedup": {name: micro["reference"] / value for name, value in micro.items()},
        "error": errors,
    }


def flat(result: Tensor | tuple[Tensor, ...]) -> Tensor:
    parts = result if isinstance(result, tuple) else (result,)
    return torch.cat([part.detach().reshape(-1).double() for part in parts])


def difference(kernel: str, got: Tensor, expected: Tensor) -> float:
    """Of tokens the share that differs; else relative, over the whole result."""
    if kernel == "sample_tokens":
        return float((got != expected).double().mean())
    return float((got - expected).norm() / expected.norm())


def is_wrong(row: dict[str, Any], name: str) -> bool:
    return not row["error"][name] <= WRONG  # NaN is wrong too


def make_table(rows: list[dict[str, Any]], names: list[str], title: str) -> Table:
    table = Table(title=title, caption="µs per call, and how many times as fast as the reference")
    table.add_column("kernel")
    table.add_column("shape")
    for name in names:
        table.add_column(name, justify="right")
    for before, row in zip([None, *rows], rows, strict=False):
        if before is not None and before["phase"] != row["phase"]:
            table.add_section()
        cells = []
        for name in names:
            if name not in row["us"]:
                cells.append("")  # nothing of its own: torch_native calls the reference, others torch_native
            elif is_wrong(row, name):
                cells.append(f"wrong: error {row['error'][name]:.1e}")
            elif name == "reference":
                cells.append(report.number(row["us"][name]))
            else:
                cells.append(f"{report.number(row['us'][name])}  {row['speedup'][name]:.1f}x")
        table.add_row(row["kernel"], row["shape"], *cells)
    return table


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tinysrt bench kernels", description=__doc__.splitlines()[0])
    parser.add_argument("--model-path", help="folder or hub id whose shapes are used; default: the demo model")
    parser.add_argument("--dtype", default="auto", choices=("auto", *DTYPES))
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    parser.add_argument("--kernels", nargs="+", choices=NAMES, help="sets; default: what this machine can run")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8, 32], help="requests that decode")
    parser.add_argument("--context", type=int, default=512, help="their positions, on average")
    parser.add_argument(
        "--prefill", type=int, default=512, help="tokens of a prompt, alone and after as many cached ones"
    )
    parser.add_argument("--threads", type=int, help="default: all cores")
    parser.add_argument("--rounds", type=int, default=11)
    report.add_output_flags(parser, plot=False)
    cli = parser.parse_args(argv)
    report.check_output_flags(cli)
    if min([*cli.batch_sizes, cli.context, cli.prefill, cli.threads or 1, cli.rounds]) < 1:
        raise StartupError("sizes, threads and rounds must be at least 1")
    if cli.device == "cuda" and not torch.cuda.is_available():
        raise StartupError("--device cuda: PyTorch sees no CUDA device here")
    return cli


@torch.inference_mode()
def main(argv: Sequence[str]) -> int:
    cli = parse(argv)
    device = torch.device(cli.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    threads = cli.threads or usable_cores()
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    sets, missing = candidates(device, cli.dtype, cli.kernels)
    path = str(resolve_model_path(cli.model_path or ensure_demo_model(), weights=False))
    config = ModelConfig.from_pretrained(path, dtype=cli.dtype, load_format="dummy")
    dtype = runtime_dtype(cli.dtype, config.dtype, device)
    width = max(cli.context * 3 // 2 + 1, 2 * cli.prefill)
    scene = Scene(config, dtype, device, max(cli.batch_sizes), width)
    cases = [case for size in cli.batch_sizes for case in decode_cases(scene, size, cli.context)]
    cases += [case for prefix in (0, cli.prefill) for case in prefill_cases(scene, cli.prefill, prefix)]
    rows = [measure(case, sets, cli.rounds, device) for case in cases]
    where = f"{threads} threads" if device.type == "cpu" else report.machine()["gpus"][0]
    name = str(dtype).removeprefix("torch.")
    table = make_table(rows, ["reference", "torch_native", *sets], f"{config.path.name}, {name}, {where}")
    figures = {"device": device.type, "dtype": name, "threads": threads, "missing": missing, "rows": rows}
    report.publish(cli, "kernels", figures, [table], argv=argv)
    for reason in missing.values():
        print(f"left out: {reason}", file=sys.stderr)
    return 1 if any(is_wrong(row, name) for row in rows for name in row["error"]) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
