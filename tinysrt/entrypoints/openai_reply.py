"""What OpenAI replies look like: whole and in chunks, with logprobs and usage.

    native output ──▶ Choice.take ──▶ (new text, new Scores) ──▶ ChatReply / CompletionReply ──▶ dict

Everything here is a pure function of native outputs: no I/O, so that each shape is tested with a few literals.

Logprobs are shown in two ways. Chat lists tokens with their raw `bytes`, so that text can be rebuilt from them even
where a token is half a character. Completions promise something else: joined `tokens` are exactly the text, and
`text_offset` says where each begins; `TextTokens` keeps that promise (tests/entrypoints/test_openai_completions.py).
"""

from __future__ import annotations

import codecs
import time
from dataclasses import dataclass, field
from typing import Any, Protocol

from tinysrt.entrypoints.openai_protocol import ChatRequest, CompletionRequest

LOWEST_LOGPROB = -9999.0  # minus infinity is no JSON number; OpenAI writes this

Entry = tuple[float | None, int]  # (logprob, token id); None: no predecessor scores it


class TokenTable(Protocol):
    """What replies need of the tokenizer."""

    @property
    def all_special_ids(self) -> list[int]: ...
    def token_text(self, token_id: int) -> str: ...
    def token_bytes(self, token_id: int) -> bytes: ...
    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str: ...


@dataclass
class Scores:
    """Logprobs that are new: one entry and one list of alternatives per token, prompt tokens first."""

    entries: list[Entry] = field(default_factory=list)
    tops: list[list[Entry]] = field(default_factory=list)

    def extend(self, entries: list[Any], tops: list[Any] | None) -> None:
        self.entries += [(entry[0], entry[1]) for entry in entries]
        for i in range(len(entries)):
            top = tops[i] if tops else None
            self.tops.append([(item[0], item[1]) for item in top or []])


@dataclass
class Choice:
    """How much of one choice's output has been passed on."""

    index: int
    deltas: bool = False  # outputs hold only what is new (--incremental-streaming-output)
    text_taken: int = 0  # characters
    scores_taken: int = 0  # output tokens
    input_scores_taken: bool = False
    finish: dict[str, Any] | None = None
    echoed: bool = False  # completions: the prompt has been sent in front
    text_tokens: TextTokens | None = None  # completions with logprobs only

    def take(self, output: dict[str, Any]) -> tuple[str, Scores | None]:
        meta = output["meta_info"]
        self.finish = meta["finish_reason"] or self.finish
        text = output["text"]
        start = 0 if self.deltas else self.text_taken
        self.text_taken = len(text)
        if meta.get("output_token_logprobs") is None:
            return text[start:], None
        scores = Scores()
        if not self.input_scores_taken and meta.get("input_token_logprobs"):
            self.input_scores_taken = True
            scores.extend(meta["input_token_logprobs"], meta.get("input_top_logprobs"))
        first = 0 if self.deltas else self.scores_taken
        entries, tops = meta["output_token_logprobs"], meta.get("output_top_logprobs")
        self.scores_taken = len(entries)
        scores.extend(entries[first:], tops[first:] if tops else None)
        return text[start:], scores


class Usage:
    """Token counts over all choices; a prompt counts once however many samples it has."""

    def __init__(self, samples: int, cache_report: bool):
        self.samples = samples
        self.cache_report = cache_report
        self.latest: dict[int, dict[str, Any]] = {}  # choice index → its latest meta_info

    def count(self, index: int, meta: dict[str, Any]) -> None:
        self.latest[index] = meta

    def to_json(self) -> dict[str, Any]:
        prompts = {index // self.samples: meta for index, meta in sorted(self.latest.items(), reverse=True)}
        prompt_tokens = sum(meta["prompt_tokens"] for meta in prompts.values())
        completion_tokens = sum(meta["completion_tokens"] for meta in self.latest.values())
        cached = sum(meta["cached_tokens"] for meta in prompts.values())
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "reasoning_tokens": 0,
            "prompt_tokens_details": {"cached_tokens": cached} if self.cache_report else None,
        }


