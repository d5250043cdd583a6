"""How a Numba kernel is written and started. Read this before the `numba_*.py` kernels; it is their "Triton".

A kernel is a compiled function of one argument, a block of 64-bit numbers:

    args   [ 0 next ticket │ 1 number of tickets │ 2 ... addresses of tensors, sizes, the bits of floats ]

The work is cut into tickets: some rows, one head of one request. Each thread draws the next ticket with an atomic
addition until none is left, exactly as the programs of a Triton grid are numbered, only that here two threads share
them. So a thread that loses its core for a while holds up one ticket, not half of the work.

    launch(kernel, tickets, x.data_ptr(), ...)      one ticket: runs in the calling thread, nobody is woken
                                                    more: PyTorch's own OpenMP threads run it (GOMP_parallel)

The same threads, because a second pool beside PyTorch's would fight with it for the cores: an idle OpenMP thread spins
for a while in case more work comes. That is also why the thread count needs no setting here. Addresses instead of
arrays, because a decode step starts some two hundred kernels: turning a bf16 tensor into a numpy view costs more than
a microsecond, `data_ptr()` less than a tenth. Whoever calls `launch` keeps the tensors alive until it returns.

bf16 is the upper half of a float32. `widen` reads it with a shift, `narrow` rounds to nearest even; between them
everything is float32. All compiled code is cached on disk in a folder named after what it was compiled from, so a stale
cache cannot be met; two processes may fill it at once (Numba writes aside and renames).
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import math
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llvmlite.binding
import numba
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

# Sums may be reordered, which is what lets loops run in vector registers. NaN and infinity keep their meaning: a
# request whose logits are NaN must be seen.
FAST_MATH = {"reassoc", "nsz", "arcp", "contract", "afn"}
OPTIONS: dict[str, Any] = dict(fastmath=FAST_MATH, boundscheck=False, error_model="numpy")
BF16, F32 = 2, 4  # bytes of an element: how a kernel is told its format
ENTRY = types.void(types.CPointer(types.int64))


# ---- compiling and caching ---------------------------------------------------------------------------


def _cache_folder() -> str:
    """One folder per content of these files and version of the compiler (Numba adds the processor itself)."""
    digest = hashlib.sha256(f"{numba.__version__} {llvmlite.__version__}".encode())
    for file in sorted(Path(__file__).parent.glob("numba_*.py")):
        digest.update(file.read_bytes())
    base = Path(numba.config.CACHE_DIR or Path("~/.cache/tinysrt/numba").expanduser())
    return str(base / digest.hexdigest()[:16])


def _use_whole_registers() -> None:
    """LLVM fills half a register on a processor with AVX-512, for fear of the lower clock that the first ones had."""
    if numba.config.CPU_FEATURES is None:
        features = llvmlite.binding.get_host_cpu_features()
        if features.get("avx512f"):
            numba.config.CPU_FEATURES = features.flatten() + ",-prefer-256-bit"


@functools.cache
def tiles_work() -> bool:
    """Whether kernels are compiled for a processor that multiplies tiles of bf16 (AMX), and Linux, which must be asked,
    lets this process do it."""
    features = numba.config.CPU_FEATURES
    if features is None:
        features = llvmlite.binding.get_host_cpu_features().flatten()
    if sys.platform != "linux" or not {"+amx-tile", "+amx-bf16", "+avx512bf16"} <= set(features.split(",")):
        return False
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    allowed = ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data) == 0
    if not allowed:
        logger.warning("Linux does not let this process use AMX: attention of prompts takes twice as long")
    return allowed


logger = logging.getLogger(__name__)
CACHE_FOLDER = _cache_folder()
_use_whole_registers()


def _cached(compile_: Callable[[], Any]) -> Any:
    """Run a Numba decorator with our cache folder; other users of Numba in this process keep theirs."""
    before, numba.config.CACHE_DIR = numba.config.CACHE_DIR, CACHE_FOLDER
    try:
        return compile_()
    finally:
        numba.config.CACHE_DIR = before


def inner(function: Callable[..., Any]) -> Any:
    """Decorator: a function that kernels call. Compiled as a part of them, for the types they pass."""
    return numba.njit(**OPTIONS)(function)


def unfolded(function: Callable[..., Any]) -> Any:
    """The same, copied into each caller: a number that a call names as a constant is one for the compiler too."""
    return numba.njit(inline="always", **OPTIONS)(function)


def kernel(function: Callable[..., Any]) -> int:
    """Decorator: compile now, or load from the cache. The name then stands for the compiled code's address."""
    compiled = _cached(lambda: numba.cfunc(ENTRY, cache=True, **OPTIONS)(function))
    _keep_alive.append(compiled)
    return compiled.address


