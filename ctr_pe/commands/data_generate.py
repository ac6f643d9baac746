"""``ctr-pe data generate``: files like a published data set's, with drawn content.

Write files of the form and size of a published data set with drawn content: to see what building, training and
testing at that size takes before you have the set. `ctr-pe data fetch NAME --from DIR` reads them as it reads the
published files, checks the md5 sums in DIR/generated.json instead of the published ones, and makes the data set
NAME_generated, which tables mark as generated.

examples:
  ctr-pe data generate --like amazonelectronics_x1 --out generated/electronics
  ctr-pe data fetch amazonelectronics_x1 --from generated/electronics
  ctr-pe benchmark --suite cape_table2 --dataset amazonelectronics_x1_generated --dry-run
  ctr-pe data generate --like kuaivideo_x1 --rows-share 0.01 --out generated/videos
"""

from __future__ import annotations

import argparse
from pathlib import Path

from ctr_pe.commands.options import Parser
from ctr_pe.data.published.sets import SETS


def add_options(parser: Parser) -> None:
    add = parser.option
    add("--like NAME", f"a published set: {', '.join(SETS)}", required=True, choices=list(SETS))
    text = "of the published rows, users and items, from 0.001 (default: 1, all of them)"
    add("--rows-share X", text, type=float, default=1.0)
    add("--out DIR", "the new directory", type=Path, required=True)


def run(args: argparse.Namespace) -> int:
    from ctr_pe.data.published.generate import generate

    out = generate(args.like, args.out, args.rows_share, progress=not args.quiet)
    print(f"{out}: {', '.join(sorted(file.name for file in out.iterdir()))}")
    print(f"make a data set of them: ctr-pe data fetch {args.like} --from {out}")
    return 0
