"""Embedding: the row of each token id.

Vocabulary-parallel, a rank holds a range of rows. It answers for the ids in its range and gives zeros for all others;
the all-reduce adds one row to zeros, so the result is exact. The last range ends in padding, which no id names.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from tinysrt.distributed.parallel_state import Cut, ParallelState
from tinysrt.model_executor.layers.linear import empty_parameter


class Embedding(nn.Module):
    def __init__(self, vocab_size: int, hidden_size: int, parallel: ParallelState):
        super().__init__()
        mine, cut = parallel.share_of_vocabulary(vocab_size)
        self.weight = empty_parameter(mine, hidden_size)
        self.cuts: list[Cut | None] = [cut]
        self.parallel = parallel

    def forward(self, token_ids: Tensor) -> Tensor:
        """(T,) → (T, hidden_size)."""
        if self.parallel.tp_size == 1:
            return F.embedding(token_ids, self.weight)
        rows = token_ids - self.parallel.tp_rank * len(self.weight)
        foreign = (rows < 0) | (rows >= len(self.weight))
        x = F.embedding(rows.masked_fill(foreign, 0), self.weight)
        return self.parallel.all_reduce(x.masked_fill(foreign.unsqueeze(1), 0.0))
