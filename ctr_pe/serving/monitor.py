"""Does a model still fit what comes in? New events against what it was trained on.

Each row of the new events is scored as a request at its time, with the stored events of its user and the new ones
before it. Compared are quality (gAUC, AUC, logloss), calibration, and column by column the share of unknown ids and the
population stability index (:mod:`ctr_pe.evaluation.drift`). Intervals are of 95 %, for other users. A limit is crossed
where the whole interval lies beyond it, or the index is above the limit and above what chance gives as many rows as
there are users: few rows raise no alarm. Histories grow with a log, so the index of their lengths is shown and has no
limit; the share of rows without history has one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from ctr_pe.config.yaml import load_json
from ctr_pe.data.dataset import Dataset, open_dataset
from ctr_pe.data.logs.labels import label_column
from ctr_pe.data.logs.places import place
from ctr_pe.data.logs.tables import Place, scan
from ctr_pe.data.root import REPORT
from ctr_pe.evaluation.calibration import Reliability, reliability
from ctr_pe.evaluation.drift import equal_bins, psi, psi_by_chance
from ctr_pe.evaluation.metrics import group_codes
from ctr_pe.evaluation.paired import MetricInterval, over_users
from ctr_pe.evaluation.users import Users, user_values
from ctr_pe.serving import tables
from ctr_pe.serving.encoder import MISSING
from ctr_pe.serving.model_folder import read_model
from ctr_pe.serving.profile import BATCH, columns_of, kind_of, length_of, training_profile
from ctr_pe.serving.update import history_with
from ctr_pe.study.rendering import Table, number
from ctr_pe.training.source import DataSource
from ctr_pe.utils.errors import UserError, counted, option

if TYPE_CHECKING:
    import numpy.typing as npt

    from ctr_pe.data.requests import EncodedRequests
    from ctr_pe.data.timeline import EncodedLog
    from ctr_pe.serving.scorer import Scorer

    Values = npt.NDArray[Any]


@dataclass(frozen=True)
class DriftLimits:
    """What is drift: a population stability index above ``psi``, a share of unknown ids, or of rows without history,
    more than ``unknown`` above that of training, a gAUC more than ``gauc`` below that of the test rows, a mean
    prediction off the click rate by more than ``calibration`` of it."""

    psi: float = 0.2
    unknown: float = 0.05
    gauc: float = 0.02
    calibration: float = 0.1

    def __post_init__(self) -> None:
        for of in fields(self):
            if not (math.isfinite(value := getattr(self, of.name)) and value >= 0):
                raise UserError(f"{option(of.name, value)}: a number from 0")


@dataclass(frozen=True)
class ColumnDrift:
    """A column of what the model reads: the share of ``unknown`` ids (of lengths: of empty histories) in the new rows,
    with its interval, and among those of training; values that were ``missing``; ``psi``, what it is by ``chance`` at
    most, and the bins that it is made of: ``shares`` of training and of the new rows. NaN: not known, or no ids."""

    name: str
    unknown: MetricInterval
    unknown_trained: float
    missing: int
    psi: float
    chance: float
    shares: tuple[list[float], list[float]]


@dataclass(frozen=True)
class Calibration:
    """``predicted``: the mean prediction; ``observed``: the click rate; ``gap``: the first less the second;
    ``trained``: the click rate of the training rows, NaN if it is not known."""

    predicted: float
    observed: float
    gap: MetricInterval
    trained: float
    bins: Reliability


@dataclass(frozen=True)
class MonitorReport:
    """What :func:`monitor` found. ``metrics``: of the new rows, and ``trained``: of the test rows when it was trained;
    ``compared``: ``all`` rows or the ``chosen`` ones, of which columns are compared; ``counts``: what was unknown, of
    :attr:`EncodedRequests.counts`; ``notes``: what could not be said; ``drift``: a sentence for each limit that is
    crossed."""

    model: Path
    events: Place
    rows: int
    users: int
    compared: str
    metrics: Mapping[str, MetricInterval]
    trained: Mapping[str, float]
    calibration: Calibration | None
    columns: list[ColumnDrift]
    counts: Mapping[str, int]
    limits: DriftLimits
    notes: list[str] = field(default_factory=list)
    drift: list[str] = field(default_factory=list)

    def content(self) -> dict[str, Any]:
        """All of it as plain values, for JSON; tuples with names become mappings."""
        found: dict[str, Any] = _plain(asdict(self))
        return found

    def tables(self) -> list[Table]:
        """For a terminal."""
        cells: list[dict[str, str | None]] = []
        for name, one in self.metrics.items():
            cells.append({"metric": name, "now": _interval(one), "trained": number(self.trained[name])})
        if self.calibration is not None:
            of = self.calibration
            cells.append({"metric": "click rate", "now": number(of.observed), "trained": number(of.trained)})
            cells.append({"metric": "mean prediction", "now": number(of.predicted), "trained": None})
            cells.append({"metric": "prediction − rate", "now": _interval(of.gap), "trained": None})
            cells.append({"metric": "calibration error", "now": number(of.bins.error), "trained": None})
        found = [Table("Quality and calibration", [], cells, [])] if cells else []
        columns: list[dict[str, str | None]] = [
            {
                "column": one.name,
                "unknown": _percent(one.unknown.value),
                "trained": _percent(one.unknown_trained),
                "missing": f"{one.missing:,}" if one.missing else None,
                "PSI": number(one.psi, ".3f"),
                "by chance": number(one.chance, ".3f"),
            }
            for one in self.columns
        ]
        rows = {"all": "all rows", "chosen": "rows of label 1"}[self.compared]
        return [*found, Table(f"Columns: {rows}", [], columns, [])] if columns else found

    def __str__(self) -> str:
        return f"{self.model} on {self.events}: {counted(self.rows, 'row')} of {counted(self.users, 'user')}"


def monitor(
    model: str | Path,
    events: str | Path,
    log: str | Path | None = None,
    *,
    dataset: str | None = None,
    data_root: Path | None = None,
    limits: DriftLimits = DriftLimits(),  # frozen
    gpu: int = -1,
) -> MonitorReport:
    """Compare new events with what a model was trained on.

    Args:
        model: a model folder.
        events: a row per event, in the columns of the log: a file, folder, glob or address. Read into memory.
        log: histories: events of the users, of which a row sees those before it; None for those of the model folder
            and, where a label says which are chosen or all are, the new events.
        dataset: of a folder that has no profile, the data set it was trained on.
        gpu: -1 for the CPU.

    Raises:
        UserError: a model, file or column that cannot be used; no rows; another data set than that of the model.
    """
    model, events = Path(model), place(events)
    scorer = read_model(model, gpu)
    table, what, names = tables.frame(events, str(events)), str(events), scorer.encoder.columns
    if not table.height:
        raise UserError(f"{events}: no rows")
    notes: list[str] = []
    trained, sampled = scorer.profile, bool(scorer.config.get("sampled"))
    if dataset is not None:
        trained, sampled = _of_dataset(scorer, open_dataset(dataset, data_root), model)
    if trained is None:
        how = option("dataset", "NAME")
        notes.append(f"{model}: no profile.parquet, written by an earlier version: {how} compares with its data set")
    labelled = names.label is not None and label_column(names.label, table.columns) in table.columns
    clicked = tables.labels(table, str(names.label), what) if labelled else np.ones(table.height, bool)
    history = _histories(scorer, table, None if log is None else place(log), labelled, sampled, what)
    encoded = scorer.encoder.requests(table, history, what)
    scores = scorer.score(encoded).astype(np.float64)
    if has_users := names.user in table.columns:
        codes, count = group_codes(tables.ids(table, names.user, what).to_numpy(), table.height)
    else:
        codes, count = np.arange(table.height), table.height
        notes.append(f"no column '{names.user}': every row counts as a user of its own, and there is no gAUC")
    metrics, calibration = {}, None
    if labelled:
        values, shares = user_values(clicked, scores, codes, count), Users.of(clicked, codes, count).shares
        metrics = {name: over_users(values[name], share) for name, share in shares.items()}
        calibration = _calibration(clicked, scores, codes, count, trained)
        if not has_users:
            del metrics["gAUC"]
        elif math.isnan(metrics["gAUC"].value):
            notes.append(f"gAUC: none of {counted(count, 'user')} has rows of both labels")
        if clicked.all() or not clicked.any():
            notes.append(f"AUC: all rows have label {int(clicked[0])}")
    else:
        lacking = "the model's log has no label" if names.label is None else f"no column '{names.label}'"
        notes.append(f"{lacking}: no quality and calibration")
    if labelled and sampled:
        notes.append("trained with sampled items of label 0: quality and calibration are not compared with training")
    stored = scorer.config["metrics"]["test"]
    before = {name: math.nan if (of := stored.get(name)) is None else float(of) for name in metrics}
    kept = clicked if sampled else np.ones(table.height, bool)
    columns = (
        list(_columns(scorer, encoded, kept, codes, trained, "chosen" if sampled else "rows")) if kept.any() else []
    )
    if not kept.any():
        notes.append("columns: no row of label 1, and those of label 0 were sampled in training")
    counts = {name: number for name, number in encoded.counts.items() if number}
    if has_users and log is None and scorer.stored is not None:
        found = scorer.stored.users.find(tables.ids(table, names.user, what))
        counts["requests of users without stored events"] = int((found < 0).sum())
    compared = "chosen" if sampled else "all"
    report = MonitorReport(
        model, events, table.height, count, compared, metrics, before, calibration, columns, counts, limits, notes
    )
    report.drift.extend(_crossed(report, judge_quality=not sampled))
    return report


def _of_dataset(scorer: Scorer, dataset: Dataset, model: Path) -> tuple[pl.DataFrame | None, bool]:
    """The profile of a model's data set, and whether its rows of label 0 were sampled."""
    if dataset.data_hash != scorer.config["data_hash"]:
        raise UserError(f"{dataset.path}: not the data set that {model} was trained on (another hash)")
    recipe = load_json(dataset.path / REPORT).get("recipe") or {}
    protocol, features = str(scorer.config["protocol"]), scorer.model.feature_map
    found = training_profile(scorer.encoder, features, DataSource.of(dataset), protocol)
    return found, recipe.get("protocol") == "din"


