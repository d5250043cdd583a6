"""From a request that may be scalar or list everywhere to one checked list of prompts."""

from __future__ import annotations

from typing import Any

import pytest

from tinysrt.errors import RequestError
from tinysrt.managers.generate_request import (
    GenerateBatch,
    GenerateReqInput,
    LengthLimits,
    fit_length,
    refuse_unsupported_fields,
)

VOCAB = 300


def normalize(preferred: dict[str, Any] | None = None, **fields: Any) -> GenerateBatch:
    return GenerateReqInput(**fields).normalize(vocab_size=VOCAB, max_batch_size=8, preferred=preferred)


def refused(**fields: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        normalize(**fields)
    assert caught.value.status == 400
    return caught.value


def test_one_text_is_single_and_a_list_of_one_is_a_list():
    assert normalize(text="hi").is_single
    assert not normalize(text=["hi"]).is_single
    assert normalize(input_ids=[1, 2]).is_single
    assert not normalize(input_ids=[[1, 2]]).is_single
    assert not normalize(text="hi", sampling_params={"n": 2}).is_single


def test_ids_win_over_text_and_text_fixes_the_batch_size():
    batch = normalize(text=["a", "b"], input_ids=[[1], [2, 3]])
    assert [p.input_ids for p in batch.prompts] == [[1], [2, 3]]
    assert refused(text=["a", "b"], input_ids=[[1]]).param == "input_ids"
    assert refused(text="a", input_ids=[[1]]).param == "input_ids"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "text"),
        ({"text": []}, "text"),
        ({"input_ids": []}, "input_ids"),
        ({"input_ids": [[1], []]}, "input_ids"),
        ({"input_ids": [[1], 2]}, "input_ids"),
        ({"input_ids": [VOCAB]}, "input_ids"),
        ({"input_ids": [-1]}, "input_ids"),
        ({"input_ids": [[1], [2, VOCAB]]}, "input_ids"),
        ({"text": "a", "token_ids_logprob": [VOCAB]}, "token_ids_logprob"),
        ({"text": "a", "logprob_start_len": -2}, "logprob_start_len"),
        ({"text": "a", "top_logprobs_num": -1}, "top_logprobs_num"),
        ({"text": "a", "rid": ""}, "rid"),
        ({"text": "a", "rid": ["a"]}, "rid"),
        ({"text": ["a", "b"], "rid": ["x"]}, "rid"),
        ({"text": ["a", "b"], "rid": ["x", "x"]}, "rid"),
        ({"text": ["a", "b"], "sampling_params": [{}]}, "sampling_params"),
        ({"text": ["a", "b"], "sampling_params": [{"n": 1}, {"n": 2}]}, "n"),
        ({"text": "a", "sampling_params": {"temperature": -1}}, "temperature"),
        ({"text": ["a", "b"], "sampling_params": [{}, {"temprature": 1}]}, "temprature"),
    ],
)
def test_a_bad_request_is_refused_by_the_field_at_fault(fields: dict[str, Any], param: str):
    assert refused(**fields).param == param


def test_too_many_answers_are_refused():
    refused(text=["a"] * 9)
    refused(text=["a"] * 3, sampling_params={"n": 3})
    normalize(text=["a"] * 4, sampling_params={"n": 2})


def test_names_of_a_batch_and_of_its_samples():
    def names(**fields: Any) -> list[tuple[str | None, list[str]]]:
        return [(p.batch_id, p.sample_rids) for p in normalize(**fields).prompts]

    two = {"sampling_params": {"n": 2}}
    assert names(text="x", rid="a") == [(None, ["a"])]
    assert names(text="x", rid="a", **two) == [("a", ["a_0", "a_1"])]
    assert names(text=["x", "y"], rid="a") == [("a", ["a_0"]), ("a", ["a_1"])]
    assert names(text=["x", "y"], rid="a", **two) == [("a", ["a_0_0", "a_0_1"]), ("a", ["a_1_0", "a_1_1"])]
    assert names(text=["x", "y"], rid=["p", "q"]) == [(None, ["p"]), (None, ["q"])]


def test_without_a_rid_every_prompt_gets_one_of_its_own():
    assert len(set(normalize(text=["a"] * 8).rids)) == 8


def test_each_item_of_a_batch_may_have_its_own_settings():
    batch = normalize(
        text=["a", "b"],
        sampling_params=[{"max_new_tokens": 3}, {"max_new_tokens": 7}],
        return_logprob=[True, False],
        top_logprobs_num=[2, 0],
        token_ids_logprob=[[1], [2, 3]],
        cache_salt=["s", None],
    )
    first, second = batch.prompts
    assert (first.params.max_new_tokens, second.params.max_new_tokens) == (3, 7)
    assert (first.return_logprob, second.return_logprob) == (True, False)
    assert (first.token_ids_logprob, second.token_ids_logprob) == ([1], [2, 3])
    assert first.cache_namespace is not None and second.cache_namespace is None


