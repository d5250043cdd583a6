from __future__ import annotations

import argparse
import math
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinysrt.bench import report
from tinysrt.errors import StartupError


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=40), st.integers(0, 100))
def test_percentiles_are_those_of_numpy(values: list[int], percent: int) -> None:
    assert report.percentile(values, percent) == pytest.approx(np.percentile(values, percent))


def test_percentiles_of_known_values() -> None:
    assert report.percentile([4, 1, 3, 2], 50) == 2.5
    assert (report.percentile([7], 99), report.percentile(range(101), 99)) == (7, 99)
    with pytest.raises(ValueError, match="no values"):
        report.percentile([], 50)


def test_a_plot_without_matplotlib_is_refused_before_anything_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(StartupError, match=r"pip install 'tinysrt\[bench\]'"):
        report.check_output_flags(argparse.Namespace(json=None, plot="x.png"))


def test_a_plot_of_an_unknown_kind_is_one_line(tmp_path) -> None:
    with pytest.raises(StartupError, match="--plot"):
        report.plot(str(tmp_path / "x.abc"), lambda figure: None)


def test_a_record_names_machine_versions_and_command_and_hides_the_home_folder(monkeypatch) -> None:
    monkeypatch.setenv("HOME", "/homes/someone")
    made = report.record(
        "radix", {"rows": [1 / 3, math.nan, math.inf], "path": "/homes/someone/model"}, ["--json", "a b"]
    )
    assert made["command"] == "tinysrt bench radix --json 'a b'"
    assert made["rows"] == [0.333333, None, None] and made["path"] == "~/model"
    assert {"cpu", "cores", "python", "tinysrt", "torch"} <= set(made["machine"])


def test_numbers_have_the_digits_that_mean_something() -> None:
    shown = [report.number(value) for value in (None, math.nan, 0.12345, 3, 12.345, 123.456, 12345.6, 32256.0)]
    assert shown == ["·", "·", "0.123", "3", "12.35", "123.5", "12,346", "32,256"]
