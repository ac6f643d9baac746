"""The store of finished runs: ``runs/``, a JSON file each, ``results.jsonl``, the same as lines in the order in which
they finished, ``scores/``, their predictions on the test rows, ``users/``, what these say of each user
(:mod:`ctr_pe.study.users`), and optionally ``weights/`` and ``models/``. While runs are under way, ``unfinished/`` has
the states from which they go on if they are killed.

A file is written as a whole or not at all, so a killed benchmark loses only the unfinished runs, and several processes
may share a store. A store of an earlier version has ``results.jsonl`` alone: it is read as it is, and the next run that
is stored makes its ``runs/``.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, BinaryIO, NamedTuple
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt
from pydantic import BeforeValidator, ConfigDict, TypeAdapter, ValidationError

from ctr_pe.utils.errors import UserError, counted, explain
from ctr_pe.utils.files import file_errors, remove_abandoned, replacing, scratch_folder

FILE, RUNS = "results.jsonl", "runs"
UNFINISHED = "unfinished"  # the folder of states
FIRST_KEY = b'{"model"'  # how every line begins: distinguishes a truncated line from a foreign file


class RunKey(NamedTuple):
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

    __pydantic_config__ = ConfigDict(strict=True)

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
    def key(self) -> RunKey:
        """What identifies the run."""
        return RunKey(**{part: getattr(self, part) for part in RunKey._fields})


def _completed(record: Any) -> Any:
    """A record with what those of earlier versions lack. JSON has no NaN: an undefined metric is null."""
    if isinstance(record, dict):
        record.setdefault("device", "cpu" if record.get("gpu", -1) == -1 else "cuda")
        if isinstance(metrics := record.get("metrics"), dict):
            record["metrics"] = {name: math.nan if value is None else value for name, value in metrics.items()}
    return record


_RESULT: TypeAdapter[Result] = TypeAdapter(Annotated[Result, BeforeValidator(_completed)])


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

    def read(self) -> dict[RunKey, Result]:
        """All finished runs, those of other processes too. Of a damaged file ``notices`` has a line, and its run does
        not count."""
        return {key: result for key, result in self._all().items() if not result.failed}

    def failures(self) -> dict[RunKey, Result]:
        """The runs whose training diverged."""
        return {key: result for key, result in self._all().items() if result.failed}

    def _all(self) -> dict[RunKey, Result]:
        """In the order in which they finished."""
        files, results = self._files(), []
        for file in files:
            with file_errors(file), contextlib.suppress(FileNotFoundError):  # removed since it was listed
                written = file.stat().st_mtime_ns  # of several runs that finished in one second
                found = _parsed(file.read_bytes())
                if isinstance(found, Result):
                    results.append((found.finished, written, found.key, found))
                else:
                    self._notice(f"{file}: not a benchmark result ({found}), that run is not counted")
        return (
            {key: result for *_, key, result in sorted(results, key=lambda one: one[:3])} if files else self._of_lines()
        )

    def _files(self) -> list[Path]:
        return list((self.path / RUNS).glob("*.json"))

    def _of_lines(self) -> dict[RunKey, Result]:
        """The runs of a store of an earlier version: of two lines for one run the first counts, unless it failed."""
        lines = _lines(self.file)
        results: dict[RunKey, Result] = {}
        for number, (line, found) in enumerate(lines, 1):
            if isinstance(found, Result):
                if found.key not in results or results[found.key].failed:
                    results[found.key] = found
            elif (line.startswith(FIRST_KEY) or FIRST_KEY.startswith(line)) and not line.endswith(b"\n"):
                self._notice(f"{self.file}: the last line is cut off, that run is not counted")
            else:
                what = f"{self.file}: line {number} is not a benchmark result"
                if any(isinstance(one, Result) for _, one in lines):
                    raise UserError(f"{what} ({found}): --repair sets it aside")
                raise UserError(f"{what}: choose another --out")
        return results

    def _notice(self, notice: str) -> None:
        if notice not in self.notices:
            self.notices.append(notice)

    def append(self, result: Result, scores: npt.NDArray[np.float32] | None) -> None:
        """Save the scores, if any, then the run. What is there already, perhaps by another process, is not written
        again; after a failure a success may come."""
        if scores is not None:
            write(self._scores(result.key), lambda stream: np.save(stream, np.asarray(scores, np.float32)))
        stored = self._all()
        if result.key in stored and (not stored[result.key].failed or result.failed):
            return
        if stored and not self._files():
            self._make_files(stored.values())
        write(self.path / RUNS / f"{result.key.name}.json", lambda stream: stream.write(_line(result)))
        written: Collection[RunKey] = ()
        while written != (results := self._all()).keys():  # again if another process has added a run meanwhile
            write(self.file, lambda stream: stream.writelines(map(_line, results.values())))
            written = results.keys()

    def _make_files(self, results: Iterable[Result]) -> None:
        """From the lines of an earlier version; all at once, for from then on the lines do not count."""
        with file_errors(self.path / RUNS), scratch_folder(self.path) as folder:
            made = folder / RUNS
            made.mkdir()
            for one in results:
                (made / f"{one.key.name}.json").write_bytes(_line(one))
            try:
                made.rename(self.path / RUNS)
            except OSError:
                if not self._files():  # else another process was faster
                    raise

    def scores(self, key: RunKey) -> npt.NDArray[np.float32] | None:
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

    def scored(self, key: RunKey) -> int:
        """When the scores of a run were written, in nanoseconds; -1 if they are gone."""
        try:
            return self._scores(key).stat().st_mtime_ns
        except OSError:
            return -1

    def weights(self, key: RunKey) -> Path:
        """The file for the weights of a run."""
        file = self.path / "weights" / f"{key.name}.safetensors"
        old = file.with_name(f"{key.name}.pt")  # of an earlier version
        return old if old.exists() and not file.exists() else file

    def model(self, key: RunKey) -> Path:
        """The folder for the model of a run."""
        return self.path / "models" / key.name

    def state(self, key: RunKey, made_by: str) -> Path:
        """The file for the state of a run that is under way; code of another version or revision has another."""
        return self.path / UNFINISHED / f"{key.name}-{made_by}.safetensors"

    def tidy(self, stored: Collection[RunKey]) -> None:
        """Remove the states of runs that are stored, and what killed processes have left."""
        for name in ("", RUNS, UNFINISHED, "scores", "users", "weights"):
            remove_abandoned(self.path / name)
        names = {key.name for key in stored}
        for file in (self.path / UNFINISHED).glob("*.safetensors"):
            if file.name.rpartition("-")[0] in names:
                file.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # others are under way, or there were none
            (self.path / UNFINISHED).rmdir()

    def _scores(self, key: RunKey) -> Path:
        return self.path / "scores" / f"{key.name}.npy"


def repair(path: Path) -> str:
    """Move the lines of ``results.jsonl`` in the folder ``path`` that are no results to ``results.rejected.jsonl``.

    Returns what was done, in one line.

    Raises:
        UserError: no line is a result, or a file cannot be written.
    """
    file, rejected = path / FILE, path / "results.rejected.jsonl"
    lines = _lines(file)
    bad = [number for number, (_, found) in enumerate(lines, 1) if isinstance(found, str)]
    if not bad:
        return f"{file}: {counted(len(lines), 'result')}, nothing to repair"
    if len(bad) == len(lines):
        raise UserError(f"{file}: no line is a benchmark result: not repaired, choose another --out")
    good, aside = (
        [line.removesuffix(b"\n") + b"\n" for line, found in lines if isinstance(found, kind)] for kind in (Result, str)
    )
    with file_errors(rejected), open(rejected, "ab") as stream:
        stream.writelines(aside)
    write(file, lambda stream: stream.writelines(good))
    numbers = ", ".join(map(str, bad[:5])) + ", …" * (len(bad) > 5)
    return f"{file}: {counted(len(bad), 'line')} (line {numbers}) moved to {rejected}"


def _lines(file: Path) -> list[tuple[bytes, Result | str]]:
    """Each line, and the result that it is or what is wrong with it."""
    with file_errors(file), contextlib.suppress(FileNotFoundError):
        lines = file.read_bytes().splitlines(keepends=True)
        return [(line, _parsed(line) if line.strip() else "empty") for line in lines]
    return []


def _parsed(record: bytes) -> Result | str:
    """A result, or what is wrong with it."""
    try:
        return _RESULT.validate_json(record)
    except ValidationError as error:
        first = error.errors()[0]
        return {"json_invalid": "no JSON", "dataclass_type": "no result"}.get(first["type"]) or explain(first)


def _line(result: Result) -> bytes:
    """JSON has no NaN: an undefined number is null. What JSON does not know, such as a path, is its text."""
    record = json.loads(json.dumps(asdict(result), default=str), parse_constant=lambda _: None)
    return json.dumps(record, ensure_ascii=False).encode() + b"\n"


def write(file: Path, save: Callable[[BinaryIO], object]) -> None:
    """All or nothing, also when two processes write the same file."""
    with file_errors(file), replacing(file) as partial, open(partial, "wb") as stream:
        save(stream)
