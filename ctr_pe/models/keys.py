"""Keys of a model's config: which there are, and those that FuxiCTR takes for something else."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from ctr_pe.config.keys import DATA, FIELD_KEYS, KEYS, OTHER, TRAINING, Key, known_to
from ctr_pe.fuxictr.library import base_model
from ctr_pe.pe import known_encodings, pe_options
from ctr_pe.utils.errors import UserError, nearest, quoted

ROOM = "ctr_pe.fuxictr."


def check_keys(model: type, keys: Iterable[str]) -> None:
    """Raises UserError for the first key that nothing reads; FuxiCTR would take the default without a word."""
    for problem in unknown_keys(model, keys).values():
        raise UserError(problem)


def unknown_keys(model: type, keys: Iterable[str]) -> dict[str, str]:
    """Those of the keys that nothing reads, each with one line that names the nearest known one."""
    known = {*TRAINING, *pe_options(), *_with_prefixes(model)}
    for cls in model.__mro__:
        if issubclass(cls, base_model()):
            named = list(inspect.signature(cls).parameters.values())[1:]  # the first is the feature map
            known |= {p.name for p in named if p.kind is not p.VAR_KEYWORD}
    unknown = [key for key in keys if key not in known | DATA.keys() | OTHER.keys()]
    return {key: f"{model.__name__}: key {quoted(key)} is unknown: {nearest(key, known)}" for key in unknown}


def known_keys(model: type) -> Mapping[str, Key]:
    """The keys that a model, its base classes and the encodings take, with their types."""
    found: dict[str, Key] = {}
    for encoding in known_encodings():
        found |= known_to(encoding)
    return found | _with_prefixes(model) | known_to(model) | KEYS


def _with_prefixes(model: type) -> dict[str, Key]:
    return {f"{prefix}_{key}": kind for prefix in prefixes(model) for key, kind in FIELD_KEYS.items()}


def prefixes(model: type) -> list[str]:
    """Of keys such as ``din_target_field``: names of the model and its base classes, its own last, which wins."""
    named = [cls for cls in model.__mro__ if issubclass(cls, base_model())]
    return [cls.__name__.lower() for cls in reversed(named) if not cls.__module__.startswith(("fuxictr.", ROOM))]


def own_position_switch(model: str, key: str, on: bool | None, params: dict[str, Any]) -> None:
    """FuxiCTR's switch of a backbone's own position vectors, which are ``position_encoding: native`` here.

    Sets position_encoding to native or none where it is missing, and raises UserError if the two contradict each other.
    """
    if on is None:
        return
    encoding = params.setdefault("position_encoding", "native" if on else "none")
    for name in [encoding] if isinstance(encoding, str) else encoding:
        if ("native" in name.split("+")) != on:
            advice = f"leave it out, position_encoding says all (native is what {key}=True was)"
            raise UserError(f"{model}: {key}={on} contradicts position_encoding='{name}': {advice}")
