"""The native door over real HTTP, in front of a real TokenizerManager and a scheduler that the test plays."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import uvicorn

from tests.tokenizer_manager.fakes import CONTEXT, VOCAB, FakeScheduler, manager_and_scheduler
from tinysrt.entrypoints.http_server import build_app
from tinysrt.managers.server_control import ServerStatus
from tinysrt.managers.tokenizer_manager import TokenizerManager
from tinysrt.messages import (
    AbortReq,
    ContinueGenerationReqInput,
    ContinueGenerationReqOutput,
    FinishAbort,
    FlushCacheReqInput,
    FlushCacheReqOutput,
    GetInternalStateReq,
    GetInternalStateReqOutput,
    LoadSnapshot,
    PauseGenerationReqInput,
    PauseGenerationReqOutput,
)


class Server:
    def __init__(self, client: httpx.AsyncClient, manager: TokenizerManager, scheduler: FakeScheduler):
        self.client, self.manager, self.scheduler = client, manager, scheduler

    def post(self, path: str, body: Any = None) -> asyncio.Task[httpx.Response]:
        return asyncio.ensure_future(self.client.post(path, json=body))

    def get(self, path: str) -> asyncio.Task[httpx.Response]:
        return asyncio.ensure_future(self.client.get(path))

    async def works(self) -> None:
        """A normal request is answered, and nothing else was waiting for the scheduler."""
        task = self.post("/generate", {"text": "hi"})
        (request,) = await self.scheduler.requests(1)
        self.scheduler.finish(request, "there")
        assert (await task).json()["text"] == "there"
        assert not self.manager.rid_to_state


@contextlib.asynccontextmanager
async def serving(**flags: Any) -> AsyncIterator[Server]:
    async with manager_and_scheduler(**flags) as (manager, scheduler):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            app = build_app(manager, manager.server_args)
            server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off"))
            server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign]
            task = asyncio.ensure_future(server.serve([listener]))
            base_url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            async with httpx.AsyncClient(base_url=base_url, timeout=10) as client:
                yield Server(client, manager, scheduler)
            server.should_exit = True
            await task


def events(raw: bytes) -> list[Any]:
    frames = raw.decode().split("\n\n")
    assert frames[-2:] == ["data: [DONE]", ""], frames
    return [json.loads(frame.removeprefix("data: ")) for frame in frames[:-2]]


# ---- generate ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["POST", "PUT"])
async def test_generate_answers_one_object(method: str):
    async with serving() as server:
        task = asyncio.ensure_future(server.client.request(method, "/generate", json={"text": "hi", "rid": "r"}))
        (request,) = await server.scheduler.requests(1)
        server.scheduler.finish(request, "there")
        response = await task
        assert response.status_code == 200
        answer = response.json()
        assert answer["text"] == "there" and answer["meta_info"]["id"] == "r"
        assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 5}


async def test_a_stream_ends_with_done_and_grows():
    async with serving() as server:
        task = server.post("/generate", {"text": "hi", "stream": True})
        (request,) = await server.scheduler.requests(1)
        for text in ("a", "\u2028"):
            server.scheduler.say(request, text)
            await asyncio.sleep(0.05)
        server.scheduler.finish(request, "c")
        response = await task
        assert response.headers["content-type"].startswith("text/event-stream")
        texts = [event["text"] for event in events(response.content)]
        assert texts == ["a", "a\u2028", "a\u2028c"]
        assert len(response.content.decode().splitlines()) == 2 * 4  # no reader's idea of a line cuts a frame


async def test_unknown_fields_are_ignored_as_routers_add_them():
    async with serving() as server:
        extras = {"model": None, "log_metrics": True, "background": False, "return_hidden_states": False, "new": 1}
        task = server.post("/generate", {"text": "hi", **extras})
        (request,) = await server.scheduler.requests(1)
        server.scheduler.finish(request, "x")
        assert (await task).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("body", "word"),
    [
        ({}, "text"),
        ({"text": ""}, "empty"),
        ({"text": ["a", ""]}, "empty"),
        ({"input_ids": []}, "input_ids"),
        ({"input_ids": [VOCAB]}, "input_ids"),
        ({"input_ids": ["a"]}, "input_ids"),
        ({"input_ids": [True]}, "input_ids"),
        ({"text": 5}, "text"),
        ({"text": "x" * CONTEXT}, "tokens"),
        ({"text": "a", "sampling_params": "x"}, "sampling_params"),
        ({"text": "a", "sampling_params": {"max_new_tokens": "many"}}, "max_new_tokens"),
        ({"text": "a", "sampling_params": {"unknown": 1}}, "unknown"),
        ({"text": "a", "sampling_params": {"regex": "a+"}}, "regex"),
        ({"text": "a", "sampling_params": {"n": 0}}, "n"),
        ({"text": "a", "image_data": "x"}, "image_data"),
        ({"text": "a", "rid": 5}, "rid"),
        ({"text": ["a"] * 1025}, "max-batch-size"),
    ],
)
async def test_a_bad_request_is_a_400_before_any_byte(body: dict[str, Any], word: str, stream: bool):
    async with serving() as server:
        response = await server.post("/generate", body | {"stream": stream})
        assert response.status_code == 400
        assert word in response.json()["error"]["message"]
        assert "/" not in response.json()["error"]["message"].replace("/generate", "")  # no file paths
        await server.works()


@pytest.mark.parametrize(
    "raw",
    [b"", b"[]", b"null", b'"hi"', b'{"text": "a",, }', b'{"text": "\x97"}', b'{"text": "\\ud800"}', b"[" * 30000],
)
async def test_what_is_no_json_object_is_a_400(raw: bytes):
    async with serving() as server:
        for path in ("/generate", "/tokenize", "/detokenize", "/abort_request"):
            response = await server.client.post(path, content=raw, headers={"Content-Type": "application/json"})
            assert response.status_code == 400 and response.json()["error"]["message"]
        await server.works()


async def test_stream_must_be_a_boolean():
    async with serving() as server:
        response = await server.post("/generate", {"text": "a", "stream": "perhaps"})
        assert response.status_code == 400 and "stream" in response.json()["error"]["message"]


@pytest.mark.parametrize(("status", "http"), [(400, 400), (500, 500), (503, 503), (None, 200)])
async def test_how_an_abort_becomes_a_status(status: int | None, http: int):
    async with serving() as server:
        task = server.post("/generate", {"text": "hi"})
        (request,) = await server.scheduler.requests(1)
        server.scheduler.say(request, "so far")
        server.scheduler.say(request, "", FinishAbort("No.", status_code=status))
        response = await task
        assert response.status_code == http
        if status is None:
            assert response.json()["text"] == "so far"
            assert response.json()["meta_info"]["finish_reason"]["type"] == "abort"
        else:
            assert response.json()["error"]["message"] == "No."


async def test_a_full_queue_is_a_503_for_a_stream_too():
    async with serving() as server:
        task = server.post("/generate", {"text": "hi", "stream": True})
        (request,) = await server.scheduler.requests(1)
        server.scheduler.send(AbortReq(rid=request.rid, finish=FinishAbort("The queue is full.", status_code=503)))
        assert (await task).status_code == 503


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("chunks", [0, 1, 5])
async def test_a_client_that_goes_away_is_aborted(stream: bool, chunks: int):
    async with serving() as server:
        task = server.post("/generate", {"text": "hi", "rid": "r", "stream": stream})
        (request,) = await server.scheduler.requests(1)
        for _ in range(chunks):
            server.scheduler.say(request, "x")
            await asyncio.sleep(0.02)
        task.cancel()
        assert (await server.scheduler.receive(AbortReq)).rid == "r"
        server.scheduler.say(request, "", FinishAbort("Aborted."))
        await asyncio.sleep(0.05)
        await server.works()


# ---- health and information ---------------------------------------------------------------------------------


async def test_root_answers_get_and_head():
    async with serving() as server:
        assert (await server.get("/")).status_code == 200
        head = await server.client.head("/")
        assert head.status_code == 200 and not head.content


async def test_health_runs_a_request_and_says_no_while_starting():
    async with serving() as server:
        for path in ("/health", "/health_generate"):
            task = server.get(path)
            (probe,) = await server.scheduler.requests(1)
            server.scheduler.finish(probe, "x")
            response = await task
            assert response.status_code == 200 and not response.content
        assert (await server.get("/ready")).status_code == 200
        for status in (ServerStatus.STARTING, ServerStatus.DRAINING):
            server.manager.control.status = status
            for path in ("/health", "/health_generate", "/ready"):
                assert (await server.get(path)).status_code == 503


async def test_a_draining_server_refuses_new_requests():
    async with serving() as server:
        server.manager.control.status = ServerStatus.DRAINING
        response = await server.post("/generate", {"text": "hi"})
        assert response.status_code == 503 and response.json()["error"]["message"]


async def test_model_info_under_both_names():
    async with serving() as server:
        for path in ("/model_info", "/get_model_info"):
            info = (await server.get(path)).json()
            assert info["model_path"] == "fake" and info["is_generation"] is True
            assert info["model_type"] == "fake" and info["architectures"] == ["FakeForCausalLM"]


async def test_server_info_under_both_names():
    async with serving() as server:
        for path in ("/server_info", "/get_server_info"):
            task = server.get(path)
            await server.scheduler.receive(GetInternalStateReq)
            server.scheduler.send(GetInternalStateReqOutput(internal_state={"last_gen_throughput": 0.0}))
            info = (await task).json()
            assert info["internal_states"][0].get("last_gen_throughput") == 0.0 and info["tp_size"] == 1


async def test_loads_in_all_formats():
    async with serving() as server:
        server.scheduler.send(
            LoadSnapshot(num_running_reqs=2, num_waiting_reqs=1, num_used_tokens=25, max_total_num_tokens=100)
        )
        loads: list[dict] = []
        while not loads or not loads[0]["num_running_reqs"]:  # until the snapshot has come through the socket
            await asyncio.sleep(0.01)
            loads = (await server.get("/v1/loads")).json()["loads"]
        (load,) = loads
        assert (load["num_running_reqs"], load["token_usage"], load["num_total_tokens"]) == (2, 0.25, 25)
        text = (await server.get("/v1/loads?format=prometheus")).text
        assert 'sglang_num_running_reqs{dp_rank="0"} 2' in text
        assert (await server.get("/v1/loads?dp_rank=1")).json()["loads"] == []
        old = (await server.get("/get_load")).json()
        assert old == [{"dp_rank": 0, "num_reqs": 3, "num_waiting_reqs": 1, "num_tokens": 25}]
        for query in ("format=xml", "include=secrets", "dp_rank=x"):
            assert (await server.get(f"/v1/loads?{query}")).status_code == 400


# ---- control --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_flush_says_whether_it_was_done(method: str):
    async with serving() as server:
        for success, status in ((True, 200), (False, 400)):
            task = asyncio.ensure_future(server.client.request(method, "/flush_cache?timeout=3"))
            assert (await server.scheduler.receive(FlushCacheReqInput)).timeout_s == 3
            server.scheduler.send(FlushCacheReqOutput(success=success, message="well"))
            response = await task
            assert response.status_code == status and "well" in response.text
        for bad in ("x", "-1", "nan", "inf"):
            assert (await server.client.request(method, f"/flush_cache?timeout={bad}")).status_code == 400


async def test_abort_names_exactly_one_and_unknown_names_are_fine():
    async with serving() as server:
        tasks = {rid: server.post("/generate", {"text": "hi", "rid": rid}) for rid in ("a", "ab")}
        requests = {request.rid: request for request in await server.scheduler.requests(2)}
        for body in ({"rid": ""}, {"rid": "zzz"}, {}):
            response = await server.post("/abort_request", body)
            assert response.status_code == 200 and not response.content
        assert await server.scheduler.nothing(0.05)
        await server.post("/abort_request", {"rid": "a"})
        assert (await server.scheduler.receive(AbortReq)).rid == "a"
        await server.post("/abort_request", {"abort_all": True})
        assert (await server.scheduler.receive(AbortReq)).rid == "ab"
        for rid, task in tasks.items():
            server.scheduler.say(requests[rid], "", FinishAbort("Aborted."))
            assert (await task).status_code == 200
        assert (await server.post("/abort_request", {"rid": 5})).status_code == 400


async def test_pause_and_continue():
    async with serving() as server:
        assert (await server.post("/pause_generation", {"mode": "sideways"})).status_code == 400
        task = asyncio.ensure_future(server.client.post("/pause_generation"))  # no body: the default mode
        assert (await server.scheduler.receive(PauseGenerationReqInput)).mode == "abort"
        server.scheduler.send(PauseGenerationReqOutput(success=True))
        assert (await task).status_code == 200
        held = server.post("/generate", {"text": "hi"})
        assert await server.scheduler.nothing()
        task = server.post("/continue_generation", {"torch_empty_cache": True})
        await server.scheduler.receive(ContinueGenerationReqInput)
        server.scheduler.send(ContinueGenerationReqOutput(success=True))
        assert (await task).status_code == 200
        (request,) = await server.scheduler.requests(1)
        server.scheduler.finish(request, "x")
        assert (await held).json()["text"] == "x"


# ---- the tokenizer alone ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["", "/v1"])
async def test_tokenize_and_detokenize(prefix: str):
    async with serving() as server:
        one = (await server.post(prefix + "/tokenize", {"prompt": "hi"})).json()
        assert one == {"tokens": [104, 105], "count": 2, "max_model_len": CONTEXT}
        two = (await server.post(prefix + "/tokenize", {"prompt": ["hi", "a"]})).json()
        assert two["tokens"] == [[104, 105], [97]] and two["count"] == [2, 1]
        chat = (await server.post(prefix + "/tokenize", {"messages": [{"role": "user", "content": "hi"}]})).json()
        assert bytes(chat["tokens"]) == b"user: hi\n"
        assert (await server.post(prefix + "/detokenize", {"tokens": [104, 105]})).json() == {"text": "hi"}
        assert (await server.post(prefix + "/detokenize", {"tokens": [[104], [105]]})).json() == {"text": ["h", "i"]}
        assert (await server.post(prefix + "/detokenize", {"tokens": []})).json() == {"text": ""}
        for path, body in [
            ("/tokenize", {}),
            ("/tokenize", {"prompt": "a", "messages": []}),
            ("/tokenize", {"prompt": 5}),
            ("/detokenize", {}),
            ("/detokenize", {"tokens": [VOCAB]}),
            ("/detokenize", {"tokens": [-1]}),
            ("/detokenize", {"tokens": [[1], 2]}),
        ]:
            assert (await server.post(prefix + path, body)).status_code == 400


async def test_a_chat_is_tokenized_as_the_chat_door_would():
    flags = {"default_chat_template_kwargs": {"style": "brief"}}
    async with serving(**flags) as server:
        parts = [{"type": "text", "text": "hi"}, {"type": "text", "text": "you"}]
        body = {"messages": [{"role": "developer", "content": parts}]}
        assert bytes((await server.post("/tokenize", body)).json()["tokens"]) == b"system: hi you\n"
        seen: list[Any] = []
        rendered = SimpleNamespace(text="", input_ids=[])
        server.manager.text.chat_template = SimpleNamespace(  # type: ignore[assignment]
            render=lambda messages, **options: seen.append(options) or rendered
        )
        await server.post("/tokenize", body)
        assert seen[0]["template_kwargs"] == {"style": "brief"}
        for fields, named in [
            ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
            ({"messages": [{"role": "user"}]}, "messages[0].content"),
            ({"add_generation_prompt": False}, "add_generation_prompt"),
            ({"tools": [{"type": "function"}]}, "tools"),
            ({"chat_template": "x"}, "chat_template"),
        ]:
            response = await server.post("/tokenize", body | fields)
            assert response.status_code == 400 and named in response.json()["error"]["message"]


async def test_without_a_tokenizer_these_routes_say_so():
    async with serving(skip_tokenizer_init=True) as server:
        chat = {"messages": [{"role": "user", "content": "hi"}]}
        for path, body in [("/tokenize", {"prompt": "a"}), ("/tokenize", chat), ("/detokenize", {"tokens": [1]})]:
            response = await server.post(path, body)
            assert response.status_code == 400 and "tokenizer" in response.json()["error"]["message"]