_keep_alive: list[Any] = []  # compiled code lives as long as its Python object


# ---- starting ----------------------------------------------------------------------------------------


def _openmp() -> Callable[[int, int, int, int], None] | None:
    """The entry point of the OpenMP library that PyTorch has loaded; None (macOS, Windows): one thread does it all."""
    try:
        found = ctypes.CDLL(None).GOMP_parallel
    except (AttributeError, OSError, TypeError):
        return None
    found.argtypes, found.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint], None
    return found


_parallel = _openmp()
_call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_callable = functools.cache(_call)  # address → something Python can call
_blocks = functools.cache(lambda size: ctypes.c_int64 * size)
float_bits = functools.lru_cache(maxsize=1024)(lambda value: struct.unpack("q", struct.pack("d", value))[0])


def launch(address: int, tickets: int, *args: int) -> None:
    """Run a kernel until all its tickets are drawn. Releases the interpreter lock meanwhile."""
    block = _blocks(len(args) + 2)(0, tickets, *args)
    if tickets <= 1 or _parallel is None or torch.get_num_threads() == 1:
        _callable(address)(ctypes.addressof(block))
    else:
        _parallel(address, ctypes.addressof(block), 0, 0)  # 0: as many threads as PyTorch was told


def split(work: int, enough: int) -> int:
    """Into how many tickets to cut `work` units when `enough` of them are worth waking a thread for."""
    return max(1, min(work // enough, 4 * torch.get_num_threads()))


# ---- what kernels are made of ------------------------------------------------------------------------


_I16, _I32, _F32 = ir.IntType(16), ir.IntType(32), ir.FloatType()


def _pointer_to(kind, llvm):
    @intrinsic
    def at(typingctx, address):
        def generate(context, builder, signature, args):
            return builder.inttoptr(args[0], llvm.as_pointer())

        return types.CPointer(kind)(types.int64), generate

    return at


bf16_at = _pointer_to(types.uint16, ir.IntType(16))
f32_at = _pointer_to(types.float32, ir.FloatType())
f64_at = _pointer_to(types.float64, ir.DoubleType())
i32_at = _pointer_to(types.int32, ir.IntType(32))
i64_at = _pointer_to(types.int64, ir.IntType(64))


@intrinsic
def scratch(typingctx, count):
    """Room for `count` float32 on the stack of the thread, uninitialized, until the kernel returns. A pointer and not
    a numpy array: those may be indexed from the end, and a loop that allows for it does not vectorize."""

    def generate(context, builder, signature, values):
        room = builder.alloca(_F32, values[0])
        room.align = 64
        return room

    return types.CPointer(types.float32)(types.int64), generate


@intrinsic
def draw_ticket(typingctx, args):
    """The next ticket, for one thread alone. Compare it with args[1]: from there on there are none."""

    def generate(context, builder, signature, values):
        return builder.atomic_rmw("add", values[0], ir.Constant(ir.IntType(64), 1), "monotonic")

    return types.int64(types.CPointer(types.int64)), generate


@intrinsic
def prefetch(typingctx, pointer, index):
    """Ask for the cache line of pointer[index]; the address need not exist."""

    def generate(context, builder, signature, values):
        byte_pointer, i32 = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte_pointer, i32, i32, i32])
        function = builder.module.declare_intrinsic("llvm.prefetch", [byte_pointer], kind)
        place = builder.bitcast(builder.gep(values[0], [values[1]]), byte_pointer)
        builder.call(function, [place, i32(0), i32(3), i32(1)])  # for reading, to stay, data
        return context.get_dummy_value()

    return types.void(pointer, types.int64), generate


