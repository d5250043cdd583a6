"""A device that is not the CPU and computes nothing: a step on it shows where the host would have to wait.

Tensors are PyTorch's fake tensors: shapes, types and devices without values. On the CPU build of PyTorch their device
cannot be "cuda", so a device is made up. That needs PyTorch's private way of registering one, named in this file only;
`make()` says why it cannot where that has changed.

On it `.item()`, `.tolist()`, `if tensor` and boolean masks raise by themselves, for they need values. `NoWaiting` adds
what fake tensors let pass: a copy from the device to the host, and an operation on tensors of both.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

NAME = "fakegpu"


class Waits(Exception):
    """The host would wait here for the device."""


def make() -> torch.device:
    """Register the device in this process, for good. NotImplementedError: this PyTorch cannot."""
    try:
        from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
    except ImportError as error:
        raise NotImplementedError("this PyTorch has no _setup_privateuseone_for_python_backend") from error
    _setup_privateuseone_for_python_backend(NAME)
    return torch.device(NAME, 0)


def on_device(tensor: torch.Tensor) -> bool:
    return tensor.device.type == NAME


class NoWaiting(TorchDispatchMode):
    """Refuses what would wait. `seen`: the names of the operations that ran on the device."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        tensors = [t for t in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        name = func._schema.name
        if any(on_device(t) for t in tensors):
            self.seen.add(name)
            if name == "aten::_to_copy":
                if kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cpu":
                    raise Waits("a copy to the host")
            elif name == "aten::copy_":
                if not on_device(args[0]):
                    raise Waits("a copy to the host")
            elif not all(on_device(t) or t.dim() == 0 for t in tensors):
                raise Waits(f"{name} on tensors of the host and the device")
        return func(*args, **kwargs)
