"""A suite: a table of a paper as grids of runs, in YAML (``config/benchmark/*.yaml``)."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from ctr_pe.config.schema import Place
from ctr_pe.config.yaml import load_yaml, packaged_yaml, parse_yaml
from ctr_pe.pe import available_pes
from ctr_pe.utils.errors import UserError, explain, nearest

# Keys that a benchmark sets itself, and what the error recommends.
OWN_KEYS = {
    "position_encoding": "use --pe",
    "model": "use --model",
    "dataset_id": "use --dataset",
    "seed": "use --seed",
    "gpu": "use --gpu",
    "debug_mode": "a benchmark has none",
    "target_field": "the data set decides it",
    "sequence_field": "the data set decides it",
    "age_field": "the data set decides it",
    "model_id": "the benchmark decides it",
    "model_root": "checkpoints live in a temporary folder",
    "track": "use --track",
}


Task = Literal["click", "next-item"]


class Grid(BaseModel):
    """Every model with every encoding on every data set, under every combination of ``vary``.

    ``encodings``: names, or ``all``. ``set``: hyper-parameters that replace those of the model's config; ``vary``:
    several values each, every combination in a row of its own; ``tune``: several values each, and every row takes the
    combination that is best for it on the validation rows (:mod:`ctr_pe.study.trials`).
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    models: list[str] = Field(min_length=1)
    encodings: list[str] | str = Field(min_length=1)
    datasets: list[Place] = Field(min_length=1)
    set: dict[str, Any] = {}
    vary: dict[str, Annotated[list[Any], Field(min_length=1)]] = {}
    tune: dict[str, Annotated[list[Any], Field(min_length=1)]] = {}

    @field_validator("encodings")
    @classmethod
    def _named_or_all(cls, value: list[str] | str) -> list[str] | str:
        if isinstance(value, str) and value != "all":
            raise ValueError("must be a list of encodings, or all")
        return value

    @model_validator(mode="after")
    def _keys(self) -> Self:
        parts = {"set": self.set, "vary": self.vary, "tune": self.tune}
        for name, given in parts.items():
            for key in given.keys() & OWN_KEYS.keys():
                raise ValueError(f"{name} {key}: {OWN_KEYS[key].replace('use --', 'it is its own key, or --')}")
        for (one, given), (other, also) in itertools.combinations(parts.items(), 2):
            for key in given.keys() & also.keys():
                raise ValueError(f"{key} is both in {one} and in {other}")
        return self


class Suite(BaseModel):
    """What ``ctr-pe benchmark --suite`` runs. ``published``: a file of ``config/published`` to print beside it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    title: str
    task: Task = "click"
    protocol: Literal["heldout", "paper"] = "heldout"
    seeds: int = Field(default=5, ge=1, le=10_000, strict=True)
    published: str | None = None
    grids: list[Grid] = Field(min_length=1)


@dataclass(frozen=True)
class Cell:
    """One row of the table, for all seeds. ``varied``: the values of ``vary``; ``fixed``: those of ``set``; ``tune``:
    what is still to be chosen, several values per key; ``search``: among how many settings
    (:mod:`ctr_pe.study.halving`); ``chosen``: what was."""

    model: str
    dataset: str
    pe: str
    varied: Mapping[str, Any] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    tune: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    search: int = 0
    chosen: Mapping[str, Any] = field(default_factory=dict)

    def __hash__(self) -> int:
        return hash((self.model, self.dataset, self.pe))  # the values may be lists

    @property
    def overrides(self) -> dict[str, Any]:
        """Hyper-parameters that replace those of the model's config."""
        return {**self.fixed, **self.varied, **self.chosen}

    @property
    def shown(self) -> dict[str, Any]:
        """Hyper-parameters that tell it from other rows; lists and mappings as JSON."""
        values = {**self.varied, **self.chosen}
        return {key: json.dumps(one) if isinstance(one, (list, dict)) else one for key, one in values.items()}

    def with_chosen(self, chosen: Mapping[str, Any]) -> Cell:
        """It with nothing left to choose."""
        return replace(self, tune={}, search=0, chosen=chosen)

    def combinations(self) -> list[dict[str, Any]]:
        """Every combination of the values to tune; an empty one, if there are none."""
        return [dict(zip(self.tune, one, strict=True)) for one in itertools.product(*self.tune.values())]

    def __str__(self) -> str:
        return " ".join([self.model, self.pe, self.dataset, *(f"{key}={value}" for key, value in self.shown.items())])


def load_suite(name: str) -> Suite:
    """A suite that comes with the package, or a YAML file.

    Raises:
        UserError: there is no such suite, or the file is not a valid one.
    """
    if Path(name).suffix in (".yaml", ".yml"):
        return parse_suite(load_yaml(name), name)
    shipped = packaged_yaml("benchmark")
    if name not in shipped:
        raise UserError(f"--suite {name}: no such suite, a file ends with .yaml: {nearest(name, shipped)}")
    return parse_suite(parse_yaml(shipped[name], name), name)


def parse_suite(content: Any, source: str) -> Suite:
    """Raises UserError with the first problem; ``source`` is its name there."""
    try:
        return Suite.model_validate(content)
    except ValidationError as error:
        raise UserError(f"{source}: {explain(error.errors()[0], Suite, Grid)}") from None


def cells(
    suite: Suite,
    dataset: str | None = None,
    extra: Mapping[str, Any] | None = None,
    tune: Mapping[str, Sequence[Any]] | None = None,
) -> list[Cell]:
    """The rows of the table, in the order of the suite, each once.

    Args:
        dataset: replaces the suite's data sets.
        extra: hyper-parameters that replace the suite's own.
        tune: values to tune, likewise.
    """
    extra, tune = extra or {}, tune or {}
    found: dict[Cell, None] = {}
    for grid in suite.grids:
        own = (grid.set, grid.vary, grid.tune)
        fixed, vary, tuned = ({key: one for key, one in of.items() if key not in {**extra, **tune}} for of in own)
        encodings = available_pes() if grid.encodings == "all" else grid.encodings
        datasets = [dataset] if dataset else grid.datasets
        for name, model, values in itertools.product(datasets, grid.models, itertools.product(*vary.values())):
            varied = dict(zip(vary, values, strict=True))
            found |= {Cell(model, name, pe, varied, {**fixed, **extra}, {**tuned, **tune}): None for pe in encodings}
    return list(found)
