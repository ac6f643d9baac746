"""Where a table is: a file, a folder, a glob, each on this machine or at an address, ``s3://bucket/day=*/*.parquet``.

In a folder, files and folders whose names begin with "_" or "." are not part of the table, as in Hive and Spark.

Addresses are listed and opened by Arrow's file systems (S3, GCS, HDFS) or else by fsspec's; keys and endpoints are
those of the environment, such as AWS_ACCESS_KEY_ID, AWS_REGION and AWS_ENDPOINT_URL.
"""

from __future__ import annotations

import os
import re
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NoReturn, cast

from ctr_pe.utils.errors import UserError, nearest, no_such_file, reason

if TYPE_CHECKING:
    from collections.abc import Iterator

SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://(.*)")
GLOB = re.compile(r"[*?\[]")
TEXT, PARQUET = (".csv", ".tsv"), (".parquet", ".pq")
HIDDEN = ("_", ".")  # what names of files that are not part of a folder's table begin with
OF_ARROW = ("s3", "gs", "gcs", "hdfs", "viewfs")


class Address(str):
    """Of a table on another machine, ``scheme://…``."""

    __slots__ = ()

    @property
    def scheme(self) -> str:
        return self.partition("://")[0].lower()

    @property
    def name(self) -> str:
        """The last part."""
        return self.rstrip("/").rpartition("/")[2]


def place(given: object) -> Path | Address:
    """An address, or a path of this machine. Raises ValueError if it is neither."""
    if isinstance(given, (Path, Address)):
        return given
    if not isinstance(given, str):
        raise ValueError("a path, or an address such as s3://bucket/log.parquet")
    if found := SCHEME.fullmatch(given):
        return Path(found[2]) if found[1] == "file" else Address(given)
    return Path(given)


def beside(folder: Path, given: str) -> Path | Address:
    """A place that a file in ``folder`` names."""
    found = place(given)
    return found if isinstance(found, Address) else folder / found


def is_glob(given: Path | Address) -> bool:
    """Whether the name stands for several; on this machine a file that has it is meant first."""
    return bool(GLOB.search(str(given))) and (isinstance(given, Address) or not os.path.exists(given))


def is_folder(given: Path | Address) -> bool:
    if isinstance(given, Path):
        return os.path.isdir(given)  # False of a name that the system refuses, such as one that is too long
    system, path = file_system(given)
    with _answers(given):
        return not is_glob(given) and bool(system.isdir(path))


def files_of(given: Path | Address) -> list[str]:
    """The files of a table, sorted, an address if ``given`` is one.

    Raises:
        UserError: none, one that is no table, of which the first ends the search, or an address that does not answer.
    """
    if isinstance(given, Path) and not is_glob(given) and not os.path.isdir(given):
        if not os.path.exists(given):
            raise no_such_file(given)
        return [_table(given, str(given))]
    with _answers(given):
        kept = [_table(given, name) for name in _found(given)]
    if not kept:
        raise _no_files(given)
    return sorted(kept)


def _found(given: Path | Address) -> Iterator[str]:
    """The files of a folder or glob. A folder of this machine is read piece by piece: it may be the whole disk."""
    if isinstance(given, Path) and not is_glob(given):
        for folder, folders, names in os.walk(given.absolute(), onerror=_refused, followlinks=True):
            folders[:] = [name for name in folders if not name.startswith(HIDDEN)]
            yield from (os.path.join(folder, name) for name in names if not name.startswith(HIDDEN))
        return
    system, path = file_system(given)
    prefix = f"{given.scheme}://" if isinstance(given, Address) else ""
    if is_glob(given):
        names = [name for name in system.glob(path) if not system.isdir(name)]
        yield from (prefix + name for name in names if not _hidden(name.rpartition("/")[2]))
    else:
        start = len(path.rstrip("/")) + 1
        yield from (prefix + name for name in system.find(path) if not _hidden(name[start:]))


def _refused(error: OSError) -> NoReturn:
    raise error


def _table(given: Path | Address, file: str) -> str:
    """A file of ``given``. Raises UserError if it is no table by its name."""
    if is_text_name(file) or is_parquet_name(file):
        return file
    where = f"{given}: " if file == str(given) else f"{given}: holds {file}: "
    raise UserError(f"{where}a log is .parquet, .csv or .tsv (or .csv.gz, .tsv.gz)")


def is_text_name(file: str) -> bool:
    return file.lower().removesuffix(".gz").endswith(TEXT)


def is_parquet_name(file: str) -> bool:
    return file.lower().endswith(PARQUET)


def facts_of(file: str) -> list[Any]:
    """Size, time and tag of a file at an address, as far as they are known there."""
    system, path = file_system(Address(file))
    with _answers(Address(file)):
        info = system.info(path)
    return [str(info.get(name)) for name in ("size", "mtime", "LastModified", "ETag")]


def opened(file: Path | Address) -> IO[bytes]:
    """A file to read. Raises OSError."""
    if isinstance(file, Path):
        return file.open("rb")
    system, path = file_system(file)
    return cast("IO[bytes]", system.open(path, "rb"))


def file_system(given: Path | Address) -> tuple[Any, str]:
    """The fsspec file system of a place, and its path there.

    Raises:
        UserError: no package on this machine knows the scheme, or the address does not answer.
    """
    import fsspec

    if isinstance(given, Path):
        return fsspec.filesystem("file"), str(given.absolute())
    rest = given.partition("://")[2]
    if given.scheme not in OF_ARROW:
        try:
            system, path = fsspec.core.url_to_fs(str(given))
            return system, str(path)
        except ValueError:
            raise UserError(f"{given}: {nearest(given.scheme, fsspec.available_protocols())}") from None
        except ImportError as error:
            raise UserError(f"{given}: {reason(error)}") from None
    from fsspec.implementations.arrow import ArrowFSWrapper
    from pyarrow import fs

    with _answers(given):
        if given.scheme == "s3":
            endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
            return ArrowFSWrapper(fs.S3FileSystem(endpoint_override=endpoint)), rest
        host, _, path = rest.partition("/")
        system, base = fs.FileSystem.from_uri(f"{given.scheme}://{host}")
        return ArrowFSWrapper(system), f"{base.rstrip('/')}/{path}"


@contextmanager
def _answers(given: Path | Address) -> Iterator[None]:
    """What a file system says about a place that it cannot read, in one line."""
    try:
        yield
    except FileNotFoundError:
        raise UserError(f"{given}: no such file") from None
    except OSError as error:
        raise UserError(f"{given}: cannot be read: {reason(error)}") from None


def _hidden(name: str) -> bool:
    return any(part.startswith(HIDDEN) for part in name.split("/"))


def _no_files(given: Path | Address) -> UserError:
    """The error for a place without files, with the nearest name in its folder."""
    if is_glob(given):
        return UserError(f"{given}: no file has such a name")
    if isinstance(given, Path):
        return UserError(f"{given}: an empty folder: it needs parquet files")
    system, path = file_system(given)
    parent = path.rstrip("/").rpartition("/")[0]
    with _answers(given):
        names = [name.rstrip("/").rpartition("/")[2] for name in system.ls(parent, detail=False)] if parent else []
    return UserError(f"{given}: no such file" + (f"; {nearest(given.name, names)}" if names else ""))
