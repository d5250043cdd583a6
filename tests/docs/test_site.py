"""The site builds without a warning, every link leads somewhere, and what breaks is noticed."""

from __future__ import annotations

import hashlib
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

Build = Callable[..., "subprocess.CompletedProcess[str]"]


def test_the_site_builds_strictly_and_every_link_leads_somewhere(site: Path, links: ModuleType) -> None:
    assert links.check(site) == []


def test_every_source_file_has_a_page_with_an_anchor_for_each_line(site: Path, root: Path, links: ModuleType) -> None:
    for file in sorted((root / "tinysrt").rglob("*.py")):
        text = file.read_text()
        if not text.strip():
            continue
        name = file.relative_to(root).with_suffix("").as_posix().replace("__init__", "package")
        page = site / "source" / name / "index.html"
        ids = set(links.read(page.read_text()).ids)
        missing = [number for number in range(1, len(text.splitlines()) + 1) if f"L{number}" not in ids]
        assert not missing, f"{file}: no anchor for lines {missing[:5]}"


def test_chapters_stand_in_the_navigation_in_their_order(site: Path, root: Path, links: ModuleType) -> None:
    hrefs = links.read((site / "index.html").read_text()).hrefs
    shown = list(dict.fromkeys(re.findall(r"chapters/(\d\d-[a-z0-9-]+)/", " ".join(hrefs))))
    assert shown[: len(list((root / "docs" / "chapters").glob("*.md")))] == sorted(
        path.stem for path in (root / "docs" / "chapters").glob("*.md")
    )


def test_the_front_page_leads_to_every_chapter_and_lab(root: Path) -> None:
    ways, overview = (root / "docs" / "index.md").read_text(), (root / "labs" / "README.md").read_text()
    labs = [path.stem for path in root.glob("labs/[0-9][0-9]_*.py")]
    chapters = [path.stem for path in root.glob("docs/chapters/*.md")]
    assert [name for name in chapters if f"(chapters/{name}.md)" not in ways] == []
    assert [name for name in labs if f"(labs/{name}.md)" not in ways or f"({name}.ipynb)" not in overview] == []


def test_vendored_files_are_the_ones_that_were_checked(root: Path) -> None:
    vendor = root / "docs" / "assets" / "vendor"
    rows = re.findall(r"^\| `([^`]+)` .* `([0-9a-f]{64})` \|$", (vendor / "README.md").read_text(), re.M)
    assert rows
    for name, checksum in rows:
        assert hashlib.sha256((vendor / name).read_bytes()).hexdigest() == checksum, name
        assert (vendor / name).with_name("LICENSE").is_file()


