"""The recorder writes what happened, once, in order, and costs nothing when it is off."""

from __future__ import annotations

import ast
import io
import json
import multiprocessing
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

import tinysrt
from tinysrt.observe.merge import TraceFormatError, load, merge, rids
from tinysrt.observe.perfetto import export_perfetto, to_perfetto
from tinysrt.observe.render import render_request, render_seats
from tinysrt.observe.trace import EVENTS, FLUSH_SECONDS, TRACE_VERSION, Recorder

PACKAGE = Path(tinysrt.__file__).parent


def test_off_records_nothing_and_makes_no_file(tmp_path: Path) -> None:
    trace = Recorder("scheduler")
    assert not trace.on
    trace.event("queued", rid="a")
    trace.flush()
    trace.close()
    assert list(tmp_path.iterdir()) == []


def test_a_file_has_a_header_and_one_line_per_event(tmp_path: Path) -> None:
    trace = Recorder("scheduler", str(tmp_path / "made" / "on the way"))
    trace.event("queued", rid="a", waiting=3)
    trace.event("step", step=np.int64(1), running=np.arange(2, dtype=np.int32), chunked=None)
    trace.close()
    header, queued, step = (json.loads(line) for line in trace.path.read_text().splitlines())
    assert header["trace"] == TRACE_VERSION and header["process"] == "scheduler" and header["pid"] > 0
    assert {key: queued[key] for key in ("p", "e", "rid", "waiting")} == {
        "p": "scheduler",
        "e": "queued",
        "rid": "a",
        "waiting": 3,
    }
    assert step["running"] == [0, 1] and step["step"] == 1 and "rid" not in step
    assert header["t"] <= queued["t"] <= step["t"]


def test_an_event_shows_the_moment_and_not_what_the_list_became(tmp_path: Path) -> None:
    trace = Recorder("scheduler", str(tmp_path))
    seats = ["a"]
    trace.event("step", step=1, running=seats)
    seats.append("b")
    trace.close()
    assert load(trace.path)[0]["running"] == ["a"]


def test_an_idle_process_still_writes_what_it_has(tmp_path: Path) -> None:
    trace = Recorder("scheduler", str(tmp_path))
    trace.event("queued", rid="a", waiting=0)
    deadline = time.monotonic() + 50 * FLUSH_SECONDS
    while not load(trace.path) and time.monotonic() < deadline:
        time.sleep(FLUSH_SECONDS / 4)
    assert [event["e"] for event in load(trace.path)] == ["queued"]
    trace.close()


