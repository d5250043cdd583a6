"""Flags that change what the OpenAI door says."""

from __future__ import annotations

from typing import Any

FLAGS = {
    "enable_cache_report": True,
    "stream_response_default_include_usage": True,
    "preferred_sampling_params": {"max_new_tokens": 3, "temperature": 0.2},
    "default_chat_template_kwargs": {"style": "a", "tone": "b"},
    "trust_request_chat_template": True,
}
USER = [{"role": "user", "content": "Hi"}]


def test_the_cache_report_counts_cached_tokens_once_per_prompt(server: Any) -> None:
    reply = server.openai.completions.create(model="tiny", prompt=["abc", "de"], n=2)
    assert reply.usage.prompt_tokens == 5 and reply.usage.prompt_tokens_details.cached_tokens == 3


def test_usage_ends_every_stream_without_being_asked_for(server: Any) -> None:
    chunks = list(server.openai.chat.completions.create(model="tiny", messages=USER, stream=True))
    assert chunks[-1].choices == [] and chunks[-1].usage.prompt_tokens_details.cached_tokens == 7


def test_the_operators_defaults_go_before_the_apis(server: Any) -> None:
    server.openai.completions.create(model="tiny", prompt="a")
    server.openai.chat.completions.create(model="tiny", messages=USER)
    text, chat = server.script.requests
    assert "max_new_tokens" not in text.sampling_params and "max_new_tokens" not in chat.sampling_params


def test_template_kwargs_of_the_server_lie_under_the_requests(server: Any) -> None:
    extra = {"chat_template_kwargs": {"tone": "c", "chat_template": "{{ messages }}"}}
    server.openai.chat.completions.create(model="tiny", messages=USER, extra_body=extra)
    kwargs = server.script.rendered[-1][1]["template_kwargs"]
    assert kwargs == {"style": "a", "tone": "c", "chat_template": "{{ messages }}"}
