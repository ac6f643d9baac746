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

from ctr_pe.commands.options import Parser, model_option, number, scoring_gpu_option


def add_options(parser: Parser) -> None:
    add = parser.option
    model_option(parser)
    add("--events FILE", "the log: user, item, time (default: histories of the model folder)", type=Path)
    add("--input FILE", "parquet: user, item and, if wanted, time", type=Path, required=True)
    add("--output FILE", "parquet: the input with a column `score`", type=Path, required=True)
    add("--overwrite", "replace an output that is already there")
    add("--threads N", "of scoring (default: 0, all cores)", type=number, default=0)
    scoring_gpu_option(parser)


def run(args: argparse.Namespace) -> int:
    import torch

    from ctr_pe.serving.batch_predict import predict

    if args.threads:
        torch.set_num_threads(args.threads)
    how = {"overwrite": args.overwrite, "gpu": args.gpu, "progress": True}
    print(predict(args.model, args.input, args.output, args.events, **how))
    return 0
