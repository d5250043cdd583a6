"""Forwards of a real ModelRunner without a scheduler: the same step again and again, as long as one likes to measure.

The KV of all positions before the step stands in the pool already, as random numbers: what attention computes is
nonsense, what it costs is not. (Zeros would not do: the untouched memory of a CPU is one page of zeros, read from the
cache.) A step does not grow the sequences, so every repetition has the same context.

    row i + 1   slots  1 + i * length … of positions 0 … length - 1      requests lie one after the other in the pool
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import torch
from torch import Tensor

from tinysrt.bench.machine_rates import seconds
from tinysrt.mem_cache.memory_pool import KVPool
from tinysrt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from tinysrt.model_executor.model_config import ModelConfig
from tinysrt.model_executor.model_runner import ModelRunner
from tinysrt.model_executor.sampling_batch_info import SamplingBatchInfo
from tinysrt.model_executor.sizing import MIN_TOKENS, runtime_dtype
from tinysrt.observe.trace import Recorder
from tinysrt.sampling_params import SamplingParams
from tinysrt.server_args import ServerArgs

WARM_UP = 2
GREEDY = SamplingParams(top_k=1)


def make_runner(args: ServerArgs, config: ModelConfig) -> ModelRunner:
    """`args` resolved; the pool holds `max_running_requests` requests of `config.context_len` tokens."""
    runner = ModelRunner(args, config, trace=Recorder("bench"))
    runner.capture_graphs(args)
    with torch.inference_mode():
        for buffer in (*runner.kv_pool.k_buffer, *runner.kv_pool.v_buffer):
            buffer.normal_()
        length = config.context_len
        for row in range(1, runner.max_running_requests + 1):
            first = 1 + (row - 1) * length
            runner.table[row, :length] = torch.arange(first, first + length, dtype=torch.int32)
    return runner


def pool_bytes(config: ModelConfig, dtype: str, device: str, requests: int) -> int:
    """For `ServerArgs.kv_pool_bytes`: room for so many requests of the whole context."""
    resolved = runtime_dtype(dtype, config.dtype, torch.device(device))
    per_token = KVPool.bytes_per_token(config.num_layers, config.num_kv_heads, config.head_dim, resolved)
    return per_token * max(requests * config.context_len, MIN_TOKENS)


def decode_batch(runner: ModelRunner, batch: int, context: int, sampling: SamplingParams = GREEDY) -> ForwardBatch:
    """One token for each of `batch` requests with `context` positions, the new one included."""
    return make_batch(runner.table, runner.vocab_size, [1] * batch, [context - 1] * batch, ForwardMode.DECODE, sampling)


def prefill_batch(
    runner: ModelRunner, new: int, requests: int = 1, prefix: int = 0, sampling: SamplingParams = GREEDY
) -> ForwardBatch:
    news, prefixes = [new] * requests, [prefix] * requests
    return make_batch(runner.table, runner.vocab_size, news, prefixes, ForwardMode.EXTEND, sampling)


def make_batch(
    table: Tensor, vocab_size: int, news: list[int], prefixes: list[int], mode: ForwardMode,
    sampling: SamplingParams = GREEDY,
) -> ForwardBatch:  # fmt: skip
    """Row i + 1 adds news[i] tokens after prefixes[i]; the table knows the slots of all of them."""
    rows = torch.arange(1, len(news) + 1)
    ends = [new + prefix for new, prefix in zip(news, prefixes, strict=True)]
    positions = torch.cat([torch.arange(prefix, end) for prefix, end in zip(prefixes, ends, strict=True)])
    owners = torch.repeat_interleave(rows, torch.tensor(news))
    statics = SamplingBatchInfo.for_requests(
        [sampling] * len(news),
        rows.tolist(),
        prefixes,
        [frozenset()] * len(news),
        vocab_size,
        table.device,
    )
    extend = mode is ForwardMode.EXTEND
    on_device = [t.to(table.device) for t in (positions, owners, rows, torch.tensor(ends))]
    return ForwardBatch(
        forward_mode=mode,
        step=0,
        input_ids=on_device[0] * 7919 % vocab_size,
        positions=on_device[0],
        out_cache_loc=table[on_device[1], on_device[0]].long(),
        req_pool_indices=on_device[2],
        seq_lens=on_device[3],
        seq_lens_cpu=ends,
        extend_seq_lens=news if extend else [],
        extend_prefix_lens=prefixes if extend else [],
        sampling_info=statics.at_step(ends, [[]] * len(news) if extend else None),
    )


def measure(runner: ModelRunner, batch: ForwardBatch, steps: int) -> Sequence[float]:
    """Seconds of each step: forward, sampling, and the tokens on the host."""

    def step() -> None:
        logits = runner.forward(batch)
        assert logits is not None
        runner.to_host(runner.sample(logits, batch), batch)

    for _ in range(WARM_UP):
        step()
    return [seconds(step, runner.device) for _ in range(steps)]


def median_ms(runner: ModelRunner, batch: ForwardBatch, steps: int) -> float:
    return statistics.median(measure(runner, batch, steps)) * 1e3
