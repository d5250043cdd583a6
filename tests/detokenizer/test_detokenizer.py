"""The detokenizer as pure logic: messages in, text out. Table 13.3 of the reference, adapted to our messages."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.text import tiny_tokenizers
from tinysrt.managers.detokenizer_manager import DetokenizerManager
from tinysrt.messages import (
    BatchTokenIDOut,
    FinishAbort,
    FinishLength,
    FinishReason,
    FinishStop,
    OutputMeta,
    TokenIDOut,
)
from tinysrt.observe.trace import Recorder
from tinysrt.text.incremental import CONTEXT_TOKENS, IncrementalDecoder
from tinysrt.text.stop import StopMatcher
from tinysrt.text.tokenizer import Tokenizer

END = 256  # the special end token of the byte tokenizer
LENGTH = FinishLength(length=9)
TOKENIZER = tiny_tokenizers.bytes_only()
PROMPT = [*b"promp"]


def manager(trace: Recorder | None = None) -> DetokenizerManager:
    return DetokenizerManager(TOKENIZER, trace or Recorder("detokenizer"))


def out(
    new_ids: bytes | list[int],
    finish: FinishReason | None = None,
    *,
    rid: str = "a",
    context: list[int] | None = None,
    stop_range: tuple[int, int] | None = None,
    skip: bool = True,
    no_stop_trim: bool = False,
) -> TokenIDOut:
    meta = OutputMeta(
        rid=rid,
        batch_id=None,
        reply_to="ipc://test",
        finish=finish,
        prompt_tokens=5,
        completion_tokens=len(new_ids),
        cached_tokens=0,
        num_retractions=0,
    )
    return TokenIDOut(
        meta=meta,
        new_ids=[*new_ids],
        context_ids=context,
        stop_range=stop_range,
        skip_special_tokens=skip,
        no_stop_trim=no_stop_trim,
    )


def deltas(detokenizer: DetokenizerManager, *outs: TokenIDOut) -> list[str]:
    """One message each."""
    return [detokenizer.handle(BatchTokenIDOut(outs=[one])).outs[0].text for one in outs]


# ---- table 13.3 -----------------------------------------------------------------------------------

EURO = "€".encode()
STOP_TOKEN = FinishStop(matched=END)
STOP = FinishStop(matched="STOP")


@pytest.mark.parametrize(
    "outs, expected",
    [
        ([out(b"h", context=PROMPT), out(b"i"), out([END], STOP_TOKEN)], ["h", "i", ""]),
        ([out(b"ab " + EURO[:1], context=[]), out(EURO[1:2]), out(EURO[2:]), out(b"z", LENGTH)], ["ab ", "", "€", "z"]),
        # SGLang also holds the unfinished word "cd"; a word is whole as soon as its characters are.
        ([out(b"ab cd" + EURO[:1], context=[]), out(EURO[1:2], LENGTH)], ["ab cd", "\ufffd"]),
        ([out(b"hello STOP tail", STOP, context=[], stop_range=(6, 10))], ["hello "]),
        ([out(b"hello STOP tail", STOP, context=[], stop_range=(6, 10), no_stop_trim=True)], ["hello STOP"]),
        ([out(b"aXbXc", FinishStop(matched="X"), context=[], stop_range=(1, 2))], ["a"]),
        ([out(b"abST", context=[]), out(b"OP", STOP, stop_range=(2, 6))], ["abST", ""]),
        ([out([*b"ab", END], STOP_TOKEN, context=[], no_stop_trim=True, skip=False)], ["ab<end>"]),
        ([out([*b"ab", END], STOP_TOKEN, context=[], no_stop_trim=True)], ["ab"]),
        ([out([*b"ab", END], STOP_TOKEN, context=[], skip=False)], ["ab"]),
        ([out(b"abSTOP", FinishAbort(message="gone"), context=[])], ["abSTOP"]),
        ([out(b"hi", LENGTH, context=[99_999, -5, *b"p"])], ["hi"]),
        ([out([99_999, *b"hi", -5, 1 << 40], LENGTH, context=[])], ["hi"]),
    ],
)
def test_reference_table(outs: list[TokenIDOut], expected: list[str]) -> None:
    detokenizer = manager()
    assert deltas(detokenizer, *outs) == expected
    last = outs[-1].meta.finish
    assert bool(detokenizer.states) == (last is None)


def test_an_ordinary_token_as_stop_is_cut_as_a_token() -> None:
    """stop_token_ids may name any token: only that last one goes, not other text that reads alike."""
    detokenizer = manager()
    assert deltas(detokenizer, out(b"aXbX", FinishStop(matched=ord("X")), context=[])) == ["aXb"]


def test_the_ids_reach_the_client_whole() -> None:
    """Only text is trimmed: output_ids and completion_tokens count the stop token."""
    reply = manager().handle(BatchTokenIDOut(outs=[out([*b"ab", END], STOP_TOKEN, context=[])])).outs[0]
    assert reply.new_ids == [*b"ab", END]
    assert reply.meta.completion_tokens == 3


def test_fc06_a_special_stop_token_does_not_cut_the_text_before_it() -> None:
    for skip in (True, False):
        assert deltas(manager(), out([*b"harm or injury.", END], STOP_TOKEN, context=[], skip=skip)) == [
            "harm or injury."
        ]


# ---- the life of a state --------------------------------------------------------------------------


@pytest.mark.parametrize("finish", [LENGTH, STOP_TOKEN, STOP, FinishAbort(message="client left", status_code=None)])
def test_a_state_ends_with_its_request_however_that_ends(finish: FinishReason) -> None:
    detokenizer = manager()
    deltas(detokenizer, out(b"a", context=[]), out(b"b", finish))
    assert detokenizer.states == {}
    deltas(detokenizer, out([], finish, rid="ended before its first token", context=[]))
    assert detokenizer.states == {}


def test_fc04_a_rid_used_again_begins_anew() -> None:
    detokenizer = manager()
    first = deltas(detokenizer, out(b"one" + EURO[:2], context=[]), out(b"", LENGTH))
    second = deltas(detokenizer, out(b"two", context=PROMPT), out(b"!", LENGTH))
    assert (first, second) == (["one", "\ufffd"], ["two", "!"])
    # Even if the first never finished: a first message brings its context and replaces what is there.
    deltas(detokenizer, out(b"left behind" + EURO[:1], rid="b", context=[]))
    assert deltas(detokenizer, out(b"new", LENGTH, rid="b", context=[])) == ["new"]


def test_fc04_a_thousand_live_requests_lose_and_mix_nothing() -> None:
    detokenizer = manager()
    rids = [str(number) for number in range(1000)]
    for part in (b"he", EURO[:2], EURO[2:] + b"!"):
        batch = [out(part + rid.encode(), rid=rid, context=[] if part == b"he" else None) for rid in rids]
        text = [one.text for one in detokenizer.handle(BatchTokenIDOut(outs=batch)).outs]
    # Bytes between the halves of a character break it: both halves are shown broken, and no neighbor's text appears.
    assert text == [f"\ufffd!{rid}" for rid in rids]
    final = detokenizer.handle(BatchTokenIDOut(outs=[out(b"", LENGTH, rid=rid) for rid in rids]))
    assert [one.meta.rid for one in final.outs] == rids
    assert detokenizer.states == {}


def test_a_hundred_thousand_aborted_requests_leave_nothing() -> None:
    detokenizer = manager()
    gone = FinishAbort(message="gone")
    for number in range(100_000):
        rid = str(number)
        detokenizer.handle(BatchTokenIDOut(outs=[out(b"x", rid=rid, context=[]), out(b"", gone, rid=rid)]))
    assert detokenizer.states == {}


# ---- the law --------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=100)
@given(
    texts=st.lists(st.binary(max_size=12) | st.text("ab€😀XYé ", max_size=12).map(str.encode), min_size=1, max_size=4),
    stop=st.lists(st.sampled_from(["XY", "Y", "€", "aX", " "]), max_size=2),
    sizes=st.lists(st.integers(0, 3), min_size=1, max_size=5),
    no_stop_trim=st.booleans(),
)
def test_interleaved_requests_each_get_one_decode_cut_at_the_stop(
    texts: list[bytes], stop: list[str], sizes: list[int], no_stop_trim: bool
) -> None:
    """Against a small scheduler: it searches stops token by token with the same decoder, holds back a tail that
    may become one, and sends in pieces of any size."""
    detokenizer = manager()
    joined: dict[str, str] = {}
    expected: dict[str, str] = {}
    streams = {}
    for number, data in enumerate(texts):
        rid = str(number)
        outs, kept = _schedule(rid, [*data], stop, sizes, no_stop_trim)
        streams[rid], expected[rid], joined[rid] = iter(outs), kept, ""
    while streams:
        for rid, stream in list(streams.items()):
            one = next(stream, None)
            if one is None:
                del streams[rid]
                continue
            joined[rid] += detokenizer.handle(BatchTokenIDOut(outs=[one])).outs[0].text
            if one.meta.finish is None:
                assert expected[rid].startswith(joined[rid])
    assert joined == expected
    assert detokenizer.states == {}


def _schedule(
    rid: str, ids: list[int], stop: list[str], sizes: list[int], no_stop_trim: bool
) -> tuple[list[TokenIDOut], str]:
    decoder, matcher = IncrementalDecoder(TOKENIZER, PROMPT[-CONTEXT_TOKENS:]), StopMatcher(stop)
    outs: list[TokenIDOut] = []
    unsent: list[int] = []
    done: list[int] = []
    context: list[int] | None = PROMPT
    for step, index in enumerate(ids):
        decoder.push([index])
        unsent.append(index)
        done.append(index)
        match = matcher.feed(decoder.released_text)
        if match is not None:
            finish = FinishStop(matched=match.matched)
            place = (match.start, match.end)
            outs.append(out(unsent, finish, rid=rid, context=context, stop_range=place, no_stop_trim=no_stop_trim))
            return outs, TOKENIZER.decode(done)[: match.end if no_stop_trim else match.start]
        if len(unsent) > sizes[step % len(sizes)] and not matcher.ends_with_partial(decoder.released_text):
            outs.append(out(unsent, rid=rid, context=context, no_stop_trim=no_stop_trim))
            unsent, context = [], None
    outs.append(out(unsent, LENGTH, rid=rid, context=context, no_stop_trim=no_stop_trim))
    return outs, TOKENIZER.decode(done)


def test_trap_36_half_a_stop_is_never_shown() -> None:
    outs, kept = _schedule("a", [*b"so ...END"], ["END"], [0], False)
    shown = deltas(manager(), *outs)
    assert "".join(shown) == kept == "so ..."
    assert not any("E" in delta for delta in shown)


def test_one_message_for_many_requests_keeps_their_order() -> None:
    batch = BatchTokenIDOut(outs=[out(rid.encode(), rid=rid, context=[]) for rid in "zya"])
    assert [(one.meta.rid, one.text) for one in manager().handle(batch).outs] == [("z", "z"), ("y", "y"), ("a", "a")]


def test_each_message_is_one_trace_event(tmp_path: Path) -> None:
    trace = Recorder("detokenizer", str(tmp_path))
    deltas(manager(trace), out(b"h" + EURO[:1], context=[]), out(EURO[1:], LENGTH))
    trace.close()
    lines = [json.loads(line) for line in trace.path.read_text().splitlines()[1:]]
    events = [{key: line[key] for key in ("e", "rid", "tokens", "chars", "finished")} for line in lines]
    assert events == [
        {"e": "detokenized", "rid": "a", "tokens": 2, "chars": 1, "finished": False},
        {"e": "detokenized", "rid": "a", "tokens": 2, "chars": 1, "finished": True},
    ]


def test_a_slow_tokenizer_streams_by_windows() -> None:
    tokenizer: Tokenizer = tiny_tokenizers.words()
    detokenizer = DetokenizerManager(tokenizer, Recorder("detokenizer"))
    ids = tokenizer.encode("hello worlds playing good morning !", add_special_tokens=False)
    outs = [out([index], context=[] if n == 0 else None) for n, index in enumerate(ids)]
    assert "".join(deltas(detokenizer, *outs, out([], LENGTH))) == tokenizer.decode(ids)
