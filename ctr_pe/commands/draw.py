"""``ctr-pe draw``: a picture of what encodings do to attention.

Draw what encodings do to attention (pip install 'ctr_pe[draw]'), a column per encoding: attention by
position, and the encoding's own effects: bias by distance or age, rotation, position vectors, contextual positions of
real users, matrices, phases. Curves are means of all seeds with a band of ± one standard deviation. With --run before
and after the training of a benchmark, else as initialised.

examples:
  ctr-pe draw alibi,kerple_log --only bias --size column --out bias.pdf
  ctr-pe benchmark --pe none,rope,cape --keep-weights --out results/drawn
  ctr-pe draw none,rope,cape --run results/drawn --out attention.png
  ctr-pe draw cape --run results/drawn --longest 1 --size column --out history.svg
"""

from __future__ import annotations

import argparse
from pathlib import Path

from ctr_pe.commands.options import Parser, class_name, class_names, comma_list, count, data_root_option, number
from ctr_pe.data.synthetic.built_in import DEFAULT


def add_options(parser: Parser) -> None:
    add = parser.option
    add("pe PE[,PE…]", "encodings; a+b chains two", type=class_names)
    add("--out FILE", "the picture: .png, .svg or .pdf", type=Path, required=True)
    add("--run DIR", "OUT of a benchmark with --keep-weights", dest="store", type=Path)
    add("--model NAME", "a model (default: that of the runs, else DIN)", type=class_name)
    add("--dataset NAME", f"as for benchmark (default: that of the runs, else {DEFAULT})")
    add("--seed N", "only this seed (default: all of the runs, else the first 5)", type=number)
    names = "attention, bias, bias_by_age, rotation, rotation_by_age, added_weights, vectors, positions, u, l, phases"
    add("--only PANEL,…", f"rows: {names} (default: all that there are)", type=comma_list, default=[])
    add(
        "--longest N",
        "of the N test rows with the longest histories; 1 is one history (default: of 1,000 random rows)",
        type=count,
    )
    add("--size", "width for a paper: 7 or 3.35 inches (default: page)", choices=["page", "column"], default="page")
    add("--dpi N", "pixels of an inch, of a .png (default: 300)", type=count, default=300)
    add("--set KEY=VALUE", "a hyper-parameter, with --run one that tells runs apart", several=True)
    data_root_option(parser)


def run(args: argparse.Namespace) -> int:
    from ctr_pe.config.yaml import parse_overrides
    from ctr_pe.reporting.figures import picture
    from ctr_pe.reporting.figures.runs import Wanted

    params = parse_overrides(args.set)
    runs = Wanted(args.pe, args.store, args.model, args.dataset, args.seed, params, args.data_root)
    picture(args.out, runs, args.only, args.size, args.longest, args.dpi)
    return 0
