"""YAML in FuxiCTR's dialect, read safely, and the hyper-parameters of a run put together from it."""

from __future__ import annotations

import json
import re
from collections.abc import Hashable, Iterable, Mapping
from copy import deepcopy
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from ctr_pe.utils import plugins
from ctr_pe.utils.errors import UserError, nearest, shown


class _Loader(yaml.SafeLoader):
    """YAML as FuxiCTR reads it, except that ``1e-3`` is a number, and a date or ``1:30`` text. It refuses keys that are
    no text or given twice; one that was null before may be given again, as FuxiCTR's own configs do."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[tuple[str, str]] = set()
        for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
            if key.tag not in ("tag:yaml.org,2002:str", "tag:yaml.org,2002:merge"):
                given = shown(key.value) if isinstance(key, yaml.ScalarNode) else f"of a {key.id}"
                raise _refused(key, f"key {given} is no text: write it in quotes")
            name = (key.tag, str(key.value))
            if name in seen and key.tag != "tag:yaml.org,2002:merge":
                raise _refused(key, f"key {shown(key.value)} is given twice")
            if value.tag != "tag:yaml.org,2002:null":
                seen.add(name)
        return super().construct_mapping(node, deep)

    def construct_tuple(self, node: yaml.SequenceNode) -> tuple[Any, ...]:
        return tuple(self.construct_sequence(node, deep=True))


def _refused(at: Any, problem: str) -> yaml.constructor.ConstructorError:
    return yaml.constructor.ConstructorError(None, None, problem, at.start_mark)


_NUMBERS = {
    "int": r"[-+]?(?:0b[01_]+|0[0-7_]+|0|[1-9][0-9_]*|0x[0-9a-fA-F_]+)$",
    "float": r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?$"
    r"|[-+]?\.(?:inf|Inf|INF)$|\.(?:nan|NaN|NAN)$",
}
"""Without the numbers in base 60 of YAML 1.1, with all exponents of YAML 1.2."""
_TAG = "tag:yaml.org,2002:"
_Loader.add_constructor(f"{_TAG}python/tuple", _Loader.construct_tuple)
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in found if tag.removeprefix(_TAG) not in ("timestamp", *_NUMBERS)]
    for first, found in _Loader.yaml_implicit_resolvers.items()
}
for _kind, _pattern in _NUMBERS.items():
    _Loader.add_implicit_resolver(_TAG + _kind, re.compile(_pattern), list("-+.0123456789"))


def load_yaml(path: str | Path) -> Any:
    """What a YAML file holds; raises UserError if it cannot be read, or as :func:`parse_yaml`."""
    return parse_yaml(_text(path), str(path))


def load_json(path: str | Path) -> dict[str, Any]:
    """The object that a JSON file holds; raises UserError if it cannot be read, or holds no object."""
    text = _text(path)
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not readable as JSON ({error})") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: not a JSON object")
    return content


def _text(path: str | Path) -> str:
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise UserError(f"{path}: not a text file in UTF-8") from None
    except (OSError, ValueError) as error:  # a name with a null byte is a ValueError
        raise UserError(f"{path}: {getattr(error, 'strerror', None) or error}") from None


def parse_yaml(text: str, source: str) -> Any:
    """What a YAML text holds; ``source`` is its name in errors. Tuples may be written ``!!python/tuple [a, b]``.

    Raises UserError, ``source:line: what``: a syntax error, a tag that could run code, or a key given twice.
    """
    try:
        return deepcopy(_parsed(text))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark else ""
        raise UserError(f"{source}{line}: {error.problem or error.context}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"{source}: {' '.join(str(error).split())}") from None


@lru_cache(64)
def _parsed(text: str) -> Any:
    return _Loader(text).get_single_data()


def parse_overrides(pairs: Iterable[str], option: str = "--set") -> dict[str, Any]:
    """``["learning_rate=1e-3", "dnn_hidden_units=[64, 32]"]`` as a dict; values are YAML, a later one wins.

    Raises UserError, which names the ``option``, if there is no ``=``, no key before it, or no YAML after it.
    """
    overrides: dict[str, Any] = {}
    for pair in pairs:
        key, sign, value = pair.partition("=")
        key = key.strip()
        if not sign or not key:
            raise UserError(f"{option} {pair}: write key=value, such as learning_rate=1e-3")
        try:
            overrides[key] = parse_yaml(value, "")
        except UserError as error:
            raise UserError(f"{option} {pair}: {re.sub('^[^ ]*: ', '', str(error))}") from None
    return overrides


def training_recipe(name: str) -> dict[str, Any]:
    """Hyper-parameters of a packaged ``training/<name>.yaml``. Raises UserError if there is none."""
    shipped = packaged_yaml("training")
    if name not in shipped:
        raise UserError(f"--recipe {name}: no such recipe: {nearest(name, shipped)}")
    found: dict[str, Any] = parse_yaml(shipped[name], name)
    return found


def next_item_params(model: str, dataset_id: str, overrides: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """As :func:`model_params`, of a next-item model: of ``next_item_config/<model>.yaml`` ``Base``, ``<model>_default``
    and ``<model>_<dataset_id>``, as far as they are there."""
    configs = packaged_yaml("next_item_config")
    sections: dict[str, dict[str, Any]] = {}
    for file in dict.fromkeys(["Base", model]):
        if file in configs:
            sections |= parse_yaml(configs[file], f"config/next_item_config/{file}.yaml")
    params: dict[str, Any] = {}
    for name in ("Base", f"{model}_default", f"{model}_{dataset_id}"):
        params |= sections.get(name, {})
    return {**overridden(params, overrides or {}), "model": model, "dataset_id": dataset_id}


def model_params(model: str | type, dataset_id: str, overrides: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Hyper-parameters of ``model`` on a data set, as FuxiCTR names them.

    ``Base``, then ``<model>_<dataset_id>`` of the packaged ``model_config/<model>.yaml``, or ``<model>_default`` if
    there is none, then ``overrides``; a later one wins key by key. A generated set has the section of the published one
    that it is like. ``model`` and ``dataset_id`` are the arguments. A model of another package has the configuration of
    the nearest class that it is derived from, or else Base alone. Raises UserError if there is no such model, or its
    configuration does not hold mappings.
    """
    from ctr_pe.data.published.sets import original  # which imports this package for the field groups

    overrides = overrides or {}
    configs = packaged_yaml("model_config")
    family = model if isinstance(model, str) and model in configs else _family(model, configs)
    file = family or next(iter(configs))  # Base is the same in all
    source = f"config/model_config/{file}.yaml"
    sections = parse_yaml(configs[file], source)
    params: dict[str, Any] = {}
    own = f"{family}_{original(dataset_id)}"
    for name in ["Base", *([own if own in sections else f"{family}_default"] if family else [])]:
        section = sections.get(name, {})
        if not isinstance(section, dict):
            raise UserError(f"{source}: '{name}' is not a mapping")
        params |= section
    return {**overridden(params, overrides), "model": model, "dataset_id": dataset_id}


def overridden(params: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """``params`` with ``overrides``. Another monitor brings its own mode, and another batch size stays as it is."""
    goes_with = {"monitor_mode": "monitor", "min_batches": "batch_size"}
    return {**{key: value for key, value in params.items() if goes_with.get(key) not in overrides}, **overrides}


def _family(model: str | type, configs: Mapping[str, str]) -> str | None:
    cls = model if isinstance(model, type) else plugins.load("model", model, dict.fromkeys(configs, ""), object)
    return next((base.__name__ for base in cls.__mro__ if base.__name__ in configs), None)


def packaged_yaml(folder: str) -> dict[str, str]:
    """Text of the YAML files in one folder of the packaged ``config/``, by name without suffix."""
    entries = sorted((files("ctr_pe.configs") / folder).iterdir(), key=lambda entry: entry.name)
    found = [entry for entry in entries if entry.name.endswith(".yaml")]
    return {entry.name.removesuffix(".yaml"): entry.read_text(encoding="utf-8") for entry in found}
