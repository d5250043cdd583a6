"""The Numba kernels: each against its definition, over random shapes, pages, formats and thread counts.

KV lies in pages at random among NaN, and memory that a kernel should fill holds NaN before (`poisoned`), so reading a
stranger's slot or leaving a number out shows.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.kernels.cases import TOLERANCE, assert_close, attention, make_case
from tinysrt.kernels import numba_attention, reference
from tinysrt.kernels.kernel_set import load_kernels
from tinysrt.kernels.numba_runtime import tiles_work

NUMBA = load_kernels("numba")
MANY = settings(max_examples=40, deadline=None)

formats = st.sampled_from([torch.float32, torch.bfloat16])
threads = st.sampled_from([1, 2])
shapes = st.fixed_dictionaries(
    {
        "dim": st.sampled_from([8, 10, 16, 64, 80, 96, 128]),
        "group": st.sampled_from([1, 2, 3, 7]),
        "kv_heads": st.sampled_from([1, 3]),
        "page": st.sampled_from([1, 4, 16]),
        "dtype": formats,
        "seed": st.integers(0, 99),
    }
)
tiled_shapes = st.fixed_dictionaries(
    {
        "dim": st.sampled_from([32, 64, 96, 128]),
        "group": st.sampled_from([1, 3, 7]),
        "kv_heads": st.sampled_from([1, 3]),
        "page": st.sampled_from([1, 16]),
        "dtype": st.just(torch.bfloat16),
        "seed": st.integers(0, 99),
    }
)
windows = st.sampled_from([None, None, 1, 5, 64, 100])
with_tiles = pytest.mark.skipif(not tiles_work(), reason="this processor has no AMX")


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fresh memory holds NaN (or an impossible token), and each test leaves the thread count as it was."""
    empty = torch.empty

    def poison(*args, **kwargs) -> Tensor:
        made = empty(*args, **kwargs)
        return made.fill_(float("nan")) if made.is_floating_point() else made.fill_(-7)

    monkeypatch.setattr(torch, "empty", poison)
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def rand(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# ---- attention -------------------------------------------------------------------------------------


@MANY
@given(st.lists(st.integers(1, 150), max_size=9), shapes, windows, threads)
def test_decode_attention(lens, shape, window, thread_count):
    torch.set_num_threads(thread_count)
    case = make_case([1] * len(lens), [n - 1 for n in lens], **shape) if lens else None
    if case is None:
        return
    out = NUMBA.decode_attention(case.q, *case.cache, torch.tensor(lens), case.scale, window)
    assert_close(out, attention(case, window))


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 90)), min_size=1, max_size=4), shapes, windows, threads)
def test_extend_attention(requests, shape, window, thread_count):
    torch.set_num_threads(thread_count)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(numba_attention, "tiles_work", lambda: False)  # what most processors run
        _extend(requests, shape, window)


def _extend(requests, shape, window=None, width=512):
    case = make_case([new for new, _ in requests], [old for _, old in requests], width=width, **shape)
    out = NUMBA.extend_attention(case.q, *case.cache, case.starts, case.prefix_lens, case.scale, window)
    assert_close(out, attention(case, window))


@with_tiles
@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 70), st.integers(0, 300)), min_size=1, max_size=4), tiled_shapes, windows, threads
)
def test_extend_attention_in_tiles(requests, shape, window, thread_count):
    torch.set_num_threads(thread_count)
    _extend(requests, shape, window)


@with_tiles
@pytest.mark.parametrize("window", [None, 300])
def test_tiles_of_long_requests(window):
    """Several blocks of keys and tickets, and requests without a token among them."""
    _extend([(0, 9), (400, 700), (0, 0), (1, 1023), (33, 0)], {"dtype": torch.bfloat16}, window, width=1200)


@with_tiles
def test_tiles_with_nan_and_with_scores_far_apart():
    case = make_case([40, 40], [300, 9], dtype=torch.bfloat16)
    case.q.mul_(300.0)
    arguments = *case.cache, case.starts, case.prefix_lens, case.scale
    assert_close(NUMBA.extend_attention(case.q, *arguments), attention(case))
    case.k_buffer[case.table[case.rows[0], 4].long()] = float("nan")
    out = NUMBA.extend_attention(case.q, *arguments)
    assert out[:40].isnan().all() and not out[40:].isnan().any()


