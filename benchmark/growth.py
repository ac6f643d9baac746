"""What a log of N rows and V items costs: disk, memory and time by formulas with constants of this machine.

Logs of six sizes are made, built and trained on for some steps. The constants of each formula are those that give the
measurements at three of them; the other three, of which one is the largest, check it. Users have 20 events each, items
one attribute; the model is DIN with CAPE. Seconds are those of one processor.

examples:
  python -m benchmark.growth --json benchmark/results/growth.json   # measure, minutes
  python -m benchmark.growth --constants benchmark/results/growth.json --rows 1e9 --items 1e8
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import resource
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import polars as pl
import torch
from scipy.optimize import nnls

from benchmark.speed import memory, models
from ctr_pe.data.dataset import Dataset, open_dataset
from ctr_pe.data.loader import BatchLoader
from ctr_pe.models.full_ranking import rank_items
from ctr_pe.serving.model_folder import scorer_of, write_model
from ctr_pe.study.rendering import Table, as_markdown
from ctr_pe.training import Outcome, Run, build_model, score
from ctr_pe.training.source import DataSource
from ctr_pe.utils.files import scratch_folder

EVENTS, CATEGORIES, BATCH, REQUESTS = 20, 100, 1_024, 64
NETWORK = 1.25e9
"""Bytes per second between machines (10 Gbit/s), of which each step of several processes sends gradients."""


class Size(NamedTuple):
    """Rows of a log, and items that occur in it."""

    rows: float
    items: float

    @property
    def users(self) -> float:
        return self.rows / EVENTS


class Formula(NamedTuple):
    """A figure is the sum of ``terms`` of a size, each times a constant. ``tolerance``: by which factor the figure of
    a size that it was not made of may differ."""

    title: str
    unit: str
    terms: Mapping[str, Callable[[Size], float]]
    tolerance: float


ONE: dict[str, Callable[[Size], float]] = {"1": lambda size: 1.0}
ROWS: dict[str, Callable[[Size], float]] = {"N": lambda size: size.rows}
ITEMS: dict[str, Callable[[Size], float]] = {"V": lambda size: size.items}
EXACT, BYTES, SECONDS = 1.05, 1.25, 2.0
FORMULAS = {
    "disk": Formula("data set on disk", "bytes", ROWS | ITEMS, BYTES),
    "build": Formula("data build", "seconds", ONE | ROWS | ITEMS, SECONDS),
    "build memory": Formula("data build, memory", "bytes", ONE | ROWS | ITEMS, BYTES),
    "state": Formula("weights, gradients, Adam's moments", "bytes", ONE | ITEMS, EXACT),
    "step": Formula(f"training step of {BATCH:,} rows, Adam", "seconds", ONE | ITEMS, SECONDS),
    "lazy step": Formula("the same, lazy_adam", "seconds", ONE, SECONDS),
    "model": Formula("model folder without histories", "bytes", ONE | ITEMS, BYTES),
    "score": Formula("scoring a row", "seconds", ONE, SECONDS),
    "rank": Formula("ranking all items for a user", "seconds", ONE | ITEMS, SECONDS),
}
Figures = dict[str, float]
Constants = dict[str, dict[str, float]]


def sizes(rows: int) -> tuple[list[Size], list[Size]]:
    """Three that constants come from, which differ in rows or in items, and three that check them. An item has at least
    two events."""
    items = rows // 20
    made_of = [Size(rows, items), Size(4 * rows, items), Size(4 * rows, 16 * items)]
    return made_of, [Size(rows, 8 * items), Size(2 * rows, 4 * items), Size(8 * rows, 32 * items)]


def fitted(measured: Mapping[Size, Figures]) -> Constants:
    """The constants, none below 0, whose formulas have the least relative errors."""
    found = {}
    for name, formula in FORMULAS.items():
        figures = np.array([of[name] for of in measured.values()])
        terms = np.array([[term(size) for term in formula.terms.values()] for size in measured])
        scale = terms.max(0)
        constants, _ = nnls(terms / scale / figures[:, None], np.ones(len(figures)))
        found[name] = dict(zip(formula.terms, (constants / scale).tolist(), strict=True))
    return found


def predicted(constants: Mapping[str, Mapping[str, float]], size: Size) -> Figures:
    return {
        name: sum(constants[name][term] * of(size) for term, of in formula.terms.items())
        for name, formula in FORMULAS.items()
    }


def measure(size: Size, folder: Path) -> Figures:
    """All figures of a size; what is made for it is removed."""
    log, items, out = (folder / name for name in ("log.parquet", "items.parquet", "set"))
    with multiprocessing.get_context("spawn").Pool(1) as pool:  # the peak of a command counts that of its parent
        pool.apply(_write, (size, log, items))
    words = [sys.executable, "-m", "ctr_pe.cli", "data", "build", "--quiet", "--protocol", "din"]
    files = {"--interactions": log, "--items": items, "--out": out}
    start = _of_children()
    code, own, _ = memory.peak_of([*words, *(str(part) for pair in files.items() for part in pair)])
    if code:
        raise ValueError(f"ctr-pe data build ended with code {code}")
    found = {"build": _of_children() - start, "build memory": own}
    found["disk"] = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
    found |= _trained(out, folder)
    shutil.rmtree(out)
    return {name: float(found[name]) for name in FORMULAS}


def _of_children() -> float:
    """Seconds of a processor of the commands that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _write(size: Size, log: Path, items: Path) -> None:
    rows, catalogue = int(size.rows), int(size.items)
    draw = np.random.default_rng(0)
    item = draw.permutation(np.arange(rows) % catalogue)
    user, clock = draw.permutation(np.arange(rows) % int(size.users)), 1_700_000_000 + np.arange(rows)
    pl.DataFrame({"user_id": user, "item_id": item, "timestamp": clock}).write_parquet(log)
    every = np.arange(catalogue)
    pl.DataFrame({"item_id": every, "cate_id": every % CATEGORIES}).write_parquet(items)


