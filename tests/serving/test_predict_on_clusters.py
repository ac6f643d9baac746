"""Scores made on Ray and Spark are those of this machine, whatever dies, and the output is there once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from ctr_pe import CTRRanker
from ctr_pe.cli import main
from ctr_pe.serving.batch_predict import predict
from ctr_pe.utils.errors import UserError
from tests.support.fuzz.small_log import SMALL
from tests.support.on_clusters import CLUSTERS, DyingOnce

ROWS = 500


@pytest.fixture(scope="module")
def files(ranker: CTRRanker, clicks: pl.DataFrame, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, a log, requests in many row groups, and what this machine makes of them."""
    folder, draw = tmp_path_factory.mktemp("predict"), np.random.default_rng(3)
    ranker.save(folder / "model")
    clicks.write_parquet(folder / "events.parquet")
    requests = {
        "user_id": draw.integers(100, 165, ROWS),
        "item_id": [f"item {i}" for i in draw.integers(0, 50, ROWS)],
        "timestamp": draw.choice(clicks["timestamp"].to_numpy(), ROWS),
    }
    pl.DataFrame(requests).write_parquet(folder / "in.parquet", row_group_size=70)
    predict(folder / "model", folder / "in.parquet", folder / "local.parquet", folder / "events.parquet")
    return folder


@pytest.fixture(scope="module", params=sorted(CLUSTERS))
def engine(request: pytest.FixtureRequest) -> Iterator[str]:
    with CLUSTERS[request.param]():
        yield request.param


@pytest.mark.slow
def test_a_worker_that_dies_repeats_its_part_alone(
    engine: str, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ctr_pe.utils import engines

    kind: Any = {"ray": engines.RayEngine, "spark": engines.SparkEngine}[engine]
    whole = kind.map
    monkeypatch.setattr(kind, "map", lambda self, call, parts: whole(self, DyingOnce(call, tmp_path, 2), parts))
    out = files / f"{engine}.parquet"
    report = predict(files / "model", files / "in.parquet", out, files / "events.parquet", engine=engine, part_rows=60)
    assert (report.rows, report.reused) == (ROWS, 0)
    assert DyingOnce.calls(tmp_path) == [0, 1, 2, 2, 3, 4, 5, 6, 7, 8]
    scored, local = pl.read_parquet(out), pl.read_parquet(files / "local.parquet")
    assert scored.drop("score").equals(local.drop("score"))
    np.testing.assert_allclose(scored["score"], local["score"], rtol=1e-6)  # other batches
    monkeypatch.undo()
    again = files / f"{engine}-again.parquet"
    predict(files / "model", files / "in.parquet", again, files / "events.parquet", part_rows=60)
    assert again.read_bytes() == out.read_bytes()
    assert not list(files.glob("*.partial"))


@pytest.mark.slow
def test_a_call_on_a_cluster_goes_on_with_the_parts_that_are_missing(engine: str, files: Path, tmp_path: Path) -> None:
    from ctr_pe.serving import batch_predict

    out = tmp_path / "out.parquet"
    given = files / "model", files / "in.parquet", out, files / "events.parquet"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch_predict, "_assemble", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            predict(*given, part_rows=60, engine=engine)
    (out.with_name("out.parquet.partial") / "000003.parquet").unlink()
    report = predict(*given, part_rows=60, engine=engine)
    assert report.reused == ROWS - 60
    assert out.is_file()


@pytest.mark.slow
def test_a_mistake_is_one_line(engine: str, files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a value in one part alone."""
    lacking = pl.when(pl.int_range(pl.len()) != ROWS - 1).then("user_id")
    bad = pl.read_parquet(files / "in.parquet").with_columns(user_id=lacking)
    bad.write_parquet(tmp_path / "in.parquet", statistics=False)
    given = ["--model", str(files / "model"), "--events", str(files / "events.parquet"), "--engine", engine, "--quiet"]
    out = tmp_path / "out.parquet"
    assert main(["predict", *given, "--input", str(tmp_path / "in.parquet"), "--output", str(out)]) == 2
    error = f"{tmp_path}/in.parquet, rows 1 to 500: column 'user_id' has null values: 1 of 500 rows"
    assert capsys.readouterr().err.splitlines() == [f"ctr-pe: error: {error}"]
    assert not out.exists()


@pytest.mark.slow
def test_a_function_of_spark_columns_gives_the_scores(files: Path, tmp_path: Path) -> None:
    """Times as numbers, and as instants in any zone."""
    pytest.importorskip("pyspark.sql.functions", reason="pyspark is not installed: the extra spark")
    from ctr_pe.spark import score_udf

    local = pl.read_parquet(files / "local.parquet").with_row_index("row")
    dates = {
        name: pl.read_parquet(files / f"{name}.parquet").with_columns(
            pl.from_epoch("timestamp").dt.replace_time_zone("UTC").dt.cast_time_unit("us")
        )
        for name in ("in", "events")
    }
    dated = CTRRanker("DIN", "cape", **SMALL).fit(dates["events"])
    dated.save(tmp_path / "model")
    with CLUSTERS["spark"]():
        from pyspark.sql import SparkSession

        session: Any = SparkSession.getActiveSession()
        local.drop("score").write_parquet(tmp_path / "rows.parquet")
        frame = session.read.parquet(str(tmp_path / "rows.parquet")).repartition(2)
        score = score_udf(files / "model", files / "events.parquet")
        scored = pl.DataFrame(frame.withColumn("score", score(*frame.columns)).toArrow()).sort("row")
        np.testing.assert_allclose(scored["score"], local["score"], rtol=1e-5)
        dates["in"].with_row_index("row").write_parquet(tmp_path / "dates.parquet")
        frame = session.read.parquet(str(tmp_path / "dates.parquet"))
        wanted = dated.scorer_.score_requests(None, dates["in"])
        session.conf.set("spark.sql.session.timeZone", "Asia/Tokyo")
        found = frame.withColumn("score", score_udf(tmp_path / "model")(*frame.columns)).toArrow()
        np.testing.assert_allclose(pl.DataFrame(found).sort("row")["score"], wanted, rtol=1e-5)


def test_a_function_of_spark_columns_needs_a_model(tmp_path: Path) -> None:
    pytest.importorskip("pyspark", reason="pyspark is not installed: the extra spark")
    from ctr_pe.spark import score_udf

    with pytest.raises(UserError, match=r"no such|not a model"):
        score_udf(tmp_path / "none")


def test_an_engine_that_is_unknown_is_named(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--model", str(files / "model"), "--events", str(files / "events.parquet"), "--engine", "rya"]
    assert main(["predict", *given, "--input", str(files / "in.parquet"), "--output", str(files / "x.parquet")]) == 2
    assert "--engine rya: did you mean 'ray'?" in capsys.readouterr().err
