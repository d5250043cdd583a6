"""Everything that crosses a process boundary.

    TokenizerManager ── TokenizedGenerateReqInput, control ──▶ Scheduler
    Scheduler        ── BatchTokenIDOut ───────────────────▶ DetokenizerManager
    DetokenizerManager ── BatchStrOut ─────────────────────▶ TokenizerManager
    Scheduler        ── replies to control, AbortReq ──────▶ TokenizerManager

(With `--dp` a DataParallelController stands before the schedulers and passes messages on as they are.)

Each message is a tagged `msgspec.Struct`, msgpack on the wire (`tinysrt/ipc.py`): typed, fast, and safe,
because nothing is unpickled from a socket. A message is written once and never edited.

Every message of a request names three things: `rid` (the request), `batch_id` (the rid that the caller
gave to the whole batch or to its n samples, so that the parent's name aborts its children), and `reply_to`
(the ZMQ endpoint of the TokenizerManager that waits: several may run one day).

SGLang (`managers/io_struct.py`) sends a batch as some twenty parallel lists; here it is a list of small
structs, one per request, so that no index can slip. 0.5.23 calls the two batches BatchTokenIDOutput and
BatchStrOutput.
"""

from __future__ import annotations

from typing import Any

import msgspec

from tinysrt.sampling_params import SamplingParams


class Message(msgspec.Struct, tag=True):
    """Base of everything sent: the class name is the tag on the wire."""


# ---- how a request ends ---------------------------------------------------------------------------


class FinishStop(Message, frozen=True):
    """A stop token (`matched` is its id), a stop string or the text a stop regex matched (a str)."""

    matched: int | str

    def to_json(self) -> dict[str, Any]:
        return {"type": "stop", "matched": self.matched}


class FinishLength(Message, frozen=True):
    """`max_new_tokens` was reached; `length` is that number after clipping to the context."""

    length: int

    def to_json(self) -> dict[str, Any]:
        return {"type": "length", "length": self.length}


class FinishAbort(Message, frozen=True):
    """Ended before its time. `status_code` None: the client asked; else the HTTP status of the reply."""

    message: str
    status_code: int | None = None
    err_type: str | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "type": "abort",
            "message": self.message,
            "status_code": self.status_code,
            "err_type": self.err_type,
        }


FinishReason = FinishStop | FinishLength | FinishAbort


# ---- requests -------------------------------------------------------------------------------------


class TokenizedGenerateReqInput(Message, kw_only=True):
    """TokenizerManager → Scheduler: one request, tokenized, its parameters normalized and verified."""

    rid: str
    batch_id: str | None = None
    reply_to: str
    input_ids: list[int]
    sampling_params: SamplingParams
    stream: bool = False
    return_logprob: bool = False
    logprob_start_len: int = -1  # first prompt position to score; -1: output tokens only
    top_logprobs_num: int = 0
    token_ids_logprob: list[int] | None = None
    cache_namespace: str | None = None  # extra_key and cache_salt joined: prefixes are shared only within it
    data_parallel_rank: int | None = None  # the replica that must run it; None: whose turn it is
    is_health_check: bool = False
    received_ns: int = 0  # time.monotonic_ns() at the door


# ---- results --------------------------------------------------------------------------------------


class Logprobs(Message):
    """Scores that travel with a result; every list covers only what is new in this message.

    A score is a natural-log probability. `None` stands where a token has no predecessor to score it.
    *_top: per position, (logprob, token id) pairs, best first. *_ids: the same for `token_ids_logprob`.
    """

    output: list[float] = []
    output_top: list[list[tuple[float, int]] | None] = []
    output_ids: list[list[tuple[float, int]] | None] = []
    # Input scores are sent once, with the first result after the whole prompt was computed.
    input: list[tuple[float | None, int]] | None = None  # (logprob, token id) from logprob_start_len on
    input_top: list[list[tuple[float, int]] | None] | None = None
    input_ids: list[list[tuple[float, int]] | None] | None = None


