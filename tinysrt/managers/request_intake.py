"""From a message to a `Req`: the last checks, the ones that need the pool's size, and the search for stop strings.

The TokenizerManager has checked everything that a request says about itself. What it cannot know is how large the KV
pool turned out and how long the queue is. Source: SGLang `Scheduler.handle_generate_request`.
"""

from __future__ import annotations

from tinysrt.errors import RequestError
from tinysrt.managers.schedule_batch import Req
from tinysrt.managers.seats import Limits
from tinysrt.messages import TokenizedGenerateReqInput
from tinysrt.text.incremental import CONTEXT_TOKENS, IncrementalDecoder
from tinysrt.text.stop import StopMatcher
from tinysrt.text.tokenizer import Tokenizer


def make_req(message: TokenizedGenerateReqInput, limits: Limits, tokenizer: Tokenizer | None, *, waiting: int) -> Req:
    """Raises RequestError for a request that this server cannot run, now (503) or ever (400)."""
    length = len(message.input_ids)
    if length > limits.max_req_input_len:
        raise RequestError(
            f"The prompt has {length} tokens; this server can take at most {limits.max_req_input_len} "
            "(--context-length and --max-total-tokens set the limit)."
        )
    if limits.max_queued_requests is not None and waiting >= limits.max_queued_requests:
        raise RequestError("The request queue is full.", status=503)
    params = message.sampling_params
    decoder = matcher = None
    if params.stop or params.stop_regex:
        # Stop strings are looked for in text: such a request is decoded here too, with the detokenizer's own class.
        if tokenizer is None:
            raise RequestError(
                "Stop strings need a tokenizer; this server runs with --skip-tokenizer-init.", param="stop"
            )
        context = message.input_ids[-CONTEXT_TOKENS:]
        decoder = IncrementalDecoder(
            tokenizer, context, params.skip_special_tokens, params.spaces_between_special_tokens
        )
        matcher = StopMatcher(params.stop, params.stop_regex)
    return Req(
        message,
        eos_ids=limits.eos_ids,
        max_new_tokens=limits.clip_max_new_tokens(length, params.max_new_tokens),
        decoder=decoder,
        stop_matcher=matcher,
    )
