"""Kernels as operators of PyTorch's dispatcher, for those who watch the dispatcher.

A Numba kernel is a Python function that reads and writes the memory of tensors. Neither the tape nor torch.compile can
see it happen (`model_executor/graph_capture.py`). An operator they can see: it has a name, a schema that says what it
writes, and a fake twin that only says which shape comes out. A call through the dispatcher costs some microseconds
more, so only a runner that captures asks for this.

    as_operators(kernels)   every kernel of a decode step is an operator
    compilable(kernels)     while torch.compile traces: attention and rope with its store are operators, norms and
                            the gate are plain PyTorch, which the compiler fuses into their neighbors. Else the kernels
                            themselves.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tinysrt.kernels import reference
from tinysrt.kernels.kernel_set import KernelSet

# Name → schema, and what comes out as an expression of the arguments: the fake twin.
OPERATORS: dict[str, tuple[str, Callable[..., Any]]] = {
    "rms_norm": (
        "(Tensor x, Tensor weight, float eps) -> Tensor",
        lambda x, weight, eps: x.new_empty(x.shape),
    ),
    "add_rms_norm": (
        "(Tensor x, Tensor residual, Tensor weight, float eps) -> (Tensor, Tensor)",
        lambda x, residual, weight, eps: (x.new_empty(x.shape), residual.new_empty(residual.shape)),
    ),
    "rope_and_store": (
        "(Tensor qkv, Tensor positions, Tensor rope_cache, Tensor(a!) k_buffer, Tensor(b!) v_buffer, Tensor slots, "
        "int num_heads) -> Tensor",
        lambda qkv, positions, rope_cache, k_buffer, v_buffer, slots, num_heads: qkv.new_empty(
            qkv.shape[0], num_heads, qkv.shape[2]
        ),
    ),
    "silu_and_mul": (
        "(Tensor gate_up) -> Tensor",
        lambda gate_up: gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2),
    ),
    "decode_attention": (
        "(Tensor q, Tensor k_buffer, Tensor v_buffer, Tensor table, Tensor rows, Tensor seq_lens, float scale, "
        "int? window=None) -> Tensor",
        lambda q, *_: q.new_empty(q.shape),
    ),
    "grouped_gemm": (
        "(Tensor x, Tensor weight, Tensor group_offsets) -> Tensor",
        lambda x, weight, group_offsets: x.new_empty(x.shape[0], weight.shape[1]),
    ),
}
PLAIN_WHILE_TRACING = ("rms_norm", "add_rms_norm", "silu_and_mul")


@functools.cache  # an operator's name can be registered once per process
def _register(kernels: KernelSet) -> tuple[torch.library.Library, dict[str, Any]]:
    library = torch.library.Library(f"tinysrt_{kernels.name}", "DEF")
    registered = {}
    for name, (schema, fake) in OPERATORS.items():
        kernel = getattr(kernels, name)
        library.define(name + schema)
        # An operator's results may not be its arguments: this kernel may write the new residual into the old one.
        library.impl(name, _on_a_copy(kernel) if name == "add_rms_norm" else kernel, "CompositeExplicitAutograd")
        torch.library.register_fake(f"tinysrt_{kernels.name}::{name}", fake, lib=library)
        registered[name] = getattr(getattr(torch.ops, f"tinysrt_{kernels.name}"), name).default
    return library, registered


def as_operators(kernels: KernelSet) -> KernelSet:
    operators: dict[str, Any] = _register(kernels)[1]
    return replace(kernels, few_rows_linear=None, **operators)


def compilable(kernels: KernelSet) -> KernelSet:
    operators = as_operators(kernels)
    choices: dict[str, Any] = {}
    for name in OPERATORS:
        traced = getattr(reference if name in PLAIN_WHILE_TRACING else operators, name)
        choices[name] = _either(traced, getattr(kernels, name))
    return replace(kernels, few_rows_linear=None, **choices)


def _either(traced: Callable[..., Any], kernel: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        return traced(*args) if torch.compiler.is_compiling() else kernel(*args)

    return call


def _on_a_copy(add_rms_norm: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
    def call(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return add_rms_norm(x, residual.clone(), weight, eps)

    return call
