"""The earliest completed match ends the text; what may be the start of one is not shown yet."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tinysrt.errors import RequestError
from tinysrt.text.stop import REGEX_BUDGET_S, REGEX_WINDOW, StopMatch, StopMatcher


def run(matcher: StopMatcher, tokens: list[str]) -> StopMatch | None:
    """Feed token by token, as the scheduler does; the first match ends it."""
    text = ""
    for token in tokens:
        text += token
        match = matcher.feed(text)
        if match is not None:
            assert text[match.start : match.end] == match.matched
            return match
    return None


ALPHABET = [f" {letter}" for letter in "HIJKLMNOP"]  # what the model says after " A B C D E F G"


@pytest.mark.parametrize(
    "stop, kept, matched",
    [
        (["M", "K"], " H I J ", "K"),
        (["K L M N", "L"], " H I J K ", "L"),  # the longer one starts earlier, but "L" is complete first
        (["zzz", " J"], " H I", " J"),
    ],
)
def test_fc07_the_earliest_completed_stop_wins(stop: list[str], kept: str, matched: str) -> None:
    match = run(StopMatcher(stop), ALPHABET)
    assert match is not None
    assert ("".join(ALPHABET)[: match.start], match.matched) == (kept, matched)


@pytest.mark.parametrize(
    "stop, text, expected",
    [
        (["B", "AB"], "xxAB", StopMatch(2, 4, "AB")),  # same token: the earliest start (SGLang says "B")
        (["AB", "ABC"], "xABCx", StopMatch(1, 4, "ABC")),  # same start: the longer
        (["X"], "aXbXc", StopMatch(1, 2, "X")),
        (["zz"], "abc", None),
    ],
)
def test_several_stops_completed_by_one_token(stop: list[str], text: str, expected: StopMatch | None) -> None:
    assert StopMatcher(stop).feed(text) == expected


def test_a_stop_that_spans_three_tokens_is_found() -> None:
    assert run(StopMatcher(["STOP"]), ["say S", "TO", "P!"]) == StopMatch(4, 8, "STOP")


def test_an_overlapping_beginning_does_not_hide_the_match() -> None:
    assert run(StopMatcher(["aab"]), list("aaab")) == StopMatch(1, 4, "aab")


@settings(deadline=None)
@given(
    tokens=st.lists(st.text("abX", max_size=4), max_size=12),
    stop=st.lists(st.text("abX", min_size=1, max_size=5), max_size=3),
)
def test_bounded_search_finds_what_a_full_search_finds(tokens: list[str], stop: list[str]) -> None:
    text, expected = "", None
    for token in tokens:
        text += token
        found = [(text.find(word), -len(word), word) for word in stop if word in text]
        if found:
            start, _, word = min(found)
            expected = StopMatch(start, start + len(word), word)
            break
    assert run(StopMatcher(stop), tokens) == expected


@settings(deadline=None)
@given(text=st.text("abX", max_size=30), stop=st.lists(st.text("abX", min_size=1, max_size=5), max_size=3))
def test_held_back_exactly_when_the_tail_begins_a_stop(text: str, stop: list[str]) -> None:
    expected = any(text.endswith(word[:size]) for word in stop for size in range(1, len(word)))
    assert StopMatcher(stop).ends_with_partial(text) == expected


def test_hold_back_of_13_4() -> None:
    matcher = StopMatcher(["STOP"])
    assert matcher.ends_with_partial("heST")
    assert not matcher.ends_with_partial("heSTx")


def test_a_half_character_at_the_end_is_searched_again_when_it_is_whole() -> None:
    """Even if a caller feeds pending text: "€" takes the place that U+FFFD held."""
    matcher = StopMatcher(["€"])
    assert matcher.feed("5 \ufffd") is None
    assert matcher.feed("5 €") == StopMatch(2, 3, "€")


# ---- regexes --------------------------------------------------------------------------------------


def test_a_regex_stops_and_names_the_text_it_matched() -> None:
    assert run(StopMatcher([], [r"\d{3}"]), ["a1", "2", "34"]) == StopMatch(1, 4, "123")


def test_strings_and_regexes_compete_by_position() -> None:
    assert StopMatcher(["c"], ["b+"]).feed("abbc") == StopMatch(1, 3, "bb")
    assert StopMatcher(["a"], ["b+"]).feed("abbc") == StopMatch(0, 1, "a")


def test_anchors_mean_the_whole_text_not_the_window() -> None:
    matcher = StopMatcher([], ["^b"])
    assert run(matcher, ["a" * 5000, "b"]) is None
    assert StopMatcher([], ["^b"]).feed("b") == StopMatch(0, 1, "b")


def test_a_regex_match_reaches_back_over_the_window_only() -> None:
    assert run(StopMatcher([], ["S.*E"]), ["S", "x" * (REGEX_WINDOW - 2), "E"]) is not None
    assert run(StopMatcher([], ["S.*E"]), ["S", "x" * REGEX_WINDOW, "x", "E"]) is None


def test_the_beginning_of_a_regex_match_is_held_back() -> None:
    matcher = StopMatcher([], [r"\n\n+END"])
    assert not matcher.ends_with_partial("text")
    assert matcher.ends_with_partial("text\n\nEN")
    assert not matcher.ends_with_partial("text\n\nENx")


def test_a_regex_that_backtracks_for_ever_ends_its_own_request() -> None:
    start = time.perf_counter()
    with pytest.raises(RequestError, match="too long"):
        StopMatcher([], [r"(a|aa)+$"]).feed("a" * 60 + "b")
    assert time.perf_counter() - start < 2


def test_regexes_that_are_slow_but_never_too_slow_share_a_budget() -> None:
    """A search just below the limit, after every token and 32 times over, would stand in everyone's way for minutes."""
    matcher = StopMatcher(stop_regex=["(?:a+)+[^a]"] * 32)
    started = time.perf_counter()
    with pytest.raises(RequestError, match="takes too long"):
        for length in range(50, 350):
            matcher.feed("a" * length)
            matcher.ends_with_partial("a" * length)
    assert time.perf_counter() - started < 2 * REGEX_BUDGET_S


def test_an_honest_regex_never_meets_the_budget_however_long_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tinysrt.text.stop.REGEX_BUDGET_S", 0.02)
    matcher, text = StopMatcher([], [r"\n\n+END", r"(?i)thank you.*bye\b"]), ""
    for _ in range(2000):
        text += "some text "
        assert matcher.feed(text) is None and not matcher.ends_with_partial(text)


def test_a_broken_regex_is_refused() -> None:
    with pytest.raises(RequestError, match="not a regular expression"):
        StopMatcher([], ["("])


def test_the_work_per_token_does_not_grow_with_the_text() -> None:
    matcher = StopMatcher(["never", "nowhere"], ["neverever"])
    text, times = "", []
    for _ in range(4):
        start = time.perf_counter()
        for _ in range(1000):
            text += "some text "
            assert matcher.feed(text) is None
            matcher.ends_with_partial(text)
        times.append(time.perf_counter() - start)
    assert times[-1] < 5 * times[0]
