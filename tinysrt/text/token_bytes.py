"""A token is a byte string, not a character: what each id adds to the text, exactly.

Every tokenizer of the models we serve is one of two kinds, told apart by its *decoder* (the last part of a
`tokenizer.json`):

    byte-level (GPT-2, Llama 3, Qwen, SmolLM2)   each character of a token's name stands for one byte: "Ġthe" = b" the"
    pieces (Llama 2, Mistral, Gemma)             "▁the" = b" the"; "<0xE4>" is the one byte E4

For both the text of a token sequence is the UTF-8 reading of the joined bytes. That makes decoding step by step
exact and cheap: `ByteStream` feeds bytes to an incremental UTF-8 reader, which keeps back at most the three bytes
of an unfinished character. No window of tokens is ever decoded twice. (SGLang and vLLM decode a sliding window
twice and subtract; see `incremental.py` for the tokenizers that leave no other way.)

The one thing that is not plain joining is the *first* space: "▁Hello" at the start of a text reads "Hello".
"""

from __future__ import annotations

import codecs
import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

_BYTE_NAME = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_ESCAPED_BYTES = {0xDC80 + offset: "\ufffd" for offset in range(128)}  # what "surrogateescape" makes of a bad byte
_NO_LIMIT = 1 << 30


@dataclass(frozen=True)
class DecoderRules:
    """What a tokenizer's decoder does, read from its own description."""

    byte_level: bool
    word_mark: str | None = None  # the character that stands for a space, "▁"
    byte_fallback: bool = False  # "<0x41>" is a byte
    leading_spaces: int = 0  # how many spaces at the start of a text are dropped
    first_token_only: bool = False  # ... or rather every space of its first token

    @property
    def knows_every_byte(self) -> bool:
        """Any text can be written with these tokens, so none is left to an "unknown" of any length."""
        return self.byte_level or self.byte_fallback

    @classmethod
    def read(cls, decoder: dict[str, Any] | None) -> DecoderRules | None:
        """None: a decoder that is not plain joining of bytes."""
        if decoder is None:
            return None
        steps: list[dict[str, Any]] = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
        kinds = [step["type"] for step in steps]
        if kinds == ["ByteLevel"]:
            return cls(byte_level=True)
        rules: dict[str, Any] = {"byte_level": False}
        for step in steps:
            match step:
                case {"type": "Replace", "pattern": {"String": str(mark)}, "content": " "}:
                    rules["word_mark"] = mark
                case {"type": "Metaspace", "replacement": str(mark)}:
                    rules["word_mark"] = mark
                    if step.get("prepend_scheme", "always") != "never":
                        rules |= {"leading_spaces": _NO_LIMIT, "first_token_only": True}
                case {"type": "ByteFallback"}:
                    rules["byte_fallback"] = True
                case {"type": "Fuse"}:
                    pass
                case {"type": "Strip", "content": " ", "start": int(start), "stop": 0} if "Fuse" in kinds:
                    rules["leading_spaces"] = start
                case _:
                    return None
        return cls(**rules) if "word_mark" in rules else None


class TokenBytes:
    """id → bytes, for one fast tokenizer; looked up once per id, then kept."""

    def __init__(self, backend: Backend, rules: DecoderRules):
        self.backend = backend
        self.rules = rules
        self._known: dict[int, bytes] = {}
        self._byte_of_char = {char: byte for byte, char in enumerate(byte_level_alphabet())}

    @classmethod
    def of_backend(cls, backend: Backend) -> TokenBytes | None:
        description = None if backend.decoder is None else json.loads(backend.decoder.__getstate__())
        rules = DecoderRules.read(description)
        return None if rules is None else cls(backend, rules)

    def __getitem__(self, token_id: int) -> bytes:
        """The bytes of this id; of an id outside the vocabulary: none."""
        known = self._known.get(token_id)
        if known is None:
            name = self.backend.id_to_token(token_id) if 0 <= token_id < 1 << 32 else None
            known = b"" if name is None else self._bytes_of_name(name)
            if name is not None:  # strangers are not kept: there is no end of them
                self._known[token_id] = known
        return known

    def _bytes_of_name(self, name: str) -> bytes:
        rules = self.rules
        if rules.byte_level:
            # An added token may hold characters outside the alphabet: then its name is its text.
            if all(char in self._byte_of_char for char in name):
                return bytes(self._byte_of_char[char] for char in name)
            return name.encode()
        if rules.byte_fallback and _BYTE_NAME.fullmatch(name):
            return bytes([int(name[3:5], 16)])
        return name.replace(rules.word_mark or " ", " ").encode()


class ByteStream:
    """Bytes in, text out: each `feed` returns the characters that are now whole.

    context: the bytes that precede the text. They are never output, but they say two things: whether the text's
    first space is kept (it is, after other text), and which unfinished character the first bytes may complete.
    """

    def __init__(self, rules: DecoderRules, context: bytes = b""):
        # HF's byte fallback writes one U+FFFD for each bad *byte*, its byte-level decoder one for each bad
        # *sequence* (as Unicode recommends). Escaping bad bytes one by one gives us the former.
        self._escape = rules.byte_fallback
        self._reader = codecs.getincrementaldecoder("utf-8")("surrogateescape" if self._escape else "replace")
        self._spaces_to_drop = 0 if context else rules.leading_spaces
        self._first_token_only = rules.first_token_only
        self._started = False
        self._reader.decode(context[-3:].lstrip(_CONTINUATION_BYTES))  # it now holds an unfinished character, if any

    def feed(self, piece: bytes) -> str:
        if not piece:
            return ""  # an unknown id is no token, not even the first
        if self._spaces_to_drop:
            kept = piece.replace(b" ", b"") if self._first_token_only else _drop_spaces(piece, self._spaces_to_drop)
            self._spaces_to_drop = 0 if kept or self._first_token_only else self._spaces_to_drop - len(piece)
            piece = kept
        if not piece:
            return ""
        if not self._started:
            self._started = True
            if not 0x80 <= piece[0] < 0xC0:
                self._reader.reset()  # the prompt's half character stays half, and stays the prompt's
        return self._clean(self._reader.decode(piece))

    @property
    def pending(self) -> str:
        """What the held-back bytes would read as if nothing more came: "" or U+FFFD marks."""
        held = self._reader.getstate()[0] if self._started else b""
        return self._clean(held.decode("utf-8", "surrogateescape" if self._escape else "replace")) if held else ""

    def finish(self) -> str:
        last = self.pending
        self._reader.reset()
        return last

    def _clean(self, text: str) -> str:
        return text.translate(_ESCAPED_BYTES) if self._escape and not text.isascii() else text


_CONTINUATION_BYTES = bytes(range(0x80, 0xC0))


def _drop_spaces(piece: bytes, limit: int) -> bytes:
    spaces = len(piece) - len(piece.lstrip(b" "))
    return piece[min(spaces, limit) :]


def byte_level_alphabet() -> list[str]:
    """GPT-2's 256 printable stand-ins: printable Latin-1 bytes stand for themselves, the others get U+0100 and on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    stands_for = {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}
    return [stands_for[byte] for byte in range(256)]
