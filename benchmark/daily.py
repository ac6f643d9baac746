"""The daily update, measured: yesterday's model and today's events against one training on everything.

    python -m benchmark.daily LOGS --json daily.json
    python -m benchmark.daily LOGS --only kuairand_pure --seeds 3

LOGS has a folder per log, amazon_beauty and kuairand_pure, each with interactions.parquet and items.parquet. The newest
six periods of a log are its last six days, or, where days are sparse, as many events each. All models are asked about
the last period, with the same histories:

    yesterday's     trained on everything before the six periods
    updated         the same, and then `partial_fit` on five periods, one after the other
    trained anew    on everything before the last period

A training has no validation rows, so that nothing newer is held out from it, and a fixed number of epochs; an update
has one. Seconds are of the processor, on one thread.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from ctr_pe import CTRRanker
from ctr_pe.data.logs.log import never_clicked
from ctr_pe.utils.errors import UserError, exit_code, nearest, no_such_file

UPDATES = 5


@dataclass(frozen=True)
class Log:
    """A log and how a model is trained on it. ``share`` of the events is a period; None for days."""

    columns: dict[str, Any]
    epochs: int
    params: dict[str, Any]
    share: float | None = None


LOGS = {
    "kuairand_pure": Log({"time": None, "order": "position", "label": "long_view"}, 2, {}),
    "amazon_beauty": Log(
        {"order": "position", "protocol": "din"}, 8, {"embedding_regularizer": 5e-3, "learning_rate": 2e-3}, 0.025
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    return exit_code("daily.py", lambda: _run(args))


def _run(args: argparse.Namespace) -> int:
    results = []
    for name in args.only or LOGS:
        if name not in LOGS:
            raise UserError(f"--only {name}: {nearest(name, LOGS)}")
        for file in ("interactions.parquet", "items.parquet"):
            if not (args.logs / name / file).is_file():
                raise no_such_file(args.logs / name / file)
        for seed in range(args.seeds):
            for result in measure(args.logs / name, LOGS[name], seed, args):
                results.append({"log": name, "seed": seed, **result})
                print(json.dumps(results[-1]), file=sys.stderr, flush=True)
                if args.json:
                    args.json.write_text(json.dumps(results, indent=1) + "\n")
    print(table(results))
    return 0


def measure(folder: Path, log: Log, seed: int, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """What the three models of a seed are worth in the last period, and what they cost."""
    events, items = read(folder, log)
    *periods, last = (events.filter(pl.col("period") == number).drop("period") for number in range(UPDATES + 2))
    history = events.drop("period")
    asked = requests(history, last, log)
    fresh = CTRRanker(
        args.model, args.pe, random_state=seed, threads=1, attributes=["cate_id"], **log.columns, **log.params
    )

    def row(model: str, ranker: CTRRanker, rows: int, seconds: float) -> dict[str, Any]:
        return {"model": model, **ranker.evaluate(asked, history), "events": rows, "seconds": round(seconds, 2)}

    began = time.process_time()
    ranker = fresh.partial_fit(periods[0], items=items, epochs=log.epochs)
    yield row("yesterday's", ranker, periods[0].height, time.process_time() - began)
    began = time.process_time()
    for today in periods[1:]:
        ranker.partial_fit(today, epochs=args.update_epochs)
    rows = sum(today.height for today in periods[1:])
    yield row("updated", ranker, rows, time.process_time() - began)
    everything = pl.concat(periods)
    began = time.process_time()
    anew = CTRRanker(**fresh.get_params()).partial_fit(everything, items=items, epochs=log.epochs)
    yield row("trained anew", anew, everything.height, time.process_time() - began)


def read(folder: Path, log: Log) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Events with their ``period``, 0 for all before the newest six, and items."""
    events, items = pl.read_parquet(folder / "interactions.parquet"), pl.read_parquet(folder / "items.parquet")
    if "dup" in events.columns:
        events = events.filter(pl.col("dup") == 0)
    if log.share is None:
        day = pl.col("date")
        firsts = events["date"].drop_nulls().unique().sort().tail(UPDATES + 1).to_list()
    else:
        day = pl.col("timestamp")
        places = [int(events.height * (1 - log.share * left)) for left in range(UPDATES + 1, 0, -1)]
        firsts = events["timestamp"].sort().gather(places).to_list()  # a time is never cut in two
    period = pl.sum_horizontal((day >= first).fill_null(False).cast(pl.Int8) for first in firsts)
    label = [str(log.columns["label"])] if "label" in log.columns else []
    time = [] if "time" in log.columns else ["timestamp"]
    kept = events.with_columns(period=period).select("user_id", "item_id", "position", *time, *label, "period")
    return kept, items.select("item_id", "cate_id")


def requests(history: pl.DataFrame, last: pl.DataFrame, log: Log) -> pl.DataFrame:
    """The shown items of the last period; or the clicked ones, but a user's very first, and beside each one that the
    user never clicks, of those that were there before."""
    if "label" in log.columns:
        return last
    key = ["user_id", "position"]
    events, earlier = history.sort(key), history.join(last, on=key, how="anti")["item_id"].unique().sort()
    items = pl.concat([earlier, last["item_id"].unique().sort()]).unique(maintain_order=True)
    code = events["item_id"].replace_strict(items, pl.int_range(len(items), eager=True)).to_numpy()
    user = events["user_id"].rle_id().cast(pl.Int64).to_numpy()
    asked = events.with_row_index().join(last.select(key), on=key, how="semi").filter(pl.col("position") > 0)
    other = never_clicked(user, code, asked["index"].cast(pl.Int64).to_numpy(), len(items), np.random.default_rng(0))
    clicked = asked.drop("index").with_columns(label=pl.lit(1))
    sampled = clicked.with_columns(items.gather(np.maximum(other, 0)).alias("item_id"), label=pl.lit(0))
    there = pl.Series((other >= 0) & (other < len(earlier)))
    return pl.concat([clicked.filter(there), sampled.filter(there)])


def table(results: Sequence[dict[str, Any]]) -> str:
    """Means over the seeds, and the standard deviation of gAUC."""
    frame = pl.DataFrame(results)
    means = frame.group_by("log", "model", maintain_order=True).agg(
        pl.col("gAUC", "AUC", "logloss", "events", "seconds").mean(), sd=pl.col("gAUC").std(), seeds=pl.len()
    )
    lines = ["| log | model | trained on | gAUC | AUC | logloss | seconds |", "|---|---|---|---|---|---|---|"]
    for row in means.iter_rows(named=True):
        spread = "" if row["sd"] is None else f" ± {row['sd']:.4f}"
        cells = [row["log"], row["model"], f"{row['events']:,.0f} events", f"{row['gAUC']:.4f}{spread}"]
        cells += [f"{row['AUC']:.4f}", f"{row['logloss']:.4f}", f"{row['seconds']:.1f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    head, _, rest = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        "daily.py", description=f"{head}\n\n{rest}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("logs", type=Path, metavar="LOGS", help="folder of the logs")
    parser.add_argument("--only", nargs="+", metavar="LOG", help=f"of {', '.join(LOGS)}")
    parser.add_argument("--model", default="DIN", metavar="NAME", help="default: DIN")
    parser.add_argument("--pe", default="cape", metavar="NAME", help="default: cape")
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="default: 1, two minutes and a half per log")
    parser.add_argument("--update-epochs", type=int, default=1, metavar="N", help="of an update; default: 1")
    parser.add_argument("--json", type=Path, metavar="FILE", help="all figures")
    return parser


if __name__ == "__main__":
    sys.exit(main())
