"""``ctr-pe draw``: a picture of what encodings do to attention.

Draw what encodings do to attention (pip install 'ctr_pe[draw]'): attention by position of all
encodings, and the effects of each: bias by distance or age, rotation, position vectors, contextual positions of real
users, matrices, phases. With --run before and after the training of a benchmark, else as initialised.

examples:
  ctr-pe draw alibi,kerple_log --out bias.png
  ctr-pe benchmark --pe none,rope,cape --repeats 1 --keep-weights --out results/drawn
  ctr-pe draw none,rope,cape --run results/drawn --out attention.png
"""

from __future__ import annotations

import argparse
from pathlib import Path

from ctr_pe.commands.options import Parser, class_name, class_names, data_root_option, number


def add_options(parser: Parser) -> None:
    add = parser.add_argument
    add("pe", type=class_names, metavar="PE[,PE…]", help="encodings; a+b chains two")
    add("--out", type=Path, required=True, metavar="FILE", help="the picture: .png, .svg or .pdf")
    add("--run", dest="store", type=Path, metavar="DIR", help="OUT of a benchmark with --keep-weights")
    add("--model", type=class_name, metavar="NAME", help="a model (default: that of the runs, else DIN)")
    add("--dataset", metavar="NAME", help="as for benchmark (default: that of the runs, else synthetic)")
    add("--seed", type=number, metavar="N", help="of the weights (default: the first of the runs, else 0)")
    add(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a hyper-parameter, with --run one that tells runs apart; may be given several times",
    )
    data_root_option(parser)


def run(args: argparse.Namespace) -> int:
    from ctr_pe.config import parse_overrides
    from ctr_pe.draw import picture
    from ctr_pe.draw.runs import Wanted

    params = parse_overrides(args.set)
    picture(args.out, Wanted(args.pe, args.store, args.model, args.dataset, args.seed, params, args.data_root))
    return 0
