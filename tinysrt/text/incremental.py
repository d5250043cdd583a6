"""Text out of token ids, step by step, so that what was sent never has to be taken back.

    ids so far   [ "Hi", " ", F0 9F, 98 ]                      two bytes more would make a 😀
    text         H i ␣ �
                 ╰─ released ─╯ ╰ pending: may still change

Invariants (tests/text/test_incremental.py):
- `text[:released]` only grows, and never ends in half a character;
- after `finish()`, `text` is what one decode of all output ids gives, however the ids were cut into pushes;
- pending is bounded: three bytes, or eight tokens for a tokenizer whose decoder is not plain joining of bytes.

The same class runs in the Scheduler (where is the stop string?) and in the DetokenizerManager (what is the text?),
over the same ids, so both count the same characters.

SGLang decodes a window of tokens twice, with and without the new ones, and emits the difference once it does not
end in U+FFFD (`managers/detokenizer_manager.py`). Here that is only the way for tokenizers that offer no bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from tinysrt.text.token_bytes import ByteStream, TokenBytes
from tinysrt.text.tokenizer import Tokenizer

CONTEXT_TOKENS = 5  # how many prompt ids a decoder wants to see before the first output
MAX_PENDING_TOKENS = 8


class IncrementalDecoder:
    """One request's output text.

    context_ids: the last few ids of the prompt, context for the first output token and never output themselves.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        context_ids: Sequence[int] | None = None,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ):
        context = list(context_ids or [])
        self._source: _Source
        if tokenizer.pieces is not None:
            skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
            self._source = _ByteSource(tokenizer.pieces, context, skipped)
        else:
            self._source = _WindowSource(tokenizer, context, skip_special_tokens, spaces_between_special_tokens)

    def push(self, ids: Iterable[int]) -> None:
        self._source.push(ids)

    def finish(self) -> None:
        """Nothing more will come: what was pending is released as it reads."""
        self._source.finish()

    @property
    def text(self) -> str:
        """All of it, pending included. Only `text[:released]` is safe to show or to search."""
        return self._source.stable + self._source.pending

    @property
    def released(self) -> int:
        return len(self._source.stable)

    @property
    def released_text(self) -> str:
        return self._source.stable


class _Source(Protocol):
    stable: str
    pending: str

    def push(self, ids: Iterable[int]) -> None: ...
    def finish(self) -> None: ...


class _ByteSource:
    """Ids → bytes → whole characters. Constant work per token."""

    def __init__(self, pieces: TokenBytes, context_ids: list[int], skipped: frozenset[int]):
        self.pieces = pieces
        self.skipped = skipped
        self.stream = ByteStream(pieces.rules, b"".join(pieces[index] for index in context_ids if index not in skipped))
        self.stable = ""
        self.pending = ""

    def push(self, ids: Iterable[int]) -> None:
        self.stable += "".join([self.stream.feed(self.pieces[index]) for index in ids if index not in self.skipped])
        self.pending = self.stream.pending

    def finish(self) -> None:
        self.stable += self.stream.finish()
        self.pending = ""


class _WindowSource:
    """For decoders that are not plain joining of bytes (WordPiece, Python tokenizers).

        window  [ surrounding | new ]        new text = decode(window) - decode(surrounding)

    The surrounding ids are decoded only so that the spaces which depend on a left neighbor come out right. When
    the new text is whole, it is committed and its ids become the surrounding of the next ones.
    """

    def __init__(self, tokenizer: Tokenizer, context_ids: list[int], skip_special: bool, spaces_between: bool):
        self.tokenizer = tokenizer
        self.flags = (skip_special, spaces_between)
        self.window = context_ids
        self.surrounding = len(context_ids)
        self.committed = ""
        self.stable = ""
        self.pending = ""

    def push(self, ids: Iterable[int]) -> None:
        for index in ids:  # one by one: the text does not depend on how the ids were cut into pushes
            self.window.append(index)
            before = self.tokenizer.decode(self.window[: self.surrounding], *self.flags)
            new = self.tokenizer.decode(self.window, *self.flags)[len(before) :]
            whole = new != "" and not new.endswith("\ufffd")
            if whole or len(self.window) - self.surrounding >= MAX_PENDING_TOKENS:
                self.committed += new
                self.window = self.window[self.surrounding :]
                self.surrounding = len(self.window)
                self._release(self.committed, self.committed)
            else:
                # The front of "山c�" is sure already; only the mark at its end may become something else.
                self._release(self.committed + new.rstrip("\ufffd"), self.committed + new)

    def _release(self, sure: str, total: str) -> None:
        """The released part never shrinks and never changes, whatever the tokenizer says later."""
        self.stable += sure[len(self.stable) :]
        self.pending = total[len(self.stable) :]

    def finish(self) -> None:
        self.stable += self.pending
        self.pending = ""
