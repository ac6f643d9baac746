"""The rooms of the package: what lies where, and that nothing of the tests is installed."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import setuptools

ROOMS = {*"commands config data evaluation fuxictr models ops pe".split()}
ROOMS |= {*"reporting sequence serving study training units utils".split()}
DOOR = {"__init__", "cli", "spark", "testing"}
"""The loose modules of ctr_pe: the public names, the command, the function of Spark columns, and the battery for
encodings of one's own."""
BACKBONES = {"bst", "dien", "din", "dmin", "sasrec", "tin"}


def inside(folder: Path) -> set[str]:
    """Names of the modules and packages in a folder."""
    packages = {file.parent.name for file in folder.glob("*/*.py")}
    return {file.stem for file in folder.glob("*.py")} | packages


def test_every_module_is_in_a_room(checkout: Path) -> None:
    """``ctr_pe/model_zoo`` and ``ctr_pe/configs``, if they are there, are folders of the checkout's top."""
    assert inside(checkout / "ctr_pe") - {"model_zoo", "configs"} == ROOMS | DOOR
    loose = sorted(file.name for file in (checkout / "ctr_pe").glob("*.py"))
    assert len(loose) <= 4, loose


def test_the_model_zoo_holds_backbones_alone(checkout: Path) -> None:
    assert inside(checkout / "model_zoo") == BACKBONES | {"__init__", "run_expid", "next_item"}


def test_nothing_of_the_tests_is_installed(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(setuptools, "setup", lambda **settings: given.update(settings))
    monkeypatch.chdir(checkout)
    monkeypatch.setattr(sys, "argv", ["setup.py", "build"])
    runpy.run_path(str(checkout / "setup.py"))
    packages = set(given["packages"])
    assert {"ctr_pe", "ctr_pe.model_zoo", "ctr_pe.configs"} <= packages
    assert {name for name in packages if name.count(".") == 1} == {
        f"ctr_pe.{room}" for room in (*ROOMS, "model_zoo", "configs")
    }
    sources = [file for folder in ("ctr_pe", "model_zoo") for file in (checkout / folder).rglob("*.py")]
    of_tests = re.compile(r"^\s*(?:from|import) (?:tests|pytest)\b", re.MULTILINE)
    assert [file for file in sources if of_tests.search(file.read_text(encoding="utf-8"))] == []
