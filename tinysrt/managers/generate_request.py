"""A generate request as a client says it, and the list of prompts that it turns out to be.

    JSON body ─▶ GenerateReqInput ── normalize() ─▶ GenerateBatch: [Prompt, Prompt, …]
                 scalars or lists                    one prompt each, everything filled in and checked

Almost every field of a request may be one value or a list with one value per prompt. That freedom ends here:
behind `normalize` there is one plain list, and a request that is wrong anywhere is refused as a whole, before
any of its items is registered, tokenized or sent (a batch with one bad item must leave nothing behind:
tests/tokenizer_manager/test_generate_request.py).

Names. A prompt is answered by `n` samples, and each sample is one request to the scheduler, with a rid of its own:

    rid "a", one prompt, n = 1        a                       "a" aborts it
    rid "a", two prompts, n = 1       a_0, a_1                "a" aborts both
    rid "a", two prompts, n = 2       a_0_0, a_0_1, a_1_0 …   "a_0" aborts two, "a" all four

Pure functions, no I/O: the doors build a GenerateReqInput, the TokenizerManager normalizes and runs it.
SGLang: `managers/io_struct.py::GenerateReqInput`, which stays scalar-or-list and is indexed item by item.
"""

from __future__ import annotations

import logging
import uuid
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from tinysrt.errors import RequestError
from tinysrt.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

# Alternatives of a position (top_logprobs_num, token_ids_logprob) are Python objects in three processes. As many as
# OpenAI's API allows are always fine; the whole vocabulary at every position of a long prompt would take all memory.
FINE_ALTERNATIVES = 20
MAX_ALTERNATIVES = 1_000_000  # in one answer

# Fields of SGLang's request that would change the answer and are not run here: refused unless they hold their
# default (null, false, 0, empty). Any other name is unknown and ignored: routers add fields of their own.
UNSUPPORTED_FIELDS = (
    "input_embeds",
    "image_data",
    "video_data",
    "audio_data",
    "lora_path",
    "lora_id",
    "session_params",
    "custom_logit_processor",
    "return_hidden_states",
    "return_routed_experts",
    "return_entropy",
    "return_bytes",
    "background",
    "priority",
    "bootstrap_host",
    "bootstrap_room",
    "require_reasoning",
)


def refuse_unsupported_fields(body: Mapping[str, Any]) -> None:
    for name in UNSUPPORTED_FIELDS:
        if body.get(name):
            raise RequestError(f"'{name}' is not supported by this server.", param=name)


@dataclass
class Prompt:
    """One prompt, everything resolved. Written by `normalize`; the TokenizerManager adds `input_ids` from `text`."""

    rid: str  # the name of the prompt: its only sample's rid, or the stem of its samples' rids
    batch_id: str | None  # the caller's name for several samples; aborting it aborts them all
    sample_rids: list[str]  # n of them
    first_index: int  # place of sample 0 in the answer
    text: str | None
    input_ids: list[int] | None
    params: SamplingParams
    limit_typed: bool  # the client itself gave max_new_tokens: too much is an error, not something to clip
    stream: bool
    return_logprob: bool
    logprob_start_len: int
    top_logprobs_num: int
    token_ids_logprob: list[int] | None
    return_text_in_logprobs: bool
    return_prompt_token_ids: bool
    cache_namespace: str | None
    data_parallel_rank: int | None = None  # the replica that runs it; None: whose turn it is

    @property
    def ids(self) -> list[int]:
        assert self.input_ids is not None, f"prompt {self.rid} is not tokenized yet"
        return self.input_ids


@dataclass
class GenerateBatch:
    prompts: list[Prompt]
    stream: bool
    is_single: bool  # one prompt that was not in a list, n == 1: answered by an object instead of a list

    @property
    def rids(self) -> list[str]:
        return [rid for prompt in self.prompts for rid in prompt.sample_rids]