def _histories(
    scorer: Scorer, table: pl.DataFrame, log: Place | None, labelled: bool, sampled: bool, what: str
) -> EncodedLog | None:
    """What the rows see: of a model of shown items the new ones of label 1, which only a label tells."""
    if log is not None:
        return scorer.encoder.events(scan(log), str(log))
    if scorer.encoder.brings_histories(table.columns):
        return None
    if not labelled and not sampled:
        return scorer.stored
    if scorer.histories is not None:
        return history_with(scorer, table, labelled, what)
    return scorer.encoder.events(table, what)


def _calibration(
    clicked: Values, scores: Values, codes: Values, users: int, trained: pl.DataFrame | None
) -> Calibration:
    rows = np.bincount(codes, minlength=users)
    gaps = np.bincount(codes, scores - clicked, users) / rows
    share = math.nan
    if trained is not None:
        of_rows = trained.filter(pl.col("column").str.starts_with(length_of("")))
        share = int(of_rows["chosen"].sum()) / int(of_rows["rows"].sum())
    gap = over_users(gaps, rows / rows.sum())
    return Calibration(float(scores.mean()), float(clicked.mean()), gap, share, reliability(clicked, scores))


def _columns(
    scorer: Scorer, encoded: EncodedRequests, kept: Values, codes: Values, trained: pl.DataFrame | None, counted_by: str
) -> Iterator[ColumnDrift]:
    """Of the rows that are ``kept`` (n,), whose users are ``codes`` (n,); ``counted_by``: the profile's column."""
    encoder, parts = scorer.encoder, dict[str, list[pl.DataFrame]]()
    rows = np.flatnonzero(kept)
    for some in np.split(rows, range(BATCH, len(rows), BATCH)):
        users = pl.Series("user", codes[some])
        for name, table in columns_of(encoder, encoded.batch(some)).items():
            parts.setdefault(name, []).append(table.select("value", users.gather(table["row"])))
    for name, several in parts.items():
        before = None if trained is None else trained.filter(pl.col("column") == name)
        before = None if before is None else before.select("value", rows=counted_by).sort("value")
        reserved, missing = encoder.unseen(name) if name in encoder.features else 0, encoded.counts[MISSING + name]
        yield column_drift(name, pl.concat(several), before, kind_of(encoder, name), reserved, missing)


