"""Constraints for pip with the lowest version of each package that setup.py names: python -P .ci/lowest.py > FILE"""

from __future__ import annotations

import ast
import re
from pathlib import Path

SETUP = Path(__file__).resolve().parents[1] / "setup.py"
BOUND = re.compile(r"(?P<name>[\w.-]+)(\[.+\])?(>=|==)(?P<version>[\w.]+)")


def lowest() -> dict[str, str]:
    """Package -> its lowest version; those of all extras, too, where they have one."""
    calls = [node for node in ast.walk(ast.parse(SETUP.read_text(encoding="utf-8"))) if isinstance(node, ast.keyword)]
    given = {one.arg: ast.literal_eval(one.value) for one in calls if one.arg in ("install_requires", "extras_require")}
    named = [*given["install_requires"], *(name for names in given["extras_require"].values() for name in names)]
    found = [BOUND.fullmatch(name) for name in named]
    return {one["name"]: one["version"] for one in found if one is not None}


if __name__ == "__main__":
    print("\n".join(f"{name}=={version}" for name, version in sorted(lowest().items())))
