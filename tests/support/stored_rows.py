"""What two stores must have in common if their runs are the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def rows(out: Path) -> list[str]:
    """The lines of a store without durations and dates, sorted."""

    def timeless(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: timeless(one) for key, one in value.items() if key not in ("seconds", "finished")}
        return [timeless(one) for one in value] if isinstance(value, list) else value

    return sorted(json.dumps(timeless(json.loads(line))) for line in (out / "results.jsonl").read_text().splitlines())
