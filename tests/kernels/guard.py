"""A guard around Triton's interpreter: every lane of every load and store is checked before it happens.

The interpreter turns a kernel into numpy: pointers are arrays of addresses, and an address outside of every tensor may
crash the process, or read a neighbor and go unnoticed. Here each pointer remembers which argument it came from, through
the address arithmetic, and the guard raises `GuardError` when an unmasked lane

    leaves       an argument's memory: a bad page index, a mask that forgot the last block
    races        stores where another program has stored, or loads what another program of the launch has stored:
                 on a chip the order of the two is anybody's guess
    collides     stores to one address twice in one instruction

What only padding touches (slot 0 of the KV pools) is exempt inside `with guard.sharing(tensor)`.

It also mends one thing that the interpreter gets wrong: bfloat16 lives there as a 16-bit integer, and `tl.dot` would
multiply the integers. The guard counts accesses, too, since each costs milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

Handle = interpreter.TensorHandle
BASE = "tests.guard.base"  # key in a handle's attributes


class GuardError(Exception):
    pass


@dataclass
class Argument:
    """The memory of one tensor argument of a launch."""

    name: str
    start: int  # address of its first element
    itemsize: int
    elements: int  # from the first to the last, gaps of strided views included
    owner: np.ndarray = field(init=False)  # (elements,) which program has stored there, -1: none

    def __post_init__(self) -> None:
        self.owner = np.full(self.elements, -1, dtype=np.int64)

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> Argument:
        span = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) if tensor.numel() else 0
        return cls(name, tensor.data_ptr(), tensor.element_size(), span)


class Guard:
    def __init__(self) -> None:
        self.accesses = 0
        self.shared: list[tuple[int, int]] = []
        self.arguments: list[Argument] = []

    @contextmanager
    def sharing(self, *tensors: torch.Tensor) -> Iterator[None]:
        saved = self.shared
        self.shared = saved + [(t.data_ptr(), t.data_ptr() + t.numel() * t.element_size()) for t in tensors]
        yield
        self.shared = saved

    def check(self, pointers: Handle, mask: np.ndarray, program: int, what: str) -> None:
        self.accesses += 1
        argument: Argument | None = pointers.attr.get(BASE)
        assert argument is not None, f"{what} through a pointer of unknown origin"
        addresses = np.broadcast_to(pointers.data, np.broadcast_shapes(pointers.data.shape, mask.shape))
        addresses = addresses[np.broadcast_to(mask, addresses.shape)].astype(np.int64)
        index, rest = np.divmod(addresses - argument.start, argument.itemsize)
        bad = (index < 0) | (index >= argument.elements) | (rest != 0)
        if bad.any():
            raise GuardError(
                f"{what} outside of {argument.name}: element {index[bad][0]} of {argument.elements}, program {program}"
            )
        for low, high in self.shared:
            keep = (addresses < low) | (addresses >= high)
            addresses, index = addresses[keep], index[keep]
        owners = argument.owner[index]
        if ((owners != -1) & (owners != program)).any():
            raise GuardError(f"{what} races with another program's store to {argument.name}, program {program}")
        if what == "store":
            if len(np.unique(index)) < len(index):
                raise GuardError(f"two lanes store to one element of {argument.name}, program {program}")
            argument.owner[index] = program


def repaired_dot(plain: Callable[..., Handle]) -> Callable[..., Handle]:
    def dot(self: Any, a: Handle, b: Handle, d: Handle, *rest: Any) -> Handle:
        return plain(self, _widened(a), _widened(b), d, *rest)

    return dot


def _widened(handle: Handle) -> Handle:
    if handle.dtype.scalar != tl.bfloat16:
        return handle
    return Handle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


@contextmanager
def guarded() -> Iterator[Guard]:
    """Everything that the interpreter runs inside is guarded."""
    guard = Guard()
    builder = interpreter.InterpreterBuilder
    saved = {name: getattr(builder, name) for name in (*CARRIERS, "create_masked_load", "create_masked_store")}
    saved["create_dot"] = builder.create_dot
    convert = interpreter._implicit_cvt

    def program_of(self: Any) -> int:
        x, y, z = self.grid_idx
        return (x * self.grid_dim[1] + y) * self.grid_dim[2] + z

    def load(self: Any, pointers: Handle, mask: Handle, *rest: Any) -> Handle:
        guard.check(pointers, mask.data, program_of(self), "load")
        return saved["create_masked_load"](self, pointers, mask, *rest)

    def store(self: Any, pointers: Handle, value: Handle, mask: Handle, *rest: Any) -> Any:
        guard.check(pointers, mask.data, program_of(self), "store")
        return saved["create_masked_store"](self, pointers, value, mask, *rest)

    def implicit_cvt(arg: Any) -> Any:
        converted = convert(arg)
        if isinstance(arg, torch.Tensor):
            converted.handle.attr[BASE] = Argument.of(f"a {arg.dtype} tensor of shape {tuple(arg.shape)}", arg)
        return converted

    try:
        for name in CARRIERS:
            setattr(builder, name, carrying(saved[name]))
        builder.create_masked_load, builder.create_masked_store = load, store
        builder.create_dot = repaired_dot(saved["create_dot"])
        interpreter._implicit_cvt = implicit_cvt
        yield guard
    finally:
        for name, function in saved.items():
            setattr(builder, name, function)
        interpreter._implicit_cvt = convert


# The operations that make a pointer from a pointer.
CARRIERS = ("create_addptr", "create_splat", "create_broadcast", "create_expand_dims", "create_unsplat")


def carrying(operation: Callable[..., Handle]) -> Callable[..., Handle]:
    def carry(self: Any, *args: Any) -> Handle:
        result = operation(self, *args)
        source = next((a for a in args if isinstance(a, Handle) and BASE in a.attr), None)
        if source is not None:
            result.attr[BASE] = source.attr[BASE]
        return result

    return carry
