"""Sections 1 and 6 to 9 of `tinysrt bench gpu`: how fast is it, and how fast could it be?

A floor is what cannot be avoided: bytes that a step has to read, by the read rate measured in section 1, or operations
by the matmul rate, whichever is longer (`model_cost.py`). Times are taken by events on the device, the median of at
least twenty after warm-up. Nothing here passes or fails, but for the server, which must answer and stop.
"""

from __future__ import annotations

import asyncio
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import cycle
from typing import Any

import psutil
import torch
import torch.nn.functional as F

from tinysrt.bench import machine_rates, report
from tinysrt.bench.dialects import DIALECTS, Answer, Client
from tinysrt.bench.gpu_bench import MISSING, SKIPPED, Bench, Line, first_line, step_ms, timed_ms
from tinysrt.bench.gpu_correct import config_folder, runner_of
from tinysrt.bench.managed import ManagedServer
from tinysrt.bench.model_cost import ModelCost, Rates, Work
from tinysrt.bench.steps import decode_batch, prefill_batch
from tinysrt.model_executor.model_config import ModelConfig
from tinysrt.model_executor.model_runner import ModelRunner

# ---- 1 environment ---------------------------------------------------------------------------------------


def environment(bench: Bench) -> None:
    machine = report.machine()
    name = torch.cuda.get_device_name() if bench.on_gpu else machine["cpu"]
    about = "CPU"
    if bench.on_gpu:
        major, minor = torch.cuda.get_device_capability()
        memory = torch.cuda.get_device_properties(0).total_memory / 2**30
        about = f"sm_{major}{minor}, {memory:.0f} GiB, driver {driver_version()}, CUDA {torch.version.cuda}"
    versions = ", ".join(f"{package} {machine[package]}" for package in ("torch", "triton") if package in machine)
    bench.details["gpu"] = f"{name}, {versions}"
    bench.say(Line("1 environment", name[:40], about, versions))
    rates_of(bench)


def driver_version() -> str:
    """NVML says it; PyTorch's own binding needs a package that may be absent."""
    try:
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return "unknown"


def rates_of(bench: Bench) -> Rates:
    """Measured for whoever asks first: with --sections that may be section 6 or 7."""
    if bench.rates is None:
        dtype = torch.bfloat16 if bench.on_gpu else torch.float32
        bench.rates = rates = Rates(
            read=machine_rates.read_rate(bench.device, *(() if bench.on_gpu else (64,))),
            matmul=machine_rates.matmul_rate(bench.device, dtype),
        )
        shown = f"{rates.read / 1e9:,.0f} GB/s; {rates.matmul / 1e12:,.1f} TFLOP/s {str(dtype)[6:]}"
        bench.say(Line("1 environment", "copy; matmul", shown, "the ceilings below"))
        bench.details["rates"] = {"read": rates.read, "matmul": rates.matmul}
    return bench.rates


# ---- 6 decode, 7 prefill ---------------------------------------------------------------------------------


def percent(floor_s: float, found_ms: float) -> str:
    return f"{100 * floor_s * 1e3 / found_ms:.0f} % of floor"


def decode(bench: Bench) -> None:
    rates, batches, context = rates_of(bench), bench.sizes.decode_batches, bench.sizes.context
    rows = bench.details.setdefault("decode", [])
    for name in bench.sizes.models:
        folder = config_folder(bench, name)
        config = ModelConfig.from_pretrained(str(folder), load_format="dummy")
        cost = ModelCost.of(config, config.dtype)
        fitting = [n for n in batches if fits(bench, cost, n * context)]
        for n in batches:
            if n not in fitting:
                bench.say(Line("6 decode", f"{name} batch {n}", "not enough memory", verdict=SKIPPED))
        if not fitting:
            continue
        runner, _ = runner_of(bench, folder, fitting[-1], context, graphs=fitting)
        captured = runner.graphs
        for n in fitting:
            batch, work = decode_batch(runner, n, context), cost.decode(n, context)
            with_graph = step_ms(runner, batch, bench.sizes.steps)
            runner.graphs = None
            without = step_ms(runner, batch, bench.sizes.steps)
            runner.graphs = captured
            floor = work.floor(rates)
            rows.append({"model": name, "batch": n, "graph_ms": with_graph, "eager_ms": without, "bytes": work.bytes,
                         "floor_ms": floor * 1e3, "tokens_per_s": n / with_graph * 1e3})  # fmt: skip
            shown = f"{with_graph:.3f} ms (no graph {without:.3f}), {n / with_graph * 1e3:,.0f} tok/s"
            about = f"{floor * 1e3:.3f} ms, {work.bytes / 1e9:.2f} GB"
            bench.say(Line("6 decode", f"{name} batch {n}", shown, about, percent(floor, with_graph)))
        for n in fitting:
            attention_alone(bench, runner, config, n, context, name)
        del runner, captured
        if bench.on_gpu:
            torch.cuda.empty_cache()


