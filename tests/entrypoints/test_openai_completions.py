"""/v1/completions: prompts in four forms, echo, and the scoring contract that evaluation tools rely on."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.entrypoints.fakes import ByteTokenizer

PARIS = "The capital of France is Paris."


def complete(server: Any, **fields: Any) -> Any:
    return server.openai.completions.create(**({"model": "tiny", "prompt": "Hi"} | fields))


def streamed(server: Any, **fields: Any) -> dict[int, dict[str, Any]]:
    """The chunks of a stream, joined per choice: text, logprob lists, finish reasons."""
    joined: dict[int, dict[str, Any]] = {}
    for chunk in complete(server, stream=True, **fields):
        for choice in chunk.choices:
            so_far = joined.setdefault(choice.index, {"text": "", "finish": [], "logprobs": {}})
            so_far["text"] += choice.text
            so_far["finish"] += [choice.finish_reason] if choice.finish_reason else []
            for name, values in (choice.logprobs.model_dump() if choice.logprobs else {}).items():
                so_far["logprobs"].setdefault(name, []).extend(values or [])
    return joined


def test_a_plain_completion(server: Any) -> None:
    reply = complete(server)
    assert reply.object == "text_completion" and reply.model == "tiny" and reply.id.startswith("cmpl-")
    [choice] = reply.choices
    assert (choice.text, choice.finish_reason, choice.matched_stop, choice.logprobs) == ("Hello", "stop", 256, None)
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (2, 6)


def test_sixteen_tokens_unless_said_otherwise(server: Any) -> None:
    server.script.answers = ["x" * 40]
    assert complete(server).choices[0].text == "x" * 16
    assert complete(server, max_tokens=3).choices[0].finish_reason == "length"


@pytest.mark.parametrize(
    "prompt, count", [("ab", 1), (["ab"], 1), (["ab", "c"], 2), ([97, 98], 1), ([[97, 98], [99]], 2)]
)
def test_prompts_come_as_text_ids_or_lists_of_either(server: Any, prompt: Any, count: int) -> None:
    reply = complete(server, prompt=prompt, echo=True)
    assert [choice.text[:-5] for choice in reply.choices] == ["ab", "c"][:count]


def test_two_prompts_with_two_samples_are_numbered_prompt_first(server: Any) -> None:
    server.script.answers = ["a0", "a1", "b0", "b1"]
    prompts = ["first", "second!"]
    reply = complete(server, prompt=prompts, n=2)
    assert [(choice.index, choice.text) for choice in reply.choices] == [(0, "a0"), (1, "a1"), (2, "b0"), (3, "b1")]
    assert reply.usage.prompt_tokens == 5 + 7 and reply.usage.completion_tokens == 12
    chunks = streamed(server, prompt=prompts, n=2)
    assert {i: c["text"] for i, c in chunks.items()} == {0: "a0", 1: "a1", 2: "b0", 3: "b1"}
    assert all(c["finish"] == ["stop"] for c in chunks.values())


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("logprobs", [None, 0, 2])
@pytest.mark.parametrize("max_tokens", [0, 1, 4])
def test_echo_and_logprobs_agree_streamed_and_not(
    server: Any, echo: bool, logprobs: int | None, max_tokens: int
) -> None:
    server.script.answers = [" It is."]
    fields = {"prompt": PARIS, "echo": echo, "logprobs": logprobs, "max_tokens": max_tokens}
    choice = complete(server, **fields).choices[0]
    assert choice.text == (PARIS if echo else "") + " It is."[:max_tokens]
    assert choice.finish_reason == "length"
    stream = streamed(server, **fields)[0]
    assert stream["text"] == choice.text and stream["finish"] == ["length"]
    if logprobs is None:
        assert choice.logprobs is None and stream["logprobs"] == {}
        return
    whole = choice.logprobs
    assert "".join(whole.tokens) == choice.text
    for token, offset in zip(whole.tokens, whole.text_offset, strict=True):
        assert choice.text[offset:].startswith(token)
    if echo:
        assert whole.token_logprobs[0] is None and len(whole.tokens) == len(PARIS) + max_tokens
    assert all(isinstance(value, float) for value in whole.token_logprobs[echo:])
    if logprobs:
        assert all(token in top for token, top in zip(whole.tokens[echo:], whole.top_logprobs[echo:], strict=True))
    else:
        assert whole.top_logprobs is None
    for name, values in whole.model_dump().items():
        assert stream["logprobs"].get(name, []) == (values or []), name


def test_the_loglikelihood_of_an_evaluation_harness(server: Any) -> None:
    """lm-eval sends ids, one token and one logprob, and asks whether each token was the most likely one."""
    ids = ByteTokenizer().encode(PARIS)
    scores = complete(server, prompt=ids, max_tokens=1, logprobs=1, echo=True, temperature=0).choices[0].logprobs
    assert len(scores.tokens) == len(ids) + 1
    total = sum(scores.token_logprobs[1:-1])
    assert math.isclose(total, sum(-i / 1000 for i in ids[1:]))
    greedy = all(
        max(top, key=top.get) == token
        for token, top in zip(scores.tokens[1:-1], scores.top_logprobs[1:-1], strict=True)
    )
    assert greedy


def test_characters_of_several_tokens_and_special_tokens_keep_offsets_true(server: Any) -> None:
    server.script.answers = ["é😀x"]
    choice = complete(server, logprobs=1, prompt="ü").choices[0]
    assert choice.text == "é😀x"
    assert choice.logprobs.tokens == ["", "é", "", "", "", "😀", "x", ""]  # the end token shows nothing
    assert choice.logprobs.text_offset == [0, 0, 1, 1, 1, 1, 2, 3]
    assert streamed(server, logprobs=1, prompt="ü")[0]["logprobs"]["tokens"] == choice.logprobs.tokens


def test_tokens_of_a_trimmed_stop_string_show_nothing(server: Any) -> None:
    server.script.answers = ["abSTOP"]
    choice = complete(server, logprobs=1, stop="STOP").choices[0]
    assert choice.text == "ab" and choice.logprobs.tokens == ["a", "b", "", "", "", ""]


def test_line_separators_never_break_a_frame(server: Any) -> None:
    prompt = "a\u2028b\u2029c\u0085d"
    fields = {"prompt": prompt, "echo": True, "stream": True, "max_tokens": 1}
    body = server.http.post("/v1/completions", json=fields).text
    lines = [line for line in body.splitlines() if line]
    assert lines[-1] == "data: [DONE]" and all(line.startswith("data: ") for line in lines)
    assert streamed(server, **{k: v for k, v in fields.items() if k != "stream"})[0]["text"] == prompt + "H"


@pytest.mark.parametrize("prompt", ["", [], [""], [[]], ["a", ""], [[1], []], None, 5, [1, "a"], [True], {"a": 1}])
def test_empty_and_odd_prompts_are_refused(server: Any, prompt: Any) -> None:
    reply = server.http.post("/v1/completions", json={"prompt": prompt})
    error = reply.json()["error"]
    assert reply.status_code == 400 and error["param"] == "prompt" and "prompt" in error["message"]
    assert not server.script.requests


@pytest.mark.parametrize("fields, code", [({"best_of": 1}, 200), ({"best_of": 2, "n": 2}, 200), ({"best_of": 3}, 400)])
def test_best_of_is_taken_only_where_it_asks_for_nothing(server: Any, fields: dict[str, Any], code: int) -> None:
    assert server.http.post("/v1/completions", json={"prompt": "a"} | fields).status_code == code