class Reply:
    """One answer: the fields that all its chunks share. Subclasses know the shape of a choice."""

    whole_object = chunk_object = ""
    prompt_field = ""  # what the API calls the prompt

    def __init__(self, rid: str, model: str):
        self.rid, self.model, self.created = rid, model, int(time.time())

    def whole(self, choices: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        return self._envelope(self.whole_object, choices) | {"usage": usage}

    def chunk(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None) -> dict[str, Any]:
        envelope = self._envelope(self.chunk_object, choices)
        return envelope if usage is None else envelope | {"usage": usage}

    def _envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.rid, "object": kind, "created": self.created, "model": self.model, "choices": choices}

    def whole_choice(self, choice: Choice, text: str, scores: Scores | None) -> dict[str, Any]:
        raise NotImplementedError

    def opening(self, choice: Choice) -> dict[str, Any] | None:
        """The chunk before any text, if the API has one."""
        raise NotImplementedError

    def piece(self, choice: Choice, text: str, scores: Scores | None) -> dict[str, Any] | None:
        """New text or new scores; None if there is neither."""
        raise NotImplementedError

    def closing(self, choice: Choice) -> dict[str, Any]:
        """The chunk that says why the choice ended."""
        raise NotImplementedError


# ---- chat ------------------------------------------------------------------------------------------


class ChatReply(Reply):
    whole_object, chunk_object = "chat.completion", "chat.completion.chunk"
    prompt_field = "messages"

    def __init__(self, asked: ChatRequest, rid: str, model: str, tokenizer: TokenTable):
        super().__init__(rid, model)
        self.tokenizer = tokenizer

    def whole_choice(self, choice: Choice, text: str, scores: Scores | None) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "reasoning_content": None}
        return {"index": choice.index, "message": message, "logprobs": self._logprobs(scores)} | _ending(choice)

    def opening(self, choice: Choice) -> dict[str, Any]:
        return self._delta(choice, {"role": "assistant", "content": ""})

    def piece(self, choice: Choice, text: str, scores: Scores | None) -> dict[str, Any] | None:
        if not text and not (scores and scores.entries):
            return None
        return self._delta(choice, {"content": text}, self._logprobs(scores))

    def closing(self, choice: Choice) -> dict[str, Any]:
        return self._delta(choice, {}) | _ending(choice)

    def _delta(self, choice: Choice, delta: dict[str, Any], logprobs: Any = None) -> dict[str, Any]:
        return {
            "index": choice.index, "delta": delta, "logprobs": logprobs, "finish_reason": None, "matched_stop": None,
        }  # fmt: skip

    def _logprobs(self, scores: Scores | None) -> dict[str, Any] | None:
        if scores is None:
            return None
        content = []
        for entry, top in zip(scores.entries, scores.tops, strict=True):
            content.append(self._token(entry) | {"top_logprobs": [self._token(other) for other in top]})
        return {"content": content}

    def _token(self, entry: Entry) -> dict[str, Any]:
        logprob, token_id = entry
        return {
            "token": self.tokenizer.token_text(token_id),
            "logprob": _number(logprob),
            "bytes": list(self.tokenizer.token_bytes(token_id)),
        }


# ---- completions -----------------------------------------------------------------------------------


