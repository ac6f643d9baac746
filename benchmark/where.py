"""Where does position help? The difference to none by what the histories of the test users are like.

From the runs of a benchmark and the data set that they were tested on: by length of the history, age of its last event,
unlike items between the last like item and the target, and whether events share a time. Of a user with several clicked
rows their mean counts. These facts are kept in RESULTS/users, and then the data set is not needed.

example:
  python -m benchmark.where benchmark/results/DIN-amazon_sports --pe naive,cape
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import polars as pl

from ctr_pe.data.dataset import Dataset, open_dataset
from ctr_pe.data.root import data_root
from ctr_pe.evaluation.paired import Difference, UserSpread, difference, influences, squared_distances
from ctr_pe.study.differences import Setting, settings
from ctr_pe.study.rendering import Table, as_markdown, as_text
from ctr_pe.study.store import RunKey, Store
from ctr_pe.study.users import STEPS
from ctr_pe.utils.errors import UserError, exit_code

DAY, BINS = 86_400, 4
FACTS, PUBLISHED = "-facts.parquet", "where.parquet"
SHOWN = ("naive", "cape", "cape_constant", "cape_cosine")
TITLES = {
    "all": "",
    "length": "history",
    "age": "age of the last event",
    "unlike": "since the last like item",
    "tied": "times",
}


class Bin(NamedTuple):
    """Users (U,) bool who are alike in something."""

    fact: str
    name: str
    users: np.ndarray[Any, np.dtype[np.bool_]]


class BinRuns(NamedTuple):
    """The runs among the users of one bin. ``gauc``: encoding -> gAUC of each run; ``spread``: encoding -> what these
    users add to the variance of its difference to ``none``."""

    fact: str
    name: str
    gauc: dict[str, list[float]]
    spread: dict[str, UserSpread]

    @property
    def users(self) -> int:
        """Those with both classes."""
        return self.spread["none"].users

    def gain(self, pe: str) -> Difference:
        """The encoding minus none among these users."""
        return difference(self.gauc[pe], self.gauc["none"], self.spread[pe])


def main(argv: list[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    return exit_code("where.py", lambda: _run(args))


def _run(args: argparse.Namespace) -> int:
    for table in write(args.results, args.pe, args.data_root):
        print(as_text(table), end="\n\n")
    return 0


def write(results: Path, pes: Sequence[str] = SHOWN, root: Path | None = None) -> list[Table]:
    """where.md, a table per model and data set, and a figure of each."""
    store, tables = Store(results), []
    for setting in settings(store):
        if "none" not in setting.runs:
            continue
        found = [some for some in bins_of(store, setting, root) if some.users]
        encodings = [pe for pe in setting.runs if pe in pes]
        tables.append(make_table(setting, found, encodings))
        draw(found, encodings, results / f"where-{setting.key.model}-{setting.key.dataset}.png")
    (results / "where.md").write_text(as_markdown(tables), encoding="utf-8")
    return tables


def facts_file(store: Store, key: RunKey) -> Path:
    return store.path / "users" / f"{key.data_hash}{FACTS}"


def kept_facts(store: Store, key: RunKey, root: Path | None) -> pl.DataFrame:
    """Of the store, or counted in the data set and kept."""
    file = facts_file(store, key)
    if not file.exists():
        dataset = open_dataset(key.dataset, data_root(root))
        if dataset.data_hash != key.data_hash:
            raise UserError(f"{dataset.path} is not the data that the runs were tested on")
        file.parent.mkdir(exist_ok=True)
        of_users(dataset).drop(dataset.group_id or "").cast(pl.Float32).write_parquet(file, compression_level=19)
    return pl.read_parquet(file)


def of_users(dataset: Dataset) -> pl.DataFrame:
    """A row per test user, in the order of the store's statistics: means over the clicked rows."""
    (group, *_), user = dataset.groups, dataset.group_id
    if user is None:
        raise UserError(f"{dataset.path}: has no users")
    category, like = group.target[-1], group.history[-1]
    columns = [user, dataset.label, category, like, *filter(None, [group.age])]
    frame = pl.read_parquet(dataset.split("test"), columns=columns)
    categories = zip(frame[like].to_list(), frame[category].to_list(), strict=True)
    facts = {"length": frame[like].list.len().cast(pl.Float64)}
    facts["unlike"] = pl.Series([_unlike(np.asarray(of_items), of_target) for of_items, of_target in categories])
    if group.age is not None:
        ages = frame[group.age].list
        facts["age"] = (ages.last() / DAY).fill_null(np.nan)
        facts["tied"] = (ages.n_unique() < ages.len()).cast(pl.Float64)
    rows = frame.select(user, dataset.label).with_columns(**facts)
    clicked = rows.filter(pl.col(dataset.label) > 0).group_by(user).agg(pl.col(list(facts)).mean())
    return rows.select(pl.col(user).unique().sort()).join(clicked, on=user, how="left", maintain_order="left")


