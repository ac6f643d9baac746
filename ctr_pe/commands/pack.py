"""``ctr-pe pack``: a model folder as one file with a hash.

Write a model folder as a tar, and its SHA-256 beside it in FILE.sha256, as `sha256sum --check` reads it. Equal folders
give equal files, wherever and whenever they are packed.

examples:
  ctr-pe pack --model model --output model.tar
"""

from __future__ import annotations

import argparse
from pathlib import Path

from ctr_pe.commands.options import Parser, model_option


def add_options(parser: Parser) -> None:
    model_option(parser)
    parser.option("--output FILE", "the tar; an earlier one of this name is replaced", type=Path, required=True)


def run(args: argparse.Namespace) -> int:
    from ctr_pe.serving.archive import pack

    print(f"{pack(args.model, args.output)}  {args.output}")
    return 0
