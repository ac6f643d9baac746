"""Which way a monitor is better: FuxiCTR asks for ``monitor_mode``, and takes the worst epoch if that is wrong."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from ctr_pe.utils.errors import UserError, shown

LOSSES = {"logloss"}
"""Metrics of which less is better."""


def monitor_mode(monitor: str | Mapping[str, float], given: Any = None) -> Literal["max", "min"]:
    """``min`` where less of the monitor is better, a metric or a weighted sum of metrics, else ``max``.

    Raises:
        UserError: ``given``, the key of a config, contradicts it; or parts of the sum contradict each other.
    """
    weights = {monitor: 1.0} if isinstance(monitor, str) else monitor
    less = {(name in LOSSES) == (weight > 0) for name, weight in weights.items() if weight}
    if len(less) != 1:
        better = "less is better of one part, more of another"
        raise UserError(f"monitor {shown(monitor)}: {better}: write such as {{AUC: 1, logloss: -1}}")
    mode: Literal["max", "min"] = "min" if less.pop() else "max"
    if given not in (None, mode):
        raise UserError(f"monitor_mode '{given}' contradicts monitor {shown(monitor)}: leave it out, or write {mode}")
    return mode


def monitored(monitor: str | Mapping[str, float], metrics: Mapping[str, float]) -> float:
    """The monitor's value: a metric, or a weighted sum of metrics."""
    weights = {monitor: 1.0} if isinstance(monitor, str) else monitor
    return sum(weight * metrics[name] for name, weight in weights.items())
