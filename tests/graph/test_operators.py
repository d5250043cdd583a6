"""Kernels as operators: the same results, honest schemas, and fake twins of the right shape."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tinysrt.kernels.kernel_set import REFERENCE, KernelSet, load_kernels
from tinysrt.kernels.operators import OPERATORS, as_operators, compilable

SLOTS, KV_HEADS, HEADS, DIM, LANES = 12, 2, 4, 8, 3
SETS = ["torch_native", "numba"]


def arguments(name: str) -> tuple[Any, ...]:
    torch.manual_seed(3)
    x, residual, weight = torch.randn(LANES, DIM), torch.randn(LANES, DIM), torch.rand(DIM)
    k, v = torch.randn(SLOTS, KV_HEADS, DIM), torch.randn(SLOTS, KV_HEADS, DIM)
    cases: dict[str, tuple[Any, ...]] = {
        "rms_norm": (x, weight, 1e-5),
        "add_rms_norm": (x, residual, weight, 1e-5),
        "rope_and_store": (
            torch.randn(LANES, HEADS + 2 * KV_HEADS, DIM), torch.tensor([0, 4, 2]), torch.randn(6, DIM), k, v,
            torch.tensor([3, 7, 5]), HEADS,
        ),
        "silu_and_mul": (torch.randn(LANES, 2 * DIM),),
        "decode_attention": (
            torch.randn(LANES, HEADS, DIM), k, v, torch.randint(1, SLOTS, (5, 6), dtype=torch.int32),
            torch.tensor([1, 4, 2]), torch.tensor([6, 1, 3]), DIM**-0.5, None,
        ),
        "grouped_gemm": (x, torch.randn(4, 5, DIM), torch.tensor([0, 1, 1, 3, 3])),
    }  # fmt: skip
    return cases[name]


def kernels_of(name: str) -> KernelSet:
    if name == "numba":
        pytest.importorskip("numba")
    return load_kernels(name)


@pytest.mark.parametrize("name", sorted(OPERATORS))
@pytest.mark.parametrize("kind", SETS)
def test_an_operator_computes_what_its_kernel_computes_and_writes_what_it_writes(kind: str, name: str) -> None:
    kernels = kernels_of(kind)
    plain, through = arguments(name), arguments(name)
    wanted = getattr(kernels, name)(*plain)
    torch.testing.assert_close(getattr(as_operators(kernels), name)(*through), wanted)
    if name == "rope_and_store":
        torch.testing.assert_close(through, plain)
    torch.testing.assert_close(getattr(compilable(kernels), name)(*arguments(name)), wanted)


@pytest.mark.parametrize("name", sorted(OPERATORS))
def test_schema_and_fake_twin_say_the_truth(name: str) -> None:
    """Nothing is written that the schema does not name, no result is an argument, and fake shapes are the real ones."""
    operator = getattr(as_operators(REFERENCE), name)
    torch.library.opcheck(operator, arguments(name), test_utils=("test_schema", "test_faketensor"))


def test_while_a_compiler_traces_small_functions_are_plain_and_attention_is_opaque(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    traced: list[Any] = []
    kernels = compilable(kernels_of("torch_native"))
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            traced.append(func.namespace)
            return func(*args, **(kwargs or {}))

    with Watch():
        kernels.rms_norm(*arguments("rms_norm"))
        assert set(traced) == {"aten"}
        traced.clear()
        kernels.decode_attention(*arguments("decode_attention"))
        assert "tinysrt_torch_native" in traced
