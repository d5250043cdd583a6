"""The guard bites: kernels that do what it is there to notice. And it lets good ones pass."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError

from tests.kernels.cases import make_case
from tinysrt.kernels.triton_attention import decode_attention, extend_attention


@triton.jit
def copy_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if MASKED:
        tl.store(y_ptr + i, tl.load(x_ptr + i, mask=i < n), mask=i < n)
    else:
        tl.store(y_ptr + i, tl.load(x_ptr + i))


@triton.jit
def sum_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr, STEP: tl.constexpr):
    """STEP below BLOCK: neighbors store to the same elements."""
    i = tl.arange(0, BLOCK)
    tl.store(y_ptr + tl.program_id(0) * STEP + i, tl.load(x_ptr + i))


@triton.jit
def chain_kernel(x_ptr):
    """Each program reads what the one before has written."""
    i = tl.program_id(0)
    tl.store(x_ptr + i + 1, tl.load(x_ptr + i) + 1.0)


@triton.jit
def scatter_kernel(x_ptr, index_ptr, y_ptr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(y_ptr + tl.load(index_ptr + i), tl.load(x_ptr + i))


def test_a_masked_copy_passes():
    x, y = torch.randn(10), torch.zeros(10)
    copy_kernel[(3,)](x, y, 10, BLOCK=4, MASKED=True)
    assert torch.equal(x, y)


def test_an_overrun_is_noticed_even_into_the_memory_of_a_neighbor():
    memory = torch.zeros(64)
    x, y = memory[:10], memory[32:42]
    with pytest.raises(InterpreterError, match="load outside of a torch.float32 tensor of shape .10,.*10 of 10"):
        copy_kernel[(3,)](x, y, 10, BLOCK=4, MASKED=False)


def test_a_write_race_is_noticed():
    y = torch.zeros(16)
    sum_kernel[(2,)](torch.ones(8), y, BLOCK=8, STEP=8)
    with pytest.raises(InterpreterError, match="store races with another program"):
        sum_kernel[(2,)](torch.ones(8), y, BLOCK=8, STEP=7)


def test_a_read_of_what_another_program_writes_is_noticed():
    with pytest.raises(InterpreterError, match="load races with another program"):
        chain_kernel[(3,)](torch.zeros(4))


def test_two_lanes_at_one_address_are_noticed_unless_it_may_be_shared(guard):
    x, y, index = torch.ones(4), torch.zeros(8), torch.tensor([5, 0, 0, 6])
    with pytest.raises(InterpreterError, match="two lanes store to one element"):
        scatter_kernel[(1,)](x, index, y, BLOCK=4)
    with guard.sharing(y[:1]):
        scatter_kernel[(1,)](x, index, y, BLOCK=4)
    assert y.tolist() == [1, 0, 0, 0, 0, 1, 1, 0]


@pytest.mark.parametrize("slot", [2**30, -1, 10_000])
def test_a_bad_page_index_is_noticed_in_both_attention_kernels(slot):
    case = make_case([2, 1], [9, 7], kv_heads=1, dim=16)
    case.table[case.rows[0], 4] = slot
    with pytest.raises(InterpreterError, match="load outside of a torch.float32 tensor"):
        extend_attention(case.q, *case.cache, case.starts, case.prefix_lens, case.scale)
    with pytest.raises(InterpreterError, match="load outside of a torch.float32 tensor"):
        decode_attention(case.q[:2], *case.cache, case.prefix_lens + 1, case.scale)


def test_a_length_beyond_the_table_is_noticed():
    case = make_case([1], [9], kv_heads=1, dim=16, width=32)
    rows = torch.tensor([len(case.table) - 1])
    case.table[rows] = 0
    with pytest.raises(InterpreterError, match="load outside of a torch.int32 tensor"):
        decode_attention(case.q, *case.cache[:3], rows, torch.tensor([33]), case.scale)
