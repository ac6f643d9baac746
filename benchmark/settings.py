"""Default settings by leave-one-log-out: for each log, those that are best on all other logs, and what that costs.

Every backbone is trained with the same settings on every log; a trial gives the best validation gAUC of its
epochs. A setting's regret on a log is that log's best gAUC of them all minus its own. The left-out regret of a log is
that of the setting, or rule, with the smallest mean regret over the logs of all other sources: a sub-sample is left out
with its whole log, so that no log takes part in its own choice. A rule may depend on what is known before training.

``run`` resumes: a trial is a file of its own. ``table`` prints the regrets.

The best of n trials with one seed each is the best in part by luck, so its regret is no estimate. ``confirm`` trains
the defaults, the best of the trials and FuxiCTR's recipe with seeds that no trial has, and prints their differences.

examples:
  python -m benchmark.settings run --out settings --model DIN --logs small
  python -m benchmark.settings table --out settings
  python -m benchmark.settings confirm --out settings --model DIN,TIN --logs amazon_beauty/10 --seeds 5
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import statistics
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import polars as pl
from scipy import stats
from tqdm import tqdm

from ctr_pe.config.yaml import training_recipe
from ctr_pe.data.logs.log import build
from ctr_pe.data.logs.recipe import load_recipe
from ctr_pe.data.synthetic.built_in import open_or_generate
from ctr_pe.study.benchmark import run_params
from ctr_pe.study.rendering import Table, as_text
from ctr_pe.training import Run, train
from ctr_pe.utils.errors import Diverged, UserError
from ctr_pe.utils.files import scratch_folder

SOURCES = ("amazon_beauty", "amazon_sports", "kuairand_pure", "ml-1m")
BUILT_IN = ("synthetic", "synthetic_context")
SMALL = "/10"  # a tenth of the users
LOGS = (*(name + SMALL for name in SOURCES), *BUILT_IN, *SOURCES)
KINDS = ("defaults", "tuned", "FuxiCTR")
MODELS = ("DIN", "TIN", "BST", "SASRec", "DIEN", "DMIN")
SEED = 10_000
"""Of every trial; no benchmark has it."""
DEFAULTS: tuple[tuple[str, Any], ...] = ()
FUXICTR: tuple[tuple[str, Any], ...] = (
    *training_recipe("fuxictr").items(),
    ("learning_rate", 5e-4), ("embedding_regularizer", 5e-3), ("net_dropout", 0.1), ("batch_norm", True),
    ("batch_size", 1024),
)  # fmt: skip
"""FuxiCTR's recipe with the values of its published DIN on Amazon Electronics; widths are ours."""


class Trial(NamedTuple):
    """One training. ``setting``: keys and values on top of the backbone's defaults."""

    model: str
    log: str
    setting: tuple[tuple[str, Any], ...]
    pe: str = "none"
    seed: int = SEED

    @property
    def name(self) -> str:
        digest = hashlib.blake2b(json.dumps(self.setting).encode(), digest_size=6).hexdigest()
        return f"{self.model}-{self.log.replace('/', '_')}-{self.pe}-{self.seed}-{digest}.json"


def source(log: str) -> str:
    """The log that a sub-sample is of."""
    return log.removesuffix(SMALL)


def settings(model: str, grid: Mapping[str, Sequence[Any]]) -> list[tuple[tuple[str, Any], ...]]:
    """Those of a grid. Without one: the defaults, twice and half their learning rate, little regularisation, DIN's own
    setting on kuairand_pure, and FuxiCTR's recipe."""
    if grid:
        return [tuple(zip(grid, values, strict=True)) for values in product(*grid.values())]
    rate = run_params(model, "own", {})["learning_rate"]
    rates = [(("learning_rate", 2 * rate),), (("learning_rate", rate / 2),)]
    pairs = [(("learning_rate", a), ("embedding_regularizer", b)) for a, b in ((3e-3, 1e-4), (1e-3, 1e-3))]
    return [DEFAULTS, *rates, *pairs, FUXICTR]


def prepare(log: str, data: Path, out: Path) -> Path:
    """The data set of a log, built below ``out`` at its first use."""
    if log in BUILT_IN:
        return open_or_generate(log, None).path
    folder = out / "data" / log.replace("/", "_")
    if not folder.exists():
        events = pl.read_parquet(data / source(log) / "interactions.parquet")
        if log.endswith(SMALL):
            events = events.filter(pl.col("user_id").hash(seed=1) % 10 == 0)
        with scratch_folder() as scratch:
            file = scratch / "interactions.parquet"
            events.write_parquet(file)
            given = {"interactions": file, "items": data / source(log) / "items.parquet"}
            build(load_recipe(source(log), given), folder, dataset_id="own")
    return folder