# Numba computes with 64-bit integers whatever it is given, and a loop over 32-bit numbers with 64-bit ones in between
# fills half of a vector register. So the three functions that touch bits are written for LLVM directly.


@intrinsic
def widen(typingctx, pointer, index):
    """pointer[index] as float32; a bf16 is the upper half of one."""

    def generate(context, builder, signature, values):
        value = builder.load(builder.gep(values[0], [values[1]]))
        if pointer.dtype == types.uint16:
            value = builder.bitcast(builder.shl(builder.zext(value, _I32), _I32(16)), _F32)
        return value

    return types.float32(pointer, types.int64), generate


@intrinsic
def narrow(typingctx, pointer, value):
    """The float32 `value` in the format that `pointer` points to: to the nearest, of two to the even one.

    A NaN stays one: processors make them with zeros in the lower half, and so are those that come from a bf16."""

    def generate(context, builder, signature, values):
        if pointer.dtype != types.uint16:
            return values[1]
        bits = builder.bitcast(values[1], _I32)
        odd = builder.and_(builder.lshr(bits, _I32(16)), _I32(1))
        half = builder.add(_I32(0x7FFF), odd)  # of the last kept bit, or a little less
        return builder.trunc(builder.lshr(builder.add(bits, half), _I32(16)), _I16)

    return pointer.dtype(pointer, types.float32), generate


@intrinsic
def larger(typingctx, a, b):
    """The larger of two float32, either one if one is NaN: so a loop over it vectorizes, over `max` it does not."""

    def generate(context, builder, signature, values):
        flags = ["nnan", "nsz"]
        greater = builder.fcmp_ordered(">", *values, flags=flags)
        return builder.select(greater, *values, flags=flags)

    return types.float32(types.float32, types.float32), generate


@inner
def largest(values, begin, end, floor):
    """The maximum of values[begin:end] and `floor`. It may overlook a NaN."""
    best = floor
    for i in range(begin, end):
        best = larger(widen(values, i), best)
    return best


@inner
def clear(values, begin, end):
    for i in range(begin, end):
        values[i] = narrow(values, np.float32(0.0))


@intrinsic
def two_to_the(typingctx, whole):
    """2^whole for -126 <= whole <= 127: an integer put into the exponent bits."""

    def generate(context, builder, signature, values):
        return builder.bitcast(builder.shl(builder.add(values[0], _I32(127)), _I32(23)), _F32)

    return types.float32(types.int32), generate


@intrinsic
def bits_of(typingctx, value):
    """The 32 bits of a float32. For numbers from 0 up they are in the order of the numbers."""

    def generate(context, builder, signature, values):
        return builder.bitcast(values[0], _I32)

    return types.int32(types.float32), generate


@inner
def as_float(bits):
    """A float argument of a block, packed there by `float_bits`."""
    return np.float32(np.int64(bits).view(np.float64))


LOG2_E = np.float32(math.log2(math.e))
HIDDEN = np.float32(-1e30)  # score of a key that is not seen; finite, because -inf - -inf is no number
NO_WINDOW = 1 << 62


@inner
def exp2(x):
    """2^x for x <= 0 (and up to 126), relative error below 2e-7; 0 below -126. No branch, so loops over it vectorize.

    2^x = 2^whole * 2^part with whole = x cut towards zero: `whole` goes into the exponent bits, and a polynomial is
    good enough for -1 < part < 1.
    """
    whole = np.int32(max(x, np.float32(-126.0)))
    part = (x - np.float32(whole)) * np.float32(0.6931471805599453)
    power = np.float32(1 / 5040)
    power = power * part + np.float32(1 / 720)
    power = power * part + np.float32(1 / 120)
    power = power * part + np.float32(1 / 24)
    power = power * part + np.float32(1 / 6)
    power = power * part + np.float32(0.5)
    power = power * part + np.float32(1.0)
    power = power * part + np.float32(1.0)
    return np.float32(0.0) if x < np.float32(-126.0) else power * two_to_the(whole)


def format_of(tensor: torch.Tensor) -> int:
    """What `BF16` and `F32` are compared with; another format is our own bug."""
    assert tensor.dtype in (torch.bfloat16, torch.float32), f"the Numba kernels know no {tensor.dtype}"
    return tensor.element_size()