def test_the_small_project_is_sound_and_binds_code(small_project: Build, tmp_path: Path, links: ModuleType) -> None:
    result = small_project()
    assert result.returncode == 0, result.stderr
    site = tmp_path / "site"
    faults = [fault for fault in links.check(site) if "mermaid" not in fault]  # not vendored in the small project
    assert faults == []
    chapter = (site / "chapters" / "01-a" / "index.html").read_text()
    text = re.sub("<[^>]+>", "", chapter)
    assert "tinysrt/core.py, lines 8–9" in text and "if self.number:" in text and "return 0" not in text
    assert '../../source/tinysrt/core/#L8"' in chapter
    home = (site / "index.html").read_text()
    assert 'source/tinysrt/core/#L5"><code>Seat.number</code>' in home
    assert home.index("mermaid.min.js") < home.index("assets/javascripts/bundle")  # before Material looks for it
    lab = (site / "labs" / "01_lab" / "index.html").read_text()
    assert '../../source/tinysrt/core/#L4">Seat<' in lab and 'class="output highlight"' in lab
    assert 'href="01_lab/">the lab' in (site / "labs" / "index.html").read_text()


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        ("docs/index.md", "chapters/01-a.md#there", "chapters/02-b.md", "02-b.md"),
        ("docs/index.md", "#there", "#elsewhere", "elsewhere"),
        ("docs/chapters/01-a.md", "#L4", "#L9999", "L9999"),
        ("docs/index.md", "Seat.number", "Seat.nummer", "did you mean tinysrt.core.Seat.number"),
        ("tinysrt/core.py", "class Seat", "class Chair", "did you mean"),
        ("docs/index.md", "tinysrt/core.py", "tinysrt/cores.py", "did you mean tinysrt.core"),
        ("docs/chapters/01-a.md", 'from="if"', 'from="while"', "no line with 'while'"),
        ("docs/chapters/01-a.md", "| from", "| lines=3 from", "is no option"),
        ("docs/index.md", "diagram:picture", "diagram:pictures", "did you mean picture"),
        ("labs/01_lab.ipynb", "../docs/index.md#a-chapter", "../docs/nowhere.md", "nowhere.md"),
        ("labs/01_lab.ipynb", "core.py#Seat", "core.py#Sofa", "Sofa"),
        (
            "labs/01_lab.ipynb",
            '"execution_count": 1, "metadata": {}, "source"',
            '"execution_count": null, "source"',
            "never run",
        ),
        (
            "labs/01_lab.ipynb",
            '{"output_type": "execute_result"',
            '{"output_type": "error", "ename": "ValueError", "evalue": "no"}, {"output_type": "execute_result"',
            "a cell failed: ValueError: no",
        ),
    ],
)
def test_one_broken_thing_stops_the_build(small_project: Build, file: str, old: str, new: str, message: str) -> None:
    result = small_project({file: (old, new)})
    assert result.returncode != 0
    assert message in result.stdout + result.stderr


def test_the_link_check_sees_what_strict_mode_does_not(tmp_path: Path, links: ModuleType) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "index.html").write_text('<p id="there">')
    (tmp_path / "index.html").write_text(
        '<a href="other/#there"></a><a href="other/#gone"></a><a href="gone/"></a><p id=""><p id="x"><p id="x">'
        '<img src="https://example.org/x.png"><script src="//example.org/x.js"></script>'
        "<style>@import 'https://example.org/x.css';</style><a href='https://example.org'>may be visited</a>"
    )
    assert links.check(tmp_path) == [
        "index.html: id '' is empty or twice there",
        "index.html: id 'x' is empty or twice there",
        "index.html: loads https://example.org/x.png",
        "index.html: loads //example.org/x.js",
        "index.html: style loads from another host",
        "index.html: other/#gone: no such anchor",
        "index.html: gone/: no such file",
    ]


def test_names_of_every_kind_are_found_at_their_lines(tmp_path: Path, symbols: ModuleType) -> None:
    (tmp_path / "tinysrt").mkdir()
    (tmp_path / "tinysrt" / "a.py").write_text(
        '"""Idea."""\nLIMIT = 3\n\n\n@decorated\nclass Box:\n    size: int = 1\n\n'
        "    def __init__(self):\n        self.rows = [\n            1,\n        ]\n\n"
        "    @property\n    def full(self):\n        return True\n"
    )
    index = symbols.SymbolIndex(tmp_path)
    lines = {name: (symbol.first, symbol.last) for name, symbol in index.symbols.items()}
    assert lines == {
        "tinysrt.a": (1, 16),
        "tinysrt.a.LIMIT": (2, 2),
        "tinysrt.a.Box": (5, 16),
        "tinysrt.a.Box.size": (7, 7),
        "tinysrt.a.Box.__init__": (9, 12),
        "tinysrt.a.Box.rows": (10, 12),
        "tinysrt.a.Box.full": (14, 16),
    }
    assert index.source(index.find("tinysrt/a.py"), "LIMIT", "LIMIT") == ("LIMIT = 3", 2)
    assert index.find("tinysrt.a.Box").short == "Box"
    with pytest.raises(symbols.UnknownName, match="did you mean tinysrt.a.Box.rows"):
        index.find("tinysrt.b.rows")