def run_trial(trial: Trial, dataset: Path, out: Path) -> dict[str, Any]:
    """Train, and store what it gave."""
    file = out / "trials" / trial.name
    if not file.exists():
        params, found = run_params(trial.model, "own", dict(trial.setting)), dict[str, Any]()
        try:
            outcome = train(Run(trial.model, dataset, trial.pe, trial.seed, params=params))
            found = {
                "valid": outcome.valid["gAUC"], "test": outcome.metrics["gAUC"], "epoch": outcome.epoch,
                "epochs": len(outcome.history), "seconds": outcome.seconds,
            }  # fmt: skip
        except Diverged as error:
            found = {"valid": None, "problem": str(error)}
        file.parent.mkdir(parents=True, exist_ok=True)
        new = file.with_suffix(".new")
        new.write_text(json.dumps({**trial._asdict(), "setting": dict(trial.setting), **found}) + "\n", "utf-8")
        new.replace(file)
    content: dict[str, Any] = json.loads(file.read_text("utf-8"))
    return content


def run(models: Sequence[str], logs: Sequence[str], data: Path, out: Path, jobs: int, pe: str, grid: Any) -> None:
    """Train the settings of every model on every log, the small logs first."""
    folders = {log: prepare(log, data, out) for log in tqdm(logs, "data sets")}
    train_all(
        [Trial(model, log, setting, pe) for log in logs for model in models for setting in settings(model, grid)],
        folders,
        out,
        jobs,
    )


def train_all(trials: Sequence[Trial], folders: Mapping[str, Path], out: Path, jobs: int) -> None:
    """Those that are not stored yet, ``jobs`` at a time."""
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        waiting = [pool.submit(run_trial, trial, folders[trial.log], out) for trial in trials]
        for one in tqdm(as_completed(waiting), "trials", len(waiting)):
            one.result()


def read(out: Path, pe: str = "none") -> pl.DataFrame:
    """What is finished: model, log, setting as JSON, seed, valid and test gAUC (null where training diverged)."""
    found = [json.loads(file.read_text("utf-8")) for file in sorted((out / "trials").glob("*.json"))]
    rows = [
        {"model": one["model"], "log": one["log"], "setting": json.dumps(one["setting"]), "seed": one["seed"],
         "valid": one["valid"], "test": one.get("test"), "epoch": one.get("epoch"), "seconds": one.get("seconds")}
        for one in found if one["pe"] == pe
    ]  # fmt: skip
    if not rows:
        raise UserError(f"{out}: no trials with {pe}: run them first")
    return pl.DataFrame(rows)


def regrets(trials: pl.DataFrame) -> pl.DataFrame:
    """The trials of settings that every log of the model has, with their regret: the log's best valid gAUC minus
    theirs."""
    best = pl.col("valid").max().over("model", "log")
    found = trials.with_columns(regret=best - pl.col("valid").fill_null(0.5))
    logs = pl.col("log").n_unique().over("model")
    return found.filter(pl.col("log").n_unique().over("model", "setting") == logs)


def left_out(found: pl.DataFrame, model: str) -> list[dict[str, Any]]:
    """Per log the setting of the smallest mean regret over the logs of all other sources, and its regret here."""
    own, rows = found.filter(pl.col("model") == model), []
    for log in sorted(own["log"].unique(), key=LOGS.index):
        others = own.filter(pl.col("log").map_elements(source, pl.String) != source(log))
        mean = others.group_by("setting").agg(pl.col("regret").mean()).sort("regret", "setting")
        here = own.filter(log=log, setting=mean["setting"][0]).row(0, named=True)
        best = own.filter(pl.col("log") == log).sort("valid", descending=True).row(0, named=True)
        rows.append({**here, "best": best["setting"], "best_valid": best["valid"]})
    return rows


def table(out: Path, pe: str) -> list[Table]:
    """The left-out regrets of each model, and the setting that is best over all of its logs."""
    found, made = regrets(read(out, pe).filter(seed=SEED)), []
    for model in sorted(found["model"].unique(), key=MODELS.index):
        lines = left_out(found, model)
        cells = [
            {"log": one["log"], "chosen on the others": _words(one["setting"]), "gAUC": f"{one['valid']:.4f}",
             "its own best": _words(one["best"]), "best gAUC": f"{one['best_valid']:.4f}",
             "regret": f"{one['regret']:.4f}"}
            for one in lines
        ]  # fmt: skip
        mean = found.filter(pl.col("model") == model).group_by("setting")
        overall = mean.agg(pl.col("regret").mean(), most=pl.col("regret").max()).sort("regret", "setting")
        notes = [
            f"over all logs: {_words(one[0])}: mean regret {one[1]:.4f}, at most {one[2]:.4f}"
            for one in overall.head(3).iter_rows()
        ]
        made.append(Table(f"{model} with {pe}: validation gAUC by leave-one-log-out", lines, cells, notes))
    return made


