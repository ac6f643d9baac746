"""A data set on disk: a directory that FuxiCTR can read, checked whenever it is opened.

<data root>/<dataset_id>/
    feature_map.json feature_vocab.json         in FuxiCTR's format
    train.parquet valid.parquet test.parquet    or folders train, valid, test with shards: 000000.parquet, …
    dataset_config.yaml                         a dataset config for FuxiCTR; not part of the data hash
    items.parquet                               of a log: raw items, their attributes, and the ids of both in columns
                                                that end with ":id"; not part of the data hash
    users.parquet                               likewise the users, where columns of theirs are declared
    report.json                                 written last: sizes and hashes of the files, rows, the builder's counts
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import polars as pl
from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError

from ctr_pe.config.field_groups import Group
from ctr_pe.config.schema import Name
from ctr_pe.data.root import REPORT, data_root, list_datasets
from ctr_pe.fuxictr.feature_specs import FEATURES, read_feature_map
from ctr_pe.utils.errors import UserError, explain, nearest, option, shown
from ctr_pe.utils.names import check_new_path, is_name

if TYPE_CHECKING:
    from collections.abc import Mapping

FORMAT: Literal[1] = 1
SPLITS = ("train", "valid", "test")
CONFIG = "dataset_config.yaml"
ITEMS, USERS = "items.parquet", "users.parquet"
LABEL, USER, ITEM = "label", "user_id", "item_id"  # columns of every data set of a log, whatever the log calls them
WEIGHT = "sample_weight"  # and of one whose rows have weights
ID = ":id"  # in items.parquet the column ``cate_id:id`` has the ids of the column ``cate_id``


def _is_file_name(name: str) -> str:
    if not all(map(is_name, name.split("/"))):
        raise ValueError(f"a file of the data set, not {shown(name)}")
    return name


FileName = Annotated[str, AfterValidator(_is_file_name)]


class FileFacts(BaseModel):
    """Size and hash of a file."""

    model_config = ConfigDict(strict=True)

    bytes: int
    blake2b: str


class DatasetReport(BaseModel):
    """What is read of report.json: rows per split, the longest history, and whether a row
    asks if its item is clicked or which of all items comes next; the builder's counts are for readers."""

    model_config = ConfigDict(strict=True, frozen=True)

    format: Literal[1] = FORMAT
    dataset_id: Name
    data_hash: str
    files: dict[FileName, FileFacts]
    rows: dict[str, int]
    label: str
    group_id: str | None
    groups: tuple[Group, ...]
    max_len: int
    task: Literal["click", "next-item"] = "click"


class Dataset(DatasetReport):
    """A complete data set in the directory ``path``."""

    path: Path

    def split(self, name: str) -> Path:
        """The parquet file of ``train``, ``valid`` or ``test``, or the folder of its shards, which the loader takes for
        one file. Raises UserError if the set has no such split."""
        if name not in self.rows:
            raise UserError(f"{self.path}: no split '{name}': {nearest(name, self.rows)}")
        return self.path / (name if any(file.startswith(f"{name}/") for file in self.files) else f"{name}.parquet")

    def scan(self, name: str) -> pl.LazyFrame:
        """The rows of a split. Raises UserError as :meth:`split`."""
        return pl.scan_parquet(shards(self.split(name)))

    def feature_map(self, embedding_dim: int) -> Any:
        """FuxiCTR's feature map of this set (imports FuxiCTR, which takes seconds)."""
        from ctr_pe.fuxictr.library import load_feature_map

        params = {"group_id": self.group_id, "embedding_dim": embedding_dim}
        return load_feature_map(self.dataset_id, self.path, params)


def shards(split: Path) -> list[Path]:
    """The parquet files of a split, in the order of their rows. Columns of the loader may be beside them."""
    return sorted(split.glob("*.parquet")) if split.is_dir() else [split]


