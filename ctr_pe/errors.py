"""Errors a user can mend: one line that names the file, the key or column, and the nearest valid choice."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """A mistake in a command, a config or a data file. The command line prints its one line and exits with code 2."""


def nearest(name: object, choices: Iterable[object]) -> str:
    """The end of an error line: the closest of ``choices`` to ``name``, and all of them when they are few."""
    names = sorted(str(choice) for choice in choices)
    close = difflib.get_close_matches(str(name), names, n=1, cutoff=0.5)
    hint = f"did you mean '{close[0]}'? " if close else ""
    return f"{hint}({', '.join(names)})" if len(names) <= 30 else hint.rstrip() or f"({len(names)} choices)"
