"""MLflow flavour: log a ranker with a run or in the registry, load it as it was, or as a ``pyfunc`` that scores frames.

``pip install 'ctr_pe[mlflow]'`` brings MLflow's client, which is all that is needed here. An artifact is a model folder
(:mod:`ctr_pe.serving.model_folder`) in MLflow's form. The ``pyfunc``:

- of a :class:`~ctr_pe.CTRRanker`: a row per request, user and item, (n, 1) click probabilities ``score`` in its order
  and with its index;
- of a :class:`~ctr_pe.NextItemRanker`: a row per user, the items that come next: user, item, ``score`` and ``rank``,
  with the parameters ``k`` and ``filter_seen`` of ``recommend``.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import polars as pl
import torch

import ctr_pe
from ctr_pe.data.dataset import ITEM
from ctr_pe.serving.estimator import ModelEstimator
from ctr_pe.serving.model_folder import read_manifest
from ctr_pe.serving.next_item_ranker import NextItemRanker
from ctr_pe.serving.ranker import CTRRanker
from ctr_pe.utils.errors import UserError
from ctr_pe.utils.files import scratch_folder

FLAVOR = "ctr_pe"
Ranker = CTRRanker | NextItemRanker


def log_model(model: Ranker | str | Path, name: str = "model", **how: Any) -> Any:
    """Log a model with the active run, or with a new one.

    Args:
        model: a fitted ranker, or a model folder.
        name: of the logged model.
        how: of ``mlflow.models.Model.log``, such as ``registered_model_name``, and of :func:`save_model`.

    Returns:
        MLflow's ``ModelInfo``, with its ``model_uri``.

    Raises:
        UserError: a folder that cannot be read.
    """
    return _client().models.Model.log(artifact_path=None, name=name, flavor=sys.modules[__name__], model=model, **how)


def save_model(model: Ranker | str | Path, path: str | Path, mlflow_model: Any = None, **how: Any) -> None:
    """Write a model as a folder of MLflow's form.

    Args:
        model: a fitted ranker, or a model folder.
        path: of the folder, which must not exist.
        how: of ``mlflow.pyfunc.save_model``, such as ``signature`` (:func:`signature_of` the model where it is not
            given), ``pip_requirements`` (this version and that of torch), ``input_example``.

    Raises:
        UserError: a folder that cannot be read.
    """
    ranker = model if isinstance(model, ModelEstimator) else _load(Path(model))
    config = ranker._scorer.config
    mlflow = _client()
    described = mlflow.models.Model() if mlflow_model is None else mlflow_model
    facts = {key: config[key] for key in ("model", "position_encoding", "dataset_id", "vocabulary")}
    described.add_flavor(FLAVOR, version=ctr_pe.__version__, task=_task(config), data="data/model", **facts)
    how.setdefault("signature", signature_of(ranker))
    if "conda_env" not in how:
        how.setdefault("pip_requirements", [f"ctr_pe=={ctr_pe.__version__}", f"torch=={torch.__version__}"])
    with scratch_folder() as scratch:
        ranker.save(scratch / "model")
        loader = {"loader_module": __name__, "data_path": str(scratch / "model")}
        mlflow.pyfunc.save_model(path=str(path), mlflow_model=described, **loader, **how)


def load_model(model_uri: str, gpu: int = -1) -> Ranker:
    """The ranker of a model, as ``CTRRanker.load`` and ``NextItemRanker.load`` give it.

    Args:
        model_uri: as ``mlflow.pyfunc.load_model`` takes it: ``models:/NAME/1``, ``runs:/ID/model``, a folder.
        gpu: -1 for the CPU.

    Raises:
        UserError: a model of another flavour, or one that cannot be read.
    """
    mlflow = _client()
    folder = Path(mlflow.artifacts.download_artifacts(artifact_uri=str(model_uri)))
    flavors = mlflow.models.Model.load(str(folder)).flavors
    if FLAVOR not in flavors:
        raise UserError(f"{model_uri}: no model of ctr_pe: its flavours are {', '.join(flavors)}")
    return _load(folder / flavors[FLAVOR]["data"], gpu)


def signature_of(ranker: Ranker) -> Any:
    """Columns in and out. Ids of users and items have the type of the log's. Whatever else a model may read of a
    request has any type and may be absent: what it cannot do without is an error of the model, with the column's
    name."""
    mlflow = _client()
    column, data = mlflow.types.ColSpec, mlflow.types.DataType

    def kind(table: pl.DataFrame | None, name: str) -> Any:
        if table is None or name not in table.columns:
            return mlflow.types.schema.AnyType()
        return data.long if table[name].dtype.is_integer() else data.string

    scorer = ranker._scorer
    encoder, names = scorer.encoder, scorer.encoder.columns
    ids = {names.user: kind(scorer.histories, names.user), names.item: kind(encoder.items, ITEM)}
    user, item = (column(of, name) for name, of in ids.items())
    if isinstance(ranker, NextItemRanker):
        options = mlflow.types.ParamSchema(
            [mlflow.types.ParamSpec("k", data.long, 10), mlflow.types.ParamSpec("filter_seen", data.boolean, True)]
        )
        given, found = [user], [user, item, column(data.float, "score"), column(data.long, "rank")]
    else:
        sure = {names.user} | ({names.item} if encoder.items is not None else set())
        other, options = mlflow.types.schema.AnyType(), None
        given = [column(ids.get(name, other), name, required=name in sure) for name in encoder.readable]
        found = [column(data.double, "score")]
    schemas = [mlflow.types.Schema(columns) for columns in (given, found)]
    return mlflow.models.ModelSignature(*schemas, options)


def _client() -> Any:
    try:
        import mlflow
        import mlflow.pyfunc
    except ImportError:
        raise UserError("ctr_pe.serving.mlflow needs MLflow: pip install 'ctr_pe[mlflow]'") from None
    return mlflow


def _task(config: Mapping[str, Any]) -> str:
    return str(config.get("task", "click"))


def _load(folder: Path, gpu: int = -1) -> Ranker:
    return (NextItemRanker if _task(read_manifest(folder)) == "next-item" else CTRRanker).load(folder, gpu)


def _load_pyfunc(path: str) -> _PyFunc:
    """What MLflow calls with the model folder."""
    return _PyFunc(_load(Path(path)))


class _PyFunc:
    def __init__(self, ranker: Ranker) -> None:
        self.ranker = ranker

    def predict(self, frame: pd.DataFrame, params: Mapping[str, Any] | None = None) -> pd.DataFrame:
        if isinstance(self.ranker, NextItemRanker):
            return self.ranker.recommend(frame, **(params or {})).to_pandas()
        return pd.DataFrame({"score": self.ranker.predict_proba(frame)[:, 1]}, index=frame.index)
