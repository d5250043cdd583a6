"""Check a built site as a browser would meet it: `python docs/_hooks/check_links.py site`.

MkDocs' strict mode checks Markdown; this reads the HTML, so it sees raw HTML, generated pages and tables of contents
too: every link and fragment leads somewhere, ids are unique and not empty, no page loads anything from another host.
"""

from __future__ import annotations

import posixpath
import re
import sys
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

_CSS_URL = re.compile(r"""(?:url\(\s*['"]?|@import\s+['"])(https?:|//)[^'")\s]*""")
_VOID = {"area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr"}


@dataclass
class PageLinks:
    ids: list[str] = field(default_factory=list)
    hrefs: list[str] = field(default_factory=list)  # where a reader may go
    loads: list[str] = field(default_factory=list)  # what the page itself fetches
    styles: list[str] = field(default_factory=list)


class _Collector(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.page = PageLinks()
        self.tag = ""
        self.drawing = 0  # inside <svg> a <style> or an id is the drawing's own affair

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.tag = "" if tag in _VOID else tag
        if "id" in values:
            self.page.ids.append(values["id"])
        if "href" in values:
            (self.page.loads if tag in ("link", "use", "image") else self.page.hrefs).append(values["href"])
        for name in ("src", "poster", "data"):
            if name in values and tag != "a":
                self.page.loads.append(values[name])
        self.page.loads += [part.split()[0] for part in values.get("srcset", "").split(",") if part.strip()]
        self.page.styles.append(values.get("style", ""))

    def handle_data(self, data: str) -> None:
        if self.tag == "style":
            self.page.styles.append(data)

    def handle_endtag(self, tag: str) -> None:
        self.tag = ""


def read(html: str) -> PageLinks:
    collector = _Collector()
    collector.feed(html)
    return collector.page


def check(site: Path) -> list[str]:
    """One line per fault; an empty list is a sound site."""
    pages = {file.relative_to(site).as_posix(): read(file.read_text()) for file in sorted(site.rglob("*.html"))}
    faults: list[str] = []
    for name, page in pages.items():
        seen: set[str] = set()
        for identifier in page.ids:
            if not identifier or identifier in seen:
                faults.append(f"{name}: id {identifier!r} is empty or twice there")
            seen.add(identifier)
        faults += [f"{name}: loads {url}" for url in page.loads if _outside(url)]
        faults += [f"{name}: style loads from another host" for css in page.styles if _CSS_URL.search(css)]
        for url in [*page.hrefs, *page.loads]:
            fault = _follow(url, name, site, pages)
            if fault:
                faults.append(f"{name}: {url}: {fault}")
    for file in sorted(site.rglob("*.css")):
        if _CSS_URL.search(file.read_text()):
            faults.append(f"{file.relative_to(site)}: style loads from another host")
    return faults


def _outside(url: str) -> bool:
    return bool(urlsplit(url).netloc)


def _follow(url: str, name: str, site: Path, pages: dict[str, PageLinks]) -> str | None:
    parts = urlsplit(url)
    if parts.scheme in ("http", "https", "mailto", "data", "javascript") or parts.netloc:
        return None
    target = name
    if parts.path:
        path = unquote(parts.path)
        target = path.lstrip("/") if path.startswith("/") else posixpath.join(posixpath.dirname(name), path)
        target = posixpath.normpath(target)
        if target.startswith(".."):
            return "leads out of the site"
        if (site / target).is_dir():
            target = posixpath.normpath(posixpath.join(target, "index.html"))
        if not (site / target).is_file():
            return "no such file"
    if parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].ids:
        return "no such anchor"
    return None


def main() -> int:
    faults = check(Path(sys.argv[1]))
    print("\n".join(faults) or "all links lead somewhere")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
