"""A log in several files, in folders that name a day, or at an address is the log in one file."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import polars as pl
import pytest

from ctr_pe.cli import main
from ctr_pe.data.dataset import Dataset
from ctr_pe.data.logs.check import check
from ctr_pe.data.logs.log import build
from ctr_pe.data.logs.places import Address, files_of, place
from ctr_pe.data.logs.recipe import load_recipe
from ctr_pe.data.logs.tables import readable, scan
from ctr_pe.utils.errors import UserError

DAYS = ("2024-01-01", "2024-01-02", "2024-01-03")
Put = Callable[[str, Any], None]


def days() -> dict[str, pl.DataFrame]:
    generator = np.random.default_rng(0)
    columns = {"user_id": (0, 8), "item_id": (0, 30), "hour": (0, 24)}
    return {
        day: pl.DataFrame({name: generator.integers(*span, 40) for name, span in columns.items()})
        .with_columns(timestamp=pl.lit(1704067200 + number * 86_400) + pl.int_range(40))
        for number, day in enumerate(DAYS)
    }  # fmt: skip


def written(put: Put) -> pl.DataFrame:
    """The log in every form; the whole."""
    for day, rows in days().items():
        put(f"hive/day={day}/part-0.parquet", rows)
        put(f"texts/{day}.csv", rows)
    put("hive/_SUCCESS", b"")
    put("hive/._SUCCESS.crc", b"x")
    put("mixed/a.csv", rows)
    put("mixed/b.parquet", rows)
    put("headers/a.csv", rows)
    put("headers/b.csv", rows.rename({"hour": "minute"}))
    put("other/a.xlsx", b"")
    return pl.concat(days().values())


def built(log: object, out: Path) -> Dataset:
    given = {"interactions": log, "protocol": "din", "columns": {"hour": "event"}, "keep": "all"}
    return build(load_recipe(None, given), out)


def check_forms(root: str, folder: Path, whole: pl.DataFrame) -> None:
    """All forms give the data set of one file; a day's folder is a column."""
    whole.write_parquet(folder / "log.parquet")
    built(folder / "log.parquet", folder / "one")
    forms = [f"{root}/hive", f"{root}/hive/day=*/*.parquet", f"{root}/hive/**/*.parquet"]
    if not root.startswith("memory"):
        forms += [f"{root}/texts", f"{root}/texts/2024-*.csv"]
    for number, form in enumerate(forms):
        built(form, folder / str(number))
        facts = [json.loads((folder / name / "report.json").read_text())["files"] for name in ("one", str(number))]
        names = ("train.parquet", "valid.parquet", "test.parquet", "feature_vocab.json")
        assert [facts[0][name] for name in names] == [facts[1][name] for name in names], form
    assert scan(place(f"{root}/hive")).collect()["day"].cast(pl.String).unique(maintain_order=True).to_list() == [*DAYS]
    assert scan(place(f"{root}/hive/day=2024-01-0[12]/*.parquet")).collect().height == 80


def check_mistakes(root: str) -> None:
    for wrong, words in {
        "hvie/day.parquet": "no such file",
        "hive/day=2023-*/*.parquet": "no file has such a name",
        "mixed": "a table has files of one kind",
        "other": "a log is .parquet, .csv or .tsv",
    }.items():
        with pytest.raises(UserError, match=words) as error:
            scan(place(f"{root}/{wrong}"))
        assert f"{root}/{wrong}" in str(error.value)
        assert "\n" not in str(error.value)


def test_on_this_machine(tmp_path: Path) -> None:
    def put(name: str, what: Any) -> None:
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(what, bytes):
            file.write_bytes(what)
        else:
            what.write_csv(file) if name.endswith(".csv") else what.write_parquet(file)

    check_forms(str(tmp_path), tmp_path, written(put))
    check_mistakes(str(tmp_path))
    with pytest.raises(UserError, match=r"b\.csv: its columns are .*minute.*, those of .*a\.csv .*hour"):
        scan(tmp_path / "headers")
    (tmp_path / "a[1].csv").write_text("user_id\n7\n")
    assert scan(tmp_path / "a[1].csv").collect().height == 1
    (tmp_path / "texts/2024-01-02.csv").write_text("user_id,item_id,hour,timestamp\n1,2,3,1704067200\n1,2\n")
    with pytest.raises(UserError, match=r"2024-01-02\.csv: line 3: 2 fields, but the header has 4"):
        built(tmp_path / "texts", tmp_path / "broken")
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("protocol: din\ninteractions: s3://bucket/log\nitems: items.csv\n")
    found = load_recipe(str(recipe), {})
    assert (found.interactions, found.items) == (Address("s3://bucket/log"), tmp_path / "items.csv")
    assert json.loads(found.model_dump_json())["interactions"] == "s3://bucket/log"


