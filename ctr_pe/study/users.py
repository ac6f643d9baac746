"""``users/HASH.npz`` of a store: what each test user adds to the metrics of each run, enough for every interval.

Made from ``scores/``, and then sufficient without it, so that it can be published beside ``results.jsonl``: about two
bytes per user and run. Values are rounded to steps, of which a hundred or so make their spread over users; means and
differences are those of ``results.jsonl``, not rounded.

U users, R runs.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt

from ctr_pe.evaluation.metrics import METRICS, Floats, check_rows, row_loss
from ctr_pe.evaluation.paired import Arm, arm
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
class UserStatistics:
    """Of the test rows of one data set. ``click_rate``: of the training rows, NaN if it is not known; ``values``: run
    (:attr:`Key.name`) -> metric -> (U,) in steps."""

    users: Users = NOBODY
    click_rate: float = math.nan
    values: dict[str, dict[str, npt.NDArray[Any]]] = field(default_factory=dict)

    @cached_property
    def shares(self) -> dict[str, Floats]:
        """Metric -> (U,) shares of the users."""
        return self.users.shares

    @property
    def base_logloss(self) -> float:
        """Of a constant prediction for the test rows, the click rate of the training rows; NaN if that is not known."""
        rows, positives = self.users.rows.sum(), self.users.positives.sum()
        if not rows or math.isnan(self.click_rate):
            return math.nan
        clicked, other = row_loss(np.array([True, False]), np.full(2, self.click_rate))
        return float((positives * clicked + (rows - positives) * other) / rows)

    def arm(self, runs: Mapping[int, Result], metric: str) -> Arm:
        """The runs of one encoding. It gives no interval where the values of one of them are not known."""
        step, _ = STEPS[metric]
        unknown = np.full(len(self.users.rows), np.nan)
        names = [result.key.name for result in runs.values()]
        values = [self.values[name][metric] * step if name in self.values else unknown for name in names]
        metrics = [result.metrics[metric] for result in runs.values()]
        return arm(metrics, np.stack(values), self.shares[metric])


def user_statistics(store: Store, data_hash: str) -> UserStatistics:
    """Of one data set: those kept in the file, and of runs whose scores are newer those that the scores give, which are
    kept from now on.

    Raises:
        UserError: the file is damaged and there are no scores that could replace it, or it cannot be written.
    """
    file = store.path / "users" / f"{data_hash}.npz"
    about = store.about(data_hash)
    if not about.keys() >= {"labels", "users"}:
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
                new[key.name] = {
                    name: np.rint(values[name] / step).astype(kind) for name, (step, kind) in STEPS.items()
                }
    found = UserStatistics(users, float(about.get("click_rate", math.nan)), {**kept.values, **new})
    if new:
        _save(file, found)
    return found


def _save(file: Path, found: UserStatistics) -> None:
    """One array (R, U) per metric, in the order of ``runs``."""
    content: dict[str, Any] = {name: of.astype(np.int32) for name, of in found.users._asdict().items()}
    content |= {"click_rate": found.click_rate, "runs": np.array(list(found.values))}
    content |= {metric: np.stack([of[metric] for of in found.values.values()]) for metric in METRICS}
    write(file, lambda stream: np.savez_compressed(stream, **content))


def _read(file: Path) -> UserStatistics:
    """Nothing, if the file is not there. Raises UserError if it cannot be read, or holds something else."""
    if not file.exists():
        return UserStatistics()
    try:
        with np.load(file, allow_pickle=False) as kept:
            content = {name: kept[name] for name in kept.files}
        users = Users(content["rows"].astype(np.int64), content["positives"].astype(np.int64))
        runs = [str(name) for name in content["runs"]]
        wanted = {metric: (len(runs), len(users.rows)) for metric in METRICS} | {"positives": users.rows.shape}
        for name, shape in wanted.items():
            if content[name].shape != shape or not np.issubdtype(content[name].dtype, np.integer):
                raise ValueError(f"{name} {content[name].dtype}{list(content[name].shape)}")
        by_run = zip(runs, *(content[metric] for metric in METRICS), strict=True)
        values = {name: dict(zip(METRICS, of, strict=True)) for name, *of in by_run}
        return UserStatistics(users, float(content["click_rate"]), values)
    except (OSError, EOFError, ValueError, TypeError, KeyError, IndexError, BadZipFile, zlib.error) as error:
        raise UserError(
            f"{file}: damaged ({one_line(str(error))[:100]}): bring back a whole one, or remove it"
        ) from None
