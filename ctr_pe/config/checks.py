"""Everything that is wrong with the parameters of one experiment, one line each, before anything runs.

Keys and values are checked as :mod:`ctr_pe.config.keys` declares them, and the model is built once, with tables of
three rows,
on the fields of its data set.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ctr_pe.config.field_groups import Group, field_groups, group_params
from ctr_pe.config.keys import DATA, KEYS, checked, problems
from ctr_pe.config.yaml import load_json, packaged_yaml, parse_yaml
from ctr_pe.data.dataset import REPORT, stored_groups
from ctr_pe.data.synthetic.built_in import BUILT_IN
from ctr_pe.evaluation.monitor import monitor_mode
from ctr_pe.fuxictr import released_cape
from ctr_pe.utils import plugins
from ctr_pe.utils.errors import UserError, nearest, quoted, shown


def model_class(name: str | type) -> Any:
    """The class of a model, one of FuxiCTR's ``BaseModel``; a class is returned unchanged.

    Raises:
        UserError: no model has this name, or it is code that may not be imported (:mod:`ctr_pe.utils.plugins`).
    """
    from ctr_pe.fuxictr.library import base_model
    from ctr_pe.model_zoo import MODELS

    return name if isinstance(name, type) else plugins.load("model", name, MODELS, base_model())


def check_encoding(name: Any) -> Any:
    """The name, if it is an encoding, a chain of encodings or a list of those; ``native`` is the model's own encoding.

    Raises:
        UserError: it is not.
    """
    from ctr_pe.pe import check_encodings

    check_encodings(name)
    return name


def check_other_model(cls: Any, feature_map: Any, params: Mapping[str, Any]) -> None:
    """Check a model that is FuxiCTR's but none of ours (``RankModel``), and what FuxiCTR would run as code.

    Raises:
        UserError: an encoding, which the model would ignore, a wrong value, or a text that FuxiCTR would run.
    """
    from ctr_pe.fuxictr.library import take_encoders

    if hasattr(cls, "build_encoding"):  # a RankModel, whose module imports this one
        return
    encoding = params.get("position_encoding") or "none"
    if {encoding} != {"none"} if isinstance(encoding, str) else {*encoding} != {"none"}:
        raise UserError(f"model '{cls.__name__}' takes no position encoding, it is no RankModel of ctr_pe: --pe none")
    take_encoders(feature_map)
    checked(KEYS, params)
    monitor_mode(params.get("monitor", "AUC"), params.get("monitor_mode"))
    for key in params:
        if key.endswith("_initializer"):
            raise UserError(f"{key}: FuxiCTR would run it as code: leave it out")


def origins(model: str, pe: str) -> dict[str, str]:
    """For each name of a run that is not built in: its class and the package that it comes from."""
    from ctr_pe.model_zoo import MODELS
    from ctr_pe.pe import REGISTRY

    found = {model: plugins.origin("model", model, MODELS)}
    found |= {link: plugins.origin("encoding", link, {**REGISTRY, "native": ""}) for link in pe.split("+")}
    return {name: origin for name, origin in found.items() if origin is not None}


def check_params(model: str, params: Mapping[str, Any]) -> None:
    """Check hyper-parameters for a data set that is already built, without building the model.

    Raises:
        UserError: an unknown model, key or value, or a key that is read only when a data set is built.
    """
    check_names(model, params)
    check_values(model_class(model), params)


def check_names(model: str, keys: Iterable[str]) -> None:
    """Raises UserError for the first key that the model does not know, or that a data set decides when it is built."""
    from ctr_pe.models.keys import check_keys

    for key in keys:
        if key in DATA:
            raise UserError(f"{key}: the data set decides it")
    check_keys(model_class(model), keys)


def check_values(cls: Any, params: Mapping[str, Any]) -> None:
    """Raises UserError for the first wrong value of a model's parameters."""
    from ctr_pe.models.keys import known_keys

    checked(KEYS, {key: value for key, value in params.items() if key == "position_encoding"})
    check_encoding(params.get("position_encoding", "none"))  # options of dotted names are known from here on
    checked(known_keys(cls), params)
    monitor_mode(params.get("monitor", "AUC"), params.get("monitor_mode"))


def param_problems(params: Mapping[str, Any], root: Path) -> Iterator[str]:
    """All problems of one experiment's parameters, one string each; ``root``: directory of data sets."""
    from ctr_pe.models.keys import known_keys, unknown_keys

    if released_cape.is_legacy(params):
        params, _ = released_cape.translate(params)
    yield from (f"'{key}' is missing" for key in ("model", "dataset_id") if key not in params)
    wrong: dict[str, str] = {}
    for key, check in {"model": model_class, "position_encoding": check_encoding}.items():
        try:
            checked(KEYS, {key: params.get(key, "none")})
            check(params.get(key, "none"))
        except UserError as error:
            wrong[key] = f"{key}: {error}" if key == "position_encoding" else str(error)
    if "model" in wrong:
        yield from [wrong["model"]] if "model" in params else []
        return
    cls = model_class(params["model"])
    unknown = unknown_keys(cls, params)  # with the options of dotted names, which are known from here on
    wrong |= unknown
    wrong |= problems(known_keys(cls), {key: value for key, value in params.items() if key not in wrong})
    yield from wrong.values()
    yield from _model_problems(cls, {key: value for key, value in params.items() if key not in wrong}, root)


