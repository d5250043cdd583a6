"""Health, pause, flush, load: what is asked of a running server besides text."""

from __future__ import annotations

import asyncio
import threading

import pytest

from tests.tokenizer_manager.fakes import collect, manager_and_scheduler, start
from tinysrt.errors import RequestError
from tinysrt.managers.generate_request import GenerateReqInput
from tinysrt.managers.server_control import ServerStatus
from tinysrt.messages import (
    AbortReq,
    ContinueGenerationReqInput,
    ContinueGenerationReqOutput,
    FinishAbort,
    FlushCacheReqInput,
    FlushCacheReqOutput,
    GetInternalStateReq,
    GetInternalStateReqOutput,
    HealthCheckOutput,
    LoadSnapshot,
    PauseGenerationReqInput,
    PauseGenerationReqOutput,
)


def ask(**fields: object) -> GenerateReqInput:
    return GenerateReqInput(text="hello", **fields)


# ---- health ---------------------------------------------------------------------------------------------


async def test_health_is_a_real_request_and_leaves_nothing_behind():
    async with manager_and_scheduler() as (manager, scheduler):
        health = asyncio.ensure_future(manager.control.health())
        (probe,) = await scheduler.requests(1)
        assert probe.is_health_check and probe.input_ids == [0] and probe.sampling_params.max_new_tokens == 1
        assert probe.rid.startswith("HEALTH_CHECK") and probe.sampling_params.is_greedy
        scheduler.finish(probe, "x")
        assert await health
        assert not manager.rid_to_state and not manager.control._probe_rids


async def test_a_busy_scheduler_acknowledges_and_probes_at_once_share_one():
    async with manager_and_scheduler() as (manager, scheduler):
        probes = [asyncio.ensure_future(manager.control.health()) for _ in range(5)]
        (probe,) = await scheduler.requests(1)
        scheduler.send(HealthCheckOutput(rid=probe.rid))
        assert await asyncio.gather(*probes) == [True] * 5
        assert await scheduler.nothing(0.05)


async def test_output_of_others_proves_health_but_a_load_snapshot_does_not():
    async with manager_and_scheduler() as (manager, scheduler):
        task = start(manager.generate_request(ask()))
        (request,) = await scheduler.requests(1)
        health = asyncio.ensure_future(manager.control.health(timeout=5))
        await scheduler.requests(1)
        scheduler.send(LoadSnapshot())
        await asyncio.sleep(0.1)
        assert not health.done()
        scheduler.finish(request, "x")
        assert await health
        await task


async def test_a_server_that_does_not_answer_is_unhealthy_until_it_does():
    async with manager_and_scheduler() as (manager, scheduler):
        assert not await manager.control.health(timeout=0.1)
        assert manager.control.status is ServerStatus.UNHEALTHY
        await scheduler.requests(1)
        health = asyncio.ensure_future(manager.control.health())
        (probe,) = await scheduler.requests(1)
        scheduler.finish(probe, "x")
        assert await health and manager.control.status is ServerStatus.UP


@pytest.mark.parametrize("status", [ServerStatus.STARTING, ServerStatus.DRAINING])
async def test_health_is_not_probed_while_starting_or_draining(status: ServerStatus):
    async with manager_and_scheduler() as (manager, scheduler):
        manager.control.status = status
        assert not await manager.control.health()
        assert await scheduler.nothing(0.05) and manager.control.status is status


async def test_requests_run_while_the_server_is_still_starting():  # the warm-up is one
    async with manager_and_scheduler() as (manager, scheduler):
        manager.control.status = ServerStatus.STARTING
        task = start(manager.generate_request(ask()))
        (request,) = await scheduler.requests(1)
        scheduler.finish(request, "x")
        assert (await task)[0]["text"] == "x"


# ---- pause and continue -----------------------------------------------------------------------------------


async def test_paused_requests_wait_at_the_gate():
    async with manager_and_scheduler() as (manager, scheduler):
        pause = asyncio.ensure_future(manager.control.pause_generation("in_place"))
        assert (await scheduler.receive(PauseGenerationReqInput)).mode == "in_place"
        scheduler.send(PauseGenerationReqOutput(success=True))
        await pause
        task = start(manager.generate_request(ask(sampling_params={"n": 2})))
        refused = start(manager.generate_request(ask(sampling_params={"top_p": 3})))
        with pytest.raises(RequestError):
            await refused  # what is wrong is said at once
        gone = start(manager.generate_request(ask(rid="gone")))
        assert await scheduler.nothing()
        gone.cancel()
        aborted = start(manager.generate_request(ask(rid="aborted")))
        await asyncio.sleep(0.05)
        manager.abort_request("aborted")
        assert (await aborted)[0]["meta_info"]["finish_reason"]["type"] == "abort"

        health = asyncio.ensure_future(manager.control.health())
        await scheduler.receive(GetInternalStateReq)  # a paused scheduler runs nothing, but it talks
        scheduler.send(GetInternalStateReqOutput(internal_state={}))
        assert await health

        go_on = asyncio.ensure_future(manager.control.continue_generation())
        await scheduler.receive(ContinueGenerationReqInput)
        scheduler.send(ContinueGenerationReqOutput(success=True))
        await go_on
        (hidden,) = await scheduler.requests(1)
        scheduler.finish(hidden, "")
        for request in await scheduler.requests(2):
            scheduler.finish(request, "x")
        assert len((await task)[0]) == 2 and not manager.rid_to_state


