"""As many scores as tokens, and the right tokens, however a run ends (FC-12)."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.equality.harness import GREEDY, Answer, Ask, Ledger, Model, RealEngine, Switches
from tests.equality.reference import Reference
from tests.equality.workloads import catalog
from tests.model_executor.harness import save_tiny_model
from tests.text.tiny_tokenizers import bytes_only
from tinysrt.messages import AbortReq, FinishAbort, FinishLength, FinishStop

TOKENIZER = bytes_only()
EOS = 256
LETTERS = range(ord("a"), ord("z") + 1)
PROMPTS = [[token % 256 for token in prompt] for prompt in catalog()[5:13]]
# The text is made of letters only, so that stop strings are to be found in it.
LETTERS_ONLY = {token: 100.0 for token in LETTERS}
LONGEST = 14


@pytest.fixture(scope="module")
def letters(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """A model whose tokens are bytes, and 256 its end token."""
    folder: Path = tmp_path_factory.mktemp("letters")
    return Model(folder, Reference(save_tiny_model("llama", folder, vocab_size=257, eos_token_id=EOS)))


def text_of(model: Model, prompt: list[int], **params: object) -> list[int]:
    asking = Ask("a", prompt).having(logit_bias=LETTERS_ONLY, **params)
    return model.reference.decode(prompt, LONGEST, asking.params, [], frozenset({EOS})).ids


Ending = Callable[[Model, list[int]], tuple[Ask, list[int]]]


def by_length(model: Model, prompt: list[int]) -> tuple[Ask, list[int]]:
    return Ask("", prompt).having(max_new_tokens=9), text_of(model, prompt)[:9]


def by_stop_token(model: Model, prompt: list[int]) -> tuple[Ask, list[int]]:
    text = text_of(model, prompt)
    return Ask("", prompt).having(stop_token_ids=[text[5]]), text[: text.index(text[5]) + 1]


def by_end_token(model: Model, prompt: list[int]) -> tuple[Ask, list[int]]:
    """Biased to end at once; min_new_tokens lets it end later."""
    bias = {**LETTERS_ONLY, EOS: 300.0}
    text = model.reference.decode(
        prompt, LONGEST, Ask("", prompt).having(logit_bias=bias, min_new_tokens=6).params, [], frozenset({EOS})
    ).ids
    assert text.index(EOS) == 6
    return Ask("", prompt).having(logit_bias=bias, min_new_tokens=6), text


def by_stop_string(model: Model, prompt: list[int]) -> tuple[Ask, list[int]]:
    text = bytes(text_of(model, prompt)).decode()
    stop = text[4:7]
    return Ask("", prompt).having(stop=["no such text", stop]), list(text[: text.index(stop) + 3].encode())


def by_stop_regex(model: Model, prompt: list[int]) -> tuple[Ask, list[int]]:
    text = bytes(text_of(model, prompt)).decode()
    pattern = f"{text[3]}.{text[5]}"
    match = re.search(pattern, text)
    assert match is not None
    return Ask("", prompt).having(stop_regex=[pattern]), list(text[: match.end()].encode())


def by_the_last_allowed_token_being_a_stop(model: Model, prompt: list[int]) -> tuple[Ask, list[int]]:
    ask, text = by_stop_token(model, prompt)
    return ask.having(max_new_tokens=len(text)), text


ENDINGS: dict[Ending, type] = {
    by_length: FinishLength,
    by_stop_token: FinishStop,
    by_end_token: FinishStop,
    by_stop_string: FinishStop,
    by_stop_regex: FinishStop,
    by_the_last_allowed_token_being_a_stop: FinishStop,
}


def check_counts(ask: Ask, answer: Answer) -> None:
    assert answer.meta is not None
    assert len(answer.logprobs) == len(answer.top) == len(answer.ids) == answer.meta.completion_tokens
    assert all(token in ask_top for token, ask_top in zip(answer.ids, tokens_of(answer.top), strict=True))


def tokens_of(top: list[list[tuple[float, int]]]) -> list[list[int]]:
    """All best tokens of each position; greedy text is made of them."""
    return [[token for _, token in entry] for entry in top]


@pytest.mark.parametrize("switches", [Switches("normal"), Switches("overlap", chunk=16), Switches("late")], ids=str)
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("ending", ENDINGS, ids=lambda ending: ending.__name__)
def test_eight_at_once(letters: Model, ending: Ending, stream: bool, switches: Switches) -> None:
    asks, texts = [], []
    for i, prompt in enumerate(PROMPTS):
        ask, text = ending(letters, prompt)
        params = {"logit_bias": LETTERS_ONLY} if ask.params.logit_bias is None else {}
        asks.append(replace(ask, rid=f"r{i}", at=i % 3, stream=stream, logprobs=True, top=3).having(**params))
        texts.append(text)
    with RealEngine(letters, switches, tokenizer=TOKENIZER) as engine:
        answers = engine.play(asks)
    for ask, text in zip(asks, texts, strict=True):
        answer = answers[ask.rid]
        assert answer.ids == text and type(answer.finish) is ENDINGS[ending]
        check_counts(ask, answer)


@pytest.mark.parametrize("switches", [Switches("normal"), Switches("overlap"), Switches("late", chunk=16)], ids=str)
@pytest.mark.parametrize("stream", [True, False])
def test_an_abort_after_any_step(letters: Model, ledger: Ledger, stream: bool, switches: Switches) -> None:
    asks = [
        Ask(f"r{i}", prompt, GREEDY, stream=stream, logprobs=True, top=1).having(max_new_tokens=12)
        for i, prompt in enumerate(PROMPTS)
    ]
    for turn in range(0, 15, 2):
        with RealEngine(letters, switches) as engine:
            engine.step([ask.message() for ask in asks])
            for _ in range(turn):
                engine.step()
            engine.step([AbortReq(rid=ask.rid) for ask in asks[::2]])
            engine.finish()
            answers = {ask.rid: engine.answer(ask.rid) for ask in asks}
        for i, ask in enumerate(asks):
            answer = answers[ask.rid]
            ledger.check(letters, ask, answer, whole=i % 2 == 1)
            assert isinstance(answer.finish, FinishAbort) or len(answer.ids) == 12
            if answer.meta is not None:
                check_counts(ask, answer)
