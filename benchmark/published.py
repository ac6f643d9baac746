"""Makes the tables of the published results again, from their runs and what these say of the users: make tables

With folders as arguments: first puts what they have of each user into the small form that is published.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmark import evidence, variants, where
from ctr_pe.evaluation.metrics import METRICS
from ctr_pe.study.differences import settings
from ctr_pe.study.rendering import Table
from ctr_pe.study.store import FILE, Store
from ctr_pe.study.tables import make_suite_tables, write_files
from ctr_pe.study.users import RunDistances, UserStatistics, save, user_statistics

RESULTS = Path(__file__).parent / "results"


def main(results: Path = RESULTS) -> None:
    for file in sorted(results.glob(f"*/{FILE}")):
        store = Store(file.parent)
        print(f"{store.path.name}: {', '.join(write_files(store, settings(store), of_suite(store)))}")
        users = store.path / "users"
        if (users / where.PUBLISHED).exists() or any(users.glob(f"*{where.FACTS}")):
            where.write(store.path)


def of_suite(store: Store) -> list[Table]:
    """The tables of the suite whose runs these are, if that varies something."""
    suite = variants.suite_of(store)
    if suite is None:
        return []
    runs = variants.runs_of(store, suite)
    return make_suite_tables(suite, store, {cell: [run.key for run in of.values()] for cell, of in runs.items()})


def publish(store: Store) -> None:
    """In place of what each user adds to each run, keep the distances between runs, and what ``where`` needs."""
    users = store.path / "users"
    if any(users.glob(f"*{where.FACTS}")):
        where.publish(store)
    models = {key.name: key.model for key in store.read()}
    for data_hash in {key.data_hash for key in store.read()}:
        if (found := user_statistics(store, data_hash)).values:
            save(users / f"{data_hash}.npz", replace(found, values={}, published=_distances(found, models)))
    for file in users.glob(f"*{where.FACTS}"):
        file.unlink()


def _distances(found: UserStatistics, models: Mapping[str, str]) -> RunDistances:
    """Between runs of one model; NaN to those of others, with which no table compares them."""
    names = [name for name in found.values if name in models]  # scores may outlive a run's line
    apart = np.array([[models[one] != models[other] for other in names] for one in names])
    distances = {metric: np.where(apart, np.nan, found.distances(names, metric)) for metric in METRICS}
    return RunDistances(names, distances)


if __name__ == "__main__":
    for folder in sys.argv[1:]:
        publish(Store(Path(folder)))
    main()
    evidence.main()
