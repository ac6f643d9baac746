"""Raw values of a declared column -> ids of its embedding table, the same in training and at every request.

Id 0 is "no value" of a slot; missing values, and categories that are not known, have the reserved id ``unseen``. All
that a map knows is its ``stored`` vocabulary, as in feature_vocab.json, and a few keys of its feature's specification.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
import polars as pl

from ctr_pe.config.columns import DeclaredColumn, declared, table_of
from ctr_pe.data.id_map import NO_VALUE, PAD, TEXTS, UNSEEN, Array, IdMap, categories, texts
from ctr_pe.data.logs.tables import decimal_comma
from ctr_pe.fuxictr.feature_specs import table_of as table_of_feature
from ctr_pe.fuxictr.feature_specs import unseen_id
from ctr_pe.utils.errors import UserError, nearest

HELD = {
    "numeric": "numbers",
    "categorical": "texts, numbers or booleans",
    "sequence": "texts, or lists of texts, numbers or booleans",
}
"""Type of a declared column -> what its table may hold."""


@dataclass(frozen=True, eq=False)
class Buckets:
    """Numbers in buckets: ids 1 … n by the upper edges of ``stored``, the last of which is infinite; missing, NaN and
    infinite numbers have ``unseen``."""

    stored: Mapping[str, int]
    unseen: int

    @classmethod
    def of(cls, values: pl.Series, counts: Array, buckets: int) -> Buckets:
        """About ``buckets`` of them with as many values each; ``counts`` (n,): how often each value occurs."""
        table = pl.DataFrame({"value": numbers(values), "count": counts}).drop_nulls("value")
        table = table.group_by("value").agg(pl.col("count").sum()).filter(pl.col("count") > 0).sort("value")
        below = table["count"].cum_sum().to_numpy()
        wanted = np.arange(1, buckets) / buckets * (below[-1] if len(below) else 0)
        edges = np.unique(table["value"].to_numpy()[np.searchsorted(below, wanted)]) if len(below) else np.zeros(0)
        texts = [*(repr(float(edge)) for edge in edges if edge < table["value"][-1]), "inf"]
        unseen = len(texts) + 1
        return cls({PAD: 0, **dict(zip(texts, range(1, unseen), strict=True)), UNSEEN: unseen}, unseen)

    @property
    def size(self) -> int:
        """Rows of the embedding table."""
        return self.unseen + 1

    def grow(self, more: Sequence[str]) -> Buckets:
        """Edges stay."""
        return self

    def ids(self, values: pl.Series) -> Array:
        """(n,) ids."""
        finite = numbers(values)
        bucket = 1 + np.searchsorted(self._edges, finite.fill_null(0.0).to_numpy())
        return np.where(finite.is_null().to_numpy(), self.unseen, bucket).astype(np.min_scalar_type(self.unseen))

    @cached_property
    def _edges(self) -> Array:
        return np.array([float(text) for text in self.stored if text not in (PAD, UNSEEN)])


@dataclass(frozen=True, eq=False)
class Hashed:
    """Categories in ``unseen`` - 1 ids by the CRC-32 of their text; none is unknown, missing ones have ``unseen``."""

    stored: Mapping[str, int]
    unseen: int

    @classmethod
    def of(cls, buckets: int) -> Hashed:
        """Of so many ids."""
        return cls({PAD: 0, UNSEEN: buckets + 1}, buckets + 1)

    @property
    def size(self) -> int:
        """Rows of the embedding table."""
        return self.unseen + 1

    def grow(self, more: Sequence[str]) -> Hashed:
        """There is an id for every text already."""
        return self

    def ids(self, values: pl.Series) -> Array:
        """(n,) ids."""
        texts = categories(values)
        different = texts.unique()
        found = [
            self.unseen if text is None else 1 + zlib.crc32(text.encode()) % (self.unseen - 1) for text in different
        ]
        table = pl.DataFrame({"text": different, "id": pl.Series(found, dtype=pl.Int64)})
        joined = (
            texts.alias("text").to_frame().join(table, on="text", how="left", maintain_order="left", nulls_equal=True)
        )
        return joined["id"].to_numpy().astype(np.min_scalar_type(self.unseen))


@dataclass(frozen=True)
class Scaled:
    """Numbers as they are, less ``shift`` and over ``scale``; missing, NaN and infinite ones are ``fill_na``."""

    shift: float
    scale: float
    fill_na: float
    stored: ClassVar[Mapping[str, int]] = MappingProxyType({})
    unseen: ClassVar[int] = 0
    size: ClassVar[int] = 0

    @classmethod
    def of(cls, values: pl.Series, counts: Array, normalizer: str) -> Scaled:
        """As scikit-learn's of this name: a constant column is divided by 1. Missing numbers are 0 in the end."""
        table = pl.DataFrame({"value": numbers(values), "count": counts}).filter(pl.col("count") > 0).drop_nulls()
        value, weight = table["value"].to_numpy(), table["count"].to_numpy()
        if not len(value):
            return cls(0.0, 1.0, 0.0)
        if normalizer == "MinMaxScaler":
            shift, scale = value.min(), value.max() - value.min()
        else:
            shift = np.average(value, weights=weight)
            scale = np.sqrt(np.average((value - shift) ** 2, weights=weight))
        return cls(float(shift), float(scale) or 1.0, float(shift))

    def grow(self, more: Sequence[str]) -> Scaled:
        """Shift and scale stay."""
        return self

    def ids(self, values: pl.Series) -> Array:
        """(n,) numbers, float32."""
        filled = numbers(values).fill_null(self.fill_na)
        return ((filled - self.shift) / self.scale).cast(pl.Float32).to_numpy()