class OutputMeta(Message):
    """What both result messages say of a request besides ids or text; the detokenizer passes it on."""

    rid: str
    batch_id: str | None
    reply_to: str
    finish: FinishReason | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int  # prompt tokens whose KV the prefix cache supplied at first admission
    num_retractions: int
    logprobs: Logprobs | None = None
    dp_rank: int | None = None  # the replica that ran it; None: there is only one


class TokenIDOut(Message):
    """Scheduler → DetokenizerManager: the news of one request."""

    meta: OutputMeta
    new_ids: list[int]  # output tokens since the last message (stop token included)
    # First message only: the last few prompt ids, context for the decoder and never output.
    context_ids: list[int] | None = None
    # With a stop string or regex: [start, end) in characters of the whole output text.
    stop_range: tuple[int, int] | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False


class BatchTokenIDOut(Message):
    outs: list[TokenIDOut]


class StrOut(Message):
    """DetokenizerManager → TokenizerManager: `text` and `new_ids` are only what is new."""

    meta: OutputMeta
    text: str
    new_ids: list[int]


class BatchStrOut(Message):
    outs: list[StrOut]


# ---- control --------------------------------------------------------------------------------------


class AbortReq(Message):
    """TokenizerManager → Scheduler: please end `rid` (exact match, or a batch's id); `abort_all`: everyone.

    Scheduler → TokenizerManager: this rid ended outside the output stream (`finish` says how): it was
    still waiting, or was refused on arrival.
    """

    rid: str = ""
    abort_all: bool = False
    finish: FinishAbort | None = None


class FlushCacheReqInput(Message):
    reply_to: str
    timeout_s: float = 0.0  # wait up to this long for the scheduler to be idle


class FlushCacheReqOutput(Message):
    success: bool
    message: str


class PauseGenerationReqInput(Message):
    """mode: `abort` (end all first), `retract` (back to the queue), `in_place` (stop scheduling, keep KV)."""

    reply_to: str
    mode: str = "abort"


class PauseGenerationReqOutput(Message):
    success: bool
    message: str = ""


class ContinueGenerationReqInput(Message):
    reply_to: str


class ContinueGenerationReqOutput(Message):
    success: bool
    message: str = ""


class GetInternalStateReq(Message):
    reply_to: str


class GetInternalStateReqOutput(Message):
    internal_state: dict[str, Any]


class LoadSnapshot(Message):
    """Scheduler → TokenizerManager, pushed at each prefill, every 15 decode steps and on going idle."""

    dp_rank: int = 0
    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    num_waiting_uncached_tokens: int = 0
    num_used_tokens: int = 0  # neither free nor evictable
    max_total_num_tokens: int = 0
    max_running_requests: int = 0
    gen_throughput: float = 0.0  # output tokens a second since the last snapshot
    cache_hit_rate: float = 0.0  # cached / prompt tokens of the last prefill


class HealthCheckOutput(Message):
    """A busy scheduler's answer to a health probe: a batch was just processed."""

    rid: str


class ShutdownReq(Message):
    """TokenizerManager → Scheduler: finish the step in flight, say goodbye, exit with code 0."""


class ShutdownNotice(Message):
    """Scheduler → DetokenizerManager: nothing more will come; exit with code 0."""


ToScheduler = (
    TokenizedGenerateReqInput
    | AbortReq
    | FlushCacheReqInput
    | PauseGenerationReqInput
    | ContinueGenerationReqInput
    | GetInternalStateReq
    | ShutdownReq
)
ToDetokenizer = BatchTokenIDOut | ShutdownNotice
ToTokenizer = (
    BatchStrOut
    | BatchTokenIDOut  # with --skip-tokenizer-init the detokenizer is bypassed
    | AbortReq
    | FlushCacheReqOutput
    | PauseGenerationReqOutput
    | ContinueGenerationReqOutput
    | GetInternalStateReqOutput
    | LoadSnapshot
    | HealthCheckOutput
)
