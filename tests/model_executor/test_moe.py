"""Mixture of experts: routing, grouping by expert, both layouts of checkpoints, rows that do not touch each other."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from torch import Tensor

from tests.model_executor.harness import LittleScheduler, assert_greedy, edit_config, make_runner, save_tiny_model
from tinysrt.distributed.parallel_state import SINGLE
from tinysrt.errors import StartupError
from tinysrt.kernels import reference
from tinysrt.kernels.kernel_set import REFERENCE
from tinysrt.model_executor.layers.moe import SparseMoE, group_by_expert, route

HIDDEN, WIDTH = 16, 12


def make_layer(num_experts: int, top_k: int, renormalize: bool = True) -> SparseMoE:
    layer = SparseMoE(
        num_experts=num_experts,
        top_k=top_k,
        renormalize=renormalize,
        hidden_size=HIDDEN,
        intermediate_size=WIDTH,
        kernels=REFERENCE,
        parallel=SINGLE,
    )
    for parameter in layer.parameters():
        parameter.data.normal_(0, 0.5)
    return layer


def by_hand(layer: SparseMoE, x: Tensor) -> Tensor:
    """Token by token, expert by expert, from the definition."""
    rows = []
    for token in x:
        shares = (layer.gate.weight @ token).softmax(0)
        best = shares.topk(layer.top_k)
        weights = best.values / best.values.sum() if layer.renormalize else best.values
        row = torch.zeros(HIDDEN)
        for weight, e in zip(weights, best.indices, strict=True):
            gate, up = (layer.experts.gate_up_proj[e] @ token).split(WIDTH)
            row += weight * (layer.experts.down_proj[e] @ (F.silu(gate) * up))
        rows.append(row)
    return torch.stack(rows)


@given(
    tokens=st.integers(1, 40),
    num_experts=st.integers(1, 9),
    top_k=st.integers(1, 9),
    renormalize=st.booleans(),
    seed=st.integers(0, 99),
)
def test_the_layer_is_its_definition(tokens, num_experts, top_k, renormalize, seed):
    torch.manual_seed(seed)
    layer = make_layer(num_experts, min(top_k, num_experts), renormalize)
    x = torch.randn(tokens, HIDDEN)
    torch.testing.assert_close(layer(x), by_hand(layer, x), rtol=1e-4, atol=1e-5)


def test_no_row_touches_another_one():
    """Beside padding, beside strangers and alone: the same sum. (The matrix product may round differently.)"""
    torch.manual_seed(0)
    layer = make_layer(6, 2)
    x = torch.randn(5, HIDDEN)
    alone = torch.cat([layer(row.unsqueeze(0)) for row in x])
    torch.testing.assert_close(layer(F.pad(x, (0, 0, 0, 11)))[:5], alone)
    torch.testing.assert_close(layer(x.flip(0)).flip(0), alone)


@given(st.lists(st.lists(st.integers(0, 6), min_size=2, max_size=2, unique=True), min_size=1, max_size=30))
def test_every_visit_stands_among_those_of_its_expert(choices):
    experts = torch.tensor(choices)
    order, offsets = group_by_expert(experts, 7)
    assert sorted(order.tolist()) == list(range(2 * len(choices))) and offsets[0] == 0 and offsets[-1] == len(order)
    for e, (begin, end) in enumerate(zip(offsets.tolist(), offsets.tolist()[1:], strict=False)):
        assert order[begin:end].tolist() == [i for i, expert in enumerate(experts.view(-1).tolist()) if expert == e]


def test_weights_are_shares_of_all_experts_or_of_the_chosen_ones():
    logits = torch.tensor([[0.0, 2.0, 1.0]])
    experts, weights = route(logits, 2, renormalize=False)
    assert experts.tolist() == [[1, 2]]
    torch.testing.assert_close(weights, logits.softmax(-1)[:, [1, 2]])
    torch.testing.assert_close(route(logits, 2, renormalize=True)[1], logits[:, [1, 2]].softmax(-1))


def test_grouped_gemm_passes_over_experts_without_rows():
    x, weight = torch.randn(5, 4), torch.randn(4, 3, 4)
    weight[[0, 2]] = float("nan")  # nobody visits them
    y = reference.grouped_gemm(x, weight, torch.tensor([0, 0, 2, 2, 5]))
    torch.testing.assert_close(y, torch.cat((x[:2] @ weight[1].T, x[2:] @ weight[3].T)))
    assert reference.grouped_gemm(x[:0], weight, torch.zeros(5, dtype=torch.int64)).shape == (0, 3)


@pytest.mark.parametrize("one_by_one", [True, False])
def test_both_layouts_of_a_checkpoint_load(tmp_path, one_by_one):
    model = save_tiny_model("qwen3_moe", tmp_path, save_original_format=one_by_one)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert ("model.layers.0.mlp.experts.3.up_proj.weight" in file.keys()) == one_by_one
        assert ("model.layers.0.mlp.experts.gate_up_proj" in file.keys()) != one_by_one
    scheduler = LittleScheduler(make_runner(tmp_path))
    rows = [scheduler.add([20 + i, 40, 60 + i]) for i in range(3)]
    scheduler.prefill(rows)
    scheduler.decode(rows, 5)
    for row in rows:
        assert_greedy(model, row, 6)


def test_a_missing_expert_is_named(tmp_path):
    from safetensors.torch import load_file, save_file

    save_tiny_model("qwen3_moe", tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.1.mlp.experts.4.down_proj.weight"]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(StartupError, match=r"lacks weight model\.layers\.1\.mlp\.experts\.4\.down_proj\.weight$"):
        make_runner(tmp_path)


def test_more_experts_per_token_than_experts_is_refused(tmp_path):
    save_tiny_model("qwen3_moe", tmp_path)
    edit_config(tmp_path, num_experts_per_tok=9)
    with pytest.raises(StartupError, match="num_experts_per_tok 9 of num_experts 8"):
        make_runner(tmp_path)


def test_dummy_experts_run(tmp_path):
    save_tiny_model("qwen3_moe-mixed", tmp_path)
    scheduler = LittleScheduler(make_runner(tmp_path, load_format="dummy", dtype="bfloat16"))
    row = scheduler.add([20, 30, 40])
    scheduler.prefill([row])
    scheduler.decode([row], 2)
    assert len(row.output) == 3