def test_a_flat_list_of_token_ids_is_shared_by_the_batch():
    assert [p.token_ids_logprob for p in normalize(text=["a", "b"], token_ids_logprob=[1, 2]).prompts] == [[1, 2]] * 2


def test_salt_and_extra_key_do_not_run_into_each_other():
    one = normalize(text="a", cache_salt="ab", extra_key="c").prompts[0].cache_namespace
    other = normalize(text="a", cache_salt="a", extra_key="bc").prompts[0].cache_namespace
    assert one != other


def test_preferred_parameters_lie_under_the_requests_own():
    preferred = {"temperature": 0.5, "max_new_tokens": 9}
    prompt = normalize(preferred, text="a", sampling_params={"temperature": None, "top_p": 0.5}).prompts[0]
    assert (prompt.params.temperature, prompt.params.max_new_tokens, prompt.params.top_p) == (0.5, 9, 0.5)
    assert (
        normalize(preferred, text="a", sampling_params={"max_new_tokens": None}).prompts[0].params.max_new_tokens
        is None
    )


def test_known_fields_that_are_not_supported_are_refused_unless_default():
    refuse_unsupported_fields({"text": "a", "model": "x", "input_embeds": None, "return_hidden_states": False})
    for body in ({"image_data": "x"}, {"lora_path": "x"}, {"return_hidden_states": True}, {"priority": 3}):
        with pytest.raises(RequestError) as caught:
            refuse_unsupported_fields(body)
        assert caught.value.param in body


# ---- lengths --------------------------------------------------------------------------------------------


def fitted(length: int, *, truncate: bool = False, preferred: dict[str, Any] | None = None, **params: Any) -> Any:
    prompt = normalize(preferred, input_ids=[1] * length, sampling_params=params).prompts[0]
    fit_length(prompt, LengthLimits(context_len=64, max_input_len=60, auto_truncate=truncate))
    return prompt


def test_a_prompt_that_fills_the_context_is_refused():
    assert len(fitted(59, max_new_tokens=1).ids) == 59
    for length in (60, 64, 100):
        with pytest.raises(RequestError) as caught:
            fitted(length, max_new_tokens=0)
        assert (caught.value.status, caught.value.code) == (400, "context_length_exceeded")


def test_an_answer_that_was_asked_for_must_fit_beside_the_prompt():
    assert fitted(10, max_new_tokens=54).params.max_new_tokens == 54
    with pytest.raises(RequestError) as caught:
        fitted(10, max_new_tokens=55)
    assert caught.value.param == "max_new_tokens"


def test_defaults_are_clipped_to_the_context_instead():
    assert fitted(10).params.max_new_tokens == 54
    assert fitted(10, preferred={"max_new_tokens": 100}).params.max_new_tokens == 54
    assert fitted(10, max_new_tokens=None).params.max_new_tokens is None


def test_auto_truncate_cuts_the_prompt_and_the_answer():
    prompt = fitted(100, truncate=True, max_new_tokens=100, min_new_tokens=50)
    assert (len(prompt.ids), prompt.params.max_new_tokens, prompt.params.min_new_tokens) == (59, 5, 5)


def test_prompt_scores_cannot_start_behind_the_prompt():
    prompt = normalize(input_ids=[1, 2], return_logprob=True, logprob_start_len=3).prompts[0]
    with pytest.raises(RequestError) as caught:
        fit_length(prompt, LengthLimits(64, 60, False))
    assert caught.value.param == "logprob_start_len"
    ignored = normalize(input_ids=[1, 2], logprob_start_len=3).prompts[0]
    fit_length(ignored, LengthLimits(64, 60, False))


def test_alternatives_that_would_fill_the_memory_are_refused():
    """The whole vocabulary at every position of a long prompt: lists that no process can hold."""

    def fit(length: int, **fields: Any) -> None:
        request = GenerateReqInput(input_ids=[1] * length, return_logprob=True, **fields)
        prompt = request.normalize(vocab_size=50_000, max_batch_size=8).prompts[0]
        fit_length(prompt, LengthLimits(context_len=200_000, max_input_len=200_000, auto_truncate=False))

    fit(5, top_logprobs_num=50_000, sampling_params={"max_new_tokens": 8})
    fit(9000, top_logprobs_num=100, logprob_start_len=0)
    fit(150_000, top_logprobs_num=20, logprob_start_len=0, sampling_params={"max_new_tokens": None})
    fit(9000, top_logprobs_num=50_000, sampling_params={"max_new_tokens": 16})  # the prompt is not scored
    for fields in (
        {"top_logprobs_num": 50_000, "logprob_start_len": 0},
        {"top_logprobs_num": 50_000, "sampling_params": {"max_new_tokens": None}},
        {"token_ids_logprob": list(range(30_000)), "logprob_start_len": 10},
    ):
        with pytest.raises(RequestError, match="alternatives") as caught:
            fit(9000, **fields)
        assert caught.value.param in fields
