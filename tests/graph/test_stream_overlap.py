"""Overlap on a device with streams, shown on a stand-in: order, time, what is held, and the same tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.graph.virtual_device import VirtualDevice, VirtualRunner, virtual_engine
from tinysrt.bench.fake_model import FakeEngine, hashed_token
from tinysrt.managers.overlap_worker import OverlapWorker, StreamOverlapWorker, overlap_worker
from tinysrt.messages import AbortReq, ContinueGenerationReqInput, PauseGenerationReqInput
from tinysrt.model_executor.upload import ALIGNMENT, pack, to_device, unpack, upload

HOST_MS, DEVICE_MS = 5.0, 20.0


def decode(overlap: bool, steps: int) -> tuple[FakeEngine, VirtualDevice, list[float]]:
    """Two requests decode; the time at which each step's result was there."""
    engine, device = virtual_engine(overlap=overlap, forward_ms=DEVICE_MS)
    for rid in "ab":
        engine.add(rid, [1, 2, 3], max_new_tokens=steps + 1)
    while not engine.outbox.outs or len(engine.output_ids("a")) <= steps:
        device.work(HOST_MS)  # what scheduling costs
        engine.step()
    return engine, device, [time for time, what in device.log if what.startswith("result")]


# ---- time and order ------------------------------------------------------------------------------------


def test_a_step_takes_what_the_device_takes_not_device_and_host_together() -> None:
    _, _, normal = decode(overlap=False, steps=12)
    _, _, overlap = decode(overlap=True, steps=12)
    assert set(np.diff(normal)) == {DEVICE_MS + HOST_MS}
    assert set(np.diff(overlap)) == {DEVICE_MS}


def test_the_next_step_is_launched_before_the_result_of_the_last_is_looked_at() -> None:
    _, device, _ = decode(overlap=True, steps=8)
    for step in range(1, 8):
        assert device.when(f"launched {step + 1}") < device.when(f"end forward {step}"), "launched while it ran"
        assert device.when(f"launched {step + 1}") < device.when(f"result {step}") < device.when(f"result {step + 1}")
        assert device.when(f"result {step}") < device.when(f"end forward {step + 1}"), "looked at while the next ran"
        assert device.when(f"end forward {step}") < device.when(f"end sample {step}")
        assert device.when(f"end sample {step}") < device.when(f"end forward {step + 1}"), "the relay is written first"


def test_a_forward_begins_when_its_batch_has_arrived() -> None:
    engine, device = virtual_engine(overlap=True, forward_ms=DEVICE_MS)
    engine.scheduler.worker.upload_ms = 500.0  # type: ignore[attr-defined]
    engine.add("a", [1, 2, 3], max_new_tokens=3)
    engine.run()
    for step in (1, 2, 3):
        assert (
            device.log[device.when(f"end forward {step}")][0] >= device.log[device.when(f"end upload {step}")][0] + 20
        )


def test_sampling_may_be_finished_later() -> None:
    engine, device = virtual_engine(overlap=True)
    worker = engine.scheduler.worker
    launch = worker.launch

    def late(batch: Any, **_: Any) -> Any:
        handle = launch(batch, delay_sampling=True)
        device.work(3.0)  # a grammar makes up its mind
        handle.finish_sampling()
        handle.finish_sampling()  # once is enough
        return handle

    worker.launch = late  # type: ignore[method-assign]
    engine.add("a", [5, 6], max_new_tokens=6)
    engine.run()
    assert engine.output_ids("a") == normal_tokens([("a", [5, 6], 6)])["a"]


def test_a_cpu_gets_a_thread_and_a_stream_worker_needs_streams() -> None:
    engine = FakeEngine()
    worker = overlap_worker(engine.runner)
    assert isinstance(worker, OverlapWorker)
    worker.close()
    engine.close()
    device = VirtualDevice()
    StreamOverlapWorker(VirtualRunner(engine.runner, device, 1.0), device).close()


# ---- the same tokens -------------------------------------------------------------------------------------


