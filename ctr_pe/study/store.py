"""The store of finished runs: ``results.jsonl``, one line each, ``scores/``, their predictions on the test rows,
``users/``, what these say of each user (:mod:`ctr_pe.study.users`), and optionally ``weights/`` and ``models/``. While
runs are under way, ``unfinished/`` has the states from which they go on if they are killed.

A line is appended with one write and flushed to disk at once, so a killed benchmark loses only the unfinished runs.
Several processes may share a store.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import math
import os
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, get_type_hints
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt
from pydantic import ConfigDict, TypeAdapter, ValidationError

from ctr_pe.utils.errors import UserError, counted, explain
from ctr_pe.utils.files import remove_abandoned, replacing

FILE = "results.jsonl"
UNFINISHED = "unfinished"  # the folder of states
FIRST_KEY = b'{"model"'  # how every line begins: distinguishes a truncated line from a foreign file


class Key(NamedTuple):
    """What identifies a run: equal keys, equal results."""

    model: str
    dataset: str
    protocol: str
    config_hash: str
    data_hash: str
    pe: str
    seed: int
    device: str = "cpu"  # or "cuda"

    @property
    def setting(self) -> tuple[str, ...]:
        """What the runs of one table have in common."""
        return (*self[:5], self.device)

    @property
    def name(self) -> str:
        """A file name for it."""
        parts = self if self.device != "cpu" else self[:-1]  # as before the device was part of the key
        digest = hashlib.blake2b(json.dumps(parts).encode(), digest_size=8).hexdigest()
        return f"{self.model}-{self.pe}-{self.seed}-{digest}"


@dataclass(frozen=True)
class Result:
    """One finished run: ``metrics`` on the test rows after the best ``epoch`` (from 1), ``seconds`` it took in all."""

    model: str
    dataset: str
    pe: str
    seed: int
    protocol: str
    metrics: dict[str, float]
    epoch: int
    config_hash: str  # of ``params``
    data_hash: str
    revision: str | None  # git commit of the package, "-dirty" with local changes, None outside a checkout
    versions: dict[str, str]
    seconds: float
    threads: int
    parameters: int
    finished: str  # UTC
    gpu: int = -1
    device: str = "cpu"
    params: dict[str, Any] = field(default_factory=dict)
    auxiliary: dict[str, float] = field(default_factory=dict)  # losses by name, means over the last epoch
    history: list[dict[str, Any]] = field(default_factory=list)  # of the epochs, as ctr_pe.training.loop.Epoch
    origins: dict[str, str] = field(default_factory=dict)  # class and package of each name that is not built in
    processor: str = ""  # its name; empty in lines from before it was kept
    failed: str = ""  # where the training diverged, of a run that has no metrics

    @property
    def key(self) -> Key:
        """What identifies the run."""
        return Key(*(getattr(self, part) for part in Key._fields))


_TYPES = {name: TypeAdapter(kind, config=ConfigDict(strict=True)) for name, kind in get_type_hints(Result).items()}


def device_of(gpu: int) -> str:
    """The kind of device of a run."""
    return "cuda" if gpu >= 0 else "cpu"


def hash_of(params: Mapping[str, Any]) -> str:
    """Identifies hyper-parameters, whatever the order of their keys."""
    return hashlib.blake2b(json.dumps(params, sort_keys=True, default=str).encode(), digest_size=8).hexdigest()


class Store:
    """The runs in one directory.

    Raises:
        UserError: ``results.jsonl`` is another kind of file, which is not changed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = path / FILE
        self.notices: list[str] = []  # warnings about the store
        self.read()

    def read(self) -> dict[Key, Result]:
        """All finished runs, those of other processes too. A cut last line is reported in ``notices`` and ignored."""
        return {key: result for key, result in self._all().items() if not result.failed}

    def failures(self) -> dict[Key, Result]:
        """The runs whose training diverged."""
        return {key: result for key, result in self._all().items() if result.failed}

    def _all(self) -> dict[Key, Result]:
        try:
            content = self.file.read_bytes()
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise UserError(f"{self.file}: {error.strerror}") from None
        results, whole = self._parse(content)
        notice = f"{self.file}: the last line is cut off, that run is not counted"
        if whole < len(content) and notice not in self.notices:
            self.notices.append(notice)
        return results

    def append(self, result: Result, scores: npt.NDArray[np.float32] | None) -> None:
        """Save the scores, if any, then the line. What is there already, perhaps by another process, is not written
        again; after a failure a success may come."""
        if scores is not None:
            write(self._scores(result.key), lambda stream: np.save(stream, np.asarray(scores, np.float32)))
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with _locked(self.file) as descriptor:
                content = self.file.read_bytes()
                results, whole = self._parse(content)
                if result.key in results and (not results[result.key].failed or result.failed):
                    return
                os.ftruncate(descriptor, whole)
                line = _line(result)
                if whole and content[whole - 1 : whole] != b"\n":  # an editor has removed the last newline
                    line = b"\n" + line
                if os.write(descriptor, line) < len(line):
                    raise UserError(f"{self.file}: the disk is full; free some space and repeat the command")
                os.fsync(descriptor)
        except OSError as error:
            raise UserError(f"{error.filename or self.file}: {error.strerror}") from None

    def scores(self, key: Key) -> npt.NDArray[np.float32] | None:
        """Predictions of a run on the test rows in file order, or None if the file is gone or unreadable."""
        try:
            scores = np.load(self._scores(key), allow_pickle=False)
        except (OSError, EOFError, ValueError):
            return None
        return scores if scores.dtype == np.float32 and scores.ndim == 1 else None

    def save_rows(self, data_hash: str, labels: npt.NDArray[Any], users: npt.NDArray[Any], **more: Any) -> None:
        """Keep the labels (N,) and users (N,) of the test rows, so that tables need the store only; and ``more`` about
        the data, under any names, which is added to a file of an older version."""
        file = self.path / "scores" / f"rows-{data_hash}.npz"
        if not file.exists() or not more.keys() <= self.about(data_hash).keys():
            codes = np.unique(users, return_inverse=True)[1].astype(np.int32)
            kept = {"labels": labels.astype(np.uint8), "users": codes, **more}
            write(file, lambda stream: np.savez_compressed(stream, **kept))

    def rows(self, data_hash: str) -> tuple[npt.NDArray[Any], npt.NDArray[Any]] | None:
        """Labels and users of the test rows, or None if the file is gone or unreadable."""
        kept = self.about(data_hash)
        return (kept["labels"], kept["users"]) if kept.keys() >= {"labels", "users"} else None

    def about(self, data_hash: str) -> dict[str, npt.NDArray[Any]]:
        """All that ``save_rows`` kept, by name: nothing if the file is gone or unreadable."""
        try:
            with np.load(self.path / "scores" / f"rows-{data_hash}.npz", allow_pickle=False) as rows:
                found = {name: rows[name] for name in rows.files}
        except (OSError, EOFError, ValueError, KeyError, BadZipFile, zlib.error):
            return {}
        shapes = {found[name].shape for name in ("labels", "users") if name in found}
        return found if len(shapes) == 1 and len(shapes.pop()) == 1 else {}

    def scored(self, key: Key) -> int:
        """When the scores of a run were written, in nanoseconds; -1 if they are gone."""
        try:
            return self._scores(key).stat().st_mtime_ns
        except OSError:
            return -1

    def weights(self, key: Key) -> Path:
        """The file for the weights of a run."""
        file = self.path / "weights" / f"{key.name}.safetensors"
        old = file.with_name(f"{key.name}.pt")  # of an earlier version
        return old if old.exists() and not file.exists() else file

    def model(self, key: Key) -> Path:
        """The folder for the model of a run."""
        return self.path / "models" / key.name

    def state(self, key: Key, made_by: str) -> Path:
        """The file for the state of a run that is under way; code of another version or revision has another."""
        return self.path / UNFINISHED / f"{key.name}-{made_by}.safetensors"

    def tidy(self, stored: Collection[Key]) -> None:
        """Remove the states of runs that are stored, and what killed processes have left."""
        for name in (UNFINISHED, "scores", "users", "weights"):
            remove_abandoned(self.path / name)
        names = {key.name for key in stored}
        for file in (self.path / UNFINISHED).glob("*.safetensors"):
            if file.name.rpartition("-")[0] in names:
                file.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # others are under way, or there were none
            (self.path / UNFINISHED).rmdir()

    def _scores(self, key: Key) -> Path:
        return self.path / "scores" / f"{key.name}.npy"

    def _parse(self, content: bytes) -> tuple[dict[Key, Result], int]:
        """The results and the length of the complete lines."""
        results: dict[Key, Result] = {}
        lines = _lines(content)
        for line in lines:
            if line.result is not None:
                if line.result.key not in results or results[line.result.key].failed:
                    results[line.result.key] = line.result
            elif not line.cut:
                known = any(line.result is not None for line in lines)
                what = f"line {line.number} is not a benchmark result"
                if known:
                    raise UserError(f"{self.file}: {what} ({line.problem}): --repair sets it aside")
                raise UserError(f"{self.file}: {what}: choose another --out")
        return results, sum(len(line.content) for line in lines if not line.cut)


