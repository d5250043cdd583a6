"""What a request may say about sampling, and what it gets for saying something else."""

from __future__ import annotations

import math

import pytest

from tinysrt.errors import RequestError
from tinysrt.sampling_params import TOP_K_ALL, SamplingParams

VOCAB = 300


def accept(**raw: object) -> SamplingParams:
    params = SamplingParams.from_dict(raw).normalize()
    params.verify(VOCAB)
    return params


def refuse(**raw: object) -> RequestError:
    with pytest.raises(RequestError) as caught:
        accept(**raw)
    assert caught.value.status == 400
    return caught.value


def test_defaults_are_the_native_ones():
    params = accept()
    assert (params.max_new_tokens, params.temperature, params.top_k, params.n) == (128, 1.0, TOP_K_ALL, 1)


def test_null_means_default_but_no_limit_for_max_new_tokens():
    assert accept(temperature=None, top_p=None, stop=None) == accept()
    assert accept(max_new_tokens=None).max_new_tokens is None


@pytest.mark.parametrize("temperature", [0, 0.0, 1e-8, 1e-6, 1e-5])
def test_tiny_temperatures_are_greedy(temperature: float):
    params = accept(temperature=temperature, top_k=40)
    assert params.is_greedy and params.temperature == 1.0


def test_top_k_minus_one_is_the_whole_vocabulary():
    assert accept(top_k=-1).top_k == TOP_K_ALL
    assert accept(top_k=VOCAB + 5).top_k == VOCAB + 5
    assert accept(top_k=1).is_greedy


def test_normalize_twice_changes_nothing():
    once = accept(temperature=0, top_k=-1, stop=["", "x"], logit_bias={})
    assert once.normalize() == once


def test_a_stop_may_be_a_string_or_a_list_and_empty_ones_are_none():
    assert accept(stop="END").stop == ["END"]
    assert accept(stop=["a", "b"]).stop == ["a", "b"]
    assert accept(stop="").stop == []
    assert accept(stop_token_ids=[3, None, 4]).stop_token_ids == [3, 4]


@pytest.mark.parametrize("seed", [0, 2**31, -1, 2**63 - 1, -(2**63)])
def test_any_64_bit_seed_is_accepted(seed: int):
    assert accept(sampling_seed=seed).sampling_seed == seed


def test_logit_bias_keys_arrive_as_strings():
    assert accept(logit_bias={"0": -100, "299": 1.5}).logit_bias == {0: -100.0, 299: 1.5}


@pytest.mark.parametrize("name", ["json_schema", "regex", "ebnf", "structural_tag", "custom_params"])
def test_grammar_fields_are_refused_by_name_unless_empty(name: str):
    accept(**{name: None})
    accept(**{name: ""})
    assert name in refuse(**{name: "x"}).message


def test_stop_tokens_that_are_masked_at_first_leave_tokens_to_draw():
    everything = list(range(VOCAB))
    error = refuse(stop_token_ids=everything, min_new_tokens=1)
    assert error.param == "stop_token_ids" and "min_new_tokens" in error.message
    accept(stop_token_ids=everything)  # ends at the first token
    accept(stop_token_ids=everything, min_new_tokens=1, ignore_eos=True)  # masks nothing
    accept(stop_token_ids=everything[: VOCAB // 2] * 2, min_new_tokens=1)


def test_an_unknown_name_is_refused():
    error = refuse(temprature=0.5)
    assert "temprature" in error.message and error.param == "temprature"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_new_tokens", -1),
        ("max_new_tokens", "many"),
        ("max_new_tokens", True),
        ("max_new_tokens", 2.5),
        ("min_new_tokens", 129),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", []),
        ("top_p", 0),
        ("top_p", 1.01),
        ("top_p", math.nan),
        ("top_k", 0),
        ("top_k", -2),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("frequency_penalty", 2.1),
        ("presence_penalty", -2.1),
        ("repetition_penalty", 0),
        ("repetition_penalty", 2.1),
        ("n", 0),
        ("stop", 5),
        ("stop", ["x"] * 33),
        ("stop", ["x", 5]),
        ("stop_token_ids", [VOCAB]),
        ("stop_token_ids", [-1]),
        ("stop_regex", ["("]),
        ("stop_regex", ["x" * 257]),
        ("stop_regex", ["(((a{999}){999}){999}){999}"]),  # unrolled it would take all memory
        ("stop_regex", ["(?x)((a{9 9 9}){9#}\n99}){999}"]),  # the same, hidden by blanks and a comment
        ("stream_interval", 0),
        ("sampling_seed", 2**63),
        ("logit_bias", {str(VOCAB): 1}),
        ("logit_bias", {"-1": 5}),
        ("logit_bias", {"abc": 1}),
        ("logit_bias", {"1_7": 1}),
        ("logit_bias", {"0": 1e9}),
        ("logit_bias", {"0": "x"}),
        ("logit_bias", {"0": math.nan}),
    ],
)
def test_a_value_out_of_range_is_refused_and_named(name: str, value: object):
    error = refuse(**{name: value})
    assert name in error.message and error.param == name


def test_a_regex_with_a_few_counts_is_accepted():
    pattern = r"\d{4}-\d{2}-\d{2}T.{0,99}\n{2,}"
    assert accept(stop_regex=pattern).stop_regex == [pattern]