def test_two_threads_lose_no_line(tmp_path: Path) -> None:
    trace = Recorder("scheduler", str(tmp_path))

    def record() -> None:
        for number in range(3000):
            trace.event("appended", rid=str(number), ids=[number])

    threads = [threading.Thread(target=record) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    trace.close()
    trace.close()  # twice is fine
    trace.event("queued", rid="late")
    assert len(load(trace.path)) == 6000


def _child(directory: str) -> None:
    Recorder("detokenizer", directory).event("detokenized", rid="a", text="é", tokens=1, finished=True)
    # No close: leaving the process writes the rest.


def test_files_of_several_processes_merge_in_time_order(tmp_path: Path) -> None:
    parts = tmp_path / "parts"
    here = Recorder("tokenizer", str(parts))
    here.event("request_received", rid="a", stream=False)
    child = multiprocessing.get_context("spawn").Process(target=_child, args=(str(parts),))
    child.start()
    child.join()
    here.event("text_sent", rid="a", chars=1, finished=True)
    here.close()
    events = merge(parts, tmp_path / "run.jsonl")
    assert [event["e"] for event in events] == ["request_received", "detokenized", "text_sent"]
    assert load(tmp_path / "run.jsonl") == events
    assert json.loads((tmp_path / "run.jsonl").read_text().splitlines()[0]) == {
        "trace": TRACE_VERSION,
        "merged": ["tokenizer", "detokenizer"],
    }


def test_a_cut_last_line_is_not_an_event_yet(tmp_path: Path) -> None:
    file = tmp_path / "scheduler-1.jsonl"
    file.write_text('{"trace":1,"process":"scheduler","pid":1,"t":1}\n{"t":2,"p":"scheduler","e":"step"}\n{"t":3,"p"')
    assert [event["t"] for event in load(file)] == [2]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"hello": 1}\n', "not a trace"),
        ("[1]\n", "not a trace"),
        ("nonsense\n", "line 1: not JSON"),
        ('{"trace": 99}\n', "trace version 99"),
    ],
)
def test_what_is_not_a_trace_is_refused_with_its_name(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "x.jsonl"
    file.write_text(text)
    with pytest.raises(TraceFormatError, match=message):
        load(file)


def _run() -> list[dict]:
    def event(t: int, p: str, e: str, **fields: object) -> dict:
        return {"t": t * 1000, "p": p, "e": e, **fields}

    seats = {"waiting_queue": [], "new_batch": ["a"], "running_batch": [], "cur_batch": ["a"], "chunked_req": None}
    return [
        event(0, "tokenizer", "request_received", rid="a", stream=True),
        event(1, "tokenizer", "tokenized", rid="a", prompt_tokens=4),
        event(2, "tokenizer", "sent", rid="a"),
        event(3, "scheduler", "queued", rid="a", waiting=0, prompt_tokens=4),
        event(4, "scheduler", "admitted", rid="a", cached=0, extend=4),
        event(5, "scheduler", "step", step=1, mode="EXTEND", free_tokens=9, evictable_tokens=0, **seats),
        event(6, "scheduler", "forward_launched", step=1, mode="EXTEND", rids=["a"], tokens=4),
        event(16, "scheduler", "forward_done", step=1),
        event(17, "scheduler", "appended", rid="a", ids=[7]),
        event(18, "scheduler", "retracted", rid="a"),
        event(19, "scheduler", "admitted", rid="a", cached=0, extend=5),
        event(20, "scheduler", "appended", rid="a", ids=[8]),
        event(21, "scheduler", "finished", rid="a", reason="stop"),
        event(22, "detokenizer", "detokenized", rid="a", text="hi", finished=True),
        event(23, "tokenizer", "text_sent", rid="a", finished=True),
    ]


def test_perfetto_spans_are_balanced_and_tell_the_phases(tmp_path: Path) -> None:
    trace = to_perfetto(_run())["traceEvents"]
    begun = [entry["name"] for entry in trace if entry["ph"] == "b"]
    ended = [entry["name"] for entry in trace if entry["ph"] == "e"]
    waits = ["waiting", "prefill", "decode"]
    assert begun == ended == ["tokenize", "to scheduler", *waits, *waits, "deliver"]
    (forward,) = (entry for entry in trace if entry["ph"] == "X")
    assert forward["ts"] == 6 and forward["dur"] == 10
    assert [entry["args"] for entry in trace if entry["ph"] == "C"] == [
        {"waiting_queue": 0, "running_batch": 0},
        {"free_tokens": 9, "evictable_tokens": 0},
    ]
    export_perfetto(_run(), tmp_path / "run.json")
    assert json.loads((tmp_path / "run.json").read_text())["traceEvents"] == trace


def test_perfetto_closes_a_request_that_the_run_left_open() -> None:
    trace = to_perfetto(_run()[:5])["traceEvents"]
    assert [e["name"] for e in trace if e["ph"] == "b"] == [e["name"] for e in trace if e["ph"] == "e"]


def _text(table: object) -> str:
    console = Console(file=io.StringIO(), width=140)
    console.print(table)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_a_life_is_rendered_line_by_line() -> None:
    text = _text(render_request(_run(), "a"))
    assert "request a" in text and "prompt_tokens=4" in text
    lines = [line for line in text.splitlines() if "scheduler" in line]
    assert [line.split()[3] for line in lines][:5] == [
        "queued",
        "admitted",
        "forward_launched",
        "forward_done",
        "appended",
    ]
    assert "text='hi'" in text


def test_seats_are_rendered_with_short_names() -> None:
    row = _text(render_seats(_run())).splitlines()[-1].split()
    assert row == ["1", "EXTEND", "·", "0", "·", "0", "·", "9", "0"]
    assert rids(_run()) == ["a"]


def _recorded() -> list[tuple[str, str, ast.Call]]:
    """(event name, file, call) of every `….event("name", …)` in the package."""
    found = []
    for file in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "event":
                name = node.args[0] if node.args else None
                if isinstance(name, ast.Constant) and isinstance(name.value, str):
                    found.append((name.value, file.name, node))
    return found


def test_every_event_is_documented_with_the_fields_that_the_code_records() -> None:
    for name, file, call in _recorded():
        assert name in EVENTS, f"{file}, line {call.lineno}: {name!r} is not in trace.EVENTS"
        fields = {keyword.arg for keyword in call.keywords if keyword.arg} - {"rid"}
        assert fields <= set(EVENTS[name].fields), f"{file}, line {call.lineno}: {name} records {sorted(fields)}"


def test_every_documented_event_is_recorded_somewhere() -> None:
    # `end` in batch_result_processor.py chooses between these two by a variable.
    assert {name for name, _, _ in _recorded()} | {"finished", "aborted"} == set(EVENTS)
