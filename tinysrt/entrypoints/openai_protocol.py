"""What an OpenAI request may say, and what it means in native words.

    body (dict) ──▶ refuse what we know and cannot do ──▶ Struct with right types ──▶ native sampling parameters

Three kinds of fields beside the supported ones:
  refused   known, would change the answer, not done here: a 400 that names the field, unless its value asks for
            nothing (null, the default). Clients and sglang-router send such defaults all the time.
  harmless  known, cannot change the answer (`user`, `store`, …): taken in silence.
  unknown   nobody knows them: ignored with one log line, because real clients send extras.

Invariant: a request that leaves this file has right types, and only OpenAI's own rules are checked here; ranges and
vocabulary are checked by `SamplingParams.verify`, whose native field names `openai_name` translates back.

SGLang: `entrypoints/openai/protocol.py` (pydantic models; there, most of the refused fields are ignored).
"""

from __future__ import annotations

import logging
from typing import Any, TypeVar

import msgspec

from tinysrt.entrypoints.body import convert
from tinysrt.errors import RequestError
from tinysrt.server_args import ServerArgs

logger = logging.getLogger(__name__)

MAX_LOGPROBS = 20
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's own default for /v1/completions; chat has none but the context

# OpenAI name → native name, where they differ.
NATIVE_NAMES = {"min_tokens": "min_new_tokens", "seed": "sampling_seed", "max_tokens": "max_new_tokens"}
SAME_NAMES = (
    "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty", "n",
    "stop", "stop_token_ids", "stop_regex", "logit_bias", "ignore_eos", "skip_special_tokens",
    "spaces_between_special_tokens", "no_stop_trim",
)  # fmt: skip


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class CommonRequest(msgspec.Struct, kw_only=True):
    """What chat and text completions share. None: not said."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    sampling_seed: int | None = None  # the native name, which sglang-router sends
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    stop_regex: str | list[str] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    rid: str | None = None
    extra_key: str | None = None
    cache_salt: str | None = None

    @property
    def samples(self) -> int:
        return 1 if self.n is None else self.n

    def sampling_params(self, defaults: dict[str, Any]) -> dict[str, Any]:
        """Native parameters: what the request says, over `defaults` (native names)."""
        params = dict(defaults)
        for name in SAME_NAMES:
            value = getattr(self, name)
            if value is not None:
                params[name] = value
        for name, native in NATIVE_NAMES.items():
            value = getattr(self, name)
            if value is not None:
                params[native] = value
        if self.seed is None and self.sampling_seed is not None:
            params["sampling_seed"] = self.sampling_seed
        return params


class CompletionRequest(CommonRequest, kw_only=True):
    prompt: Any  # checked by `prompts`: JSON has four forms of it
    echo: bool = False
    logprobs: int | None = None

    @classmethod
    def from_body(cls, body: dict[str, Any]) -> CompletionRequest:
        _refuse(body, REFUSED | REFUSED_IN_COMPLETIONS)
        best_of = body.get("best_of")
        if best_of not in (None, body.get("n") or 1):
            raise _unsupported("best_of", "only best_of equal to n")
        request = _convert(body, cls, also={"best_of"})
        _check_range("logprobs", request.logprobs)
        return request

    def prompts(self) -> tuple[list[str] | list[list[int]], bool]:
        """The prompts as a list, and whether the client sent a list of them."""
        prompt = self.prompt
        if isinstance(prompt, str) or _is_ids(prompt):
            prompts, many = [prompt], False
        else:
            prompts, many = prompt, True
        good = isinstance(prompts, list) and prompts and all(prompts)
        if not good or not (all(isinstance(p, str) for p in prompts) or all(_is_ids(p) for p in prompts)):
            message = "'prompt' must be a non-empty string, list of strings, list of token ids, or list of such lists."
            raise RequestError(message, param="prompt")
        return prompts, many


class ChatRequest(CommonRequest, kw_only=True):
    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None

    @classmethod
    def from_body(cls, body: dict[str, Any]) -> ChatRequest:
        _refuse(body, REFUSED | REFUSED_IN_CHAT)
        if body.get("tools") and body.get("tool_choice") != "none":  # with "none" the tools are not even shown
            raise _unsupported("tools")
        request = _convert(body, cls, also={"tools"})
        if request.max_completion_tokens is not None:
            request.max_tokens = request.max_completion_tokens
        _check_range("top_logprobs", request.top_logprobs)
        if request.top_logprobs and not request.logprobs:
            raise RequestError("'top_logprobs' needs 'logprobs': true.", param="top_logprobs")
        request.messages = [_message(i, message) for i, message in enumerate(request.messages)]
        if not request.messages:
            raise RequestError("'messages' must not be empty.", param="messages")
        if request.continue_final_message and request.messages[-1]["role"] != "assistant":
            message = "'continue_final_message' needs an assistant message at the end."
            raise RequestError(message, param="continue_final_message")
        return request

    def render_options(self, server_args: ServerArgs) -> dict[str, Any]:
        """For `TokenizerManager.render_chat`, beside the messages."""
        kwargs = dict(server_args.default_chat_template_kwargs or {})
        if self.reasoning_effort is not None:
            kwargs["reasoning_effort"] = self.reasoning_effort
        if self.reasoning_effort == "none":
            kwargs |= {"thinking": False, "enable_thinking": False}
        asked = self.chat_template_kwargs or {}
        if "chat_template" in asked and not server_args.trust_request_chat_template:
            message = "A request may bring its own chat template only with --trust-request-chat-template."
            raise RequestError(message, param="chat_template_kwargs")
        return {"continue_final_message": self.continue_final_message, "template_kwargs": kwargs | asked}


# ---- fields that are refused, harmless, unknown ------------------------------------------------------

# Field → the values, besides null, that ask for nothing.
REFUSED: dict[str, tuple[Any, ...]] = {
    # constrained output
    "response_format": ({"type": "text"},), "json_schema": ("",), "regex": ("",), "ebnf": ("",),
    "structural_tag": ("",), "guided_json": (), "guided_regex": (), "guided_choice": (), "guided_grammar": (),
    "structured_outputs": ({},),
    # adapters, sessions, custom code, disaggregation
    "lora_path": ("",), "session_params": ({},), "custom_logit_processor": ("",), "custom_params": ({},),
    "logits_processors": ([],), "bootstrap_host": (), "bootstrap_room": (), "input_embeds": (),
    # extra outputs
    "return_hidden_states": (False,), "return_routed_experts": (False,), "return_token_ids": (False,),
    "return_cached_tokens_details": (False,), "return_prompt_token_ids": (False,), "prompt_logprobs": (),
    # other engines' sampling
    "use_beam_search": (False,), "length_penalty": (1.0, 1), "allowed_token_ids": (), "bad_words": ([],),
    "truncate_prompt_tokens": (), "include_stop_str_in_output": (False,), "prompt_embeds": (),
    # when and where the answer comes
    "priority": (0,), "background": (False,),
}  # fmt: skip
REFUSED_IN_COMPLETIONS: dict[str, tuple[Any, ...]] = {"suffix": ("",), "add_special_tokens": (True,)}
REFUSED_IN_CHAT: dict[str, tuple[Any, ...]] = {
    "tool_choice": ("none", "auto"), "functions": ([],), "function_call": ("none", "auto"),
    "modalities": (["text"],), "audio": (), "web_search_options": (), "verbosity": ("medium",), "echo": (False,),
    "add_generation_prompt": (True,), "add_special_tokens": (False,), "documents": ([],), "chat_template": ("",),
    "mm_processor_kwargs": ({},), "input_ids": (), "best_of": (1,), "suffix": ("",),
}  # fmt: skip
HARMLESS = frozenset((
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "parallel_tool_calls", "prediction", "log_metrics", "no_logs", "bootstrap_port",
    "separate_reasoning", "stream_reasoning",  # without a reasoning parser nothing is separated, whatever they say
))  # fmt: skip

R = TypeVar("R", bound=CommonRequest)


def _refuse(body: dict[str, Any], refused: dict[str, tuple[Any, ...]]) -> None:
    for name, idle_values in refused.items():
        value = body.get(name)
        # `False == 0`, so types are compared too.
        if value is not None and not any(value == idle and type(value) is type(idle) for idle in idle_values):
            raise _unsupported(name)


def _convert(body: dict[str, Any], kind: type[R], *, also: set[str]) -> R:
    known = {*kind.__struct_fields__, *REFUSED, *REFUSED_IN_COMPLETIONS, *REFUSED_IN_CHAT, *HARMLESS, *also}
    unknown = [name for name in body if name not in known]
    if unknown:
        logger.info("Ignored unknown request fields: %s", ", ".join(repr(name[:64]) for name in unknown[:16]))
    request = convert(body, kind)
    if request.stream_options is not None and not request.stream:
        raise RequestError("'stream_options' is only allowed with 'stream': true.", param="stream_options")
    if request.samples < 1:
        raise RequestError(f"'n' must be at least 1, got {request.n}.", param="n")
    if request.max_tokens is not None and request.max_tokens < 0:
        raise RequestError(f"'max_tokens' must not be negative, got {request.max_tokens}.", param="max_tokens")
    bias = request.logit_bias or {}
    if any(not -100 <= value <= 100 for value in bias.values()):
        raise RequestError("'logit_bias' values must lie between -100 and 100.", param="logit_bias")
    return request


def _unsupported(name: str, but: str = "") -> RequestError:
    message = f"'{name}' is not supported by this server" + (f" ({but})." if but else "; leave it out.")
    return RequestError(message, param=name, code="unsupported_parameter")


def _check_range(name: str, value: int | None) -> None:
    if value is not None and not 0 <= value <= MAX_LOGPROBS:
        raise RequestError(f"'{name}' must lie between 0 and {MAX_LOGPROBS}, got {value}.", param=name)


def openai_name(exc: RequestError, prompt_field: str) -> RequestError:
    """A complaint about a native field, in the words the client used."""
    names = {native: name for name, native in NATIVE_NAMES.items()} | {"text": prompt_field, "input_ids": prompt_field}
    for native, name in names.items():
        if exc.param == native:
            exc.param = name
            exc.message = exc.message.replace(f"'{native}'", f"'{name}'")
        if native in NATIVE_NAMES.values():
            exc.message = exc.message.replace(native, name)
    return exc


# ---- prompts and messages ---------------------------------------------------------------------------

ROLES = ("system", "user", "assistant")


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


def _message(index: int, message: dict[str, Any]) -> dict[str, Any]:
    """A message as templates know it: a role, its text, and what belongs to them."""
    where = f"messages[{index}]"
    role = message.get("role")
    if role in ("tool", "function") or message.get("tool_calls") or message.get("function_call"):
        raise _unsupported(f"{where}: tool calls and their results")
    role = "system" if role == "developer" else role  # OpenAI's new name for it, which templates do not know
    if role not in ROLES:
        raise RequestError(f"'{where}.role' must be one of {', '.join(ROLES)}.", param=f"{where}.role")
    content = message.get("content")
    if content is None and role == "assistant":
        content = ""
    checked = {"role": role, "content": _text(f"{where}.content", content)}
    for name in ("name", "reasoning_content"):
        value = message.get(name)
        if value is not None:
            if not isinstance(value, str):
                raise RequestError(f"'{where}.{name}' must be a string.", param=f"{where}.{name}")
            checked[name] = value
    return checked


def _text(where: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(f"'{where}' must be a string or a list of text parts.", param=where)
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind not in ("text", "refusal"):
            message = f"'{where}': a part of type {kind[:64]!r} is not supported, this server reads text only."
            raise RequestError(message, param=where, code="unsupported_parameter")
        text = part.get(kind) if isinstance(kind, str) else None
        if not isinstance(text, str):
            raise RequestError(f"'{where}' must be a string or a list of text parts.", param=where)
        texts.append(text)
    return " ".join(texts)
