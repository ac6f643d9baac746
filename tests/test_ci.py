"""Scripts of .ci: the lowest versions that setup.py allows, and known vulnerabilities."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest


def test_every_package_that_is_needed_has_a_lowest_version(checkout: Path) -> None:
    lowest = runpy.run_path(str(checkout / ".ci" / "lowest.py"))["lowest"]()
    needed = re.search(r"install_requires=\[(.*?)\]", (checkout / "setup.py").read_text(), re.DOTALL)
    assert needed is not None
    assert {re.split("[>=]", name)[0] for name in re.findall(r'"(.+?)"', needed[1])} <= lowest.keys()
    assert lowest["fuxictr"] == "2.3.10"
    assert {"optuna", "fastapi", "onnx", "matplotlib", "plotly", "tensorboard"} <= lowest.keys()


CLEAN: dict[str, Any] = {"name": "torch", "version": "2.13.0", "vulns": []}
BAD: dict[str, Any] = {"name": "x", "version": "1", "vulns": [{"id": "PYSEC-1", "fix_versions": ["2"]}]}
SKIPPED = {"name": "y", "skip_reason": "Dependency not found on PyPI and could not be audited"}


@pytest.mark.parametrize(
    ("packages", "explained", "code", "said"),
    [
        ([CLEAN], {}, 0, "1 of 1 packages audited, 0 vulnerabilities"),
        ([CLEAN, SKIPPED], {}, 0, "they are NOT audited"),
        ([CLEAN, BAD], {}, 1, "x 1: PYSEC-1, mended in 2: NOT EXPLAINED"),
        ([BAD], {"PYSEC-1": "never called"}, 0, "never called"),
    ],
)
def test_an_audit_fails_on_what_is_not_explained(
    packages: list[Any], explained: dict[str, str], code: int, said: str, checkout: Path
) -> None:
    script = runpy.run_path(str(checkout / ".ci" / "audit.py"))
    script["EXPLAINED"].update(explained)
    lines, found = script["verdict"]({"dependencies": packages})
    assert found == code
    assert any(said in line for line in lines)
