"""Known vulnerabilities of the installed packages, by pip-audit: python -P .ci/audit.py

Fails on each that ``EXPLAINED`` does not have. Where no advisory service can be reached, it says so and passes.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

EXPLAINED: dict[str, str] = {}
"""Identifier of a vulnerability -> why it does not concern this package."""


def verdict(report: Mapping[str, Any]) -> tuple[list[str], int]:
    """What to print about pip-audit's JSON, and the exit code."""
    packages = report["dependencies"]
    known = [one for one in packages if "skip_reason" not in one]
    found = {
        found[
            "id"
        ]: f"{one['name']} {one['version']}: {found['id']}, mended in {', '.join(found['fix_versions']) or '-'}"
        for one in known
        for found in one["vulns"]
    }
    lines = [f"{line}: {EXPLAINED.get(name, 'NOT EXPLAINED')}" for name, line in found.items()]
    lines.append(f"{len(known)} of {len(packages)} packages audited, {len(found)} vulnerabilities")
    if len(known) < len(packages):
        lines.append("the advisory service does not know the others, or cannot be reached: they are NOT audited")
    return lines, int(not found.keys() <= EXPLAINED.keys())


def main() -> int:
    command = ["pip-audit", "--format", "json", "--progress-spinner", "off", "--skip-editable"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        lines, code = verdict(json.loads(done.stdout))
    except ValueError:
        reason = (done.stderr.strip().splitlines() or ["no output"])[-1][:300]
        lines, code = [f"NOT audited, the advisory service cannot be reached: {reason}"], 0
    print("\n".join(lines))
    return code


if __name__ == "__main__":
    sys.exit(main())
