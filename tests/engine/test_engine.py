"""The Engine with real processes and sockets, but without a model (tests/engine/fakes.py plays the scheduler)."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from tests.engine import fakes
from tests.tokenizer_manager.fakes import MODEL_CONFIG, ByteTokenizer, ChatLines
from tinysrt import processes
from tinysrt.entrypoints import engine as engine_module
from tinysrt.entrypoints.engine import Engine
from tinysrt.errors import RequestError, StartupError
from tinysrt.managers.text_worker import TextWorker


@pytest.fixture(autouse=True, scope="module")
def no_model() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        launch_fakes(patch, fakes.scheduler)
        patch.setattr(engine_module.ModelConfig, "from_pretrained", lambda *args, **kwargs: MODEL_CONFIG)
        patch.setattr(TextWorker, "load", lambda args: TextWorker(ByteTokenizer(), ChatLines()))  # type: ignore[arg-type]
        yield


def launch_fakes(patch: pytest.MonkeyPatch, scheduler: processes.Entry) -> None:
    patch.setattr(engine_module, "launch", lambda args: processes.launch(args, scheduler, fakes.detokenizer))


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(model_path="fake", tp_size=1, log_level="warning") as engine:
        yield engine


def children() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if "resource_tracker" not in " ".join(child.cmdline())]


def test_one_prompt_gives_a_dict_and_a_list_gives_a_list(engine: Engine):
    answer = engine.generate("hello", {"max_new_tokens": 3})
    assert isinstance(answer, dict) and answer["text"] == "oll" and answer["output_ids"] == list(b"oll")
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 3}
    answers = engine.generate(["ab", "cd"], [{"max_new_tokens": 1}, {"max_new_tokens": 2}])
    assert [a["text"] for a in answers] == ["b", "dc"]
    assert engine.generate(["ab"])[0]["text"] == "ba"
    assert engine.generate(input_ids=list(b"xy"))["text"] == "yx"
    assert len(engine.generate("ab", {"n": 2})) == 2


def test_a_stream_is_an_iterator_of_growing_texts(engine: Engine):
    texts = [chunk["text"] for chunk in engine.generate("hello", stream=True)]
    assert texts[-1] == "olleh" and all(b.startswith(a) for a, b in zip(texts, texts[1:], strict=False))


def test_dropping_a_stream_aborts_the_request(engine: Engine):
    for chunk in engine.generate("slow", stream=True):
        assert chunk["text"]
        break
    del chunk
    wait_until(lambda: engine.get_server_info()["internal_states"] == [{"running": 0}])
    assert engine.flush_cache()


def test_a_bad_request_is_refused_and_the_next_one_works(engine: Engine):
    for bad in [
        lambda: engine.generate(),
        lambda: engine.generate(""),
        lambda: engine.generate("a", {"temperature": -1}),
        lambda: engine.generate("a", {"unknown": 1}),
        lambda: engine.generate(input_ids=["a"]),  # type: ignore[list-item]
        lambda: engine.generate("a", image_data="x"),
        lambda: list(engine.generate("", stream=True)),
    ]:
        with pytest.raises(RequestError):
            bad()
    with pytest.raises(TypeError, match="temperature"):
        engine.generate("a", temperature=1)
    assert engine.generate("ab")["text"] == "ba"


def test_abort_by_name_ends_a_request_with_the_text_so_far(engine: Engine):
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(engine.generate("slow", rid="r")))
    thread.start()
    wait_until(lambda: engine.get_server_info()["internal_states"] == [{"running": 1}])
    assert not engine.flush_cache()
    time.sleep(0.1)
    engine.abort_request("r")
    thread.join(5)
    assert answers[0]["meta_info"]["finish_reason"]["type"] == "abort" and answers[0]["text"].startswith("w")


def test_several_threads_share_one_engine(engine: Engine):
    answers: dict[int, str] = {}
    threads = [
        threading.Thread(target=lambda i=i: answers.update({i: engine.generate(f"{i:03}")["text"]})) for i in range(20)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert answers == {i: f"{i:03}"[::-1] for i in range(20)}


def test_it_works_where_a_loop_is_running_as_in_a_notebook(engine: Engine):
    async def cell() -> None:
        assert engine.generate("ab")["text"] == "ba"  # blocks this loop, as a notebook's cell does
        assert [chunk["text"] for chunk in engine.generate("a", stream=True)][-1] == "a"
        both = await asyncio.gather(engine.async_generate("ab"), engine.async_generate(["cd"]))
        assert (both[0]["text"], both[1][0]["text"]) == ("ba", "dc")
        stream = await engine.async_generate("hello", stream=True)
        assert [chunk["text"] async for chunk in stream][-1] == "olleh"
        with pytest.raises(RequestError):
            await engine.async_generate("a", {"top_p": 2})

    asyncio.run(cell())


def test_cancelling_an_async_request_aborts_it(engine: Engine):
    async def scenario() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(engine.async_generate("slow"), 0.2)

    asyncio.run(scenario())
    wait_until(lambda: engine.get_server_info()["internal_states"] == [{"running": 0}])


async def test_shutdown_leaves_nothing_and_may_be_called_twice():  # async: made where a loop runs, as in a notebook
    threads, others = threading.active_count(), children()
    engine = Engine(model_path="fake", log_level="warning")
    directory = engine._launched.ipc_names.directory
    running = [child for child in children() if child not in others]
    assert len(running) == 2 and os.path.isdir(directory)
    thread = threading.Thread(target=engine.generate, args=("slow",))
    thread.start()
    time.sleep(0.2)
    started = time.monotonic()
    engine.shutdown()
    engine.shutdown()
    assert time.monotonic() - started < 4  # said goodbye, not killed after the grace time
    thread.join(5)
    assert not thread.is_alive() and children() == others and not os.path.exists(directory)
    assert all(not process.is_running() for process in running)
    wait_until(lambda: threading.active_count() <= threads)
    with pytest.raises(RuntimeError, match="shut down"):
        engine.generate("a")


def test_a_dead_scheduler_is_told_to_everyone():
    with Engine(model_path="fake", log_level="warning") as engine:
        everyone_is_told(engine)


def everyone_is_told(engine: Engine) -> None:
    errors: list[Exception] = []

    def slow() -> None:
        try:
            engine.generate("slow")
        except RequestError as error:
            errors.append(error)

    thread = threading.Thread(target=slow)
    thread.start()
    time.sleep(0.2)
    with pytest.raises(RequestError, match="SIGKILL") as caught:
        engine.generate("die")
    assert caught.value.status == 503
    thread.join(5)
    assert errors
    with pytest.raises(RequestError, match="SIGKILL"):
        engine.generate("ab")


def test_a_failed_start_is_one_line_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch):
    others = children()
    launch_fakes(monkeypatch, fakes.broken_scheduler)
    with pytest.raises(StartupError, match="no such model"):
        Engine(model_path="fake", log_level="warning")
    assert children() == others
    with pytest.raises(StartupError, match="max_total_tokns"):
        Engine(model_path="fake", max_total_tokns=5)


def wait_until(condition: Any) -> None:
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
