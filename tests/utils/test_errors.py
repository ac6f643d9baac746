"""The end of an error line names what was probably meant."""

from __future__ import annotations

from pathlib import Path

import pytest

from ctr_pe.utils.errors import nearest, no_such_file

MANY = [f"{letter}_{'long_name' * 2}" for letter in "abcdefgh"]


@pytest.mark.parametrize(
    ("name", "choices", "end"),
    [
        ("cap", ["rope", "cape"], "did you mean 'cape'? (cape, rope)"),
        ("CAPE", ["rope", "cape"], "did you mean 'cape'? (cape, rope)"),
        ("xyz", ["rope", "cape"], "(cape, rope)"),
        ("b_long_namelong_nam", MANY, f"did you mean '{MANY[1]}'?"),
        ("long", MANY, "(8 choices, such as '"),
        ("§" * 5000, MANY, "(8 choices, such as '"),
        ("x", [], "()"),
    ],
)
def test_the_nearest_choice_and_the_others_if_they_are_few(name: str, choices: list[str], end: str) -> None:
    found = nearest(name, choices)
    assert found.startswith(end)
    assert len(found) < 200


def test_a_missing_file_names_its_neighbours_but_not_our_own(tmp_path: Path) -> None:
    for name in ("train.parquet", "ctr-pe-abcdefgh", "ctr-pe-abcdefgh.lock"):
        (tmp_path / name).touch()
    error = str(no_such_file(tmp_path / "trian.parquet"))
    assert error.endswith("trian.parquet: no such file; did you mean 'train.parquet'? (train.parquet)")
    (tmp_path / "train.parquet").unlink()
    assert str(no_such_file(tmp_path / "trian.parquet")).endswith("no such file")
