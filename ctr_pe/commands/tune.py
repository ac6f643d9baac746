"""``ctr-pe tune``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    parser = commands.add_parser(
        "tune",
        help="search hyper-parameters with Optuna",
        description="""Search hyper-parameters with Optuna (pip install 'ctr_pe[tune]'): trials that fall behind the
median are stopped, the best is chosen on the validation rows, and its test metrics are printed. By default
position_dim, heads and dropout rates are searched, as far as encoding and model have them. The study is kept in
OUT/study.db; calling again with the same OUT goes on, also side by side in several processes.""",
        epilog="""examples:
  ctr-pe tune --pe cape --dataset amazon_sports --trials 30 --out results/tune
  ctr-pe tune --space 'learning_rate={low: 1e-4, high: 1e-2, log: true}' --space 'position_dim=[8, 16]'
""",
    )
    add = parser.add_argument
    add("--model", default="DIN", metavar="NAME", help="a model (default: DIN)")
    add("--pe", default="cape", metavar="NAME", help="an encoding (default: cape)")
    add("--dataset", default="synthetic", metavar="NAME", help="as for benchmark (default: synthetic)")
    add("--trials", type=_count, default=30, metavar="N", help="in all, with those of earlier calls (default: 30)")
    add("--out", type=Path, metavar="DIR", help="study and report (default: results/tune-MODEL-PE-DATASET)")
    add("--space", action="append", default=[], metavar="KEY=VALUES",
        help="a list of values, or {low: …, high: …, log: true}; null leaves the key out; may be given several times",
    )  # fmt: skip
    add("--seed", type=_number, default=0, metavar="N", help="of training and search (default: 0)")
    add("--threads", type=_count, default=1, metavar="N",
        help="threads of one run; another number may change the last digits (default: 1)")  # fmt: skip
    add("--gpu", type=int, default=-1, metavar="N", help="GPU to train on, -1 for the CPU (default: -1)")
    add("--amp", action="append_const", dest="set", const="amp=true", default=[],
        help="mixed precision: attention in bfloat16")  # fmt: skip
    add("--set", action="append", default=[], metavar="KEY=VALUE",
        help="a hyper-parameter under FuxiCTR's name, such as learning_rate=1e-3; may be given several times",
    )  # fmt: skip
    add("--data-root", type=Path, metavar="DIR", help="where data sets live (default: $CTR_PE_DATA, else ./data)")
    parser.set_defaults(run=main)


def main(args: argparse.Namespace) -> int:
    from ctr_pe.config import parse_overrides
    from ctr_pe.study.tune import plan, tune

    overrides, space = parse_overrides(args.set), parse_overrides(args.space)
    search = plan(
        args.model, args.pe, args.dataset, args.data_root, overrides, space, args.seed, args.threads, args.gpu
    )
    out = args.out or Path("results") / f"tune-{args.model}-{args.pe}-{search.dataset.dataset_id}"
    return tune(search, args.trials, out)


def _number(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number from 0")
    return int(text)


def _count(text: str) -> int:
    if _number(text) < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return int(text)
