"""How the next-item task grows with the items and with the length of histories: time and memory of SASRec.

Logs whose users each have as many events as a history holds, of items at random, are made and trained on for some
steps, with the softmax over all items and with a sampled one, and rows of them are ranked against all items. Seconds
are those of one processor, per 1,000 answers of training and 1,000 rows of evaluation; memory is the most that the
process had for itself while it trained and ranked, above what it had before.

examples:
  python -m benchmark.next_item_growth --json benchmark/results/next_item_growth.json   # measure, a quarter of an hour
  python -m benchmark.next_item_growth --draw docs/next_item-growth.png                 # its figure
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import statistics
import sys
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import polars as pl
import torch
from tqdm import tqdm

from benchmark.speed import memory
from ctr_pe.config.yaml import next_item_params
from ctr_pe.data.logs.log import build
from ctr_pe.data.logs.recipe import load_recipe
from ctr_pe.models.sections import model_class
from ctr_pe.training import Run, build_model
from ctr_pe.training.source import DataSource
from ctr_pe.utils.errors import exit_code, no_such_file
from ctr_pe.utils.files import replacing, scratch_folder

RESULTS = Path(__file__).parent / "results" / "next_item_growth.json"
USERS, BATCH, STEPS = 640, 128, 2
LOSSES = {"softmax": "softmax over all", "sampled_softmax": "sampled softmax, 256 negatives"}
FIGURES = {"train": "seconds per 1,000 answers", "rank": "seconds per 1,000 rows ranked", "memory": "MB at the most"}


class Size(NamedTuple):
    """Items that the log has, and events of a history."""

    items: int
    length: int


GROWING = {
    "items": [Size(items, 50) for items in (10_000, 31_623, 100_000, 316_228, 1_000_000)],
    "length": [Size(10_000, length) for length in (50, 100, 200, 500, 1_000)],
}


def measure(size: Size, loss: str) -> dict[str, float]:
    """The figures of a size, in a process of its own."""
    with scratch_folder() as folder:
        dataset = _built(size, folder)
        torch.set_num_threads(1)
        params = next_item_params("SASRec", "log", {"max_len": size.length, "item_loss": loss, "batch_size": BATCH})
        source = DataSource.of(dataset)
        model = build_model(Run(model_class("SASRec", "next-item"), source, "naive", 0, params=params), source, folder)
        rows = [
            list(islice(source.batches(model.feature_map, [split], params, train), count))
            for split, train, count in (("train", True, STEPS + 1), ("test", False, 1))
        ]
        before, train, rank = memory.status("RssAnon"), [], []
        with memory.Peak() as peak:
            model.train()
            for batch in rows[0]:
                began = time.process_time()
                model.train_step(batch)
                train.append((time.process_time() - began) / (BATCH * (size.length - 1)))
            for _ in range(2):
                began = time.process_time()
                model.measure(rows[1], ("NDCG@10",))
                rank.append((time.process_time() - began) / len(rows[1][0]["label"]))
    thousand = {"train": 1000 * statistics.median(train[1:]), "rank": 1000 * min(rank)}
    return thousand | {"memory": (peak.bytes - before) / 1e6}


def _built(size: Size, folder: Path) -> Path:
    """All items are in training rows: each user has a history of answers, and two events more."""
    users, events = max(USERS, math.ceil(size.items / size.length)), size.length + 2
    draw = np.random.default_rng(0)
    item = draw.permutation(np.arange(users * size.length) % size.items).reshape(users, size.length)
    item = np.concatenate([item, draw.integers(0, size.items, (users, 2))], 1)
    user, place = np.indices((users, events))
    log = pl.DataFrame({"user_id": user.ravel(), "item_id": item.ravel(), "timestamp": 1_700_000_000 + place.ravel()})
    log.write_parquet(folder / "log.parquet")
    given = {"interactions": folder / "log.parquet", "protocol": "leave-one-out", "max_len": size.length}
    return build(load_recipe(None, given), folder / "set", dataset_id="log").path


def measured() -> list[dict[str, Any]]:
    sizes = list(dict.fromkeys(size for some in GROWING.values() for size in some))
    found = []
    for loss in LOSSES:
        for size in tqdm(sizes, loss):
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                found.append({**size._asdict(), "loss": loss, **pool.apply(measure, (size, loss))})
    return found


def draw(found: Sequence[dict[str, Any]], file: Path) -> None:
    """A row of panels per figure: over the items, and over the length."""
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(len(FIGURES), 2, figsize=(8, 8), sharey="row", constrained_layout=True)
    for row, (name, words) in zip(panels, FIGURES.items(), strict=True):
        for panel, (over, sizes) in zip(row, GROWING.items(), strict=True):
            for loss, label in LOSSES.items():
                own = {Size(one["items"], one["length"]): one[name] for one in found if one["loss"] == loss}
                panel.plot([getattr(size, over) for size in sizes], [own[size] for size in sizes], "o-", label=label)
            panel.set(xscale="log", yscale="log")
            panel.grid(alpha=0.3, which="both")
        row[0].set_ylabel(words)
        lengths = [size.length for size in GROWING["length"]]
        row[1].set_xticks(lengths, [f"{length:,}" for length in lengths])
    panels[-1][0].set_xlabel("items (histories of 50)")
    panels[-1][1].set_xlabel("events of a history (10,000 items)")
    panels[0][1].legend(frameon=False, loc="upper left")
    figure.savefig(file, dpi=120)
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmark.next_item_growth",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", type=Path, help="measure, and write what was found")
    parser.add_argument("--draw", type=Path, help="write the figure")
    args = parser.parse_args(arguments)
    return exit_code("next_item_growth", lambda: _run(args.json, args.draw))


def _run(results: Path | None, picture: Path | None) -> int:
    if results is None and not RESULTS.is_file():
        raise no_such_file(RESULTS)
    if results:
        with replacing(results) as file:
            file.write_text(json.dumps(measured(), indent=1) + "\n", encoding="utf-8")
    found = json.loads((results or RESULTS).read_text(encoding="utf-8"))
    if picture:
        draw(found, picture)
    line = "{items:>9,} items, {length:>5,} events, {loss:16} {train:9.3f} s {rank:9.3f} s {memory:8,.0f} MB"
    print("\n".join(line.format(**one) for one in found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
