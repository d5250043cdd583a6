"""Tests in this folder run Triton kernels in its interpreter, on a CPU: `tests/kernels/test_triton_interpreter.py` runs
them in a process of their own, because TRITON_INTERPRET is read when a kernel is defined. By hand:

    TRITON_INTERPRET=1 python -m pytest tests/kernels/interpreted
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
collect_ignore_glob = [] if INTERPRETED else ["test_*.py"]
ACCESSES_PER_FILE = 6000  # loads and stores; some 1,000 loop iterations, each worth about 6 ms

if INTERPRETED:
    import triton

    from tests.kernels.guard import Guard, guarded
    from tinysrt.kernels import triton_attention
    from tinysrt.kernels.triton_tiles import Tile

    def version(text: str) -> tuple[int, ...]:
        return tuple(int(part) for part in text.split(".")[:2])

    if version(triton.__version__) < (3, 7) and version(np.__version__) >= (2, 4):
        pytest.skip("this interpreter cannot loop to a run-time bound with this numpy", allow_module_level=True)

    @pytest.fixture(autouse=True, scope="module")
    def guard() -> Iterator[Guard]:
        """All launches of a test file are guarded, and together within the budget."""
        with guarded() as guard:
            yield guard
        assert guard.accesses <= ACCESSES_PER_FILE, f"{guard.accesses} loads and stores: use fewer, larger blocks"

    @pytest.fixture(autouse=True)
    def uninitialized_memory_is_nan() -> Iterator[None]:
        """`torch.empty` gives NaN, or the largest integer: what a kernel forgets to write shows."""
        torch.use_deterministic_algorithms(True)
        assert torch.utils.deterministic.fill_uninitialized_memory
        yield
        torch.use_deterministic_algorithms(False)

    @pytest.fixture
    def tile(monkeypatch: pytest.MonkeyPatch) -> Tile:
        """One tile for all attention launches. A loop costs the interpreter the same at any block size."""
        tile = Tile(64, 64, 4, 1)
        monkeypatch.setattr(triton_attention, "attention_tile", lambda table, q: tile)
        return tile
