"""Requests in one batch do not see each other: sampled, penalized, biased, aborted and scored neighbors.

What each says is compared with a naive loop over Hugging Face's logits: "the same as alone" and "right" are one check.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from tests.equality.harness import GREEDY, Answer, Ask, Ledger, Model, RealEngine, Switches
from tests.equality.workloads import LENGTH, catalog, four_waves, hot
from tinysrt.messages import FinishAbort
from tinysrt.sampling_params import SamplingParams

PROMPTS = catalog()
SWITCHES = [
    Switches("normal", radix=False),
    Switches("late", chunk=64, page=16, mixed=True),
    Switches("overlap", chunk=32, mixed=True, tight=True),
]
TIGHT_POOL = 320


def play(model: Model, ledger: Ledger, switches: Switches, asks: list[Ask]) -> dict[str, Answer]:
    with RealEngine(model, switches, capacity=TIGHT_POOL if switches.tight else None) as engine:
        answers = engine.play(asks)
    for ask in asks:
        ledger.check(model, ask, answers[ask.rid])
    return answers


@pytest.mark.parametrize("switches", SWITCHES, ids=str)
def test_a_greedy_request_stays_greedy_beside_sampled_ones(llama: Model, ledger: Ledger, switches: Switches) -> None:
    """FC-21: seven hot neighbors with other filters, some that end earlier and some that come later; three rounds."""
    greedy = Ask("greedy", PROMPTS[9]).having(max_new_tokens=24)
    alone = play(llama, ledger, switches, [greedy])["greedy"].ids
    for turn in range(3):
        neighbors = [
            Ask(
                f"n{i}", PROMPTS[9 + (i + turn) % 3], hot(10 * turn + i, max_new_tokens=(3, 16, 9)[i % 3]), at=i % 4 * 3
            )
            for i in range(7)
        ]
        answers = play(llama, ledger, switches, [greedy, *neighbors])
        assert answers["greedy"].ids == alone
        assert len({tuple(answers[ask.rid].ids) for ask in neighbors}) == 7


@pytest.mark.parametrize("switches", SWITCHES, ids=str)
def test_a_seed_gives_the_same_text_alone_and_in_company(llama: Model, ledger: Ledger, switches: Switches) -> None:
    """FC-22. A request without a seed gets one drawn at the door, so beside the seeded one others just have theirs."""
    drawn = SamplingParams(max_new_tokens=16)
    seeded = Ask("s", PROMPTS[8]).having(top_k=drawn.top_k, sampling_seed=42, max_new_tokens=16)
    alone = [play(llama, ledger, switches, [seeded])["s"].ids for _ in range(3)]
    for turn in range(2):
        others = [replace(seeded, rid=f"o{i}", at=i % 3).having(sampling_seed=1000 * turn + i) for i in range(6)]
        answers = play(llama, ledger, switches, [*others, seeded])
        assert answers["s"].ids == alone[0] == alone[1] == alone[2]
        assert len({tuple(answer.ids) for answer in answers.values()}) == 7
    edges = [replace(seeded, rid=str(seed)).having(sampling_seed=seed) for seed in (43, 0, 2**31, -1, -(2**63))]
    answers = play(llama, ledger, switches, edges)
    assert len({tuple(ids) for ids in [alone[0], *(answer.ids for answer in answers.values())]}) == 6


PENALTIES = {
    "plain": {},
    "frequency": {"frequency_penalty": 2.0},
    "repetition": {"repetition_penalty": 1.5},
    "presence": {"presence_penalty": 2.0},
    "all": {"frequency_penalty": 0.5, "repetition_penalty": 1.1, "presence_penalty": -1.0},
}


@pytest.mark.parametrize("switches", SWITCHES, ids=str)
def test_penalties_act_on_their_own_request_and_do_act(llama: Model, ledger: Ledger, switches: Switches) -> None:
    """FC-23, five rounds with other lengths, so that counts would move to another row if they could. (Trap 25 too:
    a retracted row starts its counts anew from what it had produced.)"""

    def most(ids: list[int]) -> int:
        return Counter(ids).most_common(1)[0][1]

    prompt = max(PROMPTS[3:14], key=lambda p: most(llama.reference.greedy(p, 32).ids))
    for turn in range(5):
        asks = []
        for i, (name, penalties) in enumerate(PENALTIES.items()):
            length = 32 if turn == 0 else 6 + (7 * i + 11 * turn) % 25
            asks.append(Ask(name, prompt, at=i * turn % 4).having(max_new_tokens=length, **penalties))
        answers = play(llama, ledger, switches, asks)
        if turn == 0:
            assert most(answers["plain"].ids) >= 4, "nothing to penalize"
            for name in ("frequency", "repetition", "presence"):
                assert answers[name].ids != answers["plain"].ids
                assert most(answers[name].ids) < most(answers["plain"].ids)


@pytest.mark.parametrize("switches", SWITCHES, ids=str)
def test_logit_bias_stays_in_its_row(llama: Model, ledger: Ledger, switches: Switches) -> None:
    """FC-24."""
    biases = [None, {40: 100.0}, {41: 100.0}, None]
    asks = [
        Ask(str(i), PROMPTS[5 + i]).having(logit_bias=bias, max_new_tokens=(8, 24, 16, 32)[i], ignore_eos=True)
        for i, bias in enumerate(biases)
    ]
    answers = play(llama, ledger, switches, asks)
    assert (answers["1"].ids, answers["2"].ids) == ([40] * 24, [41] * 16)


@pytest.mark.parametrize("switches", SWITCHES, ids=str)
def test_stop_tokens_are_forbidden_until_min_new_tokens(llama: Model, ledger: Ledger, switches: Switches) -> None:
    asks = []
    for i, prompt in enumerate(PROMPTS[4:12]):
        stop = llama.reference.greedy(prompt, LENGTH).ids[2]
        asks.append(Ask(f"r{i}", prompt, at=i % 3).having(stop_token_ids=[stop], max_new_tokens=20, min_new_tokens=i))
    answers = play(llama, ledger, switches, asks)
    assert all(len(answers[f"r{i}"].ids) > i for i in range(8))


@pytest.mark.parametrize("switches", SWITCHES, ids=str)
def test_everything_in_one_batch(llama: Model, ledger: Ledger, switches: Switches) -> None:
    """Greedy, hot, penalized, biased and scored requests, each with its own limit, with scores after temperature."""
    kinds = [
        GREEDY,
        hot(1),
        SamplingParams(top_k=1, frequency_penalty=1.0, repetition_penalty=1.3),
        hot(3, presence_penalty=1.5, temperature=0.7),
        SamplingParams(top_k=1, logit_bias={50: 4.0, 60: -4.0, 9: 2.5}),
        hot(9, logit_bias={7: -100.0}, frequency_penalty=0.3, min_new_tokens=4),
    ]
    asks = []
    for i, prompt in enumerate(PROMPTS[:24]):
        ask = Ask(f"r{i}", prompt, kinds[i % len(kinds)], at=i % 5 * 2).having(max_new_tokens=4 + i % 13)
        if i % 4 == 1:
            ask = replace(ask, logprobs=True, top=2, named=[7, 50])
        asks.append(ask)
    play(llama, ledger, switches, asks)


@pytest.mark.parametrize("switches", SWITCHES, ids=str)
@pytest.mark.parametrize("turn", [1, 2, 5, 12, 33])
def test_aborting_some_does_not_change_the_others(llama: Model, ledger: Ledger, switches: Switches, turn: int) -> None:
    """Every fourth request of the four waves is aborted around one step: waiting, in chunks, decoding or over."""
    asks = four_waves(llama)
    aborts = [(turn + i % 3, ask.rid) for i, ask in enumerate(asks) if i % 4 == 0]
    with RealEngine(llama, switches, capacity=TIGHT_POOL if switches.tight else None) as engine:
        answers = engine.play(asks, aborts)
    aborted = {rid for _, rid in aborts}
    for ask in asks:
        ledger.check(llama, ask, answers[ask.rid], whole=ask.rid not in aborted)
        assert ask.rid in aborted or not isinstance(answers[ask.rid].finish, FinishAbort)
    assert any(isinstance(answers[rid].finish, FinishAbort) for rid in aborted)
