"""A lab's executed notebook as a Markdown page.

Cells become Markdown and go through MkDocs like any page: links are rewritten and checked, headings get ids, links to
code are bound to its symbols, nothing is fetched from elsewhere. (mkdocs-jupyter renders beside MkDocs: its cells
escape the strict check, bring scripts from other hosts, and weigh 650 kB a page.)

Two cell tags fold what a reader should not see too early: `predict` its output, `solution` the whole cell.

Invariant: a notebook that failed, or was never run, or shows something this file cannot render, stops the build.
"""

from __future__ import annotations

import base64
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

_CODE_LINK = re.compile(r"\[(?P<text>[^\]\"]+)\]\(\.\./(?P<file>tinysrt/[\w/]+)\.py(?:#(?P<symbol>[\w.]+))?\)")
_ANSI = re.compile(r"\x1b\[[0-9;]*m")


class NotebookError(Exception):
    pass


@dataclass
class LabPage:
    markdown: str
    images: dict[str, bytes] = field(default_factory=dict)  # file name -> content, beside the page


def render(notebook: Path) -> LabPage:
    page = LabPage("")
    source = notebook.with_suffix(".py").name
    parts = [f"*This page is a notebook: [{notebook.name}]({notebook.name}), made from [{source}]({source}).*"]
    for number, cell in enumerate(orjson.loads(notebook.read_bytes())["cells"]):
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(_site_links(source))
        elif cell["cell_type"] == "code" and source.strip():
            if cell["execution_count"] is None:
                raise NotebookError(f"{notebook.name}: cell {number} was never run.")
            code = _fence(source, "python")
            outputs = [_output(output, f"{notebook.stem}-{number}", notebook, page) for output in cell["outputs"]]
            tags = cell["metadata"].get("tags", [])
            if "solution" in tags:
                parts.append(_folded("success", "Solution", [code, *outputs]))
            elif "predict" in tags:
                parts += [code, _folded("question", "What happens", outputs)]
            else:
                parts += [code, *outputs]
    # The title comes first, then where the page is from.
    page.markdown = re.sub(r"\A(.*?)\n\n(# .*?\n)", r"\2\n\1\n", "\n\n".join(parts) + "\n", flags=re.S)
    return page


def overview(readme: Path) -> str:
    """labs/README.md as a page: its notebooks are pages here."""
    return _site_links(readme.read_text(encoding="utf-8")).replace(".ipynb)", ".md)")


def _output(output: dict[str, Any], name: str, notebook: Path, page: LabPage) -> str:
    if output["output_type"] == "error":
        raise NotebookError(f"{notebook.name}: a cell failed: {output['ename']}: {output['evalue']}")
    if output["output_type"] == "stream":
        return _fence("".join(output["text"]), "text", "output")
    data = output["data"]
    if "text/markdown" in data:
        return "".join(data["text/markdown"])
    for kind, suffix in (("image/svg+xml", "svg"), ("image/png", "png")):
        if kind in data:
            content = "".join(data[kind])
            file = f"{name}-{len(page.images)}.{suffix}"
            page.images[file] = content.encode() if suffix == "svg" else base64.b64decode(content)
            return f"![Output of the cell above]({file})"
    if "text/plain" in data:
        return _fence("".join(data["text/plain"]), "text", "output")
    raise NotebookError(f"{notebook.name}: an output of kind {', '.join(data)} cannot be rendered.")


def _site_links(markdown: str) -> str:
    """A lab's links are written as they work in Jupyter; on the site labs/ lies beside the pages, and code has pages.

    [Seats](../tinysrt/managers/scheduler.py#Seats)  becomes  {{ src:tinysrt.managers.scheduler.Seats | text="Seats" }}
    """

    def bind(match: re.Match[str]) -> str:
        name = match["file"].replace("/", ".") + (f".{match['symbol']}" if match["symbol"] else "")
        return f'{{{{ src:{name} | text="{match["text"]}" }}}}'

    return _CODE_LINK.sub(bind, markdown).replace("](../docs/", "](../")


def _folded(kind: str, title: str, parts: list[str]) -> str:
    body = "\n\n".join(parts).split("\n")
    return "\n".join([f'??? {kind} "{title}"', "", *(f"    {line}" if line else "" for line in body)])


def _fence(text: str, language: str, css_class: str | None = None) -> str:
    text = _ANSI.sub("", text).rstrip()
    ticks = "`" * max(3, 1 + max((len(run) for run in re.findall(r"`+", text)), default=0))
    head = f"{{ .{language} .{css_class} }}" if css_class else language
    return f"{ticks} {head}\n{text}\n{ticks}"