ValueMap = IdMap | Buckets | Hashed | Scaled


@dataclass(frozen=True, eq=False)
class Several:
    """Several categories per value, (n, ``most``) ids: the first ones in their order, then 0; of none, ``unseen``."""

    of_one: IdMap | Hashed
    splitter: str
    most: int

    @property
    def stored(self) -> Mapping[str, int]:
        return self.of_one.stored

    @property
    def unseen(self) -> int:
        return self.of_one.unseen

    @property
    def size(self) -> int:
        """Rows of the embedding table."""
        return self.of_one.size

    def grow(self, more: Sequence[str]) -> Several:
        """With the categories that it lacks."""
        return Several(self.of_one.grow(more), self.splitter, self.most)

    def ids(self, values: pl.Series) -> Array:
        """(n, most) ids."""
        lists = several(values, self.splitter).list.head(self.most)
        lengths = lists.list.len().to_numpy().astype(np.int64)
        flat = self.of_one.ids(lists.explode(empty_as_null=False, keep_nulls=False))
        ids = np.zeros((len(values), self.most), flat.dtype)
        ids[np.arange(self.most) < lengths[:, None]] = flat
        ids[lengths == 0, 0] = self.unseen
        return ids


def value_map(spec: DeclaredColumn, values: pl.Series, counts: Array) -> ValueMap | Several:
    """The map of a declared column, from its raw ``values`` (n,) that occur ``counts`` (n,) times in training rows."""
    if spec.normalizer is not None:
        return Scaled.of(values, counts, spec.normalizer)
    if spec.type == "numeric":
        return Buckets.of(values, counts, spec.num_buckets)
    if spec.type == "embedding":  # a vector is of use without training rows too
        return IdMap.by_frequency(values, counts, values.drop_nulls())
    return _as_declared(spec, _of_categories(spec, *_categories_of(spec, values, counts)))