def check_out(out: Path, overwrite: bool) -> None:
    """Raises UserError if ``out`` has a line break in its name or exists; complete data sets may be overwritten."""
    check_new_path("out", out)
    if not out.exists():
        return
    if not (out / REPORT).is_file():
        raise UserError(f"{out} exists and is not a complete data set: remove it or choose another {option('out')}")
    if not overwrite:
        raise UserError(
            f"{out} exists already: choose another {option('out')} or replace it with {option('overwrite', True)}"
        )


def open_dataset(name: str, root: Path | None = None) -> Dataset:
    """Open a set by its directory or by its name below the data root.

    Raises UserError, with the command that builds it, when the set is missing, half-built or changed since.
    """
    path = next((path for path in (data_root(root) / name, Path(name)) if path.is_dir()), None)
    if path is None:
        known = [] if os.sep in name else [found for found, _ in list_datasets(root)]
        choices = f"; built so far: {nearest(name, known)}" if known else ""
        raise UserError(f"no data set '{name}' in {data_root(root)}: {_how_to_build(name, root)}{choices}")
    again = _how_to_build(path.name, path.parent)
    if not (path / REPORT).is_file():
        raise UserError(f"{path}: half-built, it has no {REPORT}: {again}")
    try:
        report = read_report(path)
        for name, stored in report.files.items():
            _check_file(path / name, stored)
        feature_map = read_feature_map(path / FEATURES)
        if feature_map.dataset_id != report.dataset_id:
            wrong = f"of data set '{feature_map.dataset_id}', not '{report.dataset_id}'"
            raise UserError(f"{path / FEATURES}: {wrong}")
        if report.data_hash != combined_hash(report.files):
            raise UserError(f"{path / REPORT}: changed since it was built")
    except UserError as error:
        raise UserError(f"{error}: {again}") from None
    return Dataset(path=path, **dict(report))


def read_report(folder: Path) -> DatasetReport:
    """The report of a data set. Raises UserError if it cannot be read or is none."""
    try:
        return DatasetReport.model_validate_json((folder / REPORT).read_bytes())
    except OSError as error:
        problem = str(error.strerror or error)
    except ValidationError as error:
        problem = explain(error.errors(include_url=False)[0], DatasetReport)
    raise UserError(f"{folder / REPORT}: not a readable report ({problem})")


def _check_file(file: Path, facts: FileFacts) -> None:
    if not file.is_file():
        raise UserError(f"{file}: missing")
    if (size := file.stat().st_size) != facts.bytes:
        raise UserError(f"{file}: changed since it was built ({size:,} bytes, not {facts.bytes:,})")
    if file.suffix == ".json" and hash_of_file(file) != facts.blake2b:
        raise UserError(f"{file}: changed since it was built (another hash than in {REPORT})")


def _how_to_build(name: str, root: Path | None) -> str:
    from ctr_pe.config.yaml import packaged_yaml
    from ctr_pe.data.published.sets import SETS, original

    out = data_root(root) / name
    if (like := original(name)) in SETS:
        fetch = f"`ctr-pe data fetch {like} --data-root {data_root(root)}"
        if like == name:
            return f"fetch it with {fetch}`"
        return f"make it with `ctr-pe data generate --like {like} --out FILES` and {fetch} --from FILES`"
    recipe = "--interactions FILE --items FILE --protocol din"
    if name in packaged_yaml("recipe"):
        recipe = f"--recipe {name} --interactions interactions.parquet --items items.parquet"
    return f"build it with `ctr-pe data build {recipe} --out {out}`"


def hash_of_file(file: Path) -> str:
    """Of its bytes."""
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def facts_of(file: Path) -> FileFacts:
    return FileFacts(bytes=file.stat().st_size, blake2b=hash_of_file(file))


def combined_hash(files: Mapping[str, FileFacts]) -> str:
    """Of a data set: of the names and hashes of its files."""
    text = "".join(f"{name} {files[name].blake2b}\n" for name in sorted(files))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
