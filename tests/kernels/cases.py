"""Inputs for the attention kernels, and what they must compute, in float64."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
NOWHERE = 2**30  # a slot that no pool has


def error(out: Tensor, expected: Tensor) -> float:
    difference, size = (out.double() - expected.double()).norm(), expected.double().norm()
    return float(difference / size) if size else float(difference)


def assert_close(out: Tensor, expected: Tensor) -> None:
    assert out.shape == expected.shape
    found = error(out, expected)
    assert found <= TOLERANCE[out.dtype], f"error {found:.2e}"  # NaN fails too


@dataclass(frozen=True)
class Case:
    """Requests whose KV lies in pages at random, among NaN; the table names no slot beyond a request's end."""

    q: Tensor
    k_buffer: Tensor
    v_buffer: Tensor
    table: Tensor
    rows: Tensor
    starts: Tensor
    prefix_lens: Tensor
    scale: float

    @property
    def cache(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.k_buffer, self.v_buffer, self.table, self.rows


def make_case(
    news: list[int],
    prefixes: list[int],
    *,
    group: int = 3,
    kv_heads: int = 2,
    dim: int = 64,
    dtype: torch.dtype = torch.float32,
    page: int = 4,
    width: int = 512,
    seed: int = 0,
) -> Case:
    generator = torch.Generator().manual_seed(seed)
    requests = len(news)
    pages_each = [-(-(new + prefix) // page) for new, prefix in zip(news, prefixes, strict=True)]
    order = torch.randperm(sum(pages_each) + 3, generator=generator) + 1  # page 0 is the dummy
    slots_total = page * (len(order) + 1)
    k_buffer = torch.full((slots_total, kv_heads, dim), float("nan"), dtype=dtype)
    v_buffer = k_buffer.clone()
    k_buffer[0] = v_buffer[0] = 0.0
    rows = torch.randperm(requests + 2, generator=generator)[:requests] + 1
    table = torch.full((requests + 3, width), NOWHERE, dtype=torch.int32)
    table[0] = 0
    used = 0
    for row, new, prefix, pages in zip(rows.tolist(), news, prefixes, pages_each, strict=True):
        mine = (order[used : used + pages, None] * page + torch.arange(page)).flatten()[: new + prefix]
        used += pages
        table[row, : new + prefix] = mine.int()
        for buffer in (k_buffer, v_buffer):
            buffer[mine] = torch.randn(len(mine), kv_heads, dim, generator=generator).to(dtype)
    return Case(
        q=torch.randn(sum(news), group * kv_heads, dim, generator=generator).to(dtype),
        k_buffer=k_buffer,
        v_buffer=v_buffer,
        table=table,
        rows=rows,
        starts=torch.tensor([0, *torch.tensor(news).cumsum(0).tolist()]),
        prefix_lens=torch.tensor(prefixes),
        scale=dim**-0.5,
    )


def attention(case: Case, window: int | None = None) -> Tensor:
    out = torch.full(case.q.shape, float("nan"), dtype=torch.float64)
    group = case.q.shape[1] // case.k_buffer.shape[1]
    bounds = case.starts.tolist()
    for i, (row, prefix) in enumerate(zip(case.rows.tolist(), case.prefix_lens.tolist(), strict=True)):
        for token in range(bounds[i], bounds[i + 1]):
            position = prefix + token - bounds[i]
            first = 0 if window is None else max(0, position - window + 1)
            slots = case.table[row, first : position + 1].long()
            key = case.k_buffer[slots].double().repeat_interleave(group, dim=1)  # (n, heads, dim)
            value = case.v_buffer[slots].double().repeat_interleave(group, dim=1)
            weights = torch.einsum("hd,nhd->hn", case.q[token].double(), key).mul(case.scale).softmax(dim=-1)
            out[token] = torch.einsum("hn,nhd->hd", weights, value)
    return out
