"""The explorer: some users' histories, and what attention each encoding gives their items for two targets.

A user's two targets are an item that was clicked and one that was not, from the test rows, scored by the runs of one
seed. B rows, K = longest + 1 offsets.
"""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import polars as pl
import torch
from torch import Tensor

from ctr_pe.data.dataset import Dataset
from ctr_pe.data.loader import BatchLoader
from ctr_pe.reporting.figures.measure import Attention, measure
from ctr_pe.reporting.figures.runs import Wanted, benchmark_command, drawn
from ctr_pe.reporting.html import Options
from ctr_pe.sequence.batch import JaggedBatch
from ctr_pe.study.differences import Setting
from ctr_pe.study.store import Result, Store
from ctr_pe.utils.errors import UserError

LONGEST = 100
"""Newest items of a history that are shown."""


def explorer(options: Options, store: Store, setting: Setting) -> dict[str, Any]:
    """Users with their histories, newest item first, and per encoding the prediction, the attention weights and the
    contextual positions; or ``missing``: why there are none, and what adds them."""
    folder = options.weights or options.results
    runs = _with_weights(store if folder == options.results else Store(folder), setting)
    if not runs:
        return {"missing": _add_weights(options, setting)}
    first = runs[0]
    names = [result.pe for result in runs]
    wanted = Wanted(names, folder, first.model, first.dataset, first.seed, first.params, options.data_root)
    try:
        dataset, found = drawn(wanted)
        models = {one.pe: one.after for one in found}
        users, rows = choose(dataset, options.users)
    except UserError as error:
        reason = f"{str(error)[:1].upper()}{str(error)[1:]}."
        return {"missing": f"The explorer needs the data set and the weights of the runs. {reason}"}
    if not users:
        return {"missing": f"No user of {dataset.dataset_id}'s test rows has a history, a clicked item and another."}
    model = models[found[0].pe]
    batch = BatchLoader(model.feature_map, dataset.split("test"), split="valid").batch(np.asarray(rows))
    targets, histories = named(dataset, model, batch)
    seen = {pe: look(dataset, model, batch) for pe, model in models.items()}
    labels = [label for label in seen[first.pe][1] if all(label in units for _, units in seen.values())]
    if not labels:
        return {"missing": f"No attention of {first.model} reads {dataset.groups[0].history[0]} item by item."}

    def side(row: int) -> dict[str, Any]:
        return {
            "target": targets[row],
            "history": histories[row],
            "scores": {pe: scores[row] for pe, (scores, _) in seen.items()},
            "units": [{pe: units[label][row] for pe, (_, units) in seen.items()} for label in labels],
        }

    units = {pe: [of[label][0] for label in labels] for pe, (_, of) in seen.items()}
    without = [pe for pe in setting.runs if pe not in seen]
    return {
        "seed": first.seed,
        "encodings": list(seen),
        "contextual": [pe for pe, of in units.items() if any(unit["positions"] is not None for unit in of)],
        "softmax": all(unit["softmax"] for of in units.values() for unit in of),
        "units": labels,
        "fields": list(dataset.groups[0].target),
        "users": [
            {"user": user, "clicked": side(2 * number), "sampled": side(2 * number + 1)}
            for number, user in enumerate(users)
        ],
        "note": _add_weights(options, setting, without) if without else "",
    }


def choose(dataset: Dataset, count: int) -> tuple[list[str], Sequence[int]]:
    """Up to ``count`` users who have a history and both kinds of test rows, from short histories to long ones; and the
    numbers of two test rows for each: clicked, not clicked, with the same history where there are such rows."""
    if dataset.group_id is None:
        return [], []
    rows = (
        dataset.scan("test")
        .with_row_index("row")
        .select(
            pl.col("row").cast(pl.Int64),
            label=pl.col(dataset.label),
            user=pl.col(dataset.group_id),
            length=pl.col(dataset.groups[0].history[0]).list.len().cast(pl.Int64),
        )
        .filter(pl.col("length") > 0)
        .collect()
    )
    both = (
        rows.group_by("user")
        .agg(length=pl.col("length").max(), clicks=pl.col("label").sum(), rows=pl.len())
        .filter((pl.col("clicks") > 0) & (pl.col("clicks") < pl.col("rows")))
        .sort("length", "user")
    )
    at = np.linspace(0, max(0, len(both) - 1), min(count, len(both))).round().astype(int)
    users, found = [], []
    for user in both["user"].gather(at.tolist()):
        clicked = rows.filter(user=user, label=1).row(-1, named=True)
        nearest = [(pl.col(name) - clicked[name]).abs() for name in ("length", "row")]
        other = rows.filter(user=user, label=0).sort(nearest).row(0, named=True)
        users.append(str(user))
        found += [clicked["row"], other["row"]]
    return users, found


