"""What MkDocs calls: pages from code, code in pages, and the order of the course.

In a page one may write

    {{ code:tinysrt.managers.scheduler.Scheduler.run_batch }}               the symbol's source, numbered, with a link
    {{ code:NAME | from="some text" to="other text" }}                      only the lines from … to … inside it
    {{ src:NAME }}   {{ src:NAME | text="the run" }}                        a link to its line
    {{ diagram:journey }}                                                   diagrams/journey.mmd, drawn
    {{ chapters }}                                                          the course, a line a chapter and lab

`code` and `diagram` stand on a line of their own (they may be indented); a macro between backticks is left alone.
NAME is dotted, see symbols.py. Links are written as page + `#L35`, so MkDocs rewrites and checks them like any other.

Invariant: whatever a page binds to exists, or the build stops and says what it may have meant.
"""

from __future__ import annotations

import difflib
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page
from notebooks import NotebookError, overview
from notebooks import render as render_notebook
from sources import page_uri
from sources import pages as source_pages
from symbols import SymbolIndex, UnknownName

_MACRO = re.compile(r"(?P<indent>^[ \t]*)?(?<!`)\{\{ *(?P<kind>code|src|diagram):(?P<body>[^{}]*?) *\}\}(?!`)", re.M)
_OPTION = re.compile(r'(\w+)="([^"]*)"')
_VENDORED_MERMAID = "assets/vendor/mermaid/mermaid.min.js"


def _root(config: MkDocsConfig) -> Path:
    return Path(config.docs_dir).parent


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    config.extra["symbols"] = SymbolIndex(_root(config))  # anew for every build of `mkdocs serve`
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for uri, markdown in source_pages(config.extra["symbols"]):
        level = InclusionLevel.INCLUDED if uri == "source/index.md" else InclusionLevel.NOT_IN_NAV
        files.append(File.generated(config, uri, content=markdown, inclusion=level))
    for notebook in sorted((_root(config) / "labs").glob("*.ipynb")):
        try:
            lab = render_notebook(notebook)
        except NotebookError as exc:
            raise PluginError(str(exc)) from exc
        files.append(File.generated(config, f"labs/{notebook.stem}.md", content=lab.markdown))
        files.append(File.generated(config, f"labs/{notebook.name}", abs_src_path=str(notebook)))
        source = notebook.with_suffix(".py")
        files.append(File.generated(config, f"labs/{source.name}", abs_src_path=str(source)))
        for name, content in lab.images.items():
            files.append(File.generated(config, f"labs/{name}", content=content))
    if (readme := _root(config) / "labs" / "README.md").is_file():
        files.append(File.generated(config, "labs/index.md", content=overview(readme)))
    config.nav = _navigation(files)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    uri = page.file.src_uri
    if uri.startswith("source/"):
        return markdown

    def replace(match: re.Match[str]) -> str:
        try:
            return _expand(match, uri, config.extra["symbols"], _root(config))
        except UnknownName as exc:
            line = markdown.count("\n", 0, match.start()) + 1
            raise PluginError(f"{uri}, line {line}: {match.group().strip()}: {exc}") from exc

    return _MACRO.sub(replace, markdown.replace("{{ chapters }}", _course(files)))


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    # Material draws <pre class="mermaid"> with window.mermaid if it is there, and fetches it from another host if not.
    if 'class="mermaid"' in html:
        page.meta["mermaid"] = posixpath.relpath(_VENDORED_MERMAID, page.url or ".")
    return html


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    if "mermaid" in page.meta:
        output = output.replace("</head>", f'<script src="{page.meta["mermaid"]}"></script></head>', 1)
    return output


def _expand(match: re.Match[str], uri: str, index: SymbolIndex, root: Path) -> str:
    name, _, rest = match["body"].partition("|")
    name, options, indent = name.strip(), dict(_OPTION.findall(rest)), match["indent"] or ""
    if _OPTION.sub("", rest).strip() or options.keys() - {"from", "to", "text"}:
        raise UnknownName(f'{rest.strip()!r} is no option; there are from="…", to="…" (code) and text="…" (src).')
    if match["kind"] == "diagram":
        return _block(f"```mermaid\n{_diagram(name, root)}\n```", indent)
    symbol = index.find(name)
    page = posixpath.relpath(page_uri(symbol.path), posixpath.dirname(uri) or ".")
    if match["kind"] == "src":
        return f"{indent}[{options.get('text') or f'`{symbol.short}`'}]({page}#L{symbol.first})"
    text, first = index.source(symbol, options.get("from"), options.get("to"))
    last = first + text.count("\n")
    head = f"[`{symbol.path}`, lines {first}–{last}]({page}#L{first}){{ .code-link }}"
    return _block(f'{head}\n\n```python linenums="{first}"\n{text}\n```', indent)


def _block(text: str, indent: str) -> str:
    return "\n".join(indent + line if line else line for line in text.split("\n"))


def _diagram(name: str, root: Path) -> str:
    file = root / "diagrams" / f"{name}.mmd"
    if not file.is_file():
        known = sorted(path.stem for path in file.parent.glob("*.mmd"))
        hints = difflib.get_close_matches(name, known, n=3, cutoff=0.4) or known
        raise UnknownName(f"no diagrams/{name}.mmd; did you mean {', '.join(hints)}?")
    return file.read_text(encoding="utf-8").strip()


def _numbered(files: Files, folder: str) -> list[tuple[int, str, str]]:
    """(number, title, uri) of the chapters or labs that exist, in their order; the title is the first heading."""
    found = []
    for file in sorted(files.documentation_pages(), key=lambda file: file.src_uri):
        if re.match(rf"{folder}/\d\d", file.src_uri):
            title = re.search(r"^# (.+)$", file.content_string, re.M)
            found.append((int(posixpath.basename(file.src_uri)[:2]), title[1] if title else file.name, file.src_uri))
    return found


def _course(files: Files) -> str:
    told = []
    for kind in ("chapter", "lab"):
        lines = [f"| {number} | [{title}]({uri}) |" for number, title, uri in _numbered(files, f"{kind}s")]
        told += [f"| {kind} | title |", "|---:|---|", *lines, ""] if lines else []
    return "\n".join(told)


def _navigation(files: Files) -> list[Any]:
    """Pages in the order of the course; chapters and labs by their number, whatever exists."""
    sections: dict[str, list[Any]] = {"Start": ["index.md", "how-to-read.md"]}
    for section, folder in (("Course", "chapters"), ("Labs", "labs")):
        sections[section] = [{f"{number}. {title}": uri} for number, title, uri in _numbered(files, folder)]
    if files.get_file_from_path("labs/index.md"):
        sections["Labs"].insert(0, {"Overview": "labs/index.md"})
    uris = sorted(file.src_uri for file in files.documentation_pages() if file.inclusion.is_in_nav())
    rest = [uri for uri in uris if "/" not in uri and uri not in sections["Start"]]
    sections["Reference"] = [*rest, {"Source": "source/index.md"}]
    sections["Start"] = [uri for uri in sections["Start"] if uri in uris]
    return [{title: pages} for title, pages in sections.items() if pages]
