"""Scores of prompt tokens and of output tokens, against transformers' log-softmax."""

from __future__ import annotations

import math

import pytest
import torch

from tests.model_executor.harness import (
    GREEDY,
    VOCAB,
    LittleScheduler,
    make_runner,
    reference_logprobs,
    save_tiny_model,
)
from tinysrt.model_executor.forward_batch_info import ForwardMode, LogprobSpec
from tinysrt.model_executor.layers import logits_processor
from tinysrt.sampling_params import SamplingParams

PROMPT = torch.randint(3, VOCAB, (40,), generator=torch.Generator().manual_seed(5)).tolist()


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    return save_tiny_model("llama", folder), make_runner(folder)


def spec(n, *, top=0, ids=None, start=None, targets=None):
    return LogprobSpec([True] * n, [top] * n, [ids] * n, start, targets)


def score_prompt(runner, prompt, ends, *, start=0, top=0, ids=None, namesake=None):
    """Input scores of `prompt` computed in pieces that end at `ends`, joined as the scheduler joins them."""
    scheduler = LittleScheduler(runner)
    row = scheduler.add(prompt)
    logprobs, tops, named = [], [], []
    for end in ends:
        begin = row.computed
        first = max(start - begin, 0)
        targets = prompt[begin + first + 1 : end + 1]  # one fewer on the last piece: its last row samples
        batch = scheduler.batch(
            ForwardMode.EXTEND, [row], [end], logprob=spec(1, top=top, ids=ids, start=[first], targets=[targets])
        )
        scores = scheduler.launch(batch).input_scores[0]
        if scores is not None:
            logprobs += scores.logprobs
            tops += scores.top
            named += scores.token_ids
    return logprobs, tops, named


@pytest.mark.parametrize("ends", [[40], [16, 32, 40], [1, 39, 40], [39, 40]])
@pytest.mark.parametrize("start", [0, 7])
def test_input_logprobs_are_those_of_the_token_given_those_before_it(pair, ends, start):
    """Trap 4: entry i is P(token i | tokens before i), not the next token's; chunks join without a seam."""
    model, runner = pair
    expected = reference_logprobs(model, PROMPT)
    logprobs, tops, named = score_prompt(runner, PROMPT, ends, start=start, top=3, ids=[5, 250])
    assert len(logprobs) == len(PROMPT) - 1 - start  # the first requested position has no predecessor among them
    for i, (logprob, top, chosen) in enumerate(zip(logprobs, tops, named, strict=True)):
        row = expected[start + i]
        assert logprob == pytest.approx(float(row[PROMPT[start + i + 1]]), abs=1e-3)
        assert [token for _, token in top] == row.topk(3).indices.tolist()
        assert [value for value, _ in top] == pytest.approx(row.topk(3).values.tolist(), abs=1e-3)
        assert chosen == [(pytest.approx(float(row[5]), abs=1e-3), 5), (pytest.approx(float(row[250]), abs=1e-3), 250)]


def test_long_prompts_are_scored_in_blocks_of_rows(pair, monkeypatch):
    _, runner = pair
    whole = score_prompt(runner, PROMPT, [40], top=2)
    monkeypatch.setattr(logits_processor, "ROWS_AT_A_TIME", 7)
    assert score_prompt(runner, PROMPT, [40], top=2) == whole


def test_only_requests_that_ask_get_scores(pair):
    model, runner = pair
    scheduler = LittleScheduler(runner)
    rows = [scheduler.add(PROMPT[:n]) for n in (5, 9, 4)]
    mixed = LogprobSpec([False, True, True], [0, 2, 0], [None, None, [8]], [5, 6, 4], [[], PROMPT[7:9], []])
    result = scheduler.launch(scheduler.batch(ForwardMode.EXTEND, rows, [5, 9, 4], logprob=mixed))
    assert result.output_logprobs[0] == [] and result.output_top[0] is None and result.output_token_ids[0] is None
    assert [len(scores) for scores in result.output_logprobs] == [0, 1, 1]
    assert len(result.output_top[1][0]) == 2 and result.output_token_ids[1] is None
    assert result.output_top[2] is None and [i for _, i in result.output_token_ids[2][0]] == [8]
    assert result.input_scores[0] is None and result.input_scores[2] is None
    expected = reference_logprobs(model, PROMPT[:9])
    assert result.input_scores[1].logprobs == pytest.approx(
        [float(expected[6, PROMPT[7]]), float(expected[7, PROMPT[8]])], abs=1e-3
    )
    assert len(result.input_scores[1].top) == 2 and result.input_scores[1].token_ids == []


def test_no_logprobs_asked_means_none_computed(pair):
    _, runner = pair
    scheduler = LittleScheduler(runner)
    result = scheduler.prefill([scheduler.add(PROMPT)])
    assert result.output_logprobs is None and result.input_scores is None


def test_prefill_logprobs_equal_decode_logprobs_of_the_same_text(pair):
    _, runner = pair
    scheduler = LittleScheduler(runner)
    row = scheduler.add(PROMPT[:10])
    logprobs = [scheduler.prefill([row], logprob=spec(1)).output_logprobs[0][0]]
    for _ in range(8):
        logprobs += scheduler.decode([row], logprob=spec(1)).output_logprobs[0]
    again, _, _ = score_prompt(runner, row.ids, [len(row.ids)], start=9)
    assert again == pytest.approx(logprobs, abs=1e-3)


def test_output_logprobs_come_after_temperature_and_before_filters(pair):
    """Trap 67: the score of a token that top-k left alone is not 0, and temperature is in it."""
    model, runner = pair
    scheduler = LittleScheduler(runner)
    params = SamplingParams(temperature=0.5, top_k=2, top_p=0.9, sampling_seed=3)
    row = scheduler.add(PROMPT, params)
    result = scheduler.prefill([row], logprob=spec(1, top=4))
    expected = (reference_logprobs(model, PROMPT)[-1] / 0.5).log_softmax(-1)
    assert result.output_logprobs[0][0] == pytest.approx(float(expected[row.output[0]]), abs=1e-3)
    assert [v for v, _ in result.output_top[0][0]] == pytest.approx(expected.topk(4).values.tolist(), abs=1e-3)


def test_a_nan_row_yields_minus_one_and_leaves_its_neighbors_alone(pair):
    """A poisoned request ends alone: the process lives, the relay holds no invalid index, others are untouched."""
    model, runner = pair
    scheduler = LittleScheduler(runner)
    sampled = SamplingParams(temperature=1.0, sampling_seed=1, repetition_penalty=1.2, top_p=0.9)
    rows = [scheduler.add(PROMPT[:12]), scheduler.add(PROMPT[:20], sampled), scheduler.add(PROMPT[:9], GREEDY)]
    batch = scheduler.batch(ForwardMode.EXTEND, rows, [12, 20, 9], logprob=spec(3))
    logits = runner.forward(batch)
    with torch.inference_mode():
        logits.next_token_logits[0] = math.nan
        logits.next_token_logits[1, 17] = math.inf
    result = runner.to_host(runner.sample(logits, batch), batch)
    assert result.next_token_ids[:2] == [[-1], [-1]]
    assert result.next_token_ids[2] == [int(reference_logprobs(model, PROMPT[:9])[-1].argmax())]
    assert (runner.relay >= 0).all()
    scheduler.decode(rows)  # the step that overlap has launched by the time the scheduler knows
