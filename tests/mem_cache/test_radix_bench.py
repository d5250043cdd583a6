from __future__ import annotations

import numpy as np
import pytest

from tinysrt.bench.radix import filled_tree, main, run_radix_bench
from tinysrt.errors import StartupError
from tinysrt.mem_cache.radix_tree import RadixTree


def test_the_filled_tree_has_the_leaves_it_claims():
    for page_size in (1, 16):
        tree = filled_tree(500, page_size)
        assert sum(not node.children for node in tree.nodes()) == 500


def test_the_bench_measures_every_operation_on_both_trees():
    rows = run_radix_bench(64, 400, (1, 16), repeats=3)
    assert [row.num_leaves for row in rows] == ([4] * 3 + [400] * 3) * 2
    assert all(row.median_us > 0 for row in rows)
    assert [row.operation for row in rows].count("evict one leaf") == 4


def test_the_command_line_runs_it_and_prints_a_table(capsys):
    assert main(["--prompt-len", "32", "--leaves", "100", "--page-size", "1", "--repeats", "2"]) == 0
    assert "evict one leaf" in capsys.readouterr().out


def test_sizes_that_measure_nothing_are_refused_in_one_line():
    with pytest.raises(StartupError, match="must be at least 1"):
        main(["--repeats", "0"])


def test_a_prompt_is_compared_with_one_edge_however_full_the_tree_is(monkeypatch):
    """What makes the figures of the bench equal for both trees: neither tokens nor leaves are visited one by one."""
    compared = []

    def counted(tree, a, b, original=RadixTree._common_pages):
        compared.append(len(a))
        return original(tree, a, b)

    prompt, slots = np.arange(50_000, 54_096), np.arange(4096)
    for leaves in (40, 4000):
        tree = filled_tree(leaves, 1)
        with monkeypatch.context() as patch:
            patch.setattr(RadixTree, "_common_pages", counted)
            tree.insert(prompt, slots)  # finds no edge that begins as it does
            assert len(tree.match(prompt)[0]) == 4096
    assert compared == [4096, 4096]
