"""``ctr-pe predict``: score a parquet file with a model folder.

Score a parquet file of users and items, which may be larger than memory: the output has all its rows and columns, in
their order, and a column `score`, the click probability. A row sees the events of its user strictly before its time,
all of them if there is no column of times. A call that was interrupted goes on where it stopped when it is repeated.

--engine ray and --engine spark score parts of the input on the machines of a cluster, which see all files under the
names that are given here; what a worker has not finished when it dies, another does again.

examples:
  ctr-pe predict --model model --events log.parquet --input requests.parquet --output scores.parquet
"""

from __future__ import annotations

import argparse
from pathlib import Path

from ctr_pe.commands.options import Parser, model_option, number, scoring_gpu_option
from ctr_pe.data.logs.places import place


def add_options(parser: Parser) -> None:
    add = parser.option
    model_option(parser)
    add("--events PLACE", "the log: user, item, time (default: histories of the model folder)", type=place)
    add("--input FILE", "parquet: user, item and, if wanted, time", type=Path, required=True)
    add("--output FILE", "parquet: the input with a column `score`", type=Path, required=True)
    add("--overwrite", "replace an output that is already there")
    add("--threads N", "of scoring (default: 0, all cores; on another engine 1 for each part)", type=number, default=0)
    text = "where parts of the input are scored: local, ray, ray://HOST:PORT, spark, spark://HOST:PORT (default: local)"
    add("--engine NAME", text, default="local")
    scoring_gpu_option(parser)


def run(args: argparse.Namespace) -> int:
    import torch

    from ctr_pe.serving.batch_predict import predict

    if args.threads:
        torch.set_num_threads(args.threads)
    how = {"overwrite": args.overwrite, "gpu": args.gpu, "progress": not args.quiet}
    how |= {"engine": args.engine, "threads": args.threads or 1}
    print(predict(args.model, args.input, args.output, args.events, **how))
    return 0
