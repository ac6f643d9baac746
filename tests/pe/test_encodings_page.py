"""docs/encodings.md says what the classes say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ctr_pe import cli
from ctr_pe.pe import available_pes, encoding_class
from docs.site.encodings import WHEN, encodings_page


@pytest.mark.parametrize("name", available_pes())
def test_every_encoding_speaks_for_itself(name: str) -> None:
    assert "about" in vars(encoding_class(name)), "it has the text of its base class"


def test_the_page_is_up_to_date() -> None:
    page = encodings_page()
    rows = {line.split("`")[1]: line.split(" | ") for line in page.splitlines() if line.startswith("| `")}
    assert list(rows) == available_pes()
    assert all(row[5] == "yes" for row in rows.values()), "not causal"
    assert (rows["none"][4], rows["naive"][4], rows["cape"][4]) == ("yes", "no", "yes")  # starts as none
    assert (rows["none"][6], rows["naive"][6], rows["rope"][6], rows["kernel"][6]) == ("yes", "no", "yes", "no")
    assert rows["cape"][1] == "table (T, P), gate.weight (P, d), gate.bias (P)"
    assert rows["time_bias"][3] == "event times"
    shipped = Path(__file__).parents[2] / "docs" / "encodings.md"
    assert shipped.read_text(encoding="utf-8") == page, "python -m docs.site.encodings > docs/encodings.md"


def test_the_runs_of_the_pictures_have_every_encoding() -> None:
    commands = re.findall(r"^- `ctr-pe (benchmark .*)`$", encodings_page(), re.MULTILINE)
    trained = [cli._parser().parse_args(command.split()) for command in commands]
    assert {*trained[0].encodings, *trained[1].encodings} == {*available_pes()}
    assert all(args.keep_weights and args.repeats == 1 for args in trained)


@pytest.mark.parametrize("name", available_pes())
def test_every_encoding_has_a_card(name: str) -> None:
    """With its equation; and, where they are there, its cost, a small picture, and the command that draws it."""
    folder = Path(__file__).parents[2] / "docs"
    page = (folder / "encodings.md").read_text(encoding="utf-8")
    _, card = re.split(rf"^## {name}$", page, maxsplit=1, flags=re.MULTILINE)
    card = re.split(r"^## ", card, maxsplit=1, flags=re.MULTILINE)[0]
    assert f"`{encoding_class(name).about.equation}`" in card
    assert re.search(
        r"^\*\*Cost\.\*\* DIN [\d.]+ ×, BST [\d.]+ ×, SASRec [\d.]+ ×\.$|Not measured yet\.$", card, re.MULTILINE
    )
    assert WHEN.get(name, "Not shown yet.") in card
    if not (folder / "drawn" / f"{name}.png").exists():
        return
    (picture,) = re.findall(r"!\[[^\]]+\]\((.*)\)", card)
    assert 3_000 < (folder / picture).stat().st_size < 60 * 1024
    (command,) = re.findall(r"^`(ctr-pe draw .*)`$", card, re.MULTILINE)
    args = cli._parser().parse_args(command.split()[1:])
    assert (args.pe, args.out, args.longest) == ([name], Path("docs") / picture, 1)
    assert f"--out {args.store}`\n" in page  # the runs that it draws
