"""Scores for a parquet file that need not fit into memory.

The rows are scored in parts, whose scores wait in the folder ``<output>.partial``. When all are there, the file is
written with its column of scores, under a temporary name, and takes its own name in the end. A call that was
interrupted goes on with the parts that are missing, if model, events and input are those of the earlier call. A part
may be scored on another machine (:mod:`ctr_pe.utils.engines`): the call alone writes the output, once.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any
from uuid import uuid4

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from tqdm.auto import tqdm

from ctr_pe import __version__
from ctr_pe.data.logs.places import Address, facts_of, files_of, place
from ctr_pe.data.logs.tables import Place, readable, scan
from ctr_pe.data.timeline import EncodedLog
from ctr_pe.serving.model_folder import MANIFEST, read_model
from ctr_pe.serving.scorer import Scorer
from ctr_pe.utils.engines import open_engine
from ctr_pe.utils.errors import UserError, counted, no_such_file, option, reason, say

SCORE = "score"
PART_ROWS, PART_BYTES = 2**16, 2**26  # at most, of the rows that are in memory at once
BATCH_ROWS, BUFFER = 2**14, 2**18  # rows and, of a column, bytes read at once, however large the row groups are
TAIL = 2**16  # bytes at the end of a file: parquet has sizes, offsets and statistics of all its columns there
COUNTS = b"ctr_pe.counts"
OF_EVENTS = ("unknown history items", "history items of other behaviours")  # which all parts see alike
OURS = re.compile(r"lock|key\.json|output|\d{6,}\.(parquet|[0-9a-f]*\.?tmp)")


@dataclass(frozen=True)
class PredictionReport:
    """What was scored: ``rows``, of which ``reused`` had been scored by an earlier call; ``seconds`` of this call;
    ``counts`` of what is unknown: ``unknown items`` and ``requests of unknown users`` in the input, in rows, ``missing
    numbers`` and ``missing values of`` each declared column of it, times without the zone that those of the log had,
    and ``unknown history items`` in the events."""

    output: Path
    rows: int
    reused: int
    seconds: float
    counts: Counter[str]

    def __str__(self) -> str:
        speed = (self.rows - self.reused) / max(self.seconds, 1e-9)
        made = f"{self.output}: {counted(self.rows, 'row')} in {self.seconds:.1f} s ({speed:,.0f} rows/s)"
        if self.reused:
            made += f", {self.reused:,} of them scored by an earlier call"
        named = {
            "unknown items": ("row", "of items the model does not know"),
            "missing numbers": ("number", "missing, NaN or infinite, which took fill_na"),
            "requests of unknown users": ("row", "of users without events"),
            "unknown history items": ("event", "of items the model does not know"),
        }
        found = [f"{counted(self.counts[name], one)} {of}" for name, (one, of) in named.items() if self.counts[name]]
        others = [name for name in self.counts if name not in {*named, "requests", "unknown users"}]
        found += [f"{self.counts[name]:,} {name}" for name in others if self.counts[name]]
        return f"{made}\nunknown: {', '.join(found) or 'none'}"


def predict(
    model: str | Path,
    requests: str | Path,
    output: str | Path,
    events: str | Path | None = None,
    *,
    overwrite: bool = False,
    gpu: int = -1,
    part_rows: int = PART_ROWS,
    progress: bool = False,
    engine: str = "local",
    threads: int = 1,
) -> PredictionReport:
    """Write ``requests`` with a column ``score``, the click probability (float32), to ``output``, all or nothing.

    Rows, their order and all columns stay as they are. A row sees the events of its user strictly before its time, all
    of them if the file has no times.

    Args:
        model: a model folder.
        requests: a parquet file with user, item, and a time if a row should not see all events.
        events: the log: user, item, time; a file, folder, glob or address. None for the histories of the model
            folder.
        overwrite: replace a file ``output``.
        gpu: -1 for the CPU.
        part_rows: rows scored at once at most; fewer of wide tables.
        progress: show rows and rows per second on stderr.
        engine: where parts are scored, ``local`` or as of :func:`ctr_pe.utils.engines.open_engine`. Its machines see
            the files and folders that are named here under the same names.
        threads: of each part on another engine.

    Raises:
        UserError: a model, file or column that cannot be used; ``output`` exists; another process writes it.
    """
    began = time.perf_counter()
    model, output, log = Path(model), Path(output), None if events is None else place(events)
    source = RequestFile(Path(requests), part_rows)
    _check_output(source, output, overwrite)
    scorer = read_model(model, -1 if engine != "local" else gpu)
    columns = scorer.encoder.reads(source.schema.names)
    source.check_nulls([name for name in columns if not scorer.encoder.optional(name)])
    key = {
        "ctr_pe": __version__,
        "model": hashlib.blake2b((model / MANIFEST).read_bytes()).hexdigest(),
        "events": None if log is None else [_fingerprint(place(file)) for file in files_of(log)],
        "requests": _fingerprint(source.file),
        "part": source.size,
    }
    try:
        with _folder(output, key) as folder:
            parts = [folder / f"{number:06}.parquet" for number in range(source.parts)]
            missing = [n for n, part in enumerate(parts) if _rows_of(part) != source.rows_of(n)]
            if missing and engine == "local":
                job = _Scoring(scorer, source, columns, _events(scorer, log, source, columns), folder)
                _score(job, missing, progress)
            elif missing:
                remote = _RemoteScoring(
                    str(model), log, source.file.absolute(), part_rows, folder.absolute(), gpu, threads, json.dumps(key)
                )
                with closing(open_engine(engine, threads, gpu)) as other, _bar("scoring", source.rows, progress) as bar:
                    for rows in other.map(remote, missing):
                        bar.update(rows)
            _assemble(source, parts, folder / "output", progress)
            counts = Counter[str]()
            for part in parts:
                counts.update(json.loads(pq.read_schema(part).metadata[COUNTS]))
            (folder / "output").replace(output)
            shutil.rmtree(folder)
    except (OSError, pa.ArrowException) as error:
        raise UserError(f"{output}: {getattr(error, 'strerror', None) or str(error).splitlines()[0]}") from None
    reused = source.rows - sum(map(source.rows_of, missing))
    return PredictionReport(output, source.rows, reused, time.perf_counter() - began, counts)


class RequestFile:
    """A parquet file in parts of ``size`` rows: ``most``, or as many as PART_BYTES hold.

    Raises:
        UserError: no parquet file, or one that cannot be read.
    """

    def __init__(self, file: Path, most: int = PART_ROWS) -> None:
        if not file.is_file():
            raise no_such_file(file)
        try:
            self.parquet = pq.ParquetFile(file, buffer_size=BUFFER)
        except (pa.ArrowException, OSError) as error:
            raise UserError(f"{file}: not a parquet file that can be read: {str(error).splitlines()[0]}") from None
        self.file, self.schema, facts = file, self.parquet.schema_arrow, self.parquet.metadata
        for name in self.schema.names:
            if (times := self.schema.names.count(name)) > 1:
                raise UserError(f"{file}: column '{name}' is there {times} times")
        self.rows = int(facts.num_rows)
        self._groups = [facts.row_group(number) for number in range(facts.num_row_groups)]
        held = max(1, PART_BYTES * self.rows // max(1, sum(group.total_byte_size for group in self._groups)))
        self.size = int(most if held >= most else 2 ** (held.bit_length() - 1))
        self.parts = -(-self.rows // self.size)

    def rows_of(self, part: int) -> int:
        return min(self.size, self.rows - part * self.size)

    def read(self, columns: list[str] | None = None, first: int = 0) -> Iterator[pa.Table]:
        """The parts from number ``first`` on, each row group by a reader of its own, because a reader keeps its
        buffers."""
        part, before = None, first * self.size
        try:
            for number, group in enumerate(self._groups):
                if before >= group.num_rows:
                    before -= group.num_rows
                    continue
                for batch in self.parquet.iter_batches(
                    min(self.size, BATCH_ROWS), [number], columns, use_threads=False
                ):
                    table, before = pa.Table.from_batches([batch])[before:], max(0, before - len(batch))
                    part = table if part is None else pa.concat_tables([part, table])
                    while len(part) >= self.size:
                        yield part[: self.size]
                        part = part[self.size :]
        except (pa.ArrowException, OSError) as error:
            raise UserError(f"{self.file}: cannot be read: {reason(error)}") from None
        if part:
            yield part

    def check_nulls(self, columns: list[str]) -> None:
        """By the file's statistics, before anything is scored; files that have none are checked part by part.

        Raises:
            UserError: one of these columns has null values.
        """
        chunks = [group.column(number) for group in self._groups for number in range(group.num_columns)]
        for name in columns:
            known = [chunk.statistics for chunk in chunks if chunk.path_in_schema == name and chunk.statistics]
            if nulls := sum(facts.null_count for facts in known if facts.has_null_count):
                raise UserError(f"{self.file}: column '{name}' has null values: {nulls:,} of {self.rows:,} rows")


@dataclass(frozen=True)
class _Scoring:
    """An opened model and its input; parts are written into ``folder``."""

    scorer: Scorer
    source: RequestFile
    columns: list[str]
    events: EncodedLog | None
    folder: Path

    def write(self, number: int, table: pa.Table) -> None:
        """Score a part, all or nothing, also where another process writes the same part."""
        begin = number * self.source.size
        what = f"{self.source.file}, rows {begin + 1:,} to {begin + len(table):,}"
        encoded = self.scorer.encoder.requests(pl.DataFrame(table), self.events, what)
        counts = {name: count for name, count in encoded.counts.items() if name not in OF_EVENTS or not number}
        written = {COUNTS: json.dumps(counts)}
        scores = pa.table({SCORE: self.scorer.score(encoded)}).replace_schema_metadata(written)
        partial = self.folder / f"{number:06}.{uuid4().hex}.tmp"
        pq.write_table(scores, partial)
        partial.replace(self.folder / f"{number:06}.parquet")


@dataclass(frozen=True)
class _RemoteScoring:
    """The same on another machine, which opens model and input once; ``key``: of the files, which may change."""

    model: str
    log: Place | None
    requests: Path
    part_rows: int
    folder: Path
    gpu: int
    threads: int
    key: str

    def __call__(self, number: int) -> int:
        """Score and write a part; how many rows it has."""
        job = _opened(self)
        table = next(job.source.read(job.columns, number))
        job.write(number, table)
        return len(table)


@lru_cache(maxsize=1)
def _opened(given: _RemoteScoring) -> _Scoring:
    torch.set_num_threads(given.threads)
    scorer, source = read_model(given.model, min(given.gpu, 0)), RequestFile(given.requests, given.part_rows)
    columns = scorer.encoder.reads(source.schema.names)
    return _Scoring(scorer, source, columns, _events(scorer, given.log, source, columns), given.folder)


def _events(scorer: Scorer, log: Place | None, source: RequestFile, columns: list[str]) -> EncodedLog | None:
    """What the rows see; raises UserError if it or the input's columns cannot be used."""
    events = scorer.stored
    if log is not None:
        with readable(log):
            events = scorer.encoder.events(scan(log), str(log))
    scorer.encoder.requests(pl.DataFrame(source.schema.empty_table().select(columns)), events, str(source.file))
    return events


