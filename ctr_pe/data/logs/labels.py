"""Labels of events: a column of 0 and 1, or of numbers with a threshold, such as ``rating >= 4``."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import polars as pl

from ctr_pe.utils.errors import UserError

SIGNS: dict[str, Callable[[Any, Any], Any]] = {
    ">=": operator.ge, ">": operator.gt, "<=": operator.le, "<": operator.lt, "==": operator.eq,
}  # fmt: skip
NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
THRESHOLD = re.compile(rf"\s*(.+?)\s*({'|'.join(SIGNS)})\s*({NUMBER})\s*")


class Threshold(NamedTuple):
    """A label that is 1 where the comparison holds."""

    column: str
    sign: str
    number: float

    def holds(self, values: Any) -> Any:
        """0 and 1 of numeric values, an expression or a series; null where a value is missing or NaN."""
        number = int(self.number) if self.number.is_integer() else self.number
        return SIGNS[self.sign](values.fill_nan(None), number).cast(pl.Int8)


def threshold(label: str, names: Collection[str]) -> Threshold | None:
    """What a label says, for a table with columns of these ``names``; None if it is the name of a column."""
    found = None if label in names else THRESHOLD.fullmatch(label)
    return None if found is None else Threshold(found[1], found[2], float(found[3]))


def label_column(label: str, names: Collection[str] = ()) -> str:
    """The column that a label is made of."""
    found = threshold(label, names)
    return label if found is None else found.column


def several_labels(labels: Collection[Any]) -> str:
    """The error line about more than one label."""
    some = ", ".join(map(str, labels))
    return f"several labels are several runs: name one of {some} in each (multi-task training is not in this package)"


def check_label(label: Any, names: Collection[str] = ()) -> None:
    """Raises UserError for several labels, as a list or as names of columns with commas."""
    if label is None:
        return
    given = [name.strip() for name in label.split(",")] if isinstance(label, str) and label not in names else label
    if isinstance(given, str):
        return
    if not isinstance(label, str) or (len(given) > 1 and all(label_column(name) in names for name in given)):
        raise UserError(
            f"label: {several_labels(given)}" if isinstance(given, Collection) else f"label: {label!r}: a name"
        )
