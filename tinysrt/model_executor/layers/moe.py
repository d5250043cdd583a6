"""Mixture of experts: many small MLPs, of which each token visits a few.

    x (T, h) ─ router ─ softmax ─ top k ─▶ experts (T, k), weights (T, k)
                                                │ sort the T·k visits by expert
       rows    t3 t7 │ t0 t3 t5 │   │ t1 …      ▼           offsets 0 2 5 5 …  (E + 1)
            expert 0 │ expert 1 │ 2 │ 3 …    grouped_gemm ─ silu·mul ─ grouped_gemm
                                                │ back in the order of tokens: (T, k, h)
                                                ▼
                              sum over k of weight · row  ─▶ (T, h)

Sorting makes the visits of one expert neighbors: its weights are read once for all its rows, and those of an expert
that nobody visits are not read at all. A decode step of few requests therefore reads few experts; a batch of 64 reads
nearly all of them.

How many rows each expert gets stays on the device, in `offsets`, and every shape follows from T and k alone. So the
layer can stand in a captured graph. Padding rows are routed like any other and touch nobody: what a token gets is the
sum of its own k rows, in the order of its own choice and in float32.

All experts together are two parameters, gate and up fused: (E, 2n, h) and (E, h, n). Packing each expert's matrices for
oneDNN, as `Linear` does with its own, does not pay: an expert sees one or two rows of a decode step, and there the
plain product reads its weights as fast.

Tensor parallel cuts every expert's intermediate size n: a rank holds n / tp rows of each gate and up and the matching
columns of down; all ranks route alike, and one all-reduce adds up their shares. Source: SGLang `layers/moe/`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tinysrt.distributed.parallel_state import Cut, ParallelState
from tinysrt.kernels.kernel_set import KernelSet
from tinysrt.model_executor.layers.linear import empty_parameter


def route(logits: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    """Router logits (T, E) → the k best experts of each token, (T, k) int64, and their weights, (T, k) float32.
    `renormalize`: the k weights add up to 1; else they are shares of a softmax over all experts."""
    weights, experts = logits.float().softmax(dim=-1).topk(top_k, dim=-1)
    if renormalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return experts, weights


def group_by_expert(experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """(T, k) choices → `order` (T·k,): the visits t·k + j, expert by expert; `offsets` (E + 1,): where each begins."""
    chosen, order = experts.view(-1).sort(stable=True)
    return order, torch.searchsorted(chosen, torch.arange(num_experts + 1, device=experts.device))


class Experts(nn.Module):
    """The matrices of all experts. A checkpoint holds them expert by expert, or all in one tensor: the loader has
    places for the first kind (`places`) and takes the second apart (`one_by_one`)."""

    def __init__(self, num_experts: int, hidden_size: int, intermediate_size: int, parallel: ParallelState):
        super().__init__()
        mine = parallel.share(intermediate_size, "moe_intermediate_size")
        self.parallel = parallel
        self.gate_up_proj = empty_parameter(num_experts, 2 * mine, hidden_size)
        self.down_proj = empty_parameter(num_experts, hidden_size, mine)

    def places(self, prefix: str) -> dict[str, tuple[Tensor, Cut | None]]:
        """Checkpoint name → the part of a parameter that it fills, and which part of the tensor goes there."""
        rows, columns = self.parallel.my_cut(0), self.parallel.my_cut(1)
        places: dict[str, tuple[Tensor, Cut | None]] = {}
        for e, (gate_up, down) in enumerate(zip(self.gate_up_proj, self.down_proj, strict=True)):
            gate, up = gate_up.chunk(2)
            places |= {
                f"{prefix}.{e}.gate_proj.weight": (gate, rows),  # (n / tp, h)
                f"{prefix}.{e}.up_proj.weight": (up, rows),
                f"{prefix}.{e}.down_proj.weight": (down, columns),  # (h, n / tp)
            }
        return places


def is_of_all_experts(name: str) -> bool:
    """Is this a tensor of all experts, as transformers 5 may write it?"""
    return name.endswith((".experts.gate_up_proj", ".experts.down_proj"))


def one_by_one(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Such a tensor under the names that single experts have."""
    prefix, _, last = name.rpartition(".")
    for e, matrix in enumerate(tensor):
        if last == "down_proj":
            yield f"{prefix}.{e}.down_proj.weight", matrix
        else:
            gate, up = matrix.chunk(2)  # (2n, h)
            yield f"{prefix}.{e}.gate_proj.weight", gate
            yield f"{prefix}.{e}.up_proj.weight", up


class Router(nn.Module):
    def __init__(self, num_experts: int, hidden_size: int):
        super().__init__()
        self.weight = empty_parameter(num_experts, hidden_size)  # on every rank: all route alike

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class SparseMoE(nn.Module):
    def __init__(
        self,
        *,
        num_experts: int,
        top_k: int,
        renormalize: bool,
        hidden_size: int,
        intermediate_size: int,
        kernels: KernelSet,
        parallel: ParallelState,
    ):
        super().__init__()
        self.num_experts, self.top_k, self.renormalize = num_experts, top_k, renormalize
        self.gate = Router(num_experts, hidden_size)
        self.experts = Experts(num_experts, hidden_size, intermediate_size, parallel)
        self.kernels = kernels
        self.parallel = parallel

    def forward(self, x: Tensor) -> Tensor:
        """(T, hidden_size) → the same."""
        experts, weights = route(self.gate(x), self.top_k, self.renormalize)
        order, offsets = group_by_expert(experts, self.num_experts)
        rows = x[order // self.top_k]  # (T·k, h), expert by expert
        gate_up = self.kernels.grouped_gemm(rows, self.experts.gate_up_proj, offsets)
        down = self.kernels.grouped_gemm(self.kernels.silu_and_mul(gate_up), self.experts.down_proj, offsets)
        visits = torch.empty_like(down).index_copy_(0, order, down).view(len(x), self.top_k, -1)
        mixed = torch.bmm(weights.unsqueeze(1), visits.float()).squeeze(1)  # (T, 1, k) @ (T, k, h)
        return self.parallel.all_reduce(mixed.to(x.dtype))
