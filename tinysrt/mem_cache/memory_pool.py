"""The two levels of KV memory: which slots a request has, and what is stored in them.

    ReqToTokenPool.table                          KVPool, one pair of tensors a layer
    row 1   [ 11  12  13  40  41 ... ]  ──────▶   k_buffer[layer][11], v_buffer[layer][11]: position 0 of row 1
    row 2   [ 11  12  77  ...        ]            (two rows may name the same slot: a shared prefix)
    row 0   dummy, for padded lanes               slot 0: dummy, padded lanes write there

The table is indirection, as page tables are in an operating system: a sequence is contiguous for the model while its
KV lies anywhere, and a shared prefix is stored once. For every page size the pools are flat and token-major,
`(slots, kv_heads, head_dim)`; pages exist only for the allocator and the tree.

The table lives twice. The host copy here is the truth: only the scheduler's thread writes it. The device copy belongs
to ModelRunner and only changes by replaying, at the start of a forward, the cells written since the last one
(`take_update`). So a forward in flight sees the table as it was when its batch was scheduled.

SGLang (`mem_cache/memory_pool.py`) keeps the table on the device only.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


class ReqToTokenPool:
    """Rows 1 .. size, one for each request that holds KV; cell [row, position] is the slot of that position."""

    def __init__(self, size: int, width: int):
        self.size = size
        self.width = width  # longest sequence, with room for what a step allocates beyond it
        self.table = np.zeros((size + 1, width), dtype=np.int32)
        self.reset()

    def reset(self) -> None:
        self._free_rows = list(range(self.size, 0, -1))  # a stack: the lowest row first, then the last one freed
        self._in_use = np.zeros(self.size + 1, dtype=bool)
        self._written: list[np.ndarray] = []  # flat indices of the cells written since take_update

    def alloc(self, n: int = 1) -> list[int] | None:
        """n rows, or None if there are not so many. A request keeps its row from chunk to chunk."""
        if n > len(self._free_rows):
            return None
        rows = [self._free_rows.pop() for _ in range(n)]
        self._in_use[rows] = True
        return rows

    def free(self, row: int) -> None:
        assert self._in_use[row], f"row {row} was freed twice, or never handed out"
        self._in_use[row] = False
        self._free_rows.append(row)

    def available_size(self) -> int:
        return len(self._free_rows)

    def free_rows(self) -> list[int]:
        return list(self._free_rows)

    def slots(self, row: int, start: int, end: int) -> np.ndarray:
        """A copy of the slots of positions start .. end-1."""
        return self.table[row, start:end].copy()

    def write(self, row: int, start: int, slots: np.ndarray) -> None:
        end = start + len(slots)
        assert self._in_use[row] and end <= self.width, f"row {row}: positions {start}..{end} of {self.width}"
        if len(slots):
            self.table[row, start:end] = slots
            self._written.append(np.arange(row * self.width + start, row * self.width + end))

    def write_each(self, rows: np.ndarray, positions: np.ndarray, slots: np.ndarray) -> None:
        """One cell in each of several different rows: what a decode step adds."""
        if len(rows):
            assert self._in_use[rows].all() and positions.max() < self.width, f"{rows=} {positions=}"
            self.table[rows, positions] = slots
            self._written.append(rows.astype(np.int64) * self.width + positions)

    def take_update(self) -> tuple[np.ndarray, np.ndarray] | None:
        """(flat_index int64, slots int32) of the cells written since the last call, no cell twice; None: no cell.

        Only the places are logged; the values are read from the table now, so that the last write wins.
        """
        if not self._written:
            return None
        flat_index = self._written[0] if len(self._written) == 1 else np.unique(np.concatenate(self._written))
        self._written = []
        return flat_index, self.table.reshape(-1)[flat_index]


class KVPool:
    """K and V of every layer, on the device. Owned by ModelRunner; the attention backend writes and reads it."""

    def __init__(
        self,
        size: int,  # tokens, the dummy page not counted
        page_size: int,
        num_layers: int,
        num_kv_heads: int,  # of this rank
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ):
        self.size = size
        self.page_size = page_size
        self.dtype = dtype
        shape = (size + page_size, num_kv_heads, head_dim)
        # zeros, not empty: a NaN left in the dummy slot would spread from a padded lane.
        self.k_buffer: list[Tensor] = [_zeros(shape, dtype, device) for _ in range(num_layers)]
        self.v_buffer: list[Tensor] = [_zeros(shape, dtype, device) for _ in range(num_layers)]

    @staticmethod
    def bytes_per_token(num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        """What one token costs, all layers together: the figure that turns a memory budget into `size`."""
        return num_layers * num_kv_heads * 2 * head_dim * dtype.itemsize


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """On a CPU through numpy: the system hands out zero pages when they are first touched, so a part of the pool that
    is not used costs no memory. `torch.zeros` writes them all."""
    if torch.device(device).type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    zeros = np.zeros(int(np.prod(shape)) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(zeros).view(dtype).view(shape)
