"""What this machine can do at best: bytes read from memory and multiply-adds done in a second, measured now.

    read_rate      a large buffer is read once and nothing is kept      (a decode step reads the weights)
    matmul_rate    a square product, weight packed as in `Linear`       (a prefill multiplies)

Both take the best of several tries: a ceiling is what was reached once, not what is usual beside other work. The buffer
must be larger than the last cache, or the cache is measured; `--buffer-mib` makes it larger still.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import psutil
import torch

from tinysrt.model_executor.layers.linear import Linear

BUFFER_MIB = 1024
MATMUL_SIZE = {"cpu": 2048, "cuda": 8192}
TRIES = 7


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """One call, on a GPU until its last kernel has finished."""
    if device.type == "cuda":
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        work()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def best_seconds(work: Callable[[], object], device: torch.device) -> float:
    work()  # first touch, first launch
    return min(seconds(work, device) for _ in range(TRIES))


def buffer_bytes(asked_mib: int, device: torch.device) -> int:
    """At most a quarter of what is free: a bench must not push a machine into swapping."""
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
    return min(asked_mib * 2**20, free // 4) // 4096 * 4096


@torch.inference_mode()
def read_rate(device: torch.device, buffer_mib: int = BUFFER_MIB) -> float:
    """Bytes a second, with as many threads as PyTorch is set to use."""
    size = buffer_bytes(buffer_mib, device)
    buffer = torch.ones(size // 4, dtype=torch.float32, device=device)
    if device.type == "cuda":  # half is read, half is written
        half = len(buffer) // 2
        return size / best_seconds(lambda: buffer[:half].copy_(buffer[half:]), device)
    left, right = buffer.chunk(2)
    # Neither is the faster one everywhere.
    return size / min(best_seconds(lambda: torch.dot(left, right), device), best_seconds(buffer.sum, device))


@torch.inference_mode()
def matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Floating-point operations a second; a multiply-add counts as two."""
    size = MATMUL_SIZE[device.type]
    linear = Linear(size, [size]).to(device=device, dtype=dtype)
    linear.weight.normal_(0, 0.02)
    linear.pack()
    x = torch.randn(size, size, device=device).to(dtype)
    return 2 * size**3 / best_seconds(lambda: linear(x), device)
