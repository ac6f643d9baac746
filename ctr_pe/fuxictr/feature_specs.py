"""FuxiCTR's specifications of our columns: id 0 is padding; of new vocabularies 1 … known are the known ids, known + 1
the unseen, which keeps its id when a vocabulary grows behind it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from ctr_pe.config.schema import FeatureSpec, valid
from ctr_pe.config.yaml import load_json
from ctr_pe.utils.errors import UserError
from ctr_pe.utils.names import check_name

FEATURES = "feature_map.json"


def target_spec(known: int, source: str = "item", unseen: int | None = None) -> dict[str, Any]:
    """A scalar id column with ``known`` ids beside padding and ``unseen``, by default the last one."""
    reserved = {"padding_idx": 0, "oov_idx": known + 1 if unseen is None else unseen}
    return {"source": source, "type": "categorical", **reserved, "vocab_size": known + 2}


def history_spec(
    target: str, known: int, max_len: int, source: str = "history", chosen: bool = True, unseen: int | None = None
) -> dict[str, Any]:
    """A list of ids that shares the embedding of the column ``target``; no encoder, or FuxiCTR would pool the list.

    ``chosen``: false for items that were shown but not clicked, which no model learns to predict.
    """
    shared = {"type": "sequence", "feature_encoder": None, "share_embedding": target, "max_len": max_len}
    return target_spec(known, source, unseen) | shared | ({} if chosen else {"chosen": False})


def age_spec(max_len: int) -> dict[str, Any]:
    """A list of seconds; "meta", or FuxiCTR would make an embedding of it."""
    return {"type": "meta", "max_len": max_len}


def table_of(name: str, features: Mapping[str, Any], tables: Collection[str] = ()) -> str:
    """The feature whose embedding table a feature reads: the first of ``tables`` on the way of ``share_embedding``."""
    while name not in tables and "share_embedding" in features[name]:
        name = str(features[name]["share_embedding"])
    return name


def unseen_id(spec: Mapping[str, Any]) -> int:
    """The id of values out of vocabulary."""
    return int(spec.get("oov_idx", spec["vocab_size"] - 1))


@dataclass(frozen=True)
class FeatureSpecs:
    """The ``content`` of a feature_map.json."""

    content: Mapping[str, Any]

    @classmethod
    def of(cls, dataset_id: str, features: Mapping[str, Mapping[str, Any]], labels: Sequence[str]) -> FeatureSpecs:
        """Shared tables count once in total_features, a history as max_len input columns."""
        specs = features.values()
        lengths = {"sequence": "max_len", "embedding": "pretrain_dim"}
        content = {
            "dataset_id": dataset_id,
            "num_fields": sum(spec["type"] != "meta" for spec in specs),
            "total_features": sum(int(spec.get("vocab_size", 0)) for spec in specs if "share_embedding" not in spec),
            "input_length": sum(int(spec.get(lengths.get(spec["type"], ""), 1)) for spec in specs),
            "labels": list(labels),
            "features": [{name: dict(spec)} for name, spec in features.items()],
        }
        return cls(content)

    @property
    def dataset_id(self) -> str:
        return str(self.content["dataset_id"])

    @property
    def features(self) -> dict[str, dict[str, Any]]:
        """The specification of each feature."""
        return {name: spec for feature in self.content["features"] for name, spec in feature.items()}

    def sized(self, sizes: Mapping[str, int]) -> FeatureSpecs:
        """With embedding tables of these sizes, by the feature that has the table."""
        features = self.features
        tables = {name: table_of(name, features) for name, spec in features.items() if "vocab_size" in spec}
        more = {name: {"vocab_size": sizes[table]} for name, table in tables.items() if table in sizes}
        changed = {name: {**spec, **more.get(name, {})} for name, spec in features.items()}
        return FeatureSpecs.of(self.dataset_id, changed, self.content["labels"])


def read_feature_map(file: Path) -> FeatureSpecs:
    """The content of a ``feature_map.json``.

    Raises:
        UserError: it cannot be read, a specification that is none of FuxiCTR's, a name that is no directory's.
    """
    content = load_json(file)
    try:
        valid("features", list[dict[str, FeatureSpec]], content.get("features"))
        valid("labels", Annotated[list[str], Field(min_length=1)], content.get("labels"))
    except UserError as error:
        raise UserError(f"{file}: {error}") from None
    check_name(f"{file}: dataset_id", content.get("dataset_id"))
    return FeatureSpecs(content)
