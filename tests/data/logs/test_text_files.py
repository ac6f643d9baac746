"""CSV: ids are text unless all of them are whole numbers; what is wrong is named by its line."""

from __future__ import annotations

import bz2
import gzip
import re
import time
from pathlib import Path

import polars as pl
import pytest

from ctr_pe.cli import main
from ctr_pe.data.id_map import NO_VALUE
from ctr_pe.data.logs.log import build, summary
from ctr_pe.data.logs.recipe import load_recipe
from ctr_pe.data.logs.tables import check_start, scan
from ctr_pe.utils.errors import UserError

HEADER = "user_id,item_id,position\n"


def log_of(items: list[str], users: int = 3) -> str:
    rows = [f"{user},{item},{place}" for user in range(users) for place, item in enumerate(items)]
    return HEADER + "\n".join(rows) + "\n"


def built(folder: Path, text: str) -> tuple[set[str], str]:
    """The items of a log, and the summary."""
    (folder / "log.csv").write_text(text)
    given = {"interactions": folder / "log.csv", "protocol": "din", "attributes": None}
    dataset = build(load_recipe(None, given), folder / "set", overwrite=True)
    return set(pl.read_parquet(dataset.path / "items.parquet")["item_id"].cast(pl.String)), summary(dataset)


@pytest.mark.parametrize(
    "items",
    [
        ["7", "007", "07", "8", "9"],
        ["7", " 7", "+7", "8", "9"],
        ["99999999999999999999", "7", "8", "-0", "0"],
        ['"7"', '"007"', "8", "9", "0"],
    ],
)
def test_ids_that_differ_as_text_stay_apart(tmp_path: Path, items: list[str]) -> None:
    known, said = built(tmp_path, log_of(items))
    assert known == {item.strip('"') for item in items}
    assert "item_id: text" in said
    assert "user_id: whole numbers" in said


def test_whole_numbers_are_numbers_however_late_a_text_comes(tmp_path: Path) -> None:
    rows = [f"{number},1" for number in range(12_000)]
    (tmp_path / "a.csv").write_text("n,one\n" + "\n".join(rows))
    assert [str(kind) for kind in scan(tmp_path / "a.csv").collect_schema().dtypes()] == ["Int64", "Int64"]
    (tmp_path / "a.csv").write_text("n,one\n" + "\n".join([*rows, "x,1"]))
    late = scan(tmp_path / "a.csv").collect()
    assert [str(kind) for kind in late.dtypes] == ["String", "Int64"]
    assert late["n"][-1] == "x"


@pytest.mark.parametrize("word", sorted(NO_VALUE))
def test_texts_for_nothing_are_no_items(tmp_path: Path, word: str) -> None:
    with pytest.raises(UserError, match=r"log.csv: null values: item_id: 3 of 15 rows, the first in row 2;"):
        built(tmp_path, log_of(["a", f'"{word}"', "b", "c", "d"]))


def test_other_texts_are(tmp_path: Path) -> None:
    items = ["NULLA", "nan 1", "-", "none", "0x"]
    assert built(tmp_path, log_of(items))[0] == set(items)


def test_a_column_without_a_name_may_be_there_twice(tmp_path: Path) -> None:
    """As the index that pandas writes; but no name may be there twice."""
    rows = log_of(["a", "b", "c", "d"]).splitlines()
    named = ["," + rows[0] + ",", *(f"{number},{row},x" for number, row in enumerate(rows[1:]))]
    assert built(tmp_path, "\n".join(named))[0] == set("abcd")
    named[0] = "," + rows[0] + ",position"
    with pytest.raises(UserError, match=r"log\.csv: line 1: column 'position' is there 2 times$"):
        built(tmp_path, "\n".join(named))


@pytest.mark.parametrize("option", [["--user", "item_id"], ["--order", "timestamp"], ["--attributes", "item_id"]])
def test_a_column_has_one_role(tmp_path: Path, option: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "log.csv").write_text(log_of(["a", "b", "c", "d"]))
    command = ["data", "build", "--protocol", "din", "--interactions", str(tmp_path / "log.csv")]
    assert main([*command, "--out", str(tmp_path / "set"), *option]) == 2
    assert f"column '{option[1]}' is both" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["log.csv", "log.tsv", "log.csv.gz"])
