"""Names that become parts of paths: of data sets, models, experiments."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from ctr_pe.utils.errors import UserError, shown

LONGEST = 150
"""Characters: file systems have 255 bytes, and more is added to a name."""
RULE = f"a name of 1 to {LONGEST} characters, without / and \\ and not .."


def is_name(text: str) -> bool:
    """Whether it stays in its directory, and a file may have it."""
    return 0 < len(text) <= LONGEST and text not in (".", "..") and not re.search(r"[/\\\x00-\x1f\x7f]", text)


def check_new_path(what: str, path: Path) -> Path:
    """The path of a file or folder that is to be written, if no part of it has a line break or another control
    character: configs, messages and commands name it on one line.

    Raises:
        UserError: it has one; ``what`` says whose it is.
    """
    if re.search(r"[\x00-\x1f\x7f\x85\u2028\u2029]", str(path)):
        rule = "a path without line breaks and other control characters"
        raise UserError(f"{what} must be {rule}, got {shown(str(path))}")
    return path


def check_name(what: str, value: Any) -> str:
    """The value, if it is a name.

    Raises:
        UserError: it is not; ``what`` says whose it is.
    """
    if not isinstance(value, str) or not is_name(value):
        raise UserError(f"{what} must be {RULE}, got {shown(value)}")
    return value