def column_drift(
    name: str, new: pl.DataFrame, trained: pl.DataFrame | None, kind: str, reserved: int, missing: int = 0
) -> ColumnDrift:
    """Of one column.

    Args:
        new: its values in the new rows (``value``) and whose they are (``user``).
        trained: of training, how many ``rows`` each ``value`` has, of numbers each interval, in order.
        kind: ``ids`` or ``numbers``.
        reserved: the id of what is unknown, the length of no history.
    """
    unknown, before, is_unknown = MetricInterval(math.nan, math.nan, math.nan), math.nan, pl.col("value") == reserved
    if kind == "ids" or is_length(name):
        if trained is not None:
            before = int(trained.filter(is_unknown)["rows"].sum()) / max(1, int(trained["rows"].sum()))
        if trained is not None and kind == "ids":
            trained = trained.filter(pl.col("rows") > 0).sort("rows", "value", descending=[True, False])
            is_unknown |= ~pl.col("value").is_in(trained["value"].implode())
            trained = trained.filter(pl.col("value") != reserved)
        of_users = new.group_by("user").agg(rows=pl.len(), unknown=is_unknown.mean()).sort("user")
        unknown = over_users(of_users["unknown"].to_numpy(), of_users["rows"].to_numpy() / max(1, new.height))
    if kind == "ids":
        new = new.filter(~is_unknown)
    elif trained is not None and trained.height:
        edges = trained["value"].to_numpy()
        new = new.with_columns(value=edges[np.searchsorted(edges, new["value"].to_numpy())])
    if trained is None or not trained["rows"].sum() or not new.height:
        return ColumnDrift(name, unknown, before, missing, math.nan, math.nan, ([], []))
    bins = trained.with_columns(bin=equal_bins(trained["rows"])).join(
        new.group_by("value").agg(new=pl.len()), on="value", how="left"
    )
    p, q = bins.group_by("bin").agg(pl.col("rows", "new").sum()).sort("bin").drop("bin").to_numpy().T
    chance = psi_by_chance(len(p), p.sum(), new["user"].n_unique())
    shares = (p / p.sum()).tolist(), (q / q.sum()).tolist()
    return ColumnDrift(name, unknown, before, missing, psi(p, q), chance, shares)


