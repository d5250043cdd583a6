"""torch_native against the reference attention on random ragged batches; the small kernels against their formulas."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tinysrt.distributed.parallel_state import SINGLE
from tinysrt.kernels import reference
from tinysrt.kernels.kernel_set import REFERENCE
from tinysrt.mem_cache.memory_pool import KVPool
from tinysrt.model_executor.attention import torch_native
from tinysrt.model_executor.attention.torch_native import TorchNativeBackend
from tinysrt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from tinysrt.model_executor.layers.linear import Linear, can_pack
from tinysrt.model_executor.layers.lm_head import LMHead
from tinysrt.model_executor.layers.rotary import rope_cache

ROWS, WIDTH, KV_HEADS, DIM = 9, 300, 2, 8


def attention_case(mode: ForwardMode, news: list[int], prefixes: list[int], group: int, seed: int):
    """A pool with random KV for every visible position, NaN in every slot that nobody may read, and one batch."""
    torch.manual_seed(seed)
    lens = [new + prefix for new, prefix in zip(news, prefixes, strict=True)]
    pool = KVPool(sum(lens) + 20, 1, 1, KV_HEADS, DIM, torch.float32, "cpu")
    slots = torch.randperm(sum(lens) + 20) + 1
    for buffer in (pool.k_buffer[0], pool.v_buffer[0]):
        buffer[1:] = float("nan")  # a stranger's slots; slot 0 is the dummy and finite
    table = torch.zeros(ROWS, WIDTH, dtype=torch.int32)
    rows = (torch.randperm(ROWS - 1)[: len(news)] + 1).tolist()
    locs: list[int] = []
    used = 0
    for row, new, prefix in zip(rows, news, prefixes, strict=True):
        mine = slots[used : used + new + prefix]
        used += new + prefix
        table[row, : new + prefix] = mine.int()
        table[row, new + prefix :] = int(slots[-1])  # what an earlier request left behind: its KV is NaN
        pool.k_buffer[0][mine[:prefix]] = torch.randn(prefix, KV_HEADS, DIM)
        pool.v_buffer[0][mine[:prefix]] = torch.randn(prefix, KV_HEADS, DIM)
        locs += mine[prefix:].tolist()
    tokens = sum(news)
    qkv = torch.randn(tokens, KV_HEADS * group + 2 * KV_HEADS, DIM)
    positions = [p + i for new, p in zip(news, prefixes, strict=True) for i in range(new)]
    extend = mode is not ForwardMode.DECODE
    batch = ForwardBatch(
        forward_mode=mode,
        step=0,
        input_ids=torch.zeros(tokens, dtype=torch.int64),
        positions=torch.tensor(positions),
        out_cache_loc=torch.tensor(locs),
        req_pool_indices=torch.tensor(rows),
        seq_lens=torch.tensor(lens),
        seq_lens_cpu=lens,
        extend_seq_lens=news if extend else [],
        extend_prefix_lens=prefixes if extend else [],
    )
    return pool, table, batch, qkv


def make_backend(pool: KVPool, table: Tensor, group: int, window: int | None = None) -> TorchNativeBackend:
    cache = rope_cache(DIM, {"rope_type": "default", "rope_theta": 100.0}, WIDTH)
    return TorchNativeBackend(REFERENCE, pool, table, cache, KV_HEADS * group, DIM**-0.5, [window])


def check_attention(mode, news, prefixes, group, seed, window) -> None:
    pool, table, batch, qkv = attention_case(mode, news, prefixes, group, seed)
    backend = make_backend(pool, table, group, window)
    got = backend.attend(0, qkv, backend.plan(batch))
    q = backend.rope_and_store(0, qkv, batch.positions, batch.out_cache_loc)  # stores the same once more
    starts = F.pad(torch.tensor(news).cumsum(0), (1, 0))
    expected = reference.extend_attention(
        q,
        pool.k_buffer[0],
        pool.v_buffer[0],
        table,
        batch.req_pool_indices,
        starts,
        torch.tensor(prefixes),
        DIM**-0.5,
        window,
    )
    torch.testing.assert_close(got.view_as(expected), expected, rtol=1e-4, atol=1e-5)


lengths = st.integers(0, 90)
windows = st.none() | st.integers(1, 100)


@settings(max_examples=60, deadline=None)
@given(st.lists(lengths, min_size=1, max_size=8), st.sampled_from([1, 3, 4]), st.integers(0, 99), windows)
def test_decode_equals_the_reference_whatever_the_lengths(prefixes, group, seed, window):
    check_attention(ForwardMode.DECODE, [1] * len(prefixes), prefixes, group, seed, window)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 40), lengths), min_size=1, max_size=6),
    st.sampled_from([1, 3]),
    st.integers(0, 99),
    st.sampled_from([4, 16, 128]),
    windows,
)
def test_extend_equals_the_reference_whatever_the_lengths_and_blocks(requests, group, seed, block, window):
    saved, torch_native.QUERY_BLOCK = torch_native.QUERY_BLOCK, block
    try:
        news, prefixes = [new for new, _ in requests], [old for _, old in requests]
        check_attention(ForwardMode.MIXED, news, prefixes, group, seed, window)
    finally:
        torch_native.QUERY_BLOCK = saved


def test_lanes_padded_for_a_graph_attend_to_the_dummy_slot_only():
    pool, table, batch, qkv = attention_case(ForwardMode.DECODE, [1] * 3, [5, 30, 2], 3, 1)
    backend = make_backend(pool, table, 3)
    plain = backend.attend(0, qkv, backend.plan(batch))
    padded_batch = replace(
        batch,
        positions=F.pad(batch.positions, (0, 2)),
        out_cache_loc=F.pad(batch.out_cache_loc, (0, 2)),
        req_pool_indices=F.pad(batch.req_pool_indices, (0, 2)),
        seq_lens=F.pad(batch.seq_lens, (0, 2), value=1),
    )
    padded = backend.attend(0, F.pad(qkv, (0, 0, 0, 0, 0, 2)), backend.plan(padded_batch, padded_size=5))
    torch.testing.assert_close(padded[:3], plain)
    assert padded.isfinite().all()


# ---- the small kernels -----------------------------------------------------------------------------


def test_rms_norm_is_its_formula_and_head_norms_use_one_weight_row_each():
    x, weight = torch.randn(5, 3, 16), torch.randn(3, 16)
    expected = x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    torch.testing.assert_close(reference.rms_norm(x, weight, 1e-5), expected)
    normed, residual = reference.add_rms_norm(x[:, 0], x[:, 1], weight[0], 1e-5)
    torch.testing.assert_close(residual, x[:, 0] + x[:, 1])
    torch.testing.assert_close(normed, reference.rms_norm(residual, weight[0], 1e-5))


def test_rope_turns_pairs_keeps_their_length_and_stores_k_and_v():
    cache = rope_cache(6, {"rope_type": "default", "rope_theta": 100.0}, 9)
    qkv, positions, slots = torch.randn(4, 5, 6), torch.tensor([3, 0, 8, 1]), torch.tensor([2, 9, 1, 5])
    k_buffer, v_buffer = torch.zeros(2, 10, 1, 6)
    q = reference.rope_and_store(qkv, positions, cache, k_buffer, v_buffer, slots, num_heads=3)
    angle = (positions.unsqueeze(1) * torch.tensor([1.0, 100 ** (-1 / 3), 100 ** (-2 / 3)])).unsqueeze(1)
    first, second = qkv[:, :4, :3], qkv[:, :4, 3:]
    turned = torch.cat((first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()), dim=-1)
    torch.testing.assert_close(q, turned[:, :3])
    torch.testing.assert_close(k_buffer[slots], turned[:, 3:])
    torch.testing.assert_close(v_buffer[slots], qkv[:, 4:])
    torch.testing.assert_close(q.norm(dim=-1), qkv[:, :3].norm(dim=-1))
    assert k_buffer[[0, 3, 4, 6, 7, 8]].eq(0).all()


def test_silu_and_mul_gates_the_right_half_with_the_left():
    gate, up = torch.randn(2, 3, 4)
    torch.testing.assert_close(reference.silu_and_mul(torch.cat((gate, up), -1)), gate * gate.sigmoid() * up)


def test_decode_attention_is_extend_attention_of_one_token():
    pool, table, batch, qkv = attention_case(ForwardMode.DECODE, [1] * 3, [4, 9, 0], 2, 3)
    q = make_backend(pool, table, 2).rope_and_store(0, qkv, batch.positions, batch.out_cache_loc)
    out = reference.decode_attention(
        q, pool.k_buffer[0], pool.v_buffer[0], table, batch.req_pool_indices, batch.seq_lens, 0.3
    )
    slots = table[batch.req_pool_indices[1], :10].long()
    weights = (pool.k_buffer[0][slots, 1] @ q[1, 3] * 0.3).softmax(0)  # query head 3 reads KV head 1
    torch.testing.assert_close(out[1, 3], weights @ pool.v_buffer[0][slots, 1])


def test_a_window_hides_all_but_the_last_positions():
    pool, table, batch, qkv = attention_case(ForwardMode.EXTEND, [6], [9], 2, 5)
    q = make_backend(pool, table, 2).rope_and_store(0, qkv, batch.positions, batch.out_cache_loc)
    k_buffer, v_buffer, rows = pool.k_buffer[0], pool.v_buffer[0], batch.req_pool_indices
    bounds = torch.tensor([0, 6]), torch.tensor([9])
    out = reference.extend_attention(q, k_buffer, v_buffer, table, rows, *bounds, 0.3, window=4)
    slots = table[rows[0], 9 + 2 - 3 : 9 + 2 + 1].long()  # new token 2 sits at position 11 and sees 8 to 11
    weights = (k_buffer[slots, 0] @ q[2, 1] * 0.3).softmax(0)
    torch.testing.assert_close(out[2, 1], weights @ v_buffer[slots, 0])


def test_sample_tokens_draws_from_what_the_filters_leave():
    """Weights 8 : 4 : 2 : 1 at ids 2, 0, 3, 1; a uniform picks along the ids."""
    logits = torch.tensor([[4.0, 1.0, 8.0, 2.0]]).log().expand(7, 4)
    off = dict(top_k=4, top_p=1.0, min_p=0.0)
    rows = [
        (0.0, off, 0),
        (4.5 / 15, off, 1),
        (0.99, off, 3),
        (0.99, off | dict(top_k=2), 2),
        (0.1, off | dict(top_k=1), 2),
        (0.99, off | dict(top_p=0.5), 2),  # 8 / 15 already covers one half
        (0.99, off | dict(min_p=0.3), 2),
    ]
    ids = reference.sample_tokens(
        logits,
        torch.ones(7),
        torch.tensor([row["top_k"] for _, row, _ in rows]),
        torch.tensor([row["top_p"] for _, row, _ in rows]),
        torch.tensor([row["min_p"] for _, row, _ in rows]),
        torch.tensor([uniform for uniform, _, _ in rows], dtype=torch.float64),
    )
    assert ids.tolist() == [token for _, _, token in rows]


def test_grouped_gemm_sends_each_row_through_its_groups_matrix():
    x, weight = torch.randn(5, 3), torch.randn(3, 2, 3)
    y = reference.grouped_gemm(x, weight, torch.tensor([0, 2, 2, 5]))
    torch.testing.assert_close(y, torch.cat((x[:2] @ weight[0].T, x[2:] @ weight[2].T)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
def test_packed_and_plain_linear_agree(dtype, bias):
    linear = Linear(48, [32, 16], bias=bias).to(dtype)
    linear.weight.normal_()
    if linear.bias is not None:
        linear.bias.normal_()
    inputs: list[Tensor] = [torch.randn(n, 48, dtype=dtype) for n in (1, 3, 33)]
    plain = [linear(x) for x in inputs]
    assert can_pack(linear.weight), "oneDNN is part of every CPU build"
    linear.pack()
    assert linear.packed is not None and linear.weight.numel() == 0
    for x, expected in zip(inputs, plain, strict=True):
        torch.testing.assert_close(linear(x), expected, rtol=2e-2 if dtype is torch.bfloat16 else 1e-5, atol=1e-4)


def test_the_best_logits_of_a_bfloat16_head_are_exact():
    """In bf16 the two best logits of a row often fall on one number, and their ids would decide."""
    torch.manual_seed(4)
    head = LMHead(64, 500, SINGLE).bfloat16()
    head.weight.normal_()
    hidden = torch.randn(6, 64, dtype=torch.bfloat16)
    exact = hidden.float() @ head.weight.float().T
    head.pack(keep_weight=True)
    logits = head(hidden)
    assert logits.dtype == torch.float32
    best = exact.topk(3).indices
    torch.testing.assert_close(logits.gather(1, best), exact.gather(1, best))
    torch.testing.assert_close(logits, exact, rtol=1e-2, atol=1e-2)
