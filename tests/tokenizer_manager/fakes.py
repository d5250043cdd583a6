"""A scheduler played by the test, at the other end of the TokenizerManager's real sockets."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, TypeVar

import zmq
import zmq.asyncio

from tinysrt.ipc import AsyncReceiver, IpcNames, Sender
from tinysrt.managers.server_control import ServerStatus
from tinysrt.managers.text_worker import TextWorker
from tinysrt.managers.tokenizer_manager import TokenizerManager
from tinysrt.messages import (
    BatchStrOut,
    FinishLength,
    FinishReason,
    Logprobs,
    Message,
    OutputMeta,
    StrOut,
    TokenizedGenerateReqInput,
    ToScheduler,
)
from tinysrt.observe.trace import Recorder
from tinysrt.server_args import ServerArgs

T = TypeVar("T", bound=Message)
VOCAB, CONTEXT = 300, 64


class ByteTokenizer:
    """Token i < 256 is the byte i. No BOS: an empty text is no token."""

    vocab_size = VOCAB

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        if text == "crash":
            raise RuntimeError("a bug in the tokenizer")
        return list(text.encode())

    def fewest_tokens(self, text: str) -> int:
        return len(text) // 4

    def beginning(self, text: str, tokens: int) -> str:
        return text[: 4 * tokens]

    def decode_batch(self, batch: list[list[int]], skip_special_tokens: bool = True) -> list[str]:
        return [bytes(i for i in ids if i < 256).decode(errors="replace") for ids in batch]

    def token_text(self, token_id: int) -> str:
        return self.decode_batch([[token_id]])[0]


class ChatLines:
    """A chat template: one line a message."""

    def render(self, messages: list[dict[str, Any]], **options: Any) -> Any:
        text = "".join(f"{m['role']}: {m['content']}\n" for m in messages)
        return SimpleNamespace(text=text, input_ids=list(text.encode()))


MODEL_CONFIG: Any = SimpleNamespace(
    vocab_size=VOCAB,
    context_len=CONTEXT,
    num_heads=1,
    num_kv_heads=1,
    num_layers=1,
    model_type="fake",
    architectures=["FakeForCausalLM"],
    generation_defaults={"temperature": 0.6, "top_k": 0},
)


class FakeScheduler:
    def __init__(self, names: IpcNames):
        self.context = zmq.asyncio.Context()
        self.receiver: AsyncReceiver[Message] = AsyncReceiver(self.context, names.scheduler_input, ToScheduler)
        self.sender = Sender(self.context, names.tokenizer_input)
        self.texts: dict[str, int] = {}  # rid → output tokens so far

    async def receive(self, kind: type[T]) -> T:
        message = await asyncio.wait_for(self.receiver.receive(), 5)
        assert isinstance(message, kind), message
        return message

    async def requests(self, count: int) -> list[TokenizedGenerateReqInput]:
        return [await self.receive(TokenizedGenerateReqInput) for _ in range(count)]

    async def nothing(self, seconds: float = 0.1) -> bool:
        return await self.receiver.socket.poll(seconds * 1000) == 0

    def send(self, message: Message) -> None:
        self.sender.send(message)

    def out(
        self,
        request: TokenizedGenerateReqInput,
        text: str,
        finish: FinishReason | None = None,
        logprobs: Logprobs | None = None,
    ) -> StrOut:
        ids = list(text.encode())
        done = self.texts[request.rid] = self.texts.get(request.rid, 0) + len(ids)
        meta = OutputMeta(
            rid=request.rid,
            batch_id=request.batch_id,
            reply_to=request.reply_to,
            finish=finish,
            prompt_tokens=len(request.input_ids),
            completion_tokens=done,
            cached_tokens=3,
            num_retractions=0,
            logprobs=logprobs,
        )
        return StrOut(meta=meta, text=text, new_ids=ids)

    def say(self, request: TokenizedGenerateReqInput, text: str, finish: FinishReason | None = None) -> None:
        self.send(BatchStrOut(outs=[self.out(request, text, finish)]))

    def finish(self, request: TokenizedGenerateReqInput, text: str) -> None:
        self.say(request, text, FinishLength(length=len(text)))

    def close(self) -> None:
        self.sender.close()
        self.receiver.close()
        self.context.term()


@contextlib.asynccontextmanager
async def manager_and_scheduler(**flags: Any) -> AsyncIterator[tuple[TokenizerManager, FakeScheduler]]:
    server_args = ServerArgs(model_path="fake", served_model_name="fake", random_seed=7, **flags)
    text = TextWorker(None, None) if server_args.skip_tokenizer_init else TextWorker(ByteTokenizer(), ChatLines())  # type: ignore[arg-type]
    names = IpcNames.create()
    manager = TokenizerManager(server_args, names, model_config=MODEL_CONFIG, trace=Recorder("tokenizer"), text=text)
    manager.control.status = ServerStatus.UP
    manager.start()
    scheduler = FakeScheduler(names)
    try:
        yield manager, scheduler
    finally:
        manager.close()
        scheduler.close()
        names.remove()


async def collect(answers: AsyncIterator[Any]) -> list[Any]:
    return [answer async for answer in answers]


def start(answers: AsyncIterator[Any]) -> asyncio.Task[list[Any]]:
    return asyncio.ensure_future(collect(answers))
