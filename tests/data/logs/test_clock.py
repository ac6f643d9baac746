"""Times are dates from 1990 to 2099 or count from 0; a wrong unit is named, and so is the right one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from ctr_pe.data.logs.clock import FIRST, LAST, UNITS, implausible, in_words
from ctr_pe.data.logs.log import build, summary
from ctr_pe.data.logs.recipe import load_recipe
from ctr_pe.utils.errors import UserError

NOW = 1_700_000_000


@pytest.mark.parametrize("unit", UNITS)
def test_dates_and_clocks_of_their_own_are_times(unit: str) -> None:
    each = UNITS[unit]
    for low, high in [(FIRST, LAST - 1), (NOW, NOW), (0, 100), (-500, 0), (1 - FIRST, FIRST - 1)]:
        assert implausible(low * each, high * each, unit) is None


@pytest.mark.parametrize("unit", ["s", "ms"])
@pytest.mark.parametrize("of", UNITS)
def test_dates_in_another_unit_say_which(unit: str, of: str) -> None:
    if of == unit or (of, unit) == ("s", "ms"):  # seconds are less than 50 days of a clock of its own in milliseconds
        return
    value, text = implausible(NOW * UNITS[of], (NOW + 9) * UNITS[of], unit) or (0, "")
    assert value == NOW * UNITS[of]
    assert "2023-11-14" in text
    assert f"time_unit={of!r}" in text


def test_mixed_and_impossible_times_name_the_value_at_fault() -> None:
    for unit, low, high, wrong, said in [
        ("s", NOW, NOW * 1000, NOW * 1000, "others are in seconds: a column has one unit"),
        ("ms", NOW, NOW * 1000, NOW, "others are in milliseconds"),
        ("s", 0, NOW, 0, "the year 1970"),
        ("s", NOW, 99_999_999_999, 99_999_999_999, "the year 5138"),
        ("s", -(2**62), NOW, -(2**62), "the year -146"),
        ("s", FIRST - 99_999, FIRST, FIRST - 99_999, "the year 1989"),
        ("s", 0, FIRST, 0, "the year 1970"),
    ]:
        value, text = implausible(low, high, unit) or (None, "")
        assert (value, said in text) == (wrong, True), text


def test_ranges_in_words() -> None:
    assert in_words(NOW * 1000, (NOW + 86_400) * 1000, "ms") == "2023-11-14 22:13 to 2023-11-15 22:13"
    assert in_words(0, 7200, "s") == "0 to 7,200, a clock of its own: 2:00:00"
    assert "clock of its own" in in_words(NOW, NOW + 1, "ms")


def built(folder: Path, times: list[Any], **recipe: Any) -> str:
    pl.DataFrame({"user_id": [1] * 5, "item_id": range(5), "timestamp": times}).write_parquet(folder / "log.parquet")
    given = {"interactions": folder / "log.parquet", "protocol": "din", "attributes": None, **recipe}
    dataset = build(load_recipe(None, given), folder / "set", overwrite=True)
    assert json.loads((dataset.path / "report.json").read_text())["read_as"].keys() == {
        "user_id",
        "item_id",
        "timestamp",
    }
    return summary(dataset)


def test_a_log_says_how_its_times_were_read(tmp_path: Path) -> None:
    times = [NOW + 86_400 * day for day in range(5)]
    said = "timestamp: {}, 2023-11-14 22:13 to 2023-11-18 22:13"
    assert said.format("seconds") in built(tmp_path, times)
    assert said.format("milliseconds") in built(tmp_path, [time * 1000 for time in times], time_unit="ms")
    assert "user_id: whole numbers" in built(tmp_path, pl.from_epoch(pl.Series(times)).to_list())


@pytest.mark.parametrize("last", [99_999_999_999, NOW * 1000, 0, 2**62])
def test_a_log_with_one_wrong_time_names_its_row(tmp_path: Path, last: int) -> None:
    with pytest.raises(UserError, match=rf"log\.parquet: time column 'timestamp', row 3: {last} is "):
        built(tmp_path, [NOW, NOW + 1, last, NOW + 3, NOW + 4])
    assert not (tmp_path / "set").exists()
