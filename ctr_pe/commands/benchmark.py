"""``ctr-pe benchmark``: train and compare encodings over several seeds.

Train every model with every encoding over several seeds, and print one table: mean and standard
deviation, and the difference to none with an interval for other users and newly trained runs. At one
seed all encodings start from the same backbone weights and see the same batches. Finished runs are
kept in OUT/results.jsonl; calling again with the same OUT runs only what is missing, from the last
epoch of a run that was stopped or killed. Exit code 1 says that runs have failed.

examples:
  ctr-pe benchmark
  ctr-pe benchmark --pe none,naive,rope,cope,cape --dataset amazon_sports --jobs 2 --out results/sports
  ctr-pe benchmark --pe none,cape --repeats 1 --set epochs=1 --set 'dnn_hidden_units=[64, 32]'
  ctr-pe benchmark --pe none,naive,cape --dataset amazon_sports --tune 'learning_rate=[3e-3, 5e-3, 1e-2]'
  ctr-pe benchmark --suite small_cape_table2 --dataset amazon_sports --dry-run
  ctr-pe benchmark --suite cape_table2 --gpu 0
"""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path

from ctr_pe.commands.options import Parser, class_names, count, number, overrides, training_options
from ctr_pe.data.synthetic.built_in import DEFAULT


def add_options(parser: Parser) -> None:
    add = parser.add_argument
    add(
        "--suite",
        metavar="NAME|FILE",
        help="a suite of `ctr-pe list`, or a YAML file with one; --model and --pe narrow it, --dataset, --repeats, "
        "--protocol, --set and --tune change it",
    )
    add("--model", dest="models", type=class_names, metavar="NAME,…", help="models (default: DIN)")
    add(
        "--pe",
        dest="encodings",
        type=class_names,
        metavar="NAME,…",
        help="encodings; a+b chains two; my_pkg.recency:Recency is one of your own (default: none,cape)",
    )
    add(
        "--dataset",
        metavar="NAME",
        help=f"a data set below the data root, or the path of one (default: {DEFAULT}, generated at first use)",
    )
    add("--repeats", type=count, metavar="N", help="seeds per encoding (default: 5)")
    add("--seed", type=number, default=0, metavar="N", help="the first seed (default: 0)")
    add(
        "--protocol",
        choices=["heldout", "paper"],
        help="heldout selects the epoch on the validation split; paper trains on train and validation and selects on "
        "test, as the published results do: its tables are marked † (default: heldout)",
    )
    add("--out", type=Path, metavar="DIR", help="results and tables (default: results/DATASET-PROTOCOL)")
    add("--jobs", type=count, metavar="N", help="runs side by side; results do not change (default: one per core)")
    add("--keep-weights", action="store_true", help="keep each run's best weights in OUT/weights, for `ctr-pe draw`")
    add("--keep-models", action="store_true", help="keep each run's model in OUT/models, a folder for `ctr_pe.load`")
    add("--dry-run", action="store_true", help="print the runs and their estimated time, train nothing")
    add(
        "--repair",
        action="store_true",
        help="first move lines of OUT/results.jsonl that are no results to OUT/results.rejected.jsonl",
    )
    add(
        "--tune",
        action="append",
        default=[],
        metavar="KEY=[…]",
        help="several values of a hyper-parameter, of which every encoding takes its best on validation rows: each "
        "combination is trained once in OUT/trials; may be given several times",
    )
    training_options(parser)


def run(args: argparse.Namespace) -> int:
    from ctr_pe.config.yaml import parse_overrides
    from ctr_pe.serving.model_folder import keep_model
    from ctr_pe.study import benchmark

    given = {**vars(args), "params": overrides(args), "tune": parse_overrides(args.tune, "--tune")}
    given["keep"] = keep_model if args.keep_models else None
    return benchmark.run(benchmark.Request(**{field.name: given[field.name] for field in fields(benchmark.Request)}))