def _model_problems(cls: Any, params: dict[str, Any], root: Path) -> Iterator[str]:
    """Fields that the data set lacks, and the errors of building the model."""
    import torch

    from ctr_pe.fuxictr.library import small_feature_map

    try:
        specs, own_groups, own_id = data_specs(params, root)
        groups = field_groups(params)
        if not groups:
            fields = group_params(own_groups or (STAND_IN,))
            params |= {**fields, "age_field": params.get("age_field") or fields["age_field"]}
            params["group_id"] = params.get("group_id") or own_id
            groups = field_groups(params)
        monitor_mode(params.get("monitor", "AUC"), params.get("monitor_mode"))
    except UserError as error:
        yield str(error)
        return
    complete, missing = _stand_ins(specs, groups, params)
    for name, key in missing.items():
        yield f"{key}: no feature {quoted(name)} in data set '{params.get('dataset_id')}': {nearest(name, specs)}"
    complete |= {name: {"type": "meta"} for name in missing if name not in complete}
    monitor = params.get("monitor", "AUC")
    group_id = params.get("group_id") or own_id
    if specs and "gAUC" in (monitor if isinstance(monitor, dict) else [monitor]) and not group_id:
        yield "monitor gAUC needs a group_id: the column whose rows are compared with each other"
    try:
        feature_map = small_feature_map(str(params.get("dataset_id")), complete, params)
        check_other_model(cls, feature_map, params)
        with torch.random.fork_rng(devices=[]):
            cls(feature_map, **params | {"gpu": -1})
    except Exception as error:  # another package's class may raise anything
        yield str(error) if isinstance(error, ValueError) else f"the model cannot be built: {shown(error)}"


STAND_IN = Group(("item_id", "cate_id"), ("item_history", "cate_history"))


def data_specs(params: Mapping[str, Any], root: Path) -> tuple[dict[str, dict[str, Any]], Sequence[Group], str | None]:
    """Features, field groups and group id of an experiment's data set.

    From ``feature_cols``, from the data set if it is built, or from what is known of a published or built-in one or one
    with a recipe; empty if nothing is known.

    Raises:
        UserError: invalid ``feature_cols``.
    """
    from ctr_pe.data.published.sets import SETS, original
    from ctr_pe.fuxictr.csv import feature_specs
    from ctr_pe.fuxictr.feature_specs import history_spec, read_feature_map, target_spec

    name = str(params.get("dataset_id"))
    if params.get("feature_cols"):
        return feature_specs(params), (), None
    given = [Path(str(params["train_data"])).parent] if params.get("train_data") else []
    for folder in (*given, root / name, Path(str(params.get("data_root") or root)) / name):
        if (folder / "feature_map.json").is_file():
            _, specs = read_feature_map(folder / "feature_map.json")
            report = load_json(folder / REPORT) if (folder / REPORT).is_file() else {}
            return specs, stored_groups(report.get("groups", [])), report.get("group_id")
    if published := SETS.get(original(name)):
        specs = {published.group_id: {"type": "meta"}}
        for field in published.fields:
            vectors = {"embedding_dim": 64, "feature_encoder": "nn.Linear(64, 64, bias=False)"} if field.vectors else {}
            specs[field.name] = target_spec(1, field.source) | vectors
            specs |= {history: history_spec(field.name, 1, 100) | vectors for history, _ in field.histories}
        return specs, published.groups, published.group_id
    if name in BUILT_IN:
        return {}, [replace(STAND_IN, age="age_history")], "user_id"
    if recipe := packaged_yaml("recipe").get(name):
        timed = parse_yaml(recipe, name).get("time") is not None
        return {}, [replace(STAND_IN, age="age_history" if timed else None)], None
    return {}, (), None


def _stand_ins(
    specs: dict[str, dict[str, Any]], groups: list[Any], params: Mapping[str, Any]
) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """The specs with every field in use, and of the fields that a known data set lacks the keys that name them."""
    from ctr_pe.fuxictr.feature_specs import age_spec, history_spec, target_spec

    used: dict[str, dict[str, Any]] = {}
    named: dict[str, str] = dict.fromkeys(params.get("use_features") or [], "use_features")
    for group in groups:
        named |= dict.fromkeys(group.target, "target_field") | dict.fromkeys(group.history, "sequence_field")
        used |= {name: target_spec(1) for name in group.target}
        pairs = zip(group.target, group.history, strict=True)
        used |= {history: history_spec(target, 1, 100) for target, history in pairs}
        if group.age:
            named[group.age], used[group.age] = "age_field", age_spec(100)
    if group_id := params.get("group_id"):
        named.setdefault(group_id, "group_id")
        used.setdefault(group_id, {"type": "meta"})
    complete = {name: dict(spec) for name, spec in {**used, **specs}.items()}
    for change in params.get("feature_specs") or []:
        for name in change["name"] if isinstance(change["name"], list) else [change["name"]]:
            named.setdefault(name, "feature_specs")
            complete.get(name, {}).update({key: value for key, value in change.items() if key != "name"})
    return complete, {name: key for name, key in named.items() if specs and name not in specs}