@pytest.mark.parametrize(("sign", "said"), [(";", "';'"), ("\t", "tab"), ("|", "'|'"), (",", "','")])
def test_a_separator_is_asked_for(tmp_path: Path, name: str, sign: str, said: str) -> None:
    """Never guessed: an error names the one that fits, and with it the file is read as with a comma."""
    text = log_of(["a", "b,c", "d", "e"]).replace("b,c", '"b,c"').splitlines()
    rows = [line.replace(",", sign) if '"' not in line else sign.join(line.split(",", 1)) for line in text]
    rows = [row if '"' not in row else sign.join(row.rsplit(",", 1)) for row in rows]
    content = ("\n".join(rows) + "\n").encode("utf-8-sig")  # a byte order mark is fine
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    given = {"interactions": tmp_path / name, "protocol": "din", "attributes": None}
    if sign != ("\t" if "tsv" in name else ","):
        option = "separator='tab'" if sign == "\t" else f"separator='{sign}'"
        with pytest.raises(UserError, match=re.escape(f"{name}: line 1: {said} is between columns")) as error:
            build(load_recipe(None, given), tmp_path / "set")
        assert option in str(error.value)
    dataset = build(load_recipe(None, {**given, "separator": "tab" if sign == "\t" else sign}), tmp_path / "set")
    items = pl.read_parquet(dataset.path / "items.parquet")["item_id"]
    assert set(items) == {"a", "b,c", "d", "e"}
    with pytest.raises(UserError, match="is between columns"):
        build(load_recipe(None, {**given, "separator": "|" if sign != "|" else ";"}), tmp_path / "other")


@pytest.mark.parametrize("sign", ["", ";;", '"', "\n", "é"])
def test_a_separator_is_one_sign(tmp_path: Path, sign: str) -> None:
    with pytest.raises(UserError, match="'separator': one sign, such as"):
        load_recipe(None, {"interactions": tmp_path / "log.csv", "protocol": "din", "separator": sign})


def test_one_column_and_text_with_other_signs_are_no_mistake(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("tags\na|b;c\nd|e;f\n")
    assert scan(tmp_path / "a.csv").collect()["tags"].to_list() == ["a|b;c", "d|e;f"]


def test_decimal_commas_and_the_line_of_spreadsheets_are_named(tmp_path: Path) -> None:
    rows = "\n".join(f"{user};{item};{item};{item},5" for user in range(3) for item in range(5))
    (tmp_path / "log.csv").write_text(f"user_id;item_id;position;price\n{rows}\n")
    given = {"interactions": tmp_path / "log.csv", "protocol": "din", "separator": ";"}
    with pytest.raises(UserError, match=r"'price' holds '0,5' in row 1, no number: write 0\.5$"):
        build(load_recipe(None, {**given, "columns": {"price": "event, numeric"}}), tmp_path / "set")
    with pytest.raises(UserError, match=r"'0,5' in row 1: write 0\.5"):
        build(load_recipe(None, {**given, "order": "price"}), tmp_path / "set")
    (tmp_path / "log.csv").write_text(f"sep=;\nuser_id;item_id;position;price\n{rows}\n")
    with pytest.raises(UserError, match="line 1: 'sep=;' is no header: remove this line"):
        build(load_recipe(None, given), tmp_path / "set")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (gzip.compress(HEADER.encode(), mtime=0), "not a text but compressed by gzip: its name ends in .gz"),
        (b"\x28\xb5\x2f\xfd\x24\x00", "not a text but compressed by zstd: unpack it, or compress it by gzip"),
        (bz2.compress(HEADER.encode()), "not a text but compressed by bzip2: unpack it, or compress it by gzip"),
        (b"PK\x03\x04\x14\x00", "not a text but a zip file or a spreadsheet: unpack it, or save it as CSV"),
        (b"PAR1\x15\x04", "not a text but a parquet file: its name ends in .parquet"),
        ("user_id,item_id,größe\n1,2,3\n".encode("latin1"), "line 1: not a text in UTF-8 ('gr\ufffd\ufffde')"),
    ],
    ids=["gzip", "zstd", "bzip2", "zip", "parquet", "latin1"],
)
def test_what_is_no_text_is_named(content: bytes, said: str, tmp_path: Path) -> None:
    file = tmp_path / "log.csv"
    file.write_bytes(content)
    with pytest.raises(UserError) as refused:
        scan(file)
    assert str(refused.value).startswith(f"{file}: {said}")


def test_a_header_of_thousands_of_columns_is_read_in_time(tmp_path: Path) -> None:
    """A column costs the same however many there are: the time of 20,000 was half a minute."""
    (tmp_path / "log.csv").write_text(",".join(f"column {number}" for number in range(20_000)) + "\n")
    began = time.process_time()
    assert len(check_start(tmp_path / "log.csv", ",")) == 20_000
    assert time.process_time() - began < 1
