"""sample_tokens and grouped_gemm, in the interpreter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.kernels.cases import assert_close
from tinysrt.kernels import reference, triton_moe, triton_sampling
from tinysrt.kernels.triton_moe import grouped_gemm
from tinysrt.kernels.triton_sampling import sample_tokens
from tinysrt.kernels.triton_tiles import Tile


def rows(logits: Tensor, *, temperature=1.0, top_k=10**6, top_p=1.0, min_p=0.0) -> list[Tensor]:
    """The parameters of `sample_tokens`, one value for all rows or a list."""
    size = len(logits)

    def column(value, dtype) -> Tensor:
        return torch.tensor(value if isinstance(value, list) else [value] * size, dtype=dtype)

    return [
        column(temperature, torch.float32),
        column(top_k, torch.int64).clamp(max=logits.shape[1]),
        column(top_p, torch.float32),
        column(min_p, torch.float32),
    ]


@pytest.mark.parametrize(
    "params",
    [
        dict(),
        dict(temperature=[0.5, 1.0, 2.0, 1e-6]),
        dict(top_k=[1, 2, 40, 299]),
        dict(top_p=[0.1, 0.5, 0.9, 0.999]),
        dict(min_p=[0.01, 0.1, 0.5, 1.0]),
        dict(temperature=0.7, top_k=[50, 20, 300, 3], top_p=[0.9, 0.5, 0.95, 1.0], min_p=[0.0, 0.05, 0.1, 0.0]),
    ],
    ids=["plain", "temperature", "top-k", "top-p", "min-p", "all"],
)
def test_draws_what_the_reference_draws(params):
    torch.manual_seed(3)
    logits = torch.randn(4, 300) * 3
    uniforms = torch.rand(4, dtype=torch.float64)
    columns = rows(logits, **params)
    expected = reference.sample_tokens(logits, *columns, uniforms)
    assert sample_tokens(logits, *columns, uniforms).tolist() == expected.tolist()


def test_a_vocabulary_of_several_blocks(monkeypatch):
    monkeypatch.setattr(triton_sampling, "BLOCK", 128)
    torch.manual_seed(5)
    logits = torch.randn(2, 300) * 2
    columns = rows(logits, top_k=[300, 60], top_p=[1.0, 0.8])
    for u in (0.0, 0.37, 0.93, 1 - 2**-32):
        uniforms = torch.full((2,), u, dtype=torch.float64)
        expected = reference.sample_tokens(logits, *columns, uniforms)
        assert sample_tokens(logits, *columns, uniforms).tolist() == expected.tolist()


def drawable(logits: Tensor, columns: list[Tensor], points: int = 10) -> list[int]:
    """Every token of at least a tenth of the weight left that can be drawn, for one row."""
    copies = logits.expand(points, -1).contiguous()
    uniforms = (torch.arange(points, dtype=torch.float64) + 0.5) / points
    return sorted(set(sample_tokens(copies, *(c.expand(points).contiguous() for c in columns), uniforms).tolist()))


def test_ties_at_the_border_are_kept_in_the_order_of_ids():
    logits = torch.log2(torch.tensor([[1.0, 4.0, 1.0, 2.0, 1.0, 1.0]])) * 0.6931471805599453  # weights over 10
    assert drawable(logits, rows(logits, top_k=4)) == [0, 1, 2, 3]
    # Mass before: 4 and 2 have 0 and 0.4; the ties 0.6, 0.7, 0.8, 0.9.
    assert drawable(logits, rows(logits, top_p=0.65)) == [0, 1, 3]
    assert drawable(logits, rows(logits, top_p=0.75)) == [0, 1, 2, 3]
    assert drawable(logits, rows(logits, min_p=0.4), 3) == [1, 3]


def test_the_best_token_always_stays():
    logits = torch.randn(1, 50)
    best = [int(logits.argmax())]
    assert drawable(logits, rows(logits, top_p=0.0), 2) == best
    assert drawable(logits, rows(logits, top_k=1), 2) == best
    assert drawable(logits, rows(logits, min_p=1.0), 2) == best


def test_rows_are_drawn_by_their_own_parameters_whatever_the_others_need():
    torch.manual_seed(9)
    logits = torch.randn(3, 100)
    uniforms = torch.rand(3, dtype=torch.float64)
    together = sample_tokens(logits, *rows(logits, top_k=[100, 5, 100], top_p=[1.0, 0.9, 0.3]), uniforms)
    alone = [
        sample_tokens(logits[i : i + 1], *rows(logits[:1], top_k=[k], top_p=[p]), uniforms[i : i + 1])
        for i, (k, p) in enumerate([(100, 1.0), (5, 0.9), (100, 0.3)])
    ]
    assert together.tolist() == [int(token) for token in alone]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy remarks on NaN
def test_forbidden_and_broken_logits():
    logits = torch.randn(3, 40)
    logits[0, :39] = float("-inf")
    logits[1] = float("nan")
    logits[2, 3] = float("inf")
    tokens = sample_tokens(logits, *rows(logits, top_k=7), torch.full((3,), 0.4, dtype=torch.float64)).tolist()
    assert tokens[0] == 39
    assert all(0 <= token < 40 for token in tokens)


def test_frequencies_are_the_probabilities():
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]])
    points = 40
    copies = logits.expand(points, -1).contiguous()
    uniforms = (torch.arange(points, dtype=torch.float64) + 0.5) / points
    tokens = sample_tokens(copies, *rows(copies), uniforms)
    frequencies = tokens.bincount(minlength=4) / points
    torch.testing.assert_close(frequencies, logits[0].softmax(dim=0), atol=1 / points, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "sizes", [[20, 0, 1, 29], [0, 0, 0, 3], [32, 31, 33, 0], [0, 0, 0, 0]], ids=lambda sizes: "-".join(map(str, sizes))
)
def test_grouped_gemm(sizes, dtype, monkeypatch):
    monkeypatch.setattr(triton_moe, "grouped_tile", lambda x: Tile(32, 64, 4, 1))
    torch.manual_seed(1)
    offsets = torch.tensor([0, *torch.tensor(sizes).cumsum(0).tolist()])
    x, weight = torch.randn(sum(sizes), 70).to(dtype), torch.randn(4, 90, 70).to(dtype)
    expected = torch.zeros(len(x), 90, dtype=torch.float64)
    for e, (begin, end) in enumerate(zip(offsets.tolist(), offsets.tolist()[1:], strict=False)):
        expected[begin:end] = x[begin:end].double() @ weight[e].double().T
    assert_close(grouped_gemm(x, weight, offsets), expected)
