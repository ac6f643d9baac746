"""A training step against what its own arithmetic takes at the rate of plain matrix products, measured in turn."""

from __future__ import annotations

import statistics

import torch

from benchmark.speed import data, models
from benchmark.speed.cases import Settings
from benchmark.speed.timing import Figure, alternate, say
from benchmark.speed.training_steps import multiply_adds


def arithmetic(settings: Settings, model: str) -> Figure:
    """Seconds of a step over multiply-adds of a step at the rate of a square product in float32."""
    size, side = settings.size(1024, 64), settings.size(4096, 512)
    dataset = data.write(settings.folder / "amazon", data.draw(4 * size))
    mine = models.ours(model, dataset, settings.gpu)
    batches = [trimmed for trimmed, _ in data.batches(dataset, mine.feature_map, size, 4)]
    device = mine.device
    a, b, out = (torch.randn(side, side, device=device) for _ in range(3))
    say(f"{model}, batches of {size} rows, against a product of {side} x {side} matrices")
    timed = alternate(
        models.steps(mine, batches),
        lambda _: torch.mm(a, b, out=out),
        settings.repeats,
        warm_up=2,
        least_seconds=0 if settings.quick else 15,
        wait=models.wait(settings.gpu),
    )
    counts = [multiply_adds(mine, batch) for batch in batches]
    seconds = [
        counts[number % len(counts)] * product / side**3 for number, product in enumerate(timed.baseline)
    ]  # that the step's arithmetic takes
    return Figure(
        [step / least for step, least in zip(timed.ours, seconds, strict=True)],
        statistics.median(timed.ours),
        statistics.median(seconds),
        against="its multiply-adds at the rate of a matrix product",
        details={
            "multiply_adds": statistics.fmean(counts),
            "gflops": 2e-9 * side**3 / statistics.median(timed.baseline),
            "batch_size": size,
        },
    )
