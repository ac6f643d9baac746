"""``ctr-pe benchmark``: train and compare encodings over several seeds.

Train every model with every encoding over several seeds, and print one table: mean and standard
deviation, and the difference to none with an interval for other users and newly trained runs. At one
seed all encodings start from the same backbone weights and see the same batches. Finished runs are
kept in OUT/results.jsonl; calling again with the same OUT runs only what is missing, from the last
epoch of a run that was stopped or killed.

examples:
  ctr-pe benchmark
  ctr-pe benchmark --pe none,naive,rope,cope,cape --dataset amazon_sports --jobs 2 --out results/sports
  ctr-pe benchmark --pe none,cape --repeats 1 --set epochs=1 --set 'dnn_hidden_units=[64, 32]'
  ctr-pe benchmark --pe none,naive,cape --dataset mine --tune quick --dry-run
  ctr-pe benchmark --pe none,naive,cape --dataset amazon_sports --tune 'learning_rate=[3e-3, 5e-3, 1e-2]'
  ctr-pe benchmark --suite small_cape_table2 --dataset amazon_sports --dry-run
  ctr-pe benchmark --suite cape_table2 --gpu 0 --published --format latex > table2.tex
  ctr-pe benchmark --suite cape_table2 --executor ray
  ctr-pe benchmark --task next-item --model SASRec --pe none,naive,rope,cape --dataset amazon_beauty_next
"""

from __future__ import annotations

import argparse
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

from ctr_pe.commands.options import (
    Parser,
    class_names,
    count,
    dataset_option,
    executor_options,
    format_options,
    number,
    overrides,
    published_option,
    training_options,
)

EXIT_CODES = {1: "some runs failed, or in a dry run would fail; the others are kept"}


def add_options(parser: Parser) -> None:
    add = parser.option
    text = "--model and --pe narrow it, --dataset, --repeats, --protocol, --set and --tune change it"
    add("--suite NAME|FILE", f"a suite of `ctr-pe list`, or a YAML file with one; {text}")
    text = "next-item ranks all items by what comes next, on a data set of --protocol leave-one-out or temporal"
    add("--task", f"click, or {text} (default: click)", choices=["click", "next-item"])
    add("--model NAME,…", "models (default: DIN; next-item: SASRec)", dest="models", type=class_names)
    text = "encodings; a+b chains two; my_pkg.recency:Recency is one of your own (default: none,cape)"
    add("--pe NAME,…", text, dest="encodings", type=class_names)
    dataset_option(parser)
    add("--repeats N", "seeds per encoding (default: 5)", type=count)
    add("--seed N", "the first seed (default: 0)", type=number, default=0)
    add(
        "--protocol",
        "heldout selects the epoch on the validation split; paper trains on train and validation and selects on "
        "test, as the published results do: its tables are marked † (default: heldout)",
        choices=["heldout", "paper"],
    )
    add("--out DIR", "results and tables (default: results/DATASET-PROTOCOL)", type=Path)
    executor_options(parser, "runs side by side; results do not change (default: one per core)")
    add("--keep-weights", "keep each run's best weights in OUT/weights, for `ctr-pe draw`")
    add("--keep-models", "keep each run's model in OUT/models, a folder for `ctr_pe.load`")
    add("--dry-run", "print the runs and their estimated time, train nothing")
    add("--repair", "first move lines of OUT/results.jsonl that are no results to OUT/results.rejected.jsonl")
    add(
        "--tune N|quick|KEY=[…]",
        "settings of its own for every encoding, chosen on validation rows by trainings in OUT/trials: the best of N "
        "(quick: 6) settings of learning rate, regularisation and dropout around those of the data set, in short "
        "trainings; or of several values of a hyper-parameter, each combination trained once",
        several=True,
    )
    format_options(parser)
    published_option(parser)
    training_options(parser)


def run(args: argparse.Namespace) -> int:
    from ctr_pe.serving.model_folder import keep_model
    from ctr_pe.study import benchmark

    given = {**vars(args), "params": overrides(args), "tune": _tune(args.tune)}
    given["keep"] = keep_model if args.keep_models else None
    return benchmark.run(benchmark.Request(**{field.name: given[field.name] for field in fields(benchmark.Request)}))


def _tune(texts: list[str]) -> Any:
    """A number of settings or ``quick``, or values by key."""
    from ctr_pe.config.yaml import parse_overrides
    from ctr_pe.utils.errors import UserError

    budgets = [text for text in texts if text == "quick" or re.fullmatch(r"-?\d+", text)]
    if budgets and len(texts) > 1:
        raise UserError(f"--tune {budgets[0]}: it stands alone, beside no other --tune")
    if budgets:
        return budgets[0] if budgets[0] == "quick" else int(budgets[0])
    return parse_overrides(texts, "--tune") or None
