from __future__ import annotations

import numpy as np
import pytest
import torch

from tinysrt.mem_cache.memory_pool import KVPool, ReqToTokenPool


def test_rows_are_handed_out_from_1_and_row_0_never():
    pool = ReqToTokenPool(3, 8)
    assert pool.alloc(2) == [1, 2]
    assert pool.alloc(2) is None and pool.available_size() == 1
    assert pool.alloc() == [3]
    pool.free(2)
    assert pool.alloc() == [2]


def test_a_row_freed_twice_is_caught():
    """A peer's fault: an abort in flight freed the row a second time, and two requests got it."""
    pool = ReqToTokenPool(2, 8)
    (row,) = pool.alloc()
    pool.free(row)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free(row)
    with pytest.raises(AssertionError):
        pool.free(0)
    assert pool.available_size() == 2


def test_the_update_names_each_written_cell_once_with_its_last_value():
    pool = ReqToTokenPool(3, 8)
    pool.alloc(2)
    assert pool.take_update() is None
    pool.write(1, 2, np.array([5, 6, 7]))
    pool.write_each(np.array([1, 2]), np.array([3, 0]), np.array([9, 10]))
    flat_index, slots = pool.take_update()
    assert flat_index.dtype == np.int64 and slots.dtype == np.int32
    assert dict(zip(flat_index.tolist(), slots.tolist(), strict=True)) == {10: 5, 11: 9, 12: 7, 16: 10}
    assert pool.take_update() is None


def test_replaying_updates_makes_the_same_table():
    rng = np.random.default_rng(3)
    pool = ReqToTokenPool(4, 16)
    rows = np.array(pool.alloc(4))
    copy = np.zeros_like(pool.table)
    for _ in range(200):
        for _ in range(rng.integers(0, 4)):
            start, length = rng.integers(0, 12), rng.integers(0, 5)
            pool.write(int(rng.choice(rows)), int(start), rng.integers(1, 99, length))
            pool.write_each(rows, rng.integers(0, 16, 4), rng.integers(1, 99, 4))
        update = pool.take_update()
        if update is not None:
            copy.reshape(-1)[update[0]] = update[1]
        assert np.array_equal(copy, pool.table)


def test_an_update_taken_earlier_does_not_change_with_later_writes():
    pool = ReqToTokenPool(1, 8)
    pool.alloc()
    pool.write(1, 0, np.array([5]))
    _, slots = pool.take_update()
    pool.write(1, 0, np.array([6]))
    assert slots.tolist() == [5]


def test_a_write_beyond_the_row_is_caught():
    """A neighbor's row would be overwritten on the device, where the table is flat."""
    pool = ReqToTokenPool(2, 8)
    pool.alloc(2)
    with pytest.raises(AssertionError):
        pool.write(1, 6, np.array([1, 2, 3]))
    with pytest.raises(AssertionError):
        pool.write_each(np.array([1]), np.array([8]), np.array([1]))


def test_slots_are_a_copy():
    pool = ReqToTokenPool(1, 8)
    pool.alloc()
    pool.write(1, 0, np.array([5, 6]))
    slots = pool.slots(1, 0, 2)
    slots[:] = 0
    assert pool.slots(1, 0, 2).tolist() == [5, 6]


def test_reset_frees_the_rows_and_forgets_the_log():
    pool = ReqToTokenPool(2, 8)
    pool.alloc(2)
    pool.write(1, 0, np.array([5]))
    pool.reset()
    assert pool.available_size() == 2 and pool.take_update() is None


def test_kv_pool_is_flat_zero_and_has_a_dummy_page():
    pool = KVPool(32, 4, num_layers=2, num_kv_heads=3, head_dim=5, dtype=torch.bfloat16, device="cpu")
    assert [tuple(t.shape) for t in pool.k_buffer + pool.v_buffer] == [(36, 3, 5)] * 4
    assert all(t.dtype == torch.bfloat16 and not t.any() for t in pool.k_buffer + pool.v_buffer)


def test_bytes_per_token_counts_both_tensors_of_every_layer():
    # SmolLM2-135M: 30 layers, 3 key/value heads of 64, bf16
    assert KVPool.bytes_per_token(30, 3, 64, torch.bfloat16) == 30 * 3 * 128 * 2
    pool = KVPool(16, 1, 2, 1, 8, torch.float32, "cpu")
    stored = sum(t.element_size() * t.nelement() for t in pool.k_buffer + pool.v_buffer)
    assert stored == 17 * KVPool.bytes_per_token(2, 1, 8, torch.float32)
