"""Whole training steps: forward, loss with regularisation, backward, clipping and optimiser, as train_step() does them.

Both sides get the same rows: ours as our loader gives them, trimmed to the batch's longest history, FuxiCTR's and the
padded models' in 100 slots.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmark.speed import data, models
from benchmark.speed.cases import BY_ARITHMETIC, Settings
from benchmark.speed.timing import Figure, alternate, alternate_all, say
from ctr_pe.sequence.batch import JaggedBatch


def step(settings: Settings, model: str, full: bool = False) -> Figure:
    """FuxiCTR's step over ours, with the configuration's own encoding."""
    size = _size(settings)
    dataset = data.write(settings.folder / "amazon", data.draw(4 * size, full))
    mine = models.ours(model, dataset, settings.gpu)
    theirs, against = models.baseline(model, dataset, settings.gpu, settings.zoo)
    trimmed, padded = _batches(dataset, mine, size)
    say(f"{model}, batches of {size} rows, against {against}")
    timed = alternate(
        models.steps(mine, trimmed), models.steps(theirs, padded), settings.repeats, wait=models.wait(settings.gpu)
    )
    return timed.speedup(against, batch_size=size, items_per_row=_items_per_row(trimmed))


def encodings(settings: Settings, each: Sequence[Mapping[str, Any]]) -> list[Figure]:
    """Steps with each encoding over steps without, of one model and shape of histories.

    Full histories come in batches of a quarter, which still have three times the items. Encodings in ``BY_ARITHMETIC``
    may take 1.2 times the ratio of the multiply-adds.
    """
    ((model, full),) = {(options["model"], options["full"]) for options in each}
    names = [options["pe"] for options in each]
    ages = any(map(models.needs_age, names))
    size = _size(settings) // (4 if full else 1)
    dataset = data.write(settings.folder / "amazon", data.draw(4 * size, full), ages=ages)
    without, *those = (models.ours(model, dataset, settings.gpu, pe=name) for name in ("none", *names))
    batches, _ = _batches(dataset, without, size)
    say(f"{model} with {', '.join(names)}, batches of {size} rows, against none")
    timed = alternate_all(
        [models.steps(one, batches) for one in those],
        models.steps(without, batches),
        settings.size(31, settings.repeats),  # a few hundredths decide, and single steps vary by tenths
        warm_up=2,
        wait=models.wait(settings.gpu),
    )
    shape = {"batch_size": size, "items_per_row": _items_per_row(batches)}
    least = multiply_adds(without, batches[0])
    figures = []
    for name, one, times in zip(names, those, timed, strict=True):
        arithmetic = multiply_adds(one, batches[0]) / least
        goal = 1.2 * arithmetic if name in BY_ARITHMETIC else None
        figures.append(times.overhead("none", goal=goal, **shape, multiply_adds=arithmetic))
    return figures


def lazy_tables(settings: Settings, table_optimizer: str, items: int) -> Figure:
    """A step of TIN with Adam over one that updates only the rows of embedding tables that the batch has."""
    size, items = _size(settings), settings.size(items, data.ITEMS)
    dataset = data.write(settings.folder / "amazon", data.draw(4 * size), items=items)
    lazy = models.ours("TIN", dataset, settings.gpu, table_optimizer=table_optimizer)
    dense = models.ours("TIN", dataset, settings.gpu)
    batches, _ = _batches(dataset, dense, size)
    say(f"TIN with a table of {items:,} items, {table_optimizer}, batches of {size} rows, against Adam")
    wait = models.wait(settings.gpu)
    timed = alternate(models.steps(lazy, batches), models.steps(dense, batches), settings.repeats, 2, wait=wait)
    return timed.speedup("Adam", batch_size=size, items=items)


def columns(settings: Settings, model: str, further: int) -> Figure:
    """A step with ``further`` fields of 8 numbers in target and history over one without them."""
    size = _size(settings)
    rows, calls, arithmetic = data.draw(4 * size), [], []
    for count in (further, 0):
        dataset = data.write(settings.folder / f"amazon_{count}", rows, further=count)
        own = models.ours(model, dataset, settings.gpu)
        batches, _ = _batches(dataset, own, size)
        calls.append(models.steps(own, batches))
        arithmetic.append(multiply_adds(own, batches[0]))
    say(f"{model} with {further} further fields, batches of {size} rows, against none")
    timed = alternate(calls[0], calls[1], settings.size(31, settings.repeats), wait=models.wait(settings.gpu))
    return timed.overhead("none", batch_size=size, multiply_adds=arithmetic[0] / arithmetic[1])


def multiply_adds(model: Any, batch: Mapping[str, torch.Tensor]) -> int:
    """Of one training step, counted in its matrix products."""
    counter = FlopCounterMode(display=False)
    with counter:
        model.train_step(batch)
    return int(counter.get_total_flops()) // 2


def _size(settings: Settings) -> int:
    return settings.size(1024, 64)


def _batches(dataset: Any, model: Any, size: int) -> tuple[list[JaggedBatch], list[data.Batch]]:
    trimmed, padded = zip(*data.batches(dataset, model.feature_map, size, 4), strict=True)
    return list(trimmed), list(padded)


def _items_per_row(batches: list[JaggedBatch]) -> float:
    return float(torch.cat([batch.lengths[data.HISTORY[0]] for batch in batches]).double().mean())
