"""The page from its content: one file with its numbers, its style, its script and plotly.js inside."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs
from pydantic_core import to_json


def page(content: Mapping[str, Any]) -> str:
    """HTML. The numbers are JSON in ``<script id="content">``."""
    # What is marked as HTML is a file of this package or of plotly's, or JSON without "<".
    loader = PackageLoader("ctr_pe.reporting.html", "template")
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined)
    style, script = (Markup(loader.get_source(environment, f"page.{of}")[0]) for of in ("css", "js"))  # nosec B704
    numbers, plotly = Markup(as_json(content)), Markup(get_plotlyjs())  # nosec B704
    template = environment.get_template("page.html")
    return template.render(title=content["title"], numbers=numbers, style=style, script=script, plotly=plotly)


def as_json(content: Any) -> str:
    """JSON that may stand in a script element: without ``<``, and with null for what is not finite."""
    text = to_json(content, inf_nan_mode="null").decode()
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
