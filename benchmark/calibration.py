"""Do the intervals of the tables hold? Trained runs of one encoding, split at random, must seldom seem to differ.

Trains 24 seeds each of none and cape on the built-in set, of cape on its shuffled control and of none on Amazon Beauty,
one after another; then splits them into five against five, many times, and prints in how many splits p is below .05.
Among runs of one encoding it should be in 5 %; between none and cape on the built-in set, which differ by construction,
in nearly all.

A call that was stopped goes on where it was. The runs are published; tests/benchmark/test_calibration.py splits them.

example:
  python -m benchmark.calibration LOGS    # a folder with amazon_beauty/interactions.parquet and items.parquet
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ctr_pe import cli
from ctr_pe.data.root import data_root
from ctr_pe.evaluation.metrics import METRICS
from ctr_pe.evaluation.paired import LEVEL
from ctr_pe.study import benchmark
from ctr_pe.study.differences import Setting, between, settings
from ctr_pe.study.store import Store

OUT = Path(__file__).parent / "results" / "calibration"
LOG = "amazon_beauty"
SEEDS, SIZE, SPLITS = 24, 5, 600


class Split(NamedTuple):
    """Runs of ``ours`` against as many others of ``theirs``."""

    dataset: str
    ours: str
    theirs: str


SETTINGS = {"learning_rate": 3e-3, "embedding_regularizer": 1e-4}
"""Of the built-in sets when the published runs were made."""
TRAINED: dict[str, tuple[list[str], dict[str, Any]]] = {
    "synthetic": (["none", "cape"], SETTINGS),
    LOG: (["none"], {"epochs": 2}),
    "synthetic_shuffled": (["cape"], SETTINGS),
}
"""Data set -> encodings, and hyper-parameters that replace those of the model's config."""
CHANCE = [
    Split("synthetic", "none", "none"),
    Split("synthetic", "cape", "cape"),
    Split("synthetic_shuffled", "cape", "cape"),
    Split(LOG, "none", "none"),
]
PLANTED = Split("synthetic", "cape", "none")


def main(argv: list[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    root = data_root(args.data_root)
    if not (root / LOG).exists():
        files = [f"--{name}={args.logs / LOG / name}.parquet" for name in ("interactions", "items")]
        if code := cli.main(["data", "build", "--recipe", LOG, *files, "--out", str(root / LOG)]):
            return code
    for dataset, (encodings, params) in TRAINED.items():
        request = benchmark.Request(
            encodings=encodings,
            dataset=dataset,
            repeats=args.repeats,
            params=params,
            out=args.out,
            data_root=root,
            jobs=1,
        )
        if code := benchmark.run(request):
            return code
    for split in (*CHANCE, PLANTED):
        rates = rejected(args.out, split)
        shown = "  ".join(f"{metric} {rate:.1%}" for metric, rate in rates.items())
        print(f"{split.dataset}, {split.ours} against {split.theirs}: p < {LEVEL} in {shown}")
    return 0


def rejected(folder: Path, split: Split, size: int = SIZE, splits: int = SPLITS) -> dict[str, float]:
    """Metric -> share of random splits, ``size`` runs against ``size`` others, in which p is below .05."""
    (setting,) = (one for one in settings(Store(folder)) if one.key.dataset == split.dataset)
    draw = np.random.default_rng(0)
    count = dict.fromkeys(METRICS, 0)
    for _ in range(splits):
        ours, theirs = (draw.permutation(list(setting.runs[pe])) for pe in (split.ours, split.theirs))
        if split.ours == split.theirs:
            theirs = ours[size:]
        pair = _runs(setting, split.ours, ours[:size]), _runs(setting, split.theirs, theirs[:size])
        for metric, one in between(setting.statistics, {split: pair})[split].items():
            count[metric] += one.p < LEVEL
    return {metric: number / splits for metric, number in count.items()}


def _runs(setting: Setting, pe: str, seeds: Any) -> dict[int, Any]:
    return {seed: setting.runs[pe][seed] for seed in seeds.tolist()}


def _parser() -> argparse.ArgumentParser:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("calibration.py", description=__doc__, formatter_class=form)
    parser.add_argument("logs", type=Path, metavar="LOGS", help="folder of the logs")
    parser.add_argument("--repeats", type=int, default=SEEDS, metavar="N", help=f"seeds (default: {SEEDS})")
    parser.add_argument(
        "--out", type=Path, default=OUT, metavar="DIR", help="runs and tables (default: the published ones)"
    )
    parser.add_argument("--data-root", type=Path, metavar="DIR", help="data sets (default: data, or $CTR_PE_DATA)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
