"""From the flags to the running scheduler: what is captured at start-up is what decodes."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from tinysrt.bench.fake_model import ListInbox, ListOutbox
from tinysrt.managers.scheduler import Scheduler
from tinysrt.managers.scheduler_process import build_scheduler
from tinysrt.messages import TokenizedGenerateReqInput
from tinysrt.model_executor.model_runner import ModelRunner
from tinysrt.observe.merge import load
from tinysrt.observe.trace import Recorder
from tinysrt.sampling_params import SamplingParams
from tinysrt.server_args import ServerArgs


def start(folder: Path, **flags: Any) -> tuple[Scheduler, ModelRunner, ListInbox, ListOutbox]:
    args = ServerArgs(
        model_path=str(folder), device="cpu", max_total_tokens=512, num_threads=1, skip_tokenizer_init=True, **flags
    ).resolve()
    inbox, outbox = ListInbox([]), ListOutbox()
    fakes: dict[str, Any] = {"inbox": inbox, "outbox": outbox}
    scheduler, _ = build_scheduler(args, trace=Recorder("scheduler"), **fakes)
    runner = scheduler.worker.runner  # type: ignore[attr-defined]
    assert isinstance(runner, ModelRunner)
    return scheduler, runner, inbox, outbox


@pytest.mark.parametrize("overlap", [True, False])
def test_a_server_that_was_told_to_capture_decodes_by_replay(
    folder: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, tmp_path: Path, overlap: bool
) -> None:
    outputs = []
    caplog.set_level(logging.INFO, logger="tinysrt")
    for capture in ("tape", "none"):
        scheduler, runner, inbox, outbox = start(
            folder,
            graph_capture=capture,
            cuda_graph_max_bs_decode=4,
            disable_overlap_schedule=not overlap,
            decode_log_interval=1,
        )
        runner.trace = Recorder("scheduler", str(tmp_path / capture))
        caplog.clear()
        assert ("Capturing decode steps (tape) ..." in capsys.readouterr().err) == (capture == "tape")
        for i in range(3):
            params = SamplingParams(top_k=1, max_new_tokens=5 + 2 * i, ignore_eos=True)
            inbox.messages.append(
                TokenizedGenerateReqInput(rid=f"r{i}", reply_to="", input_ids=[30 + i, 31, 32], sampling_params=params)
            )
        step = scheduler.step_overlap if overlap else scheduler.step_normal
        for _ in range(14):
            step(inbox.receive(block=False))
        assert scheduler.is_idle()
        scheduler.worker.close()
        outputs.append([outbox.output_ids(f"r{i}") for i in range(3)])
        if capture == "tape":
            assert runner.graphs is not None and runner.graphs.buckets == [1, 2, 4]
            assert runner.graphs.replayed == 8, "a step for each token of the longest answer but its first"
        else:
            assert runner.graphs is None
        runner.trace.close()
        replayed = [event["bucket"] for event in load(tmp_path / capture) if event["e"] == "replayed"]
        assert replayed == ([4, 4, 4, 4, 2, 2, 1, 1] if capture == "tape" else [])
        assert caplog.text.count(f"cuda graph: {capture == 'tape'}") == 8 == caplog.text.count("Decode batch")
    assert outputs[0] == outputs[1]
    assert [len(ids) for ids in outputs[0]] == [5, 7, 9]
