"""The config sections of models: the keys that a class takes, and checks of what a config or a caller says."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from functools import cache
from typing import Any

from ctr_pe.config.field_groups import FIELD_KEYS, field_keys
from ctr_pe.config.schema import (
    Activation,
    DataSection,
    Encodings,
    ExperimentSection,
    Fields,
    Section,
    check,
    parameters,
    section,
    unknown,
    valid,
)
from ctr_pe.fuxictr.library import base_model, take_encoders
from ctr_pe.fuxictr.older_keys import UNREAD
from ctr_pe.pe import (
    FROM_DATA,
    REGISTRY,
    check_encodings,
    encoding_class,
    known_encodings,
    options_of,
    pe_options,
)
from ctr_pe.utils import plugins
from ctr_pe.utils.errors import UserError

TASKS = ("click", "next-item")
"""What models answer: is an item clicked, or which of all items comes next?"""


def models_of(task: str) -> Mapping[str, str]:
    """The built-in models of a task, by the names that it has for them."""
    from ctr_pe.model_zoo import MODELS
    from ctr_pe.model_zoo.next_item import NEXT_ITEM_MODELS

    return MODELS if task == "click" else NEXT_ITEM_MODELS


def task_of(model: type) -> str:
    """What a model answers."""
    return getattr(model, "solves", "click")


def registered_name(model: type) -> str:
    """The name that a built-in model has in its task; of others that of the class."""
    place = f"{model.__module__}:{model.__name__}"
    return next((name for name, where in models_of(task_of(model)).items() if where == place), model.__name__)


def model_class(name: str | type, task: str = "click") -> Any:
    """The class of a model, one of FuxiCTR's ``BaseModel``; a class is returned unchanged.

    Raises:
        UserError: no model has this name, or it is code that may not be imported (:mod:`ctr_pe.utils.plugins`).
    """
    return name if isinstance(name, type) else plugins.load("model", name, models_of(task), base_model())


def model_section(model: type) -> type[Section]:
    """The section of a model's config: its constructor's parameters, field groups, options of all known encodings, and
    the keys of every experiment."""
    return _model_section(model, tuple(known_encodings()))


@cache
def _model_section(model: type, encodings: tuple[type, ...]) -> type[Section]:
    kinds: dict[str, Any] = dict.fromkeys(UNREAD, Any)
    for encoding in encodings:
        options = parameters(encoding)
        kinds |= {key: options.get(key, Any) for key in options_of(encoding) if key not in FROM_DATA}
    kinds |= {name: Fields for key in FIELD_KEYS for name in field_keys(key, prefixes(model))}
    constructor = dict(parameters(model))
    constructor.pop("feature_map", None)
    for key, kind in constructor.items():  # FuxiCTR looks them up in torch
        if kind is Any and key.removesuffix("s").endswith("activation"):
            constructor[key] = Activation | list[Activation] | None
    return section(model.__name__, kinds | constructor, ExperimentSection)


ROOM = "ctr_pe.fuxictr."


def prefixes(model: type) -> list[str]:
    """Of keys such as ``din_target_field``: names of the model and its base classes, its own last, which wins."""
    named = [cls for cls in model.__mro__ if issubclass(cls, base_model())]
    return [cls.__name__.lower() for cls in reversed(named) if not cls.__module__.startswith(("fuxictr.", ROOM))]


def check_params(model: str | type, params: Mapping[str, Any]) -> None:
    """Check hyper-parameters for a data set that is built, without building the model.

    Raises:
        UserError: an unknown model, encoding or key, a wrong value, or a key that is read only when a data set is
            built.
    """
    check_names(model, params)
    check_arguments(model_class(model), params)


def check_names(model: str | type, keys: Iterable[str]) -> None:
    """Raises UserError for the first key that the model does not know, or that a data set decides when it is built."""
    known = model_section(model_class(model))
    for key in keys:
        if key in DataSection.model_fields:
            raise UserError(f"{key}: the data set decides it")
        if key not in known.model_fields:
            raise UserError(unknown(known, key))


def check_arguments(cls: type, params: Mapping[str, Any]) -> None:
    """Raises UserError for an unknown encoding, or the first key that is unknown or has a wrong value."""
    if "position_encoding" in params:  # the options of dotted names are known from here on
        check_encodings(valid("position_encoding", Encodings, params["position_encoding"]))
    check(model_section(cls), params)


def check_other_model(cls: Any, feature_map: Any, params: Mapping[str, Any]) -> None:
    """Check a model that is FuxiCTR's but none of ours (``RankModel``), and what FuxiCTR would run as code.

    Raises:
        UserError: an encoding, which the model would ignore, a wrong value, or a text that FuxiCTR would run.
    """
    if hasattr(cls, "build_encoding"):  # a RankModel, whose constructor checks
        return
    encoding = params.get("position_encoding") or "none"
    if {encoding} != {"none"} if isinstance(encoding, str) else {*encoding} != {"none"}:
        raise UserError(f"model '{cls.__name__}' takes no position encoding, it is no RankModel of ctr_pe: --pe none")
    weighted = [key for key in ("class_weight", "weighted_metrics") if params.get(key)]
    if weighted := weighted or [name for name, spec in feature_map.features.items() if spec.get("weight")]:
        raise UserError(f"{weighted[0]}: model '{cls.__name__}' takes no weights, it is no RankModel of ctr_pe")
    take_encoders(feature_map, 1)
    known = model_section(cls)
    check(known, {key: value for key, value in params.items() if key in known.model_fields})
    for key in params:
        if key.endswith("_initializer"):
            raise UserError(f"{key}: FuxiCTR would run it as code: leave it out")


def unread(model: str | type, encodings: Collection[str], params: Iterable[str], given: Iterable[str] = ()) -> str:
    """One line that names the keys that nothing reads, empty if there are none.

    Those of other versions of FuxiCTR, each with the key that is read instead; and of those that a command line has
    ``given`` the options of encodings that are not among ``encodings``.
    """
    cls = model_class(model)
    read = {*parameters(cls)}
    links = {link for pe in encodings for link in pe.split("+")} - {"native"}
    links |= {native for native in [getattr(cls, "native", None)] if isinstance(native, str)}
    read |= {option for link in links for option in options_of(encoding_class(link))}
    found = {key: f" (now {UNREAD[key]})" if UNREAD[key] else "" for key in params if key in UNREAD}
    found |= {key: f" (no option of {', '.join(encodings)})" for key in given if key in pe_options()}
    names = [key + why for key, why in found.items() if key not in read]
    return f"without effect here: {', '.join(names)}" if names else ""


def origins(model: str, pe: str) -> dict[str, str]:
    """For each name of a run that is not built in: its class and the package that it comes from."""
    built_in = {name: place for task in TASKS for name, place in models_of(task).items()}
    found = {model: plugins.origin("model", model, built_in)}
    found |= {link: plugins.origin("encoding", link, {**REGISTRY, "native": ""}) for link in pe.split("+")}
    return {name: origin for name, origin in found.items() if origin is not None}
