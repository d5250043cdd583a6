"""Every family gives what transformers gives, whatever way the tokens reach the model: whole, in chunks, after a
shared prefix, beside others, from prefill or from decode."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.model_executor.harness import (
    FAMILIES,
    VOCAB,
    LittleScheduler,
    assert_greedy,
    make_runner,
    reference_logprobs,
    save_tiny_model,
)
from tinysrt.model_executor.forward_batch_info import ForwardMode, LogprobSpec
from tinysrt.server_args import ServerArgs

STEPS = 12


@pytest.fixture(scope="module", params=itertools.product(FAMILIES, ("torch_native", "numba")), ids="-".join)
def pair(request, tmp_path_factory):
    """(transformers model, runner) of one family on one backend."""
    family, backend = request.param
    folder = tmp_path_factory.mktemp(family)
    return save_tiny_model(family, folder), make_runner(folder, attention_backend=backend)


def prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in lengths]


def test_a_ragged_batch_is_prefilled_and_decoded_together(pair):
    model, runner = pair
    scheduler = LittleScheduler(runner)
    rows = [scheduler.add(prompt) for prompt in prompts(1, 5, 2, 140, 17, 33)]
    scheduler.prefill(rows)
    scheduler.decode(rows, STEPS - 1)
    for row in rows:
        assert_greedy(model, row, STEPS)


@pytest.mark.parametrize("chunk", [1, 16, 37])
def test_chunked_prefill_gives_the_same_tokens(pair, chunk):
    model, runner = pair
    scheduler = LittleScheduler(runner)
    rows = [scheduler.add(prompt) for prompt in prompts(70, 9)]
    scheduler.prefill(rows, chunk=chunk)
    scheduler.decode(rows, 3)
    for row in rows:
        assert_greedy(model, row, 4)


def test_a_shared_prefix_is_read_through_the_table(pair):
    model, runner = pair
    scheduler = LittleScheduler(runner)
    first = scheduler.add(prompts(60)[0])
    scheduler.prefill([first])
    tail = prompts(7, 9)[1]
    sharers = [
        scheduler.add(first.ids[:40] + tail, share=(first, 40)),
        scheduler.add(first.ids[:60], share=(first, 59)),  # the same prompt again: only its last token is computed
    ]
    scheduler.prefill(sharers)
    rows = [first, *sharers]
    scheduler.decode(rows, 5)
    for row in rows:
        assert_greedy(model, row, 6)


def test_a_mixed_batch_reads_its_decode_rows_from_the_relay(pair):
    model, runner = pair
    scheduler = LittleScheduler(runner)
    decoding = [scheduler.add(prompt) for prompt in prompts(20, 31)]
    scheduler.prefill(decoding)
    late = scheduler.add(prompts(3, 50)[1])
    rows = [late, *decoding]
    ends = [len(late.ids), *(row.computed + 1 for row in decoding)]
    result = scheduler.launch(scheduler.batch(ForwardMode.MIXED, rows, ends, decoding=2))
    for row, token in zip(rows, result.next_token_ids, strict=True):
        row.ids += token
    scheduler.decode(rows, 4)
    for row in rows:
        assert_greedy(model, row, 5)


def test_logits_are_within_a_thousandth_of_transformers(pair):
    model, runner = pair
    scheduler = LittleScheduler(runner)
    row = scheduler.add(prompts(45)[0])
    batch = scheduler.batch(ForwardMode.EXTEND, [row], [45])
    ours = runner.forward(batch).next_token_logits[0].log_softmax(-1)
    assert (ours - reference_logprobs(model, row.ids)[-1]).abs().max() < 1e-3


@pytest.mark.parametrize("family", ["qwen3_moe-mixed", "mistral-window", "qwen2-window"])
def test_decode_steps_replayed_from_a_tape_give_the_same_tokens(family, tmp_path):
    """Routing and windows differ from step to step: nothing of the captured one may be left in a replay."""
    model = save_tiny_model(family, tmp_path)
    args = dict(max_running_requests=8, attention_backend="numba", graph_capture="tape", cuda_graph_bs_decode=[4])
    runner = make_runner(tmp_path, **args)
    runner.capture_graphs(ServerArgs(model_path=str(tmp_path), device="cpu", **args).resolve())
    assert runner.graphs is not None
    scheduler = LittleScheduler(runner)
    rows = [scheduler.add(prompt) for prompt in prompts(30, 5, 60)]
    scheduler.prefill(rows)
    scheduler.decode(rows, STEPS)
    for row in rows:
        assert_greedy(model, row, STEPS)


@pytest.mark.parametrize("backend", ["torch_native", "numba"])
def test_norms_of_heads_are_right_in_bfloat16_too(tmp_path, backend):
    """The joined weight of the head norms is float32 whatever the model's format: kernels read it as that."""
    model = save_tiny_model("qwen3", tmp_path, dtype=torch.bfloat16).float()
    runner = make_runner(tmp_path, dtype="bfloat16", attention_backend=backend)
    scheduler = LittleScheduler(runner)
    row = scheduler.add(list(range(20, 60)))
    spec = LogprobSpec([True], [0], [None], [0], [row.ids[1:]])
    scored = scheduler.prefill([row], logprob=spec).input_scores[0].logprobs
    expected = reference_logprobs(model, row.ids[:40])[:-1]
    wanted = expected.gather(1, torch.tensor(row.ids[1:40]).unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(torch.tensor(scored), wanted, rtol=0.1, atol=0.1)
