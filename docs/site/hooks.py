"""Pages of the site that lie elsewhere in the repository, and links from pages to files that are no pages."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from nbconvert import MarkdownExporter

ROOT = Path(__file__).resolve().parents[2]
ADDED = {
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "benchmark/results/README.md": "result_tables.md",
    "docs/notebook.ipynb": "notebook.md",
}
"""File in the repository -> its page."""
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\((?!\w+:|#)([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    for source, page in ADDED.items():
        text, pictures = read(ROOT / source)
        files.append(File.generated(config, page, content=text))
        for name, content in pictures.items():
            files.append(File.generated(config, name, content=content))
    return files


def read(source: Path) -> tuple[str, dict[str, bytes]]:
    """A page as Markdown, with the pictures that a notebook has in it."""
    if source.suffix != ".ipynb":
        return source.read_text(encoding="utf-8"), {}
    text, parts = MarkdownExporter().from_filename(str(source))
    return text, parts["outputs"]


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Links to a page stay; those to another file of the repository become its path. A link to nothing is left as it
    is, which is an error."""
    origin = next((source for source, name in ADDED.items() if name == page.file.src_uri), f"docs/{page.file.src_uri}")

    def linked(found: re.Match[str]) -> str:
        text, link, anchor = found.groups()
        target = posixpath.normpath(posixpath.join(posixpath.dirname(origin), link))
        name = ADDED.get(target) or target.removeprefix("docs/")
        if files.get_file_from_path(name) is not None and (target in ADDED or target.startswith("docs/")):
            return f"[{text}]({name}{anchor or ''})"
        if not (ROOT / target).exists():
            return found[0]
        return f"`{target}`" if text in (target, posixpath.basename(target)) else f"{text} (`{target}`)"

    return LINK.sub(linked, markdown)


def on_page_content(html: str, page: Any, config: Any, files: Files) -> str:
    """Docstrings name code as Sphinx does, :func:`~ctr_pe.training.fit`: the name alone is shown."""
    html = re.sub(r":(?:attr|class|data|func|meth|mod):(?=<code>)", "", html)
    return re.sub(r"<code>~(?:\w+\.)*(\w+)</code>", r"<code>\1</code>", html)
