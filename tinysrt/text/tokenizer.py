"""One tokenizer behind a small, strict interface: text ↔ ids, the same in every process.

The work is done by Hugging Face's `tokenizers`; this file decides the questions that cause the field's bugs:

- two beginning-of-sequence tokens: a text that already starts with one does not get a second (`encode`);
- control tokens typed by a user: `encode(..., parse_special=False)` reads their names as plain text;
- decoding: `decode` is the byte-exact rule of `token_bytes.py`, the same that `IncrementalDecoder` follows, so
  one decode of all ids *is* the joined stream; ids outside the vocabulary decode to nothing;
- raw bytes of a token, also of half a character (`token_bytes`).

Used by the TokenizerManager (encode), the Scheduler (stop strings) and the DetokenizerManager (text); each process
loads its own. SGLang: `utils/hf_transformers_utils.py::get_tokenizer`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from tinysrt.errors import RequestError, StartupError
from tinysrt.text.token_bytes import ByteStream, TokenBytes

if TYPE_CHECKING:
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as Backend

# Tokens that end a turn although no configuration names them: Llama 3's "end of message", before a tool answers.
_EXTRA_STOP_TOKENS = ["<|eom_id|>"]


class Tokenizer:
    """hf: the transformers object, for whatever this interface does not cover (chat templates)."""

    def __init__(self, hf: Any):
        self.hf = hf
        self.backend: Backend | None = hf.backend_tokenizer if hf.is_fast else None
        self.pieces: TokenBytes | None = None  # None: a decoder that is not plain joining of bytes
        # The control tokens: id → how the tokenizer treats it. "Special" as the decoder means it when it skips.
        self.special_tokens: dict[int, AddedToken] = {
            index: token for index, token in sorted(hf.added_tokens_decoder.items()) if token.special
        }
        self.special_ids = frozenset(self.special_tokens)
        if self.backend is not None:
            self.backend.no_truncation()  # a tokenizer.json may carry both, left over from training
            self.backend.no_padding()
            self.pieces = TokenBytes.of_backend(self.backend)
        self.vocab_size: int = len(hf)
        self.bos_token_id: int | None = hf.bos_token_id
        self.eos_token_id: int | None = hf.eos_token_id
        added = hf.get_added_vocab()
        self.extra_stop_ids = frozenset(added[name] for name in _EXTRA_STOP_TOKENS if name in added)
        self.adds_bos = self.bos_token_id is not None and self._encode("", True, True)[:1] == [self.bos_token_id]
        self._plain_backend: Backend | None = None

    @classmethod
    def load(cls, path: str, *, mode: str = "auto", trust_remote_code: bool = False) -> Tokenizer:
        """mode: `auto` takes the fast tokenizer where there is one, `slow` the Python one."""
        from transformers import AutoTokenizer  # seconds to import, and not needed with --skip-tokenizer-init

        try:
            hf = AutoTokenizer.from_pretrained(path, use_fast=mode != "slow", trust_remote_code=trust_remote_code)
        except Exception as error:  # a damaged file raises whatever its parser raises
            reason = str(error).strip().splitlines()
            raise StartupError(f"No usable tokenizer in {path}: {reason[0] if reason else error!r}") from error
        return cls(hf)

    @property
    def stop_ids(self) -> frozenset[int]:
        """Ids that end a turn by the tokenizer's own word; the model's configuration may name more."""
        return self.extra_stop_ids | ({self.eos_token_id} if self.eos_token_id is not None else frozenset())

    @property
    def all_special_ids(self) -> list[int]:
        return list(self.special_tokens)

    # ---- text → ids -------------------------------------------------------------------------------

    def encode(self, text: str, add_special_tokens: bool = True, *, parse_special: bool = True) -> list[int]:
        """add_special_tokens: as the model expects of raw text, but never a second beginning-of-sequence token.
        parse_special False: the name of a control token is read as the characters it is made of."""
        try:
            ids = self._encode(text, add_special_tokens, parse_special)
        except (TypeError, UnicodeEncodeError) as error:  # a lone surrogate is no text
            raise RequestError("The text is not valid Unicode: it holds half of a surrogate pair.") from error
        if add_special_tokens and self.adds_bos and ids[1:2] == [self.bos_token_id]:
            del ids[0]
        return ids

    def _encode(self, text: str, add_special_tokens: bool, parse_special: bool) -> list[int]:
        if self.backend is None:
            options = {} if parse_special else {"split_special_tokens": True}
            return list(self.hf.encode(text, add_special_tokens=add_special_tokens, **options))
        backend = self.backend if parse_special else self._without_special_parsing(self.backend)
        return backend.encode(text, add_special_tokens=add_special_tokens).ids

    def _without_special_parsing(self, backend: Backend) -> Backend:
        if self._plain_backend is None:
            # A copy: the switch is a property of the whole object, and other threads encode with it right now.
            copy = type(backend).from_str(backend.to_str())
            copy.encode_special_tokens = True
            self._plain_backend = copy
        return self._plain_backend

    def fewest_tokens(self, text: str) -> int:
        """No more than `encode` would give, without encoding: so that a text of megabytes can be refused at once.
        (Encoding takes a second and some 400 MB for each. Blanks that a control token swallows are not considered.)"""
        return len(text) // self._widest_token

    def beginning(self, text: str, tokens: int) -> str:
        """As much of a text as surely gives so many tokens; they are those of the whole but for the last word's."""
        return text[: tokens * self._widest_token]

    @cached_property
    def _widest_token(self) -> int:
        """Characters of text that one token may stand for."""
        # Elsewhere a single "unknown" may stand for any length.
        if self.backend is None or self.pieces is None or not self.pieces.rules.knows_every_byte:
            return sys.maxsize
        widest = max(map(len, self.backend.get_vocab(with_added_tokens=True)), default=1)
        # A normalizer may join characters (NFC makes one of up to four).
        return widest if self.backend.normalizer is None else 4 * widest

    # ---- ids → text -------------------------------------------------------------------------------

    def decode(
        self, ids: Iterable[int], skip_special_tokens: bool = True, spaces_between_special_tokens: bool = True
    ) -> str:
        """spaces_between_special_tokens: only slow tokenizers put spaces there; for the others it has no meaning."""
        if self.pieces is not None:
            stream = ByteStream(self.pieces.rules)
            kept = (index for index in ids if not (skip_special_tokens and index in self.special_ids))
            return "".join([stream.feed(self.pieces[index]) for index in kept]) + stream.finish()
        return self.hf.decode(
            [index for index in ids if 0 <= index < self.vocab_size],
            skip_special_tokens=skip_special_tokens,
            spaces_between_special_tokens=spaces_between_special_tokens,
            clean_up_tokenization_spaces=False,  # it rewrites spaces before punctuation: text sent would change
        )

    def decode_batch(
        self,
        batch: Sequence[Iterable[int]],
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> list[str]:
        return [self.decode(ids, skip_special_tokens, spaces_between_special_tokens) for ids in batch]

    def token_bytes(self, token_id: int) -> bytes:
        """The token's own bytes, also of half a character; a control token's are its name."""
        if self.pieces is not None:
            return self.pieces[token_id]
        return self.decode([token_id], skip_special_tokens=False).encode()

    def token_text(self, token_id: int) -> str:
        """The token alone as text: with its leading space, with U+FFFD for half a character."""
        return self.token_bytes(token_id).decode("utf-8", "replace")
