"""The reference itself: its shortcuts give what `generate` gives."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.equality.harness import GREEDY, Answer, Ask, Ledger, Model, RealEngine
from tests.equality.reference import TIE
from tests.equality.workloads import LENGTH, catalog, hot
from tinysrt.sampling_params import SamplingParams

NO_STOPS: frozenset[int] = frozenset()


def test_cutting_at_a_stop_token_is_what_generate_does(llama: Model) -> None:
    for prompt in catalog()[4:12]:
        stop = llama.reference.greedy(prompt, LENGTH).ids[6]
        output = llama.reference.generate(prompt, LENGTH, eos_token_id=[stop, 7])
        cut = llama.reference.greedy(prompt, LENGTH).until(LENGTH, frozenset({stop, 7}))
        assert output.sequences[0, len(prompt) :].tolist() == cut.ids and len(cut.ids) <= 7


def test_the_naive_loop_without_anything_is_generate(llama: Model) -> None:
    for prompt in catalog()[4:8]:
        naive = llama.reference._naive(prompt, LENGTH, GREEDY, [], NO_STOPS)
        assert naive.ids == llama.reference.greedy(prompt, LENGTH).ids


def test_naive_draws_follow_the_distribution(llama: Model) -> None:
    """Over 4,000 seeds the most likely tokens come up as often as their probability says."""
    from tests.equality.reference import drawn

    row = llama.reference.logprobs(catalog()[5])[-1].double()
    counts: dict[int, int] = {}
    for seed in range(4000):
        token, _ = drawn(row, SamplingParams(sampling_seed=seed), position=15)
        counts[token] = counts.get(token, 0) + 1
    for value, token in zip(*row.topk(3), strict=True):
        assert counts[int(token)] / 4000 == pytest.approx(float(value.exp()), abs=0.03)


@pytest.fixture
def answered(llama: Model) -> tuple[Ask, Answer]:
    ask = Ask("a", catalog()[9], logprobs=True, start=0).having(max_new_tokens=8)
    with RealEngine(llama) as engine:
        return ask, engine.play([ask])["a"]


@pytest.mark.parametrize("token", [0, 3, 7])
def test_the_ledger_sees_a_wrong_token(llama: Model, answered: tuple[Ask, Answer], token: int) -> None:
    ask, answer = answered
    answer.ids[token] = (answer.ids[token] + 1) % 300
    with pytest.raises(AssertionError, match=f"token {token}"):
        Ledger().check(llama, ask, answer)


def test_the_ledger_sees_a_missing_token_a_wrong_score_and_a_shift(llama: Model, answered: tuple[Ask, Answer]) -> None:
    ask, answer = answered
    Ledger().check(llama, ask, answer)
    with pytest.raises(AssertionError, match="longer"):
        Ledger().check(llama, ask, replace(answer, ids=answer.ids[:-1]))
    with pytest.raises(AssertionError, match="score of token 2"):
        wrong = [score + 0.002 * (k == 2) for k, score in enumerate(answer.logprobs)]
        Ledger().check(llama, ask, replace(answer, logprobs=wrong))
    assert answer.input is not None
    scores = [score for score, _ in answer.input]
    shifted = list(zip([scores[0], *scores[2:], -1.0], ask.prompt, strict=True))
    with pytest.raises(AssertionError, match="score of prompt token 1"):
        Ledger().check(llama, ask, replace(answer, input=shifted))


def test_a_near_tie_is_excused_and_the_rest_still_counts(llama: Model, answered: tuple[Ask, Answer]) -> None:
    """A reference that is undecided at token 3: either token passes, and what follows is compared with the text of the
    one that tinysrt took."""
    ask, answer = replace(answered[0], logprobs=False, start=-1), replace(answered[1], logprobs=[])
    reference = llama.reference
    trace = reference.greedy(ask.prompt, 8)
    other = (trace.ids[3] + 1) % 300
    scores, margins = trace.scores.clone(), list(trace.margins)
    scores[3, other] = scores[3, trace.ids[3]] - TIE / 2
    margins[3] = TIE / 2
    key = tuple(ask.prompt)
    reference.greedy_traces[key] = replace(trace, scores=scores, margins=margins)
    try:
        rest = reference.greedy([*ask.prompt, *trace.ids[:3], other], 4).ids
        assert rest != trace.ids[4:8]
        ledger = Ledger()
        ledger.check(llama, ask, replace(answer, ids=[*trace.ids[:3], other, *rest]))
        assert (ledger.compared, ledger.excused) == (8, 1)
        with pytest.raises(AssertionError, match="token 4"):
            Ledger().check(llama, ask, replace(answer, ids=[*trace.ids[:3], other, (rest[0] + 1) % 300, *rest[1:]]))
        with pytest.raises(AssertionError, match="no near tie"):
            Ledger().check(llama, ask, replace(answer, ids=[*trace.ids[:3], (other + 1) % 300, *rest]))
    finally:
        reference.greedy_traces[key] = trace


def test_hot_neighbors_differ(llama: Model) -> None:
    texts = [tuple(llama.reference.decode(catalog()[5], 16, hot(i), [], NO_STOPS).ids) for i in range(5)]
    assert len(set(texts)) == 5
