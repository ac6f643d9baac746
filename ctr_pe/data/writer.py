"""Makes a data set from any source: all or nothing, under its name only when it is complete."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import polars as pl
import pyarrow.parquet as pq

from ctr_pe.config.columns import DeclaredColumn, table_of
from ctr_pe.config.field_groups import Group, LogHistory
from ctr_pe.data.dataset import (
    CONFIG,
    ITEMS,
    SPLITS,
    USER,
    USERS,
    WEIGHT,
    Dataset,
    DatasetReport,
    check_out,
    combined_hash,
    facts_of,
    open_dataset,
    shards,
)
from ctr_pe.data.root import REPORT
from ctr_pe.data.value_maps import Scaled, Several, ValueMap, field_spec
from ctr_pe.data.vectors import file_of
from ctr_pe.fuxictr.feature_specs import FEATURES, FeatureSpecs, age_spec, history_spec, target_spec
from ctr_pe.utils.errors import UserError, reason
from ctr_pe.utils.files import move, scratch_beside, write_json, write_vocabularies

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True)
class Content:
    """What a source returns about the rows it has added.

    ``features``: FuxiCTR's specification per column; ``vocabs``: per table, the id of each original value; ``report``:
    the source's counts; ``items``, ``users``: the catalogue and the table of users, see :mod:`ctr_pe.data.dataset`.
    """

    label: str
    group_id: str | None
    features: Mapping[str, Mapping[str, Any]]
    groups: Sequence[Group]
    vocabs: Mapping[str, Mapping[str, int]]
    report: Mapping[str, Any]
    items: pl.DataFrame | None = None
    users: pl.DataFrame | None = None
    task: Literal["click", "next-item"] = "click"


class DatasetWriter:
    """Writes a data set into a temporary folder beside ``out``; ``finish`` gives it its name.

    Leaving the context without ``finish`` removes everything. Raises UserError when ``out`` exists; a complete set is
    replaced with ``overwrite``, anything else never is. ``shard_rows``: of a file at most; None for a file per split.

    Attributes:
        path: the unfinished data set.
        scratch: a folder for temporary files of the source.
    """

    def __init__(
        self, out: Path, dataset_id: str | None = None, overwrite: bool = False, shard_rows: int | None = None
    ) -> None:
        self.out = Path(out) if Path(out).name else Path(out).resolve()
        self.dataset_id = dataset_id or self.out.resolve().name
        self.overwrite = overwrite
        self.shard_rows = shard_rows
        self._parquets: dict[str, pq.ParquetWriter] = {}
        self._rows = Counter[str]()
        check_out(self.out, overwrite)

    def __enter__(self) -> DatasetWriter:
        self._context = ExitStack()
        folder = self._context.enter_context(scratch_beside(self.out))
        self.path, self.scratch = folder / "new", folder / "scratch"
        self.path.mkdir()
        self.scratch.mkdir()
        return self

    def __exit__(self, *error: object) -> None:
        with self._context:
            for parquet in self._parquets.values():
                try:
                    parquet.close()
                except OSError:  # a full disk, which has been said
                    parquet.is_open = False  # else it tries again when it is collected, and prints a traceback

    def add(self, split: str, rows: pa.Table, **options: Any) -> None:
        """Append rows, maybe none, to a split; the first call begins it, with ``options`` of its ParquetWriter."""
        if not len(rows) and self._rows[split]:
            return
        while True:
            room = len(rows) if self.shard_rows is None else self.shard_rows - self._rows[split] % self.shard_rows
            if split not in self._parquets:
                self._parquets[split] = self._new_file(split, rows.schema, {"compression": "zstd", **options})
            if len(rows):
                self._parquets[split].write_table(rows[:room])
            self._rows[split] += min(len(rows), room)
            if self.shard_rows is not None and len(rows) >= room:
                self._parquets.pop(split).close()  # full
            if len(rows) <= room:
                return
            rows = rows[room:]

    def _new_file(self, split: str, schema: pa.Schema, options: Mapping[str, Any]) -> pq.ParquetWriter:
        file = self.path / f"{split}.parquet"
        if self.shard_rows is not None:
            file = self.path / split / f"{self._rows[split] // self.shard_rows:06}.parquet"
            file.parent.mkdir(exist_ok=True)
        return pq.ParquetWriter(file, schema, **options)

    def finish(self, content: Content) -> Dataset:
        """Write everything but the rows, then rename the set to ``out``.

        Raises ValueError when the rows lack a column or have other columns than ``features`` and ``label``.
        """
        for parquet in self._parquets.values():
            parquet.close()
        rows = {}
        names = {split: split if self.shard_rows else f"{split}.parquet" for split in SPLITS}
        for split, name in names.items():
            if not (self.path / name).exists():
                continue
            files = shards(self.path / name)
            parts = [pq.read_metadata(file) for file in files]
            if different := {content.label, *content.features} ^ set(parts[0].schema.to_arrow_schema().names):
                raise ValueError(f"{files[0].name}: columns differ from the features in {sorted(different)}")
            rows[split] = sum(int(part.num_rows) for part in parts)
        if "train" not in rows or len(rows) == 1:
            raise ValueError(f"{self.path}: a data set needs train.parquet, and valid.parquet or test.parquet")
        specs = FeatureSpecs.of(self.dataset_id, content.features, [content.label])
        write_json(self.path / FEATURES, specs.content)
        write_vocabularies(self.path / "feature_vocab.json", content.vocabs)
        every = [file for file in sorted(self.path.rglob("*")) if file.is_file()]
        facts = {file.relative_to(self.path).as_posix(): facts_of(file) for file in every}
        report = DatasetReport(
            dataset_id=self.dataset_id,
            data_hash=combined_hash(facts),
            files=facts,
            rows=rows,
            label=content.label,
            group_id=content.group_id,
            groups=tuple(content.groups),
            task=content.task,
            max_len=max((int(spec.get("max_len", 0)) for spec in content.features.values()), default=0),
        )
        keys = {
            "group_id": content.group_id,
            "target_field": [list(group.target) for group in content.groups],
            "sequence_field": [list(group.history) for group in content.groups],
            "age_field": [group.age for group in content.groups],
        }
        of_rows = {split: names[split] for split in rows}
        write_config(self.path, self.out, self.dataset_id, of_rows, "parquet", **keys)
        if content.users is not None:
            content.users.write_parquet(self.path / USERS)
        if content.items is not None:
            content.items.write_parquet(self.path / ITEMS)
        own = report.model_dump(mode="json")
        write_json(self.path / REPORT, {**own, **content.report, **own})
        check_out(self.out, self.overwrite)  # it may have appeared meanwhile
        move(self.path, self.out, replace=True)
        return open_dataset(str(self.out.resolve()))


def write_config(
    folder: Path, out: Path, dataset_id: str, files: Mapping[str, str], data_format: str, **more: Any
) -> None:
    """The dataset config of ``out`` for FuxiCTR, in ``folder`` until the set is complete; ``files``: of each split."""
    import yaml

    data = {f"{split}_data": str(out / file) for split, file in files.items()}
    config = {dataset_id: {"data_root": str(out.parent), "data_format": data_format, **data, **more}}
    text = yaml.safe_dump(config, sort_keys=False, allow_unicode=True)
    (folder / CONFIG).write_text(text, encoding="utf-8")


def item_specs(
    maps: Mapping[str, ValueMap | Several],
    groups: Sequence[Group],
    max_len: int,
    columns: Mapping[str, DeclaredColumn] = MappingProxyType({}),
    weighted: bool = False,
    dims: Mapping[str, int] = MappingProxyType({}),
    histories: Sequence[LogHistory] = (LogHistory(),),
) -> dict[str, dict[str, Any]]:
    """The features of a log: its user, the fields with ids, and the ``histories``, one of each group. ``columns``: how
    the fields were declared; ``weighted``: whether rows have weights; ``dims``: of fields that are vectors."""
    specs: dict[str, dict[str, Any]] = {USER: {"type": "meta"}}
    specs |= {WEIGHT: {"type": "meta", "weight": True}} if weighted else {}
    for name in sorted(maps, key=lambda name: table_of(name, columns) != name):  # a table before those who share it
        ids, declared, table = maps[name], columns.get(name), table_of(name, columns)
        specs[name] = field_spec(declared)
        if isinstance(ids, Scaled):
            specs[name]["type"] = "numeric"
            continue
        specs[name] = target_spec(ids.size - 2, unseen=ids.unseen) | specs[name]
        if table != name:
            widths = {"embedding_dim": specs[table]["embedding_dim"]} if "embedding_dim" in specs[table] else {}
            specs[name] |= {"share_embedding": table} | widths
        elif declared is not None and declared.type == "embedding":
            specs[name] |= {"pretrained_emb": file_of(name), "pretrain_dim": dims[name], "pretrain_usage": "init"}
            specs[name]["freeze_emb"] = declared.freeze_emb
    for group, listed in zip(groups, histories, strict=True):
        for name, history in zip(group.target, group.history, strict=True):
            ids, kept = maps[name], ("values", "splitter", "feature_encoder", "embedding_dim")
            as_target = {key: specs[name][key] for key in kept if key in specs[name]}
            specs[history] = history_spec(name, ids.size - 2, max_len, unseen=ids.unseen) | listed.spec | as_target
    return specs | {group.age: age_spec(max_len) for group in groups if group.age}


DatasetSource = Callable[[DatasetWriter], Content]
"""Adds the rows of a data set to a writer, split by split or block by block, and describes them."""


def make_dataset(
    source: DatasetSource,
    out: Path,
    dataset_id: str | None = None,
    overwrite: bool = False,
    shard_rows: int | None = None,
) -> Dataset:
    """The data set ``out`` from a source; nothing is left there if that fails.

    Raises:
        UserError: ``out`` exists, or what the source raises.
    """
    with written(out), DatasetWriter(out, dataset_id, overwrite, shard_rows) as writer:
        return writer.finish(source(writer))


@contextmanager
def written(out: Path) -> Iterator[None]:
    """What the system says about a place that cannot be written to, in one line."""
    try:
        yield
    except (OSError, pl.exceptions.PolarsError) as error:
        raise UserError(f"{out}: cannot be written: {reason(error)}") from None