def fits(bench: Bench, cost: ModelCost, tokens: int) -> bool:
    if not bench.on_gpu:
        return True
    return cost.weight_bytes * 1.1 + cost.kv_bytes_per_token * tokens < torch.cuda.mem_get_info()[0] * 0.85


@torch.inference_mode()
def attention_alone(bench: Bench, runner: ModelRunner, config: ModelConfig, n: int, context: int, name: str) -> None:
    """One layer's decode attention; the layers in turn, so that a small batch does not find its KV in the cache."""
    batch, pool = decode_batch(runner, n, context), runner.kv_pool
    q = torch.randn(n, config.num_heads, config.head_dim, device=bench.device).to(runner.dtype)
    layers = cycle(zip(pool.k_buffer, pool.v_buffer, strict=True))
    lens, rows, scale = batch.seq_lens, batch.req_pool_indices, config.head_dim**-0.5
    calls = 8  # one is too short for an event
    kernel = bench.kernels.decode_attention

    def work() -> None:
        for _ in range(calls):
            kernel(q, *next(layers), runner.table, rows, lens, scale, None)

    floor = n * context * pool.bytes_per_token(1, config.num_kv_heads, config.head_dim, runner.dtype)
    found = timed_ms(replayed(bench, work), bench.device, bench.sizes.steps) / calls
    seconds = floor / rates_of(bench).read
    bench.details.setdefault("attention", []).append({"model": name, "batch": n, "us": found * 1e3})
    bench.say(
        Line("6 decode", f"{name} attention, {n}", f"{found * 1e3:.0f} µs", f"{seconds * 1e6:.0f} µs",
             percent(seconds, found))
    )  # fmt: skip


