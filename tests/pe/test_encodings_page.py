"""docs/encodings.md says what the classes say."""

from __future__ import annotations

from pathlib import Path

import pytest

from ctr_pe.pe import available_pes, encoding_class
from docs.site.encodings import encodings_page


@pytest.mark.parametrize("name", available_pes())
def test_every_encoding_speaks_for_itself(name: str) -> None:
    assert "about" in vars(encoding_class(name)), "it has the text of its base class"


def test_the_page_is_up_to_date() -> None:
    page = encodings_page()
    rows = {line.split("`")[1]: line.split(" | ") for line in page.splitlines() if line.startswith("| `")}
    assert list(rows) == available_pes()
    assert all(row[6] == "yes" for row in rows.values()), "not causal"
    assert (rows["none"][5], rows["naive"][5], rows["cape"][5]) == ("yes", "no", "yes")  # starts as none
    assert (rows["none"][7], rows["naive"][7], rows["rope"][7], rows["kernel"][7]) == ("yes", "no", "yes", "no")
    assert rows["cape"][2] == "table (T, P), gate.weight (P, d), gate.bias (P)"
    assert rows["time_bias"][4] == "event times"
    shipped = Path(__file__).parents[2] / "docs" / "encodings.md"
    assert shipped.read_text(encoding="utf-8") == page, "python -m docs.site.encodings > docs/encodings.md"
