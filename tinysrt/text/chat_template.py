"""A conversation becomes the prompt that the model was trained on.

    messages ── Jinja template ──▶ text ── tokenizer ──▶ input_ids
    {user: Hi}                     <|im_start|>user⏎Hi<|im_end|>⏎<|im_start|>assistant⏎

Two invariants (tests/text/test_chat_template.py):

*Special tokens once.* The template writes them all, so its text is encoded without adding any.

*Content is data.* Whoever types `<|im_end|>` into a message gets those ten characters, not the end of the turn:
else any user could forge a system message. Yet in the rendered text both look the same. So the messages are rendered
a second time with a **mark**, a character that occurs nowhere else, inside each control token that somebody typed:

    <|im_start|>user⏎Hi<·|im_end|>!<|im_end|>⏎         · = the mark
    ╰── control ─╯     ╰─ typed ─╯ ╰control─╯

What still matches a control token was written by the template. The text between is encoded, without the marks, with
special parsing off. Where nobody typed a control token (nearly always) the text is encoded once, as it is, so the
ids are the template's own. If the marks change more than themselves (a template that transforms content), the plain
text is encoded and a log line says so. Raw text (`/generate`) keeps its control tokens: callers send rendered
templates there.

Used by the TokenizerManager, in a worker thread. SGLang: `managers/template_manager.py` and
`entrypoints/openai/serving_chat.py`; 0.5.23 parses typed control tokens as real ones.
"""

from __future__ import annotations

import inspect
import json
import logging
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2

from tinysrt.errors import RequestError, StartupError
from tinysrt.text.stop import StopMatcher
from tinysrt.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

BUILT_IN = ("chatml", "qwen", "llama-2", "llama-3", "mistral", "plain")
_ALIASES = {"llama-3-instruct": "llama-3"}
_FOLDER = Path(__file__).parent / "templates"
# Characters that no text should hold: Unicode reserves them for uses like ours (noncharacters, then private planes).
_MARKS = [*range(0xFDD0, 0xFDF0), *range(0xF0000, 0xF1000)]
# How a JSON template's `sep_style` joins things: (after "system", after a role, after a message besides `sep`).
_JSON_STYLES = {
    "CHATML": ("\n", "\n", "\n"),
    "ADD_COLON_SINGLE": ("\n", ": ", ""),
    "ADD_NEW_LINE_SINGLE": ("\n", "\n", ""),
    "NO_COLON_SINGLE": ("\n", "", ""),
}


@dataclass(frozen=True)
class RenderedPrompt:
    text: str
    input_ids: list[int]
    stop: list[str] = field(default_factory=list)  # stop strings that a JSON template brings with it