def replayed(bench: Bench, work: Callable[[], None]) -> Callable[[], None]:
    """Captured, so that the time between launches does not count."""
    if not bench.on_gpu:
        return work
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def prefill(bench: Bench) -> None:
    rates = rates_of(bench)
    for name in bench.sizes.models:
        folder = config_folder(bench, name)
        config = ModelConfig.from_pretrained(str(folder), load_format="dummy")
        cost = ModelCost.of(config, config.dtype)
        requests, tokens = (max(column) for column in zip(*bench.sizes.prefills, strict=True))
        if not fits(bench, cost, requests * tokens):
            bench.say(Line("7 prefill", name, "not enough memory", verdict=SKIPPED))
            continue
        runner, _ = runner_of(bench, folder, requests, tokens)
        for count, new in bench.sizes.prefills:
            work: Work = cost.prefill(new, count)
            found = step_ms(runner, prefill_batch(runner, new, count), max(bench.sizes.steps // 4, 2))
            rate, floor = work.flops / found * 1e3 / 1e12, work.floor(rates)
            bench.details.setdefault("prefill", []).append(
                {"model": name, "requests": count, "tokens": new, "ms": found, "tflop_s": rate, "floor_ms": floor * 1e3}
            )
            bench.say(Line("7 prefill", f"{name} {count} x {new}", f"{found:.2f} ms, {rate:.1f} TFLOP/s",
                           f"{floor * 1e3:.2f} ms", percent(floor, found)))  # fmt: skip
        del runner
        if bench.on_gpu:
            torch.cuda.empty_cache()


# ---- 8 server --------------------------------------------------------------------------------------------


def server(bench: Bench) -> None:
    """The real server, and streamed requests over loopback: half of each prompt is shared by all."""
    sizes, name = bench.sizes, next(iter(bench.sizes.models))
    words = [
        sys.executable, "-m", "tinysrt.cli", "serve", "--model-path", str(config_folder(bench, name)), "--load-format",
        "dummy", "--skip-tokenizer-init", "--port", "{port}", "--device", bench.device.type,
    ]  # fmt: skip
    words += [] if bench.on_gpu else ["--num-threads", "1"]
    log = bench.folder / "server.log"
    before = {process.pid for process in psutil.process_iter()}
    with ManagedServer(shlex.join(words), "http://127.0.0.1:{port}", log, start_timeout=150.0) as running:
        client = Client(running.url, DIALECTS["sglang"], timeout=60.0)
        generator = torch.Generator().manual_seed(1)
        vocab, half = sizes.models[name]["vocab_size"], sizes.stream_prompt // 2
        draw = lambda count: torch.randint(3, vocab, (count,), generator=generator).tolist()  # noqa: E731
        shared = draw(half)
        prompts = [shared + draw(sizes.stream_prompt - half) for _ in range(sizes.streams)]
        bench.say(Line("8 server", "ready", f"{running.start_seconds:.1f} s"))
        asyncio.run(client.ask(draw(16), 4))  # first launches
        for turn in ("first round", "second round"):
            begin = time.perf_counter()
            done = asyncio.run(all_at_once(client, prompts, sizes.stream_tokens))
            said = summary(done, time.perf_counter() - begin)
            bench.details.setdefault("server", []).append({"round": turn, **said})
            shown = (
                f"TTFT {said['ttft_ms'][0]:.0f} / {said['ttft_ms'][1]:.0f} ms, "
                f"between {said['gap_ms'][0]:.1f} / {said['gap_ms'][1]:.1f} ms (p50 / p99)"
            )
            bench.verdict("8 server", f"{sizes.streams} streams, {turn}", True, measured=shown,
                          reference=f"{said['tokens_per_s']:,.0f} tok/s",
                          value=f"{said['cached']:.0%} of prompts cached")  # fmt: skip
        family = {process.pid for process in running.family()}
    left = [pid for pid in family - before if psutil.pid_exists(pid)]
    bench.verdict("8 server", "a clean stop", not left, measured=f"processes left: {len(left)}")


async def all_at_once(client: Client, prompts: list[list[int]], tokens: int) -> list[Answer]:
    return await asyncio.gather(*(client.ask(prompt, tokens, stream=True) for prompt in prompts))


def summary(answers: list[Answer], seconds: float) -> dict[str, Any]:
    def p50_p99(values: list[float]) -> tuple[float, float]:
        values = values or [0.0]
        return report.percentile(values, 50) * 1e3, report.percentile(values, 99) * 1e3

    return {
        "ttft_ms": p50_p99([answer.ttft for answer in answers]),
        "gap_ms": p50_p99([gap for answer in answers for gap in answer.gaps]),
        "tokens_per_s": sum(answer.completion_tokens for answer in answers) / seconds,
        "cached": sum(a.cached_tokens or 0 for a in answers) / sum(a.prompt_tokens or 1 for a in answers),
    }


# ---- 9 peers ---------------------------------------------------------------------------------------------


def peers(bench: Bench) -> None:
    """Others at the same work. A peer that is absent, or fails, says nothing about us."""
    for name, peer in {
        "torch flash attention": flash_attention,
        "torch varlen attention, paged": varlen_attention,
        "transformers continuous batching": continuous_batching,
    }.items():
        try:
            peer(bench, name)
        except (ImportError, AttributeError, NotImplementedError) as error:
            bench.say(Line("9 peers", name, str(error).splitlines()[0][:60], verdict=MISSING))
        except Exception as error:  # somebody else's code: a line, not our failure
            bench.say(Line("9 peers", name, first_line(error), verdict=SKIPPED))


@torch.inference_mode()
def flash_attention(bench: Bench, name: str) -> None:
    """One prompt, 32 query heads on 8 KV heads of 128: our extend kernel on pages, theirs on contiguous KV."""
    tokens, heads, kv_heads, dim = max(n for _, n in bench.sizes.prefills), 32, 8, 128
    dtype = torch.bfloat16 if bench.on_gpu else torch.float32
    q, k, v = (torch.randn(tokens, n, dim, device=bench.device).to(dtype) for n in (heads, kv_heads, kv_heads))
    table = torch.randperm(tokens, device=bench.device).int().view(1, -1)
    numbers = [torch.tensor(x, device=bench.device) for x in ([0], [0, tokens], [0])]
    ours = timed_ms(lambda: bench.kernels.extend_attention(q, k, v, table, *numbers, dim**-0.5, None), bench.device, 5)
    batched_q, batched_k, batched_v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    theirs = timed_ms(
        lambda: F.scaled_dot_product_attention(batched_q, batched_k, batched_v, is_causal=True, enable_gqa=True),
        bench.device,
        5,
    )
    flops = 2 * heads * dim * tokens * tokens  # 4 per pair, half of the square
    shown = f"{theirs:.3f} ms, {flops / theirs / 1e9:.0f} TFLOP/s"
    bench.say(Line("9 peers", f"{name} {torch.__version__}", shown, f"ours {ours:.3f} ms, {tokens} tokens",
                   f"we take {ours / theirs:.2f}x"))  # fmt: skip


PEER_PAGE = 256  # positions; what the peer's kernel asks for


@torch.inference_mode()
def varlen_attention(bench: Bench, name: str) -> None:
    """A decode step of one layer, by the paged call that newer versions of PyTorch have; our pages lie as theirs."""
    from torch.nn.attention.varlen import varlen_attn  # ImportError: this version has none

    n, heads, kv_heads, dim = bench.sizes.decode_batches[-1], 32, 8, 128
    context = max(bench.sizes.context, PEER_PAGE)
    pages = context // PEER_PAGE
    k, v = (torch.randn(n * pages, PEER_PAGE, kv_heads, dim, device=bench.device).bfloat16() for _ in "kv")
    q = torch.randn(n, heads, dim, device=bench.device).bfloat16()
    blocks = torch.randperm(n * pages, device=bench.device).int().view(n, pages)
    within = torch.arange(PEER_PAGE, device=bench.device)
    table = (blocks.unsqueeze(2) * PEER_PAGE + within).view(n, -1).int()
    rows = torch.arange(n, device=bench.device)
    lens = torch.full((n,), pages * PEER_PAGE, device=bench.device)
    bounds, used = torch.arange(n + 1, device=bench.device).int(), lens.int()
    paged: dict[str, Any] = {"seqused_k": used, "block_table": blocks, "window_size": (-1, 0), "enable_gqa": True}
    call: Callable[..., Any] = varlen_attn  # its keywords came one version after the other
    theirs = timed_ms(lambda: call(q, k, v, bounds, None, 1, pages * PEER_PAGE, **paged), bench.device, 20)
    flat_k, flat_v = (x.view(-1, kv_heads, dim) for x in (k, v))
    ours = timed_ms(
        lambda: bench.kernels.decode_attention(q, flat_k, flat_v, table, rows, lens, dim**-0.5, None), bench.device, 20
    )
    bench.say(Line("9 peers", f"{name} {torch.__version__}", f"{theirs:.3f} ms", f"ours {ours:.3f} ms, {n} x {context}",
                   f"we take {ours / theirs:.2f}x"))  # fmt: skip


def continuous_batching(bench: Bench, name: str) -> None:
    import transformers

    sizes = bench.sizes
    model_name = next(iter(sizes.models))
    config = transformers.AutoConfig.for_model(**sizes.models[model_name])
    dtype = getattr(torch, sizes.models[model_name]["dtype"])
    with torch.device(bench.device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    if not hasattr(model, "generate_batch"):
        raise NotImplementedError(f"transformers {transformers.__version__} has no generate_batch")
    generator = torch.Generator().manual_seed(1)
    prompts = [
        torch.randint(3, config.vocab_size, (sizes.stream_prompt,), generator=generator).tolist()
        for _ in range(sizes.streams)
    ]
    settings = transformers.GenerationConfig(
        max_new_tokens=sizes.stream_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    begin = time.perf_counter()
    done = model.eval().generate_batch(inputs=prompts, generation_config=settings)
    seconds = time.perf_counter() - begin
    made = sum(len(output.generated_tokens) for output in done.values())
    bench.say(Line("9 peers", f"{name} {transformers.__version__}", f"{report.number(made / seconds)} tok/s",
                   f"{sizes.streams} x {sizes.stream_prompt} in, {sizes.stream_tokens} out"))  # fmt: skip
