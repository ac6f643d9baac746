"""Makes folders/: python -m tests.golden.make_folders, in a checkout of the revision whose models are to be kept.

The environment variable OMP_NUM_THREADS has to be 1.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import yaml

from ctr_pe import CTRRanker
from ctr_pe.commands import run_expid
from tests.golden.make_losses import revision
from tests.support.golden_folders import FOLDERS, NAMES, answers, of_service
from tests.support.golden_losses import build, command, log

SMALL: dict[str, Any] = {
    "epochs": 2,
    "batch_size": 64,
    "embedding_dim": 4,
    "embedding_init": 0.8,
    "embedding_regularizer": 0.0,
    "learning_rate": 0.02,
    "dnn_hidden_units": [8],
}
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("din_cape", {"history": ["item 5", "item 9", "gone"], "candidates": ["item 3", "item 64", "nowhere", "item 3"]}),
    ("din_cape", {"candidates": ["item 1", "item 2", "item 7"], "k": 2}),
    (
        "dien_none",
        {"history": [f"item {i * 7 % 50}" for i in range(30)], "candidates": [f"item {i}" for i in range(9)]},
    ),
    ("sasrec_rope_cape", {"history": [3, 99, 3, 8, 1, 2, 4, 6], "candidates": [1, 70, 99, 5], "k": 3}),
    (
        "tin_time_bias",
        {
            "history": ["item 4", "item 8", "item 15"],
            "times": [1_600_000_000, 1_600_000_300, 1_600_500_000],
            "now": 1_601_000_000,
            "candidates": [f"item {i}" for i in range(70)],
            "k": 5,
        },
    ),
    ("tin_time_bias", {"history": ["item 4"], "candidates": ["item 1"]}),  # lacks times
]


def shown() -> pl.DataFrame:
    """The events of the log under other names, with whole numbers as ids, and times in milliseconds."""
    number = pl.col("user_id", "item_id").str.extract(r"(\d+)").cast(pl.Int64)
    return log()[0].with_columns(number).select(
        pl.col("user_id").alias("uid"),
        pl.col("item_id").alias("video"),
        (pl.col("timestamp") * 1000).alias("ms"),
        pl.col("clicked").alias("liked"),
    )  # fmt: skip


def histories() -> pl.DataFrame:
    """Events of user 1, one; of user 2, more than models read; of a new user, with an unknown item; in columns
    ``user_id``, ``item_id``, ``timestamp``."""
    rows = [("user 1", "item 7", 1_610_000_000)]
    rows += [("user 2", f"item {i * 11 % 60}", 1_610_000_000 + i * i * 5_000) for i in range(25)]
    rows += [
        ("stranger", item, 1_610_000_000 + 60 * i) for i, item in enumerate(("item 3", "gone", "item 3", "item 9"))
    ]
    return pl.DataFrame(rows, schema=["user_id", "item_id", "timestamp"], orient="row")


def requests() -> pl.DataFrame:
    """For users of the histories, one without events and an unknown one: before, among and after the events; for user 2
    so many at one time that they share one look at the history."""
    late, early = 1_620_000_000, 1_610_000_000
    rows = [("user 2", f"item {i}", late) for i in range(68)]
    items = ("item 1", "item 64", "nowhere", "item 30")
    rows += [(u, item, late) for u in ("user 1", "user 3", "stranger", "nobody") for item in items]
    rows += [(u, "item 9", early + s) for u in ("user 1", "user 2", "stranger") for s in (-5, 0, 1, 100_000, 1_000_000)]
    return pl.DataFrame(rows, schema=["user_id", "item_id", "timestamp"], orient="row")


def renamed(table: pl.DataFrame) -> pl.DataFrame:
    """Histories or requests for the model of ``shown``: what has no number is 99."""
    number = [pl.col(name).str.extract(r"(\d+)").cast(pl.Int64).fill_null(99) for name in ("user_id", "item_id")]
    made = table.with_columns(number).with_columns(pl.col("timestamp") * 1000)
    return made.rename({"user_id": "uid", "item_id": "video", "timestamp": "ms"})


def keep(name: str, requests: pl.DataFrame, events: pl.DataFrame | None = None) -> None:
    requests.write_parquet(FOLDERS / name / "requests.parquet")
    if events is not None:
        events.write_parquet(FOLDERS / name / "events.parquet")


def din_cape() -> None:
    """An estimator's, of clicks and items with a category."""
    events, items = log()
    ranker = CTRRanker("DIN", "cape", max_len=6, attention_hidden_units=[6], **SMALL)
    ranker.fit(events.drop("clicked"), items).save(FOLDERS / "din_cape" / "model")
    keep("din_cape", requests(), histories())


def dien_none() -> None:
    """A benchmark's, which keeps no histories."""
    with tempfile.TemporaryDirectory() as scratch:
        data, out = build(Path(scratch)), Path(scratch) / "out"
        given = {**SMALL, "attention_hidden_units": [6]}
        options = [part for key, value in given.items() for part in ("--set", f"{key}={json.dumps(value)}")]
        asked = ("--model", "DIEN", "--pe", "none", "--repeats", 1, "--jobs", 1, "--keep-models")
        command("benchmark", "--dataset", data.path, *asked, "--out", out, *options)
        (made,) = (out / "models").iterdir()
        shutil.copytree(made, FOLDERS / "dien_none" / "model")
    keep("dien_none", requests(), histories())


