"""What each kind of declared column brings to DIN on real impressions, and what it costs.

A part of the users of KuaiRand-Pure, the periods that have all columns, label long_view, split by time. Each kind is a
column beside ids and category; the difference in gAUC to none has a 95 % interval for new users and newly trained runs.
Every run is a file: the same command goes on where it was stopped, and prints the table of what is there.

example:
  nice -n 19 python -m benchmark.columns --data ../shared/data/kuairand_pure --out columns_runs
  python -m benchmark.columns --data ../shared/data/kuairand_pure --out columns_runs --table
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import median

import numpy as np
import polars as pl

from ctr_pe.config.yaml import model_params
from ctr_pe.data.dataset import LABEL, USER
from ctr_pe.data.logs.log import build
from ctr_pe.data.logs.recipe import load_recipe
from ctr_pe.evaluation.metrics import evaluate
from ctr_pe.evaluation.paired import compare
from ctr_pe.training import Run, train

NONE = "none"
KINDS = {
    NONE: {},
    "event: tab": {"tab": "event"},
    "event, numeric, afterwards: play_time_ms": {"play_time_ms": "event, numeric, afterwards"},
    "item, numeric: duration_ms": {"duration_ms": "item, numeric"},
    "event, numeric, normalizer: shown_ms": {"shown_ms": "event, numeric, normalizer=StandardScaler"},
    "item: author_id": {"author_id": "item"},
    "item, sequence, mean: attributes": {"attributes": "item, sequence, max_len=3"},
    "item, sequence, attention: attributes": {"attributes": "item, sequence, max_len=3, pooling=attention"},
    "item, sequence, share=cate_id: attributes": {"attributes": "item, sequence, max_len=3, share=cate_id"},
    "item, embedding: tags": {"tag_vector": "item, embedding"},
    "user: user_active_degree": {"user_active_degree": "user"},
}
TAGS = 47


def tables(data: Path, folder: Path, part: int) -> dict[str, Path]:
    """The files of one in ``part`` users."""
    events = pl.scan_parquet(data / "interactions.parquet").filter(pl.col("period") >= 0, pl.col("dup") == 0)
    events = events.filter(pl.col("user_id").hash(seed=0) % part == 0).unique(["user_id", "item_id", "timestamp"])
    items = pl.read_parquet(data / "items.parquet")
    vectors = np.zeros((items.height, TAGS), np.float32)
    for row, tags in enumerate(items["attributes"].to_list()):
        vectors[row, tags] = 1
    found = {
        "interactions": events.rename({"duration_ms": "shown_ms"}).collect(),
        "items": items.with_columns(tag_vector=pl.Series(vectors)),
        "users": pl.read_parquet(data / "users.parquet"),
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, table in found.items():
        if not (folder / f"{name}.parquet").exists():
            table.write_parquet(folder / f"{name}.parquet")
    return {name: folder / f"{name}.parquet" for name in found}


def run(files: dict[str, Path], kind: str, seed: int, folder: Path) -> None:
    """Train once; keep the scores of the test rows, and seconds of an epoch."""
    out = folder / f"set_{list(KINDS).index(kind)}"
    if not out.exists():
        given = {**files, "protocol": "impressions", "label": "long_view", "time_unit": "ms", "order": None}
        build(load_recipe(None, {**given, "columns": KINDS[kind], "max_len": 50}), out)
    params = model_params("DIN", "log", {"max_len": 50})
    outcome = train(Run("DIN", out, "none", seed, "heldout", params))
    rows = pl.read_parquet(out / "test.parquet", columns=[LABEL, USER])
    seconds = outcome.seconds / len(outcome.history)
    np.savez(_file(folder, kind, seed), scores=outcome.scores, seconds=seconds, label=rows[LABEL], user=rows[USER])


def table(folder: Path, seeds: int) -> str:
    """What finished, as Markdown."""
    runs = {
        kind: {seed: np.load(file) for seed in range(seeds) if (file := _file(folder, kind, seed)).exists()}
        for kind in KINDS
    }
    runs = {kind: found for kind, found in runs.items() if len(found) > 1}
    label, user = (next(iter(runs[NONE].values()))[name] for name in ("label", "user"))
    scores = {kind: {seed: one["scores"] for seed, one in found.items()} for kind, found in runs.items()}
    differences = compare(label, user, scores, NONE) if len(scores) > 1 else {}
    seconds = {kind: median(float(one["seconds"]) for one in found.values()) for kind, found in runs.items()}
    lines = ["| column | seeds | gAUC | against none (95 %) | epoch |", "|---|---|---|---|---|"]
    for kind, found in scores.items():
        gauc = np.mean([evaluate(label, one, user, ["gAUC"])["gAUC"] for one in found.values()])
        one = differences[kind]["gAUC"] if kind in differences else None
        against = f"{one.value:+.4f} ({one.low:+.4f} … {one.high:+.4f})" if one else ""
        lines.append(f"| {kind} | {len(found)} | {gauc:.4f} | {against} | {seconds[kind] / seconds[NONE]:.2f} × |")
    return "\n".join(lines)


def _file(folder: Path, kind: str, seed: int) -> Path:
    return folder / f"{list(KINDS).index(kind)}_{seed}.npz"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--part", type=int, default=10, help="one in so many users")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--table", action="store_true", help="only print what is there")
    args = parser.parse_args()
    if not args.table:
        files = tables(args.data, args.out / "tables", args.part)
        for seed in range(args.seeds):
            for kind in KINDS:
                if not _file(args.out, kind, seed).exists():
                    run(files, kind, seed, args.out)
    print(table(args.out, args.seeds))


if __name__ == "__main__":
    main()