def _crossed(report: MonitorReport, judge_quality: bool) -> Iterator[str]:
    limits = report.limits
    if judge_quality and "gAUC" in report.metrics:
        gauc, before = report.metrics["gAUC"], report.trained["gAUC"]
        if gauc.high < before - limits.gauc:
            yield f"gAUC {_interval(gauc)}, more than {limits.gauc:g} below {before:.4f}, that of the test rows"
    if judge_quality and report.calibration is not None:
        of, rate = report.calibration, report.calibration.observed
        if max(of.gap.low, -of.gap.high) > limits.calibration * rate:
            off = f"more than {limits.calibration:g} of it off" if rate else "not 0"
            yield f"mean prediction {of.predicted:.4f}, click rate {rate:.4f}: {off}"
    for one in report.columns:
        before = 0.0 if math.isnan(one.unknown_trained) else one.unknown_trained
        if one.unknown.low > before + limits.unknown:
            what = "rows without history" if is_length(one.name) else "unknown ids"
            then = "" if math.isnan(one.unknown_trained) else f", {_percent(before)} in training"
            yield f"{one.name}: {_percent(one.unknown.value)} {what}{then}"
        if one.psi > max(limits.psi, one.chance) and not is_length(one.name):
            yield f"{one.name}: population stability index {one.psi:.3f}, above {limits.psi:g}"


def is_length(name: str) -> bool:
    """Whether a column of a profile has the lengths of a history."""
    return name.startswith(length_of(""))


def _interval(one: MetricInterval) -> str:
    return f"{number(one.value)} ({number(one.low)} to {number(one.high)})"


def _percent(share: float) -> str:
    return number(share, ".1%")


def _plain(value: Any) -> Any:
    """Tuples with names as mappings, NaN as None."""
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, Mapping):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value) if isinstance(value, Path) else value
