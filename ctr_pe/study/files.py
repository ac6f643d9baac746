"""The files of a store's tables: ``table.md``, ``table.csv``, ``table.tex``, those of a suite, and the forest plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ctr_pe.study.differences import Setting
from ctr_pe.study.forest import write_forest
from ctr_pe.study.latex import as_latex
from ctr_pe.study.rendering import Table, as_csv, as_markdown
from ctr_pe.study.store import Store
from ctr_pe.study.tables import make_tables
from ctr_pe.utils.errors import UserError


def write_files(store: Store, settings: Sequence[Setting], suite: Sequence[Table] = ()) -> list[str]:
    """Write them beside the store's results; their names.

    Raises:
        UserError: a file cannot be written.
    """
    tables = [table for setting in settings for table in make_tables(setting)]
    files = {**texts(tables), "table.tex": as_latex(tables), **(texts(suite, "suite") if suite else {})}
    return [*write_texts(store.path, files), *write_forest(store, settings)]


def texts(tables: Sequence[Table], name: str = "table") -> dict[str, str]:
    """File name -> the tables as Markdown and as CSV."""
    return {f"{name}.md": as_markdown(tables), f"{name}.csv": as_csv(tables)}


def write_texts(folder: Path, files: Mapping[str, str]) -> list[str]:
    """Write them; their names. Raises UserError if one cannot be written."""
    for name, text in files.items():
        try:
            (folder / name).write_text(text, encoding="utf-8")
        except OSError as error:
            raise UserError(f"{folder / name}: {error.strerror}") from None
    return list(files)