class Line(NamedTuple):
    """One line of the file: a result, or what is wrong with it."""

    number: int
    content: bytes
    result: Result | None
    problem: str = ""
    cut: bool = False  # the last one, of a writer that was killed


def repair(path: Path) -> str:
    """Move the lines of ``results.jsonl`` in the folder ``path`` that are no results to ``results.rejected.jsonl``.

    Returns what was done, in one line. Other processes may go on using the store.

    Raises:
        UserError: no line is a result, or a file cannot be written.
    """
    file = path / FILE
    rejected = file.with_suffix(f".rejected{file.suffix}")
    if not file.exists():
        return f"{file}: no such file, nothing to repair"
    try:
        with _locked(file):
            lines = _lines(file.read_bytes())
            bad = [line for line in lines if line.result is None]
            if not bad:
                return f"{file}: all {counted(len(lines), 'line')} are results, nothing to repair"
            if len(bad) == len(lines):
                raise UserError(f"{file}: no line is a benchmark result: not repaired, choose another --out")
            with open(rejected, "ab") as aside:
                aside.writelines(line.content.removesuffix(b"\n") + b"\n" for line in bad)
                aside.flush()
                os.fsync(aside.fileno())
            good = b"".join(line.content.removesuffix(b"\n") + b"\n" for line in lines if line.result is not None)
            with replacing(file) as partial:
                partial.write_bytes(good)
    except OSError as error:
        raise UserError(f"{error.filename or file}: {error.strerror}") from None
    numbers = ", ".join(str(line.number) for line in bad[:5]) + ", …" * (len(bad) > 5)
    return f"{file}: {counted(len(bad), 'line')} (line {numbers}) moved to {rejected}"


