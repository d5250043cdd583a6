"""The TokenizerManager against a scheduler that the test plays, over real sockets."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.tokenizer_manager.fakes import VOCAB, collect, manager_and_scheduler, start
from tinysrt.errors import RequestError, StartupError
from tinysrt.managers.generate_request import GenerateReqInput
from tinysrt.messages import AbortReq, BatchStrOut, FinishAbort, FinishLength, FinishStop, Logprobs


def ask(text: Any = "hello", **fields: Any) -> GenerateReqInput:
    return GenerateReqInput(text=text, **fields)


# ---- one request ------------------------------------------------------------------------------------------


async def test_a_request_is_tokenized_sent_and_answered():
    async with manager_and_scheduler() as (manager, scheduler):
        task = start(manager.generate_request(ask(rid="r", sampling_params={"max_new_tokens": 5})))
        (request,) = await scheduler.requests(1)
        assert (request.rid, request.input_ids, request.stream) == ("r", list(b"hello"), False)
        assert request.sampling_params.sampling_seed is not None
        scheduler.say(request, "wor")
        scheduler.say(request, "ld", FinishStop(matched=100))
        (answer,) = await task
        assert answer["text"] == "world" and answer["output_ids"] == list(b"world")
        meta = answer["meta_info"]
        assert meta["id"] == "r" and meta["finish_reason"] == {"type": "stop", "matched": 100}
        assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (5, 5, 3)
        assert meta["e2e_latency"] > 0
        assert not manager.rid_to_state


async def test_a_stream_is_cumulative_and_earlier_chunks_do_not_change():
    async with manager_and_scheduler() as (manager, scheduler):
        answers = manager.generate_request(ask(stream=True))
        first = asyncio.ensure_future(anext(answers))
        (request,) = await scheduler.requests(1)
        scheduler.say(request, "wor")
        chunk = await first
        assert chunk["text"] == "wor" and chunk["meta_info"]["finish_reason"] is None and "index" not in chunk
        scheduler.finish(request, "ld")
        rest = await collect(answers)
        assert [c["text"] for c in rest] == ["world"] and rest[0]["meta_info"]["finish_reason"]["type"] == "length"
        assert chunk["text"] == "wor" and chunk["output_ids"] == list(b"wor")


async def test_an_incremental_stream_joins_to_the_whole_and_a_slow_reader_loses_nothing():
    async with manager_and_scheduler(incremental_streaming_output=True) as (manager, scheduler):
        answers = manager.generate_request(ask(stream=True, return_logprob=True))
        first = asyncio.ensure_future(anext(answers))
        (request,) = await scheduler.requests(1)

        def scored(text: str, finish: Any = None) -> BatchStrOut:
            scores = Logprobs(output=[-0.5] * len(text))
            return BatchStrOut(outs=[scheduler.out(request, text, finish, scores)])

        scheduler.send(scored("a"))
        chunks = [await first]
        for text in "bcd":
            scheduler.send(scored(text))
        scheduler.send(scored("e", FinishLength(length=5)))
        await asyncio.sleep(0.1)  # four messages arrive while the reader sleeps
        chunks += await collect(answers)
        assert len(chunks) == 2
        assert "".join(c["text"] for c in chunks) == "abcde"
        assert sum((c["output_ids"] for c in chunks), []) == list(b"abcde")
        logprobs = sum((c["meta_info"]["output_token_logprobs"] for c in chunks), [])
        assert [token for _, token, _ in logprobs] == list(b"abcde")


async def test_without_a_stream_incremental_output_is_still_whole():
    async with manager_and_scheduler(incremental_streaming_output=True) as (manager, scheduler):
        task = start(manager.generate_request(ask()))
        (request,) = await scheduler.requests(1)
        scheduler.say(request, "wor")
        scheduler.finish(request, "ld")
        assert (await task)[0]["text"] == "world"


async def test_logprobs_are_triples_with_text_only_on_request():
    async with manager_and_scheduler() as (manager, scheduler):
        fields = {"return_logprob": True, "logprob_start_len": 3, "top_logprobs_num": 1, "token_ids_logprob": [65]}
        for with_text in (False, True):
            task = start(manager.generate_request(ask(return_text_in_logprobs=with_text, **fields)))
            (request,) = await scheduler.requests(1)
            assert (request.logprob_start_len, request.top_logprobs_num, request.token_ids_logprob) == (3, 1, [65])
            scores = Logprobs(
                output=[-0.25],
                output_top=[[(-0.25, 97)]],
                output_ids=[[(-3.0, 65)]],
                input=[(None, 108), (-1.5, 111)],
                input_top=[None, [(-1.0, 112)]],
                input_ids=[None, [(-4.0, 65)]],
            )
            scheduler.send(BatchStrOut(outs=[scheduler.out(request, "a", FinishLength(length=1), scores)]))
            meta = (await task)[0]["meta_info"]
            assert meta["input_token_logprobs"] == [
                [None, 108, "l" if with_text else None],
                [-1.5, 111, "o" if with_text else None],
            ]
            assert meta["output_token_logprobs"] == [[-0.25, 97, "a" if with_text else None]]
            assert meta["input_top_logprobs"] == [None, [[-1.0, 112, "p" if with_text else None]]]
            assert meta["output_token_ids_logprobs"] == [[[-3.0, 65, "A" if with_text else None]]]
            assert meta["output_token_logprobs_length"] == meta["completion_tokens"] == 1


async def test_scores_that_were_not_asked_for_are_not_computed():
    async with manager_and_scheduler() as (manager, scheduler):
        task = start(manager.generate_request(ask(logprob_start_len=0, top_logprobs_num=5)))
        (request,) = await scheduler.requests(1)
        assert (request.logprob_start_len, request.top_logprobs_num) == (-1, 0)
        scheduler.finish(request, "x")
        assert "output_token_logprobs" not in (await task)[0]["meta_info"]


# ---- batches and samples ------------------------------------------------------------------------------------


async def test_a_batch_is_answered_in_order_whatever_finishes_first():
    async with manager_and_scheduler(batch_notify_size=2) as (manager, scheduler):
        params = [{"max_new_tokens": 3}, {"max_new_tokens": 7}, {"max_new_tokens": 1}]
        task = start(manager.generate_request(ask(["a", "b", "c"], rid="z", sampling_params=params)))
        requests = await scheduler.requests(3)
        assert [r.rid for r in requests] == ["z_0", "z_1", "z_2"] and {r.batch_id for r in requests} == {"z"}
        assert [r.sampling_params.max_new_tokens for r in requests] == [3, 7, 1]
        outs = [scheduler.out(r, r.rid, FinishLength(length=3)) for r in reversed(requests)]
        scheduler.send(BatchStrOut(outs=outs))
        (answers,) = await task
        assert [a["text"] for a in answers] == ["z_0", "z_1", "z_2"] and "index" not in answers[0]


async def test_a_streamed_batch_carries_indices():
    async with manager_and_scheduler() as (manager, scheduler):
        task = start(manager.generate_request(ask(["a", "b"], stream=True)))
        requests = await scheduler.requests(2)
        for request in reversed(requests):
            scheduler.finish(request, "x")
        assert [chunk["index"] for chunk in await task] == [1, 0]


async def test_news_that_comes_while_another_answer_is_handed_on():
    async with manager_and_scheduler() as (manager, scheduler):
        answers = manager.generate_request(ask(["a", "b", "c"], stream=True))
        first = asyncio.ensure_future(anext(answers))
        requests = await scheduler.requests(3)
        scheduler.send(BatchStrOut(outs=[scheduler.out(r, "x") for r in requests]))
        chunks = [await first]
        scheduler.finish(requests[1], "y")  # index 1 stands in line already, with its "x"
        await asyncio.sleep(0.1)
        chunks += [await anext(answers), await anext(answers)]
        assert [(c["index"], c["text"]) for c in chunks] == [(0, "x"), (1, "xy"), (2, "x")]
        for i in (0, 2):
            scheduler.finish(requests[i], "z")
        assert [(c["index"], c["text"]) for c in await collect(answers)] == [(0, "xz"), (2, "xz")]


async def test_n_samples_follow_one_hidden_copy_of_the_prompt():
    async with manager_and_scheduler() as (manager, scheduler):
        params = {"n": 3, "sampling_seed": 40, "min_new_tokens": 2, "max_new_tokens": 4}
        task = start(manager.generate_request(ask(["p", "q"], rid="r", sampling_params=params, stream=True)))
        hidden = await scheduler.requests(2)
        assert [h.sampling_params.max_new_tokens for h in hidden] == [0, 0]
        assert [h.sampling_params.min_new_tokens for h in hidden] == [0, 0]
        scheduler.finish(hidden[0], "")
        assert await scheduler.nothing()  # both prompts must be in the cache first
        scheduler.finish(hidden[1], "")
        samples = await scheduler.requests(6)
        assert [s.rid for s in samples] == ["r_0_0", "r_0_1", "r_0_2", "r_1_0", "r_1_1", "r_1_2"]
        assert [s.sampling_params.sampling_seed for s in samples] == [40, 41, 42, 40, 41, 42]
        for sample in samples:
            scheduler.finish(sample, sample.rid)
        chunks = await task
        assert [(c["index"], c["text"]) for c in chunks] == list(enumerate(s.rid for s in samples))
        assert not manager.rid_to_state


async def test_without_a_prefix_cache_nothing_is_warmed():
    async with manager_and_scheduler(disable_radix_cache=True) as (manager, scheduler):
        task = start(manager.generate_request(ask(sampling_params={"n": 2})))
        for sample in await scheduler.requests(2):
            scheduler.finish(sample, "x")
        assert len((await task)[0]) == 2


async def test_samples_without_a_seed_all_get_different_ones():
    async with manager_and_scheduler(disable_radix_cache=True) as (manager, scheduler):
        task = start(manager.generate_request(ask(["a"] * 3, sampling_params={"n": 2})))
        samples = await scheduler.requests(6)
        assert len({s.sampling_params.sampling_seed for s in samples}) == 6
        for sample in samples:
            scheduler.finish(sample, "x")
        await task


async def test_a_hidden_copy_that_is_refused_ends_the_request():
    async with manager_and_scheduler() as (manager, scheduler):
        task = start(manager.generate_request(ask(sampling_params={"n": 2})))
        (hidden,) = await scheduler.requests(1)
        scheduler.send(AbortReq(rid=hidden.rid, finish=FinishAbort("The queue is full.", status_code=503)))
        with pytest.raises(RequestError) as caught:
            await task
        assert caught.value.status == 503
        assert not manager.rid_to_state and await scheduler.nothing()


# ---- what is refused leaves nothing behind ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {"text": ""},
        {"text": "x" * 64},
        {"text": ["fine", "x" * 100, "fine"]},
        {"text": ["fine", ""]},
        {"text": "x", "sampling_params": {"max_new_tokens": 64}},
        {"text": "x", "sampling_params": {"top_p": 2}},
        {"text": None, "input_ids": [VOCAB]},
        {"text": ["a", "b"], "sampling_params": [{}]},
        {"text": "x", "return_logprob": True, "logprob_start_len": 2},
    ],
)
async def test_a_bad_request_is_refused_as_a_whole(fields: dict[str, Any]):
    async with manager_and_scheduler() as (manager, scheduler):
        for _ in range(3):
            with pytest.raises(RequestError) as caught:
                await collect(manager.generate_request(GenerateReqInput(**fields)))
            assert caught.value.status == 400
        assert not manager.rid_to_state and await scheduler.nothing(0.05)


async def test_a_thousand_over_long_prompts_leave_no_state():
    async with manager_and_scheduler() as (manager, _):
        for _ in range(1000):
            with pytest.raises(RequestError):
                await collect(manager.generate_request(ask("x" * 100)))
        assert not manager.rid_to_state


async def test_a_text_that_cannot_fit_is_refused_before_it_is_encoded(monkeypatch: pytest.MonkeyPatch):
    async with manager_and_scheduler() as (manager, _):
        monkeypatch.setattr(manager.text, "encode", None)
        monkeypatch.setattr(manager.text, "render_chat", None)
        with pytest.raises(RequestError, match="more than 1000 tokens") as caught:
            await collect(manager.generate_request(ask("x" * 4000)))
        assert (caught.value.param, caught.value.code) == ("text", "context_length_exceeded")
        with pytest.raises(RequestError, match="more than 1000 tokens") as caught:
            await manager.render_chat([{"role": "user", "content": "x" * 4000}])
        assert caught.value.param == "messages"
        assert not manager.rid_to_state


async def test_a_text_that_will_be_cut_is_not_encoded_whole(monkeypatch: pytest.MonkeyPatch):
    async with manager_and_scheduler(allow_auto_truncate=True) as (manager, scheduler):
        encode, encoded = manager.text.encode, []
        monkeypatch.setattr(manager.text, "encode", lambda texts: encoded.extend(map(len, texts)) or encode(texts))
        task = start(manager.generate_request(ask("x" * 10**6)))
        (request,) = await scheduler.requests(1)
        limit = manager._length_limits().too_long
        assert len(request.input_ids) == limit - 1 and encoded == [4 * limit]
        task.cancel()


async def test_a_crash_in_the_tokenizer_leaves_no_state():
    async with manager_and_scheduler() as (manager, _):
        with pytest.raises(RuntimeError):
            await collect(manager.generate_request(ask("crash")))
        assert not manager.rid_to_state


async def test_a_rid_is_refused_while_it_runs_and_free_afterwards():
    async with manager_and_scheduler() as (manager, scheduler):
        for _ in range(2):
            task = start(manager.generate_request(ask(rid="same")))
            (request,) = await scheduler.requests(1)
            with pytest.raises(RequestError, match="same"):
                await collect(manager.generate_request(ask(rid="same")))
            with pytest.raises(RequestError):
                await collect(manager.generate_request(ask(["a", "b"], rid=["new", "same"])))
            assert list(manager.rid_to_state) == ["same"]
            scheduler.finish(request, "x")
            assert (await task)[0]["text"] == "x"


async def test_a_prompt_must_fit_what_the_scheduler_can_hold():
    async with manager_and_scheduler() as (manager, _):
        manager.control.scheduler_info = {"max_req_input_len": 10}
        with pytest.raises(RequestError, match="at most 9"):
            await collect(manager.generate_request(ask("x" * 10)))


async def test_without_a_tokenizer_ids_go_in_and_out():
    async with manager_and_scheduler(skip_tokenizer_init=True) as (manager, scheduler):
        for fields in (
            {"text": "x"},
            {"input_ids": [1], "sampling_params": {"stop": "x"}},
            {"input_ids": [1], "sampling_params": {"min_new_tokens": 1}},
        ):
            with pytest.raises(RequestError, match="tokenizer"):
                await collect(manager.generate_request(GenerateReqInput(**fields)))
        task = start(manager.generate_request(GenerateReqInput(input_ids=[1, 2])))
        (request,) = await scheduler.requests(1)
        scheduler.finish(request, "x")
        (answer,) = await task
        assert answer["output_ids"] == [120] and "text" not in answer


async def test_bad_preferred_parameters_stop_the_start():
    with pytest.raises(StartupError, match="preferred"):
        async with manager_and_scheduler(preferred_sampling_params={"temperature": -1}):
            pass


async def test_defaults_of_the_model_are_for_chat_and_the_operator_goes_first():
    async with manager_and_scheduler() as (manager, _):
        assert manager.chat_sampling_defaults() == {"temperature": 0.6, "top_k": -1}
    async with manager_and_scheduler(preferred_sampling_params={"temperature": 0.1}) as (manager, scheduler):
        assert manager.chat_sampling_defaults() == {"top_k": -1}
        task = start(manager.generate_request(ask()))
        (request,) = await scheduler.requests(1)
        assert request.sampling_params.temperature == 0.1 and request.sampling_params.top_k > VOCAB
        scheduler.finish(request, "x")
        await task
    async with manager_and_scheduler(sampling_defaults="openai") as (manager, _):
        assert manager.chat_sampling_defaults() == {}


# ---- aborts --------------------------------------------------------------------------------------------------


async def test_a_client_that_leaves_aborts_and_the_name_is_free_when_the_scheduler_says_so():
    async with manager_and_scheduler() as (manager, scheduler):
        for stream in (True, False):
            task = start(manager.generate_request(ask(rid="r", stream=stream)))
            (request,) = await scheduler.requests(1)
            scheduler.say(request, "x")
            await asyncio.sleep(0.05)
            task.cancel()
            abort = await scheduler.receive(AbortReq)
            assert abort.rid == "r" and list(manager.rid_to_state) == ["r"]
            scheduler.say(request, "", FinishAbort("Aborted."))
            await until(lambda: not manager.rid_to_state)


async def test_closing_a_stream_aborts_every_sample_of_a_batch_once():
    async with manager_and_scheduler() as (manager, scheduler):
        answers = manager.generate_request(ask(["a", "b"], rid="r", stream=True))
        first = asyncio.ensure_future(anext(answers))
        requests = await scheduler.requests(2)
        scheduler.finish(requests[0], "x")
        await first
        await answers.aclose()
        assert (await scheduler.receive(AbortReq)).rid == "r_1"
        manager.abort_request("r")
        assert await scheduler.nothing(0.05)


async def test_an_abort_hits_exactly_the_name_that_was_given():
    async with manager_and_scheduler() as (manager, scheduler):
        tasks = {rid: start(manager.generate_request(ask(rid=rid, stream=True))) for rid in ("a", "ab", "abc")}
        requests = {r.rid: r for r in await scheduler.requests(3)}
        for unknown in ("", "zzz", "A"):
            manager.abort_request(unknown)
        assert await scheduler.nothing(0.05)
        manager.abort_request("a")
        assert (await scheduler.receive(AbortReq)).rid == "a"
        scheduler.say(requests["a"], "", FinishAbort("Aborted."))
        assert (await tasks["a"])[-1]["meta_info"]["finish_reason"]["type"] == "abort"
        manager.abort_request(abort_all=True)
        assert [(await scheduler.receive(AbortReq)).rid for _ in range(2)] == ["ab", "abc"]
        for rid in ("ab", "abc"):
            scheduler.say(requests[rid], "", FinishAbort("Aborted."))
            await tasks[rid]


async def test_a_batch_and_one_prompt_of_it_can_be_aborted_by_name():
    async with manager_and_scheduler(disable_radix_cache=True) as (manager, scheduler):
        task = start(manager.generate_request(ask(["x", "y"], rid="a", sampling_params={"n": 2})))
        requests = await scheduler.requests(4)
        manager.abort_request("a_1")
        assert [(await scheduler.receive(AbortReq)).rid for _ in range(2)] == ["a_1_0", "a_1_1"]
        manager.abort_request("a")
        assert [(await scheduler.receive(AbortReq)).rid for _ in range(2)] == ["a_0_0", "a_0_1"]
        for request in requests:
            scheduler.send(AbortReq(rid=request.rid, finish=FinishAbort("Aborted.")))
        assert len((await task)[0]) == 4


async def test_a_client_abort_is_answered_with_the_text_so_far():
    async with manager_and_scheduler() as (manager, scheduler):
        task = start(manager.generate_request(ask(rid="r")))
        (request,) = await scheduler.requests(1)
        scheduler.say(request, "so far")
        scheduler.say(request, "", FinishAbort("Aborted."))
        (answer,) = await task
        assert answer["text"] == "so far" and answer["meta_info"]["finish_reason"]["status_code"] is None


async def test_a_waiting_request_that_is_aborted_is_answered_too():
    async with manager_and_scheduler() as (manager, scheduler):
        task = start(manager.generate_request(ask(rid="r")))
        await scheduler.requests(1)
        scheduler.send(AbortReq(rid="r", finish=FinishAbort("Abort in waiting queue")))
        (answer,) = await task
        assert answer["text"] == "" and answer["meta_info"]["prompt_tokens"] == 5
        assert answer["meta_info"]["finish_reason"]["message"] == "Abort in waiting queue"


@pytest.mark.parametrize("status", [400, 500, 503])
@pytest.mark.parametrize("stream", [False, True])
async def test_other_aborts_are_the_status_they_name(status: int, stream: bool):
    async with manager_and_scheduler() as (manager, scheduler):
        task = start(manager.generate_request(ask(["a", "b"], rid="r", stream=stream)))
        await scheduler.requests(2)
        scheduler.send(AbortReq(rid="r_0", finish=FinishAbort("No room.", status_code=status)))
        with pytest.raises(RequestError, match="No room") as caught:
            await task
        assert caught.value.status == status
        assert (await scheduler.receive(AbortReq)).rid == "r_1"  # the rest of the batch has no reader any more


async def test_an_abort_inside_a_started_stream_is_its_last_object():
    async with manager_and_scheduler() as (manager, scheduler):
        task = start(manager.generate_request(ask(stream=True)))
        (request,) = await scheduler.requests(1)
        scheduler.say(request, "x")
        await asyncio.sleep(0.05)
        scheduler.say(request, "", FinishAbort("Out of memory.", status_code=500))
        chunks = await task
        assert chunks[-1]["text"] == "x" and chunks[-1]["meta_info"]["finish_reason"]["status_code"] == 500


async def test_news_of_unknown_rids_is_dropped():
    async with manager_and_scheduler() as (manager, scheduler):
        task = start(manager.generate_request(ask(rid="r")))
        (request,) = await scheduler.requests(1)
        scheduler.send(AbortReq(rid="stranger", finish=FinishAbort("?")))
        scheduler.finish(request, "x")
        scheduler.finish(request, "again")
        assert (await task)[0]["text"] == "x"
        second = start(manager.generate_request(ask(rid="s")))
        (request,) = await scheduler.requests(1)
        scheduler.finish(request, "y")
        assert (await second)[0]["text"] == "y"


# ---- the end ---------------------------------------------------------------------------------------------------


async def test_a_dead_child_answers_every_waiting_client_and_all_later_ones():
    async with manager_and_scheduler() as (manager, scheduler):
        plain, stream = start(manager.generate_request(ask())), start(manager.generate_request(ask(stream=True)))
        requests = await scheduler.requests(2)
        scheduler.say(requests[1], "x")
        await asyncio.sleep(0.05)
        state = asyncio.ensure_future(manager.control.get_internal_state())
        await asyncio.sleep(0.05)
        await asyncio.to_thread(manager.handle_child_death, "The scheduler died.")
        for waiting in (plain, state):
            with pytest.raises(RequestError, match="died") as caught:
                await waiting
            assert caught.value.status == 503
        assert (await stream)[-1]["meta_info"]["finish_reason"]["status_code"] == 503
        with pytest.raises(RequestError, match="died"):
            await collect(manager.generate_request(ask()))
        assert not manager.rid_to_state and not await manager.control.health()


async def test_draining_refuses_new_requests_and_lets_running_ones_finish():
    async with manager_and_scheduler() as (manager, scheduler):
        task = start(manager.generate_request(ask()))
        (request,) = await scheduler.requests(1)
        draining = asyncio.ensure_future(manager.drain(5))
        await asyncio.sleep(0.05)
        with pytest.raises(RequestError) as caught:
            await collect(manager.generate_request(ask()))
        assert caught.value.status == 503 and not await manager.control.health()
        scheduler.finish(request, "x")
        assert await draining and (await task)[0]["text"] == "x"


async def test_draining_aborts_what_takes_too_long():
    async with manager_and_scheduler() as (manager, scheduler):
        task = start(manager.generate_request(ask()))
        (request,) = await scheduler.requests(1)
        scheduler.say(request, "so far")
        draining = asyncio.ensure_future(manager.drain(0.1))
        await scheduler.receive(AbortReq)
        scheduler.say(request, "", FinishAbort("Aborted."))
        assert not await draining and (await task)[0]["text"] == "so far"


async def test_a_bug_in_the_receive_loop_is_fatal_but_leaves_nobody_waiting():
    async with manager_and_scheduler() as (manager, scheduler):
        fatal: list[str] = []
        manager.on_fatal = fatal.append
        task = start(manager.generate_request(ask(return_logprob=True)))
        (request,) = await scheduler.requests(1)
        broken = scheduler.out(request, "two", logprobs=Logprobs(output=[-1.0]))  # three tokens, one score
        scheduler.send(BatchStrOut(outs=[broken]))
        with pytest.raises(RequestError) as caught:
            await task
        assert caught.value.status == 503 and fatal


async def until(condition: Any) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.01)
