"""Execute labs and keep what they printed: `python labs/execute.py [01 02 …]`.

    labs/NN_name.py   the source, in jupytext's percent format: what people edit and review
    labs/NN_name.ipynb   the same cells, executed: what the site shows and what a reader opens in Jupyter

Run it after every change of a lab; tests/docs/test_labs.py fails when the two differ or a lab no longer runs.
"""

from __future__ import annotations

import sys
from pathlib import Path

import jupytext
import nbclient
import nbformat

LABS = Path(__file__).parent


def execute(source: Path, *, timeout: int = 600) -> nbformat.NotebookNode:
    """Run the cells in a fresh kernel, in the repository's root; an error in a cell is raised here."""
    notebook = jupytext.read(source)
    notebook.metadata.pop("jupytext", None)
    client = nbclient.NotebookClient(
        notebook, timeout=timeout, kernel_name="python3", resources={"metadata": {"path": str(LABS.parent)}}
    )
    client.execute()
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{number}"  # random ids would change with every run
        if cell.cell_type == "code":  # log lines carry times and paths, and are not what a lab is about
            cell.outputs = join_streams([output for output in cell.outputs if output.get("name") != "stderr"])
        cell.metadata.pop("execution", None)  # so would times
    notebook.metadata["language_info"] = {"name": "python"}  # and the interpreter's version
    return notebook


def join_streams(outputs: list[nbformat.NotebookNode]) -> list[nbformat.NotebookNode]:
    """Where a kernel cuts what a cell prints into pieces is a matter of time; neighbors become one."""
    joined: list[nbformat.NotebookNode] = []
    for output in outputs:
        last = joined[-1] if joined else {}
        if output.output_type == last.get("output_type") == "stream" and output.name == last["name"]:
            last["text"] += output.text
        else:
            joined.append(output)
    return joined


def main() -> None:
    wanted = sys.argv[1:]
    for source in sorted(LABS.glob("[0-9][0-9]_*.py")):
        if not wanted or source.name[:2] in wanted:
            nbformat.write(execute(source), source.with_suffix(".ipynb"))
            print(f"executed {source.name}")


if __name__ == "__main__":
    main()
