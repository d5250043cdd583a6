"""LMHead: from hidden states to float32 logits, with the best few computed exactly.

bfloat16 has 8 significant bits: logits around 25 come in steps of 1/8, and in one step of ten or so the best two tokens
of a small model fall on the same one. Which of them is drawn would then be decided by their ids. So where the head runs
in bfloat16, the `EXACT` best logits of each row are computed again in float32 from the same hidden state: eight dot
products a row, beside a matmul with tens of thousands. (SGLang has `--enable-fp32-lm-head`, which computes all of them
so, at twice the memory traffic.)

Vocabulary-parallel: each rank computes the logits of its rows of the vocabulary, the exact ones too, and all ranks
gather all of them. So every rank samples from the same bytes, and none has to be told the token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tinysrt.distributed.parallel_state import ParallelState
from tinysrt.model_executor.layers.linear import Linear

EXACT = 8


class LMHead(Linear):
    def __init__(self, hidden_size: int, vocab_size: int, parallel: ParallelState):
        mine, cut = parallel.share_of_vocabulary(vocab_size)
        super().__init__(hidden_size, [mine], cuts=[cut])
        self.vocab_size = vocab_size
        self.parallel = parallel

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden (R, hidden_size) -> logits (R, vocab) float32."""
        logits = self.parallel.all_gather(self._my_logits(hidden))
        return logits if logits.shape[1] == self.vocab_size else logits[:, : self.vocab_size].contiguous()

    def _my_logits(self, hidden: Tensor) -> Tensor:
        if len(hidden) <= self.few_rows and self.few_rows_linear is not None:
            return self.few_rows_linear(hidden, self.weight, self.bias, torch.float32)  # never rounded: all exact
        logits = super().forward(hidden).float()
        if hidden.dtype == torch.float32 or self.weight.numel() == 0:
            return logits
        best = logits.topk(min(EXACT, logits.shape[-1]), dim=-1).indices  # (R, 8)
        rows = self.weight[best].float()  # (R, 8, hidden_size)
        exact = torch.bmm(rows, hidden.float().unsqueeze(-1)).squeeze(-1)
        return logits.scatter_(1, best, exact)