def _score(job: _Scoring, missing: list[int], progress: bool) -> None:
    """Write these parts."""
    source, wanted = job.source, set(missing)
    with _bar("scoring", source.rows, progress, source.rows - sum(map(source.rows_of, missing))) as bar:
        try:
            for number, table in enumerate(source.read(job.columns, missing[0]), missing[0]):
                if number in wanted:
                    job.write(number, table)
                    bar.update(len(table))
        except KeyboardInterrupt:
            bar.close()
            say(f"stopped: {bar.n:,} of {source.rows:,} rows are scored; repeat the same command to go on")
            raise


def _assemble(source: RequestFile, parts: list[Path], file: Path, progress: bool) -> None:
    """Write the rows with their scores."""
    schema = source.schema.append(pa.field(SCORE, pa.float32()))
    with pq.ParquetWriter(file, schema, compression="zstd") as writer, _bar("writing", source.rows, progress) as bar:
        for part, table in zip(parts, source.read(), strict=True):
            scores = pq.ParquetFile(part).read(use_threads=False)[SCORE]  # read_table takes 60 MB more
            scored = table.append_column(SCORE, scores).cast(schema)
            writer.write_table(scored.unify_dictionaries())  # polars reads no column with several in one row group
            bar.update(len(table))


def _bar(doing: str, rows: int, shown: bool, done: int = 0) -> Any:
    return tqdm(total=rows, initial=done, unit=" rows", unit_scale=True, desc=doing, disable=not shown)


