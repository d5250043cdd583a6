"""Sections 2 to 5 of `tinysrt bench gpu`: is it right? (`gpu.py` says what the sections are.)

Everything here runs on a CPU as well, on toy shapes with the reference kernels; so the checks themselves are tested.
"""

from __future__ import annotations

import json
import math
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tinysrt.bench.gpu_bench import Bench, Line, first_line, step_ms
from tinysrt.bench.in_process import InProcess, with_scheduler
from tinysrt.bench.overlap import block
from tinysrt.bench.steps import decode_batch, make_batch, make_runner, prefill_batch
from tinysrt.kernels import reference
from tinysrt.messages import TokenizedGenerateReqInput
from tinysrt.model_executor.forward_batch_info import ForwardMode
from tinysrt.model_executor.layers.rotary import rope_cache
from tinysrt.model_executor.model_config import ModelConfig
from tinysrt.model_executor.model_runner import ModelRunner
from tinysrt.sampling_params import SamplingParams
from tinysrt.server_args import ServerArgs

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
LOGITS_TOLERANCE = 2e-2
DRAWS_TOLERANCE = 0.05  # share of draws that may fall on the other side of a border, by the last bit of a sum
SEED = 0


# ---- 2 kernels -------------------------------------------------------------------------------------------


def error(out: Tensor, expected: Tensor) -> float:
    size = expected.double().norm()
    return float((out.double() - expected.double()).norm() / (size if size > 0 else 1))


def worst_of(errors: list[float]) -> float:
    """NaN is the worst; `max` alone loses it among others."""
    return max(errors, key=lambda wrong: (math.isnan(wrong), wrong))


def kernels_against_float64(bench: Bench) -> None:
    found: dict[str, list[tuple[str, float, str]]] = {}
    for name, case, tolerance, call, expected in kernel_cases(bench):
        found.setdefault(name, []).append((case, *tried(call, expected, tolerance)))
    for name, cases in found.items():
        failed = [f"{case}: {fault}" for case, _, fault in cases if fault]
        what = f"{len(cases)} cases" if not failed else f"{len(failed)} of {len(cases)} wrong: {failed[0]}"
        worst = worst_of([wrong for _, wrong, _ in cases])
        bench.verdict("2 kernels", name, not failed, measured=what, reference="float64, twice", value=f"{worst:.1e}")
    bench.details["kernels"] = found


def tried(call: Callable[[], Tensor], expected: Tensor, tolerance: float) -> tuple[float, str]:
    """(error, what is wrong). A kernel that raises is wrong too, and the verdicts on the others are not lost."""
    try:
        first, second = call(), call()
        wrong = error(first, expected)
        if not wrong <= tolerance:  # NaN neither
            return wrong, "too far off"
        return wrong, "" if torch.equal(first, second) else "moves"
    except Exception as raised:  # whatever it is
        traceback.print_exc()
        return math.nan, first_line(raised)


Case = tuple[str, str, float, Callable[[], Tensor], Tensor]


def kernel_cases(bench: Bench) -> list[Case]:
    cases: list[Case] = []
    torch.manual_seed(SEED)
    for name in bench.sizes.dtypes:
        dtype = getattr(torch, name)
        for dim in bench.sizes.head_dims:
            for group in bench.sizes.groups:
                cases += attention_cases(bench, dtype, dim, group)
            cases += token_cases(bench, dtype, dim)
        cases.append(grouped_case(bench, dtype))
    return [*cases, sampling_case(bench)]


