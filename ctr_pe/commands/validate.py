"""``ctr-pe validate``: check a config against what will read it.

Check a YAML file against the signatures that will read it, and run nothing: a model config of
FuxiCTR's form, a dataset config, a recipe, a benchmark suite, or a config of FuxiCTR's tuner. Unknown keys, values of
the wrong type and combinations that no model can be built with are one line each.

examples:
  ctr-pe validate experiment.yaml
"""

from __future__ import annotations

import argparse
from pathlib import Path

from ctr_pe.commands.options import Parser, data_root_option
from ctr_pe.utils.errors import say

EXIT_CODES = {2: "the file has mistakes, one line each"}


def add_options(parser: Parser) -> None:
    parser.option("file FILE", "the YAML file", type=Path)
    data_root_option(parser)


def run(args: argparse.Namespace) -> int:
    from ctr_pe.config.validation import check, without_effect
    from ctr_pe.data.root import data_root

    kind, problems = check(args.file, data_root(args.data_root))
    for problem in problems:
        say(problem)
    if not problems:
        for line in without_effect(args.file):
            say(line)
        print(f"{args.file}: ok ({kind})")
    return 2 if problems else 0
