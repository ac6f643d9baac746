"""Makes the tables of the published results again, from their runs and what these say of each user: make tables"""

from __future__ import annotations

from pathlib import Path

from benchmark import evidence, variants, where
from ctr_pe.study import suite_tables
from ctr_pe.study.differences import settings
from ctr_pe.study.files import write_files
from ctr_pe.study.rendering import Table
from ctr_pe.study.store import FILE, Store

RESULTS = Path(__file__).parent / "results"


def main(results: Path = RESULTS) -> None:
    for file in sorted(results.glob(f"*/{FILE}")):
        store = Store(file.parent)
        print(f"{store.path.name}: {', '.join(write_files(store, settings(store), of_suite(store)))}")
        if any((store.path / "users").glob(f"*{where.FACTS}")):
            where.write(store.path)


def of_suite(store: Store) -> list[Table]:
    """The tables of the suite whose runs these are, if that varies something."""
    suite = variants.suite_of(store)
    if suite is None:
        return []
    runs = variants.runs_of(store, suite)
    return suite_tables.make(suite, store, {cell: [run.key for run in of.values()] for cell, of in runs.items()})


if __name__ == "__main__":
    main()
    evidence.main()
