"""Where does the text end? Stop strings and stop regexes, searched as the text grows.

The rule: the earliest *completed* match wins, because generation ends with the token that completes it. When one
token completes several, the one that starts first; of those the longer.

    text so far   "... H I J K "        stop = ["K L M N", "L"]
    next token    "L"                   completes "L" (the longer string starts earlier, but is not complete)

Invariant: the work per token is bounded. A stop string of n characters can only end in the new characters, so the
search begins n - 1 characters before them; a regex is searched in the last `REGEX_WINDOW` characters, which is
therefore the longest match it can have, and all regexes of a request share one budget of time. `^` and look-behind
still see the whole text.

`ends_with_partial` is for streaming: text that may be the beginning of a stop must not be sent yet, for it cannot
be taken back. The scheduler calls both, once per token, on `IncrementalDecoder.released_text`.

SGLang 0.5.23 takes the first stop string in list order, and decodes a tail of tokens again for each check.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import regex

from tinysrt.errors import RequestError

REGEX_WINDOW = 1024  # characters
# Searching stops the whole scheduler, so a pattern that backtracks ends its own request: after so long in one search,
REGEX_TIMEOUT_S = 0.1
REGEX_BUDGET_S = (
    2.0  # or in all searches of a request, beside what each token may take. Honest patterns need some 50 µs
)
REGEX_BUDGET_PER_TOKEN_S = 0.001  # a token; it is the thread's own time, since a forward may run at the same time.


@dataclass(frozen=True)
class StopMatch:
    start: int  # [start, end) in characters of the whole output text
    end: int
    matched: str  # the stop string, or the text that the regex matched


class StopMatcher:
    """One request's stops. `feed` once per token: what a token completes is decided when it comes."""

    def __init__(self, stop: Sequence[str] = (), stop_regex: Sequence[str] = ()):
        self.stop = [text for text in stop if text]
        self.patterns = [_compile(pattern) for pattern in stop_regex]
        self._longest = max(map(len, self.stop), default=0)
        self._seen = 0  # characters searched before, without those that were still pending then
        self._budget = REGEX_BUDGET_S  # seconds that its regexes may still take

    def __bool__(self) -> bool:
        return bool(self.stop or self.patterns)

    def feed(self, text: str) -> StopMatch | None:
        """text: the whole output so far."""
        matches = []
        begin = max(0, self._seen - self._longest + 1)
        for stop in self.stop:
            start = text.find(stop, begin)
            if start >= 0:
                matches.append(StopMatch(start, start + len(stop), stop))
        begin = max(0, self._seen - REGEX_WINDOW)
        self._budget += REGEX_BUDGET_PER_TOKEN_S
        for pattern in self.patterns:
            found = self._search(pattern, text, begin)
            if found is not None:
                matches.append(StopMatch(found.start(), found.end(), found.group()))
        # U+FFFD at the end may be half a character that becomes a whole one: look at its place again next time.
        tail = text[-8:]
        self._seen = len(text) - (len(tail) - len(tail.rstrip("\ufffd")))
        return min(matches, key=lambda match: (match.start, -match.end), default=None)

    def ends_with_partial(self, text: str) -> bool:
        """Does the text end in the beginning of a stop?"""
        for stop in self.stop:
            tail = text[-(len(stop) - 1) :] if len(stop) > 1 else ""
            at = tail.find(stop[0])
            while at >= 0:
                if stop.startswith(tail[at:]):
                    return True
                at = tail.find(stop[0], at + 1)
        for pattern in self.patterns:
            found = self._search(pattern, text, max(0, len(text) - REGEX_WINDOW), partial=True)
            if found is not None and found.partial and found.end() > found.start():
                return True
        return False

    def _search(
        self, pattern: regex.Pattern[str], text: str, begin: int, partial: bool = False
    ) -> regex.Match[str] | None:
        started = time.thread_time()
        try:
            if self._budget <= 0:
                raise TimeoutError
            return pattern.search(text, begin, partial=partial, timeout=min(REGEX_TIMEOUT_S, self._budget))
        except TimeoutError as error:
            message = f"stop_regex {pattern.pattern!r} takes too long to search: use a simpler pattern."
            raise RequestError(message, param="stop_regex") from error
        finally:
            self._budget -= time.thread_time() - started


def _compile(pattern: str) -> regex.Pattern[str]:
    try:
        return regex.compile(pattern)
    except regex.error as error:
        raise RequestError(
            f"stop_regex {pattern!r} is not a regular expression: {error}", param="stop_regex"
        ) from error