def _trained(path: Path, folder: Path) -> Figures:
    """Of the model on a data set."""
    dataset, found = open_dataset(str(path)), Figures()
    run = Run("DIN", dataset.path, "cape", seed=0)
    for name, optimizer in (("step", None), ("lazy step", "lazy_adam")):
        changed = Run("DIN", dataset.path, "cape", 0, params={**run.params, "table_optimizer": optimizer})
        model = models.ready(build_model(changed, dataset, folder))
        loader = BatchLoader(model.feature_map, dataset.split("train"), batch_size=BATCH)
        step = models.steps(model, list(islice(loader, 8)))
        found[name] = _seconds(step, 8)
        if optimizer is None:
            held = [part for state in model.optimizer.state.values() for part in state.values()]
            weights = [part for parameter in model.parameters() for part in (parameter, parameter.grad)]
            found["state"] = sum(part.nbytes for part in [*held, *weights] if isinstance(part, torch.Tensor))
            kept = Outcome({}, epoch=0, seconds=0.0, scores=np.zeros(0, np.float32), parameters=0)
            write_model(folder / "model", scorer_of(model, run, DataSource.of(dataset), kept))
            found["model"] = sum(file.stat().st_size for file in (folder / "model").iterdir())
            shutil.rmtree(folder / "model")
            found["score"] = _scoring(model, dataset)
    table = max((one.detach() for one in model.parameters()), key=len)  # that of the items
    states = torch.randn(REQUESTS, table.shape[1])
    found["rank"] = _seconds(lambda _: rank_items(states, table, count=10), 3) / REQUESTS
    return found


def _scoring(model: Any, dataset: Dataset) -> float:
    """Seconds of a row."""
    loader = BatchLoader(model.feature_map, dataset.split("test"), split="valid", batch_size=BATCH)
    batches = list(islice(loader, 4))
    return _seconds(lambda _: score(model, batches), 3) / sum(len(one["label"]) for one in batches)


def _seconds(call: Callable[[int], object], repeats: int) -> float:
    """The median of a processor's, whatever else the machine does, after one call that is not counted."""
    taken = []
    for number in range(repeats + 1):
        start = time.process_time()
        call(number)
        taken.append(time.process_time() - start)
    return statistics.median(taken[1:])


def check(constants: Constants, measured: Mapping[Size, Figures]) -> list[str]:
    """A line for each figure that differs from its formula by more than it may."""
    wrong = []
    for size, figures in measured.items():
        for name, said in predicted(constants, size).items():
            factor = max(said / figures[name], figures[name] / said)
            if factor > FORMULAS[name].tolerance:
                where = f"{name} at {size.rows:,.0f} rows, {size.items:,.0f} items"
                wrong.append(f"{where}: {figures[name]:.4g}, by the formula {said:.4g}")
    return wrong


