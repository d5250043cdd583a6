"""Labs run, print what their notebooks show, and leave no process behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest

LABS = sorted((Path(__file__).parents[2] / "labs").glob("[0-9][0-9]_*.py"))
WITH_A_MODEL = ("01_", "06_")


def lab(source: Path) -> Any:
    return pytest.param(source, id=source.stem, marks=pytest.mark.e2e if source.name.startswith(WITH_A_MODEL) else ())


def cells(notebook: Any) -> list[tuple[str, str, list[str]]]:
    return [(cell.cell_type, cell.source, cell.metadata.get("tags", [])) for cell in notebook.cells]


def printed(cell: Any) -> list[Any]:
    """What a cell showed; one stream may come in several pieces."""
    outputs = cell.get("outputs", [])
    stream = "".join(output["text"] for output in outputs if output["output_type"] == "stream")
    return [stream, *(output["data"] for output in outputs if output["output_type"] != "stream")]


@pytest.mark.parametrize("source", [pytest.param(path, id=path.stem) for path in LABS])
def test_a_notebook_has_the_cells_of_its_source(source: Path, labs: ModuleType) -> None:
    executed = labs.nbformat.read(source.with_suffix(".ipynb"), as_version=4)
    assert cells(executed) == cells(labs.jupytext.read(source)), "run: python labs/execute.py"


def test_what_a_cell_prints_in_pieces_is_kept_as_one(labs: ModuleType) -> None:
    new = labs.nbformat.v4.new_output
    pieces = [new("stream", text=text) for text in ("one\n", "two\n")]
    result = new("execute_result", {"text/plain": "3"}, execution_count=1)
    kept = labs.join_streams([*pieces, result, new("stream", text="four\n")])
    assert [output.get("text") for output in kept] == ["one\ntwo\n", None, "four\n"]
    for path in LABS:
        for cell in labs.nbformat.read(path.with_suffix(".ipynb"), as_version=4).cells:
            outputs = cell.get("outputs", [])
            assert len(labs.join_streams(outputs)) == len(outputs), f"{path.name}: run python labs/execute.py"


@pytest.mark.parametrize("source", [lab(path) for path in LABS])
def test_a_lab_runs_and_prints_what_its_notebook_shows(source: Path, labs: ModuleType) -> None:
    """Cells tagged `varies` (times, free memory) only have to run."""
    before = set(psutil.Process().children(recursive=True))
    again = labs.execute(source, timeout=240)
    kept = labs.nbformat.read(source.with_suffix(".ipynb"), as_version=4)
    for ours, theirs in zip(again.cells, kept.cells, strict=True):
        if "varies" not in ours.metadata.get("tags", []):
            assert printed(ours) == printed(theirs), f"this cell prints something else now:\n{ours.source}"
    gone, left = psutil.wait_procs(set(psutil.Process().children(recursive=True)) - before, timeout=10)
    assert left == []


@pytest.mark.slow
def test_a_lab_that_spawns_processes_runs_as_a_plain_script(root: Path) -> None:
    script = [sys.executable, "labs/05_tensor_parallel.py"]
    result = subprocess.run(script, cwd=root, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count(" weights\n") == 1, "a rank has run the script again"
