"""The times of a log: is the unit the one that was said, and which dates are these?

A time is a date from 1990 to 2099, or a clock of its own that began at about 0 and has run for less than 20 years.
Dates in seconds, milliseconds and finer units are a factor of 150 or more apart, so that a wrong unit shows.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Literal

from ctr_pe.utils.errors import option

Unit = Literal["s", "ms", "us", "ns"]
SECOND = 10**9  # nanoseconds, which times are compared in
UNITS: dict[Unit, int] = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}  # per second
WORDS: dict[Unit, str] = {"s": "seconds", "ms": "milliseconds", "us": "microseconds", "ns": "nanoseconds"}
FIRST, LAST = (int(datetime(year, 1, 1, tzinfo=UTC).timestamp()) for year in (1990, 2100))


def implausible(low: int, high: int, unit: Unit) -> tuple[int, str] | None:
    """Of a column from ``low`` to ``high``, the value that is no time in ``unit`` and what is wrong with it."""
    by_low, by_high = dated(low), dated(high)
    if by_low == by_high == unit:
        return None
    if of_own_clock(low, unit) and of_own_clock(high, unit):
        return None
    value, reading, other = (low, by_low, by_high) if by_low != unit else (high, by_high, by_low)
    if reading is None:
        year = 1970 + int(value // (UNITS[unit] * timedelta(days=365.2425).total_seconds()))
        return value, f"{value} is the year {year} in {WORDS[unit]}: times are from 1990 to 2099, or count from 0"
    is_other = f"{value} is {_date(value, reading)} in {WORDS[reading]}"
    if other not in (None, reading):
        return value, f"{is_other}, but others are in {WORDS[other]}: a column has one unit"
    return value, f"{is_other}, no time in {WORDS[unit]}: {option('time_unit', reading)}"


def calendar_days(low: int, high: int) -> bool:
    """Whether both are written as days, such as 20240131, which are no seconds of any clock."""

    def is_day(number: int) -> bool:
        year, month, day = number // 10_000, number // 100 % 100, number % 100
        return 1990 <= year < 2100 and 1 <= month <= 12 and 1 <= day <= 31

    return is_day(low) and is_day(high)


def dated(time: int) -> Unit | None:
    """The unit in which a time is a date from 1990 to 2099; None for no unit."""
    return next((unit for unit, each in UNITS.items() if FIRST * each <= time < LAST * each), None)


def of_own_clock(time: int, unit: Unit) -> bool:
    """Whether it is at most 20 years from 0."""
    return abs(time) < FIRST * UNITS[unit]


def in_words(low: int, high: int, unit: Unit) -> str:
    """From when to when, in UTC, or for how long on a clock of its own."""
    if dated(low) == unit:
        return f"{_date(low, unit)} to {_date(high, unit)}"
    return f"{low:,} to {high:,}, a clock of its own: {timedelta(seconds=(high - low) // UNITS[unit])}"


def _date(time: int, unit: Unit) -> str:
    return datetime.fromtimestamp(time // UNITS[unit], UTC).strftime("%Y-%m-%d %H:%M")
