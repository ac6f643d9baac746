"""Names that become parts of paths: of data sets, models, experiments."""

from __future__ import annotations

import re
from typing import Any

from ctr_pe.utils.errors import UserError, shown

LONGEST = 150
"""Characters: file systems have 255 bytes, and more is added to a name."""
RULE = f"a name of 1 to {LONGEST} characters, without / and \\ and not .."


def is_name(text: str) -> bool:
    """Whether it stays in its directory, and a file may have it."""
    return 0 < len(text) <= LONGEST and text not in (".", "..") and not re.search(r"[/\\\x00-\x1f\x7f]", text)


def check_name(what: str, value: Any) -> str:
    """The value, if it is a name.

    Raises:
        UserError: it is not; ``what`` says whose it is.
    """
    if not isinstance(value, str) or not is_name(value):
        raise UserError(f"{what} must be {RULE}, got {shown(value)}")
    return value
