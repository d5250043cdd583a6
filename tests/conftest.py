"""For all tests: quiet libraries, repeatable hypothesis, soak tests only when asked for, and no process left behind."""

from __future__ import annotations

import os
from collections.abc import Iterator

# Before anything imports torch, tokenizers or huggingface_hub: two busy processes with two OpenMP threads each are ten
# times slower on two cores, and no test may look at a hub.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import hypothesis
import psutil
import pytest

SOAK = bool(os.environ.get("TINYSRT_SOAK"))

# The same examples in every run: a red CI can be repeated. The soak looks at new ones each time.
hypothesis.settings.register_profile("ci", derandomize=True, deadline=None, print_blob=True)
hypothesis.settings.register_profile("soak", max_examples=2000, deadline=None, print_blob=True)
hypothesis.settings.load_profile("soak" if SOAK else "ci")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if SOAK:
        return
    for item in items:
        if item.get_closest_marker("soak"):
            item.add_marker(pytest.mark.skip(reason="exhaustive: `make soak`"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Where the reference itself is undecided, tests/equality excuses a token that differs: say how many it were."""
    counts = [
        value
        for report in terminalreporter.getreports("")
        if report.when == "teardown"
        for name, value in report.user_properties
        if name == "tokens compared and excused"
    ]
    if counts:
        compared, excused = (sum(column) for column in zip(*counts, strict=True))
        terminalreporter.write_line(f"equality: {compared:,} tokens compared with the reference, {excused} excused")


@pytest.fixture(scope="session", autouse=True)
def no_server_process_is_left() -> Iterator[None]:
    """Whatever the tests of this run start, they also end."""
    yield
    left = [child for child in psutil.Process().children(recursive=True) if _title(child).startswith("tinysrt::")]
    assert not left, f"processes left behind: {left}"


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""