def _unlike(items: Any, category: int) -> float:
    """Items after the last one of the category; infinite if there is none, or the target has no category (id 0)."""
    alike = np.flatnonzero((items == category) & (items != 0))
    return float(len(items) - 1 - alike[-1]) if len(alike) else np.inf


def bins(facts: pl.DataFrame) -> Iterator[Bin]:
    """About as many users in each of ``BINS`` bins of a fact; who has none of it is in none."""
    yield Bin("all", "all users", np.ones(len(facts), np.bool_))
    for fact, text in {"length": "items", "age": "days", "unlike": "unlike items"}.items():
        if fact not in facts.columns:
            continue
        values = facts[fact].fill_null(np.nan).to_numpy().astype(np.float64)
        finite = values[np.isfinite(values)]
        quantiles = np.linspace(0, 1, BINS + 1)[1:-1]
        edges = np.unique(np.quantile(finite, quantiles)).tolist() if len(finite) else []
        low = -np.inf
        for high in [*edges, np.inf]:
            inside = (values > low) & (values <= high) & np.isfinite(values)
            name = f"over {low:,.3g}" * math.isfinite(low) + f" to {high:,.3g}" * math.isfinite(high)
            yield Bin(fact, f"{name} {text}".strip(), inside)
            low = high
        if fact == "unlike":
            yield Bin(fact, "no like item", np.isposinf(values))
    if "tied" in facts.columns:
        tied = facts["tied"].fill_null(np.nan).to_numpy()
        yield Bin("tied", "all times differ", tied == 0)
        yield Bin("tied", "some times are equal", tied > 0)


def bins_of(store: Store, setting: Setting, root: Path | None = None) -> list[BinRuns]:
    """The setting's runs in each bin of its users: counted, or of published runs as they are kept."""
    if setting.results[0].key.name in setting.statistics.values:
        return [among(setting, some) for some in bins(kept_facts(store, setting.key, root))]
    kept = pl.read_parquet(store.path / "users" / PUBLISHED).filter(setting=_name(setting))
    found = []
    for (fact, name), rows in kept.group_by("fact", "bin", maintain_order=True):
        by_pe = {row["encoding"]: row for row in rows.to_dicts()}
        spread = {pe: UserSpread(row["gap"], row["interaction"], row["users"]) for pe, row in by_pe.items()}
        found.append(BinRuns(str(fact), str(name), {pe: row["gauc"] for pe, row in by_pe.items()}, spread))
    return found


def publish(store: Store, root: Path | None = None) -> None:
    """Keep what the bins of all settings have, in place of the facts of each user."""
    rows = []
    for setting in settings(store):
        for some in bins_of(store, setting, root):
            of_bin = {"setting": _name(setting), "fact": some.fact, "bin": some.name}
            rows += [
                {**of_bin, "encoding": pe, "gauc": gauc, **some.spread[pe]._asdict()} for pe, gauc in some.gauc.items()
            ]
    pl.DataFrame(rows).write_parquet(store.path / "users" / PUBLISHED, compression_level=19)


def _name(setting: Setting) -> str:
    return "/".join(setting.key.setting)