def best_of_trials(trials: pl.DataFrame, model: str, log: str) -> tuple[tuple[str, Any], ...]:
    """The setting of the highest validation gAUC at :data:`SEED`; of equals the one with the fewest keys."""
    own = trials.filter(model=model, log=log, seed=SEED).drop_nulls("valid")
    best = own.sort("valid", pl.col("setting").str.len_chars(), descending=[True, False])["setting"][0]
    return tuple(json.loads(best).items())


def confirm(models: Sequence[str], logs: Sequence[str], data: Path, out: Path, jobs: int, pe: str, seeds: int) -> Table:
    """Defaults, the best of the trials and FuxiCTR's recipe, ``seeds`` times each; differences with 95 % intervals for
    newly trained runs (Welch)."""
    folders = {log: prepare(log, data, out) for log in logs}
    pairs = [(model, log) for log in logs for model in models]
    train_all(
        [Trial(model, log, setting, pe) for model, log in pairs for setting in (DEFAULTS, FUXICTR)], folders, out, jobs
    )
    trials = read(out, pe)
    kinds = {pair: (DEFAULTS, best_of_trials(trials, *pair), FUXICTR) for pair in pairs}
    new = range(SEED + 1, SEED + 1 + seeds)
    wanted = [
        Trial(*pair, setting, pe, seed) for seed in new for pair in pairs for setting in dict.fromkeys(kinds[pair])
    ]
    train_all(wanted, folders, out, jobs)
    found, rows = read(out, pe).filter(pl.col("seed").is_in(new)), list[dict[str, Any]]()
    cells: list[dict[str, str | None]] = []
    for (model, log), of in kinds.items():
        own = found.filter(model=model, log=log)
        defaults, tuned, theirs = (own.filter(setting=json.dumps(dict(one))) for one in of)
        count = trials.filter(model=model, log=log, seed=SEED).height
        row: dict[str, Any] = {"model": model, "log": log, "trials": count, "tuned": dict(of[1])}
        for split in ("valid", "test"):
            means = {name: one[split].to_list() for name, one in zip(KINDS, (defaults, tuned, theirs), strict=True)}
            row |= {f"{split} {name}": means[name] for name in KINDS}
        rows.append(row)
        cell: dict[str, str | None] = {
            "log": log, "model": model, "trials": str(count), "tuned": _words(json.dumps(dict(of[1]))),
        }  # fmt: skip
        for split in ("valid", "test"):
            cell |= {f"{name}, {split}": _mean(row[f"{split} {name}"]) for name in KINDS}
        cell["regret, valid"] = _difference(row["valid tuned"], row["valid defaults"])
        cell["defaults - FuxiCTR, valid"] = _difference(row["valid defaults"], row["valid FuxiCTR"])
        cells.append(cell)
    note = f"gAUC with {pe}, mean and standard deviation of {seeds} seeds that no trial had; regret: tuned - defaults"
    return Table("Defaults, tuned, FuxiCTR's recipe", rows, cells, [note])


def _mean(values: Sequence[float]) -> str:
    return f"{statistics.fmean(values):.4f} ± {statistics.stdev(values) if len(values) > 1 else 0:.4f}"


def _difference(new: Sequence[float], old: Sequence[float]) -> str:
    if new == old:
        return "the same"
    low, high = stats.ttest_ind(new, old, equal_var=False).confidence_interval()
    return f"{statistics.fmean(new) - statistics.fmean(old):+.4f} [{low:+.4f}, {high:+.4f}]"


def _words(setting: str) -> str:
    short = {"learning_rate": "lr", "embedding_regularizer": "reg", "embedding_init": "init", "batch_size": "batch"}
    return " ".join(f"{short.get(key, key)} {value}" for key, value in json.loads(setting).items()) or "the defaults"


def main(argv: Sequence[str] | None = None) -> int:
    """Command line of this script; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["run", "table", "confirm"])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="folder of the logs")
    parser.add_argument("--model", default="DIN", help="comma separated")
    parser.add_argument("--logs", default=",".join(LOGS), help="comma separated")
    parser.add_argument("--pe", default="none")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--grid", default="{}", help="JSON: key -> values, of which all combinations are tried")
    parser.add_argument("--seeds", type=int, default=5, help="of confirm")
    args = parser.parse_args(argv)
    if args.what == "confirm":
        chosen = args.model.split(","), args.logs.split(",")
        print(as_text(confirm(*chosen, args.data, args.out, args.jobs, args.pe, args.seeds)))
        return 0
    if args.what == "table":
        for made in table(args.out, args.pe):
            print(f"\n{as_text(made)}")
        return 0
    run(
        args.model.split(","), args.logs.split(","), args.data, args.out, args.jobs, args.pe,
        json.loads(args.grid),
    )  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
