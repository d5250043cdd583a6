"""Every file of the package as a page, with an anchor on each line (`#L35`), and an index that quotes their ideas."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator

from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer
from symbols import SymbolIndex

FRONT_MATTER = "---\ntitle: {title}\nhide: [toc]\nsearch: {{exclude: true}}\n---\n\n"

# The rows of the house, top to bottom; what is not named here is listed by folder after them.
ROWS = [
    ("The outside", ["tinysrt"]),
    ("Doors", ["tinysrt/entrypoints"]),
    ("Managers", ["tinysrt/managers"]),
    ("The model", ["tinysrt/model_executor", "tinysrt/kernels"]),
    ("Memory", ["tinysrt/mem_cache"]),
    ("Text", ["tinysrt/text", "tinysrt/constrained"]),
    ("Observing", ["tinysrt/observe", "tinysrt/bench"]),
]


def page_uri(path: str) -> str:
    """The page of a source file. `__init__` becomes `package`: an address with underscores reads badly."""
    return f"source/{path.removesuffix('.py').replace('__init__', 'package')}.md"


def pages(index: SymbolIndex) -> Iterator[tuple[str, str]]:
    """(uri, Markdown) of every source page and of their index."""
    for path in index.lines:
        yield page_uri(path), _page(path, index.lines[path])
    yield "source/index.md", _index(index)


def _page(path: str, lines: list[str]) -> str:
    formatted = highlight("\n".join(lines), PythonLexer(stripnl=False), HtmlFormatter(nowrap=True)).split("\n")
    numbered = "\n".join(
        f'<span class="line" id="L{number}"><a class="ln" href="#L{number}" aria-label="{number}"></a>{text}</span>'
        for number, text in enumerate(formatted[: len(lines)], 1)
    )
    depth = page_uri(path).count("/") - 1
    up = f"[All source files]({'../' * depth}index.md)"
    title = json.dumps(path.removeprefix("tinysrt/"))
    return (
        FRONT_MATTER.format(title=title)
        + f"# `{path}`\n\n{up} · {len(lines)} lines\n\n"
        + f'<div class="highlight source"><pre><code>{numbered}</code></pre></div>\n'
    )


def _index(index: SymbolIndex) -> str:
    groups: dict[str, list[str]] = {title: [] for title, _ in ROWS}
    for path in index.lines:
        folder = path.rsplit("/", 1)[0]
        group = _group(folder)
        groups.setdefault(group, []).append(path)
    out = ["# Source\n", "Every file opens with its idea; this page quotes the first sentence of each.\n"]
    for title, paths in groups.items():
        if not paths:
            continue
        out.append(f"\n## {title}\n\n| file | idea |\n|---|---|")
        for path in paths:
            idea = _inline(index.docstrings[path].split("\n\n")[0].replace("\n", " "))
            out.append(f"| [`{path.removeprefix('tinysrt/')}`]({page_uri(path).removeprefix('source/')}) | {idea} |")
    return "\n".join(out) + "\n"


def _inline(text: str) -> str:
    """A docstring's sentence inside a table cell: what looks like HTML is shown, code spans escape themselves."""
    spans = re.split(r"(`[^`]*`)", text.replace("|", "\\|"))
    return "".join(span if span.startswith("`") else html.escape(span, quote=False) for span in spans)


def _group(folder: str) -> str:
    for title, folders in ROWS:
        if any(folder == known or (known != "tinysrt" and folder.startswith(known + "/")) for known in folders):
            return title
    return folder.removeprefix("tinysrt/")
