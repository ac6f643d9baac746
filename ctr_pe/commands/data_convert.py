"""``ctr-pe data convert``: write a data set for FuxiCTR's own loaders.

Write a data set in the form that FuxiCTR's own loaders read: histories padded to one length, in a
directory of its own with feature_map.json and dataset_config.yaml. This package reads that form too.

examples:
  ctr-pe data convert amazon_sports --out fuxictr/amazon_sports
  ctr-pe data convert data/mine --out fuxictr/mine --format npz
"""

from __future__ import annotations

import argparse
from pathlib import Path

from ctr_pe.commands.options import Parser, data_root_option


def add_options(parser: Parser) -> None:
    parser.option("name NAME", "a data set below the data root, or the path of one")
    parser.option("--out DIR", "the new directory", type=Path, required=True)
    parser.option("--format", "of the rows (default: parquet)", choices=["parquet", "npz"], default="parquet")
    data_root_option(parser)


def run(args: argparse.Namespace) -> int:
    from ctr_pe.data.synthetic.built_in import open_or_generate
    from ctr_pe.fuxictr.convert import convert

    dataset = open_or_generate(args.name, args.data_root)
    ages = convert(dataset, args.out, args.format)
    print(" · ".join(f"{split} {rows:,}" for split, rows in dataset.rows.items()) + f" rows in {args.out}")
    if ages:
        print(f"left out, because FuxiCTR has no lists of seconds: {', '.join(ages)}")
    return 0
