"""Pictures that are drawn from tables in the code are the ones that the code draws today."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_the_life_of_a_request_is_drawn_from_the_transition_table(root: Path) -> None:
    drawn = subprocess.run(
        [sys.executable, "diagrams/request_life.py"],
        cwd=root,
        env={"PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    committed = (root / "diagrams" / "request-life.mmd").read_text()
    assert committed == drawn, "run: python diagrams/request_life.py > diagrams/request-life.mmd"


def test_every_diagram_is_used_by_a_page(root: Path) -> None:
    pages = "\n".join(path.read_text() for path in [*root.glob("docs/**/*.md"), *root.glob("labs/*.py")])
    unused = [path.stem for path in root.glob("diagrams/*.mmd") if f"diagram:{path.stem} " not in pages]
    assert not unused