class ChatTemplate:
    """name: where it comes from, for the log and `/server_info`. variables: what the template sees besides messages."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        source: str,
        name: str,
        variables: dict[str, Any] | None = None,
        stop: list[str] | None = None,
    ):
        self.tokenizer = tokenizer
        self.source = source
        self.name = name
        self.stop = stop or []
        self.variables = {"implicit_bos": tokenizer.hf.bos_token if tokenizer.adds_bos else "", **(variables or {})}
        # What a request's chat_template_kwargs may not touch: they are for the template, not for its renderer.
        renderer = inspect.signature(tokenizer.hf.apply_chat_template).parameters
        self._reserved = {"messages", *renderer} - {"documents", "kwargs"}
        # Longest name first, so that no token hides one that it is the beginning of.
        tokens = sorted(tokenizer.special_tokens.items(), key=lambda item: -len(item[1].content))
        self._ids_by_name = {token.content: index for index, token in tokens}
        # Some control tokens swallow the blanks beside them; they must do so here as they do in the tokenizer.
        names = [
            (r"\s*" if token.lstrip else "") + re.escape(token.content) + (r"\s*" if token.rstrip else "")
            for _, token in tokens
        ]
        self._control = re.compile("|".join(names) or r"(?!)")  # (?!) never matches
        self._names = StopMatcher(list(self._ids_by_name))

    @classmethod
    def load(
        cls,
        tokenizer: Tokenizer,
        model_path: str,
        chat_template: str | None = None,
        hf_chat_template_name: str | None = None,
    ) -> ChatTemplate:
        """`--chat-template` if given, else the model's own, else one that its name suggests, else plain text."""
        if chat_template is not None and hf_chat_template_name is not None:
            raise StartupError("--chat-template and --hf-chat-template-name exclude each other: give one of them.")
        if chat_template is not None:
            template = _named_or_file(tokenizer, chat_template)
        else:
            template = _of_the_model(tokenizer, Path(model_path).name.lower(), hf_chat_template_name)
        try:
            template.apply([{"role": "user", "content": "Hi"}])
        except jinja2.TemplateSyntaxError as error:
            raise StartupError(f"The chat template {template.name} is not valid Jinja: {error}") from error
        except Exception as error:  # a template may well refuse this conversation; requests will be told so
            logger.info("chat template %s refuses a single user message: %s", template.name, error)
        return template

    # ---- rendering --------------------------------------------------------------------------------

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        template_kwargs: dict[str, Any] | None = None,
    ) -> RenderedPrompt:
        """template_kwargs: the request's `chat_template_kwargs`, merged by the caller over the server's defaults."""
        if not messages:
            raise RequestError("messages must not be empty.", param="messages")
        options = dict(template_kwargs or {})
        source = options.pop("chat_template", None)  # the caller has checked --trust-request-chat-template
        for name in options:
            if name in self._reserved:
                raise RequestError(f"chat_template_kwargs may not set {name!r}.", param="chat_template_kwargs")
        prefix = ""
        if continue_final_message:
            # The model continues the last message itself: its text follows where an answer would begin.
            last = messages[-1]
            if last.get("role") != "assistant" or not isinstance(last.get("content"), str):
                message = "continue_final_message needs a last message of the assistant, with text."
                raise RequestError(message, param="continue_final_message")
            messages, prefix, add_generation_prompt = messages[:-1], last["content"], True
        data: dict[str, Any] = {"messages": messages, "tools": tools, "prefix": prefix}

        def text_of(data: dict[str, Any]) -> str:
            head = self._apply_or_refuse(data["messages"], data["tools"], add_generation_prompt, source, options)
            return head + data["prefix"]

        text = text_of(data)
        return RenderedPrompt(text, self._encode(text, data, text_of), self.stop)

    def apply(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        source: str | None = None,
        options: dict[str, Any] | None = None,
    ) -> str:
        """The template's text, or whatever exception the template raises."""
        return self.tokenizer.hf.apply_chat_template(
            messages,
            tools=tools,
            chat_template=self.source if source is None else source,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            **(self.variables | (options or {})),
        )

    def _apply_or_refuse(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        add_generation_prompt: bool,
        source: str | None,
        options: dict[str, Any],
    ) -> str:
        try:
            return self.apply(messages, tools, add_generation_prompt, source, options)
        except Exception as error:  # a template is a program; whatever it raises, the messages made it
            if tools:
                # Some templates want OpenAI's {"type": "function", "function": {...}}, others the inner object.
                bare = [tool["function"] if isinstance(tool.get("function"), dict) else tool for tool in tools]
                if bare != tools:
                    return self._apply_or_refuse(messages, bare, add_generation_prompt, source, options)
            reason = " ".join(str(error).split())
            raise RequestError(
                f"The chat template does not accept these messages: {reason}", param="messages"
            ) from error

    # ---- control tokens that somebody typed -------------------------------------------------------

    def _encode(self, text: str, data: dict[str, Any], text_of: Callable[[dict[str, Any]], str]) -> list[int]:
        # Joined without a separator: a template may put two strings side by side, and "<|im_" + "end|>" is one too.
        if not self._control.search("".join(_strings(data))):
            return self.tokenizer.encode(text, add_special_tokens=False)
        mark = next((chr(code) for code in _MARKS if chr(code) not in text), None)
        if mark is None:
            raise RequestError("The messages hold every private Unicode character there is.", param="messages")
        marked = text_of(self._marked(data, mark))
        if marked.replace(mark, "") != text:
            logger.warning("chat template %s transforms content: typed control tokens are parsed", self.name)
            return self.tokenizer.encode(text, add_special_tokens=False)
        ids: list[int] = []
        at = 0
        for control in self._control.finditer(marked):
            ids += self._plain_ids(marked[at : control.start()], mark)
            name = control.group()
            ids.append(self._ids_by_name[name if name in self._ids_by_name else name.strip()])
            at = control.end()
        return ids + self._plain_ids(marked[at:], mark)

    def _plain_ids(self, marked: str, mark: str) -> list[int]:
        text = marked.replace(mark, "")
        return self.tokenizer.encode(text, add_special_tokens=False, parse_special=False) if text else []

    def _marked(self, value: Any, mark: str) -> Any:
        """The same data with a mark inside each control token, and after each beginning of one at a string's end."""
        if isinstance(value, str):
            value = self._control.sub(lambda found: _insert(found.group(), mark), value)
            return value + mark if self._names.ends_with_partial(value) else value
        if isinstance(value, dict):
            return {key: item if key == "role" else self._marked(item, mark) for key, item in value.items()}
        if isinstance(value, list):
            return [self._marked(item, mark) for item in value]
        return value


