"""The files of a store's tables: ``table.md``, ``table.csv``, ``table.tex``, those of a suite, and the forest plot."""

from __future__ import annotations

from collections.abc import Sequence

from ctr_pe.errors import UserError
from ctr_pe.study.differences import Setting
from ctr_pe.study.forest import write_forest
from ctr_pe.study.latex import as_latex
from ctr_pe.study.rendering import Table, as_csv, as_markdown
from ctr_pe.study.store import Store
from ctr_pe.study.tables import make_tables


def write_files(store: Store, settings: Sequence[Setting], suite: Sequence[Table] = ()) -> list[str]:
    """Write them beside the store's results; their names.

    Raises:
        UserError: a file cannot be written.
    """
    tables = [table for setting in settings for table in make_tables(setting)]
    files = {"table.md": as_markdown(tables), "table.csv": as_csv(tables), "table.tex": as_latex(tables)}
    if suite:
        files |= {"suite.md": as_markdown(suite), "suite.csv": as_csv(suite)}
    for name, text in files.items():
        try:
            (store.path / name).write_text(text, encoding="utf-8")
        except OSError as error:
            raise UserError(f"{store.path / name}: {error.strerror}") from None
    return [*files, *write_forest(store, settings)]
