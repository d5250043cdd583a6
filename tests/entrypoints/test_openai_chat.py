"""/v1/chat/completions as the OpenAI SDK sees it."""

from __future__ import annotations

from typing import Any

import pytest

USER = [{"role": "user", "content": "Hi"}]


def chat(server: Any, **fields: Any) -> Any:
    return server.openai.chat.completions.create(**({"model": "tiny", "messages": USER} | fields))


def test_a_plain_answer(server: Any) -> None:
    reply = chat(server)
    assert reply.object == "chat.completion" and reply.model == "tiny" and reply.id.startswith("chatcmpl-")
    [choice] = reply.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "Hello", "stop")
    assert choice.matched_stop == 256 and choice.logprobs is None
    assert "tool_calls" not in choice.message.model_dump(exclude_unset=True)
    assert reply.usage.prompt_tokens == len("user:Hi\n")
    assert reply.usage.completion_tokens == 6  # the end token counts
    assert reply.usage.total_tokens == 14 and reply.usage.prompt_tokens_details is None


def test_a_stream_is_role_text_finish_and_joins_to_the_plain_answer(server: Any) -> None:
    server.script.answers = ["naïve 😀"]
    chunks = list(chat(server, stream=True))
    assert {chunk.id for chunk in chunks} == {chunks[0].id} and {chunk.model for chunk in chunks} == {"tiny"}
    assert all(chunk.object == "chat.completion.chunk" and chunk.usage is None for chunk in chunks)
    first, *middle, last = [chunk.choices[0] for chunk in chunks]
    assert (first.delta.role, first.delta.content, first.finish_reason) == ("assistant", "", None)
    assert "".join(choice.delta.content for choice in middle) == "naïve 😀"
    assert all(choice.finish_reason is None and choice.delta.content for choice in middle)
    assert last.finish_reason == "stop" and last.matched_stop == 256 and last.delta.content is None


def test_usage_ends_a_stream_only_when_asked_for(server: Any) -> None:
    chunks = list(chat(server, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].choices == [] and chunks[-1].usage.total_tokens == 14
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_continuous_usage_counts_up_in_every_chunk(server: Any) -> None:
    chunks = list(chat(server, stream=True, stream_options={"continuous_usage_stats": True}))
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == 6 and all(chunk.choices for chunk in chunks)


def test_n_samples_keep_apart_and_finish_after_all_text(server: Any) -> None:
    server.script.answers = ["one", "two!", "3"]
    chunks = list(chat(server, n=3, stream=True, stream_options={"include_usage": True}))
    *chunks, usage = chunks
    texts, finishes = ["", "", ""], []
    for chunk in chunks:
        [choice] = chunk.choices
        assert not finishes or choice.finish_reason, "text after a finish reason"
        texts[choice.index] += choice.delta.content or ""
        if choice.finish_reason:
            finishes.append((choice.index, choice.finish_reason))
    assert texts == ["one", "two!", "3"] and finishes == [(0, "stop"), (1, "stop"), (2, "stop")]
    assert [c.choices[0].index for c in chunks if c.choices[0].delta.role] == [0, 1, 2]
    assert usage.usage.prompt_tokens == 8 and usage.usage.completion_tokens == 4 + 5 + 2

    whole = chat(server, n=3)
    assert [choice.message.content for choice in whole.choices] == texts
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    assert whole.usage.prompt_tokens == 8 and whole.usage.completion_tokens == 11


def test_max_completion_tokens_goes_before_max_tokens(server: Any) -> None:
    reply = chat(server, max_tokens=4, max_completion_tokens=2)
    assert reply.choices[0].message.content == "He" and reply.choices[0].finish_reason == "length"


def test_without_a_limit_only_the_context_ends_it(server: Any) -> None:
    chat(server)
    assert server.script.requests[-1].sampling_params["max_new_tokens"] is None


def test_a_stop_string_is_cut_and_named(server: Any) -> None:
    server.script.answers = ["one STOP two"]
    for stream in (False, True):
        reply = chat(server, stop="STOP", stream=stream)
        choice = list(reply)[-1].choices[0] if stream else reply.choices[0]
        assert choice.matched_stop == "STOP" and choice.finish_reason == "stop"
        assert stream or choice.message.content == "one "


def test_the_models_own_sampling_defaults_apply_unless_said_otherwise(server: Any) -> None:
    chat(server)
    assert server.script.requests[-1].sampling_params == {"max_new_tokens": None, "temperature": 0.6, "top_p": 0.9}
    chat(server, temperature=0.1)
    assert server.script.requests[-1].sampling_params["temperature"] == 0.1


def test_every_sampling_field_arrives_under_its_native_name(server: Any) -> None:
    native = {
        "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "stop_token_ids": [7], "stop_regex": "a+",
        "ignore_eos": True, "no_stop_trim": True, "skip_special_tokens": False, "spaces_between_special_tokens": False,
    }  # fmt: skip
    chat(
        server, temperature=0, top_p=0.5, frequency_penalty=0.3, presence_penalty=-0.3, seed=-1, stop=["x"], n=1,
        logit_bias={"65": -100}, max_tokens=3, extra_body=native | {"min_tokens": 2},
    )  # fmt: skip
    assert server.script.requests[-1].sampling_params == native | {
        "temperature": 0, "top_p": 0.5, "frequency_penalty": 0.3, "presence_penalty": -0.3, "sampling_seed": -1,
        "stop": ["x"], "n": 1, "logit_bias": {"65": -100}, "max_new_tokens": 3, "min_new_tokens": 2,
    }  # fmt: skip


def test_names_and_cache_keys_are_passed_on(server: Any) -> None:
    reply = chat(server, extra_body={"rid": "mine", "extra_key": "k", "cache_salt": "s"})
    request = server.script.requests[-1]
    assert (request.rid, request.extra_key, request.cache_salt) == ("mine", "k", "s") and reply.id == "mine"


# ---- logprobs ---------------------------------------------------------------------------------------


def test_logprob_bytes_rebuild_the_text_also_in_a_stream(server: Any) -> None:
    server.script.answers = ["é 😀~"]
    whole = chat(server, logprobs=True, top_logprobs=2).choices[0]
    content = whole.logprobs.content
    assert b"".join(bytes(entry.bytes) for entry in content) == "é 😀~".encode() + b"<end>"
    assert all(len(entry.top_logprobs) == 2 and entry.top_logprobs[0].token == entry.token for entry in content)
    assert content[-2].token == "~" and content[-2].logprob == -9999.0  # minus infinity is no JSON number

    streamed = []
    for chunk in chat(server, logprobs=True, top_logprobs=2, stream=True):
        streamed += chunk.choices[0].logprobs.content if chunk.choices[0].logprobs else []
    assert streamed == content


def test_logprobs_without_top_list_no_alternatives(server: Any) -> None:
    content = chat(server, logprobs=True).choices[0].logprobs.content
    assert [entry.token for entry in content] == ["H", "e", "l", "l", "o", "<end>"]
    assert all(entry.top_logprobs == [] for entry in content)


# ---- messages ---------------------------------------------------------------------------------------


def test_text_parts_become_one_text_and_developer_is_system(server: Any) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    chat(server, messages=[{"role": "developer", "content": "be brief"}, {"role": "user", "content": parts}])
    assert server.script.rendered[-1][0] == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "a b"},
    ]