def test_at_an_address_of_fsspec(tmp_path: Path) -> None:
    system = fsspec.filesystem("memory")

    def put(name: str, what: Any) -> None:
        with system.open(f"/logs/{name}", "wb") as file:
            if isinstance(what, bytes):
                file.write(what)
            else:
                what.write_csv(file) if name.endswith(".csv") else what.write_parquet(file)

    try:
        check_forms("memory://logs", tmp_path, written(put))
        check_mistakes("memory://logs")
        with pytest.raises(UserError, match="text is read from this machine and from s3"):
            scan(place("memory://logs/texts"))
        with pytest.raises(UserError, match="nosuch://x"):
            files_of(Address("nosuch://x"))
    finally:
        system.rm("/logs", recursive=True)


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """The address of a bucket on a server that speaks S3, whose keys are in the environment."""
    server_of = pytest.importorskip("moto.server", reason="no server of S3: moto is not installed").ThreadedMotoServer
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = server_of(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    keys = {"ACCESS_KEY_ID": "key", "SECRET_ACCESS_KEY": "secret", "REGION": "us-east-1", "ALLOW_HTTP": "true"}
    with pytest.MonkeyPatch.context() as environment:
        for name, value in {**keys, "ENDPOINT_URL": f"http://{host}:{port}"}.items():
            environment.setenv(f"AWS_{name}", value)
        from pyarrow import fs

        system = fs.S3FileSystem(endpoint_override=f"http://{host}:{port}", allow_bucket_creation=True)
        system.create_dir("bucket")
        yield "s3://bucket"
    server.stop()


def put_s3(name: str, what: Any) -> None:
    import os

    from pyarrow import fs

    with fs.S3FileSystem(endpoint_override=os.environ["AWS_ENDPOINT_URL"]).open_output_stream(f"bucket/{name}") as file:
        if isinstance(what, bytes):
            file.write(what)
        else:
            file.write(what.write_csv().encode()) if name.endswith(".csv") else what.write_parquet(file)


def test_on_s3(s3: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check_forms(s3, tmp_path, written(put_s3))
    check_mistakes(s3)
    assert main(["data", "check", f"{s3}/hive", "--column", "hour=event", "--keep", "all"]) == 0
    assert f"{s3}/hive: all 120 rows looked at" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"s3://nobucket/log\.parquet"):
        scan(place("s3://nobucket/log.parquet"))
    wrong = ["data", "build", "--interactions", f"{s3}/hvie", "--protocol", "din", "--out", str(tmp_path / "x")]
    assert main(wrong) == 2
    hint = "did you mean 'hive'? (headers, hive, mixed, other, texts)"
    assert capsys.readouterr().err.splitlines() == [f"ctr-pe: error: {s3}/hvie: no such file; {hint}"]


@pytest.mark.slow
def test_the_estimator_reads_s3(s3: str) -> None:
    from ctr_pe import CTRRanker

    for day, rows in days().items():
        put_s3(f"log/{day}.parquet", rows)
    ranker = CTRRanker(epochs=1, protocol="din", max_len=5, random_state=0).fit(f"{s3}/log")
    assert ranker.metrics_


@pytest.mark.parametrize("name", ["x" * 300, "[" * 300, "x" * 300 + "/*.csv", "x\0y"])
def test_a_name_that_the_system_refuses_is_no_such_file(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no such file|no file has such a name"), readable(tmp_path / name):
        scan(tmp_path / name)


def test_the_first_file_that_is_no_table_ends_the_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever names the whole disk by mistake does not wait for it to be read."""
    for name in ("notes.txt", "a/b/log.parquet"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    listed = []
    monkeypatch.setattr(os, "scandir", lambda folder, scan=os.scandir: [listed.append(str(folder)), scan(folder)][1])
    with pytest.raises(UserError, match=r"holds .*notes\.txt: a log is \.parquet"):
        files_of(tmp_path)
    assert listed == [str(tmp_path)]


def test_linked_folders_are_part_of_a_table(tmp_path: Path) -> None:
    log, far = tmp_path / "log", tmp_path / "far"
    for folder in (log / "day=1", far):
        folder.mkdir(parents=True)
        (folder / "a.parquet").touch()
    (log / "day=2").symlink_to(far)
    assert files_of(log) == [str(log / day / "a.parquet") for day in ("day=1", "day=2")]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda rows: rows.drop("hour"), "column 'hour' is not there, in a.parquet it holds Int64"),
        (lambda rows: rows.with_columns(new=1), "column 'new' holds Int32, in a.parquet it is not there"),
        (lambda rows: rows.cast({"user_id": pl.String}), "column 'user_id' holds String, in a.parquet it holds Int64"),
        (lambda rows: rows.cast({"item_id": pl.Int32}), "column 'item_id' holds Int32, in a.parquet it holds Int64"),
    ],
)
def test_a_part_with_other_columns_is_named(
    change: Callable[[pl.DataFrame], pl.DataFrame], said: str, tmp_path: Path
) -> None:
    """By a check too, whether or not the column is read."""
    first, *_, last = days().values()
    (tmp_path / "log").mkdir()
    first.write_parquet(tmp_path / "log" / "a.parquet")
    change(last).write_parquet(tmp_path / "log" / "b.parquet")
    recipe = load_recipe(None, {"interactions": tmp_path / "log", "protocol": "din", "attributes": None, "keep": "all"})
    with pytest.raises(UserError) as refused:
        build(recipe, tmp_path / "set")
    expected = f"{tmp_path / 'log' / 'b.parquet'}: {said}: write both alike"
    assert str(refused.value) == expected
    assert check(recipe).problems == [expected]
