"""Makes a published data set: downloads its files or reads them from a directory, checks their md5, converts them."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from ctr_pe.data.dataset import check_out, data_root
from ctr_pe.data.published import SETS, Published
from ctr_pe.errors import UserError, nearest

if TYPE_CHECKING:
    from collections.abc import Callable

PUBLISHED = {name: published.title for name, published in SETS.items()}


def download(published: Published, into: Path, hub: Callable[..., str] | None = None) -> Path:
    """Download the files of a set from the dataset hub into ``into``; an interrupted download is continued.

    ``hub``: ``huggingface_hub.hf_hub_download`` or a function of the same arguments. Raises UserError when it fails.
    """
    if hub is None:
        import huggingface_hub

        hub = huggingface_hub.hf_hub_download
    for name in published.files:
        try:
            hub(repo_id=published.repository, filename=name, repo_type="dataset", local_dir=into)
        except Exception as error:  # the hub raises a dozen kinds, some from its HTTP library
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise UserError(
                f"{published.repository}/{name}: download stopped ({reason}); run the command again to go on, "
                "or give a directory that has the files with --from"
            ) from None
    return into


def check_files(published: Published, directory: Path) -> None:
    """Raises UserError for a file that is missing or whose md5 sum differs from the published one."""
    for name, expected in published.files.items():
        file = directory / name
        if not file.is_file():
            there = [path.name for path in directory.iterdir()] if directory.is_dir() else []
            hint = nearest(name, there) if there else "(nothing is there)"
            raise UserError(
                f"{directory}: no file '{name}'; {published.name} needs {', '.join(published.files)} {hint}"
            )
        if expected is not None and (found := _md5(file)) != expected:
            raise UserError(
                f"{file}: md5 {found}, published {expected}: damaged or another version, not used; "
                "remove the file and run the command again"
            )


def fetch(
    name: str, root: Path | None = None, source: Path | None = None, overwrite: bool = False, progress: bool = False
) -> str:
    """Make a published set below the data root, from the files in ``source`` or from the hub.

    Returns:
        The report in a few lines.

    Raises:
        UserError: no set of this name, one that exists already, or files that cannot be downloaded or used.
    """
    if name not in SETS:
        raise UserError(f"no published data set '{name}'; {nearest(name, SETS)}")
    published, out = SETS[name], data_root(root) / name
    check_out(out, overwrite)  # before anything is downloaded
    directory = source or download(published, out.parent / "downloads" / name)
    check_files(published, directory)
    from ctr_pe.data.sources.published import read_published

    dataset = read_published(directory, published, out, overwrite, progress)
    rows = ", ".join(f"{split} {count:,}" for split, count in dataset.rows.items())
    return "\n".join([f"{dataset.path}: {rows} rows", *(f"note: {note}" for note in published.notes)])


def _md5(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
