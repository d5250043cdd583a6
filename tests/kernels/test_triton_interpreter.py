"""Runs the tests in `interpreted/`, a file at a time, each in a process with TRITON_INTERPRET=1.

The variable is read when a kernel is defined: in a process where one has been imported without it, it comes too late.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the triton kernels need the triton package: pip install 'tinysrt[triton]'")
ROOT = Path(__file__).parents[2]
FILES = sorted((Path(__file__).parent / "interpreted").glob("test_*.py"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_in_the_interpreter(file: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "pytest", str(file), "-q", "-p", "no:cacheprovider", "-p", "no:xdist"],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert result.returncode == 0, result.stdout + result.stderr
