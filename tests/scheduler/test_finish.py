"""When a request ends, why, and what of it is sent: the reference table of finish checks, and the streaming cadence.

The tokenizer's ids below 256 are bytes, 256 is the end token. A scripted model says given tokens one after the other.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.text.tiny_tokenizers import bytes_only
from tinysrt.bench.fake_model import FakeEngine, FakeModelRunner
from tinysrt.messages import FinishAbort, FinishLength, FinishReason, FinishStop
from tinysrt.model_executor.step_result import StepResult

EOS, PROMPT = 256, [80, 81, 82]


def scripted_engine(script: list[int], **flags: Any) -> FakeEngine:
    def next_token(ids: np.ndarray) -> int:
        at = len(ids) - len(PROMPT)
        return script[at] if at < len(script) else ord(".")

    settings: dict[str, Any] = {"disable_overlap_schedule": True, **flags}
    return FakeEngine(
        vocab_size=300, eos_ids=frozenset({EOS}), next_token=next_token, tokenizer=bytes_only(), **settings
    )


def run(
    text: str, tokens: list[int] | None = None, *, overlap: bool = False, **params: Any
) -> tuple[FinishReason, int]:
    """(finish reason, completion tokens) of a request whose model says `text`, then `tokens`."""
    engine = scripted_engine(list(text.encode()) + (tokens or []), disable_overlap_schedule=not overlap)
    engine.add("r", PROMPT, **{"max_new_tokens": 50, **params})
    engine.run()
    engine.close()
    meta = engine.outbox.outs["r"][-1].meta
    assert meta.finish is not None
    return meta.finish, meta.completion_tokens


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    ("text", "tokens", "params", "finish", "length"),
    [
        ("A", [EOS], {}, FinishStop(matched=EOS), 2),
        ("A", [EOS], {"ignore_eos": True, "max_new_tokens": 5}, FinishLength(length=5), 5),
        ("AB", [], {"stop_token_ids": [ord("B")]}, FinishStop(matched=ord("B")), 2),
        ("AB", [], {"stop_token_ids": [ord("B")], "ignore_eos": True, "max_new_tokens": 4}, FinishLength(length=4), 4),
        ("abX", [], {"stop": ["X"], "ignore_eos": True}, FinishStop(matched="X"), 3),
        ("A", [EOS], {"max_new_tokens": 2}, FinishStop(matched=EOS), 2),
        ("AB", [], {"max_new_tokens": 2}, FinishLength(length=2), 2),
        ("abX", [], {"stop": ["X"], "max_new_tokens": 3}, FinishStop(matched="X"), 3),
        ("ab STOP", [], {"stop": ["STOP"]}, FinishStop(matched="STOP"), 7),
        ("number 42!", [], {"stop_regex": [r"\d+!"]}, FinishStop(matched="42!"), 10),
        ("", [EOS], {}, FinishStop(matched=EOS), 1),
        ("ab", [], {"max_new_tokens": 0}, FinishLength(length=0), 0),
    ],
)
def test_finish_reason(
    text: str, tokens: list[int], params: dict[str, Any], finish: FinishReason, length: int, overlap: bool
) -> None:
    assert run(text, tokens, overlap=overlap, **params) == (finish, length)


@pytest.mark.parametrize("bad", [999, -1])
def test_a_token_outside_the_vocabulary_ends_its_own_request(bad: int) -> None:
    engine = scripted_engine([ord("a"), bad])
    engine.add("r", PROMPT, max_new_tokens=50)
    engine.run()
    assert engine.outbox.outs["r"][-1].meta.finish == FinishStop(matched="NaN happened")
    assert engine.output_ids("r") == [ord("a"), EOS], "an id that can be decoded stands in its place"
    assert engine.scheduler.memory.tree.evictable_size() == len(PROMPT), "KV that leads to NaN is not for sharing"


@pytest.mark.parametrize(
    ("stops", "matched", "start"),
    [
        (["M", "K"], "K", 3),
        (["K L M N", "L"], "L", 5),
        (["zzz", " L"], " L", 4),
        (["J K", "K"], "J K", 1),  # completed by the same token: the earlier start
        (["K", "K "], "K", 3),  # completed first, although the other is longer
    ],
)
def test_the_earliest_completed_stop_string_wins(stops: list[str], matched: str, start: int) -> None:
    engine = scripted_engine(list(b"IJ K L M N"))
    engine.add("r", PROMPT, max_new_tokens=50, stop=stops)
    engine.run()
    out = engine.outbox.outs["r"][-1]
    text = "IJ K L M N"
    assert out.meta.finish == FinishStop(matched=matched)
    assert out.stop_range is not None and text[slice(*out.stop_range)] == matched
    assert out.stop_range[0] == text.index(matched)


class SeveralTokens(FakeModelRunner):
    """Says its script in runs of several tokens per step, as speculation will."""

    runs: list[list[int]]

    def to_host(self, output: Any, batch: Any) -> StepResult:
        return StepResult(next_token_ids=[self.runs.pop(0)])


@pytest.mark.parametrize(
    ("runs", "params", "finish", "length"),
    [
        ([[ord("a")], [ord("X"), EOS]], {"stop": ["X"]}, FinishStop(matched="X"), 2),
        ([[ord("a")], [ord("b"), ord("c"), EOS]], {"max_new_tokens": 3}, FinishLength(length=3), 3),
        ([[ord("a")], [EOS, ord("z"), ord("z")]], {}, FinishStop(matched=EOS), 2),
    ],
)
def test_nothing_after_a_stop_is_kept_of_a_run_of_tokens(
    runs: list[list[int]], params: dict[str, Any], finish: FinishReason, length: int
) -> None:
    """Traps 33 and 71: the tokens of one step are looked at one by one."""
    engine = scripted_engine([])
    engine.runner.__class__ = SeveralTokens
    engine.runner.runs = runs  # type: ignore[attr-defined]
    engine.add("r", PROMPT, **{"max_new_tokens": 20, **params})
    engine.run(20)
    assert engine.outbox.outs["r"][-1].meta.finish == finish
    assert len(engine.output_ids("r")) == length


# ---- cadence ---------------------------------------------------------------------------------------


def chunks(engine: FakeEngine, rid: str = "r") -> list[int]:
    return [len(out.new_ids) for out in engine.outbox.outs[rid]]


def test_the_first_token_goes_at_once_then_every_interval() -> None:
    """Trap 37: at least `interval` unsent tokens, not a multiple of it."""
    engine = scripted_engine([], stream_interval=4)
    engine.add("r", PROMPT, max_new_tokens=11)
    engine.run()
    assert chunks(engine) == [1, 4, 4, 2]


def test_a_request_may_bring_its_own_interval() -> None:
    engine = scripted_engine([], stream_interval=4)
    engine.add("r", PROMPT, max_new_tokens=5, stream_interval=2)
    engine.run()
    assert chunks(engine) == [1, 2, 2]


def test_without_streaming_news_come_every_fifty_tokens() -> None:
    engine = scripted_engine([])
    engine.add("r", PROMPT, max_new_tokens=120, stream=False)
    engine.run()
    assert chunks(engine) == [50, 50, 20]


def test_what_may_become_a_stop_string_is_held_back() -> None:
    """Traps 36 and 79: sent text cannot be taken back, so "ST" waits until it is not "STOP"."""
    engine = scripted_engine(list(b"heSTx STOP"))
    engine.add("r", PROMPT, max_new_tokens=50, stop=["STOP"])
    engine.run()
    sent = [bytes(out.new_ids).decode() for out in engine.outbox.outs["r"]]
    assert sent == ["h", "e", "STx", " ", "STOP"]
    assert engine.outbox.outs["r"][-1].stop_range == (6, 10)


def test_the_context_comes_once_with_the_first_message() -> None:
    engine = scripted_engine([])
    engine.add("r", list(range(10, 20)), max_new_tokens=3)
    engine.run()
    assert [out.context_ids for out in engine.outbox.outs["r"]] == [[15, 16, 17, 18, 19], None, None]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("pattern", ["(a|aa)+$", "(a|a)*Q"])
def test_a_stop_regex_that_takes_too_long_ends_its_own_request_only(pattern: str, stream: bool) -> None:
    """The first takes for ever to be found; the second only when its beginning is searched, for holding text back."""
    engine = scripted_engine(list(b"a" * 60 + b"c" * 60))
    engine.add("r", PROMPT, max_new_tokens=100, stop_regex=[pattern + "."], stream=stream)
    engine.add("neighbor", PROMPT, max_new_tokens=100, stop=["none"])
    engine.run()
    finish = engine.outbox.outs["r"][-1].meta.finish
    assert isinstance(finish, FinishAbort) and finish.status_code == 400 and "too long" in finish.message
    assert engine.outbox.outs["neighbor"][-1].meta.finish == FinishLength(length=100)
