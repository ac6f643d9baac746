"""The runs that a published folder has of a suite with something varied: results/NAME of --suite NAME."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ctr_pe.config.yaml import packaged_yaml
from ctr_pe.study.benchmark import run_params
from ctr_pe.study.differences import Runs
from ctr_pe.study.store import Result, Store
from ctr_pe.study.suite import Cell, Suite, cells, load_suite


def suite_of(store: Store) -> Suite | None:
    """The suite of this name, if there is one that varies something."""
    suite = load_suite(store.path.name) if store.path.name in packaged_yaml("benchmark") else None
    return suite if suite and any(grid.vary for grid in suite.grids) else None


def runs_of(store: Store, suite: Suite) -> dict[Cell, Runs]:
    """By cell and seed, told by those hyper-parameters that the suite sets or varies: the others may be another
    version's. Raises ValueError if two runs are of one cell and seed."""
    keys = {key for cell in cells(suite) for key in cell.overrides}
    by_values: dict[str, dict[int, Result]] = {}
    for run in store.read().values():
        of_cell = by_values.setdefault(_values(run.model, run.dataset, run.pe, run.params, keys), {})
        if of_cell.setdefault(run.seed, run) is not run:
            raise ValueError(f"{store.path}: two runs of {run.model} {run.pe} at seed {run.seed} under like settings")
    return {
        cell: by_values.get(_values(cell.model, cell.dataset, cell.pe, _params(cell), keys), {})
        for cell in cells(suite)
    }


def _params(cell: Cell) -> dict[str, Any]:
    return run_params(cell.model, cell.dataset, cell.overrides)


def _values(model: str, dataset: str, pe: str, params: Mapping[str, Any], keys: set[str]) -> str:
    """Equal for runs of one cell."""
    return json.dumps([model, dataset, pe, {key: params[key] for key in sorted(keys & params.keys())}])