def value_maps(
    columns: Mapping[str, DeclaredColumn], given: Mapping[str, tuple[pl.Series, Array]]
) -> dict[str, ValueMap | Several]:
    """The map of each column, from its raw values and how often they occur; ``columns``: how they were declared, all
    others are categories. Columns that share a table have the categories of all of them.

    Raises UserError for a column that cannot be shared.
    """
    specs = {**declared(dict.fromkeys(given, "item")), **columns}
    tables = {name: table_of(name, columns) for name in given}
    found: dict[str, ValueMap | Several] = {}
    for name, table in tables.items():
        members = [other for other in given if tables[other] == table]
        if table not in given or (len(members) > 1 and specs[table].type not in ("categorical", "sequence")):
            what = nearest(table, [other for other in given if other != name])
            has = "has no categories" if table in given else "is not read"
            raise UserError(f"columns: {name}: share_embedding '{table}' {has}: {what}")
        if len(members) == 1:
            found[name] = value_map(specs[name], *given[name])
            continue
        if table not in found:
            parts = [_categories_of(specs[other], *given[other]) for other in members]
            together = pl.concat([texts for texts, _ in parts]), np.concatenate([counts for _, counts in parts])
            one = _of_categories(specs[table], *together)
            found |= {other: _as_declared(specs[other], one) for other in (table, *members)}
    return {name: found[name] for name in given}


def _categories_of(spec: DeclaredColumn, values: pl.Series, counts: Array) -> tuple[pl.Series, Array]:
    """Categories as texts, those of a sequence one by one, and how often they occur."""
    if spec.type == "sequence":
        lists = several(values, spec.splitter).list.head(spec.max_len)
        counts = np.repeat(counts, lists.list.len().to_numpy().astype(np.int64))
        values = lists.explode(empty_as_null=False, keep_nulls=False)
    return categories(values).alias("text"), counts


def _as_declared(spec: DeclaredColumn, one: IdMap | Hashed) -> ValueMap | Several:
    return Several(one, spec.splitter, spec.max_len) if spec.type == "sequence" else one


def _of_categories(spec: DeclaredColumn, texts: pl.Series, counts: Array) -> IdMap | Hashed:
    if spec.hash_buckets is not None:
        return Hashed.of(spec.hash_buckets)
    if spec.min_categr_count > 1:
        table = pl.DataFrame({"text": texts, "count": counts})
        often = table.filter(pl.col("count").sum().over("text") >= spec.min_categr_count)
        texts, counts = often["text"], often["count"].to_numpy()
    return IdMap.by_frequency(texts, counts)


def stored_map(spec: Mapping[str, Any], stored: Mapping[str, int], unseen: int) -> ValueMap | Several:
    """The map of a feature from its specification and vocabulary."""
    kinds: dict[str, Any] = {"quantile_bucket": Buckets, "hash_bucket": Hashed}
    one = kinds.get(spec.get("category_encoder", ""), IdMap)(stored, unseen)
    return Several(one, spec["splitter"], int(spec["values"])) if "values" in spec else one


def map_of(
    name: str,
    features: Mapping[str, Any],
    vocabularies: Mapping[str, Mapping[str, int]],
    normalizers: Mapping[str, tuple[float, float]],
    fill_na: Mapping[str, float],
) -> ValueMap | Several | None:
    """The map of a feature, which may share the table of another; None where there is no vocabulary of it."""
    if features[name]["type"] == "numeric":
        return Scaled(*normalizers.get(name, (0.0, 1.0)), fill_na.get(name, 0.0))
    table = table_of_feature(name, features, vocabularies)
    if table not in vocabularies:
        return None
    encoder = {key: value for key, value in features[table].items() if key == "category_encoder"}
    return stored_map({**features[name], **encoder}, vocabularies[table], unseen_id(features[table]))


def vocabularies_of(
    maps: Mapping[str, ValueMap | Several], columns: Mapping[str, DeclaredColumn]
) -> dict[str, Mapping[str, int]]:
    """Of each embedding table."""
    return {name: ids.stored for name, ids in maps.items() if ids.stored and table_of(name, columns) == name}


def normalizers_of(maps: Mapping[str, ValueMap | Several]) -> dict[str, Any]:
    """What is subtracted from numbers and what they are divided by, and what missing ones are, for a report."""
    scaled = {name: ids for name, ids in maps.items() if isinstance(ids, Scaled)}
    return {
        "normalizers": {name: (ids.shift, ids.scale) for name, ids in scaled.items()},
        "fill_na": {name: ids.fill_na for name, ids in scaled.items()},
    }


