"""The sampler against a naive numpy one, its laws under random batches, and the traps of sampling by name."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tinysrt.kernels.reference import draw, keep_top_k_top_p_min_p
from tinysrt.model_executor import sampler as sampler_module
from tinysrt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from tinysrt.model_executor.layers.logits_processor import LogitsOutput
from tinysrt.model_executor.sampler import Sampler
from tinysrt.model_executor.sampling_batch_info import SamplingBatchInfo, uniforms
from tinysrt.sampling_params import TOP_K_ALL, SamplingParams

VOCAB = 40
CPU = torch.device("cpu")


def run(
    logits,
    params,
    *,
    sampler=None,
    rows=None,
    seq_lens=None,
    prompt_lens=None,
    stop_ids=None,
    output_ids="fresh",
    relay=None,
):
    """Sample one step; `output_ids` "fresh" is a prefill of new requests, None a decode step."""
    n = len(params)
    logits = torch.tensor(np.asarray(logits), dtype=torch.float32)
    rows = rows or list(range(1, n + 1))
    seq_lens = seq_lens or [10] * n
    statics = SamplingBatchInfo.for_requests(
        params, rows, prompt_lens or [10] * n, stop_ids or [frozenset()] * n, logits.shape[1], CPU
    )
    info = statics.at_step(seq_lens, [[] for _ in params] if output_ids == "fresh" else output_ids)
    batch = ForwardBatch(
        forward_mode=ForwardMode.DECODE,
        step=0,
        input_ids=torch.zeros(n, dtype=torch.int64),
        positions=torch.tensor(seq_lens) - 1,
        out_cache_loc=torch.zeros(n, dtype=torch.int64),
        req_pool_indices=torch.tensor(rows),
        seq_lens=torch.tensor(seq_lens),
        seq_lens_cpu=seq_lens,
        sampling_info=info,
    )
    relay = torch.zeros(64, dtype=torch.int64) if relay is None else relay
    sampler = sampler or Sampler(logits.shape[1], CPU)
    return sampler(LogitsOutput(logits), batch, relay).next_token_ids.tolist()


# ---- a naive sampler, one row at a time, in numpy --------------------------------------------------


def naive(logits, params: SamplingParams, produced, position):
    logits = np.asarray(logits, dtype=np.float64).copy()
    counts = np.bincount(produced, minlength=len(logits)) if len(produced) else np.zeros(len(logits))
    logits -= params.frequency_penalty * counts + params.presence_penalty * (counts > 0)
    for i in np.flatnonzero(counts):
        logits[i] = logits[i] / params.repetition_penalty if logits[i] > 0 else logits[i] * params.repetition_penalty
    for i, value in (params.logit_bias or {}).items():
        logits[i] += value
    if params.is_greedy:
        return int(np.argmax(logits))
    scaled = (logits - logits.max()) / params.temperature
    probs = np.exp(scaled) / np.exp(scaled).sum()
    order = np.argsort(-probs, kind="stable")
    mass_before, kept = 0.0, []
    for rank, i in enumerate(order):
        if rank < params.top_k and mass_before <= params.top_p and probs[i] >= params.min_p * probs[order[0]]:
            kept.append(i)
        mass_before += probs[i]
    uniform = uniforms(np.array([params.sampling_seed], dtype=np.uint64), [position])[0]
    target = uniform * probs[kept].sum()
    running = 0.0
    for i in sorted(kept):
        running += probs[i]
        if running > target:
            return int(i)
    return int(max(kept))


def random_params(draw_):
    if draw_(st.integers(0, 4)) == 0:
        base = dict(top_k=1)
    else:
        base = dict(
            temperature=draw_(st.sampled_from([0.1, 0.7, 1.0, 1.5])),
            top_k=draw_(st.sampled_from([TOP_K_ALL, 2, 5, 60])),
            top_p=draw_(st.sampled_from([1.0, 0.95, 0.5, 1e-6])),
            min_p=draw_(st.sampled_from([0.0, 0.05, 0.5, 1.0])),
        )
    # Binary fractions, and factors of two: float32 and the naive float64 then agree on every tie.
    penalties = dict(
        frequency_penalty=draw_(st.sampled_from([0.0, 0.5, -1.0])),
        presence_penalty=draw_(st.sampled_from([0.0, 0.75])),
        repetition_penalty=draw_(st.sampled_from([1.0, 2.0, 0.5])),
    )
    bias = draw_(st.sampled_from([None, {3: 2.0, 11: -5.0}]))
    return SamplingParams(**base, **penalties, logit_bias=bias, sampling_seed=draw_(st.integers(0, 2**62)))


@st.composite
def batches(draw_):
    n = draw_(st.integers(1, 6))
    params = [random_params(draw_) for _ in range(n)]
    # On a coarse grid equal logits are common (both sides rank them by id) and near-equal ones do not occur.
    logits = np.random.default_rng(draw_(st.integers(0, 2**32))).integers(-64, 64, (n, VOCAB)) / 16
    produced = [draw_(st.lists(st.integers(0, VOCAB - 1), max_size=6)) for _ in range(n)]
    return params, logits, produced


@settings(max_examples=150, deadline=None)
@given(batches(), st.sampled_from([4, 16, 1024]))
def test_a_batch_samples_what_the_naive_sampler_does_row_by_row(batch, candidates):
    params, logits, produced = batch
    saved, sampler_module.CANDIDATES = sampler_module.CANDIDATES, candidates
    try:
        got = run(logits, params, output_ids=produced)
    finally:
        sampler_module.CANDIDATES = saved
    expected = [naive(row, p, ids, 10) for row, p, ids in zip(logits, params, produced, strict=True)]
    assert got == expected


@settings(max_examples=60, deadline=None)
@given(batches())
def test_a_row_draws_the_same_alone_and_in_company(batch):
    """FC-21, FC-22, FC-23, FC-24: seeds, filters, penalties and biases belong to their row."""
    params, logits, produced = batch
    together = run(logits, params, output_ids=produced)
    alone = [run(logits[i : i + 1], [params[i]], output_ids=[produced[i]])[0] for i in range(len(params))]
    assert together == alone


@settings(max_examples=60, deadline=None)
@given(batches(), st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=5))
def test_penalty_counts_that_advance_by_decode_steps_equal_counts_from_a_restart(batch, tokens):
    """Retract restarts a row's counts from its output so far; running on must give the same. No step lags behind."""
    params, logits, produced = batch
    relay = torch.zeros(64, dtype=torch.int64)
    running = Sampler(VOCAB, CPU)
    run(logits, params, sampler=running, output_ids=produced)
    for token in tokens:
        relay[:] = token
        got = run(logits, params, sampler=running, output_ids=None, relay=relay)
    assert got == run(logits, params, output_ids=[ids + tokens for ids in produced])


