"""The graph runner on a CPU: replay equals the step itself bit for bit, and padding harms nobody."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.graph.conftest import capturing_runner, graphs_of
from tests.model_executor.harness import LittleScheduler, Row, make_runner, save_tiny_model
from tinysrt.errors import StartupError
from tinysrt.model_executor.cuda_graph_runner import CudaGraphRunner, cuda_buckets, decode_buckets, default_max_bs
from tinysrt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from tinysrt.model_executor.graph_capture import CaptureError, EagerCapture, Step, TapeCapture
from tinysrt.model_executor.model_runner import ModelRunner
from tinysrt.sampling_params import SamplingParams
from tinysrt.server_args import ServerArgs

BUCKETS = [1, 2, 4, 8, 11]


@pytest.fixture(scope="module")
def tape(folder: Path) -> ModelRunner:
    return capturing_runner(folder, "tape", cuda_graph_bs_decode=BUCKETS)


@pytest.fixture(scope="module")
def plain(folder: Path) -> ModelRunner:
    return make_runner(folder, max_total_tokens=1024)


def prefilled(runner: ModelRunner, lengths: list[int], seed: int = 0) -> tuple[LittleScheduler, list[Row]]:
    """Requests with prompts of these lengths, ready to decode."""
    scheduler = LittleScheduler(runner, seed)
    prompts = [[(7 * i + 13 * j + seed) % 290 + 8 for j in range(length)] for i, length in enumerate(lengths)]
    rows = [scheduler.add(prompt) for prompt in prompts]
    scheduler.prefill(rows)
    return scheduler, rows


def decode_batch(scheduler: LittleScheduler, rows: list[Row]) -> ForwardBatch:
    return scheduler.batch(ForwardMode.DECODE, rows, [row.computed + 1 for row in rows])


def kv_of(runner: ModelRunner) -> list[torch.Tensor]:
    return [buffer.clone() for buffer in (*runner.kv_pool.k_buffer, *runner.kv_pool.v_buffer)]


def restore(runner: ModelRunner, kv: list[torch.Tensor]) -> None:
    for buffer, saved in zip((*runner.kv_pool.k_buffer, *runner.kv_pool.v_buffer), kv, strict=True):
        buffer.copy_(saved)


class Counting:
    """Replays of a runner, by bucket."""

    def __init__(self, runner: CudaGraphRunner, monkeypatch: pytest.MonkeyPatch):
        self.seen: list[int] = []
        for bucket, replay in runner.replays.items():
            monkeypatch.setitem(runner.replays, bucket, self.counted(bucket, replay))

    def counted(self, bucket: int, replay: Step) -> Step:
        def call() -> None:
            self.seen.append(bucket)
            replay()

        return call


# ---- replay is the step ------------------------------------------------------------------------------


@pytest.mark.parametrize("size", range(1, 12))
def test_replay_is_bit_for_bit_the_step_on_the_same_padded_batch(tape: ModelRunner, size: int) -> None:
    scheduler, rows = prefilled(tape, [3 + 5 * i for i in range(size)])
    batch, graphs = decode_batch(scheduler, rows), graphs_of(tape)
    bucket = graphs.bucket_for(batch)
    assert bucket == min(b for b in BUCKETS if b >= size)
    before = kv_of(tape)
    replayed = tape.forward(batch).next_token_logits.clone()
    after = kv_of(tape)

    restore(tape, before)
    graphs.logits.fill_(float("nan"))
    with torch.inference_mode():
        graphs.step(bucket)()  # the lanes still hold the padded batch
    assert torch.equal(graphs.logits[:size], replayed)
    assert all(torch.equal(a, b) for a, b in zip(kv_of(tape), after, strict=True))


@given(st.lists(st.lists(st.integers(1, 60), min_size=1, max_size=12), min_size=1, max_size=4), st.integers(0, 9))
@settings(max_examples=25)
def test_any_sequence_of_batches_gives_what_an_unpadded_forward_gives(
    tape: ModelRunner, plain: ModelRunner, batches: list[list[int]], seed: int
) -> None:
    """Small after large, large after small, beyond the largest: one runner replays where it can, the other never."""
    for lengths in batches:
        logits = []
        for runner in (tape, plain):
            scheduler, rows = prefilled(runner, lengths, seed)
            logits.append(runner.forward(decode_batch(scheduler, rows)).next_token_logits.clone())
        torch.testing.assert_close(logits[0], logits[1], rtol=1e-4, atol=1e-4)


def test_several_decode_steps_give_the_same_tokens(tape: ModelRunner, plain: ModelRunner) -> None:
    params = SamplingParams(top_k=1, frequency_penalty=0.5, min_new_tokens=4)
    outputs = []
    for runner in (tape, plain):
        scheduler = LittleScheduler(runner)
        rows = [scheduler.add([9 + i, 40, 3 * i + 8], params) for i in range(7)]
        scheduler.prefill(rows)
        scheduler.decode(rows, steps=12)
        outputs.append([row.output for row in rows])
    assert outputs[0] == outputs[1]


# ---- padding -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [3, 5, 7, 9])
def test_padding_writes_the_reserved_slot_and_no_other(tape: ModelRunner, size: int) -> None:
    scheduler, rows = prefilled(tape, [4 + i for i in range(size)])
    batch = decode_batch(scheduler, rows)
    before = kv_of(tape)
    tape.forward(batch)
    written = {0, *batch.out_cache_loc.tolist()}
    others = torch.tensor([slot for slot in range(len(before[0])) if slot not in written])
    for old, new in zip(before, kv_of(tape), strict=True):
        assert torch.equal(old[others], new[others])
        assert not torch.equal(old[batch.out_cache_loc], new[batch.out_cache_loc])


def test_lanes_that_a_larger_batch_left_behind_are_padding_again(tape: ModelRunner) -> None:
    """Seven after eight in a bucket of eight: the eighth's slot has a new owner meanwhile (trap 63)."""
    scheduler, rows = prefilled(tape, [5] * 8)
    tape.forward(decode_batch(scheduler, rows))
    last_slot = rows[7].slots[-1]
    for buffer in (*tape.kv_pool.k_buffer, *tape.kv_pool.v_buffer):
        buffer[last_slot] = 42.0  # what the new owner keeps there
    tape.forward(decode_batch(scheduler, rows[:7]))
    for buffer in (*tape.kv_pool.k_buffer, *tape.kv_pool.v_buffer):
        assert (buffer[last_slot] == 42.0).all()
    lanes = graphs_of(tape).lanes
    assert torch.equal(lanes.table[:, 7:8], lanes.padding)


