"""benchmark/evidence.py: docs/evidence.md is what the rows say, and cannot say anything else."""

from __future__ import annotations

import re

import pytest

from benchmark import evidence

RESULTS = evidence.ROOT / "benchmark" / "results"
PLACE = "DIN-synthetic_context"


@pytest.fixture(scope="module")
def rows() -> evidence.Rows:
    """Each folder is read once."""
    return evidence.Rows(RESULTS)


@pytest.mark.slow
def test_the_page_is_made_from_the_rows(rows: evidence.Rows) -> None:
    page = (evidence.ROOT / "docs" / "evidence.md").read_text(encoding="utf-8")
    assert page == evidence.page(rows)


def test_a_claim_that_the_rows_do_not_bear_out_is_refused(rows: evidence.Rows) -> None:
    assert rows.above(PLACE, "cape").startswith("+.24")
    assert rows.level(PLACE, "cape", "cape_constant")
    for claim, pes in [("below", ["cape"]), ("level", ["cape"]), ("above", ["cape", "cape_constant"])]:
        with pytest.raises(evidence.NotBorneOut, match="cape"):
            getattr(rows, claim)(PLACE, *pes)
    with pytest.raises(evidence.NotBorneOut, match="no runs of rope"):
        rows.mean(PLACE, "rope")
    with pytest.raises(evidence.NotBorneOut, match="tables of this name, not one"):
        rows.setting("all_encodings")
    with pytest.raises(evidence.NotBorneOut, match=r"a run ends at \.7290, not above 0\.75"):
        rows.least("all_encodings", 0.75)
    with pytest.raises(evidence.NotBorneOut, match=r"not above none are .*'DIN', 'alibi'"):
        rows.all_above("all_encodings", set())
    with pytest.raises(evidence.NotBorneOut, match=r"cape, cape_constant, .*cape_oracle differ from none"):
        rows.none_shown(PLACE)
    with pytest.raises(evidence.NotBorneOut, match="no case"):
        rows.speed("encoding.nothing")


def test_the_largest_gains_are_named_in_their_order(rows: evidence.Rows) -> None:
    assert re.findall("`(.*?)`", rows.largest(PLACE)) == ["cape_oracle", "cape_cosine", evidence.MATCH]


def test_so_is_one_about_a_change_of_an_encoding(rows: evidence.Rows) -> None:
    assert rows.below(evidence.VARIANTS, "kernel_l=toeplitz", "default").startswith("−.00")
    with pytest.raises(evidence.NotBorneOut, match="kernel_u=full is not below default"):
        rows.below(evidence.VARIANTS, "kernel_u=full", "default")
    with pytest.raises(evidence.NotBorneOut, match="no suite of this name varies anything"):
        rows.suite("real_logs_all")


def test_so_is_one_about_cells_of_a_suite(rows: evidence.Rows) -> None:
    of_sixteen = "cape max_len=10 position_dim=16"
    suite = rows.suite(evidence.LENGTHS)
    assert len(suite.pooled(of_sixteen)) == 3
    assert len(suite.pooled("cape max_len=10")) == 15  # of five widths
    assert len(suite.pooled("cape")) == 60
    assert rows.above(evidence.LENGTHS, "cape max_len=5", "cape max_len=3")
    assert rows.difference(evidence.LENGTHS, of_sixteen) == suite.gains[of_sixteen]  # corrected for all cells
    with pytest.raises(evidence.NotBorneOut, match="no cell of cape max_len=4 has all seeds"):
        rows.mean(evidence.LENGTHS, "cape max_len=4")
    level = ("cape max_len=10", "cape_constant max_len=10")
    assert rows.all_level(evidence.LENGTHS, [level]) == "1"
    with pytest.raises(evidence.NotBorneOut, match="cape max_len=5 and cape max_len=3 differ"):
        rows.all_level(evidence.LENGTHS, [level, ("cape max_len=5", "cape max_len=3")])


def test_so_is_one_about_some_users(rows: evidence.Rows) -> None:
    sports = "DIN-amazon_sports"
    header, _, row = rows.by("age", [sports], "cape").splitlines()
    assert header.startswith("| model | to 0 days | over 0 to ")
    assert row.startswith(f"| DIN | {rows.among(sports, 'to 0 days', 'cape')} |")
    with pytest.raises(evidence.NotBorneOut, match="cape gains no more to 4 items than over 8 items"):
        rows.by("length", [sports], "cape")
    with pytest.raises(evidence.NotBorneOut, match="no users 'to 3 days', but all users"):
        rows.among(sports, "to 3 days", "cape")


def test_so_is_one_about_gates(rows: evidence.Rows) -> None:
    assert rows.tells("BST", "cape_cosine")
    assert not rows.tells("BST", "cape")


@pytest.mark.slow
def test_a_page_whose_gates_do_not_bear_it_out_is_not_made(
    rows: evidence.Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "gate", lambda model, pe: [0.9])
    with pytest.raises(evidence.NotBorneOut, match="gates"):
        evidence.page(rows)


def test_paragraphs_are_filled_and_intervals_whole() -> None:
    text = "# Title\n\na " + "word " * 21 + "+.0024 [+.0009,\n+.0039] end\n\n- one\n  two\n- three\n\n| a | b |"
    found = evidence.filled(text)
    assert "[+.0009, +.0039]" in found
    assert found.endswith("- one two\n- three\n\n| a | b |\n")
    assert max(map(len, found.splitlines())) <= 120
