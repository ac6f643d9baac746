"""``ctr-pe report``: the results of a benchmark as one HTML file that needs no network."""

from __future__ import annotations

from pathlib import Path

from ctr_pe.reporting.html.options import Options
from ctr_pe.utils.errors import UserError, say

PAGE = "report.html"

__all__ = ["Options", "report"]


def report(options: Options) -> Path:
    """Write the page; where it is.

    Raises:
        UserError: Plotly or Jinja2 is not installed, there are no results, or the page cannot be written.
    """
    try:
        import jinja2  # noqa: F401
        import plotly  # noqa: F401
    except ImportError:
        raise UserError("ctr-pe report needs Plotly and Jinja2: pip install 'ctr_pe[report]'") from None
    from ctr_pe.reporting.html.content import content
    from ctr_pe.reporting.html.page import page

    found = content(options)
    out = options.out or options.results / PAGE
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(page(found), encoding="utf-8")
    except OSError as error:
        raise UserError(f"{out}: {error.strerror}") from None
    say(f"{out}: open it in a browser")
    return out
