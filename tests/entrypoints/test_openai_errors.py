"""What the OpenAI door refuses, and the shape in which it says so."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tinysrt.errors import RequestError

USER = [{"role": "user", "content": "Hi"}]
CHAT, TEXT = ("/v1/chat/completions", {"messages": USER}), ("/v1/completions", {"prompt": "Hi"})


def refused(server: Any, path: str, body: Any, status: int = 400) -> dict[str, Any]:
    reply = server.http.post(path, json=body)
    assert reply.status_code == status, reply.text
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and "/" not in error["message"].replace("/v1/", "")
    assert not server.script.requests, "nothing may be queued"
    return error


@pytest.mark.parametrize("path, base", [CHAT, TEXT])
@pytest.mark.parametrize(
    "field, value",
    [
        ("max_tokens", "many"), ("max_tokens", -1), ("max_tokens", 1.5), ("temperature", []), ("temperature", "hot"),
        ("n", 0), ("n", -1), ("n", "two"), ("stream", "perhaps"), ("stream", 1), ("seed", "x"), ("stop", 5),
        ("stop", [5]), ("stop_token_ids", ["a"]), ("logit_bias", {"abc": "x"}), ("logit_bias", {"1": 101}),
        ("logit_bias", {"1": -1e9}), ("logit_bias", [1]), ("model", 5), ("top_k", 1.5), ("ignore_eos", "yes"),
        ("stream_options", 5), ("stream_options", {"include_usage": 1}), ("stream_options", {"include_usage": True}),
        ("rid", 5),
    ],
)  # fmt: skip
def test_wrong_types_and_ranges_name_the_field(
    server: Any, path: str, base: dict[str, Any], field: str, value: Any
) -> None:
    error = refused(server, path, base | {field: value})
    assert error["param"].startswith(field) and field in error["message"] and error["type"] == "invalid_request_error"


@pytest.mark.parametrize("path, base", [CHAT, TEXT])
@pytest.mark.parametrize("key", ["257", "-1", "abc", "1.5", ""])
def test_logit_bias_outside_the_vocabulary_is_refused(server: Any, path: str, base: dict[str, Any], key: str) -> None:
    reply = server.http.post(path, json=base | {"logit_bias": {key: 1}})
    assert reply.status_code == 400 and reply.json()["error"]["param"] == "logit_bias"


@pytest.mark.parametrize("path, base", [CHAT, TEXT])
@pytest.mark.parametrize(
    "field, native, value", [("seed", "sampling_seed", 2**63), ("min_tokens", "min_new_tokens", -1)]
)
def test_complaints_about_native_parameters_use_the_clients_words(
    server: Any, path: str, base: dict[str, Any], field: str, native: str, value: Any
) -> None:
    error = server.http.post(path, json=base | {field: value}).json()["error"]
    assert error["param"] == field and field in error["message"] and native not in error["message"]


@pytest.mark.parametrize("path, base", [CHAT, TEXT])
@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_object"}}, {"json_schema": "{}"}, {"regex": "a"}, {"ebnf": "root ::= x"},
        {"guided_json": {}}, {"lora_path": "x"}, {"return_hidden_states": True}, {"use_beam_search": True},
        {"custom_logit_processor": "x"}, {"session_params": {"id": "a"}}, {"prompt_logprobs": 1},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {}}}},
        {"priority": 1}, {"priority": -1}, {"background": True},
    ],
)  # fmt: skip
def test_known_but_missing_features_are_refused_by_name(
    server: Any, path: str, base: dict[str, Any], fields: dict[str, Any]
) -> None:
    [name] = fields
    error = refused(server, path, base | fields)
    assert error["param"] == name and name in error["message"] and error["code"] == "unsupported_parameter"


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [{"type": "function", "function": {"name": "f"}}]}, {"tool_choice": "required"},
        {"tool_choice": {"type": "function", "function": {"name": "f"}}}, {"functions": [{"name": "f"}]},
        {"modalities": ["text", "audio"]}, {"audio": {"voice": "x"}}, {"echo": True}, {"verbosity": "low"},
        {"chat_template": "{{ messages }}"}, {"web_search_options": {}},
    ],
)  # fmt: skip
def test_features_of_chat_alone_too(server: Any, fields: dict[str, Any]) -> None:
    [name] = fields
    assert refused(server, CHAT[0], CHAT[1] | fields)["param"] == name


@pytest.mark.parametrize(
    "messages",
    [
        {}, [], "Hi", [5], [{}], [{"role": "user"}], [{"role": "user", "content": None}], [{"content": "x"}],
        [{"role": "robot", "content": "x"}], [{"role": "user", "content": 5}], [{"role": ["user"], "content": "x"}],
        [{"role": "user", "content": [5]}], [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "user", "content": [{"type": "text", "text": 5}]}], [{"role": "user", "content": "x", "name": 5}],
        [{"role": "user", "content": [{"type": ["text"]}]}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}],
        [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}],
        [{"role": "tool", "content": "x", "tool_call_id": "1"}],
        [{"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}],
    ],
)  # fmt: skip
def test_bad_messages_are_refused(server: Any, messages: Any) -> None:
    assert "messages" in refused(server, CHAT[0], {"messages": messages})["message"]


@pytest.mark.parametrize(
    "fields, param",
    [
        ({"top_logprobs": 2}, "top_logprobs"), ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"), ({"logprobs": 1}, "logprobs"),
        ({"continue_final_message": True}, "continue_final_message"), ({"chat_template_kwargs": []}, "chat_template"),
    ],
)  # fmt: skip
def test_rules_between_chat_fields(server: Any, fields: dict[str, Any], param: str) -> None:
    assert refused(server, CHAT[0], CHAT[1] | fields)["param"].startswith(param)


@pytest.mark.parametrize("logprobs", [-1, 21, True, "x"])
def test_completion_logprobs_have_limits(server: Any, logprobs: Any) -> None:
    assert refused(server, TEXT[0], TEXT[1] | {"logprobs": logprobs})["param"] == "logprobs"


def test_missing_messages_and_prompt_are_named(server: Any) -> None:
    assert refused(server, CHAT[0], {})["param"] == "messages"
    assert refused(server, TEXT[0], {})["param"] == "prompt"


# ---- model names ------------------------------------------------------------------------------------


@pytest.mark.parametrize("path, base", [CHAT, TEXT])
def test_an_unknown_model_is_a_404_that_names_the_served_one(server: Any, path: str, base: dict[str, Any]) -> None:
    error = refused(server, path, base | {"model": "no-such-model"}, 404)
    assert error["code"] == "model_not_found" and error["param"] == "model" and "'tiny'" in error["message"]


@pytest.mark.parametrize("path, base", [CHAT, TEXT])
@pytest.mark.parametrize("model", ["tiny", "some/model", "default", "", None])
def test_served_name_path_default_and_nothing_mean_the_served_model(
    server: Any, path: str, base: dict[str, Any], model: str | None
) -> None:
    assert server.http.post(path, json=base | {"model": model}).json()["model"] == "tiny"
    assert server.http.post(path, json=base).json()["model"] == "tiny"


def test_models_are_listed_and_looked_up(server: Any) -> None:
    [card] = server.openai.models.list().data
    assert (card.id, card.object, card.max_model_len) == ("tiny", "model", 512)
    assert server.openai.models.retrieve("tiny").id == server.openai.models.retrieve("some/model").id == "tiny"
    with pytest.raises(openai.NotFoundError) as caught:
        server.openai.models.retrieve("no-such-model")
    assert caught.value.code == "model_not_found" and caught.value.param == "model"


# ---- errors from behind -----------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_what_the_engine_refuses_is_a_real_status_also_for_streams(server: Any, stream: bool) -> None:
    server.script.fail_at_start = RequestError(
        "'input_ids' is too long.", param="input_ids", code="context_length_exceeded"
    )
    with pytest.raises(openai.BadRequestError) as caught:
        server.openai.chat.completions.create(model="tiny", messages=USER, stream=stream)
    assert (caught.value.param, caught.value.code) == ("messages", "context_length_exceeded")
    assert "'messages' is too long." in str(caught.value)


@pytest.mark.parametrize(
    "failure, message",
    [(RequestError("Out of memory.", status=503), "Out of memory."), (KeyError("secret"), "Internal server error.")],
)
def test_a_failure_in_a_running_stream_is_an_error_event_then_done(server: Any, failure: Any, message: str) -> None:
    server.script.fail_after = (2, failure)
    reply = server.http.post(CHAT[0], json=CHAT[1] | {"stream": True})
    *_, error, done, empty = reply.text.split("\n\n")
    assert reply.status_code == 200 and done == "data: [DONE]" and empty == ""
    assert message in error and "secret" not in reply.text
    server.script.fail_after = (2, failure)
    with pytest.raises(openai.APIError, match=message):
        list(server.openai.chat.completions.create(model="tiny", messages=USER, stream=True))


def test_a_failure_of_ours_is_a_500_without_details(server: Any) -> None:
    server.script.fail_after = (1, KeyError("secret"))
    reply = server.http.post(*CHAT[:1], json=CHAT[1])
    assert reply.status_code == 500 and reply.json()["error"]["message"] == "Internal server error."


def test_an_aborted_request_answers_with_its_text_so_far(server: Any) -> None:
    for stream in (False, True):
        server.script.abort_after = 2
        reply = server.http.post(TEXT[0], json=TEXT[1] | {"stream": stream})
        assert reply.status_code == 200 and '"finish_reason":"abort"' in reply.text
        assert '"error"' not in reply.text
