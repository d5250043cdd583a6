"""Text work beside the event loop: tokenizing, detokenizing, chat templates.

A prompt of a megabyte takes seconds to tokenize. On the loop, every stream of every client would stand still for it;
so whoever needs text turned into ids, or back, asks here and awaits
(test_long_texts_are_tokenized_beside_the_loop). Two threads, so that one huge prompt does not hold up all others.

SGLang tokenizes `/generate` on the loop and only renders chats in a thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from tinysrt.errors import RequestError
from tinysrt.server_args import ServerArgs
from tinysrt.text.chat_template import ChatTemplate, RenderedPrompt
from tinysrt.text.tokenizer import Tokenizer

T = TypeVar("T")


class TextWorker:
    """Both are None on a server without a tokenizer (`--skip-tokenizer-init`)."""

    def __init__(self, tokenizer: Tokenizer | None, chat_template: ChatTemplate | None):
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="text")

    @classmethod
    def load(cls, args: ServerArgs) -> TextWorker:
        if args.skip_tokenizer_init:
            return cls(None, None)
        path = str(args.tokenizer_path or args.model_path)
        tokenizer = Tokenizer.load(path, mode=args.tokenizer_mode, trust_remote_code=args.trust_remote_code)
        chat_template = ChatTemplate.load(
            tokenizer, path, chat_template=args.chat_template, hf_chat_template_name=args.hf_chat_template_name
        )
        return cls(tokenizer, chat_template)

    async def encode(self, texts: list[str], add_special_tokens: bool = True) -> list[list[int]]:
        tokenizer = self.require_tokenizer()
        return await self._in_thread(lambda: [tokenizer.encode(text, add_special_tokens) for text in texts])

    async def decode(self, ids: list[list[int]], skip_special_tokens: bool = True) -> list[str]:
        tokenizer = self.require_tokenizer()
        return await self._in_thread(lambda: tokenizer.decode_batch(ids, skip_special_tokens))

    async def render_chat(self, messages: list[dict[str, Any]], **options: Any) -> RenderedPrompt:
        """The chat as the model wants it. `options` as in ChatTemplate.render."""
        self.require_tokenizer()
        template = self.chat_template
        assert template is not None
        return await self._in_thread(lambda: template.render(messages, **options))

    def require_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            message = "This server runs without a tokenizer (--skip-tokenizer-init): send 'input_ids' to /generate."
            raise RequestError(message)
        return self.tokenizer

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)
