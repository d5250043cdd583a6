"""Runs the tests in `faked/` in a process of their own: a made-up device stays registered until its process ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the triton kernels need the triton package: pip install 'tinysrt[triton]'")
ROOT = Path(__file__).parents[2]


def test_on_the_fake_device() -> None:
    folder = Path(__file__).parent / "faked"
    result = subprocess.run(
        [sys.executable, "-m", "pytest", str(folder), "-q", "-rs", "-p", "no:cacheprovider", "-p", "no:xdist"],
        cwd=ROOT,
        env=os.environ | {"TINYSRT_FAKE_DEVICE": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    if "passed" not in result.stdout:
        pytest.skip(result.stdout.strip().splitlines()[-1])