def _with_weights(store: Store, setting: Setting) -> list[Result]:
    """The runs of the seed at which most encodings have weights."""
    kept = [result for result in setting.results if store.weights(result.key).exists()]
    counts = Counter(result.seed for result in kept)
    seed = min(counts, key=lambda seed: (-counts[seed], seed), default=None)
    return [result for result in kept if result.seed == seed]


def _add_weights(options: Options, setting: Setting, only: Sequence[str] = ()) -> str:
    """What to say where weights are missing: of all encodings, or of some."""
    results = setting.results
    seed = min(result.seed for result in results)
    runs = [result for result in results if result.seed == seed]
    folder = f"{options.results}-weights"
    command = benchmark_command(runs, "--keep-weights", "--out", folder, root=options.data_root)
    again = shlex.join(["ctr-pe", "report", str(options.results), "--weights", folder])
    what = f"of {', '.join(only)} " if only else ""
    return f"The trained weights {what}were not kept. `{command}` makes them, and `{again}` shows them here."


def named(dataset: Dataset, model: Any, batch: JaggedBatch) -> tuple[list[Any], list[Any]]:
    """Per row: the target's fields by name, [item, category, …]; and the history, newest first: for each item
    [seconds before the request or None, item, category, …]."""
    group = dataset.groups[0]
    vocabulary = json.loads((dataset.path / "feature_vocab.json").read_text(encoding="utf-8"))
    names = {field: {number: token for token, number in vocabulary.get(field, {}).items()} for field in group.target}

    def name(field: str, number: int) -> str:
        return str(names[field].get(number, number)).replace("__OOV__", "unknown")

    def items(values: Sequence[Tensor]) -> list[list[str]]:
        """One per row, from the target's fields."""
        columns = ([name(field, int(value)) for value in of] for field, of in zip(group.target, values, strict=True))
        return list(map(list, zip(*columns, strict=True)))

    histories = []
    for row, length in enumerate(batch.lengths[group.history[0]].tolist()):
        newest_first = np.arange(length)[::-1][: min(LONGEST, model.groups[0].max_len)].copy()
        ages = batch[group.age][row, newest_first].tolist() if group.age else [None] * len(newest_first)
        events = items([batch[field][row, newest_first] for field in group.history])
        histories.append([[age, *item] for age, item in zip(ages, events, strict=True)])
    return items([batch[field] for field in group.target]), histories


def look(dataset: Dataset, model: Any, batch: JaggedBatch) -> tuple[list[float], dict[str, list[dict[str, Any]]]]:
    """The model's predictions (B,), and by name what its attention units that read the history of the first field group
    do in each row."""
    with torch.inference_mode():
        scores = model.eval()(batch)["y_pred"].view(-1).tolist()
    read = batch.lengths[dataset.groups[0].history[0]].clamp(max=model.groups[0].max_len).tolist()
    units = {unit.label: _items(unit, read) for unit in measure(model, batch, min(LONGEST, max(read)))}
    return scores, {label: rows for label, rows in units.items() if rows is not None}


def _items(unit: Attention, read: Sequence[int]) -> list[dict[str, Any]] | None:
    """Per row the weights of the ``read`` items of the history, newest first, and their contextual positions if there
    are any; None if the unit reads another history.

    The query is the target, outside of the sequence or in it (then it has offset 0), or it is the newest item itself.
    """
    known = [effects.positions for effects in unit.effects if effects is not None and effects.positions is not None]
    found = []
    for row, items in enumerate(read):
        besides = int(unit.items[row]) - items
        if besides not in (0, 1):
            return None
        own = besides == 0 and not bool(unit.weights[row, 0].isnan())
        newest_first = slice(0 if own else 1, min(LONGEST, items) + (0 if own else 1))
        found.append(
            {
                "softmax": unit.softmax,
                "items": int(unit.items[row]),
                "weights": _rounded(unit.weights[row, newest_first]),
                "positions": _rounded(known[0][row, :, newest_first].mean(0)) if known else None,
            }
        )
    return found


def _rounded(values: Tensor) -> list[float | None]:
    return [None if value != value else float(f"{value:.5g}") for value in values.tolist()]
