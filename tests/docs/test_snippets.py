"""Code written in a page runs, and prints what the page says it prints.

A ```python fence of a chapter is a program of its own. If an answer with a ```text fence follows it before the next
heading, that is its output.
"""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = re.compile(r"^```python\n(?P<code>.*?)^```$(?P<after>.*?)(?=^## |^```python|\Z)", re.M | re.S)
OUTPUT = re.compile(r"^ *```text\n(?P<text>.*?)^ *```$", re.M | re.S)
NEEDS_THE_MODEL = ("ensure_demo_model", "Engine(")


def programs() -> list[Any]:
    found = []
    for page in sorted((ROOT / "docs").glob("**/*.md")):
        for number, match in enumerate(PROGRAM.finditer(page.read_text())):
            output = OUTPUT.search(match["after"])
            expected = textwrap.dedent(output["text"]) if output else None
            marks = [pytest.mark.e2e] if any(name in match["code"] for name in NEEDS_THE_MODEL) else []
            found.append(pytest.param(match["code"], expected, id=f"{page.stem}-{number}", marks=marks))
    return found


@pytest.mark.parametrize(("code", "expected"), programs())
def test_a_program_in_a_page_prints_what_the_page_says(code: str, expected: str | None) -> None:
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=240, stdin=subprocess.DEVNULL
    )
    assert result.returncode == 0, result.stderr
    if expected is not None:
        assert result.stdout.rstrip() == expected.rstrip()
