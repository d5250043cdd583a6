"""From the host to the device without waiting.

A copy from ordinary memory makes the host wait until the device has come that far, through everything that is queued
there. A copy from *pinned* memory (which the operating system never moves) is queued like any other work. The source
must live until the copy is done: `upload` hands it out, to be kept beside the tensors; `to_device` leaves it to
PyTorch, whose allocator of pinned memory gives a block away only when the copies that read it are done.

    arrays   [ input_ids ][ positions ][ slots ][ rows ] ...          five to nine small arrays of a step
    pinned   [ input_ids · positions · slots · rows  ... ]            one buffer, each at a multiple of 16 bytes
                             │ one copy
    device   [ ································· ]                   the tensors are views of it

On a CPU both hand out tensors on the arrays' own memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

ALIGNMENT = 16  # bytes; kernels load faster from such addresses


def upload(arrays: Sequence[np.ndarray], device: torch.device | str) -> tuple[list[Tensor], Tensor | None]:
    """(the arrays as tensors on the device, the pinned memory to keep until they have been read)."""
    if torch.device(device).type != "cuda":
        return [torch.from_numpy(np.ascontiguousarray(array)).to(device) for array in arrays], None
    host = pack(arrays, pin=True)
    return unpack(host.to(device, non_blocking=True), arrays), host


def pack(arrays: Sequence[np.ndarray], *, pin: bool) -> Tensor:
    """All arrays in one buffer of bytes."""
    host = torch.empty(_starts(arrays)[-1], dtype=torch.uint8, pin_memory=pin)
    for tensor, array in zip(unpack(host, arrays), arrays, strict=True):
        tensor.copy_(torch.from_numpy(np.ascontiguousarray(array)))
    return host


def unpack(buffer: Tensor, arrays: Sequence[np.ndarray]) -> list[Tensor]:
    """Views of the buffer, of the arrays' lengths and types."""
    starts = _starts(arrays)
    return [
        buffer[start : start + array.nbytes].view(torch.from_numpy(array[:0]).dtype)
        for start, array in zip(starts, arrays, strict=False)
    ]


def _starts(arrays: Sequence[np.ndarray]) -> list[int]:
    """Where each array begins, and where all end."""
    starts = [0]
    for array in arrays:
        starts.append(starts[-1] + -(-array.nbytes // ALIGNMENT) * ALIGNMENT)
    return starts


def to_device(values: Any, device: torch.device | str, dtype: torch.dtype | None = None) -> Tensor:
    """Numbers, nested as `torch.tensor` takes them, as a tensor on the device."""
    tensor = torch.from_numpy(values) if isinstance(values, np.ndarray) else torch.tensor(values, dtype=dtype)
    if torch.device(device).type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