def test_lanes_of_padding_read_slot_0_only_and_harm_nobody():
    case = make_case([1, 1, 1], [0, 70, 3])
    k, v, table, rows = case.cache
    lens = case.prefix_lens + 1
    alone = NUMBA.decode_attention(case.q, k, v, table, rows, lens, case.scale)
    pad = lambda x, value: torch.cat((x, torch.full((2, *x.shape[1:]), value, dtype=x.dtype)))  # noqa: E731
    padded = NUMBA.decode_attention(pad(case.q, 1.0), k, v, table, pad(rows, 0), pad(lens, 1), case.scale)
    assert torch.equal(padded[:3], alone) and padded.isfinite().all()


def test_a_batch_without_requests():
    case = make_case([1], [5])
    k, v, table, rows = case.cache
    assert NUMBA.decode_attention(case.q[:0], k, v, table, rows[:0], rows[:0], 1.0).shape == (0, 6, 64)
    out = NUMBA.extend_attention(case.q[:0], k, v, table, rows[:0], torch.zeros(1, dtype=torch.int64), rows[:0], 1.0)
    assert out.shape == (0, 6, 64)


def test_nan_in_a_requests_own_keys_is_seen():
    case = make_case([1], [9])
    case.k_buffer[case.table[case.rows[0], 4].long()] = float("nan")
    assert NUMBA.decode_attention(case.q, *case.cache, torch.tensor([10]), case.scale).isnan().all()


def test_scores_far_apart_and_very_large_ones():
    case = make_case([1, 1], [80, 40], dim=16)
    case.q.mul_(300.0)
    out = NUMBA.decode_attention(case.q, *case.cache, case.prefix_lens + 1, case.scale)
    assert_close(out, attention(case))


# ---- the small functions ---------------------------------------------------------------------------

rows_of = st.integers(0, 40)
dims = st.sampled_from([1, 7, 64, 576, 1000])


@MANY
@given(rows_of, dims, formats, st.integers(0, 99), threads)
def test_rms_norm_and_add_rms_norm(rows, dim, dtype, seed, thread_count):
    torch.set_num_threads(thread_count)
    x, residual, weight = rand(rows, dim, dtype=dtype, seed=seed), rand(rows, dim, seed=seed + 1), rand(dim, seed=seed)
    normed = NUMBA.rms_norm(x, weight, 1e-5)
    assert normed.dtype == dtype
    assert_close(normed, reference.rms_norm(x.double(), weight.double(), 1e-5))
    expected, expected_sum = reference.add_rms_norm(x.double(), residual.double(), weight.double(), 1e-5)
    normed, total = NUMBA.add_rms_norm(x, residual.clone(), weight, 1e-5)
    assert normed.dtype == dtype and total.dtype == torch.float32
    assert_close(normed, expected)
    torch.testing.assert_close(total, residual + x.float())


@MANY
@given(st.integers(0, 9), st.sampled_from([8, 64]), formats)
def test_head_norms_read_a_view_of_the_fused_projection(tokens, dim, dtype):
    qkv, weight = rand(tokens, 8, dim, dtype=dtype), rand(6, dim)
    out = NUMBA.rms_norm(qkv[:, :6], weight, 1e-6)
    assert out.is_contiguous()
    assert_close(out, reference.rms_norm(qkv[:, :6].double(), weight.double(), 1e-6))


@MANY
@given(rows_of, st.sampled_from([1, 40, 1536]), formats, threads)
def test_silu_and_mul(rows, width, dtype, thread_count):
    torch.set_num_threads(thread_count)
    gate_up = rand(rows, 2 * width, dtype=dtype) * 6
    assert_close(NUMBA.silu_and_mul(gate_up), reference.silu_and_mul(gate_up.double()))


