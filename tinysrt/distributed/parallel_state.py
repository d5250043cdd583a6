"""ParallelState: which part of the model this process holds, and how it talks to those that hold the rest.

    tensor parallel    every rank holds a slice of each layer; two all-reduces a layer put the slices together
    pipeline parallel  every rank holds some of the layers; hidden states travel from one to the next

One process alone is the case of size 1, where every collective is the identity: models are written for many ranks and
run on one without a branch. The state is made once per process and handed down; nothing looks it up.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class ParallelState:
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over the tensor-parallel ranks, on each of them."""
        assert self.tp_size == 1
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """The ranks' (R, n) side by side, (R, n * tp_size), on each of them."""
        assert self.tp_size == 1
        return x


SINGLE = ParallelState()
