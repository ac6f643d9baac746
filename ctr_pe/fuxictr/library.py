"""What other rooms take from FuxiCTR itself. Each function imports what it needs: FuxiCTR takes seconds."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ctr_pe.config.schema import ENCODER
from ctr_pe.fuxictr.feature_specs import FEATURES, table_of
from ctr_pe.utils.errors import UserError, shown

if TYPE_CHECKING:
    from fuxictr.features import FeatureMap
    from torch import nn

MAX_GRADIENT_NORM = 10.0
"""FuxiCTR's default, which its ``fit`` sets."""
PRIVATE = ("early_stop_patience", "eval_steps", "save_best_only", "reduce_lr_on_plateau", "verbose")
"""What ``BaseModel`` keeps of a config in private attributes."""


def base_model() -> type:
    """FuxiCTR's ``BaseModel``, which every model is derived from."""
    from fuxictr.pytorch.models import BaseModel

    return BaseModel  # type: ignore[no-any-return]


def load_feature_map(dataset_id: str, folder: Path, params: Mapping[str, Any]) -> FeatureMap:
    """The feature map of a data set's folder, with the ``group_id``, ``use_features`` … of the parameters."""
    from fuxictr.features import FeatureMap

    feature_map = FeatureMap(dataset_id, str(folder))
    feature_map.load(str(folder / FEATURES), dict(params))
    return feature_map


def small_feature_map(dataset_id: str, specs: Mapping[str, dict[str, Any]], params: Mapping[str, Any]) -> FeatureMap:
    """A feature map with tables of three rows, short histories and no pretrained vectors: a model on it is cheap."""
    from fuxictr.features import FeatureMap

    feature_map = FeatureMap(dataset_id, "")
    for name, spec in specs.items():
        kept = {key: value for key, value in spec.items() if not key.startswith(("pretrain", "freeze"))}
        small = {key: min(spec[key], most) for key, most in (("vocab_size", 3), ("max_len", 100)) if key in spec}
        feature_map.features[name] = kept | small
    feature_map.labels = ["label"]
    feature_map.group_id = params.get("group_id")
    feature_map.default_emb_dim = params.get("embedding_dim")
    return feature_map


def take_encoders(feature_map: Any, embedding_dim: int) -> tuple[Any, dict[str, nn.Module]]:
    """A copy of the feature map without feature encoders, and the encoders: FuxiCTR would run their text as code.

    Fields of one table share the query of their pooling. ``embedding_dim``: of fields without one of their own.
    """
    from torch import nn

    from ctr_pe.fuxictr.pooling import AttentionPooling, Pooling

    feature_map = copy.deepcopy(feature_map)
    encoders: dict[str, nn.Module] = {}
    queries: dict[str, nn.Module] = {}  # by table
    for field, spec in feature_map.features.items():
        text = spec.get("feature_encoder")
        if isinstance(text, list) and len(text) == 1:  # FuxiCTR takes a list for a sequence of encoders
            text = text[0]
        if text is None:
            continue
        written = ENCODER.fullmatch(str(text))
        if written is None:
            raise UserError(
                f"feature_map: feature_encoder {shown(text)} of '{field}' is none of nn.Linear(a, b, bias=False), "
                "layers.MaskedAveragePooling(), layers.MaskedSumPooling(), AttentionPooling(), null"
            )
        width, out, bias, pooling = written.groups()
        if pooling is None:
            encoders[field] = nn.Linear(int(width), int(out), bias=bias != "False")
        elif pooling == "AttentionPooling":
            dim, table = spec.get("embedding_dim", embedding_dim), table_of(field, feature_map.features)
            encoders[field] = queries.setdefault(table, AttentionPooling(int(dim)))
        else:
            encoders[field] = Pooling(mean=pooling == "layers.MaskedAveragePooling")
        spec["feature_encoder"] = None
    return feature_map, encoders


def npz_loader(feature_map: Any, file: str, train: bool, batch_size: int, shuffle: bool, num_workers: int) -> Any:
    """FuxiCTR's loader of an ``.npz`` file; without ``train`` in file order."""
    from fuxictr.pytorch.dataloaders import RankDataLoader

    given = {"data_format": "npz", "batch_size": batch_size, "shuffle": shuffle, "num_workers": num_workers}
    if train:
        return RankDataLoader(feature_map, "train", train_data=file, **given)[0]
    return RankDataLoader(feature_map, "test", test_data=file, **given)


def log_to_file(params: Mapping[str, Any]) -> None:
    """Log to the terminal and to ``<model_root>/<dataset_id>/<model_id>.log``, in FuxiCTR's form."""
    from fuxictr.utils import set_logger

    set_logger(dict(params))


@dataclass(frozen=True)
class TrainingSettings:
    """Keys of a model's config that the training loop follows; ``monitor``: a weight per metric.

    FuxiCTR's own models know neither ``learning_rate_schedule`` nor ``weight_average`` and have their defaults.
    """

    monitor: Mapping[str, float]
    early_stop_patience: int
    eval_steps: int | None
    save_best_only: bool
    reduce_lr_on_plateau: bool
    verbose: int
    learning_rate_schedule: str
    weight_average: float | None


def training_settings(model: Any) -> TrainingSettings:
    """The settings of any FuxiCTR model. One that has no ``max_gradient_norm`` yet gets FuxiCTR's default."""
    if not hasattr(model, "_max_gradient_norm"):
        model._max_gradient_norm = MAX_GRADIENT_NORM
    return TrainingSettings(
        monitor=model._monitor.kv_pairs,
        **{key: getattr(model, f"_{key}") for key in PRIVATE},
        learning_rate_schedule=getattr(model, "learning_rate_schedule", "constant"),
        weight_average=getattr(model, "weight_average", None),
    )
