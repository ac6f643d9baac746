"""What a training step asks of an accelerator, counted on a device that is not there
(:mod:`tests.support.pretended_device`).

It is taken to have Triton's kernel for recurrences, as a CUDA device has.
"""

from __future__ import annotations

from unittest import mock

from benchmark.speed import data, models
from benchmark.speed.cases import Settings
from benchmark.speed.timing import Figure
from ctr_pe.ops.recurrence import gpu
from tests.support.pretended_device import Counted, elsewhere


def launches(settings: Settings, model: str, pe: str) -> Figure:
    """Kernels of forward, backward, clipping and optimiser."""
    counted = step(settings, model, pe)
    return Figure([counted.launches], unit="", details=dict(counted.kernels))


def waits(settings: Settings, model: str) -> Figure:
    """How often the host waits for the device in a step with CAPE."""
    counted = step(settings, model, "cape")
    return Figure([counted.waits], unit="", details=dict(counted.waited))


def step(settings: Settings, model: str, pe: str) -> Counted:
    """Of a training step, the second: the first makes the optimiser's state."""
    size = settings.size(256, 64)
    dataset = data.write(settings.folder / "amazon", data.draw(2 * size), ages=models.needs_age(pe))
    with elsewhere():
        one = models.ours(model, dataset, 0, pe=pe)
        (first, _), (second, _) = data.batches(dataset, one.feature_map, size, 2)
        one.train_step(first)
    with elsewhere() as counted, mock.patch.object(gpu, "takes", return_value=True):
        one.train_step(second)
    return counted
