"""What happens to a step's tokens: append, score, check for the end, give KV back, tell the client.

    StepResult ─▶ BatchResultProcessor.process ─▶ per request: append_token → finish? → release KV
                                                └▶ OutputStreamer ─▶ BatchTokenIDOut ─▶ DetokenizerManager

A launched step is remembered as an `InFlight`: the requests as they were at launch. With overlap the world may have
moved on when its result arrives: a request that has ended meanwhile is skipped, and its extra token thrown away. (A
request cannot have been retracted meanwhile: the scheduler retracts only when nothing is in flight.)

Invariant: a request's final message is sent exactly once, by the transition that ends it.
Source: SGLang `managers/scheduler_output_processor_mixin.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tinysrt.errors import RequestError
from tinysrt.managers.request_life import Stage
from tinysrt.managers.schedule_batch import Req, ScheduleBatch
from tinysrt.managers.tp_worker import StepHandle
from tinysrt.mem_cache.prefix_cache import PrefixCache
from tinysrt.messages import (
    BatchTokenIDOut,
    FinishAbort,
    FinishLength,
    FinishReason,
    FinishStop,
    Logprobs,
    OutputMeta,
    TokenIDOut,
)
from tinysrt.model_executor.forward_batch_info import ForwardMode, LogprobSpec
from tinysrt.model_executor.step_result import StepResult
from tinysrt.observe.trace import Recorder
from tinysrt.text.incremental import CONTEXT_TOKENS
from tinysrt.text.stop import StopMatch

# A request that does not stream is still reported every so many tokens: the TokenizerManager notices a disconnect.
NON_STREAM_INTERVAL = 50
NAN_HAPPENED = FinishStop(matched="NaN happened")  # the sampler found no number in a row's logits


@dataclass(frozen=True)
class InFlight:
    """A launched step: its requests as they were at launch, and the handle of its forward."""

    step: int
    forward_mode: ForwardMode
    reqs: list[Req]
    is_middle_chunk: list[bool]  # the sampled token of a lane is garbage: its prompt goes on in a later chunk
    logprob: LogprobSpec | None
    handle: StepHandle

    @classmethod
    def of(
        cls, step: int, batch: ScheduleBatch, chunked: Req | None, logprob: LogprobSpec | None, handle: StepHandle
    ) -> InFlight:
        return cls(
            step=step,
            forward_mode=batch.forward_mode,
            reqs=list(batch.reqs),
            is_middle_chunk=[req is chunked for req in batch.reqs],
            logprob=logprob,
            handle=handle,
        )


class BatchResultProcessor:
    def __init__(
        self,
        *,
        tree: PrefixCache,
        streamer: OutputStreamer,
        vocab_size: int,
        nan_replacement_id: int,
        on_end: Callable[[Req], None],
        trace: Recorder,
        judge: Judge | None = None,
    ):
        self.tree = tree
        self.streamer = streamer
        self.vocab_size = vocab_size
        self.nan_replacement_id = nan_replacement_id
        self.on_end = on_end
        self.trace = trace
        self.judge = judge or judge_text

    def process(self, flight: InFlight, result: StepResult) -> int:
        """Apply the result of a launched step; returns how many tokens were appended."""
        touched: list[Req] = []
        appended = 0
        for lane, req in enumerate(flight.reqs):
            if req.is_over():
                continue
            if req.scores is not None and flight.forward_mode.is_extend():
                self._collect_input_scores(req, flight, result, lane)
            if flight.is_middle_chunk[lane]:
                continue
            if req.stage is Stage.PREFILLING:
                req.move_to(Stage.RUNNING)
            appended += self._append_tokens(req, result, lane)
            touched.append(req)
        self.streamer.send(touched)
        return appended

    def _append_tokens(self, req: Req, result: StepResult, lane: int) -> int:
        """Append a lane's tokens one by one until one of them ends the request; later ones are dropped."""
        if req.max_new_tokens == 0:  # prefill only: the sampled token was never asked for
            self.end(req, FinishLength(length=0))
            return 0
        for k, token in enumerate(result.next_token_ids[lane]):
            is_nan = not 0 <= token < self.vocab_size
            req.output_ids.append(self.nan_replacement_id if is_nan else token)
            if req.scores is not None:
                assert result.output_logprobs is not None
                scores = req.scores
                scores.output.append(result.output_logprobs[lane][k])
                scores.top.append(_pick(result.output_top, lane, k))
                scores.token_ids.append(_pick(result.output_token_ids, lane, k))
            if self.trace.on:
                self.trace.event("appended", rid=req.rid, token=token, output_len=len(req.output_ids))
            reason = NAN_HAPPENED if is_nan else finish_reason(req, token, self.judge)
            if reason is not None:
                self.end(req, reason)
                return k + 1
        return len(result.next_token_ids[lane])

    def end(self, req: Req, reason: FinishReason) -> None:
        """The one way out for a request that holds KV or has produced something: KV goes to the tree or the free
        list."""
        # A prompt that stopped half way in its chunks has published what it computed already. NaN is not for sharing.
        share = req.stage is Stage.RUNNING and reason != NAN_HAPPENED
        req.release_kv(self.tree, insert=share)
        req.end(reason)
        self.on_end(req)
        if self.trace.on:
            name = "aborted" if isinstance(reason, FinishAbort) else "finished"
            self.trace.event(name, rid=req.rid, reason=reason.to_json(), output_len=len(req.output_ids))

    def _collect_input_scores(self, req: Req, flight: InFlight, result: StepResult, lane: int) -> None:
        scores = req.scores
        assert scores is not None and flight.logprob is not None
        if not req.wants_input_logprobs or req.input_scores_complete():
            return
        if not scores.input:
            # Nothing precedes the first scored token; this entry keeps list and prompt aligned.
            scores.input.append((None, int(req.origin_input_ids[req.logprob_start_len])))
            scores.input_top.append(None)
            scores.input_ids.append(None)
        piece = result.input_scores[lane] if result.input_scores is not None else None
        if piece is None:
            return
        assert flight.logprob.input_targets is not None
        targets = flight.logprob.input_targets[lane]
        scores.input.extend(zip(piece.logprobs, targets, strict=True))
        scores.input_top.extend(piece.top or [None] * len(targets))
        scores.input_ids.extend(piece.token_ids or [None] * len(targets))


