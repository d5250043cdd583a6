"""torch.compile of whole decode steps: the CPU's graph. Compiling takes seconds a bucket, so one tiny model does."""

from __future__ import annotations

import shutil
from pathlib import Path

import psutil
import pytest
import torch

from tests.equality.harness import Ask, Ledger, Model, RealEngine, Switches
from tests.equality.reference import Reference
from tests.equality.workloads import LENGTH, catalog
from tests.graph.conftest import capturing_runner, graphs_of
from tests.model_executor.harness import save_tiny_model
from tinysrt.errors import StartupError
from tinysrt.sampling_params import SamplingParams

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("compiled")
    return Model(folder, Reference(save_tiny_model("llama", folder, num_hidden_layers=2)), pool_tokens=1024)


def test_without_a_compiler_the_start_up_stops_and_says_what_to_install(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(StartupError, match="needs a C.. compiler, .*apt-get install g"):
        capturing_runner(folder, "compile")


@needs_compiler
@pytest.mark.slow
@pytest.mark.timeout(1200)  # a compiler on a busy machine
def test_compiled_steps_give_the_references_tokens(model: Model) -> None:
    """One bucket, of two lanes: one request with padding, two, then more than it takes; penalties and scores."""
    prompts = catalog()[5:10]
    asks = [Ask("r0", prompts[0]).having(max_new_tokens=LENGTH), Ask("r1", prompts[1], at=4, logprobs=True, top=2)]
    asks[1] = asks[1].having(max_new_tokens=LENGTH, frequency_penalty=0.7)
    drawn = SamplingParams(temperature=0.8, sampling_seed=5, max_new_tokens=9)
    asks += [Ask(f"r{i}", prompts[i], drawn, at=LENGTH + 8) for i in (2, 3, 4)]
    ledger = Ledger()
    with RealEngine(model, Switches("overlap", graph="compile")) as engine:
        answers = engine.play(asks)
        assert engine.replayed >= LENGTH and engine.widest == 3
    for ask in asks:
        ledger.check(model, ask, answers[ask.rid])
    assert ledger.excused == 0


@needs_compiler
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_compiled_padding_writes_the_reserved_slot_only_and_the_step_is_the_eager_one(model: Model) -> None:
    runner = model.runner_for("compile")
    graphs, pool = graphs_of(runner), runner.kv_pool
    buffers = [*pool.k_buffer, *pool.v_buffer]
    graphs.lanes.table[:] = graphs.lanes.padding
    # input id, row, position, length and slot of one lane in the bucket of two
    graphs.lanes.table[:, :1] = torch.tensor([[9], [1], [2], [3], [100]])
    before = [buffer.clone() for buffer in buffers]
    with torch.inference_mode():
        graphs.replays[2]()
        compiled, after = graphs.logits[:1].clone(), [buffer.clone() for buffer in buffers]
        for buffer, saved in zip(buffers, before, strict=True):
            buffer.copy_(saved)
        graphs.step(2)()
    torch.testing.assert_close(compiled, graphs.logits[:1], rtol=1e-4, atol=1e-4)
    mine = torch.tensor([slot in (0, 100) for slot in range(len(before[0]))])
    for old, new, eager in zip(before, after, buffers, strict=True):
        assert torch.equal(old[~mine], new[~mine])
        torch.testing.assert_close(new[100], eager[100])
    children = [" ".join(child.cmdline()) for child in psutil.Process().children(recursive=True)]
    assert not [line for line in children if "compile_worker" in line], "the compiler's helpers have gone"