# ---- what is replayed, and what is not ------------------------------------------------------------------


def test_the_largest_bucket_is_replayed_and_one_more_runs_eagerly(
    tape: ModelRunner, plain: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    counting = Counting(graphs_of(tape), monkeypatch)
    for size, expected in ((11, [11]), (12, [11]), (1, [11, 1])):
        scheduler, rows = prefilled(tape, [6] * size)
        got = tape.forward(decode_batch(scheduler, rows)).next_token_logits.clone()
        assert counting.seen == expected
        scheduler, rows = prefilled(plain, [6] * size)
        want = plain.forward(decode_batch(scheduler, rows)).next_token_logits
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_prefills_and_mixed_steps_run_eagerly(tape: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    counting = Counting(graphs_of(tape), monkeypatch)
    scheduler, rows = prefilled(tape, [5, 6])
    new = scheduler.add([20, 21, 22])
    mixed = scheduler.batch(ForwardMode.MIXED, [new, *rows], [3, 6, 7], decoding=2)
    tape.forward(mixed)
    assert counting.seen == []


def test_without_padding_only_exact_sizes_are_replayed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = capturing_runner(folder, "eager", cuda_graph_bs_decode=[1, 2, 4], disable_cuda_graph_padding=True)
    counting = Counting(graphs_of(runner), monkeypatch)
    for size in (1, 2, 3, 4):
        scheduler, rows = prefilled(runner, [6] * size)
        runner.forward(decode_batch(scheduler, rows))
    assert counting.seen == [1, 2, 4]


def test_capture_goes_from_the_largest_to_the_smallest_and_reports(folder: Path) -> None:
    runner = make_runner(folder, max_total_tokens=256)
    graphs = CudaGraphRunner(
        runner.model, runner.attention, EagerCapture(), [1, 2, 4], vocab_size=runner.vocab_size, device=runner.device
    )
    reported: list[tuple[str, int, int]] = []
    graphs.capture(lambda *report: reported.append(report))
    assert list(graphs.replays) == [4, 2, 1]
    assert [done for _, done, _ in reported] == [0, 1, 2, 3] and {total for _, _, total in reported} == {3}


# ---- what cannot be captured --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "look",
    [
        lambda x: x.sum().item(),
        lambda x: x.tolist(),
        lambda x: bool(x.sum() > 0),
        lambda x: x[x > 0],
        lambda x: x.numpy(),
        lambda x: torch.nonzero(x),
        lambda x: range(int(x[0])),
    ],
    ids=["item", "tolist", "bool", "mask", "numpy", "nonzero", "int"],
)
def test_a_captured_step_must_not_look_at_values(look: object) -> None:
    x = torch.arange(4)
    with pytest.raises(CaptureError, match="values of a tensor"):
        TapeCapture().capture(lambda: look(x))  # type: ignore[operator]


def test_indexing_by_position_is_no_look() -> None:
    x, index, out = torch.arange(4.0), torch.tensor([2, 0]), torch.zeros(2)
    replay = TapeCapture().capture(lambda: out.copy_(x[index] * 2))
    x.add_(10)
    index.copy_(torch.tensor([1, 3]))
    replay()
    assert out.tolist() == [22.0, 26.0]


def test_the_tape_plays_views_writes_in_place_and_many_results() -> None:
    x, out = torch.randn(6, 4), torch.zeros(6)

    def step() -> None:
        left, right = x.view(2, 12).transpose(0, 1).chunk(2, dim=1)
        values, index = (left * right).sort(dim=0)  # two new tensors
        scratch = torch.empty(12)
        scratch.copy_(values.flatten())
        scratch[:6].add_(index[:6].flatten()).mul_(2)
        out.copy_(scratch[:6])

    replay = TapeCapture().capture(step)
    for _ in range(3):
        x.normal_()
        replay()
        replayed = out.clone()
        step()
        assert torch.equal(out, replayed)


def test_the_tape_keeps_what_an_operator_returns_beside_what_it_writes() -> None:
    """`rope_and_store` fills the KV pool and returns rotated queries; the next call reads the queries."""
    library = torch.library.Library("tinysrt_test", "DEF")
    library.define("fill_and_return(Tensor x, Tensor(a!) y) -> Tensor")
    library.impl("fill_and_return", lambda x, y: y.copy_(x) * 2, "CompositeExplicitAutograd")
    x, y, out = torch.ones(3), torch.zeros(3), torch.zeros(3)
    replay = TapeCapture().capture(lambda: out.copy_(torch.ops.tinysrt_test.fill_and_return(x, y) + 1))
    x.fill_(5.0)
    replay()
    assert y.tolist() == [5.0] * 3 and out.tolist() == [11.0] * 3


def test_kernels_that_read_lengths_on_the_host_are_refused_by_name(tmp_path: Path) -> None:
    """The plain PyTorch grouped GEMM asks the host how many rows each expert has."""
    save_tiny_model("qwen3_moe", tmp_path)
    with pytest.raises(StartupError, match="cannot be captured.*--disable-cuda-graph"):
        capturing_runner(tmp_path, "tape", attention_backend="torch_native")


# ---- buckets -------------------------------------------------------------------------------------------


def test_the_buckets_are_sglangs() -> None:
    assert len(cuda_buckets(256)) == 36 and len(cuda_buckets(512)) == 52
    assert cuda_buckets(24) == [1, 2, 4, 8, 12, 16, 24]
    assert cuda_buckets(10) == [1, 2, 4, 8, 10], "the largest is added where it is missing"
    assert cuda_buckets(300)[-3:] == [272, 288, 300]
    gib = 2**30
    assert [default_max_bs(n * gib, 1) for n in (16, 24, 40, 80, 140, 180)] == [8, 48, 32, 256, 256, 512]
    assert [default_max_bs(n * gib, 4) for n in (16, 24, 40, 80, 140, 180)] == [8, 160, 160, 512, 512, 512]


def args_of(**given: object) -> ServerArgs:
    return ServerArgs(model_path="x", device="cpu", **{"graph_capture": "tape", **given}).resolve()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "rows", "expected"),
    [
        ({}, 100, [1, 2, 4, 8, 16, 32]),
        ({}, 6, [1, 2, 4, 6]),
        ({"cuda_graph_max_bs_decode": 5}, 100, [1, 2, 4, 5]),
        ({"cuda_graph_bs_decode": [7, 3, 3]}, 100, [3, 7]),
        ({"cuda_graph_bs_decode": [2, 8, 64]}, 10, [2, 8, 10]),
        ({"disable_cuda_graph_padding": True, "cuda_graph_max_bs_decode": 4}, 100, [1, 2, 3, 4]),
        ({"graph_capture": "compile", "torch_compile_max_bs": 4}, 100, [1, 2, 4]),
    ],
)
def test_buckets_are_what_the_flags_say_cut_at_the_number_of_rows(
    given: dict[str, object], rows: int, expected: list[int]
) -> None:
    assert decode_buckets(args_of(**given), rows, 0) == expected


