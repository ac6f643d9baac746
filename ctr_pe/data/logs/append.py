"""A data set whose vocabularies go on with those of an earlier one: ``ctr-pe data build --append-to``."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import polars as pl

from ctr_pe.config.yaml import load_json
from ctr_pe.data.dataset import ID, ITEMS, open_dataset
from ctr_pe.data.root import REPORT
from ctr_pe.data.value_maps import Several, ValueMap, map_of
from ctr_pe.data.vectors import ItemVectorTable, file_of
from ctr_pe.fuxictr.feature_specs import FEATURES, read_feature_map
from ctr_pe.utils.errors import UserError, option


class Before:
    """The data set of an earlier log, in the directory ``folder``.

    Attributes: ``maps``: ids by feature, and ``vectors``; ``items`` raw, with their attributes, or None where it has no
    catalogue.

    Raises:
        UserError: no data set, or a damaged one.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, dataset = folder, open_dataset(str(folder.resolve()))
        self.data_hash = dataset.data_hash
        vocabs = load_json(dataset.path / "feature_vocab.json")
        specs = read_feature_map(dataset.path / FEATURES).features
        report = load_json(dataset.path / REPORT)
        numbers = report.get("normalizers", {}), report.get("fill_na", {})
        own = [name for name, spec in specs.items() if spec.get("source", "history") != "history"]
        maps = {name: map_of(name, specs, vocabs, *numbers) for name in own}
        self.maps = {name: ids for name, ids in maps.items() if ids is not None}
        files = {name: dataset.path / file_of(name) for name in own if "pretrained_emb" in specs[name]}
        self.vectors = {name: ItemVectorTable.read(file) for name, file in files.items()}
        file = dataset.path / ITEMS
        found = pl.read_parquet(file) if file.is_file() else None
        self.items = None if found is None else found.select(name for name in found.columns if not name.endswith(ID))

    def all_items(self, items: pl.DataFrame | None, wanted: Sequence[str], source: object) -> pl.DataFrame | None:
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