class GenerateReqInput(msgspec.Struct, kw_only=True):
    """The fields of `/generate`, and what the other doors translate into. `| list`: one for each prompt."""

    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None  # one prompt, or a list of them; beside `text`: what is run
    sampling_params: dict[str, Any] | list[dict[str, Any] | None] | None = None
    rid: str | list[str] | None = None
    stream: bool = False
    return_logprob: bool | list[bool | None] | None = None
    logprob_start_len: int | list[int | None] | None = None  # first prompt position to score; -1: none
    top_logprobs_num: int | list[int | None] | None = None
    token_ids_logprob: list[int | list[int] | None] | None = None
    return_text_in_logprobs: bool = False
    return_prompt_token_ids: bool = False
    extra_key: str | list[str | None] | None = None  # requests share cached prefixes only with the same key
    cache_salt: str | list[str | None] | None = None  # the same, by the name that OpenAI clients use
    data_parallel_rank: int | None = None  # the replica (--dp) that runs all of it; None: whose turn it is

    def normalize(
        self, *, vocab_size: int, max_batch_size: int, preferred: Mapping[str, Any] | None = None, replicas: int = 1
    ) -> GenerateBatch:
        """Everything that can be checked before tokenizing is checked here. `preferred`: the operator's defaults."""
        _check_range("data_parallel_rank", self.data_parallel_rank, 0, replicas - 1)
        texts, ids, is_list = self._split_prompts()
        count = len(texts)

        raw_params = _per_item("sampling_params", self.sampling_params, count, is_list)
        typed = [_without_nulls(raw or {}) for raw in raw_params]
        params = [SamplingParams.from_dict({**(preferred or {}), **given}).normalize() for given in typed]
        for item in params:
            item.verify(vocab_size)
        n = params[0].n
        if any(item.n != n for item in params):
            raise RequestError("All prompts of a request must use the same n.", param="n")
        if count * n > max_batch_size:
            raise RequestError(f"{count * n} answers in one request; at most {max_batch_size} (--max-batch-size).")

        rids = self._rids(count, is_list)
        batch_name = self.rid if is_list and isinstance(self.rid, str) else None
        return_logprob = _per_item("return_logprob", self.return_logprob, count, is_list)
        start_len = _per_item("logprob_start_len", self.logprob_start_len, count, is_list)
        top_num = _per_item("top_logprobs_num", self.top_logprobs_num, count, is_list)
        wanted = self._wanted_ids(count, is_list)
        extra_key = _per_item("extra_key", self.extra_key, count, is_list)
        cache_salt = _per_item("cache_salt", self.cache_salt, count, is_list)

        prompts = []
        for i in range(count):
            _check_ids("input_ids", ids[i], vocab_size)
            _check_ids("token_ids_logprob", wanted[i], vocab_size)
            _check_range("logprob_start_len", start_len[i], -1, None)
            _check_range("top_logprobs_num", top_num[i], 0, vocab_size)
            prompt = Prompt(
                rid=rids[i],
                batch_id=batch_name or (rids[i] if n > 1 else None),
                sample_rids=[rids[i]] if n == 1 else [f"{rids[i]}_{j}" for j in range(n)],
                first_index=i * n,
                text=texts[i],
                input_ids=ids[i],
                params=params[i],
                limit_typed=typed[i].get("max_new_tokens") is not None,
                stream=self.stream,
                return_logprob=bool(return_logprob[i]),
                logprob_start_len=-1 if start_len[i] is None else start_len[i],
                top_logprobs_num=top_num[i] or 0,
                token_ids_logprob=wanted[i],
                return_text_in_logprobs=self.return_text_in_logprobs,
                return_prompt_token_ids=self.return_prompt_token_ids,
                cache_namespace=_namespace(extra_key[i], cache_salt[i]),
                data_parallel_rank=self.data_parallel_rank,
            )
            if n > 1 and replicas > 1 and prompt.data_parallel_rank is None:
                # The samples of a prompt stay together: they share its prefix.
                prompt.data_parallel_rank = zlib.crc32(prompt.rid.encode()) % replicas
            prompts.append(prompt)
        batch = GenerateBatch(prompts, self.stream, is_single=not is_list and n == 1)
        if len(set(batch.rids)) != len(batch.rids):
            raise RequestError("The same rid is named twice in this request.", param="rid")
        return batch

    def _split_prompts(self) -> tuple[list[str | None], list[list[int] | None], bool]:
        """Texts, ids, and whether the caller sent a list of prompts (a list of one is a list)."""
        text, ids = self.text, self.input_ids
        if text is None and ids is None:
            raise RequestError("Either 'text' or 'input_ids' is required.", param="text")
        if text is not None and not text and ids is None and isinstance(text, list):
            raise RequestError("'text' is an empty list.", param="text")
        if ids is not None and not ids:
            raise RequestError("'input_ids' is empty.", param="input_ids")

        ids_are_list = ids is not None and isinstance(ids[0], list)
        is_list = isinstance(text, list) if text is not None else ids_are_list
        if ids is not None and (ids_are_list != is_list or any(isinstance(i, list) != is_list for i in ids)):
            shape = "a list of token id lists" if is_list else "one list of token ids"
            raise RequestError(f"'input_ids' must be {shape} here.", param="input_ids")

        texts: list[Any] = text if isinstance(text, list) else [text]
        prompts: list[Any] = [None] * len(texts) if ids is None else ids if is_list else [ids]
        if text is None:
            texts = [None] * len(prompts)
        if len(texts) != len(prompts):
            raise RequestError(f"{len(texts)} texts but {len(prompts)} lists of input_ids.", param="input_ids")
        if any(prompt is not None and not prompt for prompt in prompts):
            raise RequestError("'input_ids' holds an empty prompt.", param="input_ids")
        return texts, prompts, is_list

    def _rids(self, count: int, is_list: bool) -> list[str]:
        rid = self.rid
        if rid is None:
            return [uuid.uuid4().hex for _ in range(count)]
        # A string names the whole batch, and its items by number; per item it has to be a list.
        rids = [f"{rid}_{i}" for i in range(count)] if is_list and isinstance(rid, str) else None
        rids = rids or _per_item("rid", rid, count, is_list)
        if rid == "" or "" in rids:
            raise RequestError("'rid' must not be empty; leave it out and one is made.", param="rid")
        return rids

    def _wanted_ids(self, count: int, is_list: bool) -> list[Any]:
        """token_ids_logprob is a list already when it is for one prompt: a flat one is shared by the batch."""
        wanted = self.token_ids_logprob
        nested = bool(wanted) and any(isinstance(item, list) for item in wanted or [])
        if nested:
            return _per_item("token_ids_logprob", wanted, count, is_list)
        return [wanted or None] * count


