"""Engine: the whole runtime as a Python object, without HTTP.

    caller's thread or loop            background thread "tinysrt-engine"           child processes
    generate / async_generate  ──▶  event loop: TokenizerManager  ◀── ZMQ ──▶  scheduler, detokenizer

The TokenizerManager needs an asyncio loop of its own that runs all the time. The caller's will not do: a script has
none, and a notebook's is busy running the cell that waits for the answer. So the Engine keeps one in a background
thread and hands coroutines over to it; that is why `generate` works in a script, in a notebook and inside a web
server alike, and from several threads at once.

    with Engine(model_path="…") as engine:
        engine.generate("The capital of France is", {"temperature": 0})["text"]

Children are spawned: a script must guard its start with `if __name__ == "__main__":`, as always with
`multiprocessing`. Invariant: after `shutdown` (which leaving the `with` block and interpreter exit call too) no
thread, process or socket is left.

SGLang: `entrypoints/engine.py`, which borrows the caller's loop and needs nest_asyncio in a notebook.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Generator, Iterator
from contextlib import aclosing
from typing import Any, TypeVar

from tinysrt.entrypoints.body import convert
from tinysrt.errors import RequestError, StartupError
from tinysrt.managers.generate_request import GenerateReqInput, refuse_unsupported_fields
from tinysrt.managers.server_control import ServerStatus
from tinysrt.managers.tokenizer_manager import TokenizerManager
from tinysrt.messages import ShutdownReq
from tinysrt.model_executor.model_config import ModelConfig
from tinysrt.observe.trace import Recorder
from tinysrt.processes import launch, prepare
from tinysrt.server_args import ServerArgs

logger = logging.getLogger(__name__)

T = TypeVar("T")
CHILDREN_GRACE_S = 5.0  # for children that were told to end
_END: Any = object()  # what a stream's last `anext` gives


class Engine:
    def __init__(self, *, server_args: ServerArgs | None = None, **flags: Any):
        """`flags`: any field of ServerArgs, in our names or SGLang's (`tp_size`). Returns when the model is loaded."""
        asked = server_args or ServerArgs.from_kwargs(**flags)
        if asked.node_rank > 0:
            raise StartupError(f"node 0 answers; start node {asked.node_rank} with `tinysrt serve` and the same flags")
        args = prepare(asked)
        self.server_args = args
        self._launched = launch(args)
        self._closed = False
        self._tokenizer_manager: TokenizerManager | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="tinysrt-engine", daemon=True)
        self._thread.start()
        atexit.register(self.shutdown)
        try:
            model_config = ModelConfig.of_server(args)
            trace = Recorder("tokenizer", args.trace_dir)
            manager = TokenizerManager(args, self._launched.ipc_names, model_config=model_config, trace=trace)
            self._tokenizer_manager = manager
            manager.control.scheduler_info = self._launched.wait_ready()
            manager.control.status = ServerStatus.UP
            manager.on_fatal = self._child_died
            self._run(_call(manager.start))
            self._launched.watch(self._child_died)
        except BaseException:
            self.shutdown()
            raise

    # ---- generate ------------------------------------------------------------------------------------

    def generate(
        self,
        prompt: str | list[str] | None = None,
        sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None,
        input_ids: list[int] | list[list[int]] | None = None,
        *,
        stream: bool = False,
        **fields: Any,
    ) -> dict[str, Any] | list[dict[str, Any]] | Iterator[dict[str, Any]]:
        """Run one prompt (the answer is a dict: `text`, `output_ids`, `meta_info`) or a list (a list of dicts).

        With `stream` an iterator of dicts, each with the text so far; dropping it aborts the request. `fields`: any
        other field of `/generate` (`return_logprob`, `rid`, …). A RequestError says what is wrong with a request.
        """
        asked = _request(prompt, sampling_params, input_ids, stream, fields)
        answers = self.tokenizer_manager.generate_request(asked)
        return self._stream(answers) if stream else self._run(_whole(answers))

    async def async_generate(
        self,
        prompt: str | list[str] | None = None,
        sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None,
        input_ids: list[int] | list[list[int]] | None = None,
        *,
        stream: bool = False,
        **fields: Any,
    ) -> dict[str, Any] | list[dict[str, Any]] | AsyncIterator[dict[str, Any]]:
        """The same without blocking the caller's loop; `async for chunk in await engine.async_generate(…)`."""
        asked = _request(prompt, sampling_params, input_ids, stream, fields)
        answers = self.tokenizer_manager.generate_request(asked)
        return self._async_stream(answers) if stream else await self._await(_whole(answers))

    def _stream(self, answers: AsyncGenerator[Any, None]) -> Generator[dict[str, Any], None, None]:
        try:
            while (answer := self._run(_next(answers))) is not _END:
                yield answer
        finally:
            if not self._closed:
                self._run(answers.aclose())

    async def _async_stream(self, answers: AsyncGenerator[Any, None]) -> AsyncGenerator[dict[str, Any], None]:
        try:
            while (answer := await self._await(_next(answers))) is not _END:
                yield answer
        finally:
            if not self._closed:
                await self._await(answers.aclose())

    # ---- the rest of what a server offers --------------------------------------------------------------

    def abort_request(self, rid: str = "", abort_all: bool = False) -> None:
        self._run(_call(lambda: self.tokenizer_manager.abort_request(rid, abort_all)))

    def flush_cache(self) -> bool:
        """Empty the prefix cache; False while requests run."""
        return self._run(self.tokenizer_manager.control.flush_cache()).success

    def get_server_info(self) -> dict[str, Any]:
        return self._run(self.tokenizer_manager.control.server_info())

    @property
    def tokenizer_manager(self) -> TokenizerManager:
        if self._closed or self._tokenizer_manager is None:
            raise RuntimeError("this Engine has been shut down")
        return self._tokenizer_manager

    # ---- the end ---------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """End requests, processes and the background thread. Calling it again does nothing."""
        if self._closed:
            return
        manager, grace = self._tokenizer_manager, 0.0
        if manager is not None:
            try:
                self._run(manager.drain(0.0))
                self._run(_call(lambda: manager.send(ShutdownReq())))
                grace = CHILDREN_GRACE_S
            except RequestError:
                pass  # the scheduler is gone already: nothing to wait for
            self._run(_call(manager.close))
        self._closed = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._launched.stop(grace)
        atexit.unregister(self.shutdown)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.shutdown()

    def _child_died(self, message: str) -> None:
        if self._tokenizer_manager is not None:
            self._tokenizer_manager.handle_child_death(f"The engine has failed: {message}.")

    # ---- crossing over to the background loop ----------------------------------------------------------

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # Ctrl-C while waiting: the request must not go on without a reader
            raise

    async def _await(self, work: Coroutine[Any, Any, T]) -> T:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))


def _request(
    prompt: Any, sampling_params: Any, input_ids: Any, stream: bool, fields: dict[str, Any]
) -> GenerateReqInput:
    refuse_unsupported_fields(fields)
    unknown = [name for name in fields if name not in GenerateReqInput.__struct_fields__]
    if unknown:
        raise TypeError(f"generate() does not know the argument {unknown[0]!r}")
    fields = fields | {"text": prompt, "sampling_params": sampling_params, "input_ids": input_ids, "stream": stream}
    return convert(fields, GenerateReqInput)


async def _call(function: Any) -> None:
    function()


async def _whole(answers: AsyncGenerator[Any, None]) -> Any:
    async with aclosing(answers):
        return await anext(answers)


async def _next(answers: AsyncGenerator[Any, None]) -> Any:
    return await anext(answers, _END)