def _insert(control: str, mark: str) -> str:
    """After the first character of the name, which may have blanks on its left."""
    at = len(control) - len(control.lstrip()) + 1
    return control[:at] + mark + control[at:]


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            if key != "role":
                yield from _strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)


# ---- where a template comes from ------------------------------------------------------------------


def _built_in(tokenizer: Tokenizer, name: str) -> ChatTemplate:
    return ChatTemplate(tokenizer, (_FOLDER / f"{_ALIASES.get(name, name)}.jinja").read_text(), name)


def _named_or_file(tokenizer: Tokenizer, argument: str) -> ChatTemplate:
    if argument in BUILT_IN or argument in _ALIASES:
        return _built_in(tokenizer, argument)
    path = Path(argument)
    if path.suffix not in (".jinja", ".json"):
        known = ", ".join(BUILT_IN)
        raise StartupError(f"--chat-template {argument}: not a built-in template ({known}), a .jinja or a .json file.")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"--chat-template {argument} cannot be read: {error}") from error
    if path.suffix == ".jinja":
        return ChatTemplate(tokenizer, text, path.name)
    return _from_json(tokenizer, text, path.name)


def _from_json(tokenizer: Tokenizer, text: str, name: str) -> ChatTemplate:
    """SGLang's JSON format: the words before each role and a style that says how they are joined.

    {"name": "mine", "system": "<|im_start|>system", "user": "<|im_start|>user", "assistant": "<|im_start|>assistant",
     "sep_style": "CHATML", "sep": "<|im_end|>", "stop_str": ["<|im_end|>"]}
    """
    try:
        template = json.loads(text)
        if not isinstance(template, dict):
            raise TypeError("it is no JSON object")
        if isinstance(template.get("chat_template"), str):
            return ChatTemplate(tokenizer, template["chat_template"], name)  # Hugging Face's chat_template.json
        after_system, after_role, tail = _JSON_STYLES[template["sep_style"]]
        variables = {key: str(template[key]) for key in ("system", "user", "assistant")}
        variables |= {"after_system": after_system, "after_role": after_role}
        variables |= {"end": template.get("sep", "\n") + tail, "system_message": template.get("system_message", "")}
        stop = template.get("stop_str") or []
    except (ValueError, TypeError) as error:
        raise StartupError(f"--chat-template {name} is not a JSON template: {error}") from error
    except KeyError as error:
        styles = ", ".join(_JSON_STYLES)
        raise StartupError(
            f"--chat-template {name}: {error} is missing or unknown; needed are system, user, assistant and "
            f"sep_style, one of {styles}."
        ) from error
    source = (_FOLDER / "from_json.jinja").read_text()
    return ChatTemplate(tokenizer, source, name, variables, [stop] if isinstance(stop, str) else list(stop))


def _of_the_model(tokenizer: Tokenizer, model_name: str, wanted: str | None) -> ChatTemplate:
    own = tokenizer.hf.chat_template
    if isinstance(own, dict) and own:
        name = wanted if wanted is not None else next(iter(own))
        if name not in own:
            names = ", ".join(own)
            raise StartupError(f"--hf-chat-template-name {wanted}: the model has no such template, only {names}.")
        return ChatTemplate(tokenizer, own[name], name)
    if wanted is not None:
        raise StartupError(f"--hf-chat-template-name {wanted}: the model has no named templates.")
    if own:
        return ChatTemplate(tokenizer, own, "the model's own")
    chats = "chat" in model_name or "instruct" in model_name
    name = next((name for name in BUILT_IN if chats and name in model_name), "plain")
    logger.warning("the model has no chat template: chats are rendered with the built-in template %r", name)
    return _built_in(tokenizer, name)
