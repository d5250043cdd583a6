"""Norms, rope with KV store and the gate against float64, in the interpreter."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.kernels.cases import assert_close
from tinysrt.kernels.triton_elementwise import add_rms_norm, rms_norm, rope_and_store, silu_and_mul
from tinysrt.model_executor.layers.rotary import rope_cache

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
EPS = 1e-5
ROPE = {"rope_type": "default", "rope_theta": 10000.0}


def normed(x: Tensor, weight: Tensor) -> Tensor:
    x = x.double()
    return x / (x.pow(2).mean(dim=-1, keepdim=True) + EPS).sqrt() * weight.double()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [48, 64, 65, 576])
def test_rms_norm(dim, dtype):
    x, weight = torch.randn(3, dim).to(dtype), torch.randn(dim)
    assert_close(rms_norm(x, weight, EPS), normed(x, weight))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "dim"), [(1, 64), (5, 80), (40, 128)])
def test_rms_norm_of_heads_inside_a_larger_tensor(heads, dim, dtype):
    x, weight = torch.randn(3, heads + 2, dim).to(dtype)[:, :heads], torch.randn(heads, dim)
    y = rms_norm(x, weight, EPS)
    assert y.is_contiguous()
    assert_close(y, normed(x, weight))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [48, 100, 576])
def test_add_rms_norm(dim, dtype):
    x, residual, weight = torch.randn(3, dim).to(dtype), torch.randn(3, dim), torch.randn(dim)
    expected = residual.double() + x.double()
    y, after = add_rms_norm(x, residual, weight, EPS)
    assert y.dtype == dtype and after.dtype == torch.float32
    assert_close(after, expected)
    assert_close(y, normed(expected, weight))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(6, 2, 64), (9, 3, 80), (32, 8, 96), (1, 1, 16)])
def test_rope_and_store(heads, kv_heads, dim, dtype, guard):
    tokens = 4
    projected = torch.randn(tokens, heads + 2 * kv_heads + 1, dim).to(dtype)
    qkv = projected[:, :-1]  # rows are apart
    cache = rope_cache(dim, ROPE, 50)
    positions, slots = torch.tensor([49, 0, 7, 7]), torch.tensor([11, 0, 2, 0])  # two are padding
    k_buffer, v_buffer = torch.full((2, 12, kv_heads, dim), float("nan"), dtype=dtype)
    before = k_buffer.clone()
    with guard.sharing(k_buffer[:1], v_buffer[:1]):
        q = rope_and_store(qkv, positions, cache, k_buffer, v_buffer, slots, heads)
    cos, sin = cache.double()[positions].unsqueeze(1).chunk(2, dim=-1)
    a, b = qkv.double().chunk(2, dim=-1)
    rotated = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    assert_close(q, rotated[:, :heads])
    real = torch.tensor([0, 2])
    assert_close(k_buffer[slots[real]], rotated[real, heads : heads + kv_heads])
    assert torch.equal(v_buffer[slots[real]], qkv[real, heads + kv_heads :])  # moved, not computed with
    untouched = torch.tensor([1, 3, 4, 5, 6, 7, 8, 9, 10])
    assert torch.equal(k_buffer[untouched].isnan(), before[untouched].isnan())


def test_padding_tokens_all_write_to_the_dummy_slot(guard):
    qkv, zeros = torch.randn(3, 4, 16), torch.zeros(3, dtype=torch.int64)
    k_buffer, v_buffer = torch.zeros(2, 5, 1, 16)
    with guard.sharing(k_buffer[:1], v_buffer[:1]):
        rope_and_store(qkv, zeros, rope_cache(16, ROPE, 4), k_buffer, v_buffer, zeros, 2)
    assert k_buffer[1:].eq(0).all() and v_buffer[1:].eq(0).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 80, 1024, 1025])
def test_silu_and_mul(width, dtype):
    gate_up = (torch.randn(2, 2 * width) * 3).to(dtype)
    gate, up = gate_up.double().chunk(2, dim=-1)
    assert_close(silu_and_mul(gate_up), F.silu(gate) * up)


def test_a_batch_without_tokens_launches_nothing():
    assert rms_norm(torch.randn(0, 16), torch.ones(16), EPS).shape == (0, 16)
    assert silu_and_mul(torch.randn(0, 16)).shape == (0, 8)


@pytest.mark.parametrize(
    "call",
    [
        lambda: rms_norm(torch.randn(2, 16), torch.ones(15), EPS),
        lambda: rms_norm(torch.randn(2, 16).double(), torch.ones(16), EPS),
        lambda: rms_norm(torch.randn(16, 2).T, torch.ones(16), EPS),
        lambda: add_rms_norm(torch.randn(2, 16), torch.randn(2, 16).half(), torch.ones(16), EPS),
        lambda: silu_and_mul(torch.randn(2, 15)),
        lambda: rms_norm(torch.randn(2, 16), torch.ones(16, device="meta"), EPS),
    ],
    ids=["shape", "dtype", "layout", "residual in half", "odd width", "device"],
)
def test_what_does_not_fit_is_refused_before_the_launch(call):
    with pytest.raises(AssertionError):
        call()
