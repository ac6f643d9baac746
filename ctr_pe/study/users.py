"""``users/HASH.npz`` of a store: what each test user adds to the metrics of each run, enough for every interval.

Made from ``scores/``, and then sufficient without it: about two bytes per user and run. Values are rounded to steps, of
which a hundred or so make their spread over users; means and differences are those of ``results.jsonl``, not rounded.
What is published is smaller still: of each pair of runs only the squared distance between what the users add to the one
and to the other, of which intervals are made.

U users, R runs.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt

from ctr_pe.evaluation.metrics import METRICS, Floats, check_rows, row_loss
from ctr_pe.evaluation.paired import Difference, UserSpread, difference, influences, squared_distances
from ctr_pe.evaluation.users import Users, user_values
from ctr_pe.study.store import Result, Store, write
from ctr_pe.utils.errors import UserError, one_line

STEPS: dict[str, tuple[float, Any]] = {
    "gAUC": (1 / 250, np.uint8),
    "AUC": (1 / 250, np.uint8),
    "logloss": (1 / 100, np.uint16),
}
"""Metric -> step of the stored values, and the type of their multiples."""
NOBODY = Users(np.zeros(0, np.int64), np.zeros(0, np.int64))


@dataclass(frozen=True)
class RunDistances:
    """Squared distances (R, R) between what users add to ``runs`` (R,), :attr:`RunKey.name`, by metric."""

    runs: list[str] = field(default_factory=list)
    distances: dict[str, Floats] = field(default_factory=dict)

    def among(self, names: list[str], metric: str) -> Floats:
        """Between runs of these names; NaN to runs that are not kept."""
        at = [self.runs.index(name) if name in self.runs else -1 for name in names]
        kept = self.distances.get(metric, np.zeros((0, 0)))
        return np.pad(kept, (0, 1), constant_values=np.nan)[np.ix_(at, at)]  # the last one is not kept


@dataclass(frozen=True)
class UserStatistics:
    """Of the test rows of one data set. ``click_rate``: of the training rows, NaN if it is not known; ``values``: run
    (:attr:`RunKey.name`) -> metric -> (U,) in steps; ``published``: of runs without values."""

    users: Users = NOBODY
    click_rate: float = math.nan
    values: dict[str, dict[str, npt.NDArray[Any]]] = field(default_factory=dict)
    published: RunDistances = field(default_factory=RunDistances)

    @property
    def base_logloss(self) -> float:
        """Of a constant prediction for the test rows, the click rate of the training rows; NaN if that is not known."""
        rows, positives = self.users.rows.sum(), self.users.positives.sum()
        if not rows or math.isnan(self.click_rate):
            return math.nan
        clicked, other = row_loss(np.array([True, False]), np.full(2, self.click_rate))
        return float((positives * clicked + (rows - positives) * other) / rows)

    def distances(self, names: list[str], metric: str) -> Floats:
        """Squared distances between what users add to these runs (R, R); NaN where that is not known."""
        if any(name not in self.values for name in names):
            return self.published.among(names, metric)
        step, _ = STEPS[metric]
        values = np.stack([self.values[name][metric] * step for name in names])
        return squared_distances(influences(values, self.users.shares[metric]))

    def difference(self, ours: Mapping[int, Result], theirs: Mapping[int, Result], metric: str) -> Difference:
        """The runs of one encoding minus those of another. It has no interval where distances are not known."""
        runs = [*ours.values(), *theirs.values()]
        distances = self.distances([run.key.name for run in runs], metric)
        spread = UserSpread.of(distances, len(ours), int(np.count_nonzero(self.users.shares[metric])))
        metrics, others = ([run.metrics[metric] for run in of.values()] for of in (ours, theirs))
        return difference(metrics, others, spread)


def user_statistics(store: Store, data_hash: str) -> UserStatistics:
    """Of one data set: those kept in the file, and of runs whose scores are newer those that the scores give, which are
    kept from now on.

    Raises:
        UserError: the file is damaged and there are no scores that could replace it, or it cannot be written.
    """
    file = store.path / "users" / f"{data_hash}.npz"
    about = store.about(data_hash)
    if not about.keys() >= {"labels", "users"} or "next_item" in about:  # whose scores are ranks
        return _read(file)
    try:
        kept = _read(file)
    except UserError:  # what is not kept is new
        kept = UserStatistics()
    labels, codes = about["labels"], about["users"]
    users = Users.of(labels.astype(bool), codes, int(codes.max()) + 1)
    since = file.stat().st_mtime_ns if kept.values else 0
    new: dict[str, dict[str, npt.NDArray[Any]]] = {}
    for key in store.read():
        if key.data_hash == data_hash and (key.name not in kept.values or store.scored(key) > since):
            scores = store.scores(key)
            if scores is not None and len(scores) == len(labels):
                values = user_values(*check_rows(labels, scores), codes, len(users.rows))
                of_run = {name: np.rint(values[name] / step).astype(kind) for name, (step, kind) in STEPS.items()}
                new[key.name] = of_run
    click_rate = float(about.get("click_rate", math.nan))
    found = UserStatistics(users, click_rate, {**kept.values, **new}, kept.published)
    if new:
        save(file, found)
    return found


def save(file: Path, found: UserStatistics) -> None:
    """Write an array (R, U) per metric, in the order of ``runs``, and the distances between ``published`` runs, the
    upper triangle in a row."""
    content: dict[str, Any] = {name: of.astype(np.int32) for name, of in found.users._asdict().items()}
    content |= {"click_rate": found.click_rate, "runs": np.array(list(found.values))}
    if found.values:
        content |= {metric: np.stack([of[metric] for of in found.values.values()]) for metric in METRICS}
    if published := found.published.runs:
        upper = np.triu_indices(len(published), 1)
        content |= {f"{name}_distances": of[upper] for name, of in found.published.distances.items()}
        content |= {"published": np.array(published), "metrics": np.array(list(found.published.distances))}
    write(file, lambda stream: np.savez_compressed(stream, **content))


def _read(file: Path) -> UserStatistics:
    """Nothing, if the file is not there. Raises UserError if it cannot be read, or holds something else."""
    from scipy.spatial.distance import squareform

    if not file.exists():
        return UserStatistics()
    try:
        with np.load(file, allow_pickle=False) as kept:
            content = {name: kept[name] for name in kept.files}
        users = Users(content["rows"].astype(np.int64), content["positives"].astype(np.int64))
        runs = [str(name) for name in content["runs"]]
        published = [str(name) for name in content.get("published", ())]
        pairs, measured = len(published) * (len(published) - 1) // 2, [*map(str, content.get("metrics", METRICS))]
        shapes: dict[str, tuple[tuple[int, ...], Any]] = {"positives": (users.rows.shape, np.integer)}
        shapes |= {metric: ((len(runs), len(users.rows)), np.integer) for metric in METRICS if runs or not published}
        shapes |= {f"{metric}_distances": ((pairs,), np.floating) for metric in measured if published}
        for name, (shape, kind) in shapes.items():
            if content[name].shape != shape or not np.issubdtype(content[name].dtype, kind):
                raise ValueError(f"{name} {content[name].dtype}{list(content[name].shape)}")
        by_run = zip(*(content[metric] for metric in METRICS), strict=True) if runs else ()
        values = {name: dict(zip(METRICS, of, strict=True)) for name, of in zip(runs, by_run, strict=True)}
        distances = {metric: squareform(content[f"{metric}_distances"]) for metric in measured if published}
        return UserStatistics(users, float(content["click_rate"]), values, RunDistances(published, distances))
    except (OSError, EOFError, ValueError, TypeError, KeyError, IndexError, BadZipFile, zlib.error) as error:
        what = f"damaged ({one_line(str(error))[:100]})"
        raise UserError(f"{file}: {what}: bring back a whole one, or remove it") from None
