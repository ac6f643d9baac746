"""``ctr-pe monitor``: say whether a model still fits new events.

Compare new events with what a model was trained on: gAUC with its interval and calibration, where the
events have labels; and, column by column, the share of unknown ids and the population stability index (PSI). A limit
counts as crossed when chance does not explain it. For a scheduler the exit code says whether one is.

examples:
  ctr-pe monitor --model model --events today.parquet
  ctr-pe monitor --model model --events today.parquet --out drift.html --json
  ctr-pe monitor --model model --events today.parquet --psi 0.25 --unknown 0.1
"""

from __future__ import annotations

import argparse
from pathlib import Path

from ctr_pe.commands.options import Parser, data_root_option, model_option, scoring_gpu_option
from ctr_pe.data.logs.places import place

DRIFT = 3
LIMITS = {
    "psi": "the PSI of a column (default: 0.2)",
    "unknown": "the share of unknown ids, and of rows without history, above that of training (default: 0.05)",
    "gauc": "the loss of gAUC since the test rows (default: 0.02)",
    "calibration": "the mean prediction's distance from the click rate, as a part of that (default: 0.1)",
}
EXIT_CODES = {DRIFT: "drift: a limit is crossed"}


def add_options(parser: Parser) -> None:
    add = parser.option
    model_option(parser)
    text = "new events in the columns of the log; a file, folder, glob or address"
    add("--events PLACE", text, type=place, required=True)
    text = "events before them, as for predict (default: histories of the model folder, and the new events)"
    add("--log PLACE", text, type=place)
    text = "the data set the model was trained on, for a folder of a version that kept no profile of it"
    add("--dataset NAME", text)
    add("--out FILE", "a page (pip install 'ctr_pe[report]')", type=Path)
    add("--json", "print JSON in place of tables")
    for name, what in LIMITS.items():
        add(f"--{name} X", f"limit of {what}", type=float)
    data_root_option(parser)
    scoring_gpu_option(parser)


def run(args: argparse.Namespace) -> int:
    import json

    from ctr_pe.reporting.html.monitor import check_installed, write_page
    from ctr_pe.serving.monitor import DriftLimits, monitor
    from ctr_pe.study.rendering import as_text

    limits = DriftLimits(**{name: value for name in LIMITS if (value := getattr(args, name)) is not None})
    if args.out is not None:
        check_installed()
    how = {"dataset": args.dataset, "data_root": args.data_root, "limits": limits, "gpu": args.gpu}
    report = monitor(args.model, args.events, args.log, **how)
    if args.out is not None:
        write_page(report, args.out)
    if args.json:
        print(json.dumps(report.content(), indent=1, ensure_ascii=False))
    else:
        print("\n\n".join([str(report), *map(as_text, report.tables())]), end="\n\n")
        print("\n".join([*report.notes, *(f"drift: {one}" for one in report.drift or ["none, no limit is crossed"])]))
    return DRIFT if report.drift else 0
