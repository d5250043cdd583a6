"""How one request wants its tokens drawn and when it wants to stop.

A request names its parameters in SGLang's native words (`/generate`); the OpenAI door translates into them.
`from_dict` refuses names it does not know, `normalize` brings the record to one canonical form (greedy is
`top_k == 1` and nothing else), `verify` checks every range. All three run in the TokenizerManager, so that a
bad value is a 400 at the door and the scheduler can trust what it gets. After that the record never changes.

Source: SGLang `sampling/sampling_params.py`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import msgspec
import regex

from tinysrt.errors import RequestError

TOP_K_ALL = 1 << 30  # "whole vocabulary", larger than any vocabulary
GREEDY_TEMPERATURE = 1e-5  # at or below: greedy (the field's requests reach down to 1e-8)
MAX_STOPS = 32
MAX_STOP_REGEX_BYTES = 256
MAX_REGEX_REPEATS = 10_000  # the library unrolls a{m}: ((a{999}){999}){999} would take all memory of the machine
MAX_LOGIT_BIAS = 100.0  # at 100 the bias decides alone; more only invites overflow

# Known to SGLang, not run here: a value would change the answer, so it is refused. Null and empty mean "not set".
UNSUPPORTED_PARAMS = ("json_schema", "regex", "ebnf", "structural_tag", "custom_params")


class SamplingParams(msgspec.Struct, kw_only=True):
    max_new_tokens: int | None = 128  # None: until the context ends
    min_new_tokens: int = 0  # stop tokens are masked until so many are out
    stop: list[str] = []
    stop_token_ids: list[int] = []
    stop_regex: list[str] = []
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = TOP_K_ALL
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    n: int = 1
    ignore_eos: bool = False  # disables eos and stop_token_ids; stop strings still work
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False
    stream_interval: int | None = None
    logit_bias: dict[int, float] | None = None
    sampling_seed: int | None = None  # None: the TokenizerManager draws one, so every request has its own stream

    @property
    def is_greedy(self) -> bool:
        return self.top_k == 1

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> SamplingParams:
        """The record for a client's JSON object. Null means the default, except for `max_new_tokens` (no limit)."""
        values: dict[str, Any] = {}
        for name, value in raw.items():
            if name in UNSUPPORTED_PARAMS:
                if value is not None and value != "" and value != {}:
                    raise RequestError(f"Sampling parameter {name!r} is not supported by this server.", param=name)
            elif name not in cls.__struct_fields__:
                raise RequestError(f"Unknown sampling parameter {name!r}.", param=name)
            elif value is not None or name == "max_new_tokens":
                values[name] = value
        for name in ("stop", "stop_regex"):
            if isinstance(values.get(name), str):
                values[name] = [values[name]]
        if isinstance(values.get("stop_token_ids"), list):
            values["stop_token_ids"] = [i for i in values["stop_token_ids"] if i is not None]
        if isinstance(values.get("logit_bias"), dict):
            values["logit_bias"] = {_token_id(key): bias for key, bias in values["logit_bias"].items()}
        try:
            return msgspec.convert(values, cls)
        except msgspec.ValidationError as error:
            # "Expected `int`, got `str` - at `$.max_new_tokens`" names the place in msgspec's words; use ours.
            reason, _, path = str(error).partition(" - at `$")
            param = path.strip("`.").partition("[")[0] or None
            raise RequestError(f"Sampling parameter {param!r}: {reason.lower()}.", param=param) from None

    def normalize(self) -> SamplingParams:
        """One way to say each thing: -1 becomes "all", a temperature of nearly 0 becomes greedy, "" is no stop."""
        greedy = 0 <= self.temperature <= GREEDY_TEMPERATURE
        return msgspec.structs.replace(
            self,
            temperature=1.0 if greedy else self.temperature,  # so that nothing ever divides by 0
            top_k=1 if greedy else TOP_K_ALL if self.top_k == -1 else self.top_k,
            stop=[s for s in self.stop if s],
            stop_regex=[s for s in self.stop_regex if s],
            logit_bias=self.logit_bias or None,
        )

    def verify(self, vocab_size: int) -> None:
        """Raise RequestError for the first value out of range. Expects a normalized record."""

        def check(ok: bool, name: str, rule: str) -> None:
            if not ok:  # NaN fails every comparison, so it is caught wherever a range is
                raise RequestError(f"{name} must be {rule}, got {_short(getattr(self, name))}.", param=name)

        limit = self.max_new_tokens
        check(limit is None or limit >= 0, "max_new_tokens", "at least 0")
        check(self.min_new_tokens >= 0, "min_new_tokens", "at least 0")
        check(limit is None or self.min_new_tokens <= limit, "min_new_tokens", f"at most max_new_tokens ({limit})")
        check(0 <= self.temperature < math.inf, "temperature", "a finite number, at least 0")
        check(0 < self.top_p <= 1, "top_p", "above 0 and at most 1")
        check(self.top_k >= 1, "top_k", "at least 1, or -1 for the whole vocabulary")
        check(0 <= self.min_p <= 1, "min_p", "between 0 and 1")
        check(-2 <= self.frequency_penalty <= 2, "frequency_penalty", "between -2 and 2")
        check(-2 <= self.presence_penalty <= 2, "presence_penalty", "between -2 and 2")
        check(0 < self.repetition_penalty <= 2, "repetition_penalty", "above 0 and at most 2")
        check(self.n >= 1, "n", "at least 1")
        check(self.stream_interval is None or self.stream_interval >= 1, "stream_interval", "at least 1")
        seed = self.sampling_seed
        check(seed is None or -(2**63) <= seed < 2**63, "sampling_seed", "a 64-bit integer")
        check(len(self.stop) <= MAX_STOPS, "stop", f"at most {MAX_STOPS} strings")
        check(len(self.stop_regex) <= MAX_STOPS, "stop_regex", f"at most {MAX_STOPS} expressions")
        for pattern in self.stop_regex:
            check(len(pattern.encode()) <= MAX_STOP_REGEX_BYTES, "stop_regex", f"{MAX_STOP_REGEX_BYTES} bytes or less")
            few = _counted_repeats(pattern) <= MAX_REGEX_REPEATS
            check(few, "stop_regex", f"free of counts that multiply to more than {MAX_REGEX_REPEATS}")
            try:
                regex.compile(pattern)  # the library that will search with it
            except (regex.error, RecursionError, OverflowError) as error:
                message = f"stop_regex {_short(pattern)} is no regular expression: {error}."
                raise RequestError(message, param="stop_regex") from None
        # Ids index tensors later: one outside would take the scheduler, and everyone's requests, down.
        inside = f"token ids from 0 to {vocab_size - 1}"
        check(all(0 <= i < vocab_size for i in self.stop_token_ids), "stop_token_ids", inside)
        # Masked until min_new_tokens are out. Were they all, and end tokens come on top, there would be none to draw.
        few = self.min_new_tokens == 0 or self.ignore_eos or 2 * len(set(self.stop_token_ids)) <= vocab_size
        check(few, "stop_token_ids", "at most half of the vocabulary where min_new_tokens is set")
        bias = self.logit_bias or {}
        check(all(0 <= i < vocab_size for i in bias), "logit_bias", f"keyed by {inside}")
        check(
            all(abs(value) <= MAX_LOGIT_BIAS for value in bias.values()),
            "logit_bias",
            f"made of values from -{MAX_LOGIT_BIAS:g} to {MAX_LOGIT_BIAS:g}",
        )


def _token_id(key: Any) -> int:
    """JSON object keys are strings: "17" names token 17 ("1_7" and " 17", which int() would take, name nothing)."""
    if isinstance(key, int) or (isinstance(key, str) and re.fullmatch(r"-?[0-9]{1,18}", key)):
        return int(key)
    raise RequestError(f"logit_bias keys must be token ids, got {_short(key)}.", param="logit_bias")


def _counted_repeats(pattern: str) -> int:
    """The counts in a pattern, {m} or {m,n}, multiplied as if each was inside the next. Never too low: with the
    verbose flag blanks and comments may stand inside a count, so the pattern is read with and without them."""
    found = []
    for text in (pattern, re.sub(r"#.*|\s", "", pattern)):
        counts = [re.sub("[^0-9,]", "", braces).split(",") for braces in re.findall(r"\{([^{}]*)\}", text)]
        found.append(math.prod(max([1, *(int(number) for number in count if number)]) for count in counts))
    return max(found)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
