"""RMSNorm, alone and together with the residual addition that precedes it."""

from __future__ import annotations

from torch import Tensor, nn

from tinysrt.kernels.kernel_set import KernelSet
from tinysrt.model_executor.layers.linear import empty_parameter


class RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float, kernels: KernelSet):
        super().__init__()
        self.weight = empty_parameter(dim)
        self.eps = eps
        self.kernels = kernels

    def finish_loading(self) -> None:
        self.weight = nn.Parameter(self.weight.float(), requires_grad=False)  # meets the float32 residual stream

    def forward(self, x: Tensor) -> Tensor:
        return self.kernels.rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm(residual + x), residual + x). The residual stream runs beside the blocks, in float32."""
        return self.kernels.add_rms_norm(x, residual, self.weight, self.eps)