def bst_kernel() -> None:
    """Of an experiment on FuxiCTR's CSV files, with numbers and with ids so rare that they are unknown; requests bring
    their histories as lists."""
    draw, tables = np.random.default_rng(11), {}
    for split, rows in {"train": 240, "valid": 60, "test": 60}.items():
        items = [(draw.integers(0, 40, n) * draw.random(n)).astype(int) for n in draw.integers(0, 9, rows)]
        target = (draw.integers(0, 45, rows) * draw.random(rows)).astype(int)
        tables[split] = pl.DataFrame(
            {
                "label": draw.integers(0, 2, rows),
                "user": draw.integers(0, 20, rows),
                "item": target,
                "cate": target % 5,
                "price": draw.random(rows).round(3),
                "clicked": ["^".join(map(str, row)) for row in items],
                "clicked_cate": ["^".join(map(str, row % 5)) for row in items],
            }
        )
    ids = {"active": True, "dtype": "str", "type": "categorical"}
    lists = {"active": True, "dtype": "str", "type": "sequence", "splitter": "^", "max_len": 5}
    columns = [
        {**ids, "name": "user"},
        {**ids, "name": "item"},
        {**ids, "name": "cate"},
        {"name": "price", "active": True, "dtype": "float", "type": "numeric", "normalizer": "StandardScaler"},
        {**lists, "name": "clicked", "share_embedding": "item", "feature_encoder": None},
        {**lists, "name": "clicked_cate", "share_embedding": "cate", "feature_encoder": None},
    ]
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as scratch:
        os.chdir(scratch)
        for split, table in tables.items():
            table.write_csv(f"{split}.csv")
        files = {f"{split}_data": f"{split}.csv" for split in tables}
        about = {"data_root": "data", "data_format": "csv", **files, "min_categr_count": 12, "feature_cols": columns}
        about |= {"label_col": {"name": "label", "dtype": "float"}, "group_id": "user"}
        fields = {"bst_target_field": [["item", "cate"]], "bst_sequence_field": [["clicked", "clicked_cate"]]}
        own = {"num_heads": 2, "stacked_transformer_layers": 2, "position_encoding": "kernel", "model_root": "kept"}
        more = {"metrics": ["gAUC", "AUC", "logloss"], "monitor": "AUC", "monitor_mode": "max", "optimizer": "adam"}
        given = {"model": "BST", "dataset_id": "raw", "task": "binary_classification", "loss": "binary_crossentropy"}
        Path("config").mkdir()
        Path("config/dataset_config.yaml").write_text(yaml.dump({"raw": about}))
        experiment = {**given, **more, **SMALL, **fields, **own, "embedding_dim": 4, "seed": 1}
        Path("config/model_config.yaml").write_text(yaml.dump({"BST_raw": experiment}))
        assert run_expid.main(["--config", "config", "--expid", "BST_raw"]) == 0
        (made,) = (path for path in Path("kept/raw").iterdir() if path.is_dir())
        shutil.copytree(made, FOLDERS / "bst_kernel" / "model")
        os.chdir(before)
    lists_of = pl.col("clicked", "clicked_cate").str.split("^").list.filter(pl.element() != "")
    asked = tables["test"].drop("label").with_columns(lists_of)
    new = asked[:5].with_columns(user=pl.lit(99), item=pl.lit(77), cate=pl.lit(9))
    keep("bst_kernel", pl.concat([asked, new.cast(asked.schema)]))


def sasrec_rope_cape() -> None:
    """An estimator's, of impressions with other names of columns; updated once, with new items and a new user."""
    events = shown().sort("ms")
    names: dict[str, Any] = {"user": "uid", "item": "video", "time": "ms", "label": "liked", "time_unit": "ms"}
    ranker = CTRRanker("SASRec", "rope+cape", max_len=6, num_heads=2, num_blocks=2, **names, **SMALL)
    ranker.fit(events.filter(pl.col("video") < 55))
    last = int(events["ms"].max())  # type: ignore[arg-type]
    new = pl.DataFrame({"uid": [1, 1, 2, 50], "video": [70, 5, 71, 70], "liked": [1, 0, 1, 1]})
    ranker.partial_fit(new.with_columns(ms=last + 60_000 * pl.int_range(1, 5)))
    ranker.save(FOLDERS / "sasrec_rope_cape" / "model")
    keep("sasrec_rope_cape", renamed(requests()), renamed(histories()))


def tin_time_bias() -> None:
    """An estimator's, of clicks alone, whose encoding reads ages."""
    ranker = CTRRanker("TIN", "time_bias", max_len=6, **SMALL)
    ranker.fit(log()[0].drop("clicked")).save(FOLDERS / "tin_time_bias" / "model")
    keep("tin_time_bias", requests(), histories())


def main() -> None:
    shutil.rmtree(FOLDERS, ignore_errors=True)
    for make in (din_cape, dien_none, bst_kernel, sasrec_rope_cape, tin_time_bias):
        (FOLDERS / make.__name__).mkdir(parents=True)
        make()
    for name in NAMES:
        (FOLDERS / name / "scores.json").write_text(json.dumps({"revision": revision(), **answers(name)}) + "\n")
    asked = [{"folder": name, "body": body, **of_service(name, body)} for name, body in BODIES]
    (FOLDERS / "rank.json").write_text("[\n" + ",\n".join(json.dumps(one) for one in asked) + "\n]\n")


if __name__ == "__main__":
    main()
