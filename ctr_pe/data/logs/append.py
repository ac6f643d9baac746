"""A data set whose vocabularies go on with those of an earlier one: ``ctr-pe data build --append-to``."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import polars as pl

from ctr_pe.data.dataset import ID, ITEMS, open_dataset
from ctr_pe.data.id_map import UNSEEN
from ctr_pe.data.value_maps import Several, ValueMap, stored_map
from ctr_pe.fuxictr.feature_specs import FEATURES, read_feature_map
from ctr_pe.utils.errors import UserError, option


class Before:
    """The data set of an earlier log, in the directory ``folder``.

    Attributes: ``maps``: ids by feature; ``items`` raw, with their attributes, or None where it has no catalogue.

    Raises:
        UserError: no data set, or a damaged one.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, dataset = folder, open_dataset(str(folder.resolve()))
        self.data_hash = dataset.data_hash
        text = (dataset.path / "feature_vocab.json").read_text(encoding="utf-8")
        specs = read_feature_map(dataset.path / FEATURES).features
        self.maps = {name: stored_map(specs[name], ids, ids[UNSEEN]) for name, ids in json.loads(text).items()}
        file = dataset.path / ITEMS
        found = pl.read_parquet(file) if file.is_file() else None
        self.items = None if found is None else found.select(name for name in found.columns if not name.endswith(ID))

    def all_items(self, items: pl.DataFrame | None, wanted: Sequence[str], source: Path | None) -> pl.DataFrame | None:
        """``items``, of the file ``source``, and the earlier ones; one that both have is as ``items`` says.

        ``wanted``: the columns, the item's own first; without ``items``, those of them that the earlier ones have.

        Raises UserError if they have other attributes, or attributes of another type.
        """
        if self.items is None:
            return items
        if items is None:
            return self.items.select(name for name in wanted if name in self.items.columns)
        for name in dict.fromkeys([*self.items.columns, *items.columns]):
            here, there = items.schema.get(name), self.items.schema.get(name)
            if here != there:
                kinds = f"{here or 'no such column'} in {source}, {there or 'no such column'} in {self.folder / ITEMS}"
                raise UserError(f"items: column '{name}': {kinds}")
        return pl.concat([items, self.items.join(items, on=wanted[0], how="anti").select(items.columns)])

    def check(self, features: Collection[str]) -> None:
        """Raises UserError if a log with these features cannot go on with the vocabularies."""
        if different := set(features) ^ self.maps.keys():
            here, there = ", ".join(features), ", ".join(self.maps)
            raise UserError(
                f"{option('append_to')} {self.folder}: its features are {there}, not {here}: {min(different)} differs"
            )

    def report(self, maps: Mapping[str, ValueMap | Several]) -> dict[str, Any]:
        """What has been added."""
        new = {name: len(maps[name].stored) - len(ids.stored) for name, ids in self.maps.items()}
        return {"data_hash": self.data_hash, "new_ids": new}