def _lines(content: bytes) -> list[Line]:
    found = []
    for number, line in enumerate(content.splitlines(keepends=True), 1):
        try:
            found.append(Line(number, line, _result(json.loads(line))))
        except (ValueError, TypeError, RecursionError) as error:  # no UTF-8, no JSON and no result, no sane one
            ours = line.startswith(FIRST_KEY) or FIRST_KEY.startswith(line)
            problem = "empty" if not line.strip() else str(error) if isinstance(error, TypeError) else "no JSON"
            found.append(Line(number, line, None, problem, cut=ours and not line.endswith(b"\n")))
    return found


@contextmanager
def _locked(file: Path) -> Iterator[int]:
    """The file, open to append, for this process alone; one that a repair has replaced meanwhile is opened again."""
    while True:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)  # released on close, and by the system when we are killed
            if os.path.samestat(os.fstat(descriptor), os.stat(file)):
                yield descriptor
                return
        finally:
            os.close(descriptor)


def write(file: Path, save: Callable[[BinaryIO], None]) -> None:
    """All or nothing, also when two processes write the same file."""
    try:
        with replacing(file) as partial, open(partial, "wb") as stream:
            save(stream)
    except OSError as error:
        raise UserError(f"{file}: {error.strerror}") from None


def _line(result: Result) -> bytes:
    """JSON has no NaN: an undefined number is null."""
    record = asdict(result)
    record |= {name: _null_for_nan(record[name]) for name in ("metrics", "history")}
    return json.dumps(record, ensure_ascii=False, default=str).encode() + b"\n"


def _null_for_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _null_for_nan(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_null_for_nan(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _result(record: Any) -> Result:
    """A Result from a line; unknown keys, of later versions, are ignored.

    Raises TypeError for something else than a result, a key that is missing and a value of another type.
    """
    if not isinstance(record, dict) or not isinstance(record.get("metrics"), dict):
        raise TypeError("no result")
    needed = [f.name for f in fields(Result) if f.default is f.default_factory is MISSING]
    if missing := [name for name in needed if name not in record]:
        raise TypeError(f"'{missing[0]}' is missing")
    known = {f.name: record[f.name] for f in fields(Result) if f.name in record}
    known.setdefault("device", device_of(record.get("gpu", -1)))
    known["metrics"] = {name: math.nan if value is None else value for name, value in record["metrics"].items()}
    for name, value in known.items():
        try:
            _TYPES[name].validate_python(value)
        except ValidationError as error:
            raise TypeError(explain({**error.errors()[0], "loc": (name, *error.errors()[0]["loc"])})) from None
    return Result(**known)
