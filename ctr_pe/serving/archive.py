"""A model folder as one file, to keep it in an object store or a registry and to know it again by its hash.

The file is a tar of the folder's files below ``model/``, without dates and owners: equal folders give equal bytes.
Beside it stands ``FILE.sha256``, in the form that ``sha256sum --check`` reads.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import tarfile
from pathlib import Path, PurePosixPath

from ctr_pe.serving.model_folder import MANIFEST, read_manifest
from ctr_pe.utils.errors import UserError, no_such_file, option, reason
from ctr_pe.utils.files import file_errors, new_folder, replacing

TOP = "model"
SHA256 = re.compile("[0-9a-f]{64}")


def pack(folder: str | Path, file: str | Path) -> str:
    """Write a model folder as ``file`` and ``file.sha256``, each all or nothing; the SHA-256 in hex.

    Raises:
        UserError: no model folder, a damaged one, or a file that cannot be written.
    """
    folder, file = Path(folder), Path(file)
    names = sorted([MANIFEST, *read_manifest(folder)["files"]])
    with file_errors(file), replacing(file) as partial:
        with tarfile.open(partial, "w", format=tarfile.PAX_FORMAT) as archive:
            for name in names:
                member = tarfile.TarInfo(f"{TOP}/{name}")
                member.size = (folder / name).stat().st_size
                with open(folder / name, "rb") as content:
                    archive.addfile(member, content)
        digest = sha256_of(partial)
    beside = _beside(file)
    with file_errors(beside), replacing(beside) as partial:
        partial.write_text(f"{digest}  {file.name}\n", encoding="utf-8")
    return digest


def unpack(file: str | Path, folder: str | Path, sha256: str | None = None) -> str:
    """Make a model folder of a file, all or nothing; an earlier model folder of this name is replaced.

    The hash is compared, then the sizes and hashes of all files with those of ``model.json``.

    Args:
        sha256: that the file must have, in hex; None for that of ``file.sha256``.

    Returns:
        The SHA-256 in hex.

    Raises:
        UserError: another hash, or none to compare with; no file of :func:`pack`; ``folder`` exists and is none of a
            model.
    """
    file, folder = Path(file), Path(folder)
    wanted, digest = _wanted(file, sha256), sha256_of(file)
    if digest != wanted:
        raise UserError(f"{file}: damaged, or another file: its SHA-256 is {digest}, not {wanted}")
    if folder.exists() and not (folder / MANIFEST).is_file():
        raise UserError(f"{folder} exists and is not a model folder: remove it or choose another name")
    with file_errors(folder), new_folder(folder, replace=True) as made:
        _extract(file, made)
        try:
            files = read_manifest(made)["files"]
        except UserError as error:
            raise UserError(str(error).replace(str(made), str(file))) from None
        if others := sorted({path.name for path in made.iterdir()} - {MANIFEST, *files}):
            raise UserError(f"{file}: '{others[0]}' is none of the model's files")
    return digest


def sha256_of(file: Path) -> str:
    """In hex. Raises UserError for a file that cannot be read."""
    if not file.is_file():
        raise no_such_file(file)
    with file_errors(file), open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _beside(file: Path) -> Path:
    return file.with_name(f"{file.name}.sha256")


def _wanted(file: Path, given: str | None) -> str:
    """The hash that a file must have."""
    what, beside = option("sha256"), _beside(file)
    if given is None:
        if not beside.is_file():
            raise UserError(f"{beside}: no such file: give the hash with {what}")
        with file_errors(beside):
            what, given = str(beside), beside.read_text(encoding="utf-8", errors="replace").partition(" ")[0]
    if not SHA256.fullmatch(given.strip().lower()):
        raise UserError(f"{what}: 64 hexadecimal digits, not '{given[:80]}'")
    return given.strip().lower()


def _extract(file: Path, folder: Path) -> None:
    """Plain files directly below ``model/`` alone: a tar may hold links, devices and paths that lead elsewhere."""
    try:
        with tarfile.open(file, "r:") as archive:
            for member in archive:
                top, *name = PurePosixPath(member.name).parts
                if top != TOP or len(name) != 1 or name[0] == ".." or not member.isreg() or member.issparse():
                    raise UserError(f"{file}: '{member.name}' is no file of a model folder")
                content = archive.extractfile(member)
                assert content is not None  # it is a plain file
                with open(folder / name[0], "xb") as written:
                    shutil.copyfileobj(content, written)
    except FileExistsError as error:
        raise UserError(f"{file}: '{Path(error.filename).name}' is there twice") from None
    except (tarfile.TarError, EOFError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{file}: no file of `ctr-pe pack`: {reason(error)}") from None
