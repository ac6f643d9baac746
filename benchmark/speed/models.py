"""Ours and the baseline of a model, with the hyper-parameters of its published configuration on Amazon Electronics."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmark.speed.data import HISTORY, TARGET
from ctr_pe.data.dataset import Dataset
from ctr_pe.fuxictr.experiment import model_section
from ctr_pe.pe import build_pe, pe_options
from ctr_pe.training import Run, build_model
from ctr_pe.training.source import prefetch_plans
from ctr_pe.training.step_graphs import StepGraphs

CONFIG = Path(__file__).resolve().parents[2] / "config"
MAX_GRADIENT_NORM = 10.0  # FuxiCTR's default, which fit() sets
IN_A_ROW = 20


def section(model: str) -> dict[str, Any]:
    """The published configuration."""
    return model_section(CONFIG, f"{model}_amazonelectronics_x1")[0]


def ours(model: str, dataset: Dataset, gpu: int = -1, pe: str | None = None, **changes: Any) -> Any:
    """Our model; ``pe`` instead of the configuration's encoding."""
    params = {**section(model), **changes}
    run = Run(model, dataset.path, pe or params["position_encoding"], seed=1, params=params, gpu=gpu)
    made = ready(build_model(run, dataset, str(dataset.path.parent)))
    made.step_graphs = StepGraphs.of(made)  # as fit() has it
    return made


def baseline(model: str, dataset: Dataset, gpu: int = -1, zoo: Path | None = None, **changes: Any) -> tuple[Any, str]:
    """FuxiCTR's class from a checkout, or else the padded one, and what to call it."""
    found = None if zoo is None else _fuxictr(model, zoo)
    if found is None:
        from benchmark.speed import padded

        found, name = getattr(padded, model), f"padded {model}"
    else:
        name = f"{model} of FuxiCTR {version('fuxictr')}"
    params = {**section(model), **changes, "model_root": str(dataset.path.parent), "verbose": 0}
    params = {key: value for key, value in params.items() if key not in ("position_encoding", *pe_options())}
    torch.manual_seed(1)
    feature_map = dataset.feature_map(params["embedding_dim"])
    return ready(found(feature_map, model_id=name, gpu=gpu, **_fields(model), **params)), name


def ready(model: Any) -> Any:
    """In the state in which fit() makes its steps."""
    model._max_gradient_norm = MAX_GRADIENT_NORM
    return model.train()


def steps(model: Any, batches: Sequence[Mapping[str, Tensor]]) -> Callable[[int], object]:
    """One training step on the batch of a number: forward, loss, backward, clipping, optimiser.

    On a GPU ``IN_A_ROW`` of them, on batches that come from the CPU, as in training: there the host prepares a step
    while the device computes the one before, and ours plans batches in another thread.
    """
    if model.device.type == "cpu":
        return lambda number: model.train_step(batches[number % len(batches)])

    def in_a_row(number: int) -> None:
        for batch in prefetch_plans(model, [batches[index % len(batches)] for index in range(IN_A_ROW)]):
            model.train_step(batch)

    return in_a_row


def wait(gpu: int) -> Callable[[], object] | None:
    """Waits for the device; None for the CPU, which needs no waiting."""
    return partial(torch.cuda.synchronize, gpu) if gpu >= 0 else None


def needs_age(pe: str) -> bool:
    """Whether an encoding wants event times."""
    fields: dict[str, Any] = {"field_dims": (4, 4), "field_sizes": (9, 9)}
    return build_pe(pe, 8, 4, **fields).about.needs_age


def _fields(model: str) -> Mapping[str, Any]:
    prefix = "" if model == "DMIN" else f"{model.lower()}_"
    return {f"{prefix}target_field": [TARGET], f"{prefix}sequence_field": [HISTORY], f"{prefix}neg_seq_field": []}


def _fuxictr(model: str, zoo: Path) -> Any:
    """FuxiCTR's class, or None; ``zoo`` is a checkout or its model_zoo."""
    for file in (zoo / model / "src" / f"{model}.py", zoo / "model_zoo" / model / "src" / f"{model}.py"):
        if file.is_file():
            spec = importlib.util.spec_from_file_location(f"fuxictr_{model.lower()}", file)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            return getattr(module, model)
    return None