def field_spec(spec: DeclaredColumn | None) -> dict[str, Any]:
    """What the specification of a declared column's feature has beside its vocabulary."""
    if spec is None:
        return {}
    found: dict[str, Any] = {"source": "context" if spec.source == "event" else spec.source}
    if spec.known == "afterwards":
        found["known"] = spec.known
    if spec.embedding_dim:
        found["embedding_dim"] = spec.embedding_dim
    if (spec.type == "numeric" and not spec.normalizer) or spec.hash_buckets:
        found["category_encoder"] = "quantile_bucket" if spec.type == "numeric" else "hash_bucket"
    if spec.type == "sequence":
        pooling = {"mean": "layers.MaskedAveragePooling()", "sum": "layers.MaskedSumPooling()"}.get(
            spec.pooling, "AttentionPooling()"
        )
        found |= {"type": "sequence", "max_len": spec.max_len, "values": spec.max_len, "splitter": spec.splitter}
        found["feature_encoder"] = pooling
    return found


def readable_as(file: object, table: pl.LazyFrame, name: str, spec: DeclaredColumn) -> pl.Expr:
    """The column of a table's file, of a type that its map reads; a missing value is null.

    Raises UserError for a column that is not there, or values of another type, with the first row that has one.
    """
    schema = table.collect_schema()
    if name not in schema:
        raise UserError(f"{file}: no {spec.source} column '{name}': {nearest(name, schema)}")
    column, dtype = pl.col(name), schema[name]
    if spec.type == "embedding":
        return column  # see ctr_pe.data.vectors
    one = dtype.inner if spec.type == "sequence" and isinstance(dtype, (pl.List, pl.Array)) else dtype
    flat = not one.is_nested() and not dtype.is_temporal()
    if spec.type == "numeric" and (dtype.is_numeric() or dtype in TEXTS or dtype == pl.Boolean):
        value = column.cast(pl.String).cast(pl.Float64, strict=False) if dtype in TEXTS else column.cast(pl.Float64)
        if dtype in TEXTS:
            text = column.cast(pl.String)
            wrong = value.is_null() & text.is_not_null() & ~text.is_in(list(NO_VALUE))
            strange = table.select(row=wrong.arg_true().first(), value=text.filter(wrong).first()).collect()
            if strange["row"][0] is not None:
                held = f"holds {strange['value'][0]!r} in row {strange['row'][0] + 1}, no number"
                held += decimal_comma(strange["value"][0])
                raise UserError(f"{file}: numeric column '{name}' {held}")
        return pl.when(value.is_finite()).then(value)
    if spec.type == "sequence" and flat:
        lists = column.map_batches(
            lambda values: several(values, spec.splitter), pl.List(pl.String), is_elementwise=True
        )
        return pl.when(lists.list.len() > 0).then(lists).alias(name)
    if spec.type == "categorical" and flat:
        return column.map_batches(categories, return_dtype=pl.String, is_elementwise=True)
    raise UserError(f"{file}: {spec.type} column '{name}' holds {dtype}, not {HELD[spec.type]}")


def numbers(values: pl.Series) -> pl.Series:
    """As float64; what is missing, NaN, infinite or no number is null."""
    found = values.cast(pl.String).cast(pl.Float64, strict=False) if values.dtype in TEXTS else values.cast(pl.Float64)
    return found.set(~found.is_finite().fill_null(False), None)


def several(values: pl.Series, splitter: str) -> pl.Series:
    """Lists of categories as texts, without missing ones; of a list column, or of texts split at ``splitter``."""
    if not isinstance(values.dtype, (pl.List, pl.Array)):
        values = categories(values).str.split(splitter)
    elif isinstance(values.dtype, pl.Array):
        values = values.arr.to_list()
    inner = values.dtype.inner if isinstance(values.dtype, pl.List) else pl.String()
    fractions = inner.is_float() or inner.is_decimal()
    one = pl.element().map_batches(texts, pl.String, is_elementwise=True) if fractions else pl.element().cast(pl.String)
    kept = values.fill_null(pl.Series([[]], dtype=values.dtype)) if values.null_count() else values
    return kept.list.eval(one.filter(one.is_not_null() & ~one.is_in(list(NO_VALUE))))
