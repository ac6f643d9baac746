"""``ctr-pe draw``: a picture of what encodings do to attention.

Draw what encodings do to attention (pip install 'ctr_pe[draw]'), a column per encoding: attention by
position, and the encoding's own effects: bias by distance or age, rotation, position vectors, contextual positions of
real users, matrices, phases. Curves are means of all seeds with a band of ± one standard deviation. With --run before
and after the training of a benchmark, else as initialised.

examples:
  ctr-pe draw alibi,kerple_log --only bias --size column --out bias.pdf
  ctr-pe benchmark --pe none,rope,cape --keep-weights --out results/drawn
  ctr-pe draw none,rope,cape --run results/drawn --out attention.png
"""

from __future__ import annotations

import argparse
from pathlib import Path

from ctr_pe.commands.options import Parser, class_name, class_names, comma_list, data_root_option, number
from ctr_pe.data.synthetic.built_in import DEFAULT


def add_options(parser: Parser) -> None:
    add = parser.add_argument
    add("pe", type=class_names, metavar="PE[,PE…]", help="encodings; a+b chains two")
    add("--out", type=Path, required=True, metavar="FILE", help="the picture: .png, .svg or .pdf")
    add("--run", dest="store", type=Path, metavar="DIR", help="OUT of a benchmark with --keep-weights")
    add("--model", type=class_name, metavar="NAME", help="a model (default: that of the runs, else DIN)")
    add("--dataset", metavar="NAME", help=f"as for benchmark (default: that of the runs, else {DEFAULT})")
    add("--seed", type=number, metavar="N", help="only this seed (default: all of the runs, else the first 5)")
    add(
        "--only",
        type=comma_list,
        default=[],
        metavar="PANEL,…",
        help="rows: attention, bias, bias_by_age, rotation, rotation_by_age, added_weights, vectors, positions, u, l, "
        "phases (default: all that there are)",
    )
    add(
        "--size", choices=["page", "column"], default="page", help="width for a paper: 7 or 3.35 inches (default: page)"
    )
    add(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a hyper-parameter, with --run one that tells runs apart; may be given several times",
    )
    data_root_option(parser)


def run(args: argparse.Namespace) -> int:
    from ctr_pe.config.yaml import parse_overrides
    from ctr_pe.reporting.figures import picture
    from ctr_pe.reporting.figures.runs import Wanted

    params = parse_overrides(args.set)
    picture(
        args.out,
        Wanted(args.pe, args.store, args.model, args.dataset, args.seed, params, args.data_root),
        args.only,
        args.size,
    )
    return 0