async def test_pausing_with_abort_ends_everyone_first():
    async with manager_and_scheduler() as (manager, scheduler):
        task = start(manager.generate_request(ask(rid="r")))
        (request,) = await scheduler.requests(1)
        pause = asyncio.ensure_future(manager.control.pause_generation())
        assert (await scheduler.receive(AbortReq)).rid == "r"
        assert await scheduler.nothing(0.1)  # not paused before the request has ended
        scheduler.say(request, "", FinishAbort("Aborted."))
        await scheduler.receive(PauseGenerationReqInput)
        scheduler.send(PauseGenerationReqOutput(success=True))
        await pause
        assert (await task)[0]["meta_info"]["finish_reason"]["type"] == "abort"


async def test_a_pause_that_is_refused_opens_the_gate_again():
    async with manager_and_scheduler() as (manager, scheduler):
        with pytest.raises(RequestError, match="mode"):
            await manager.control.pause_generation("sideways")
        pause = asyncio.ensure_future(manager.control.pause_generation("retract"))
        await scheduler.receive(PauseGenerationReqInput)
        scheduler.send(PauseGenerationReqOutput(success=False, message="not now"))
        with pytest.raises(RequestError, match="not now"):
            await pause
        assert not manager.control.paused


# ---- flush, load, state -------------------------------------------------------------------------------------


async def test_an_idle_flush_waits_for_the_step_in_flight_and_a_busy_one_does_not():
    async with manager_and_scheduler() as (manager, scheduler):
        flush = asyncio.ensure_future(manager.control.flush_cache())
        assert (await scheduler.receive(FlushCacheReqInput)).timeout_s > 0.5
        scheduler.send(FlushCacheReqOutput(success=True, message="flushed"))
        assert (await flush).success
        task = start(manager.generate_request(ask()))
        (request,) = await scheduler.requests(1)
        flush = asyncio.ensure_future(manager.control.flush_cache())
        assert (await scheduler.receive(FlushCacheReqInput)).timeout_s == 0
        scheduler.send(FlushCacheReqOutput(success=False, message="busy"))
        assert not (await flush).success
        scheduler.finish(request, "x")
        await task


async def test_calls_of_one_kind_take_turns_and_a_late_answer_goes_to_nobody_else():
    async with manager_and_scheduler() as (manager, scheduler):
        first = asyncio.ensure_future(manager.control.flush_cache(1))
        second = asyncio.ensure_future(manager.control.flush_cache(2))
        await scheduler.receive(FlushCacheReqInput)
        assert await scheduler.nothing(0.05)
        first.cancel()  # gives up; its answer is still to come
        await asyncio.sleep(0.05)
        scheduler.send(FlushCacheReqOutput(success=True, message="first"))
        assert (await scheduler.receive(FlushCacheReqInput)).timeout_s == 2
        scheduler.send(FlushCacheReqOutput(success=True, message="second"))
        assert (await second).message == "second"


async def test_loads_are_what_was_pushed_last():
    async with manager_and_scheduler() as (manager, scheduler):
        manager.control.scheduler_info = {"max_total_num_tokens": 100}
        (idle,) = manager.control.loads()
        assert (idle.num_running_reqs, idle.max_total_num_tokens) == (0, 100)
        scheduler.send(LoadSnapshot(num_running_reqs=1))
        scheduler.send(LoadSnapshot(num_running_reqs=2))
        await asyncio.sleep(0.1)
        assert [load.num_running_reqs for load in manager.control.loads()] == [2]


async def test_server_info_has_flags_under_both_names_and_the_schedulers_word():
    async with manager_and_scheduler() as (manager, scheduler):
        manager.control.scheduler_info = {"status": "ready", "max_total_num_tokens": 100, "max_req_input_len": 50}
        info = asyncio.ensure_future(manager.control.server_info())
        await scheduler.receive(GetInternalStateReq)
        scheduler.send(GetInternalStateReqOutput(internal_state={"memory_usage": 1}))
        result = await info
        assert result["tp_size"] == result["tensor_parallel_size"] == 1
        assert result["status"] == "up" and result["max_total_num_tokens"] == 100
        assert result["internal_states"] == [{"memory_usage": 1}] and result["version"]
        assert result["served_model_name"] == "fake"


async def test_long_texts_are_tokenized_beside_the_loop():
    async with manager_and_scheduler() as (manager, _):
        threads: list[int] = []
        manager.tokenizer.encode = lambda text, special=True: threads.append(threading.get_ident()) or []  # type: ignore
        with pytest.raises(RequestError):
            await collect(manager.generate_request(ask()))
        assert threads and threads[0] != threading.get_ident()


async def test_chats_are_rendered_beside_the_loop():
    """Trap 56."""
    async with manager_and_scheduler() as (manager, _):
        threads: list[int] = []
        render = manager.chat_template.render  # type: ignore[union-attr]
        manager.chat_template.render = lambda messages: threads.append(threading.get_ident()) or render(messages)  # type: ignore
        assert (await manager.render_chat([{"role": "user", "content": "hi"}])).text == "user: hi\n"
        assert threads and threads[0] != threading.get_ident()
