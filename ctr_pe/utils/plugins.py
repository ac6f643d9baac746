"""Encodings and models of other packages: registered by an installed one, or by dotted name.

An installed package registers a class under a name as an entry point of the group ``ctr_pe.encodings`` or
``ctr_pe.models``. Any other class has a dotted name, ``my_pkg.recency:Recency``. Dotted names are imported only if the
command line gives them (``--pe``, ``--model``) or names their package (``--plugins my_pkg``): a config is data and
imports nothing by itself. Scripts call :func:`allow`.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points, packages_distributions, version
from typing import TypeVar

from ctr_pe.utils.errors import UserError, nearest, one_line, quoted

C = TypeVar("C")

GROUPS = {"encoding": "ctr_pe.encodings", "model": "ctr_pe.models"}
"""Kind of class -> group of entry points."""
_WORDS = {"encoding": "position encoding", "model": "model"}
_DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
_allowed: set[str] = set()  # packages, and dotted names, that may be imported
_used: dict[str, dict[str, None]] = {kind: {} for kind in GROUPS}  # dotted names that were asked for


def is_dotted(name: str) -> bool:
    """Whether it is a dotted name, ``package.module:Class``."""
    return _DOTTED.fullmatch(name) is not None


def allow(*names: str) -> None:
    """Let dotted names be imported: ``names`` are packages, or dotted names themselves.

    Raises:
        UserError: a name that is neither.
    """
    for name in names:
        if not is_dotted(name) and not is_dotted(f"{name}:_"):
            raise UserError(f"'{name}' is not the name of a package, such as my_pkg")
        _allowed.add(name)


def state() -> dict[str, list[str]]:
    """What has been allowed and used so far, for processes that are started."""
    return {"allowed": sorted(_allowed), **{kind: list(names) for kind, names in _used.items()}}


def restore(state: Mapping[str, Iterable[str]]) -> None:
    """Take over the :func:`state` of the process that started this one."""
    _allowed.update(state["allowed"])
    for kind, names in _used.items():
        names.update(dict.fromkeys(state[kind]))


def used(kind: str) -> tuple[str, ...]:
    """Dotted names that were asked for."""
    return tuple(_used[kind])


@cache
def registered(kind: str) -> dict[str, tuple[EntryPoint, ...]]:
    """Entry points of installed packages by name; several if packages use the same name."""
    found: dict[str, tuple[EntryPoint, ...]] = {}
    for point in sorted(entry_points(group=GROUPS[kind]), key=lambda point: (point.name, point.value)):
        if point.value not in [other.value for other in found.get(point.name, ())]:
            found[point.name] = (*found.get(point.name, ()), point)
    return found


def names(kind: str, built_in: Iterable[str]) -> list[str]:
    """All names of a kind: the built-in ones, then those of installed packages."""
    return list(dict.fromkeys([*built_in, *registered(kind)]))


def place(kind: str, name: str, built_in: Mapping[str, str]) -> str:
    """Where a class is, ``module:Class``. Imports nothing. A built-in name is never another package's.

    Raises:
        UserError: nothing has this name, two packages register it, or it is a dotted name of a package that the command
            line does not name.
    """
    word = _WORDS[kind]
    if name in built_in:
        return built_in[name]
    if points := registered(kind).get(name, ()):
        if len(points) > 1:
            owners = ", ".join(_described(point) for point in points)
            raise UserError(f"{word} '{name}' is registered twice: {owners}: uninstall one, or use the dotted name")
        return points[0].value
    if not is_dotted(name):
        raise UserError(f"{word} {quoted(name)} is unknown: {nearest(name, names(kind, built_in))}")
    module = name.partition(":")[0]
    if name not in _allowed and not any(f"{module}.".startswith(f"{given}.") for given in _allowed):
        why = "is code of a package that the command line does not name"
        raise UserError(f"{word} {quoted(name)} {why}: --plugins {module.partition('.')[0]}")
    _used[kind][name] = None
    return name


def load(kind: str, name: str, built_in: Mapping[str, str], base: type[C]) -> type[C]:
    """The class of this name. Modules in the working directory are found after all others.

    Raises:
        UserError: as :func:`place`; its module cannot be imported or has no such class, or that is no ``base``.
    """
    where = place(kind, name, built_in)
    module, _, attribute = where.partition(":")
    if name not in built_in and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        found = importlib.import_module(module)
    except Exception as error:
        if name in built_in:
            raise
        reason = one_line(f"{type(error).__name__}: {error}")
        raise UserError(f"{_WORDS[kind]} '{name}': {module} cannot be imported ({reason})") from error
    cls = getattr(found, attribute, None)
    if cls is None:
        classes = [key for key, value in vars(found).items() if isinstance(value, type) and issubclass(value, base)]
        raise UserError(f"{_WORDS[kind]} '{name}': {module} has no {attribute}: {nearest(attribute, classes)}")
    if not isinstance(cls, type) or not issubclass(cls, base):
        raise UserError(f"{_WORDS[kind]} '{name}': {where} is no subclass of {base.__name__}")
    return cls


def origin(kind: str, name: str, built_in: Mapping[str, str]) -> str | None:
    """Class and package of a name, ``my_pkg.recency:Recency (my-pkg 0.3)``; None for a built-in one."""
    if name in built_in:
        return None
    where = place(kind, name, built_in)
    if points := registered(kind).get(name):
        return _described(points[0])
    owners = packages_distributions().get(re.split("[.:]", where)[0], [])
    return where + (f" ({owners[0]} {version(owners[0])})" if owners else "")


def listed(kind: str) -> dict[str, str]:
    """What installed packages register, by name, each with its classes and packages."""
    return {name: ", ".join(_described(point) for point in points) for name, points in registered(kind).items()}


def _described(point: EntryPoint) -> str:
    return f"{point.value} ({point.dist.name} {point.dist.version})" if point.dist else point.value
