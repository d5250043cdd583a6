"""`tinysrt trace`, with a real scheduler and a model that computes nothing, and once with everything real."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tinysrt import trace_command
from tinysrt.bench.fake_model import FakeEngine
from tinysrt.errors import StartupError
from tinysrt.messages import AbortReq
from tinysrt.observe.merge import Event, load
from tinysrt.observe.trace import EVENTS, Recorder
from tinysrt.server_args import ServerArgs


class SchedulerOnly:
    """Stands where the Engine would: the prompts' characters go to a scheduler in this process."""

    def __init__(self, server_args: ServerArgs):
        self.trace = Recorder("scheduler", server_args.trace_dir)

    def __enter__(self) -> SchedulerOnly:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.trace.close()

    def generate(self, prompt: list[str], sampling_params: dict[str, Any]) -> None:
        engine = FakeEngine(trace=self.trace, disable_overlap_schedule=True)
        for number, text in enumerate(prompt):
            engine.add(f"r{number}", [ord(c) for c in text], max_new_tokens=sampling_params["max_new_tokens"])
        engine.run()


def run(*argv: str) -> int:
    return trace_command.main(argv, engine_class=SchedulerOnly)


def test_prompts_are_run_merged_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, perfetto = tmp_path / "run.jsonl", tmp_path / "run.json"
    flags = ["--max-new-tokens", "2", "-o", str(out), "--perfetto", str(perfetto), "--text"]
    assert run("hello", "hi", *flags) == 0
    text = capsys.readouterr().out
    assert "request r0" in text and "request r1" in text and "seats, step by step" in text
    assert "2 request(s) from scheduler" in text
    assert [event["e"] for event in load(out) if event.get("rid") == "r1"] == [
        "queued",
        "matched",
        "admitted",
        "appended",
        "appended",
        "finished",
    ]
    assert json.loads(perfetto.read_text())["traceEvents"]

    assert run("--from", str(out)) == 0  # what was written can be shown again
    assert "request r0" in capsys.readouterr().out


def test_with_an_output_file_the_terminal_gets_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("hello", "-o", str(tmp_path / "run.jsonl"), "--max-new-tokens", "1")
    assert len(capsys.readouterr().out.splitlines()) == 1


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["a prompt", "--from", "somewhere"],
        ["--from", "here", "--page-size", "4"],
        ["--from", "x", "--temperature", "1"],
    ],
)
def test_a_prompt_or_a_trace_must_be_named_and_not_both(argv: list[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        run(*argv)
    assert exit.value.code == 2


def test_a_file_that_is_no_trace_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text("{}\n")
    with pytest.raises(StartupError, match="not a trace"):
        run("--from", str(tmp_path / "x.jsonl"))
    with pytest.raises(StartupError):
        run("--from", str(tmp_path / "nothing here.jsonl"))
    with pytest.raises(StartupError, match="No such file"):
        run("hello", "--max-new-tokens", "1", "--perfetto", str(tmp_path / "no folder" / "run.json"))


def fields(event: Event) -> set[str]:
    return set(event) - {"t", "p", "e", "rid"}


def test_a_busy_scheduler_records_every_event_it_has_with_documented_fields(tmp_path: Path) -> None:
    trace = Recorder("scheduler", str(tmp_path))
    engine = FakeEngine(
        trace=trace,
        max_total_num_tokens=40,
        chunked_prefill_size=4,
        schedule_conservativeness=0.1,
        disable_overlap_schedule=True,
    )
    engine.add("a", list(range(1, 9)), max_new_tokens=20)
    engine.step()
    engine.step()
    engine.add("b", list(range(11, 18)), max_new_tokens=20)
    engine.add("gone", [1, 2, 3], max_new_tokens=20)
    engine.step()
    engine.send(AbortReq(rid="gone"))
    engine.run()
    trace.close()
    events = load(tmp_path)
    for event in events:
        assert fields(event) == set(EVENTS[event["e"]].fields), event
    by_model = {"sampled", "replayed"}  # the fake one draws nothing, and there is nothing to capture in it
    assert {event["e"] for event in events} == {n for n, k in EVENTS.items() if k.process == "scheduler"} - by_model


@pytest.mark.e2e
def test_a_real_run_tells_the_whole_life_in_order(tmp_path: Path) -> None:
    flags = ["--max-new-tokens", "3", "--max-total-tokens", "512", "--log-level", "warning"]
    assert trace_command.main(["The capital of France is", *flags, "-o", str(tmp_path / "run.jsonl")]) == 0
    events = load(tmp_path / "run.jsonl")
    for event in events:
        assert fields(event) == set(EVENTS[event["e"]].fields), event
        assert event["p"] == EVENTS[event["e"]].process
    first = list(dict.fromkeys(event["e"] for event in events))
    life = ["request_received", "tokenized", "queued", "matched", "admitted", "step", "forward_launched", "sampled"]
    positions = [first.index(name) for name in [*life, "appended", "finished", "detokenized", "text_sent"]]
    assert positions == sorted(positions)
    assert sum(event["e"] == "appended" for event in events) == 3
