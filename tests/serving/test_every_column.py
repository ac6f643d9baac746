"""A log with every kind of column by commands alone: built, trained, served and exported, with one score everywhere.

``tests/data/logs/test_columns.py`` has the columns; here are those from files and by hash too, and weights. Several
behaviours are in ``test_behaviours.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import polars as pl
import pytest
from fastapi.testclient import TestClient

from ctr_pe.cli import main
from ctr_pe.commands import run_expid
from ctr_pe.serving.model_folder import read_model
from ctr_pe.serving.service import application
from tests.data.logs.test_columns import COLUMNS, tables
from tests.support.exported import onnx_scores

MODELS = ("DIN", "DIEN", "BST", "DMIN", "TIN", "SASRec")
COUNT = 60
MORE = {"device": "event, hash_buckets=5", "brand": "item, min_categr_count=3", "sketch": "item, embedding"}
OF_REQUEST = ("hour", "price", "seen", "size", "device")
QUICK = ["epochs=1", "embedding_dim=8", "batch_size=256", "max_len=6", "position_encoding=cape"]


class Made(NamedTuple):
    """``events`` of the log; ``model``: the folder; ``requests`` and their ``scores`` by ``ctr-pe predict``."""

    events: pl.DataFrame
    model: Path
    requests: pl.DataFrame
    scores: npt.NDArray[np.float32]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the log and its data set ``data/mine``."""
    folder, given, draw = tmp_path_factory.mktemp("every"), tables(), np.random.default_rng(3)
    given["interactions"] = (
        given["interactions"]
        .with_columns(
            pl.col("timestamp") // 180 * 180,  # three events at a time
            device=pl.Series(draw.choice(["phone", "tv", ""], 600).tolist()),
            w=pl.Series(draw.random(600)),
        )
        .unique(["user_id", "item_id", "timestamp"], keep="first", maintain_order=True)
    )
    given["items"] = given["items"].with_columns(brand=pl.Series([f"b{item % 6}" for item in range(20)]))
    np.savez(folder / "sketch.npz", key=np.arange(18), value=draw.random((18, 4)).astype(np.float32))
    for name, table in given.items():
        table.write_parquet(folder / f"{name}.parquet")
    flags = [f"--{name}={folder / name}.parquet" for name in given]
    flags += [f"--column={name}={words}" for name, words in {**COLUMNS, **MORE}.items()]
    flags[-1] += f", pretrained_emb={folder / 'sketch.npz'}"
    flags += ["--weight", "w", "--protocol", "impressions"]
    assert main(["data", "build", *flags, "--out", str(folder / "data" / "mine")]) == 0
    return folder


@pytest.fixture(scope="module", params=MODELS)
def made(request: pytest.FixtureRequest, built: Path) -> Iterator[Made]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(built)
        own = ["dataset_id=mine", f"data_root={built / 'data'}", f"model_root={built / 'kept'}", *QUICK]
        asked = ["--expid", f"{request.param}_default", *(part for one in own for part in ("--set", one))]
        assert run_expid.main([*asked, "--set", f"model_id={request.param}"]) == 0
        model, draw = built / "kept" / "mine" / request.param, np.random.default_rng(1)
        some = [None, 4.0, 5.5, 100.0]
        requests = pl.DataFrame({
            "user_id": draw.integers(0, 34, COUNT), "item_id": draw.integers(0, 24, COUNT),
            "hour": draw.integers(0, 26, COUNT), "price": [some[place % 4] for place in range(COUNT)],
            "seen": [["0|9", None, "2", "1"][place % 4] for place in range(COUNT)],
            "size": [some[place % 3] for place in range(COUNT)],
            "device": [["phone", "watch", None][place % 3] for place in range(COUNT)],
        })  # fmt: skip
        requests.write_parquet("requests.parquet")
        files = ["--input", "requests.parquet", "--output", "scores.parquet", "--events", "interactions.parquet"]
        assert main(["predict", "--model", str(model), *files, "--overwrite"]) == 0
        scored = pl.read_parquet("scores.parquet")
        assert scored.drop("score").equals(requests)
        yield Made(pl.read_parquet("interactions.parquet"), model, requests, scored["score"].to_numpy())


@pytest.mark.slow
def test_served_scores_are_those_of_predict(made: Made) -> None:
    by = ["user_id", "timestamp", "item_id"]
    chosen, served = made.events.filter(pl.col("label") == 1).sort(by, maintain_order=True), []
    of_history = [*OF_REQUEST, "watch_time"]
    of_history.remove("size")  # a number that enters the target alone
    with TestClient(application(made.model)) as client:
        for row in made.requests.iter_rows(named=True):
            own = chosen.filter(pl.col("user_id") == row["user_id"])
            body: dict[str, Any] = {
                "history": own["item_id"].to_list(), "candidates": [row["item_id"]], "user": row["user_id"],
                "context": {name: row[name] for name in OF_REQUEST},
                "history_context": {name: own[name].to_list() for name in of_history},
            }  # fmt: skip
            answer = client.post("/rank", json=body)
            assert answer.status_code == 200, answer.text
            served.append(answer.json()["ranked"][0]["score"])
    assert len(set(served)) > COUNT / 4
    np.testing.assert_allclose(served, made.scores, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("made", ["DIN"], indirect=True)
def test_an_exported_file_gives_the_scores_of_predict(made: Made) -> None:
    """Columns are looked up alike in all models, each of which ``test_export.py`` exports."""
    file = made.model.with_suffix(".onnx")
    assert main(["export", "--model", str(made.model), "--format", "onnx", "--output", str(file)]) == 0
    scorer = read_model(made.model)
    found = onnx_scores(scorer, file, made.requests, scorer.encoder.events(made.events))
    np.testing.assert_allclose(found, made.scores, atol=1e-5)
