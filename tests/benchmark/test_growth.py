"""benchmark/growth.py: formulas give what is measured at three sizes that they were not made of."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmark import growth
from benchmark.growth import FORMULAS, Size


@pytest.fixture(scope="module")
def published(checkout: Path) -> Path:
    return checkout / "benchmark" / "results" / "growth.json"


def test_constants_are_those_that_measurements_have() -> None:
    wanted = {name: {term: 2.0 + at for at, term in enumerate(of.terms)} for name, of in FORMULAS.items()}
    made_of, checked = growth.sizes(1_000)
    measured = {size: growth.predicted(wanted, size) for size in [*made_of, *checked]}
    constants = growth.fitted({size: measured[size] for size in made_of})
    for name, of in constants.items():
        assert of == pytest.approx(wanted[name], rel=1e-6)
    assert growth.check(constants, measured) == []
    measured[checked[0]]["step"] *= 3
    (line,) = growth.check(constants, measured)
    assert line.startswith("step at 1,000 rows, 400 items: ")


def test_the_published_constants_hold_at_three_other_sizes(published: Path, checkout: Path) -> None:
    content = json.loads(published.read_text(encoding="utf-8"))
    made_of, checks = (
        {Size(one["rows"], one["items"]): one["measured"] for one in content[name]} for name in ("made_of", "checks")
    )
    assert len(checks) == 3
    assert max(size.rows for size in checks) > max(size.rows for size in made_of)
    constants = growth.fitted(made_of)
    for name, of in content["constants"].items():
        assert constants[name] == pytest.approx(of)
    assert growth.check(constants, checks) == content["wrong"] == []


def test_the_page_has_the_tables_of_the_command(
    published: Path, checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert growth.main(["--constants", str(published)]) == 0
    page = (checkout / "docs" / "growth.md").read_text(encoding="utf-8")
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(rows) == 2 + len(FORMULAS) + 2 + 4
    assert [row for row in rows if row not in page] == []


@pytest.mark.slow
def test_sizes_hold_on_this_machine() -> None:
    """Bytes, except the memory of a build, which grows by the formula where a log has more rows than a block; times
    depend on what else the machine does."""
    content = growth.measured_at(*growth.sizes(20_000))
    held = {"disk", "state", "model"}
    assert [line for line in content["wrong"] if line.partition(" at ")[0] in held] == []
    assert all(figure > 0 for one in content["checks"] for figure in one["measured"].values())
