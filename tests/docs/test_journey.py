"""Chapter 2 shows a trace: it is the one that its command records."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tinysrt import trace_command
from tinysrt.observe.merge import load
from tinysrt.observe.render import describe


@pytest.mark.e2e
def test_the_trace_in_the_chapter_is_what_its_command_records(root: Path, tmp_path: Path) -> None:
    chapter = (root / "docs" / "chapters" / "02-journey.md").read_text()
    shown = re.search(r'```text title="process, event, what"\n(.*?)```', chapter, re.S)
    command = re.search(r'tinysrt trace "(.+?)" (.+?) --text', chapter)
    assert shown is not None and command is not None
    flags = [*command[2].split(), "--max-total-tokens", "512", "--log-level", "warning"]
    trace_command.main([command[1], *flags, "-o", str(tmp_path / "run.jsonl")])
    events = [event for event in load(tmp_path / "run.jsonl") if event["e"] != "step"]
    recorded = [f"{event['p']:13}{event['e']:18}{describe(event)}".rstrip() for event in events]
    # `sent` is written after the message has left, so the scheduler may be faster: compare process by process.
    for process in ("tokenizer", "scheduler", "detokenizer"):
        lines = [line for line in shown[1].splitlines() if line.startswith(process)]
        assert lines == [line for line in recorded if line.startswith(process)]
