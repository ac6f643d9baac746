"""``ctr-pe data build``: make a data set from a log.

Make a data set from a log of interactions (parquet or CSV), with a report of what was counted.

protocol din: the log has clicked items only. Every item of a user from the second on is a target, with one
sampled item that the user never clicked; the last target is test, the one before it validation.
protocol leave-one-out: chosen items again, and a row asks which of all items comes next, after every item of its
history. A user's last item is test, the one before it validation. protocol temporal: the same, but the newest
3 % of the events are test and the 2 % before them validation, each with all events of its user before it.
protocol impressions: the log has shown items with a 0/1 label. A row's history is the user's earlier
positives; rows are split by time, or by a column that the recipe names.

A log is a file, a folder, a glob, or one of these at an address (s3://, gs://, abfs://, hdfs:// and what fsspec knows);
keys and endpoints are those of the environment. In folders named day=2024-02-01 files have a column day.

Ids are whole numbers or text; in CSV they are text unless every row has a whole number (007 is none, 7.0 is). Times
are dates, texts in the form of ISO 8601 or --time-format, or numbers in the unit of --time-unit, from 1990 to 2099 or
counted from 0. They count to the nanosecond, ages in whole seconds.

examples:
  ctr-pe data build --recipe amazon_sports --interactions interactions.parquet --items items.parquet \\
      --out data/amazon_sports
  ctr-pe data build --protocol impressions --interactions log.csv --user uid --item video --time ts --label click \\
      --attributes author,tag --out data/videos
  ctr-pe data build --protocol impressions --interactions log.csv --items videos.csv --users people.csv \\
      --column hour=event --column watch_time=event,numeric,afterwards --column "tags=item,sequence,splitter=;" \\
      --column age=user,numeric --out data/videos
  ctr-pe data build --append-to data/videos --interactions log.csv     a log that has grown: no id changes
`ctr-pe list` names the recipes. A column that is there but must not be used: --time none. A log of
clicks with other columns of 0 and 1: --label none.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

from ctr_pe.commands.options import Parser, comma_list, count, json_option, number
from ctr_pe.data.logs.places import place


def add_options(parser: Parser) -> None:
    parser.argument_default = argparse.SUPPRESS  # an option that is not given keeps the recipe's value
    files = partial(parser.option, group=parser.add_argument_group("files"))
    text = "one row per event: user, item, time or order, label; a file, folder, glob in quotes, or an address of these"
    files("--interactions PLACE", text, type=place)
    files("--out DIR", "the data set; its name is the directory's", type=Path, default=None)
    files("--overwrite", "replace a data set that is already there", default=False)
    text = (
        "what brings a user's events together and makes rows: polars, in this process (default), ray, ray://HOST:PORT, "
    )
    files("--engine NAME", f"{text}spark or spark://HOST:PORT; all give the same files", default="polars")
    text = "rows of a file at most: each split is a folder of shards (default: a file per split)"
    files("--shard-rows N", text, type=count, default=None)
    json_option(parser)
    reading_options(parser)


def reading_options(parser: Parser) -> None:
    """How a log is read."""
    parser.argument_default = argparse.SUPPRESS
    files = partial(parser.option, group=parser.add_argument_group("other files"))
    files("--items PLACE", "one row per item: item and its attributes", type=place)
    files("--users PLACE", "one row per user: user and its columns", type=place)
    files("--separator SIGN", "between the columns of text files: ; or | or tab (default: , in .csv, tab in .tsv)")
    files(
        "--append-to DIR",
        "a data set of an earlier log: all ids stay, new ones come after them, and rules and items that are not "
        "given are its own; without --out it gets a new version itself",
        type=Path,
    )
    rules = partial(parser.option, group=parser.add_argument_group("rules"))
    rules("--recipe NAME|FILE", "a recipe of `ctr-pe list`, or a YAML file with these options", default=None)
    rules(
        "--protocol",
        "how rows, labels and splits are made",
        choices=["din", "impressions", "leave-one-out", "temporal"],
    )
    rules(
        "--windows",
        "next-item: of long training histories all windows (default) or the newest",
        choices=["all", "newest"],
    )
    rules("--max-len N", "most recent items kept of a history (default: 100)", type=count)
    rules("--seed N", "of the sampled items of protocol din (default: 0)", type=number)
    rules(
        "--keep",
        "of rows of one event (same user, item, time, order), in the file's order",
        choices=["first", "last", "all"],
    )
    rules("--strict", "missing values of attributes and declared columns are an error")
    rules("--negatives", "impressions: also a history of the user's earlier negatives")
    rules(
        "--valid-fraction F",
        "impressions, temporal: rows before the test rows (default: 0.1; temporal: 0.02)",
        type=float,
    )
    rules("--test-fraction F", "impressions, temporal: the newest rows (default: 0.1; temporal: 0.03)", type=float)
    columns = partial(parser.option, group=parser.add_argument_group("columns"))
    columns("--user COLUMN", "default: user_id")
    columns("--item COLUMN", "default: item_id")
    columns("--time COLUMN", "when it happened; default: timestamp, if there", type=_column)
    columns("--time-unit", "of times that are numbers (default: s)", choices=["s", "ms", "us", "ns"])
    columns("--time-format FORMAT", "of times that are texts, such as %%d/%%m/%%Y; without it ISO 8601")
    columns("--order COLUMN", "what comes first when times tie; default: position, if there", type=_column)
    columns("--label COLUMN", "0 or 1, or a threshold, 'rating >= 4'; default: label, if there", type=_column)
    columns("--weight COLUMN", "how much a row counts in the loss, 0 or more; default: all alike", type=_column)
    columns("--attributes COLUMN,…", "of the items, beside their id; default: cate_id, if there", type=_columns)
    columns(
        "--behaviours COLUMN=VALUE,…",
        "a history per value, such as action=click,cart,buy; targets are events of the first",
        type=_behaviours,
    )
    columns(
        "--column NAME=WORDS",
        "what else is read, such as hour=event or price=event,numeric: user, item or event; categorical, numeric, "
        "sequence or embedding; afterwards for what exists only after the event; key=value",
        several=True,
        type=_declared,
    )


def _column(text: str) -> str:
    return "" if text == "none" else text  # empty: no such column


def _columns(text: str) -> tuple[str, ...] | str:
    return "" if text == "none" else tuple(comma_list(text))


def _behaviours(text: str) -> dict[str, list[str]]:
    name, given, values = text.partition("=")
    if not given:
        raise argparse.ArgumentTypeError(f"'{text}' is not COLUMN=VALUE,…")
    return {name: comma_list(values)}


def _declared(text: str) -> tuple[str, str]:
    name, _, words = text.partition("=")
    return name, words


def given_of(args: argparse.Namespace) -> dict[str, Any]:
    """The keys of a recipe that options give."""
    from ctr_pe.data.logs.recipe import Recipe

    options = {key: value for key, value in vars(args).items() if key in Recipe.model_fields}
    given = {key: None if value == "" else value for key, value in options.items()}
    return given | ({"columns": dict(args.column)} if args.column else {})


def run(args: argparse.Namespace) -> int:
    from ctr_pe.config.yaml import load_json
    from ctr_pe.data.logs.log import build, summary
    from ctr_pe.data.logs.recipe import load_recipe
    from ctr_pe.data.root import REPORT
    from ctr_pe.utils.files import json_text

    given = given_of(args)
    out = args.out or given.get("append_to") or args.parser.error("the following arguments are required: --out")
    overwrite = args.overwrite or args.out is None
    how = {"overwrite": overwrite, "progress": not args.quiet, "shard_rows": args.shard_rows, "engine": args.engine}
    dataset = build(load_recipe(args.recipe, given), out, **how)
    if args.json:
        print(json_text(load_json(dataset.path / REPORT)), end="")
    else:
        print(summary(dataset))
    return 0