# ---- by name ---------------------------------------------------------------------------------------


def test_trap_65_the_token_that_crosses_top_p_stays():
    probs = torch.tensor([[0.5, 0.3, 0.2]])
    keep = lambda p: keep_top_k_top_p_min_p(  # noqa: E731
        probs, torch.tensor([[9]]), torch.tensor([[p]]), torch.tensor([[0.0]])
    ).tolist()[0]
    assert keep(0.4) == [True, False, False]
    assert keep(0.6) == [True, True, False]
    assert keep(1e-6) == [True, False, False]
    assert keep(0.5) == [True, True, False]  # mass before the second is 0.5, not above it


def test_trap_66_the_repetition_penalty_lowers_negative_logits_too():
    logits = [[-1.0, -1.2, -9.0]]
    assert run(logits, [SamplingParams(top_k=1)], output_ids=[[0]]) == [0]
    assert run(logits, [SamplingParams(top_k=1, repetition_penalty=2.0)], output_ids=[[0]]) == [1]


def test_trap_68_and_fc_20_edge_values_give_the_greedy_token():
    generator = np.random.default_rng(2)
    for _ in range(50):
        logits = generator.normal(0, 3, (1, VOCAB))
        best = [int(logits.argmax())]
        for edge in (
            dict(temperature=0.0),
            dict(temperature=1e-8),
            dict(temperature=1e-5),
            dict(top_k=1),
            dict(top_p=1e-6),
            dict(min_p=1.0),
            dict(temperature=2e-5),  # just above the greedy limit: must not overflow
        ):
            params = SamplingParams(sampling_seed=1, **edge).normalize()
            assert run(logits, [params]) == best, edge


def test_a_top_k_above_the_vocabulary_means_off():
    logits = np.zeros((1, VOCAB))
    seen = {run(logits, [SamplingParams(top_k=VOCAB + 5, sampling_seed=s)])[0] for s in range(300)}
    assert len(seen) > VOCAB * 0.9


def test_fc_21_a_greedy_row_takes_the_first_of_two_equal_tokens_every_time():
    logits = [[1.0, 5.0, 5.0, 0.0]] * 2
    for seed in range(20):
        got = run(logits, [SamplingParams(top_k=1, sampling_seed=seed), SamplingParams(sampling_seed=seed)])
        assert got[0] == 1


