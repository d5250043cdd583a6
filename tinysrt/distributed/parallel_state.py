"""ParallelState: which part of the model this process holds, and how it talks to those that hold the rest.

    tensor parallel    every rank holds a slice of each layer; two all-reduces a layer put the slices together
    pipeline parallel  every rank holds some of the layers; hidden states travel from one to the next

                        tp 0        tp 1
        pp 0  rank      0           1          embedding, layers 0 .. 14        ┐ hidden states go straight down:
        pp 1  rank      2           3          layers 15 .. 29, norm, head      ┘ 0 → 2, 1 → 3

One process alone is the case of size 1, where every collective is the identity: models are written for many ranks and
run on one without a branch. The state is made once per process (`rendezvous.py`) and handed down; nothing looks it up.

Invariant: all ranks of a stage call the same collectives in the same order. They do because they run the same steps:
rank 0 tells everyone what a step depends on (`managers/rank_inbox.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tinysrt.distributed.groups import Group, Messenger
from tinysrt.errors import StartupError


@dataclass(frozen=True)
class Cut:
    """A rank's share of a weight: part `index` of `count` equal parts along dimension `dim`."""

    dim: int
    index: int
    count: int
    padded_from: int | None = None  # the last parts reach beyond the weight, which is this long; None: they do not


VOCAB_PADDING = 64
MOST_NAMED = 16  # sizes that an error proposes


@dataclass(frozen=True)
class ParallelState:
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    local: int = 0  # its number on this machine: the GPU it takes
    tensors: Group | None = None  # the ranks of this stage
    stages: Group | None = None  # all ranks; only neighbors in a column of the drawing above use it
    messages: Messenger | None = None  # all ranks, over the CPU: what is said about tensors

    @property
    def rank(self) -> int:
        return self.pp_rank * self.tp_size + self.tp_rank

    @property
    def world_size(self) -> int:
        return self.tp_size * self.pp_size

    @property
    def is_first_stage(self) -> bool:
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pp_rank == self.pp_size - 1

    # ---- who holds what ----------------------------------------------------------------------------

    def check(self, *, num_heads: int, num_kv_heads: int, num_layers: int) -> None:
        """StartupError if the model cannot be cut so. Each rank would find out, after a minute of starting."""
        self.share(num_heads, "the attention heads,")
        self.share_of_heads(num_kv_heads)
        self.my_layers(num_layers)

    def share(self, size: int, what: str) -> int:
        """This rank's part of a dimension that is cut into tp_size equal parts."""
        if size % self.tp_size:
            fits = ", ".join(str(n) for n in range(1, MOST_NAMED + 1) if size % n == 0)
            raise StartupError(f"--tp {self.tp_size} does not divide {what} {size}; these do: {fits}")
        return size // self.tp_size

    def share_of_heads(self, num_kv_heads: int) -> tuple[int, Cut]:
        """KV heads on this rank, and which. With fewer heads than ranks, neighbors hold the same one:

        2 heads, 4 ranks     rank 0 1 │ 2 3       each of them with other query heads
                             head  0  │  1
        """
        if num_kv_heads >= self.tp_size:
            return self.share(num_kv_heads, "the key/value heads,"), Cut(0, self.tp_rank, self.tp_size)
        if self.tp_size % num_kv_heads:
            raise StartupError(f"--tp {self.tp_size} is no multiple of the key/value heads, {num_kv_heads}")
        return 1, Cut(0, self.tp_rank * num_kv_heads // self.tp_size, num_kv_heads)

    def share_of_vocabulary(self, vocab_size: int) -> tuple[int, Cut | None]:
        """Rows of the embedding and of the head on this rank: a padded vocabulary divides evenly."""
        if self.tp_size == 1:
            return vocab_size, None
        padded = -(-vocab_size // VOCAB_PADDING) * VOCAB_PADDING
        return -(-padded // self.tp_size), Cut(0, self.tp_rank, self.tp_size, padded_from=vocab_size)

    def my_cut(self, dim: int) -> Cut | None:
        return Cut(dim, self.tp_rank, self.tp_size) if self.tp_size > 1 else None

    def my_layers(self, num_layers: int) -> range:
        """The layers of this stage; where they do not divide evenly, the first stages have one more."""
        if num_layers < self.pp_size:
            raise StartupError(f"--pp {self.pp_size} is more than the model has layers, {num_layers}")
        each, more = divmod(num_layers, self.pp_size)
        start = self.pp_rank * each + min(self.pp_rank, more)
        return range(start, start + each + (self.pp_rank < more))

    # ---- tensors, between the ranks of a stage -------------------------------------------------------

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over the tensor-parallel ranks, on each of them the same bits. May overwrite x."""
        return x if self.tensors is None else self.tensors.all_reduce(x)

    def all_gather(self, x: Tensor) -> Tensor:
        """The ranks' (R, n) side by side, (R, n * tp_size), on each of them."""
        return x if self.tensors is None else torch.cat(self.tensors.all_gather(x), dim=-1)

    # ---- tensors, from stage to stage ------------------------------------------------------------------

    def send_next(self, *tensors: Tensor) -> None:
        assert self.stages is not None and not self.is_last_stage
        for tensor in tensors:
            self.stages.send(tensor, self.rank + self.tp_size)

    def receive_previous(self, *tensors: Tensor) -> None:
        """Fill `tensors` with what the stage before sends, in the order in which it sends them."""
        assert self.stages is not None and not self.is_first_stage
        for tensor in tensors:
            self.stages.receive(tensor, self.rank - self.tp_size)

    # ---- numbers, once, at start-up ----------------------------------------------------------------------

    def smallest(self, number: int) -> int:
        """The least of what all ranks say."""
        if self.messages is None:
            return number
        return min(int(said) for said in self.messages.exchange(str(number).encode()))


SINGLE = ParallelState()
