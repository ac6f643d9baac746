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
from ctr_pe.config.yaml import packaged_yaml, parse_yaml
from ctr_pe.evaluation.metrics import METRICS
from ctr_pe.evaluation.ranking import parts_of
from ctr_pe.evaluation.users import Users
from ctr_pe.study import next_item
from ctr_pe.study.differences import settings
from ctr_pe.study.rendering import Table
from ctr_pe.study.store import FILE, Store
from ctr_pe.study.tables import make_suite_tables, write_files
from ctr_pe.study.users import RunDistances, UserStatistics, save, user_statistics

RESULTS = Path(__file__).parent / "results"


def main(results: Path = RESULTS) -> None:
    for file in sorted(results.glob(f"*/{FILE}")):
        store = Store(file.parent)
        runs = store.read()
        if next_item.of_next_items(runs.values()):
            recipes = packaged_yaml("recipe")
            protocols = {name: parse_yaml(recipes[name], name)["protocol"] for name in {key.dataset for key in runs}}
            next_item.write_tables(store, None, {}, protocols)
            print(f"{store.path.name}: table.md, table.csv, table.tex")
            continue
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
        if "next_item" in store.about(data_hash):
            save(users / f"{data_hash}.npz", _of_ranks(store, data_hash))
        elif (found := user_statistics(store, data_hash)).values:
            save(users / f"{data_hash}.npz", replace(found, values={}, published=_distances(found, models)))
    for file in users.glob(f"*{where.FACTS}"):
        file.unlink()


def _distances(found: UserStatistics, models: Mapping[str, str]) -> RunDistances:
    """Between runs of one model; NaN to those of others, with which no table compares them."""
    names = [name for name in found.values if name in models]  # scores may outlive a run's line
    apart = np.array([[models[one] != models[other] for other in names] for one in names])
    distances = {metric: np.where(apart, np.nan, found.distances(names, metric)) for metric in METRICS}
    return RunDistances(names, distances)


def _of_ranks(store: Store, data_hash: str) -> UserStatistics:
    """Of next-item runs whose ranks are there."""
    found = next_item.RankStatistics(store, data_hash)
    of_data = {key: result for key, result in store.read().items() if key.data_hash == data_hash}
    runs = {key: result for key, result in of_data.items() if found.ranks(key) is not None}
    of_users = [metric for metric in next_item.metrics_of(runs.values()) if parts_of(metric)[0] != "COV"]
    distances = RunDistances([key.name for key in runs], {name: found.distances([*runs], name) for name in of_users})
    return UserStatistics(Users(found.users, found.users), published=distances)


if __name__ == "__main__":
    for folder in sys.argv[1:]:
        publish(Store(Path(folder)))
    main()
    evidence.main()
