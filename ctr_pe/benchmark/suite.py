"""A suite: a table of a paper as grids of runs, in YAML (``config/benchmark/*.yaml``)."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ctr_pe.config import load_yaml, packaged_yaml, parse_yaml
from ctr_pe.errors import UserError, explain, nearest

FOLDER = "benchmark"


class Grid(BaseModel):
    """Every model with every encoding on every data set, under every combination of ``vary``.

    ``set``: hyper-parameters that replace those of the model's config; ``vary``: several values each.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    models: list[str] = Field(min_length=1)
    encodings: list[str] = Field(min_length=1)
    datasets: list[str] = Field(min_length=1)
    set: dict[str, Any] = {}
    vary: dict[str, list[Any]] = {}


class Suite(BaseModel):
    """What ``ctr-pe benchmark --suite`` runs. ``published``: a file of ``config/published`` to print beside it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    title: str
    protocol: Literal["heldout", "paper"] = "heldout"
    seeds: int = Field(5, ge=1)
    published: str | None = None
    grids: list[Grid] = Field(min_length=1)


@dataclass(frozen=True)
class Cell:
    """One row of the table, whatever the seed. ``varied``: what distinguishes it beside model, data set, encoding."""

    model: str
    dataset: str
    pe: str
    varied: tuple[tuple[str, Any], ...] = ()
    fixed: tuple[tuple[str, Any], ...] = ()

    @property
    def overrides(self) -> dict[str, Any]:
        return {**dict(self.fixed), **dict(self.varied)}


def suites() -> dict[str, str]:
    """Text of every suite that comes with the package, by name."""
    return packaged_yaml(FOLDER)


def load_suite(name: str) -> Suite:
    """A suite that comes with the package, or a YAML file.

    Raises:
        UserError: there is none of this name, or it is not one.
    """
    if Path(name).suffix in (".yaml", ".yml"):
        return parse_suite(load_yaml(name), name)
    shipped = suites()
    if name not in shipped:
        raise UserError(f"--suite {name}: no such suite, a file ends with .yaml: {nearest(name, shipped)}")
    return parse_suite(parse_yaml(shipped[name], name), name)


def parse_suite(content: Any, source: str) -> Suite:
    """Raises UserError with the first problem; ``source`` is its name there."""
    try:
        return Suite.model_validate(content)
    except ValidationError as error:
        raise UserError(f"{source}: {explain(error.errors()[0], Suite, Grid)}") from None


def cells(suite: Suite, dataset: str | None = None, extra: Mapping[str, Any] | None = None) -> list[Cell]:
    """The rows of the table, in the order of the suite, each once.

    Args:
        dataset: takes the place of the suite's data sets.
        extra: hyper-parameters that replace the suite's own.
    """
    found: dict[Cell, None] = {}
    extra = dict(extra or {})
    for grid in suite.grids:
        fixed = {key: value for key, value in {**grid.set, **extra}.items() if key not in grid.vary or key in extra}
        vary = {key: values for key, values in grid.vary.items() if key not in extra}
        for name, model in itertools.product([dataset] if dataset else grid.datasets, grid.models):
            for values in itertools.product(*vary.values()):
                for pe in grid.encodings:
                    varied = tuple(zip(vary, _hashable(values), strict=True))
                    found[Cell(model, name, pe, varied, tuple(zip(fixed, _hashable(fixed.values()), strict=True)))] = (
                        None
                    )
    return list(found)


def _hashable(values: Any) -> list[Any]:
    return [tuple(value) if isinstance(value, list) else value for value in values]


__all__ = ["Cell", "Grid", "Suite", "cells", "load_suite", "parse_suite", "suites"]