def normal_tokens(requests: list[tuple[str, list[int], int]], **kwargs: Any) -> dict[str, list[int]]:
    engine = FakeEngine(disable_overlap_schedule=True, **kwargs)
    for rid, prompt, length in requests:
        engine.add(rid, prompt, max_new_tokens=length)
    engine.run()
    return {rid: engine.output_ids(rid) for rid, _, _ in requests}


@given(
    st.lists(st.tuples(st.integers(1, 90), st.integers(1, 30)), min_size=1, max_size=14),
    st.sampled_from([(1, -1), (1, 16), (4, 32)]),
    st.integers(0, 10**6),
)
@settings(max_examples=40)
def test_whatever_ends_aborts_or_is_sent_back_the_tokens_are_those_of_the_normal_loop(
    sizes: list[tuple[int, int]], page_and_chunk: tuple[int, int], seed: int
) -> None:
    """A small pool retracts, an end token ends early, some are aborted, everyone is sent back once."""
    page, chunk = page_and_chunk
    rng = np.random.default_rng(seed)
    requests = [
        (f"r{i}", [int(t) for t in rng.integers(2, 900, prompt)], length) for i, (prompt, length) in enumerate(sizes)
    ]
    common: dict[str, Any] = dict(
        page_size=page, chunked_prefill_size=chunk, max_running_requests=8, eos_ids=frozenset({1}),
        next_token=hashed_token(1000, eos_id=1), max_total_num_tokens=160,
    )  # fmt: skip
    expected = normal_tokens(requests, **common)
    engine, device = virtual_engine(overlap=True, debug_invariants=True, **common)
    engine.scheduler.new_token_ratio = 0.0  # hopes too much, so the pool runs full
    for rid, prompt, length in requests:
        engine.add(rid, prompt, max_new_tokens=length)
    aborted = {f"r{i}" for i in range(0, len(requests), 4)}
    for turn in range(500):
        if turn == 4:
            engine.send(PauseGenerationReqInput(reply_to="", mode="retract"))
            engine.send(ContinueGenerationReqInput(reply_to=""))
        if turn == 6:
            for rid in sorted(aborted):
                engine.send(AbortReq(rid=rid))
        device.work(float(rng.integers(0, 30)))
        engine.step()
        if turn > 6 and engine.scheduler.is_idle():
            break
    assert engine.scheduler.is_idle()
    for rid, _, _ in requests:
        got = engine.output_ids(rid)
        assert got == expected[rid] if rid not in aborted else got == expected[rid][: len(got)]


# ---- one copy to the device ----------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 40), st.sampled_from(["int64", "int32", "float64"])), min_size=1, max_size=9))
def test_arrays_travel_in_one_buffer_and_arrive_as_they_were(kinds: list[tuple[int, str]]) -> None:
    arrays = [np.arange(7 * i, 7 * i + length).astype(dtype) for i, (length, dtype) in enumerate(kinds)]
    buffer = pack(arrays, pin=False)
    for array, tensor in zip(arrays, unpack(buffer.clone(), arrays), strict=True):
        assert np.array_equal(tensor.numpy(), array) and tensor.numpy().dtype == array.dtype
    begins = [tensor.data_ptr() - buffer.data_ptr() for tensor in unpack(buffer, arrays) if len(tensor)]
    assert all(begin % ALIGNMENT == 0 for begin in begins)


def test_on_a_cpu_an_upload_copies_nothing() -> None:
    array = np.arange(5)
    (tensor,), pinned = upload([array], "cpu")
    assert pinned is None and tensor.data_ptr() == array.ctypes.data
    assert torch.equal(to_device([[1], [2]], "cpu"), torch.tensor([[1], [2]]))
    assert to_device([True], "cpu", torch.bool).dtype is torch.bool


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_cuda_streams_are_chosen_by_the_device_alone() -> None:
    engine = FakeEngine()
    engine.runner.device = "cuda"
    with pytest.raises((RuntimeError, AssertionError)):  # PyTorch finds no driver: the stream worker was chosen
        overlap_worker(engine.runner)
    engine.close()
