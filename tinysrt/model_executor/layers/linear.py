"""Linear: y = x Wᵀ + b, with the weight packed once after loading where that pays.

On a CPU, oneDNN lays a weight out in blocks before it multiplies. `F.linear` does so on every call; packing once
halves the time at 1 to 8 rows, which is decode, and costs nothing at 512, which is prefill. One packed copy serves
every row count. The two operators that do it are private to PyTorch: they are named in this file only, `F.linear`
stands in where they are missing, and a test holds both to the same result.

One to four rows of bf16 are another matter: then reading the weight is all that costs, and a Numba loop over the plain
weight reads faster than the packed product does (`kernels/numba_linear.py`). So both copies are kept where the kernels
have that loop: a decode step of one request is worth twice the memory of a small model's weights.

Several projections that read the same input share one weight (`q_proj`, `k_proj`, `v_proj` → `qkv_proj`): one matmul
instead of three. `weights.py` writes each checkpoint tensor into its rows of the fused weight.

Tensor parallel cuts a pair of projections so that one all-reduce suffices for both:

    column-parallel  qkv_proj, gate_up_proj   a rank has some rows of W: whole heads, some of the hidden units
    row-parallel     o_proj, down_proj        a rank has the matching columns; the ranks' products add up to y
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tinysrt.distributed.parallel_state import Cut, ParallelState
from tinysrt.kernels.kernel_set import REFERENCE, Kernel, KernelSet


def empty_parameter(*shape: int) -> nn.Parameter:
    """Room for a weight that the loader fills. Inference only: no gradient."""
    return nn.Parameter(torch.empty(*shape), requires_grad=False)


def can_pack(weight: Tensor) -> bool:
    return (
        weight.device.type == "cpu"
        and weight.dtype in (torch.float32, torch.bfloat16)
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


class Linear(nn.Module):
    """`output_sizes`: the row ranges of the weight, one per projection fused into it. All sizes are this rank's, and
    `cuts` says which part of each checkpoint tensor they are; None: the whole."""

    def __init__(
        self, input_size: int, output_sizes: list[int], bias: bool = False, cuts: list[Cut | None] | None = None
    ):
        super().__init__()
        self.output_sizes = output_sizes
        self.cuts = cuts or [None] * len(output_sizes)
        self.weight = empty_parameter(sum(output_sizes), input_size)
        self.bias = empty_parameter(sum(output_sizes)) if bias else None
        self.packed: Tensor | None = None
        self.few_rows = 0  # up to so many rows of x are the kernel's
        self.few_rows_linear: Kernel | None = None

    def pack(self, kernels: KernelSet = REFERENCE, *, keep_weight: bool = False) -> None:
        """Call once, when the weight is final. The plain copy is dropped unless something reads it."""
        if can_pack(self.weight):
            self.packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.data)
            if kernels.few_rows_linear is not None and self.weight.dtype == torch.bfloat16:
                self.few_rows, self.few_rows_linear = kernels.few_rows, kernels.few_rows_linear
            elif not keep_weight:
                self.weight = nn.Parameter(self.weight.new_empty(0), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        # torch.compile lays weights out itself, as its own matmuls like them (`graph_capture.py`).
        if self.packed is None or torch.compiler.is_compiling():
            return F.linear(x, self.weight, self.bias)
        if len(x) <= self.few_rows and self.few_rows_linear is not None:
            return self.few_rows_linear(x, self.weight, self.bias, x.dtype)
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")


class RowParallelLinear(Linear):
    """The second of a pair: takes this rank's part of the input, gives the whole output on every rank."""

    def __init__(self, input_size: int, output_size: int, bias: bool, parallel: ParallelState):
        # Only rank 0 has the bias: added up, it counts once.
        mine = parallel.share(input_size, "the width")
        super().__init__(mine, [output_size], bias and parallel.tp_rank == 0, [parallel.my_cut(1)])
        self.parallel = parallel

    def forward(self, x: Tensor) -> Tensor:
        return self.parallel.all_reduce(super().forward(x))
