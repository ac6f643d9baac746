"""The site of the documents builds without a warning, shows the names that stay, and loads nothing from elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

NAMES = (
    "Positions build_pe available_pes PositionEncoding Chain check_pe TargetAttention SelfAttention RankModel CTRRanker"
)
NAMES += " load Scorer open_dataset Dataset BatchLoader train fit evaluate compare"


@pytest.fixture(scope="module")
def site(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("material", reason="mkdocs-material is not installed: the extra docs")
    pytest.importorskip("mkdocstrings", reason="mkdocstrings is not installed: the extra docs")
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
    for page in ("contributing", "changelog", "result_tables"):
        assert (site / page / "index.html").is_file()


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