def test_fc_22_seeds_decide_and_any_integer_is_a_seed():
    logits = np.zeros((1, VOCAB))
    draws = {seed: run(logits, [SamplingParams(sampling_seed=seed)])[0] for seed in (0, 1, 42, 43, 2**31, -1, 2**62)}
    assert draws == {seed: run(logits, [SamplingParams(sampling_seed=seed)])[0] for seed in draws}
    assert len(set(draws.values())) > 3


def test_draws_follow_the_distribution():
    probs = np.array([0.5, 0.25, 0.15, 0.1])
    n = 4000
    params = [SamplingParams(sampling_seed=7)] * n
    drawn = run(np.tile(np.log(probs), (n, 1)), params, seq_lens=list(range(1, n + 1)))
    assert np.abs(np.bincount(drawn, minlength=4) / n - probs).max() < 0.03


def test_neighboring_seeds_do_not_share_a_stream():
    a = uniforms(np.full(50, 1, dtype=np.uint64), list(range(50)))
    b = uniforms(np.full(50, 2, dtype=np.uint64), list(range(50)))
    assert not set(a) & set(b) and (0 <= a).all() and (a < 1).all()


def test_draw_never_picks_a_token_without_weight():
    weights = torch.tensor([[0.0, 0.3, 0.0, 0.7, 0.0]])
    for uniform in (0.0, 0.2999, 0.3001, 1 - 2.0**-32):
        picked = draw(weights, torch.tensor([[uniform]], dtype=torch.float64)).item()
        assert picked in (1, 3)


def test_min_new_tokens_forbids_stop_tokens_until_reached():
    logits = [[0.0, 9.0, 5.0]]
    params = [SamplingParams(top_k=1, min_new_tokens=2)]
    picks = [
        run(logits, params, stop_ids=[frozenset({1})], prompt_lens=[10], seq_lens=[n], output_ids=None)[0]
        for n in (9, 10, 11, 12, 13)
    ]
    assert picks == [2, 2, 2, 1, 1]  # 10: the first output token, 12: two are out


def test_fc_24_a_bias_stays_in_its_row():
    logits = np.tile(np.arange(VOCAB, dtype=float), (3, 1))
    params = [SamplingParams(top_k=1), SamplingParams(top_k=1, logit_bias={4: 100.0}), SamplingParams(top_k=1)]
    assert run(logits, params) == [VOCAB - 1, 4, VOCAB - 1]


def test_fc_23_counts_follow_the_request_row_when_the_batch_shrinks():
    """Row 5's counts are found again at another place in the batch, and a new life of the row starts from zero."""
    logits = [[5.0, 4.9, 0.0], [5.0, 4.9, 0.0]]
    penalized = SamplingParams(top_k=1, frequency_penalty=1.0)
    relay = torch.zeros(64, dtype=torch.int64)  # both have just produced token 0
    shared = Sampler(3, CPU)
    assert run(logits, [SamplingParams(top_k=1), penalized], sampler=shared, rows=[2, 5]) == [0, 0]
    assert run(logits[:1], [penalized], sampler=shared, rows=[5], output_ids=None, relay=relay) == [1]
    assert run(logits[:1], [penalized], sampler=shared, rows=[5]) == [0]


def test_a_batch_without_sampling_info_is_greedy():
    batch = ForwardBatch(
        forward_mode=ForwardMode.DECODE,
        step=0,
        input_ids=torch.zeros(1, dtype=torch.int64),
        positions=torch.zeros(1, dtype=torch.int64),
        out_cache_loc=torch.zeros(1, dtype=torch.int64),
        req_pool_indices=torch.ones(1, dtype=torch.int64),
        seq_lens=torch.ones(1, dtype=torch.int64),
        seq_lens_cpu=[1],
    )
    output = Sampler(3, CPU)(LogitsOutput(torch.tensor([[0.0, 2.0, 1.0]])), batch, torch.zeros(2, dtype=torch.int64))
    assert output.next_token_ids.tolist() == [1]


@pytest.mark.parametrize("n", [1, 3])
def test_statics_serve_many_steps_unchanged(n):
    params = [SamplingParams(sampling_seed=i, presence_penalty=1.0) for i in range(n)]
    statics = SamplingBatchInfo.for_requests(params, list(range(1, n + 1)), [4] * n, [frozenset()] * n, VOCAB, CPU)
    first, again = statics.at_step([5] * n), statics.at_step([5] * n)
    assert torch.equal(first.uniforms, again.uniforms)
    assert not torch.equal(first.uniforms, statics.at_step([6] * n).uniforms)
