"""A built site for the tests that read it, and a small project of the same kind that they may break."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


def build(project: Path, site: Path) -> subprocess.CompletedProcess[str]:
    """`mkdocs build` in strict mode (mkdocs.yml says so). Never with -q: it drops the warnings before they count."""
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)],
        cwd=project,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1", "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("material", reason="the docs extra is not installed")
    site = tmp_path_factory.mktemp("docs") / "site"
    result = build(ROOT, site)
    assert result.returncode == 0, result.stderr[-4000:]
    return site


@pytest.fixture(scope="session")
def links() -> ModuleType:
    return load(ROOT / "docs" / "_hooks" / "check_links.py")


@pytest.fixture(scope="session")
def symbols() -> ModuleType:
    return load(ROOT / "docs" / "_hooks" / "symbols.py")


@pytest.fixture(scope="session")
def labs() -> ModuleType:
    pytest.importorskip("jupytext", reason="the docs extra is not installed")
    return load(ROOT / "labs" / "execute.py")


def load(file: Path) -> ModuleType:
    """A module that is no part of a package."""
    spec = importlib.util.spec_from_file_location(f"docs_{file.stem}", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up here
    spec.loader.exec_module(module)
    return module


NOTEBOOK = """{"cells": [
 {"cell_type": "markdown", "metadata": {}, "source": 
  "# Lab\\n\\n[Seat](../tinysrt/core.py#Seat) [back](../docs/index.md#a-chapter)"},
 {"cell_type": "code", "execution_count": 1, "metadata": {}, "source": "1 + 1",
  "outputs": [{"output_type": "execute_result", "data": {"text/plain": "2"}, "metadata": {}, "execution_count": 1}]}
], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}"""

FILES = {
    "docs/index.md": """# Home

## A chapter

[next](chapters/01-a.md#there) {{ src:tinysrt.core.Seat.number }} {{ src:tinysrt/core.py }} [lab](labs/01_lab.md)

{{ diagram:picture }}
""",
    "docs/chapters/01-a.md": """# A

## There

- In a list:

    {{ code:tinysrt.core.Seat.take | from="if" to="return" }}

[line](../source/tinysrt/core.md#L4)
""",
    "tinysrt/core.py": '''"""A seat, and who sits on it."""


class Seat:
    number: int = 0

    def take(self) -> int:
        if self.number:
            return self.number
        return 0
''',
    "diagrams/picture.mmd": "flowchart TD\n  A --> B\n",
    "labs/01_lab.ipynb": NOTEBOOK,
    "labs/01_lab.py": "# %%\n1 + 1\n",
    "labs/README.md": "# Labs\n\n[the lab](01_lab.ipynb), after [a chapter](../docs/chapters/01-a.md)\n",
}


@pytest.fixture
def small_project(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Build a small project with the real configuration and hooks, after `changes`: file -> (old text, new text)."""
    pytest.importorskip("material", reason="the docs extra is not installed")

    def make(changes: dict[str, tuple[str, str]] | None = None) -> subprocess.CompletedProcess[str]:
        project = tmp_path / "project"
        shutil.copytree(ROOT / "docs" / "_hooks", project / "docs" / "_hooks", ignore=shutil.ignore_patterns("__pyc*"))
        shutil.copy(ROOT / "mkdocs.yml", project)
        for name, text in FILES.items():
            old, new = (changes or {}).get(name, ("", ""))
            assert old in text
            (project / name).parent.mkdir(parents=True, exist_ok=True)
            (project / name).write_text(text.replace(old, new) if old else text)
        (project / "docs" / "assets").mkdir()
        shutil.copy(ROOT / "docs" / "assets" / "site.css", project / "docs" / "assets")
        return build(project, tmp_path / "site")

    return make