def attention_cases(bench: Bench, dtype: torch.dtype, dim: int, group: int) -> list[Case]:
    device, longest, kv_heads, page = bench.device, bench.sizes.longest, 2, 16
    news = [1, 63, 64, 65, longest // 3, 1, 17]
    prefixes = [longest - 1, 0, 5, 64, longest // 2, 0, 1]
    news, prefixes = [min(n, longest // 2) for n in news], [min(n, longest // 2 - 1) for n in prefixes]
    pages = -(-longest // page)
    rows = len(news)
    slots = (torch.randperm(rows * pages) * page).view(rows, pages, 1) + torch.arange(page) + page  # page 0: dummy
    table = torch.zeros(rows + 1, pages * page, dtype=torch.int32, device=device)
    table[1:] = slots.view(rows, -1)
    k, v = (torch.randn(page * (rows * pages + 1), kv_heads, dim, device=device).to(dtype) for _ in "kv")
    q = torch.randn(sum(news), group * kv_heads, dim, device=device).to(dtype)
    owners = torch.randperm(rows, device=device) + 1
    starts = torch.tensor([0, *torch.tensor(news).cumsum(0).tolist()], device=device)
    befores = torch.tensor(prefixes, device=device)
    lens = torch.tensor([n + p for n, p in zip(news, prefixes, strict=True)], device=device)
    single, scale = torch.randn(rows, group * kv_heads, dim, device=device).to(dtype), dim**-0.5
    named = f"{dtype}, head size {dim}, group {group}"
    kernels, tolerance = bench.kernels, TOLERANCE[dtype]

    def case(kernel: str, window: int | None) -> Case:
        news_here, befores_here = (
            (news, prefixes) if kernel == "extend_attention" else ([1] * rows, (lens - 1).tolist())
        )
        queries = q if kernel == "extend_attention" else single
        expected = expected_attention(queries, k, v, table, owners, news_here, befores_here, scale, window)

        def call() -> Tensor:
            if kernel == "extend_attention":
                return kernels.extend_attention(q, k, v, table, owners, starts, befores, scale, window)
            return kernels.decode_attention(single, k, v, table, owners, lens, scale, window)

        return kernel, named if window is None else f"{named}, window", tolerance, call, expected

    return [case(kernel, window) for kernel in ("extend_attention", "decode_attention") for window in (None, 50)]


def expected_attention(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor, rows: Tensor, news: list[int], prefixes: list[int], scale: float,
    window: int | None,
) -> Tensor:  # fmt: skip
    """In float64, a request at a time."""
    parts, start = [], 0
    for row, new, prefix in zip(rows.tolist(), news, prefixes, strict=True):
        slots = table[row, : prefix + new].long()
        group = q.shape[1] // k.shape[1]
        key, value = (x[slots].double().repeat_interleave(group, dim=1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[start : start + new].double(), key) * scale
        at = torch.arange(prefix, prefix + new, device=q.device).unsqueeze(1)
        seen = torch.arange(prefix + new, device=q.device)
        hidden = (seen > at) | (seen <= at - (window or prefix + new))
        weights = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
        parts.append(torch.einsum("hqk,khd->qhd", weights, value))
        start += new
    return torch.cat(parts)


def token_cases(bench: Bench, dtype: torch.dtype, dim: int) -> list[Case]:
    device, kernels, tolerance = bench.device, bench.kernels, TOLERANCE[dtype]
    tokens, heads, kv_heads, eps = 37, 6, 2, 1e-5

    def random(*shape: int, to: torch.dtype = dtype) -> Tensor:
        return torch.randn(*shape, device=device).to(to)

    def normed(x: Tensor, weight: Tensor) -> Tensor:
        return x / (x.pow(2).mean(dim=-1, keepdim=True) + eps).sqrt() * weight.double()

    x, weight, residual = random(tokens, 13 * dim), random(13 * dim, to=torch.float32), random(tokens, 13 * dim).float()
    many, many_weights = random(tokens, heads + 2, dim)[:, :heads], random(heads, dim, to=torch.float32)
    qkv, positions = random(tokens, heads + 2 * kv_heads, dim), torch.randint(0, 500, (tokens,), device=device)
    cache = rope_cache(dim, {"rope_type": "default", "rope_theta": 10000.0}, 500).to(device)
    slots = torch.randperm(100, device=device)[:tokens] + 1
    cos, sin = cache.double()[positions].unsqueeze(1).chunk(2, dim=-1)
    a, b = qkv.double().chunk(2, dim=-1)
    rotated = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    rotated[:, heads + kv_heads :] = qkv[:, heads + kv_heads :].double()
    gate, up = x[:, : 12 * dim].double().chunk(2, dim=-1)

    def rope() -> Tensor:
        k, v = (torch.full((101, kv_heads, dim), float("nan"), dtype=dtype, device=device) for _ in "kv")
        q = kernels.rope_and_store(qkv, positions, cache, k, v, slots, heads)
        return torch.cat((q, k[slots], v[slots]), dim=1)

    named = f"{dtype}, head size {dim}"
    return [
        ("rms_norm", named, tolerance, lambda: kernels.rms_norm(x, weight, eps), normed(x.double(), weight)),
        ("rms_norm", f"{named}, heads", tolerance, lambda: kernels.rms_norm(many, many_weights, eps),
         normed(many.double(), many_weights)),
        ("add_rms_norm", named, tolerance, lambda: kernels.add_rms_norm(x, residual.clone(), weight, eps)[0],
         normed(residual.double() + x.double(), weight)),
        ("add_rms_norm", f"{named}, sum", 1e-6, lambda: kernels.add_rms_norm(x, residual.clone(), weight, eps)[1],
         residual.double() + x.double()),
        ("rope_and_store", named, tolerance, rope, rotated),
        ("silu_and_mul", named, tolerance, lambda: kernels.silu_and_mul(x[:, : 12 * dim]), F.silu(gate) * up),
    ]  # fmt: skip


def grouped_case(bench: Bench, dtype: torch.dtype) -> Case:
    sizes = [70, 0, 1, 129, 64, 3]
    offsets = torch.tensor([0, *torch.tensor(sizes).cumsum(0).tolist()], device=bench.device)
    x = torch.randn(sum(sizes), 96, device=bench.device).to(dtype)
    weight = torch.randn(len(sizes), 80, 96, device=bench.device).to(dtype)
    parts = [rows.double() @ weight[e].double().T for e, rows in enumerate(x.split(sizes))]
    call = lambda: bench.kernels.grouped_gemm(x, weight, offsets)  # noqa: E731
    return "grouped_gemm", str(dtype), TOLERANCE[dtype], call, torch.cat(parts)


def sampling_case(bench: Bench) -> Case:
    """The error is the share of rows that draw another token than the reference."""
    rows, device = 64, bench.device
    logits = torch.randn(rows, bench.sizes.vocab, device=device) * 3
    uniforms = torch.rand(rows, dtype=torch.float64, device=device)
    top_k = torch.tensor([50, bench.sizes.vocab, 20, 1], device=device).repeat(rows // 4)
    filters = [torch.tensor(column, device=device).repeat(rows // 4) for column in FILTERS]
    temperatures, top_p, min_p = filters
    arguments = (temperatures, top_k, top_p, min_p, uniforms)
    expected = reference.sample_tokens(logits, *arguments)

    def differing() -> Tensor:
        return (bench.kernels.sample_tokens(logits, *arguments) != expected).double().mean().view(1)

    none = torch.zeros(1, device=device)
    return "sample_tokens", f"vocabulary {bench.sizes.vocab:,}", DRAWS_TOLERANCE, differing, none


FILTERS = ([0.7, 1.0, 1.3, 1.0], [0.9, 1.0, 0.5, 1.0], [0.0, 0.0, 0.01, 0.05])  # temperature, top-p, min-p


# ---- models ----------------------------------------------------------------------------------------------


def config_folder(bench: Bench, name: str) -> Path:
    """A folder with nothing but config.json: the weights are random numbers."""
    folder = bench.folder / name
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(bench.sizes.models[name]))
    return folder


def runner_of(
    bench: Bench, folder: Path, requests: int, context: int, *, graphs: list[int] | None = None, load: str = "dummy"
) -> tuple[ModelRunner, ServerArgs]:
    """A pool for `requests` requests of `context` tokens; graphs of these batch sizes, captured as the device can."""
    config = ModelConfig.from_pretrained(str(folder), context_length=context, load_format=load)
    args = ServerArgs(
        model_path=str(folder),
        device=bench.device.type,
        load_format=load,
        dtype=str(config.dtype).removeprefix("torch."),
        attention_backend=bench.backend,
        context_length=context,
        max_running_requests=requests,
        max_total_tokens=max(requests * context, 128),
        mem_fraction_static=0.95,
        num_threads=None if bench.on_gpu else 1,
        disable_cuda_graph=graphs is None,
        cuda_graph_bs_decode=graphs,
        graph_capture=None if graphs is None else "cuda" if bench.on_gpu else "tape",
    ).resolve()
    return make_runner(args, config), args


# ---- 3 model ---------------------------------------------------------------------------------------------


@torch.inference_mode()
def model_against_transformers(bench: Bench) -> None:
    """The same weights on both sides, and forced tokens: free-running text of a random model proves nothing."""
    import transformers

    name = next(iter(bench.sizes.models))
    with torch.device(bench.device):
        torch.manual_seed(SEED)
        config = transformers.AutoConfig.for_model(**bench.sizes.models[name])
        dtype = getattr(torch, bench.sizes.models[name]["dtype"])
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    folder = bench.folder / "transformers"
    model.save_pretrained(folder)
    length, steps = bench.sizes.prompt, 16
    runner, _ = runner_of(bench, folder, 2, length + steps + 8, load="auto")
    ids = torch.randint(3, config.vocab_size, (length + steps,), device=bench.device)
    expected = model(ids.unsqueeze(0)).logits[0].float()  # (length + steps, vocab)
    del model

    def forward(new: int, prefix: int, row: int = 1, mode: ForwardMode = ForwardMode.EXTEND) -> Tensor:
        """The logits behind position prefix + new - 1."""
        batch = make_batch(runner.table[[0, row]], runner.vocab_size, [new], [prefix], mode)
        rows = torch.tensor([row], device=bench.device)
        if mode is ForwardMode.DECODE:
            runner.relay[rows] = ids[prefix]
        batch = replace(batch, input_ids=ids[prefix : prefix + new], req_pool_indices=rows, sampling_info=None)
        output = runner.forward(batch)
        assert output is not None
        return output.next_token_logits[0].clone()

    half = length // 2
    found = {"whole prefill": [(length - 1, forward(length, 0))]}
    chunks = [(half - 1, forward(half, 0, row=2)), (length - 1, forward(length - half, half, row=2))]
    found["prefill in chunks"] = chunks
    runner.table[2, :half] = runner.table[1, :half]  # as the radix cache does
    found["cached prefix"] = [(length - 1, forward(length - half, half, row=2))]
    found[f"{steps} decode steps"] = [
        (length + i, forward(1, length + i, mode=ForwardMode.DECODE)) for i in range(steps)
    ]
    for case, rows in found.items():
        worst, same_top = compare_logits(rows, expected)
        right = worst <= LOGITS_TOLERANCE and same_top
        tops = "top-1 equal" if same_top else "top-1 differs beyond the error"
        where = f"transformers {transformers.__version__}"
        bench.verdict("3 model", f"{name} {case}", right, measured=tops, reference=where, value=f"{worst:.1e}")


def compare_logits(rows: list[tuple[int, Tensor]], expected: Tensor) -> tuple[float, bool]:
    """(worst relative error, whether the best token agrees wherever its lead exceeds the error)."""
    same_top = True
    for position, found in rows:
        wanted = expected[position]
        best = wanted.topk(2)
        lead, off = float(best.values[0] - best.values[1]), float((found - wanted).abs().max())
        same_top &= lead <= 2 * off or int(found.argmax()) == int(best.indices[0])
    return worst_of([error(found, expected[position]) for position, found in rows]), same_top


# ---- 4 graphs --------------------------------------------------------------------------------------------


@torch.inference_mode()
def graphs(bench: Bench) -> None:
    name, buckets = next(iter(bench.sizes.models)), bench.sizes.buckets
    before, begin = allocated(bench), time.monotonic()
    runner, _ = runner_of(bench, config_folder(bench, name), buckets[-1], 256, graphs=buckets)
    captured = runner.graphs
    assert captured is not None
    seconds, used = time.monotonic() - begin, allocated(bench) - before
    bench.say(Line("4 graphs", f"load, pool, capture of {len(buckets)}", f"{seconds:.1f} s, {used / 2**20:,.0f} MiB"))
    wrong = []
    for bucket in buckets:
        for size in sorted({bucket, max(bucket - 1, 1)}):
            batch = decode_batch(runner, size, 100)
            if captured.bucket_for(batch) != bucket:
                continue
            input_ids = runner.relay[batch.req_pool_indices]
            replayed = captured.replay(input_ids, batch, bucket).clone()
            captured.step(bucket)()  # the same step on the same static buffers, not replayed
            if not torch.equal(replayed, captured.logits[:size]):
                wrong.append(f"{size} in {bucket}")
    what = f"wrong: {', '.join(wrong)}" if wrong else f"buckets {', '.join(map(str, buckets))}"
    bench.verdict("4 graphs", "replay = eager, bit for bit", not wrong, measured=what, reference="same padded batch")
    beyond = decode_batch(runner, 1, 100)
    too_many = replace(beyond, seq_lens_cpu=[100] * (buckets[-1] + 1))
    bench.verdict("4 graphs", "largest bucket + 1 runs eagerly", captured.bucket_for(too_many) is None)
    waits = []
    batches = {
        "prefill": prefill_batch(runner, 50),
        "decode": decode_batch(runner, 1, 100),
        "prefill, sampled": prefill_batch(runner, 50, sampling=SAMPLED),  # starts the counts of the penalties
        "decode, sampled": decode_batch(runner, 1, 100, SAMPLED),
    }
    for case, batch in batches.items():
        for captured_too in (True, False):
            runner.graphs = captured if captured_too else None
            waits_for_device(bench, runner, batch)  # the first time, kernels are compiled
            reason = waits_for_device(bench, runner, batch)
            if reason:
                waits.append(f"{case}: {reason}")
    bench.verdict("4 graphs", "no step waits for the device", not waits, measured="; ".join(waits)[:80])


SAMPLED = SamplingParams(
    temperature=0.7, top_k=20, top_p=0.9, min_p=0.01, frequency_penalty=0.5, presence_penalty=0.5,
    repetition_penalty=1.2, logit_bias={3: 1.0}, sampling_seed=3,
)  # fmt: skip


def allocated(bench: Bench) -> int:
    return torch.cuda.mem_get_info()[1] - torch.cuda.mem_get_info()[0] if bench.on_gpu else 0


def waits_for_device(bench: Bench, runner: ModelRunner, batch: Any) -> str:
    """PyTorch's own check, set to raise. Without a GPU nothing can wait."""

    def step() -> None:
        logits = runner.forward(batch)
        assert logits is not None
        runner.sample(logits, batch)

    if not bench.on_gpu:
        step()
        return ""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return ""


# ---- 5 overlap -------------------------------------------------------------------------------------------


def overlap(bench: Bench) -> None:
    name = next(iter(bench.sizes.models))
    size, steps = min(8, bench.sizes.buckets[-1]), min(24, bench.sizes.stream_tokens)
    runner, args = runner_of(bench, config_folder(bench, name), size, 256, graphs=bench.sizes.buckets)
    args = replace(args, skip_tokenizer_init=True)
    tokens, gap = {}, {}

    def both(side: InProcess) -> tuple[dict[str, list[int]], float]:
        return answers(side, size, steps), block(side, size, 32, bench.sizes.steps)  # its first steps are not timed

    for on in (False, True):
        kind = replace(args, disable_overlap_schedule=not on)
        tokens[on], seconds = with_scheduler(runner, kind, both)
        gap[on] = seconds * 1e3
    bench.verdict("5 overlap", "on and off: the same tokens", tokens[True] == tokens[False],
                  measured=f"{size} requests, {steps} tokens each")  # fmt: skip
    device_ms = step_ms(runner, decode_batch(runner, size, 64), bench.sizes.steps)
    shown = f"on {gap[True]:.3f} ms, off {gap[False]:.3f} ms"
    bench.say(Line("5 overlap", f"a step of {size}, scheduler included", shown, f"device {device_ms:.3f} ms",
                   f"host gap {gap[True] - device_ms:.3f}, {gap[False] - device_ms:.3f} ms"))  # fmt: skip


def answers(side: InProcess, size: int, steps: int) -> dict[str, list[int]]:
    """Requests of different lengths, greedy and sampled, to their ends."""
    for i in range(size):
        greedy = i % 2 == 0
        params = SamplingParams(
            max_new_tokens=steps - i % 3, top_k=1 if greedy else 40, sampling_seed=i, ignore_eos=True
        )
        ids = [(i * 31 + j * 7) % 300 + 3 for j in range(20 + i)]
        side.inbox.messages.append(
            TokenizedGenerateReqInput(rid=f"a{i}", reply_to="", input_ids=ids, sampling_params=params)
        )
    outbox = side.outbox
    wanted = {f"a{i}": steps - i % 3 for i in range(size)}
    for _ in range(40 * steps):
        side.turn()
        if all(len(outbox.output_ids(rid)) >= n for rid, n in wanted.items()):
            return {rid: outbox.output_ids(rid) for rid in wanted}
    raise RuntimeError(f"{size} requests have not ended after {40 * steps} steps")