def _pick(
    lists: list[list[list[tuple[float, int]]] | None] | None, lane: int, k: int
) -> list[tuple[float, int]] | None:
    entry = lists[lane] if lists is not None else None
    return entry[k] if entry else None


@dataclass(frozen=True)
class TextVerdict:
    """What the text so far says about a request's end."""

    match: StopMatch | None = None
    held_back: bool = False  # the tail may yet become a stop string: sent text cannot be taken back
    abort: FinishAbort | None = None


Judge = Callable[[Req, int], TextVerdict]


def judge_text(req: Req, token: int) -> TextVerdict:
    """The decoder here is the detokenizer's own class fed with the same ids, so that both agree on every character
    position."""
    assert req.stop_matcher is not None and req.decoder is not None
    req.decoder.push([token])
    text = req.decoder.released_text
    try:
        match = req.stop_matcher.feed(text)
        return TextVerdict(match, held_back=match is None and req.stop_matcher.ends_with_partial(text))
    except RequestError as error:  # a stop regex that backtracks for too long ends its own request only
        return TextVerdict(abort=FinishAbort(error.message, error.status, "BadRequestError"))


def finish_reason(req: Req, token: int, judge: Judge = judge_text) -> FinishReason | None:
    """Does the token just appended end the request? Text beats token beats length.

    Strings come first so that a run of several tokens accepted in one step cannot leak text after a stop.
    """
    if req.stop_matcher is not None:
        verdict = judge(req, token)
        if verdict.abort is not None:
            return verdict.abort
        req.held_back = verdict.held_back
        if verdict.match is not None:
            req.stop_range = (verdict.match.start, verdict.match.end)
            return FinishStop(matched=verdict.match.matched)
    if token in req.stop_ids:
        return FinishStop(matched=token)
    if len(req.output_ids) >= req.max_new_tokens:
        return FinishLength(length=req.max_new_tokens)
    return None


class OutputStreamer:
    """Turns requests that have news into messages for the detokenizer, at the cadence the client asked for."""

    def __init__(
        self,
        send: Callable[[BatchTokenIDOut], None],
        notify_abort: Callable[[Req], None],
        interval: int,
        dp_rank: int | None = None,
    ):
        self._send = send
        self.dp_rank = dp_rank
        self._notify_abort = notify_abort
        self.interval = interval

    def send(self, reqs: list[Req]) -> None:
        outs = [self._message(req) for req in reqs if self._has_news(req)]
        if outs:
            self._send(BatchTokenIDOut(outs=outs))

    def send_abort(self, req: Req) -> None:
        """The last word on an aborted request. Where the detokenizer holds state for it, it goes that way, so that text
        and state end together; else straight to the TokenizerManager."""
        assert isinstance(req.finish, FinishAbort)
        if req.sent_to_detokenizer or req.output_ids:
            self._send(BatchTokenIDOut(outs=[self._message(req)]))
        else:
            self._notify_abort(req)

    def _has_news(self, req: Req) -> bool:
        if req.is_over():
            return True
        unsent = len(req.output_ids) - req.sent_tokens
        if req.stream:
            # "At least", not "a multiple of": a step may add several tokens. The first token goes at once.
            interval = req.params.stream_interval or self.interval
            due = unsent >= interval or (unsent > 0 and req.sent_tokens == 0)
        else:
            due = unsent >= NON_STREAM_INTERVAL
        return due and not req.held_back

    def _message(self, req: Req) -> TokenIDOut:
        first = not req.sent_to_detokenizer
        start = req.sent_tokens
        req.sent_to_detokenizer = True
        req.sent_tokens = len(req.output_ids)
        return TokenIDOut(
            meta=OutputMeta(
                rid=req.rid,
                batch_id=req.batch_id,
                reply_to=req.reply_to,
                finish=req.finish,
                prompt_tokens=req.prompt_len,
                completion_tokens=len(req.output_ids),
                cached_tokens=req.cached_tokens,
                num_retractions=req.num_retractions,
                logprobs=_new_logprobs(req, start),
                dp_rank=self.dp_rank,
            ),
            new_ids=req.output_ids[start:],
            context_ids=req.origin_input_ids[-CONTEXT_TOKENS:].tolist() if first else None,
            stop_range=req.stop_range,
            skip_special_tokens=req.params.skip_special_tokens,
            spaces_between_special_tokens=req.params.spaces_between_special_tokens,
            no_stop_trim=req.params.no_stop_trim,
        )


def _new_logprobs(req: Req, start: int) -> Logprobs | None:
    scores = req.scores
    if scores is None:
        return None
    news = Logprobs(output=scores.output[start:])
    if req.top_logprobs_num > 0:
        news.output_top = scores.top[start:]
    if req.token_ids_logprob is not None:
        news.output_ids = scores.token_ids[start:]
    if req.wants_input_logprobs and not scores.input_sent and req.input_scores_complete():
        scores.input_sent = True
        news.input = scores.input
        if req.top_logprobs_num > 0:
            news.input_top = scores.input_top
        if req.token_ids_logprob is not None:
            news.input_ids = scores.input_ids
    return news
