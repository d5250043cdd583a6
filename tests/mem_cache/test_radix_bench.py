from __future__ import annotations

from tinysrt.bench.radix import filled_tree, main, run_radix_bench


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


def test_matching_and_inserting_4096_tokens_takes_less_than_a_millisecond():
    rows = run_radix_bench(repeats=50, num_leaves=4000)
    assert all(row.median_us < 1000 for row in rows), rows
