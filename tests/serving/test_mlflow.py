"""MLflow's flavour: what is logged scores as the ranker does, by way of files and of a tracking server."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pytest

import ctr_pe
from ctr_pe import CTRRanker, NextItemRanker
from ctr_pe.serving import mlflow as flavour
from ctr_pe.utils.errors import UserError
from tests.support.next_item import categories, events, random_histories

SERVER = "CTR_PE_MLFLOW_SERVER"
"""Environment variable: a program ``mlflow`` with its server, which may be of another environment."""


@pytest.fixture
def mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # the client alone has no database
    module = pytest.importorskip("mlflow")
    monkeypatch.chdir(tmp_path)
    module.set_tracking_uri((tmp_path / "runs").as_uri())
    return module


@pytest.fixture(scope="module")
def next_item() -> NextItemRanker:
    ranker = NextItemRanker(epochs=1, max_len=4, embedding_dim=8, num_heads=1)
    return ranker.fit(events(random_histories()), items=categories())


@pytest.fixture
def server(mlflow: Any, tmp_path: Path) -> Iterator[str]:
    """The address of a tracking server with a database and its own store of artifacts."""
    program = os.environ.get(SERVER) or shutil.which("mlflow")
    if not program:
        pytest.skip(f"no program mlflow with its server; ${SERVER} names one")
    store = ["--backend-store-uri", f"sqlite:///{tmp_path / 'runs.db'}", "--artifacts-destination", str(tmp_path / "a")]
    command = [program, "server", "--host", "127.0.0.1", "--port", "0", "--workers", "1", *store]
    log = tmp_path / "server.log"
    outside = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MLFLOW_TRACKING_URI")}
    with (
        open(log, "w", encoding="utf-8") as stream,
        subprocess.Popen(command, stdout=stream, stderr=stream, env=outside) as running,
    ):
        try:
            for _ in range(600):
                if running.poll() is not None:
                    pytest.skip(f"{program} starts no server: {log.read_text(encoding='utf-8').splitlines()[-1:]}")
                if found := re.search(r"running on (http://[\d.:]+)", log.read_text(encoding="utf-8")):
                    break
                time.sleep(0.1)
            assert found, log.read_text(encoding="utf-8")
            with urllib.request.urlopen(f"{found[1]}/health") as answer:
                assert answer.status == 200
            yield found[1]
        finally:
            running.terminate()


def requests_of(clicks: pl.DataFrame) -> pd.DataFrame:
    return clicks.select("user_id", "item_id").head(20).to_pandas().set_index(np.arange(100, 120))


def test_a_ranker_that_is_saved_scores_as_before(
    mlflow: Any, ranker: CTRRanker, clicks: pl.DataFrame, tmp_path: Path
) -> None:
    flavour.save_model(ranker, tmp_path / "saved")
    requests, uri = requests_of(clicks), (tmp_path / "saved").as_uri()
    wanted = ranker.predict_proba(requests)
    np.testing.assert_array_equal(flavour.load_model(uri).predict_proba(requests), wanted)
    pyfunc = mlflow.pyfunc.load_model(uri)
    found = pyfunc.predict(requests.assign(not_read=1))
    pd.testing.assert_frame_equal(found, pd.DataFrame({"score": wanted[:, 1]}, index=requests.index))
    described = pyfunc.metadata.flavors["ctr_pe"]
    assert (described["model"], described["task"], described["version"]) == ("DIN", "click", ctr_pe.__version__)
    requirements = (tmp_path / "saved" / "requirements.txt").read_text(encoding="utf-8").splitlines()
    assert f"ctr_pe=={ctr_pe.__version__}" in requirements
    schema = {column.name: column for column in pyfunc.metadata.get_input_schema().inputs}
    assert {name: schema[name].required for name in ("user_id", "item_id", "timestamp")} == {
        "user_id": True,
        "item_id": True,
        "timestamp": False,
    }
    with pytest.raises(mlflow.exceptions.MlflowException, match="user_id"):
        pyfunc.predict(requests.drop(columns="user_id"))


def test_a_folder_of_a_next_item_model_is_logged_and_recommends(
    mlflow: Any, next_item: NextItemRanker, tmp_path: Path
) -> None:
    next_item.save(tmp_path / "folder")
    info = flavour.log_model(tmp_path / "folder", name="next")
    users = pd.DataFrame({"user_id": [0, 3, 5]})
    loaded = flavour.load_model(info.model_uri)
    assert isinstance(loaded, NextItemRanker)
    pyfunc = mlflow.pyfunc.load_model(info.model_uri)
    for given in ({}, {"k": 2, "filter_seen": False}):
        wanted = next_item.recommend(users, **given)
        assert loaded.recommend(users, **given).equals(wanted)
        pd.testing.assert_frame_equal(pyfunc.predict(users, params=given), wanted.to_pandas())
    outputs = {column.name: str(column.type) for column in pyfunc.metadata.get_output_schema().inputs}
    assert list(outputs) == list(wanted.columns)
    mlflow.models.validate_schema(wanted.to_pandas(), pyfunc.metadata.get_output_schema())


def test_what_is_no_model_of_this_package_is_one_line(mlflow: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such model folder"):
        flavour.save_model(tmp_path / "nowhere", tmp_path / "saved")

    other = type("Other", (mlflow.pyfunc.PythonModel,), {"predict": lambda self, context, model_input: model_input})
    mlflow.pyfunc.save_model(tmp_path / "other", python_model=other(), pip_requirements=[])
    with pytest.raises(UserError, match=r"no model of ctr_pe: its flavours are python_function"):
        flavour.load_model((tmp_path / "other").as_uri())


def test_without_mlflow_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, ranker: CTRRanker) -> None:
    monkeypatch.setitem(__import__("sys").modules, "mlflow", None)
    with pytest.raises(UserError, match=r"pip install 'ctr_pe\[mlflow\]'"):
        flavour.log_model(ranker)


@pytest.mark.slow
def test_a_tracking_server_keeps_a_registered_model(
    server: str, mlflow: Any, ranker: CTRRanker, clicks: pl.DataFrame
) -> None:
    mlflow.set_tracking_uri(server)
    with mlflow.start_run():
        mlflow.log_metrics(ranker.metrics_)
        info = flavour.log_model(ranker, registered_model_name="clicks")
    assert int(info.registered_model_version) == 1
    requests = requests_of(clicks)
    wanted = ranker.predict_proba(requests)
    np.testing.assert_array_equal(flavour.load_model("models:/clicks/1").predict_proba(requests), wanted)
    found = mlflow.pyfunc.load_model("models:/clicks/1").predict(requests)
    np.testing.assert_array_equal(found["score"], wanted[:, 1])
    (run,) = mlflow.search_runs(output_format="list")
    assert run.data.metrics == pytest.approx(ranker.metrics_)