def needs(constants: Constants, size: Size, epochs: int = 2) -> dict[str, str | None]:
    """What a log of a size needs on one such machine, in words of people."""
    found, pairs = predicted(constants, size), 2 * size.rows
    train = pairs / BATCH * epochs
    return {
        "rows": f"{size.rows:.0e}",
        "items": f"{size.items:.0e}",
        "data set": _bytes(found["disk"]),
        "build": _time(found["build"]),
        "build, memory": _bytes(found["build memory"]),
        "training, memory": _bytes(found["state"]),
        f"{epochs} epochs, Adam": _time(train * found["step"]),
        f"{epochs} epochs, lazy_adam": _time(train * found["lazy step"]),
        "gradients of a step, sent": _time(2 * found["state"] / 4 / NETWORK),  # to the others and back
        "model folder": _bytes(found["model"]),
        "score each row": _time(size.rows * found["score"]),
        "cores to score them in an hour": f"{math.ceil(size.rows * found['score'] / 3600):,}",
        "rank all items, a user": _time(found["rank"]),
    }


def _bytes(value: float) -> str:
    for unit in ("MB", "GB"):
        if value < 999.5 * (scale := {"MB": 1e6, "GB": 1e9}[unit]):
            return f"{value / scale:.3g} {unit}"
    return f"{value / 1e12:.3g} TB"


def _time(value: float) -> str:
    for unit, scale, most in (("ms", 1e-3, 1.0), ("s", 1.0, 120.0), ("min", 60.0, 7200.0), ("h", 3600.0, 172_800.0)):
        if value < most:
            return f"{value / scale:.3g} {unit}"
    return f"{value / 86_400:.0f} days"


def tables(content: Mapping[str, Any], extra: Sequence[Size] = ()) -> list[Table]:
    """Constants and checks, and what sizes need."""
    constants, checks = content["constants"], content["checks"]
    of_formulas = list[dict[str, str | None]]()
    for name, formula in FORMULAS.items():
        terms = [
            f"{constant:.3g}" + f" {term}" * (term != "1") for term, constant in constants[name].items() if constant
        ]
        errors = [one["measured"][name] / one["formula"][name] - 1 for one in checks]
        row: dict[str, str | None] = {"figure": formula.title, "unit": formula.unit, "formula": " + ".join(terms)}
        at = (f"{one['rows']:,.0f} × {one['items']:,.0f}" for one in checks)
        row |= {where: f"{error:+.0%}" for where, error in zip(at, errors, strict=True)}
        of_formulas.append(row)
    given = [Size(1e6, 1e5), Size(1e7, 1e6), Size(1e8, 1e7), Size(1e9, 1e8), *extra]
    in_words = [needs(constants, size) for size in given]
    notes = ["The last columns: by how much the measurement at so many rows × items differs from the formula."]
    return [Table("Formulas", [], of_formulas, notes), Table("On one processor", [], in_words, [])]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="benchmark.growth", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--smallest", type=int, default=400_000, metavar="ROWS", help="of the six logs")
    parser.add_argument("--json", type=Path, help="measure, and write constants and checks")
    parser.add_argument("--constants", type=Path, default=Path("benchmark/results/growth.json"), help="of --json")
    parser.add_argument("--rows", type=float, help="of a log of yours")
    parser.add_argument("--items", type=float, default=1e6)
    args = parser.parse_args(arguments)
    if args.json:
        content = measured_at(*sizes(args.smallest))
        args.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        args.constants = args.json
    content = json.loads(args.constants.read_text(encoding="utf-8"))
    print(as_markdown(tables(content, [Size(args.rows, args.items)] if args.rows else [])))
    for line in content["wrong"]:
        print(line, file=sys.stderr)
    return int(bool(content["wrong"]))


def measured_at(made_of: Sequence[Size], checked: Sequence[Size]) -> dict[str, Any]:
    """Constants from some sizes; of others, measurements beside the formulas, and what differs too much."""
    torch.set_num_threads(1)
    with scratch_folder() as folder:
        found = {size: measure(size, folder) for size in [*made_of, *checked]}
    return content_of(found, made_of, checked)


def content_of(found: Mapping[Size, Figures], made_of: Sequence[Size], checked: Sequence[Size]) -> dict[str, Any]:
    """The same of what was measured."""
    constants = fitted({size: found[size] for size in made_of})
    content: dict[str, Any] = {
        name: [{**size._asdict(), "measured": found[size], "formula": predicted(constants, size)} for size in some]
        for name, some in {"made_of": made_of, "checks": checked}.items()
    }
    return {"constants": constants, **content, "wrong": check(constants, {size: found[size] for size in checked})}


if __name__ == "__main__":
    sys.exit(main())
