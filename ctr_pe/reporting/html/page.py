"""The page from its content: one file with its numbers, its style, its script and plotly.js inside."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs


def page(content: Mapping[str, Any]) -> str:
    """HTML. The numbers are JSON in ``<script id="content">``."""
    # What is marked as HTML is a file of this package or of plotly's, or JSON without "<".
    environment = Environment(
        loader=PackageLoader("ctr_pe.reporting.html", "template"), autoescape=True, undefined=StrictUndefined
    )

    def inside(name: str) -> Markup:
        assert environment.loader is not None
        return Markup(environment.loader.get_source(environment, name)[0])  # nosec B704

    return environment.get_template("page.html").render(
        title=content["title"],
        numbers=Markup(as_json(content)),  # nosec B704
        style=inside("page.css"),
        script=inside("page.js"),
        plotly=Markup(get_plotlyjs()),  # nosec B704
    )


def as_json(content: Any) -> str:
    """JSON that may stand in a script element: without ``<``, and with null for what is not finite."""
    text = json.dumps(_finite(content), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
