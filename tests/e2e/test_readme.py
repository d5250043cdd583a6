"""What the README promises, with the demo model: the curl line, the offline engine, the chat."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.server import ROOT, START_SECONDS, Server
from tests.repo.test_repository import code_blocks

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def tinysrt(*arguments: str, typed: str = "") -> str:
    command = [sys.executable, "-m", "tinysrt.cli", *arguments]
    done = subprocess.run(command, cwd=ROOT, input=typed, capture_output=True, text=True, timeout=2 * START_SECONDS)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_the_curl_of_the_readme_and_the_one_the_server_prints_both_answer_blue(tmp_path: Path) -> None:
    with Server(tmp_path, module="tinysrt.cli") as server:
        server.wait_ready()
        (readme,) = [line for line in "".join(code_blocks("bash")).splitlines() if line.startswith("curl ")]
        printed = re.search(r"^\s*(curl .*)$", server.log.read_text(), re.M)
        assert printed is not None
        assert printed[1].replace(str(server.port), "30000") == readme
        out = subprocess.run(printed[1], shell=True, capture_output=True, text=True, timeout=120).stdout
        assert "blue" in json.loads(out)["choices"][0]["message"]["content"]
        assert server.get("/v1/models")["data"][0]["id"] == "SmolLM2-135M-Instruct"
        text = tinysrt("generate", "The capital of France is", "--url", server.url, "--max-new-tokens", "8")
        assert "Paris" in text
        server.process.send_signal(signal.SIGTERM)
        assert server.exit_code() == 0


def test_generate_without_a_server() -> None:
    assert "Paris" in tinysrt("generate", "The capital of France is", "--max-new-tokens", "8")


def test_chat_starts_a_server_of_its_own_and_stops_it() -> None:
    screen = tinysrt("chat", "--temperature", "0", typed="What color is the sky?\n/quit\n")
    assert "blue" in screen and "tokens" in screen