def test_silu_of_extremes():
    gate = torch.tensor([[-1e30, -200.0, -90.0, 0.0, 90.0, 1e30, float("nan")]])
    out = NUMBA.silu_and_mul(torch.cat((gate, torch.ones_like(gate)), dim=-1))
    expected = reference.silu_and_mul(torch.cat((gate, torch.ones_like(gate)), dim=-1))
    torch.testing.assert_close(out, expected, equal_nan=True, atol=1e-30, rtol=1e-5)


@MANY
@given(st.integers(0, 30), st.sampled_from([1, 3]), st.sampled_from([1, 2]), st.sampled_from([2, 10, 64]), formats)
def test_rope_and_store(tokens, group, kv_heads, dim, dtype):
    heads = group * kv_heads
    qkv = rand(tokens, heads + 2 * kv_heads, dim, dtype=dtype)
    positions, cache = torch.arange(tokens) * 3 % 50, rand(50, dim)
    slots = torch.randperm(60, generator=torch.Generator().manual_seed(tokens))[:tokens] + 1
    buffers = [torch.full((61, kv_heads, dim), 7.0, dtype=dtype) for _ in range(4)]
    q = NUMBA.rope_and_store(qkv, positions, cache, *buffers[:2], slots, heads)
    expected = reference.rope_and_store(qkv, positions, cache, *buffers[2:], slots, heads)
    assert_close(q, expected.double())
    assert_close(buffers[0], buffers[2].double())
    assert torch.equal(buffers[1], buffers[3])


def test_rope_of_a_wider_row_and_of_padding():
    qkv, cache = rand(3, 9, 8), rand(20, 8)
    view = qkv[:, :5]  # 3 query heads, 1 KV head; rows are 9 heads apart
    buffers = [torch.zeros(4, 1, 8) for _ in range(4)]
    slots, positions = torch.tensor([0, 2, 0]), torch.tensor([0, 5, 0])
    q = NUMBA.rope_and_store(view, positions, cache, *buffers[:2], slots, 3)
    assert_close(q, reference.rope_and_store(view, positions, cache, *buffers[2:], slots, 3).double())
    assert torch.equal(buffers[0][2], buffers[2][2]) and torch.equal(buffers[1][2], buffers[3][2])


# ---- linear layers of few rows -----------------------------------------------------------------------


@MANY
@given(
    st.integers(0, 9), st.sampled_from([1, 33, 576]), st.sampled_from([1, 31, 130]), st.booleans(), formats,
    st.booleans(), threads,
)  # fmt: skip
def test_few_rows_linear(rows, size, outputs, bias, dtype, wide, thread_count):
    torch.set_num_threads(thread_count)
    x, w = rand(rows, size, dtype=dtype, seed=1), rand(outputs, size, dtype=dtype, seed=2)
    b = rand(outputs, dtype=dtype, seed=3) if bias else None
    out = NUMBA.few_rows_linear(x, w, b, torch.float32 if wide else dtype)
    expected = torch.nn.functional.linear(x.double(), w.double(), b.double() if b is not None else None)
    assert_close(out, expected)


# ---- sampling ----------------------------------------------------------------------------------------


