"""``ctr-pe predict``: score a parquet file with a model folder.

Score a parquet file of users and items, which may be larger than memory: the output has all its rows and columns, in
their order, and a column `score`, the click probability. A row sees the events of its user strictly before its time,
all of them if there is no column of times. A call that was interrupted goes on where it stopped when it is repeated.

examples:
  ctr-pe predict --model model --events log.parquet --input requests.parquet --output scores.parquet
"""

from __future__ import annotations

import argparse
from pathlib import Path

from ctr_pe.commands.options import Parser, number


def add_options(parser: Parser) -> None:
    add = parser.add_argument
    add("--model", type=Path, required=True, metavar="DIR", help="a model folder")
    add(
        "--events", type=Path, metavar="FILE", help="the log: user, item, time (default: histories of the model folder)"
    )
    add("--input", type=Path, required=True, metavar="FILE", help="parquet: user, item and, if wanted, time")
    add("--output", type=Path, required=True, metavar="FILE", help="parquet: the input with a column `score`")
    add("--overwrite", action="store_true", help="replace an output that is already there")
    add("--threads", type=number, default=0, metavar="N", help="of scoring (default: 0, all cores)")
    add("--gpu", type=int, default=-1, metavar="N", help="GPU to score on, -1 for the CPU (default: -1)")


def run(args: argparse.Namespace) -> int:
    import torch

    from ctr_pe.serving.batch_predict import predict

    if args.threads:
        torch.set_num_threads(args.threads)
    how = {"overwrite": args.overwrite, "gpu": args.gpu, "progress": True}
    print(predict(args.model, args.input, args.output, args.events, **how))
    return 0
