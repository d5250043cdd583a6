"""The order of the waiting queue: reference cases of SGLang 0.5.23 and what the in-batch prefix trick is for."""

from __future__ import annotations

import random

import numpy as np
import pytest

from tests.scheduler.helpers import make_memory, make_req
from tinysrt.bench.fake_model import FakeEngine
from tinysrt.managers.schedule_policy import SchedulePolicy, deprioritized

A = list(range(100))


def waiting_for_prefixes() -> tuple[list, object]:
    """a = 0..99; b shares 40 with a; c shares 20; d shares 40 but has 33 cached; e shares 31; f shares 32."""
    shares = {"a": A} | {
        name: A[:n] + [1000 * (i + 1) + j for j in range(60)]
        for i, (name, n) in enumerate({"b": 40, "c": 20, "d": 40, "e": 31, "f": 32}.items())
    }
    return [make_req(name, ids) for name, ids in shares.items()], shares


class CachedForD:
    """A prefix cache in which only d's first 33 tokens are cached."""

    is_cache_aware = True

    def __init__(self, d_ids: list[int]):
        self.memory = make_memory(1000)
        self.d_ids = d_ids

    def match_prefix(self, ids: np.ndarray, namespace: str | None = None) -> object:
        tree = self.memory.tree
        if len(ids) > 50 and ids[50] == self.d_ids[50]:
            tree.tree.insert(np.array(self.d_ids[:33], np.int32), np.arange(1, 34, dtype=np.int32))
            return tree.match_prefix(ids, namespace)
        return type(tree.match_prefix(np.array([9], np.int32)))(np.empty(0, np.int32), tree.tree.root)


def test_in_batch_sharing_deprioritizes_from_32_shared_tokens_unless_more_are_cached() -> None:
    queue, shares = waiting_for_prefixes()
    cache = CachedForD(shares["d"])
    matches = [cache.match_prefix(req.all_ids()[: req.match_limit()]) for req in queue]
    assert [queue[i].rid for i in deprioritized(queue, matches)] == ["b", "f"]
    SchedulePolicy("lpm", cache).sort(queue)  # type: ignore[arg-type]
    assert [req.rid for req in queue] == ["d", "a", "c", "e", "b", "f"]


def test_cache_aware_policies_without_a_tree_are_fcfs() -> None:
    tree = make_memory(100, radix=False).tree
    assert [SchedulePolicy(name, tree).name for name in ("lpm", "dfs-weight", "lof")] == ["fcfs", "fcfs", "lof"]


def test_lpm_is_fcfs_above_128_waiting_requests_and_dfs_weight_is_not() -> None:
    tree = make_memory(100).tree
    assert SchedulePolicy("lpm", tree).effective(128) == "lpm"
    assert SchedulePolicy("lpm", tree).effective(129) == "fcfs"
    assert SchedulePolicy("dfs-weight", tree).effective(129) == "dfs-weight"


def test_lof_is_longest_output_first_and_stable() -> None:
    queue = [make_req(str(i), 5, max_new_tokens=n) for i, n in enumerate([3, 9, 9, 1], 1)]
    SchedulePolicy("lof", make_memory(100).tree).sort(queue)
    assert [req.rid for req in queue] == ["2", "3", "1", "4"]


def test_dfs_weight_keeps_a_subtree_together_and_takes_the_heavier_first() -> None:
    memory = make_memory(1000)
    stem = list(range(10))
    for branch in (100, 200, 300):
        ids = np.array(stem + [branch] * 5, np.int32)
        memory.tree.tree.insert(ids, np.arange(branch, branch + 15, dtype=np.int32))
    branches = [100, 200, 300, 200, 300, 200]
    queue = [make_req(f"{i}:{b}", stem + [b] * 5 + [7000 + i]) for i, b in enumerate(branches)]
    SchedulePolicy("dfs-weight", memory.tree).sort(queue)
    assert [req.rid.split(":")[1] for req in queue] == ["200", "200", "200", "300", "300", "100"]


def test_random_is_reproducible_by_seed() -> None:
    orders = []
    for seed in (1, 1, 2):
        queue = [make_req(str(i), 5) for i in range(20)]
        SchedulePolicy("random", make_memory(100).tree, seed).sort(queue)
        orders.append([req.rid for req in queue])
    assert orders[0] == orders[1] != orders[2]


def test_random_draws_are_those_of_the_standard_library() -> None:
    """Every rank must draw the same without asking: the generator is the policy's own, not the process's."""
    random.seed(5)
    before = random.getstate()
    SchedulePolicy("random", make_memory(100).tree, 3).sort([make_req(str(i), 5) for i in range(9)])
    assert random.getstate() == before


def run_identical_prompts(**flags: object) -> list[int]:
    """cached_tokens of eight equal prompts of 200 tokens that arrive together."""
    engine = FakeEngine(max_total_num_tokens=4000, chunked_prefill_size=8192, debug_invariants=True, **flags)
    for i in range(8):
        engine.add(f"r{i}", list(range(200)), max_new_tokens=2)
    engine.run()
    engine.close()
    return [engine.outbox.outs[f"r{i}"][-1].meta.cached_tokens for i in range(8)]


def test_of_equal_prompts_at_once_only_one_computes_the_prefix() -> None:
    """Trap 32, and the peers' fault "no sharing inside one step"; with overlap too: KV is published at launch."""
    for overlap_off in (False, True):
        cached = run_identical_prompts(disable_overlap_schedule=overlap_off, schedule_policy="lpm")
        assert sorted(cached) == [0] + [199] * 7


@pytest.mark.parametrize("overlap_off", [False, True])
def test_a_prompt_in_its_last_chunk_is_waited_for_too(overlap_off: bool) -> None:
    """Its first chunk is cached already; what the last one computes would be computed again beside it. An unrelated
    prompt takes the room instead."""
    engine = FakeEngine(chunked_prefill_size=128, debug_invariants=True, disable_overlap_schedule=overlap_off)
    shared = list(range(200))
    for i in range(3):
        engine.add(f"s{i}", [*shared, 500 + i], max_new_tokens=2)
    engine.add("other", list(range(1000, 1020)), max_new_tokens=2)
    engine.run()
    assert [engine.outbox.outs[f"s{i}"][-1].meta.cached_tokens for i in range(3)] == [0, 200, 200]
    # 128 of s0; 73 of s0 with 20 of the other; 1 + 1 of s1 and s2; and the second token of all four.
    assert engine.scheduler.forward_count == 4
    engine.close()


def test_two_identical_prompts_in_one_batch_keep_one_copy() -> None:
    """fcfs has no trick: both compute, the second gives its copy back (check_ownership runs after every step)."""
    cached = run_identical_prompts(disable_overlap_schedule=False, schedule_policy="fcfs")
    assert cached == [0] * 8


def test_fcfs_answers_in_the_order_of_arrival() -> None:
    engine = FakeEngine(max_running_requests=1, schedule_policy="fcfs", disable_overlap_schedule=True)
    for i in range(4):
        engine.add(f"r{i}", [i, i], max_new_tokens=2)
    engine.run()
    assert list(engine.outbox.outs) == ["r0", "r1", "r2", "r3"]
