"""A prefill, a mixed and a decode step on a device without values: nothing in them waits for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode

from tests.device.fake_device import NoWaiting, Waits, make
from tests.model_executor.harness import LittleScheduler, save_tiny_model
from tinysrt.model_executor import model_runner
from tinysrt.model_executor.forward_batch_info import ForwardBatch, ForwardMode, LogprobSpec
from tinysrt.model_executor.model_config import ModelConfig
from tinysrt.model_executor.model_runner import ModelRunner
from tinysrt.model_executor.models.registry import model_class
from tinysrt.observe.trace import Recorder
from tinysrt.sampling_params import SamplingParams
from tinysrt.server_args import ServerArgs

FAMILIES = ["llama", "qwen3", "qwen3_moe"]


@pytest.fixture(scope="module")
def device() -> torch.device:
    try:
        return make()
    except NotImplementedError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    return {family: _saved(family, tmp_path_factory.mktemp(family)) for family in FAMILIES}


def _saved(family: str, folder: Path) -> Path:
    save_tiny_model(family, folder)
    return folder


@pytest.fixture
def fake_mode(device) -> Iterator[FakeTensorMode]:
    with FakeTensorMode() as mode:
        yield mode


def load_nothing(config: ModelConfig, dtype: torch.dtype, device: torch.device, *_: Any, kernels, parallel, **__: Any):
    """The model as `load_model` builds it, with weights that have no values."""
    with torch.device("meta"):
        model = model_class(config)(config, kernels=kernels, parallel=parallel)
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                empty = torch.empty(parameter.shape, dtype=dtype, device=device)
                module._parameters[name] = nn.Parameter(empty, requires_grad=False)
    model.finish_loading()
    return model.eval()


@pytest.fixture
def make_runner(device, folders, fake_mode, monkeypatch) -> Callable[[str, torch.dtype], ModelRunner]:
    monkeypatch.setattr(model_runner, "load_model", load_nothing)
    monkeypatch.setattr(model_runner, "free_memory", lambda device: 2**33)

    def build(family: str, dtype: torch.dtype) -> ModelRunner:
        folder = str(folders[family])
        args = ServerArgs(
            model_path=folder, device="cpu", max_total_tokens=512, max_running_requests=8, num_threads=1
        ).resolve()
        backends = {name: "triton" for name in vars(args) if name.endswith("attention_backend")}
        config = dataclasses.replace(ModelConfig.from_pretrained(folder), dtype=dtype)
        args = dataclasses.replace(args, device=device.type, kv_pool_bytes=2**24, **backends)
        return ModelRunner(args, config, trace=Recorder("test"))

    return build


def moved(value: Any, device: torch.device) -> Any:
    """A batch, with every tensor in it on the device."""
    if isinstance(value, torch.Tensor):
        return torch.empty(value.shape, dtype=value.dtype, device=device)  # its values do not matter
    if isinstance(value, (list, tuple)):
        return type(value)(moved(item, device) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.replace(
            value, **{f.name: moved(getattr(value, f.name), device) for f in dataclasses.fields(value)}
        )
    return value


SAMPLINGS = {
    "greedy": SamplingParams(top_k=1),
    "filtered": SamplingParams(temperature=0.7, top_k=20, top_p=0.9, min_p=0.01, sampling_seed=3),
    "plain": SamplingParams(sampling_seed=1),
    "penalized": SamplingParams(
        sampling_seed=5, frequency_penalty=0.5, repetition_penalty=1.2, logit_bias={3: 1.0}, min_new_tokens=2
    ),
}


def run(runner: ModelRunner, batch: ForwardBatch) -> set[str]:
    """One step; the operations that it ran on the device."""
    batch = moved(batch, runner.device)
    with NoWaiting() as watch:
        logits = runner.forward(batch)
        output = runner.sample(logits, batch)
    assert output.next_token_ids.shape == (batch.batch_size,)
    assert output.next_token_ids.device.type == runner.device.type
    return watch.seen


@pytest.mark.parametrize(
    ("family", "sampling"),
    [("llama", sampling) for sampling in SAMPLINGS] + [(family, "greedy") for family in FAMILIES[1:]],
)
def test_no_step_waits_for_the_device(family, sampling, make_runner):
    runner = make_runner(family, torch.bfloat16)
    scheduler = LittleScheduler(runner)
    params = SAMPLINGS[sampling]
    rows = [scheduler.add([5, 6, 7, 8, 9], params), scheduler.add([4, 3], params)]
    for row in rows:
        row.stop_ids = frozenset({7})
    seen = run(runner, scheduler.batch(ForwardMode.EXTEND, rows, [5, 2]))
    assert {"tinysrt::rope_and_store", "tinysrt::extend_attention", "tinysrt::add_rms_norm"} <= seen
    seen = run(runner, scheduler.batch(ForwardMode.DECODE, rows, [6, 3]))
    assert {"tinysrt::rope_and_store", "tinysrt::decode_attention", "tinysrt::silu_and_mul"} <= seen
    late = scheduler.add([9, 9, 9], params)
    seen = run(runner, scheduler.batch(ForwardMode.MIXED, [late, *rows], [3, 7, 4], decoding=2))
    assert {"tinysrt::extend_attention", "tinysrt::decode_attention"} <= seen


def test_log_probabilities_do_not_wait_either(make_runner):
    runner = make_runner("llama", torch.float32)
    scheduler = LittleScheduler(runner)
    # Two requests: a fake tensor of one element on the host keeps its value, and tries to move it.
    rows = [scheduler.add([5, 6, 7, 8], SAMPLINGS["filtered"]), scheduler.add([3, 4], SAMPLINGS["filtered"])]
    asked = [True, True], [3, 0], [[1, 2], None]
    spec = LogprobSpec(*asked, input_start=[0, 0], input_targets=[[6, 7, 8], [4]])
    run(runner, scheduler.batch(ForwardMode.EXTEND, rows, [4, 2], logprob=spec))
    run(runner, scheduler.batch(ForwardMode.DECODE, rows, [5, 3], logprob=LogprobSpec(*asked)))


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x.sum().item(),
        lambda x: x.tolist(),
        lambda x: bool(x.sum() > 0),
        lambda x: x[x > 0],
        lambda x: x.cpu(),
        lambda x: torch.zeros(3).copy_(x),
        lambda x: x + torch.zeros(3),
    ],
    ids=["item", "tolist", "if", "boolean mask", "cpu", "copy", "mixed devices"],
)
def test_what_waits_is_noticed(wait, device, fake_mode):
    x = torch.zeros(3, device=device)
    with NoWaiting(), pytest.raises((Waits, DataDependentOutputException, DynamicOutputShapeException, RuntimeError)):
        wait(x)
