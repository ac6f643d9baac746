"""``ctr-pe recommend``: what a data set says about position, without training.

Count in a data set what decides whether position can help, and which encoding to try: lengths of histories, ties in
time, users whose labels are all the same, items between the latest like one and the target. Then the advice that
follows, each with its reason and evidence, and the command to try it. Trains nothing.

examples:
  ctr-pe recommend --dataset synthetic
  ctr-pe recommend --dataset data/mine
"""

from __future__ import annotations

import argparse

from ctr_pe.commands.options import Parser, data_root_option, dataset_option, json_option
from ctr_pe.data.synthetic.built_in import DEFAULT


def add_options(parser: Parser) -> None:
    dataset_option(parser, default=DEFAULT)
    json_option(parser)
    data_root_option(parser)


def run(args: argparse.Namespace) -> int:
    from ctr_pe.study.recommend import as_json, recommend
    from ctr_pe.utils.files import json_text

    if args.json:
        print(json_text(as_json(args.dataset, args.data_root)), end="")
    else:
        print(recommend(args.dataset, args.data_root))
    return 0
