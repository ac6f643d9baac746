"""``ctr-pe data fetch``: download a published data set, check and convert it.

Download a published data set, check its md5 sums and convert it. An interrupted download is
continued. With --from, files that you already have are read from a directory.

examples:
  ctr-pe data fetch amazonelectronics_x1
  ctr-pe data fetch kuaivideo_x1 --from ~/downloads/KuaiVideo_x1
"""

from __future__ import annotations

import argparse
from pathlib import Path

from ctr_pe.commands.options import Parser, data_root_option


def add_options(parser: Parser) -> None:
    parser.option("name NAME", "a published data set of `ctr-pe list`")
    parser.option("--from DIR", "directory of the downloaded files", dest="source", type=Path)
    parser.option("--overwrite", "replace a data set that is already there")
    data_root_option(parser)


def run(args: argparse.Namespace) -> int:
    from ctr_pe.data.published.download import fetch

    print(fetch(args.name, args.data_root, args.source, args.overwrite, progress=not args.quiet))
    return 0
