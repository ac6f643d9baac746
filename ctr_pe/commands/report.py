"""``ctr-pe report``: a page that shows the results of a benchmark, or its tables.

Write RESULTS/report.html (pip install 'ctr_pe[report]'): differences with intervals, learning
curves, calibration, gAUC by history length, speed, environment and commands, and an explorer of users' histories with
the attention that each encoding gives them. One file, which needs no network. With --format or --published it prints
the tables of all stored runs instead, and writes nothing.

examples:
  ctr-pe benchmark --pe none,naive,cape --keep-weights --out results/mine
  ctr-pe report results/mine
  ctr-pe report results/mine --format latex > table.tex
"""

from __future__ import annotations

import argparse
from pathlib import Path

from ctr_pe.commands.options import Parser, count, data_root_option, format_options, published_option


def add_options(parser: Parser) -> None:
    add = parser.option
    add("results RESULTS", "OUT of a benchmark; with --keep-weights there is an explorer", type=Path)
    add("--out FILE", "the page (default: RESULTS/report.html)", type=Path)
    text = "OUT of a benchmark of the same runs with --keep-weights, for the explorer (default: RESULTS)"
    add("--weights DIR", text, type=Path)
    add("--users N", "users in the explorer (default: 24)", type=count, default=24)
    format_options(parser, default=None)
    published_option(parser)
    data_root_option(parser)


def run(args: argparse.Namespace) -> int:
    from ctr_pe.reporting.html import Options
    from ctr_pe.reporting.html.content import report, stored_results

    if args.format or args.published:
        from ctr_pe.study.benchmark import stored_tables
        from ctr_pe.study.marks import beside_published
        from ctr_pe.study.rendering import show

        tables = stored_tables(stored_results(args.results), args.data_root)
        tables = [beside_published(table) for table in tables] if args.published else tables
        show(tables, args.format or "text", lead="")
        return 0
    report(Options(args.results, args.out, args.weights, args.data_root, args.users))
    return 0
