"""How one request wants its tokens drawn and when it wants to stop.

A request names its parameters in SGLang's native words (`/generate`); the OpenAI door translates into them.
`from_dict` refuses names it does not know, `normalize` brings the record to one canonical form (greedy is
`top_k == 1` and nothing else), `verify` checks every range. All three run in the TokenizerManager, so that a
bad value is a 400 at the door and the scheduler can trust what it gets. After that the record never changes.

Source: SGLang `sampling/sampling_params.py`.
"""

from __future__ import annotations

import msgspec

TOP_K_ALL = 1 << 30  # "whole vocabulary", larger than any vocabulary
GREEDY_TEMPERATURE = 1e-5  # at or below: greedy (the field's requests reach down to 1e-8)


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