def _check_output(source: RequestFile, output: Path, overwrite: bool) -> None:
    if SCORE in source.schema.names:
        raise UserError(f"{source.file}: has a column '{SCORE}' already: rename it")
    if output.is_dir():
        raise UserError(f"{output}: a folder, not a file")
    if output.exists() and os.path.samefile(source.file, output):
        raise UserError(f"{output}: is the input too: choose another name")
    if output.exists() and not overwrite:
        raise UserError(f"{output} exists: {option('overwrite', True)} replaces it")


def _fingerprint(file: Place) -> list[Any]:
    """Equal only for the same file, unchanged."""
    if isinstance(file, Address):
        return [file, *facts_of(file)]
    if not file.is_file():
        raise no_such_file(file)
    facts = file.stat()
    with file.open("rb") as stream:
        stream.seek(max(0, facts.st_size - TAIL))
        return [str(file.resolve()), facts.st_size, facts.st_mtime_ns, hashlib.blake2b(stream.read()).hexdigest()]


@contextmanager
def _folder(output: Path, key: Mapping[str, Any]) -> Iterator[Path]:
    """The folder of the parts, for this process alone; it stays if it has parts in the end.

    A folder of this name that has anything of others is not touched.
    """
    folder = output.with_name(f"{output.name}.partial")
    folder.mkdir(parents=True, exist_ok=True)
    written, wanted = folder / "key.json", json.dumps(key)
    names = {path.name for path in folder.iterdir()}
    if not all(map(OURS.fullmatch, names)) or (names - {"lock"} and written.name not in names):
        raise UserError(f"{folder}: holds files that are not parts of an earlier call: remove or rename it")
    with (folder / "lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{output}: another process is writing it") from None
        found = sorted(folder.glob("*.parquet"))
        if found and written.read_text(encoding="utf-8") != wanted:
            say(f"{folder}: parts of another model, log or input are dropped")
            for part in found:
                part.unlink()
        written.write_text(wanted, encoding="utf-8")
        try:
            yield folder
        finally:
            if not any(folder.glob("*.parquet")):
                shutil.rmtree(folder, ignore_errors=True)


def _rows_of(part: Path) -> int | None:
    """Rows of a finished part."""
    try:
        return int(pq.read_metadata(part).num_rows)
    except (OSError, pa.ArrowException):
        return None
