"""``ctr-pe reproduce``: a published table beside ours, and the command that makes it.

Print rows of a suite: the published figures, ours of the runs that are stored below ./results and
./benchmark/results, the one command that makes what is missing, and the time that it takes on this machine: from
recorded runs on this processor, or from a few steps that are measured now. Of a published data set that is not there,
steps are measured on a small part of it, generated in its form. With --run the command is run.

examples:
  ctr-pe reproduce cape-table2 --row DIN
  ctr-pe reproduce cape-table2 --row DIN --pe none,cape --dataset amazonelectronics_x1 --run
  ctr-pe reproduce small-cape-table2 --row BST --format markdown
"""

from __future__ import annotations

import argparse
from pathlib import Path

from ctr_pe.commands.options import (
    Parser,
    class_names,
    comma_list,
    count,
    data_root_option,
    format_options,
)

EXIT_CODES = {1: "with --run: some runs failed; the others are kept"}


def add_options(parser: Parser) -> None:
    add = parser.option
    add("name NAME", "a suite of `ctr-pe list`, such as cape-table2")
    add("--row MODEL,…", "models (default: all of the suite)", type=comma_list, default=[])
    add("--pe NAME,…", "encodings (default: all of the suite)", type=class_names)
    add("--dataset NAME", "a data set in place of the suite's, or one of them")
    add("--repeats N", "seeds per row (default: the suite's)", type=count)
    add("--out DIR", "results and tables (default: results/NAME)", type=Path)
    add("--jobs N", "runs side by side (default: one per core)", type=count)
    add("--threads N", "threads of one run (default: 1)", type=count, default=1)
    add("--gpu N", "GPU to train on, -1 for the CPU (default: -1)", type=int, default=-1)
    add("--run", "run the command", dest="start")
    format_options(parser)
    data_root_option(parser)


def run(args: argparse.Namespace) -> int:
    from ctr_pe.study import benchmark
    from ctr_pe.study.rendering import show
    from ctr_pe.study.reproduce import command, reproduction, wanted

    given = {name: getattr(args, name) for name in ("dataset", "repeats", "out", "jobs", "threads", "gpu", "data_root")}
    request = wanted(args.name, args.row, benchmark.Request(encodings=args.pe, format=args.format, **given))
    if args.start:
        return benchmark.run(request)
    table = reproduction(request)
    if args.format == "text":
        show([table], lead="")
        print(f"\n{command(request)}")
    else:
        table.notes.append(f"Command: {command(request)}")
        show([table], args.format)
    return 0
