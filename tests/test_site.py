"""The site of the documents builds without a warning, shows the names that stay, loads nothing from other hosts, and is
read and searched in a browser, on a screen and on a phone."""

from __future__ import annotations

import base64
import io
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.browser import errors, opened, requested, waiting

NAMES = (
    "Positions build_pe available_pes PositionEncoding Chain check_pe TargetAttention SelfAttention RankModel CTRRanker"
)
NAMES += " load Scorer open_dataset Dataset BatchLoader train fit evaluate compare"


@pytest.fixture(scope="module")
def site(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("material", reason="mkdocs-material is not installed: the extra docs")
    pytest.importorskip("mkdocstrings", reason="mkdocstrings is not installed: the extra docs")
    pytest.importorskip("nbconvert", reason="nbconvert is not installed: the extra docs")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", "docs/site/mkdocs.yml", "-d", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=checkout, capture_output=True, text=True, env=environment)
    assert built.returncode == 0, built.stderr
    return folder


@pytest.mark.slow
def test_the_api_has_all_names(site: Path) -> None:
    page = (site / "api" / "index.html").read_text(encoding="utf-8")
    headings = re.findall(r'<h3 id="([\w.]+)"', page)
    assert {name.rpartition(".")[2] for name in headings} >= set(NAMES.split())
    assert not re.findall(r":(?:func|class|meth|mod):", page)


@pytest.mark.slow
def test_every_document_has_a_page(site: Path, checkout: Path) -> None:
    for document in (checkout / "docs").glob("*.md"):
        name = "." if document.stem == "index" else document.stem
        assert (site / name / "index.html").is_file()
    for page in ("contributing", "changelog", "result_tables", "notebook"):
        assert (site / page / "index.html").is_file()


@pytest.mark.slow
def test_the_notebook_is_a_page_with_its_tables_and_pictures(site: Path) -> None:
    page = (site / "notebook" / "index.html").read_text(encoding="utf-8")
    assert "<th>gAUC</th>" in page
    assert 'href="../pipeline/"' in page
    (picture,) = re.findall(r'<img[^>]*src="([^"]+\.png)"', page)
    assert (site / "notebook" / picture).is_file()


@pytest.mark.slow
def test_nothing_is_loaded_from_another_host(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert pages
    for page in pages:
        text = page.read_text(encoding="utf-8")
        loaded = re.findall(r'<(?:script|img|iframe)[^>]*\ssrc="?(http[^"\s>]*)', text)
        loaded += re.findall(r'<link[^>]*rel="?(?:stylesheet|preconnect|icon)[^>]*href="?(http[^"\s>]*)', text)
        assert not loaded, page
    for sheet in site.rglob("*.css"):
        assert not re.search(r"url\(\s*[\"']?https?:", sheet.read_text(encoding="utf-8")), sheet


@pytest.mark.slow
def test_links_to_files_that_are_no_pages_become_their_path(site: Path) -> None:
    text = (site / "pipeline" / "index.html").read_text(encoding="utf-8")
    assert "<code>tests/serving/test_ranker.py</code>" in text
    assert 'href="../contributing/"' in (site / "architecture" / "index.html").read_text(encoding="utf-8")


# In a browser.

PAGES = ["", "first_run/", "notebook/", "from_log_to_ranking/", "next_item/", "evidence/", "encodings/", "pictures/"]


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    """Where the site is served: a page from disk may not read the index of the search."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def screenshot(browser: Any, file: Path) -> Any:
    """What the window shows, in ``file`` -> its pixels, (H, W, 3)."""
    image = pytest.importorskip("PIL.Image", reason="Pillow is not installed: matplotlib brings it")
    content = base64.b64decode(browser.execute_cdp_cmd("Page.captureScreenshot", {})["data"])
    file.write_bytes(content)
    return np.asarray(image.open(io.BytesIO(content)).convert("RGB"))


LOADED = "return [...document.images].every((one) => one.complete)"
SHOWN = """
const wide = (one) => one.getBoundingClientRect().right > window.innerWidth + 1;
const scrolls = (one) => one && !one.matches(".md-content") &&
    (["auto", "scroll"].includes(getComputedStyle(one).overflowX) || scrolls(one.parentElement));
return {
    title: document.querySelector(".md-content h1").innerText.replace("¶", ""),
    overflow: document.documentElement.scrollWidth - window.innerWidth,
    cut: [...document.querySelectorAll(".md-content p, .md-content img, .md-content table, .md-content pre")]
        .filter((one) => wide(one) && !scrolls(one.parentElement)).map((one) => one.outerHTML.slice(0, 80)),
    broken: [...document.images].filter((one) => !one.naturalWidth).map((one) => one.src),
    letters: parseFloat(getComputedStyle(document.querySelector(".md-content p")).fontSize),
}"""


@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 390])
def test_a_page_can_be_read_on_a_screen_and_on_a_phone(address: str, browser: Any, width: int, tmp_path: Path) -> None:
    """Nothing is cut off at the side, pictures are there, letters are no smaller than a newspaper's, and the console
    and the network are quiet."""
    for page in PAGES:
        browser.get_log("performance")
        opened(browser, address + page, width)
        browser.execute_script("for (const one of document.images) one.loading = 'eager'")
        waiting(browser).until(
            lambda _: browser.execute_script("return [...document.images].every((one) => one.complete)")
        )
        shown = browser.execute_script(SHOWN)
        assert shown["title"], page
        assert shown["overflow"] <= 0, page
        assert (shown["cut"], shown["broken"]) == ([], []), page
        assert shown["letters"] >= 12, page
        assert errors(browser) == [], page
        assert [
            one for one in requested(browser, address + page) if not one.startswith((address, "data:", "blob:"))
        ] == []
        pixels = screenshot(browser, tmp_path / f"{page.strip('/') or 'index'}-{width}.png")
        assert pixels.shape == (900, width, 3), page
        dark = (pixels[100:].mean(2) < 128).mean()  # letters, below the bar with the title
        assert 0.005 < dark < 0.5, (page, dark)


@pytest.mark.slow
def test_a_text_that_is_cut_off_would_be_noticed(address: str, browser: Any) -> None:
    opened(browser, address, 390)
    wide = "document.querySelector('.md-content p').style.width = '3000px'"
    for hidden in ("", "document.body.style.overflowX = 'hidden'"):
        browser.execute_script(f"{wide}; {hidden}")
        assert browser.execute_script(SHOWN)["cut"]


@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 390])
def test_the_search_finds_an_encoding(address: str, browser: Any, width: int, tmp_path: Path) -> None:
    opened(browser, address, width)
    browser.execute_script("document.querySelector('#__search').click()")
    field = browser.find_element("css selector", ".md-search__input")
    waiting(browser).until(lambda _: field.is_displayed())
    field.send_keys("kerple")
    waiting(browser).until(lambda _: browser.find_elements("css selector", ".md-search-result__link"))
    found = [one.get_attribute("href") for one in browser.find_elements("css selector", ".md-search-result__link")]
    assert any("/encodings/" in one for one in found)
    screenshot(browser, tmp_path / f"search-{width}.png")
    browser.get(next(one for one in found if "/encodings/" in one))
    assert "kerple" in browser.find_element("css selector", ".md-content").text.lower()
    assert errors(browser) == []
