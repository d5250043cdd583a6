"""What a reader's browser does with the site: nothing from outside, no error, no sideways scroll, pictures drawn.

Needs Debian's chromium (`apt-get install chromium`); skipped without. Playwright drives it and downloads nothing.
"""

from __future__ import annotations

import functools
import http.server
import re
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytestmark = pytest.mark.browser

SIZES = {"desktop": {"width": 1280, "height": 800}, "phone": {"width": 390, "height": 844}}


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api")
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    if path is None:
        pytest.skip("no chromium")
    flags = ["--no-sandbox", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=flags)
        yield browser
        browser.close()


def kinds(site: Path, *, every_picture: bool) -> list[str]:
    """One page of each kind, and the pages that draw something: all, or the first."""
    pages = {file.parent.relative_to(site).as_posix(): file.read_text() for file in site.rglob("*/index.html")}
    drawn = [name for name, text in pages.items() if '<pre class="mermaid"' in text]
    labs = [name for name in pages if name.startswith("labs/")]
    fixed = [".", "glossary", "source", "source/tinysrt/messages"]
    drawn = sorted(drawn) if every_picture else sorted(drawn)[:1]
    return list(
        dict.fromkeys(
            [*fixed, *(name for name in ("atlas", "benchmarks", "labs") if name in pages), *sorted(labs), *drawn]
        )
    )


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
def test_pages_stand_alone_and_fit(
    size: str, scheme: str, address: str, site: Path, chromium: Any, links: ModuleType
) -> None:
    context = chromium.new_context(viewport=SIZES[size], color_scheme=scheme)
    page = context.new_page()
    faults: list[str] = []
    where = ""
    page.on("request", lambda r: None if r.url.startswith((address, "data:", "blob:")) else faults.append(r.url))
    page.on("console", lambda m: faults.append(f"{where}: console: {m.text}") if m.type == "error" else None)
    page.on("pageerror", lambda error: faults.append(f"{where}: error: {error}"))
    every_picture = (size, scheme) in (("desktop", "light"), ("phone", "dark"))
    for where in kinds(site, every_picture=every_picture):
        page.goto(f"{address}/{where}/")
        pictures = (site / where / "index.html").read_text().count('<pre class="mermaid"')
        if pictures:
            # Material replaces each <pre> by a <div> whose drawing lives in a closed shadow root.
            page.wait_for_function(
                "n => !document.querySelector('pre.mermaid') &&"
                " [...document.querySelectorAll('div.mermaid')].filter(d => d.offsetHeight > 40).length == n",
                arg=pictures,
                timeout=20_000,
            )
        width, limit = page.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
        if width > limit:
            faults.append(f"{where}: {width} pixels wide in a window of {limit}")
        if page.evaluate("getComputedStyle(document.body).colorScheme || ''") == "dark" and scheme == "light":
            faults.append(f"{where}: dark in a light setting")
        text = page.evaluate("document.querySelector('article').innerText")
        if not where.startswith("source/") and re.search("&(lt|gt|amp|quot);", text):
            faults.append(f"{where}: shows escaped text")
    context.close()
    assert faults == []


def test_search_finds_a_term_and_leads_to_it(address: str, chromium: Any) -> None:
    page = chromium.new_page(viewport=SIZES["desktop"])
    page.goto(f"{address}/")
    page.click("label.md-search__icon[for=__search]") if not page.is_visible(".md-search__input") else None
    page.click(".md-search__input")
    page.keyboard.type("running_batch", delay=20)
    page.keyboard.press("End")  # the last key event starts the query
    page.wait_for_selector(".md-search-result__link", timeout=15_000)
    hrefs = page.eval_on_selector_all(".md-search-result__link", "links => links.map(link => link.href)")
    assert any("/glossary/" in href or "/chapters/" in href for href in hrefs)
    page.close()


def test_a_line_of_a_source_page_can_be_addressed(address: str, chromium: Any) -> None:
    page = chromium.new_page(viewport=SIZES["phone"])
    page.goto(f"{address}/source/tinysrt/messages/#L40")
    box = page.evaluate("document.querySelector('#L40').getBoundingClientRect().top")
    assert 0 <= box <= SIZES["phone"]["height"]
    assert page.evaluate("document.querySelector('#L40').matches(':target')")
    page.close()
