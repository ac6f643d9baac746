"""``ctr-pe tune``: search hyper-parameters with Optuna.

Search hyper-parameters with Optuna (pip install 'ctr_pe[tune]'): trials that fall behind the
median are stopped, the best is chosen on the validation rows, and its test metrics are printed. By default
position_dim, heads and dropout rates are searched, as far as encoding and model have them. The study is kept in
OUT/study.db; calling again with the same OUT continues it, also from several processes at once. The best trial's
model stays in OUT/models, a folder for `ctr_pe.load`, and OUT/best.yaml is the best trial as a config:
run_expid.py --config OUT/best.yaml --expid best. With --executor or --jobs several trials are trained at once, and the
study is OUT/study.journal; Slurm's jobs say nothing before they end, but stop by the same rule.

examples:
  ctr-pe tune --pe cape --dataset amazon_sports --trials 30 --out results/tune
  ctr-pe tune --pe cape --dataset amazon_sports --trials 100 --executor ray
  ctr-pe tune --space 'learning_rate={low: 1e-4, high: 1e-2, log: true}' --space 'position_dim=[8, 16]'
"""

from __future__ import annotations

import argparse
from pathlib import Path

from ctr_pe.commands.options import (
    Parser,
    class_name,
    count,
    executor_options,
    json_option,
    number,
    overrides,
    training_options,
)
from ctr_pe.data.synthetic.built_in import DEFAULT


def add_options(parser: Parser) -> None:
    add = parser.option
    add("--model NAME", "a model (default: DIN)", type=class_name, default="DIN")
    add("--pe NAME", "an encoding (default: cape)", type=class_name, default="cape")
    add("--dataset NAME", f"as for benchmark (default: {DEFAULT})", default=DEFAULT)
    add("--trials N", "in all, with those of earlier calls (default: 30)", type=count, default=30)
    add("--out DIR", "study and report (default: results/tune-MODEL-PE-DATASET)", type=Path)
    text = "a list of values, or {low: …, high: …, log: true}; null leaves the key out"
    add("--space KEY=VALUES", text, several=True)
    add("--seed N", "of training and search (default: 0)", type=number, default=0)
    executor_options(parser, "trials at once (default: one in this process, else as many as there is room for)")
    json_option(parser)
    training_options(parser)


def run(args: argparse.Namespace) -> int:
    from ctr_pe.config.yaml import parse_overrides
    from ctr_pe.serving.model_folder import keep_model
    from ctr_pe.study.tune import plan, tune

    params, space = overrides(args), parse_overrides(args.space, "--space")
    how = {name: getattr(args, name) for name in ("seed", "threads", "gpu", "track")}
    search = plan(args.model, args.pe, args.dataset, args.data_root, params, space, **how)
    out = args.out or Path("results") / f"tune-{args.model}-{args.pe}-{search.dataset.dataset_id}"
    return tune(search, args.trials, out, keep=keep_model, as_json=args.json, executor=args.executor, jobs=args.jobs)
