"""``ctr-pe data check``: say how a log would be read, on a sample.

Look at a log as `ctr-pe data build` would read it, and write nothing: per column what it is read as and
what is missing, the first rows as read, times, ties, repeated rows, users and items by their events, labels, columns
that nothing reads, and every error that a build would end with. Without --protocol, it is
impressions where the file has the label column, else din.

examples:
  ctr-pe data check log.csv
  ctr-pe data check shown.parquet --items videos.csv --user uid --item video --time ts --label click
  ctr-pe data check log.csv --recipe mine.yaml --rows 100000
"""

from __future__ import annotations

import argparse
from contextlib import suppress
from dataclasses import asdict

from ctr_pe.commands import data_build
from ctr_pe.commands.options import Parser, count, json_option
from ctr_pe.data.logs.places import place
from ctr_pe.utils.errors import UserError

EXIT_CODES = {1: "the log has errors that a build would end with"}


def add_options(parser: Parser) -> None:
    parser.option("file PLACE", "the log: a file, a folder, a glob, or an address of these", type=place)
    parser.option("--rows N", "rows to look at, at most (default: 1,000,000)", type=count, default=1_000_000)
    json_option(parser)
    data_build.reading_options(parser)


def run(args: argparse.Namespace) -> int:
    from ctr_pe.data.logs.check import check
    from ctr_pe.data.logs.recipe import Recipe, load_recipe
    from ctr_pe.data.logs.tables import scan
    from ctr_pe.utils.files import json_text

    given = data_build.given_of(args) | {"interactions": args.file}
    names: list[str] = []
    with suppress(UserError):  # the check says it, too
        names = scan(args.file, given.get("separator"), 1).collect_schema().names()
    label = given.get("label", Recipe.model_fields["label"].default)
    if args.recipe is None and "append_to" not in given:
        given = {"protocol": "impressions" if label in names else "din"} | given
    found = check(load_recipe(args.recipe, given), args.rows)
    if args.json:
        print(json_text(asdict(found)), end="")
        return 1 if found.problems else 0
    print("\n".join([*found.lines, *(f"error: {problem}" for problem in found.problems)]))
    print(f"{len(found.problems)} problems" if found.problems else "no problem: ctr-pe data build reads it")
    return 1 if found.problems else 0
