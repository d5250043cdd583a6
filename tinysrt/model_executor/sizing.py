"""What a machine can bear: number format, threads, and how many tokens the KV pool holds.

    device memory   [ in use before │ weights │ KV pool │ activations, graphs, the rest ]
                    [ ──── mem_fraction_static of it ── ]

On a GPU the pool gets what is left of `mem_fraction_static` once the weights are loaded. On a CPU the memory belongs to
other programs too, so ServerArgs resolves a fixed size (`kv_pool_bytes`), unless a fraction was typed. Either way
`--max-total-tokens` can only lower it. Too little memory stops the start-up with the smallest setting that works.
"""

from __future__ import annotations

import logging
import math
import os

import torch

from tinysrt.errors import StartupError
from tinysrt.mem_cache.memory_pool import KVPool
from tinysrt.model_executor.model_config import DTYPES, ModelConfig
from tinysrt.server_args import ServerArgs, available_memory

logger = logging.getLogger(__name__)

MIN_TOKENS = 128  # below this a pool holds no useful request


def runtime_dtype(asked: str, checkpoint: torch.dtype, device: torch.device) -> torch.dtype:
    """The number format to run in. What was typed is obeyed; auto takes the checkpoint's, where the CPU can.

    A CPU with bf16 instructions multiplies bf16 twice as fast as float32; one without emulates it, many times slower.
    float16 has no fast path on most CPUs, and every float16 number is a float32 number.
    """
    if asked != "auto":
        return DTYPES[asked]
    if device.type != "cpu" or checkpoint == torch.float32:
        return checkpoint
    if checkpoint == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported() and _has_bf16_instructions():
        return checkpoint
    logger.info("dtype: this CPU has no fast %s, running in float32 (--dtype decides otherwise)", checkpoint)
    return torch.float32


def _has_bf16_instructions() -> bool:
    """AVX512-BF16 or AMX on x86; Arm says so through oneDNN, which the caller has asked already."""
    if torch.backends.cpu.get_cpu_capability().startswith("AVX"):
        return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
    return torch.backends.cpu.get_cpu_capability() != "DEFAULT"


def usable_cores() -> int:
    """Physical cores that this process may run on. A second thread on one core slows matrix products down."""
    import psutil

    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(allowed, psutil.cpu_count(logical=False) or allowed))


def free_memory(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_memory()


def device_memory(device: torch.device) -> int:
    """All of it, free or not."""
    import psutil

    return torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else int(psutil.virtual_memory().total)


def memory_in_use(device: torch.device) -> int:
    """Of the device; on a CPU, by this process."""
    import psutil

    if device.type == "cuda":
        return device_memory(device) - free_memory(device)
    return int(psutil.Process().memory_info().rss)


def size_kv_pool(
    server_args: ServerArgs, config: ModelConfig, dtype: torch.dtype, device: torch.device, free_before: int
) -> int:
    """Tokens of the pool, a multiple of the page size. Called after loading; `free_before`: free bytes before it."""
    per_token = KVPool.bytes_per_token(config.num_layers, config.num_kv_heads, config.head_dim, dtype)
    page_size = server_args.page_size
    smallest = per_token * max(MIN_TOKENS, 2 * page_size)
    free_now = free_memory(device)
    if server_args.kv_pool_bytes is not None:
        budget, knob = server_args.kv_pool_bytes, f"--kv-pool-bytes {smallest}"
    else:
        fraction = server_args.mem_fraction_static
        assert fraction is not None, "ServerArgs.resolve gives a fraction where it gives no pool bytes"
        # Everything that is resident by now, the weights too, is charged to the static part.
        budget = free_now - int(free_before * (1 - fraction))
        if device.type == "cpu":  # every rank of this machine looks at the same memory
            budget //= server_args.ranks_on_this_machine()
        needed = math.ceil(1000 * (1 - (free_now - smallest) / free_before)) / 1000
        knob = f"--mem-fraction-static {needed}" if needed < 1 else "a smaller model or a larger machine"
    if budget > free_now:
        raise StartupError(f"a KV pool of {_mib(budget)} does not fit into the {_mib(free_now)} that are free")
    if budget < smallest:
        raise StartupError(
            f"too little memory for the KV pool: {_mib(max(budget, 0))} is left after the weights, "
            f"{max(MIN_TOKENS, 2 * page_size)} tokens need {_mib(smallest)}; the smallest that works is {knob}"
        )
    tokens = budget // per_token
    asked = server_args.max_total_tokens
    if asked is not None and asked > tokens:
        limit = "--mem-fraction-static" if server_args.kv_pool_bytes is None else "--kv-pool-bytes"
        message = "--max-total-tokens %d exceeds what the KV pool's memory holds; using %d (%s decides)"
        logger.warning(message, asked, tokens, limit)
    elif asked is not None:
        tokens = asked
    tokens = tokens // page_size * page_size
    if tokens < 2 * page_size:
        raise StartupError(f"--max-total-tokens {asked} is too small: two pages are {2 * page_size} tokens")
    logger.info("KV pool: %d tokens, %s, %d bytes per token", tokens, _mib(tokens * per_token), per_token)
    return tokens


def size_request_table(asked: int | None, max_total_tokens: int, context_len: int) -> int:
    """How many requests may run at once: as typed, or so that the pool is neither idle nor fought over."""
    if asked is None:
        asked = min(max(max_total_tokens * 512 // context_len, 2048), 4096)
    return max(1, min(asked, max_total_tokens // 2))


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"