def test_continue_final_message_and_template_kwargs_reach_the_template(server: Any) -> None:
    messages = [*USER, {"role": "assistant", "content": "So"}]
    extra = {"continue_final_message": True, "chat_template_kwargs": {"style": 1}, "reasoning_effort": "none"}
    chat(server, messages=messages, extra_body=extra)
    assert server.script.rendered[-1] == (
        messages,
        {
            "continue_final_message": True,
            "template_kwargs": {"reasoning_effort": "none", "thinking": False, "enable_thinking": False, "style": 1},
        },
    )


def test_a_request_may_not_bring_its_own_template(server: Any) -> None:
    body = {"messages": USER, "chat_template_kwargs": {"chat_template": "{{ x }}"}}
    reply = server.http.post("/v1/chat/completions", json=body)
    assert reply.status_code == 400 and "--trust-request-chat-template" in reply.json()["error"]["message"]


# ---- what real clients send -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "extras",
    [
        # guidellm
        {"stop": None, "max_tokens": 4, "max_completion_tokens": 4, "ignore_eos": True, "stream_options": None},
        # sglang-router, which fills in its defaults
        {
            "continue_final_message": False, "separate_reasoning": True, "stream_reasoning": True, "n": None,
            "no_stop_trim": False, "ignore_eos": False, "skip_special_tokens": True, "logprobs": False, "tools": None,
            "return_hidden_states": False, "lora_path": None, "session_params": None, "sampling_seed": None,
            "response_format": None, "modalities": None, "parallel_tool_calls": None,
            "priority": 0, "background": False, "stream_options": None,
        },
        # litellm, langchain
        {"response_format": {"type": "text"}, "tools": [], "tool_choice": "auto", "user": "u", "metadata": {"a": "b"}},
        {"some_field_of_tomorrow": {"deep": [1]}},
        {"logprobs": None, "top_logprobs": None, "temperature": None, "seed": None, "logit_bias": None},
        {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "none"},
    ],
)  # fmt: skip
def test_extras_that_ask_for_nothing_are_taken(server: Any, extras: dict[str, Any]) -> None:
    reply = server.http.post("/v1/chat/completions", json={"messages": USER} | extras)
    assert reply.status_code == 200, reply.text


def test_unknown_fields_are_logged_in_one_line(server: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "tinysrt.entrypoints.openai_protocol"):
        server.http.post("/v1/chat/completions", json={"messages": USER, "new_thing": 1, "other": 2, "user": "u"})
    assert [record.getMessage() for record in caplog.records] == [
        "Ignored unknown request fields: 'new_thing', 'other'"
    ]
