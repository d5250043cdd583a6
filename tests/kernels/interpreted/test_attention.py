"""The attention kernels against float64, in the interpreter."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.cases import assert_close, attention, error, make_case
from tinysrt.kernels.triton_attention import decode_attention, extend_attention, split_count

pytestmark = pytest.mark.usefixtures("tile")
BLOCK = 64  # of the tile: positions, and query rows
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
EDGES = [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 5]


def check_decode(lens: list[int], window: int | None = None, **kwargs) -> None:
    case = make_case([1] * len(lens), [n - 1 for n in lens], **kwargs)
    out = decode_attention(case.q, *case.cache, torch.tensor(lens), case.scale, window)
    assert_close(out, attention(case, window))


def check_extend(news: list[int], prefixes: list[int], window: int | None = None, **kwargs) -> None:
    case = make_case(news, prefixes, **kwargs)
    out = extend_attention(case.q, *case.cache, case.starts, case.prefix_lens, case.scale, window)
    assert_close(out, attention(case, window))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_decode_at_the_edges_of_blocks(dtype):
    check_decode(EDGES, dtype=dtype, width=BLOCK * 3)  # one split


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_extend_at_the_edges_of_blocks(dtype):
    tokens = BLOCK // 3  # a group of 3: so many tokens fill the rows of a program
    check_extend([1, tokens - 1, tokens, tokens + 1], [0, BLOCK, BLOCK - 1, 1], dtype=dtype)


@pytest.mark.parametrize("dim", [64, 80, 96, 128])
def test_head_sizes(dim):
    check_decode([5, BLOCK + 2], dim=dim)
    check_extend([5, 2], [0, BLOCK], dim=dim)


@pytest.mark.parametrize("group", [1, 2, 4, 7, 8, 20])
def test_group_sizes(group):
    """7 leaves a row of the tile unused, 20 is more than a tile of 16 rows holds."""
    check_decode([3, BLOCK + 1], group=group, kv_heads=1, dim=16)
    check_extend([7, 4], [0, 6], group=group, kv_heads=1, dim=16)


@pytest.mark.parametrize("page", [1, 16])
def test_page_sizes(page):
    check_decode([7, 33], page=page, kv_heads=1, dim=16)


def test_splits_merge_and_those_without_positions_weigh_nothing():
    case = make_case([1] * 4, [0, BLOCK, 3 * BLOCK, 400], dim=32, kv_heads=1)
    assert split_count(4, 1, case.table.shape[1]) == 4
    out = decode_attention(case.q, *case.cache, case.prefix_lens + 1, case.scale)
    assert_close(out, attention(case))


def test_the_number_of_splits_follows_from_shapes():
    assert split_count(256, 8, 40_960) == 1
    assert split_count(1, 8, 40_960) == 32
    assert split_count(1, 8, 300) == 2
    assert split_count(1, 1, 100) == 1
    assert split_count(0, 8, 4096) == 32  # an empty batch launches nothing, but must not fail


@pytest.mark.parametrize("window", [1, 5, BLOCK, 100])
def test_windows(window):
    check_decode([1, 7, BLOCK + 1, 300], window, kv_heads=1, dim=16)
    check_extend([70, 1, 30], [0, 99, 40], window, kv_heads=1, dim=16)


def test_a_length_of_zero_harms_nobody():
    case = make_case([1, 1], [4, 5], kv_heads=1, dim=16)
    out = decode_attention(case.q, *case.cache, torch.tensor([0, 6]), case.scale)
    assert out[0].eq(0).all()
    assert error(out[1], attention(case)[1]) < 1e-5


def test_requests_without_new_tokens_and_many_requests():
    news = [0, 2, 0, 0, 1, 0] + [1] * 130  # more than the 128 starts that are looked at together
    check_extend(news, [3, 0, 0, 5, 2, 1] + [i % 3 for i in range(130)], group=2, kv_heads=1, dim=16)


def test_no_token_at_all():
    case = make_case([0, 0], [3, 4], kv_heads=1, dim=16)
    assert extend_attention(case.q, *case.cache, case.starts, case.prefix_lens, case.scale).shape == (0, 3, 16)


def test_padding_lanes_read_the_dummy_slot():
    case = make_case([1, 1], [4, 5], kv_heads=1, dim=16)
    rows = torch.cat((case.rows, torch.zeros(2, dtype=torch.int64)))
    q = torch.cat((case.q, case.q))
    out = decode_attention(q, *case.cache[:3], rows, torch.tensor([5, 6, 1, 1]), case.scale)
    assert_close(out[:2], attention(case))
    assert out[2:].eq(0).all()  # what the dummy holds


def test_queries_may_lie_apart():
    """A slice of the fused projection: only heads and dimensions are packed."""
    case = make_case([3, 1], [2, 3], kv_heads=1, dim=16)
    apart = torch.cat((case.q, case.q), dim=1)[:, :3]
    assert not apart.is_contiguous()
    out = extend_attention(apart, *case.cache, case.starts, case.prefix_lens, case.scale)
    assert_close(out, attention(case))