def sampling_case(vocab: int, flat: bool, seed: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    draw = lambda: torch.rand(5, generator=generator)  # noqa: E731
    logits = torch.randn(5, vocab, generator=generator) * 3
    if flat:
        logits = logits.round()  # many equal ones: the order of ids decides
    top_k = torch.randint(1, vocab + 2, (5,), generator=generator)
    top_k[0] = vocab  # off
    top_p = torch.where(draw() < 0.3, torch.ones(5), draw() * 0.98 + 0.01)
    min_p = torch.where(draw() < 0.5, torch.zeros(5), draw() * 0.3)
    return logits, draw() * 2 + 0.05, top_k, top_p, min_p, draw().double()


def near_an_edge(logits, temperatures, top_k, top_p, min_p, uniforms) -> Tensor:
    """Rows that a rounding error may decide: a mass, a share or the drawn number almost exactly at a limit."""
    probs = ((logits.double() - logits.double().amax(1, keepdim=True)) / temperatures.double().unsqueeze(1)).softmax(1)
    ranked = probs.sort(dim=1, descending=True, stable=True)
    before = ranked.values.cumsum(1) - ranked.values
    edge = (before - top_p.double().unsqueeze(1)).abs().amin(1) < 1e-5
    edge |= (ranked.values - min_p.double().unsqueeze(1) * ranked.values[:, :1]).abs().amin(1) < 1e-6
    keep = reference.keep_top_k_top_p_min_p(
        ranked.values, top_k.unsqueeze(1), top_p.double().unsqueeze(1), min_p.double().unsqueeze(1)
    )
    kept = torch.zeros_like(probs).scatter(1, ranked.indices, ranked.values * keep)
    steps = kept.cumsum(1) / kept.sum(1, keepdim=True)
    return edge | ((steps - uniforms.unsqueeze(1)).abs().amin(1) < 1e-5)


@MANY
@given(st.sampled_from([1, 2, 40, 300, 2000]), st.booleans(), st.integers(0, 999), threads)
def test_sample_tokens(vocab, flat, seed, thread_count):
    torch.set_num_threads(thread_count)
    case = sampling_case(vocab, flat, seed)
    clear = ~near_an_edge(*case)
    assert torch.equal(NUMBA.sample_tokens(*case)[clear], reference.sample_tokens(*case)[clear])


def test_equal_logits_rank_by_id_wherever_a_loop_meets_them():
    """Their weights may differ in the last bit; once 37 outranked 5 for it, in code fresh from the compiler."""
    logits = torch.full((1, 40), -9.0)
    logits[0, 0], logits[0, [5, 37]] = 2.0, 1.2345678
    one, two, off = torch.ones(1), torch.tensor([2]), torch.zeros(1)
    numbers = [torch.tensor([u], dtype=torch.float64) for u in (0.1, 0.999)]
    for temperature in (0.7, 1.3, 2.0086):
        drawn = [int(NUMBA.sample_tokens(logits, one * temperature, two, one, off, u)) for u in numbers]
        assert drawn == [0, 5]


def test_a_row_without_a_distribution_harms_nobody():
    logits, *rest = sampling_case(40, False, 1)
    alone = NUMBA.sample_tokens(logits, *rest)
    logits[1, 3], logits[2, 3], logits[3] = float("nan"), float("inf"), float("-inf")
    ids = NUMBA.sample_tokens(logits, *rest)
    assert torch.equal(ids[[0, 4]], alone[[0, 4]]) and (0 <= ids).all() and (ids < 40).all()


def test_forbidden_tokens_are_never_drawn():
    logits, temperatures, top_k, _, _, _ = sampling_case(40, False, 2)
    logits[:, ::2] = float("-inf")
    ones = torch.ones(5)
    for number in (0.0, 0.3, 1 - 2**-32):
        uniforms = torch.full((5,), number, dtype=torch.float64)
        ids = NUMBA.sample_tokens(logits, temperatures, torch.full((5,), 40), ones, ones * 0, uniforms)
        assert (ids % 2 == 1).all()


# ---- how they are started ------------------------------------------------------------------------------


def test_results_do_not_depend_on_the_number_of_threads():
    case = make_case([1] * 9, [3, 99, 0, 64, 20, 7, 150, 31, 64])
    results = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        results.append(NUMBA.decode_attention(case.q, *case.cache, case.prefix_lens + 1, case.scale))
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_is_that_of_pytorch(dtype):
    """silu(x) * up with x huge is x * up exactly, so only the rounding of the result is left."""
    up = rand(1, 4096)
    up[0, :6] = torch.tensor([0.0, -0.0, float("inf"), float("-inf"), float("nan"), 3.3895e38])
    gate = torch.full_like(up, 1.0)
    expected = (up * torch.sigmoid(torch.tensor(1.0))).to(dtype)
    out = NUMBA.silu_and_mul(torch.cat((gate, up.bfloat16().float()), dim=-1).to(dtype))
    expected = (up.bfloat16().float() * torch.sigmoid(torch.tensor(1.0))).to(dtype)
    torch.testing.assert_close(out, expected, equal_nan=True, rtol=TOLERANCE[dtype], atol=0)
