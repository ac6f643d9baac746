"""Each layer of the package imports only from those before it, and no modules import each other in a circle.

Read from the source: imports of modules, of functions, and those for type checkers alone.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest

LAYERS: dict[str, tuple[str, ...]] = {  # of a module's prefixes the longest counts
    "utilities": (
        "utils",
        "config",
        "evaluation",
        "fuxictr.imports",
        "fuxictr.feature_specs",
        "fuxictr",
        "models.groups",
        "data.published.sets",
    ),
    "sequence": ("sequence", "fuxictr.padded"),
    "ops": ("ops",),
    "pe": ("pe",),
    "units": ("units", "testing"),
    "adapter": ("fuxictr.adapter",),
    "models": ("models", "model_zoo"),
    "data": ("data", "fuxictr.csv", "fuxictr.convert"),
    "training": ("training",),
    "study": ("study", "fuxictr.experiment"),
    "tools": ("config.validation",),
    "serving": ("serving", "spark"),
    "reporting": ("reporting",),
    "commands": ("commands", "cli", "model_zoo.run_expid"),
}
ORDER = list(LAYERS)

ALLOWED = frozenset({("fuxictr.adapter", "training")})
"""(importer, imported) of what a function may import from a later layer: a model's ``fit`` is training's."""

NOT_YET: frozenset[tuple[str, str]] = frozenset()
"""Imports from a later layer that are still to go."""

CIRCLES_YET: set[str] = set()
"""Circles that are still to go."""


class Import(NamedTuple):
    importer: str
    imported: str
    how: str
    """``module``, ``function`` or ``types``."""


def modules(checkout: Path) -> dict[str, Path]:
    """Module, without the leading ``ctr_pe.`` -> its file. ``ctr_pe`` itself, the public door, is left out."""
    found = {}
    for folder, prefix in (("ctr_pe", ()), ("model_zoo", ("model_zoo",))):
        for path in sorted((checkout / folder).rglob("*.py")):  # rglob follows no link
            parts = (*prefix, *path.relative_to(checkout / folder).with_suffix("").parts)
            found[".".join(part for part in parts if part != "__init__")] = path
    del found[""]
    return found


def imports_of(name: str, tree: ast.AST, known: dict[str, Path], how: str = "module") -> Iterator[Import]:
    for node in ast.iter_child_nodes(tree):
        inside = how
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            inside = "function"
        elif isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            inside = "types"
        yield from imports_of(name, node, known, inside)
        if isinstance(node, ast.ImportFrom):
            assert not node.level, f"{name} has a relative import"
            origins = [f"{node.module}.{alias.name}" for alias in node.names]
            origins = [origin if origin.removeprefix("ctr_pe.") in known else str(node.module) for origin in origins]
        elif isinstance(node, ast.Import):
            origins = [alias.name for alias in node.names]
        else:
            continue
        for origin in origins:
            if origin.startswith("ctr_pe."):
                yield Import(name, origin.removeprefix("ctr_pe."), how)


def layer_of(module: str) -> int:
    parts = module.split(".")
    for length in range(len(parts), 0, -1):
        prefix = ".".join(parts[:length])
        for number, prefixes in enumerate(LAYERS.values()):
            if prefix in prefixes:
                return number
    raise AssertionError(f"{module} is in no layer: add it to LAYERS")


@pytest.fixture(scope="module")
def found(checkout: Path) -> list[Import]:
    known = modules(checkout)
    return [one for name, path in known.items() for one in imports_of(name, ast.parse(path.read_text()), known)]


def test_every_module_has_a_layer(checkout: Path) -> None:
    assert {layer_of(module) for module in modules(checkout)} == set(range(len(ORDER)))


def test_no_layer_imports_from_a_later_one(found: list[Import]) -> None:
    upward = [one for one in found if layer_of(one.importer) < layer_of(one.imported)]
    wrong = [
        f"{one.importer} ({ORDER[layer_of(one.importer)]}) imports {one.imported} ({ORDER[layer_of(one.imported)]})"
        for one in upward
        if one[:2] not in NOT_YET and not (one.how != "module" and one[:2] in ALLOWED)
    ]
    assert not wrong, "\n".join(sorted(set(wrong)))
    gone = NOT_YET - {one[:2] for one in upward}
    assert not gone, f"no such imports any more, take them off the list: {sorted(gone)}"


def test_no_modules_import_each_other_in_a_circle(found: list[Import]) -> None:
    """Those of functions count, those for type checkers do not."""
    after: dict[str, set[str]] = {}
    for one in found:
        if one.how != "types" and one.imported != one.importer:
            after.setdefault(one.importer, set()).add(one.imported)
    circles, done = [], set()

    def follow(module: str, path: list[str]) -> None:
        if module in path:
            circles.append(" → ".join([*path[path.index(module) :], module]))
        elif module not in done:
            for other in sorted(after.get(module, ())):
                follow(other, [*path, module])
            done.add(module)

    for module in sorted(after):
        follow(module, [])
    assert set(circles) == CIRCLES_YET, "\n".join(circles)


def private_names(library: Path) -> set[str]:
    """The attributes and methods of FuxiCTR's models and feature maps that begin with one underscore."""
    files = [library / "features.py", library / "utils.py", *(library / "pytorch").rglob("*.py")]
    found = set()
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute):
                found.add(node.attr)
            elif isinstance(node, ast.FunctionDef):
                found.add(node.name)
    return {name for name in found if name.startswith("_") and not name.startswith("__")}


def test_fuxictr_is_known_to_its_room_alone(checkout: Path) -> None:
    """Neither its modules nor its private names stand in another room; tests and the benchmark compare with it."""
    spec = find_spec("fuxictr")
    assert spec is not None
    assert spec.origin is not None
    private, wrong = private_names(Path(spec.origin).parent), []
    assert {"_eval_steps", "_max_gradient_norm", "_embedding_regularizer", "_monitor"} <= private
    for name, path in modules(checkout).items():
        if name.partition(".")[0] == "fuxictr":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                words = [str(node.module).partition(".")[0]]
            elif isinstance(node, ast.Import):
                words = [alias.name.partition(".")[0] for alias in node.names]
            elif isinstance(node, ast.Attribute):
                words = [node.attr]
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                words = [node.value] if node.value in private else []  # of getattr and vars
            else:
                continue
            wrong += [f"{name}, line {node.lineno}: {word}" for word in words if word in {"fuxictr"} | private]
    assert not wrong, "\n".join(wrong)


def test_imports_are_found_wherever_they_stand() -> None:
    source = """
import ctr_pe.utils.errors
if TYPE_CHECKING:
    from ctr_pe.pe import base
def f():
    from ctr_pe.units.scores import SCORES
"""
    known = dict.fromkeys(["utils.errors", "pe", "pe.base", "units", "units.scores"], Path())
    wanted = {("x", "utils.errors", "module"), ("x", "pe.base", "types"), ("x", "units.scores", "function")}
    assert set(imports_of("x", ast.parse(source), known)) == wanted
