"""A data set on disk: a directory that FuxiCTR can read, written all or nothing, checked whenever it is opened.

<data root>/<dataset_id>/
    feature_map.json feature_vocab.json         FuxiCTR's own form
    train.parquet valid.parquet test.parquet
    dataset_config.yaml                         FuxiCTR dialect, for the reader; not part of the data hash
    report.json                                 written last: sizes and hashes of the files, rows, the builder's counts
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ctr_pe.errors import UserError, nearest

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from types import TracebackType

    from fuxictr.features import FeatureMap

FORMAT = 1
SPLITS = ("train", "valid", "test")
REPORT = "report.json"
CONFIG = "dataset_config.yaml"


@dataclass(frozen=True)
class Group:
    """Target fields and the history fields they are compared with, pairwise: one attention of the model."""

    target: tuple[str, ...]
    history: tuple[str, ...]
    age: str | None = None  # seconds from each history event to the request

    def __post_init__(self) -> None:
        if len(self.target) != len(self.history) or not self.target:
            raise ValueError(f"target fields {self.target} and history fields {self.history} must pair up")


@dataclass(frozen=True)
class Dataset:
    """A complete data set. ``rows`` counts rows per split, ``max_len`` is the longest history in items."""

    path: Path
    dataset_id: str
    data_hash: str
    rows: dict[str, int]
    groups: tuple[Group, ...]
    group_id: str | None
    label: str
    max_len: int

    def split(self, name: str) -> Path:
        """The parquet file of ``train``, ``valid`` or ``test``. Raises UserError if the set has no such split."""
        if name not in self.rows:
            raise UserError(f"{self.path}: no split '{name}': {nearest(name, self.rows)}")
        return self.path / f"{name}.parquet"

    def feature_map(self, embedding_dim: int) -> FeatureMap:
        """FuxiCTR's feature map of this set (imports FuxiCTR, which takes seconds)."""
        from fuxictr.features import FeatureMap

        feature_map = FeatureMap(self.dataset_id, str(self.path))
        feature_map.load(
            str(self.path / "feature_map.json"), {"group_id": self.group_id, "embedding_dim": embedding_dim}
        )
        return feature_map


class DatasetWriter:
    """Writes a data set into ``path`` = "<out>.partial", which ``finish`` renames to ``out``.

    Leaving the context without ``finish`` removes everything. Raises UserError when ``out`` exists (a complete
    set is replaced with ``overwrite``, anything else never is) or when another process is building the same set.
    """

    def __init__(self, out: Path, dataset_id: str | None = None, overwrite: bool = False) -> None:
        self.out = Path(out)
        self.dataset_id = dataset_id or self.out.resolve().name
        self.overwrite = overwrite
        self.path = self.out.with_name(self.out.name + ".partial")
        self._check_out()

    def __enter__(self) -> DatasetWriter:
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # a killed build releases it
        except OSError:
            os.close(self._lock)
            raise UserError(f"{self.out}: another process is building this data set") from None
        for left_over in self.path.iterdir():
            shutil.rmtree(left_over) if left_over.is_dir() else left_over.unlink()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        shutil.rmtree(self.path, ignore_errors=True)  # gone already after finish()
        os.close(self._lock)

    def finish(
        self,
        *,
        label: str,
        group_id: str | None,
        features: Mapping[str, Mapping[str, Any]],
        groups: Sequence[Group],
        vocabs: Mapping[str, Mapping[str, int]],
        report: Mapping[str, Any],
    ) -> Dataset:
        """Write everything but the parquet files, then make the set visible.

        ``features``: FuxiCTR's specification per column, ``vocabs``: id per original value, ``report``: the counts.
        Raises ValueError when the parquet files lack a column or hold other columns than ``features`` and ``label``.
        """
        rows = {split: self._rows(split, {label, *features}) for split in SPLITS if self._file(split).exists()}
        if not {"train", "test"} <= rows.keys():
            raise ValueError(f"{self.path}: a data set needs train.parquet and test.parquet")
        _write_json(self.path / "feature_map.json", _feature_map(self.dataset_id, label, features))
        _write_json(self.path / "feature_vocab.json", vocabs)
        files = {
            str(file.relative_to(self.path)): {"bytes": file.stat().st_size, "blake2b": _hash(file)}
            for file in sorted(self.path.rglob("*"))
            if file.is_file()
        }
        lengths = [int(spec["max_len"]) for spec in features.values() if "max_len" in spec]
        own: dict[str, Any] = {
            "format": FORMAT,
            "dataset_id": self.dataset_id,
            "data_hash": _combined(files),
            "files": files,
            "rows": rows,
            "label": label,
            "group_id": group_id,
            "groups": [asdict(group) for group in groups],
            "max_len": max(lengths, default=0),
        }
        self._write_config(rows, group_id, groups)
        _write_json(self.path / REPORT, {**own, **{key: value for key, value in report.items() if key not in own}})
        self._publish()
        return open_dataset(str(self.out.resolve()))

    def _check_out(self) -> None:
        if not self.out.exists():
            return
        if not (self.out / REPORT).is_file():
            raise UserError(f"{self.out} exists and is not a complete data set: remove it or choose another --out")
        if not self.overwrite:
            raise UserError(f"{self.out} exists already: choose another --out or replace it with --overwrite")

    def _publish(self) -> None:
        self._check_out()  # it may have appeared meanwhile
        old = self.out.with_name(self.out.name + ".old")
        if self.out.exists():
            self.out.rename(old)
        self.path.rename(self.out)
        shutil.rmtree(old, ignore_errors=True)

    def _file(self, split: str) -> Path:
        return self.path / f"{split}.parquet"

    def _rows(self, split: str, expected: set[str]) -> int:
        import polars as pl

        frame = pl.scan_parquet(self._file(split))
        if different := expected ^ set(frame.collect_schema().names()):
            raise ValueError(f"{self._file(split)}: columns differ from the features in {sorted(different)}")
        return int(frame.select(pl.len()).collect().item())

    def _write_config(self, rows: Mapping[str, int], group_id: str | None, groups: Sequence[Group]) -> None:
        import yaml

        config = {
            "data_root": str(self.out.parent),
            "data_format": "parquet",
            **{f"{split}_data": str(self.out / f"{split}.parquet") for split in rows},
            "group_id": group_id,
            # tuples, as FuxiCTR wants them: the fields of one tuple are concatenated for one attention
            "target_field": [group.target for group in groups],
            "sequence_field": [group.history for group in groups],
            "age_field": [group.age for group in groups],
        }
        with open(self.path / CONFIG, "w", encoding="utf-8") as file:
            yaml.dump({self.dataset_id: config}, file, sort_keys=False, allow_unicode=True)


