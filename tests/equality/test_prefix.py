"""Cached prefixes change how much is computed, never what is said."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from tests.equality.harness import Ask, Ledger, Model, RealEngine, Switches
from tests.equality.workloads import random_ids

LENGTHS = (15, 16, 17, 31, 32, 33, 64, 128)
SWITCHES = [Switches(loop, page=page) for loop in ("normal", "overlap") for page in (1, 16)]


@pytest.mark.parametrize("switches", SWITCHES, ids=str)
def test_a_prompt_that_is_fully_cached_still_computes_its_last_token(
    llama: Model, ledger: Ledger, switches: Switches
) -> None:
    """FC-25, trap 2: three times the same; then with its answer appended; then with one id changed; three at once."""
    page = switches.page

    def whole_pages(length: int) -> int:
        return length // page * page

    with RealEngine(llama, switches) as engine:
        for length in LENGTHS:
            prompt = random_ids(random.Random(length), length)
            # Ids of the answers may lead from one prompt into another's answer; the first id keeps prompts apart.
            prompt[0] = 8 + LENGTHS.index(length)

            def ask(ids: list[int], name: str = "a", engine: RealEngine = engine) -> tuple[list[int], int]:
                request = Ask(name, ids).having(max_new_tokens=16)
                answer = engine.play([request])[name]
                ledger.check(llama, request, answer)
                return answer.ids, answer.cached_tokens

            output, cached = ask(prompt)
            assert cached == 0
            for _ in range(2):
                assert ask(prompt) == (output, whole_pages(length - 1))
            # All but the last token of the answer has KV: nobody needed that of the last.
            assert ask(prompt + output)[1] == whole_pages(length + 15)
            middle = length // 2
            changed = [*prompt[:middle], prompt[middle] ^ 1, *prompt[middle + 1 :]]
            assert ask(changed)[1] == whole_pages(middle)
            three = [Ask(f"n{i}", prompt).having(max_new_tokens=16) for i in range(3)]
            answers = engine.play(three)
            assert [answers[f"n{i}"].ids for i in range(3)] == [output] * 3


@pytest.mark.parametrize("policy", ["lpm", "fcfs"])
@pytest.mark.parametrize("switches", SWITCHES, ids=str)
def test_equal_prompts_in_one_batch(llama: Model, ledger: Ledger, switches: Switches, policy: str) -> None:
    """Both compute the prefix; the second's copy is freed and its row goes on in the first's slots (trap 5)."""
    prompt = random_ids(random.Random(5), 40)
    asks = [Ask(f"r{i}", prompt[: 40 - i % 2]).having(max_new_tokens=12 + i) for i in range(6)]
    with RealEngine(llama, replace(switches, policy=policy)) as engine:
        answers = engine.play(asks)
    for ask in asks:
        ledger.check(llama, ask, answers[ask.rid])


@pytest.mark.parametrize("loop", ["normal", "overlap", "late"])
@pytest.mark.parametrize("page", [1, 16])
def test_a_prompt_of_three_chunks(llama: Model, ledger: Ledger, loop: str, page: int) -> None:
    """The middle chunks' tokens are dropped (trap 14), and chunks are no cache hits (trap 17)."""
    prompt = random_ids(random.Random(6), 45)
    ask = Ask("a", prompt).having(max_new_tokens=12)
    whole, chunked = Switches(loop, page=page), Switches(loop, page=page, chunk=16)
    for switches in (whole, chunked):
        with RealEngine(llama, switches) as engine:
            answer = engine.play([ask])["a"]
        ledger.check(llama, ask, answer)
        assert answer.cached_tokens == 0
        assert engine.modes == {"EXTEND": 1 if switches is whole else 3, "DECODE": 11}


@pytest.mark.parametrize("switches", SWITCHES, ids=str)
def test_a_conversation_goes_on_from_what_was_said(llama: Model, ledger: Ledger, switches: Switches) -> None:
    """Each turn's prompt is the last prompt, the answer (cut by a stop token) and some more; the cache has all of it
    but the tail of a page."""
    prompt = random_ids(random.Random(7), 21)
    known = 0  # tokens of the prompt that were in the last turn
    with RealEngine(llama, replace(switches, chunk=16)) as engine:
        for turn in range(6):
            text = llama.reference.greedy(prompt, 14).ids
            ask = Ask(f"t{turn}", prompt).having(max_new_tokens=14, stop_token_ids=[text[9]])
            answer = engine.play([ask])[ask.rid]
            ledger.check(llama, ask, answer)
            assert answer.cached_tokens >= max(0, known - 1) // switches.page * switches.page
            known = len(prompt) + len(answer.ids)
            prompt = prompt + answer.ids + random_ids(random.Random(turn), 5)