class CompletionReply(Reply):
    whole_object = chunk_object = "text_completion"
    prompt_field = "prompt"

    def __init__(
        self,
        asked: CompletionRequest,
        rid: str,
        model: str,
        tokenizer: TokenTable,
        prompts: list[str] | list[list[int]],
    ):
        super().__init__(rid, model)
        self.tokenizer = tokenizer
        self.asked = asked
        self.prompts = prompts

    def whole_choice(self, choice: Choice, text: str, scores: Scores | None) -> dict[str, Any]:
        text = self._echo(choice) + text
        logprobs = self._logprobs(choice, text, scores)
        return {"index": choice.index, "text": text, "logprobs": logprobs} | _ending(choice)

    def opening(self, choice: Choice) -> dict[str, Any] | None:
        return None

    def piece(self, choice: Choice, text: str, scores: Scores | None) -> dict[str, Any] | None:
        text = self._echo(choice) + text
        if not text and not (scores and scores.entries):
            return None
        logprobs = self._logprobs(choice, text, scores)
        return self._chunk_choice(choice, text, logprobs)

    def closing(self, choice: Choice) -> dict[str, Any]:
        return self._chunk_choice(choice, "", None) | _ending(choice)

    def _chunk_choice(self, choice: Choice, text: str, logprobs: Any) -> dict[str, Any]:
        return {
            "index": choice.index, "text": text, "logprobs": logprobs, "finish_reason": None, "matched_stop": None,
        }  # fmt: skip

    def _echo(self, choice: Choice) -> str:
        if not self.asked.echo or choice.echoed:
            return ""
        choice.echoed = True
        prompt = self.prompts[choice.index // self.asked.samples]
        if isinstance(prompt, str):
            return prompt
        return self.tokenizer.decode(prompt, skip_special_tokens=self.asked.skip_special_tokens is not False)

    def _logprobs(self, choice: Choice, text: str, scores: Scores | None) -> dict[str, Any] | None:
        if scores is None:
            return None
        if choice.text_tokens is None:
            choice.text_tokens = TextTokens(self.tokenizer)
        return choice.text_tokens.deal(scores, text, finished=choice.finish is not None, tops=bool(self.asked.logprobs))


class TextTokens:
    """Deals the text of one choice out to its tokens, in order and without a gap.

    Bytes are decoded step by step: a token that ends inside a character shows nothing, the one that completes the
    character shows it. What a token shows is always cut from the text itself, so a trimmed stop string or a skipped
    special token shows nothing, and a token whose text is still held back waits for it.
    """

    def __init__(self, tokenizer: TokenTable):
        self.tokenizer = tokenizer
        self.special_ids = frozenset(tokenizer.all_special_ids)
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.offset = 0  # characters dealt out
        self.text = ""  # not dealt out yet
        self.waiting: list[tuple[Entry, list[Entry], str]] = []  # tokens whose text is not here yet

    def deal(self, scores: Scores, text: str, *, finished: bool, tops: bool) -> dict[str, Any]:
        self.text += text
        for entry, top in zip(scores.entries, scores.tops, strict=True):
            self.waiting.append((entry, top, self._shown(entry[1])))
        tokens: list[str] = []
        logprobs: list[float | None] = []
        alternatives: list[dict[str, float] | None] = []
        offsets: list[int] = []
        while self.waiting and (finished or len(self.waiting[0][2]) <= len(self.text)):
            (logprob, token_id), top, shown = self.waiting.pop(0)
            special = token_id in self.special_ids and self.text.startswith(self.tokenizer.token_text(token_id))
            length = len(self.tokenizer.token_text(token_id)) if special else len(shown)
            if self.offset == 0 and shown.startswith(" ") and not self.text.startswith(" "):
                length -= 1  # SentencePiece drops the space in front of the first word
            if finished and not self.waiting:
                length = len(self.text)  # half a character at the very end
            token, self.text = self.text[:length], self.text[length:]
            tokens.append(token)
            logprobs.append(_number(logprob))
            offsets.append(self.offset)
            self.offset += len(token)
            alternatives.append(self._alternatives(token, logprob, token_id, top))
        return {
            "tokens": tokens,
            "token_logprobs": logprobs,
            "top_logprobs": alternatives if tops else None,
            "text_offset": offsets,
        }

    def _shown(self, token_id: int) -> str:
        return "" if token_id in self.special_ids else self.decoder.decode(self.tokenizer.token_bytes(token_id))

    def _alternatives(
        self, token: str, logprob: float | None, token_id: int, top: list[Entry]
    ) -> dict[str, float] | None:
        """Text → logprob, best first. The token itself is always among them, by the name that `tokens` gives it."""
        if logprob is None:
            return None
        found: dict[str, float] = {}
        for other, other_id in [*top, (logprob, token_id)]:
            name = token if other_id == token_id else self.tokenizer.token_text(other_id)
            found.setdefault(name, _number(other) or 0.0)  # two half characters may share a name: the better one stays
        return found


def _ending(choice: Choice) -> dict[str, Any]:
    finish = choice.finish or {}
    return {"finish_reason": finish.get("type"), "matched_stop": finish.get("matched")}


def _number(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, LOWEST_LOGPROB)
