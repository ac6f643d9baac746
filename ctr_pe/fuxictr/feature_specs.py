"""FuxiCTR's specifications of our columns: id 0 is padding; of new vocabularies 1 … known are the known ids, known + 1
the unseen, which keeps its id when a vocabulary grows behind it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from ctr_pe.config.schema import FeatureSpec, valid
from ctr_pe.config.yaml import load_json
from ctr_pe.utils.errors import UserError
from ctr_pe.utils.names import check_name


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


def read_feature_map(file: Path) -> tuple[str, dict[str, dict[str, Any]]]:
    """The data set's name and the specification of each feature in a ``feature_map.json``.

    Raises:
        UserError: it cannot be read, a specification that is none of FuxiCTR's, a name that is no directory's.
    """
    content = load_json(file)
    try:
        valid("features", list[dict[str, FeatureSpec]], content.get("features"))
        valid("labels", Annotated[list[str], Field(min_length=1)], content.get("labels"))
    except UserError as error:
        raise UserError(f"{file}: {error}") from None
    name = check_name(f"{file}: dataset_id", content.get("dataset_id"))
    return name, {field: spec for feature in content["features"] for field, spec in feature.items()}