def among(setting: Setting, some: Bin) -> BinRuns:
    """The runs among some users alone."""
    statistics, (step, _) = setting.statistics, STEPS["gAUC"]
    shares = np.where(some.users, np.nan_to_num(statistics.users.shares["gAUC"]), 0.0)
    shares = shares / (shares.sum() or 1.0)
    gauc, added = {}, {}
    for pe, runs in setting.runs.items():
        values = np.stack([statistics.values[result.key.name]["gAUC"] * step for result in runs.values()])
        gauc[pe], added[pe] = (values @ shares).tolist(), influences(values, shares)
    users = int(np.count_nonzero(shares))
    spread = {
        pe: UserSpread.of(squared_distances(np.concatenate([of_pe, added["none"]])), len(of_pe), users)
        for pe, of_pe in added.items()
    }
    return BinRuns(some.fact, some.name, gauc, spread)


def make_table(setting: Setting, found: list[BinRuns], encodings: list[str]) -> Table:
    lines: list[dict[str, Any]] = []
    cells: list[dict[str, str | None]] = []
    for some in found:
        mean = float(np.mean(some.gauc["none"]))
        line: dict[str, Any] = {"users": some.name, "with both classes": some.users, "gAUC of none": mean}
        cell: dict[str, str | None] = {"users": some.name, "with both classes": f"{some.users:,}"}
        cell["gAUC of none"] = f"{mean:.4f}"
        for pe in encodings:
            one = some.gain(pe)
            line |= {pe: one.value, f"{pe} low": one.low, f"{pe} high": one.high}
            cell[f"{pe} − none [95 %]"] = f"{one.value:+.4f} [{one.low:+.4f}, {one.high:+.4f}]"
        lines.append(line)
        cells.append(cell)
    notes = ["gAUC: AUC within users. Intervals hold for other users and newly trained runs, and are not corrected for "
             "their number."]  # fmt: skip
    return Table(f"{setting.title}: where position helps", lines, cells, notes)


def draw(found: list[BinRuns], encodings: list[str], file: Path) -> None:
    """A panel per fact: differences to none with their intervals."""
    import matplotlib.pyplot as plt

    facts = dict.fromkeys(some.fact for some in found)
    widths = [0.5 + sum(some.fact == fact for some in found) for fact in facts]
    size = (3.2 * len(facts), 3.6)
    figure, axes = plt.subplots(
        1, len(facts), figsize=size, sharey=True, squeeze=False, layout="tight", width_ratios=widths
    )
    for panel, fact in zip(axes[0], facts, strict=True):
        those = [some for some in found if some.fact == fact]
        for number, pe in enumerate(encodings):
            ones = [some.gain(pe) for some in those]
            at = np.arange(len(those)) + 0.6 * (number + 0.5) / len(encodings) - 0.3
            value, low, high = (np.array([getattr(one, name) for one in ones]) for name in ("value", "low", "high"))
            panel.errorbar(at, value, [value - low, high - value], fmt="o", markersize=3, linewidth=1, label=pe)
        panel.set_xlim(-0.6, len(those) - 0.4)
        panel.axhline(0, color="grey", linewidth=0.8)
        panel.set_xticks(range(len(those)), [some.name for some in those], rotation=35, ha="right", fontsize=7)
        panel.set_title(TITLES[fact], fontsize=9)
    axes[0][0].set_ylabel("gAUC − none")
    axes[0][-1].legend(fontsize=7, frameon=False)
    figure.savefig(file, dpi=150)
    plt.close(figure)


def _parser() -> argparse.ArgumentParser:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("where.py", description=__doc__, formatter_class=form)
    parser.add_argument("results", type=Path, metavar="RESULTS", help="folder of a benchmark; where.md goes there")
    some = ",".join(SHOWN)
    parser.add_argument(
        "--pe", type=lambda text: text.split(","), default=SHOWN, metavar="NAME,…", help=f"encodings (default: {some})"
    )
    parser.add_argument("--data-root", type=Path, metavar="DIR", help="data sets (default: data, or $CTR_PE_DATA)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
