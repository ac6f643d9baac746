"""One revision's side of :mod:`benchmark.speed.pairs`: prepares every row, then times the rows that its input names.

Only names that users call are used here, so that the same file runs on any revision of ``ctr_pe``: that of the package
which PYTHONPATH names. One line of JSON goes out when all is prepared, and one for every line that comes in.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch

MODELS = ("DIN", "DIEN", "BST", "DMIN", "TIN", "SASRec")
ENCODINGS = ("none", "cape")
USERS, ITEMS, CATEGORIES, LONGEST, BATCH, CANDIDATES = 3000, 8000, 200, 50, 512, 1000
PARAMS: dict[str, Any] = {"embedding_dim": 32, "dnn_hidden_units": [128, 64], "learning_rate": 1e-3, "gpu": -1}
"""Widths between those of small logs and of published settings."""


def log() -> tuple[pl.DataFrame, pl.DataFrame]:
    """Clicks of 3,000 users with 2 to 100 items, half of them up to 10, and the items' categories."""
    draw = np.random.default_rng(0)
    counts = np.clip(draw.lognormal(np.log(10), 1.0, USERS).astype(int), 2, 100)
    users = np.repeat(np.arange(USERS), counts)
    items = (ITEMS * draw.random(len(users)) ** 2).astype(int)
    times = 1_600_000_000 + draw.permutation(len(users)) * 60
    events = pl.DataFrame({"user_id": users, "item_id": items, "timestamp": times})
    return events, pl.DataFrame({"item_id": np.arange(ITEMS), "cate_id": np.arange(ITEMS) % CATEGORIES})


def prepared(folder: Path) -> dict[str, Callable[[], object]]:
    """What each row times."""
    from ctr_pe import CTRRanker, load, model_zoo
    from ctr_pe.data.dataset import open_dataset
    from ctr_pe.data.loader import BatchLoader

    events, items = log()
    events.write_parquet(folder / "events.parquet")
    items.write_parquet(folder / "items.parquet")
    built = folder / "built"

    def build() -> None:
        shutil.rmtree(built, ignore_errors=True)
        files = ("--interactions", folder / "events.parquet", "--items", folder / "items.parquet")
        command("data", "build", *files, "--protocol", "din", "--max-len", LONGEST, "--out", built)

    build()
    shutil.copytree(built, folder / "data")
    dataset = open_dataset(str(folder / "data"))
    feature_map = dataset.feature_map(PARAMS["embedding_dim"])
    loader = BatchLoader(feature_map, dataset.split("train"), "train", BATCH, shuffle=True, seed=0)
    rows: dict[str, Callable[[], object]] = {"data build": build, "loader, an epoch": lambda: sum(1 for _ in loader)}
    some = list(islice(loader, 4))
    fields = {"target_field": [["item_id", "cate_id"]], "sequence_field": [["item_history", "cate_history"]]}
    for name in MODELS:
        for encoding in ENCODINGS:
            torch.manual_seed(0)
            given = {**PARAMS, **fields, "position_encoding": encoding, "model_root": str(folder / "checkpoints")}
            model = getattr(model_zoo, name)(feature_map, **given)
            model.train()
            rows[f"step, {name} {encoding}"] = step(model, cycle(some))
    for name, encoding in (("DIN", "cape"), ("SASRec", "none")):
        ranker = CTRRanker(model=name, position_encoding=encoding, epochs=1, random_state=0, **PARAMS)
        ranker.fit(events.head(4000), items=items)
        ranker.save(folder / name)
        rows[f"request of 1,000, {name} {encoding}"] = request(load(folder / name), events)
    requests = folder / "requests.parquet"
    events.tail(20_000).write_parquet(requests)

    def predict() -> None:
        scores = folder / "scores.parquet"
        scores.unlink(missing_ok=True)
        files = ("--events", folder / "events.parquet", "--input", requests, "--output", scores)
        command("predict", "--model", folder / "DIN", *files)

    return {**rows, "predict, 20,000 rows": predict}


def step(model: Any, batches: Iterator[Any]) -> Callable[[], object]:
    return lambda: model.train_step(next(batches))


def request(ranker: Any, events: pl.DataFrame) -> Callable[[], object]:
    longest = events.group_by("user_id").len().sort("len", "user_id").tail(20)["user_id"][0]
    history = events.filter(pl.col("user_id") == longest)
    candidates = pl.DataFrame({"user_id": [longest] * CANDIDATES, "item_id": np.arange(CANDIDATES)})
    return lambda: ranker.rank(history, candidates, k=10)


def command(*arguments: Any) -> None:
    from ctr_pe.cli import main

    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        assert main([str(argument) for argument in arguments]) == 0


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    rows = prepared(folder)
    for row in rows.values():  # two of each: caches are full, and memory is the process' own
        row()
        row()
    print(json.dumps(list(rows)), file=answers, flush=True)
    for line in sys.stdin:
        name, times = json.loads(line)
        start = time.perf_counter()
        for _ in range(times):
            rows[name]()
        print(json.dumps(time.perf_counter() - start), file=answers, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
