"""Everything that is wrong with the parameters of one experiment, one line each, before anything runs.

Keys and values are checked against the model's section, and the model is built once, with tables of three rows, on the
fields of its data set.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ctr_pe.config.field_groups import Group, field_groups, group_params
from ctr_pe.config.schema import Encodings, problems, valid
from ctr_pe.config.yaml import packaged_yaml, parse_yaml
from ctr_pe.data.dataset import read_report
from ctr_pe.data.published.sets import SETS, original
from ctr_pe.data.root import REPORT
from ctr_pe.data.synthetic.built_in import BUILT_IN
from ctr_pe.evaluation.metrics import without_groups
from ctr_pe.fuxictr.csv import feature_specs
from ctr_pe.fuxictr.feature_specs import FEATURES, age_spec, history_spec, read_feature_map, target_spec
from ctr_pe.fuxictr.library import small_feature_map
from ctr_pe.fuxictr.older_keys import translate
from ctr_pe.models.sections import check_other_model, model_class, model_section
from ctr_pe.pe import check_encodings
from ctr_pe.utils.errors import UserError, nearest, quoted, shown


def param_problems(params: Mapping[str, Any], root: Path) -> Iterator[str]:
    """All problems of one experiment's parameters, one string each; ``root``: directory of data sets."""
    params, _ = translate(params)
    yield from (f"'{key}' is missing" for key in ("model", "dataset_id") if key not in params)
    wrong: dict[str, str] = {}
    try:
        check_encodings(valid("position_encoding", Encodings, params.get("position_encoding", "none")))
    except UserError as error:
        wrong["position_encoding"] = f"position_encoding: {error}"
    try:
        cls = model_class(valid("model", str, params.get("model", "DIN")))
    except UserError as error:
        yield str(error)
        return
    if "model" not in params:
        return
    known = {key: value for key, value in params.items() if key not in wrong}
    wrong |= problems(model_section(cls), known)  # with the options of dotted names, which are known from here on
    yield from wrong.values()
    yield from _model_problems(cls, {key: value for key, value in params.items() if key not in wrong}, root)


def _model_problems(cls: Any, params: dict[str, Any], root: Path) -> Iterator[str]:
    """Fields that the data set lacks, and the errors of building the model."""
    try:
        specs, own_groups, own_id = data_specs(params, root)
        groups = field_groups(params)
        if not groups:
            fields = group_params(own_groups or (STAND_IN,))
            params |= {**fields, "age_field": params.get("age_field") or fields["age_field"]}
            params["group_id"] = params.get("group_id") or own_id
            groups = field_groups(params)
    except UserError as error:
        yield str(error)
        return
    complete, missing = _stand_ins(specs, groups, params)
    for name, key in missing.items():
        yield f"{key}: no feature {quoted(name)} in data set '{params.get('dataset_id')}': {nearest(name, specs)}"
    complete |= {name: {"type": "meta"} for name in missing if name not in complete}
    if specs and not (params.get("group_id") or own_id):
        yield from without_groups(params)
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
    name = str(params.get("dataset_id"))
    if params.get("feature_cols"):
        return feature_specs(params), (), None
    given = [Path(str(params["train_data"])).parent] if params.get("train_data") else []
    for folder in (*given, root / name, Path(str(params.get("data_root") or root)) / name):
        if (folder / FEATURES).is_file():
            specs = read_feature_map(folder / FEATURES).features
            report = read_report(folder) if (folder / REPORT).is_file() else None
            return specs, report.groups if report else (), report.group_id if report else None
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