def data_root(given: Path | None = None) -> Path:
    """Where data sets live: ``given`` (--data-root), else $CTR_PE_DATA, else ./data."""
    return Path(given or os.environ.get("CTR_PE_DATA") or "data")


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
        report = json.loads((path / REPORT).read_text(encoding="utf-8"))
        files = report["files"]
        if report["format"] != FORMAT:
            raise UserError(f"{path}: data format {report['format']}, this version reads {FORMAT}: {again}")
        for file, facts in files.items():
            _check_file(path / file, facts, again)
        feature_map = json.loads((path / "feature_map.json").read_text(encoding="utf-8"))
        if feature_map["dataset_id"] != report["dataset_id"]:
            wrong = f"of data set '{feature_map['dataset_id']}', not '{report['dataset_id']}'"
            raise UserError(f"{path / 'feature_map.json'}: {wrong}: {again}")
        if report["data_hash"] != _combined(files):
            raise UserError(f"{path / REPORT}: changed since it was built: {again}")
        return Dataset(
            path=path,
            dataset_id=report["dataset_id"],
            data_hash=report["data_hash"],
            rows=dict(report["rows"]),
            groups=tuple(
                Group(tuple(group["target"]), tuple(group["history"]), group["age"]) for group in report["groups"]
            ),
            group_id=report["group_id"],
            label=report["label"],
            max_len=report["max_len"],
        )
    except (OSError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise UserError(f"{path / REPORT}: not a readable report ({type(error).__name__}: {error}): {again}") from None


def list_datasets(root: Path | None = None) -> list[tuple[str, dict[str, int]]]:
    """Name and rows per split of every complete set below the data root."""
    return list(_reports(data_root(root)))


def _reports(root: Path) -> Iterator[tuple[str, dict[str, int]]]:
    for report in sorted(root.glob(f"*/{REPORT}")):
        try:
            rows = json.loads(report.read_text(encoding="utf-8"))["rows"]
        except (OSError, ValueError, KeyError, TypeError):
            continue  # opening it says what is wrong
        if report.parent.suffix not in (".partial", ".old"):
            yield report.parent.name, dict(rows)


def _check_file(file: Path, facts: Mapping[str, Any], again: str) -> None:
    if not file.is_file():
        raise UserError(f"{file}: missing: {again}")
    if file.stat().st_size != facts["bytes"]:
        raise UserError(
            f"{file}: changed since it was built ({file.stat().st_size:,} bytes, not {facts['bytes']:,}): {again}"
        )
    if file.suffix == ".json" and _hash(file) != facts["blake2b"]:
        raise UserError(f"{file}: changed since it was built (another hash than in {REPORT}): {again}")


def _how_to_build(name: str, root: Path | None) -> str:
    from ctr_pe.config import packaged_yaml
    from ctr_pe.data.published import SETS

    out = data_root(root) / name
    if name in SETS:
        return f"fetch it with `ctr-pe data fetch {name} --data-root {data_root(root)}`"
    if name in packaged_yaml("recipe"):
        return (
            f"build it with `ctr-pe data build --recipe {name} --interactions interactions.parquet "
            f"--items items.parquet --out {out}`"
        )
    return f"build it with `ctr-pe data build --interactions FILE --items FILE --protocol din --out {out}`"


def _feature_map(dataset_id: str, label: str, features: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """FuxiCTR's feature_map.json: shared tables count once in total_features, a history fills max_len input columns."""
    own_table = [spec for spec in features.values() if "share_embedding" not in spec]
    return {
        "dataset_id": dataset_id,
        "num_fields": sum(spec["type"] != "meta" for spec in features.values()),
        "total_features": sum(int(spec.get("vocab_size", 0)) for spec in own_table),
        "input_length": sum(_width(spec) for spec in features.values()),
        "labels": [label],
        "features": [{name: dict(spec)} for name, spec in features.items()],
    }


def _width(spec: Mapping[str, Any]) -> int:
    widths = {"sequence": "max_len", "embedding": "pretrain_dim"}
    return int(spec[widths[spec["type"]]]) if spec["type"] in widths else 1


def _hash(file: Path) -> str:
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _combined(files: Mapping[str, Mapping[str, Any]]) -> str:
    text = "".join(f"{name} {files[name]['blake2b']}\n" for name in sorted(files))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _write_json(file: Path, content: Any) -> None:
    file.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