def _per_item(name: str, value: Any, count: int, is_list: bool) -> list[Any]:
    if not isinstance(value, list):
        return [value] * count
    if not is_list:
        raise RequestError(f"'{name}' is a list, but there is only one prompt, not a list of prompts.", param=name)
    if len(value) != count:
        raise RequestError(f"'{name}' has {len(value)} entries for {count} prompts.", param=name)
    return value


def _without_nulls(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Null means "not given", so that an operator's default shows through; for max_new_tokens it means no limit."""
    return {name: value for name, value in raw.items() if value is not None or name == "max_new_tokens"}


def _check_ids(name: str, ids: Any, vocab_size: int) -> None:
    if ids is None:
        return
    if any(not isinstance(i, int) for i in ids):
        raise RequestError(f"'{name}' must hold token ids.", param=name)
    # Ids index the embedding table: one outside would stop the scheduler, and with it the server.
    if min(ids) < 0 or max(ids) >= vocab_size:
        bad = next(i for i in ids if not 0 <= i < vocab_size)
        raise RequestError(f"'{name}' holds {bad}; token ids go from 0 to {vocab_size - 1}.", param=name)


def _check_range(name: str, value: int | None, low: int, high: int | None) -> None:
    if value is not None and (value < low or (high is not None and value > high)):
        limit = f"at least {low}" if high is None else f"between {low} and {high}"
        raise RequestError(f"'{name}' must be {limit}, got {value}.", param=name)


def _namespace(extra_key: str | None, cache_salt: str | None) -> str | None:
    if not extra_key and not cache_salt:
        return None
    # Joined by a character that neither is likely to hold, so that "ab" + "c" is not "a" + "bc".
    return f"{cache_salt or ''}\x00{extra_key or ''}"


# ---- what can be checked only once it is known how many tokens the prompt has ----------------------------


@dataclass(frozen=True)
class LengthLimits:
    context_len: int
    max_input_len: int  # prompts are shorter than this: room for the first output tokens, and the KV pool's size
    auto_truncate: bool  # --allow-auto-truncate

    @property
    def too_long(self) -> int:
        """The fewest tokens of a prompt that does not fit."""
        return min(self.context_len, self.max_input_len)


def refuse_far_too_long(fewest_tokens: int, limits: LengthLimits, field: str) -> None:
    """For a text so long that encoding it, which takes seconds and gigabytes, could only end in a refusal."""
    limit = limits.too_long
    if fewest_tokens >= limit and not limits.auto_truncate:
        raise RequestError(
            f"The prompt has more than {fewest_tokens} tokens; this server takes at most {limit - 1} "
            f"(its context length is {limits.context_len}).",
            param=field,
            code="context_length_exceeded",
        )


def fit_length(prompt: Prompt, limits: LengthLimits) -> None:
    """Prompt and answer must fit the context. What the client did not itself ask for by number is clipped."""
    ids, params, field = prompt.ids, prompt.params, "input_ids" if prompt.text is None else "text"
    if not ids:
        raise RequestError(f"'{field}' holds an empty prompt.", param=field)
    limit = limits.too_long
    if len(ids) >= limit:
        if not limits.auto_truncate:
            raise RequestError(
                f"The prompt has {len(ids)} tokens; this server takes at most {limit - 1} "
                f"(its context length is {limits.context_len}).",
                param=field,
                code="context_length_exceeded",
            )
        logger.warning("A prompt is cut to its first %d tokens (--allow-auto-truncate)", limit - 1)
        prompt.input_ids = ids = ids[: limit - 1]
    room = limits.context_len - len(ids)
    if params.max_new_tokens is not None and params.max_new_tokens > room:
        if prompt.limit_typed and not limits.auto_truncate:
            raise RequestError(
                f"{len(ids)} prompt tokens and max_new_tokens {params.max_new_tokens} exceed the context length "
                f"of {limits.context_len} tokens.",
                param="max_new_tokens",
                code="context_length_exceeded",
            )
        fewest = min(params.min_new_tokens, room)
        prompt.params = msgspec.structs.replace(params, max_new_tokens=room, min_new_tokens=fewest)
    if prompt.return_logprob and prompt.logprob_start_len > len(ids):
        raise RequestError(
            f"logprob_start_len {prompt.logprob_start_len} lies behind the prompt ({len(ids)} tokens).",
            param="logprob_start_len",
        )
    _check_alternatives(prompt, room)


def _check_alternatives(prompt: Prompt, room: int) -> None:
    if not prompt.return_logprob:
        return
    wide = max(prompt.top_logprobs_num, len(prompt.token_ids_logprob or []))
    scored = len(prompt.ids) - prompt.logprob_start_len if prompt.logprob_start_len >= 0 else 0
    scored += room if prompt.params.max_new_tokens is None else min(prompt.params.max_new_tokens, room)
    if wide > FINE_ALTERNATIVES and wide * scored > MAX_ALTERNATIVES:
        raise RequestError(
            f"{wide} alternatives for each of up to {scored} scored tokens; at most {MAX_ALTERNATIVES} in one answer. "
            "Ask for fewer, score less of the prompt, or set max_new_tokens lower.",
            param="top_logprobs_num" if wide == prompt.top_logprobs_num else "token_ids_logprob",
        )


def refuse_what_needs_a_tokenizer(prompt: Prompt) -> None:
    """For servers that run without one."""
    asked = {
        "text": prompt.input_ids is None,
        "stop": bool(prompt.params.stop),
        "stop_regex": bool(prompt.params.stop_regex),
        "min_new_tokens": prompt.params.min_new_tokens > 0,
        "return_text_in_logprobs": prompt.return_text_in_logprobs,
    }
    for name, used in asked.items():
        if used:
            message = f"'{name}' needs a tokenizer, and this server runs without one (--skip-tokenizer-init)."
            raise RequestError(message, param=name)
