"""``ctr-pe unpack``: the model folder of a file of `ctr-pe pack`, verified.

Make a model folder of a tar of `ctr-pe pack`: its SHA-256 is compared with FILE.sha256 or --sha256, then every file in
it with what the model says of it. The folder takes its name when all is there, also in place of one that is served.

examples:
  ctr-pe unpack model.tar --model models/current
  ctr-pe unpack model.tar --model models/current --sha256 6a2d…
"""

from __future__ import annotations

import argparse
from pathlib import Path

from ctr_pe.commands.options import Parser


def add_options(parser: Parser) -> None:
    add = parser.option
    add("file FILE", "a tar of `ctr-pe pack`", type=Path)
    add("--model DIR", "the folder to make; an earlier model folder of this name is replaced", type=Path, required=True)
    add("--sha256 HEX", "the hash that FILE must have (default: that in FILE.sha256)")


def run(args: argparse.Namespace) -> int:
    from ctr_pe.serving.archive import unpack

    print(f"{unpack(args.file, args.model, args.sha256)}  {args.model}")
    return 0