def test_the_flags_resolve_to_one_way_of_capturing() -> None:
    assert ServerArgs(model_path="x", device="cpu").resolve().graph_capture == "none"
    compiled = ServerArgs(model_path="x", device="cpu", enable_torch_compile=True).resolve()
    assert (compiled.graph_capture, compiled.cuda_graph_backend_decode) == ("compile", "full")
    assert args_of(graph_capture="compile").enable_torch_compile
    assert compiled.resolve() == compiled


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({"disable_cuda_graph": True}, "--disable-cuda-graph"),
        ({"cuda_graph_backend_decode": "disabled"}, "--disable-cuda-graph"),
        ({"enable_torch_compile": True}, "--enable-torch-compile"),
        ({"graph_capture": "cuda"}, "CUDA device"),
        ({"graph_capture": "compile", "disable_cuda_graph_padding": True}, "padding"),
        ({"cuda_graph_bs_decode": [0, 2]}, "at least 1"),
        ({"cuda_graph_bs_decode": [1, 2], "cuda_graph_max_bs_decode": 4}, "two largest sizes"),
        ({"tensor_parallel_size": 2}, "--tp"),
        ({"cuda_graph_backend_decode": "breakable"}, "full, disabled"),
        ({"cuda_graph_backend_prefill": "full"}, "cuda-graph-backend-prefill"),
        ({"cuda_graph_max_bs_prefill": 8}, "cuda-graph-max-bs-prefill"),
    ],
)
def test_what_contradicts_itself_is_refused_by_name(given: dict[str, object], word: str) -> None:
    with pytest.raises(StartupError, match=word):
        args_of(**given)
