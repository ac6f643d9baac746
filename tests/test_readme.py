"""The README is one page, its code runs as it stands, and its numbers are those of the published runs."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from ctr_pe.pe import REGISTRY

INTERVAL = r"[+−]\.\d{4} \[[+−]\.\d{4}, [+−]\.\d{4}\]"


@pytest.fixture(scope="module")
def text(checkout: Path) -> str:
    return (checkout / "README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def blocks(text: str) -> dict[str, list[str]]:
    """Language -> code blocks, in order."""
    found: dict[str, list[str]] = {}
    for language, code in re.findall(r"^```(\w+)\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        found.setdefault(language, []).append(code)
    return found


def test_it_is_one_page(text: str, blocks: dict[str, list[str]]) -> None:
    assert len(text.splitlines()) <= 120
    assert {language: len(found) for language, found in blocks.items()} == {
        "bash": 2,
        "text": 1,
        "python": 1,
        "yaml": 1,
    }


def test_the_first_two_bash_blocks_install_and_run(blocks: dict[str, list[str]]) -> None:
    first, second = blocks["bash"][:2]
    assert "ctr-pe benchmark" in first
    assert "pytest" in second
    assert all("pip install -q -c constraints.txt" in block for block in (first, second))


def test_it_counts_the_encodings(text: str, checkout: Path) -> None:
    """All but none, and those of other packages."""
    home = (checkout / "docs" / "index.md").read_text(encoding="utf-8")
    counted = re.findall(r"\b(\d+) (?:position )?encodings", f"{text} {home}")
    assert counted == [str(len(REGISTRY) - 1)] * 2


def test_its_numbers_are_those_of_the_runs(text: str, blocks: dict[str, list[str]], checkout: Path) -> None:
    """Each gain stands in the evidence, in a row of its model and log; the output in the table of those runs."""
    evidence = (checkout / "docs" / "evidence.md").read_text(encoding="utf-8")
    logs = {"purchases": "amazon_sports", "impressions": "kuairand_pure", "films": "ml-1m"}
    logs["built-in"] = "synthetic_context"
    rows = re.findall(rf"^\| (\w+) \| ([\w-]+)(.*{INTERVAL}.*)$", text, re.MULTILINE)
    assert len(rows) >= 6
    for model, log, gains in rows:
        published = re.findall(rf"^\| {model} on {logs[log]} \|.*$", evidence, re.MULTILINE)
        assert [gain for gain in re.findall(INTERVAL, gains) if gain not in "".join(published)] == []
    assert len(re.findall(INTERVAL, text)) == sum(len(re.findall(INTERVAL, gains)) for *_, gains in rows)
    table = (checkout / "benchmark" / "results" / "DIN-synthetic_context" / "table.md").read_text(encoding="utf-8")
    numbers = re.findall(r"\d\.\d{4}(?: ± \d\.\d{4})?", blocks["text"][0])
    assert len(numbers) >= 6
    assert [number for number in numbers if number not in table] == []


def test_from_a_table_to_ranked_candidates(
    blocks: dict[str, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (code,) = blocks["python"]
    assert len([line for line in code.splitlines() if line.strip()]) <= 20
    file = tmp_path / "readme.py"
    file.write_text(code)
    monkeypatch.chdir(tmp_path)
    names = runpy.run_path(str(file))
    ranked = names["load"]("model/").rank(None, names["candidates"], k=5)
    assert ranked.columns == ["user_id", "item_id", "score", "rank"]
    assert ranked["rank"].to_list() == [1, 2, 3, 4, 5]
    assert "gAUC" in capsys.readouterr().out
