"""Pages from the templates of this folder, each one file that needs no network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ctr_pe.utils.errors import progress
from ctr_pe.utils.files import file_errors


def render(template: str, **given: Any) -> str:
    """HTML of ``template/<template>.html``; ``style`` and ``script`` are those of ``template/page``."""
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    loader = PackageLoader("ctr_pe.reporting.html", "template")
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined)
    # What is marked as HTML is a file of this package.
    parts = {
        name: Markup(loader.get_source(environment, f"page.{suffix}")[0])  # nosec B704
        for name, suffix in {"style": "css", "script": "js"}.items()
    }
    return environment.get_template(f"{template}.html").render(**parts, **given)


def write(html: str, out: Path) -> None:
    """Raises UserError if it cannot be written."""
    with file_errors(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(html, encoding="utf-8")
    progress(f"{out}: open it in a browser")
