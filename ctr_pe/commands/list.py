"""``ctr-pe list``: models, encodings, data sets.

List models, encodings and data sets.

examples:
  ctr-pe list
  ctr-pe list --data-root /data/sets
"""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

from ctr_pe.commands.options import Parser, data_root_option
from ctr_pe.utils import plugins


def add_options(parser: Parser) -> None:
    data_root_option(parser)


def run(args: argparse.Namespace) -> int:
    from ctr_pe.config.yaml import packaged_yaml
    from ctr_pe.data.published.sets import SETS
    from ctr_pe.data.root import data_root, list_datasets
    from ctr_pe.data.synthetic.built_in import BUILT_IN
    from ctr_pe.model_zoo import MODELS
    from ctr_pe.model_zoo.next_item import NEXT_ITEM_MODELS
    from ctr_pe.pe import REGISTRY

    root = data_root(args.data_root)
    built = [(name, _rows(rows)) for name, rows in list_datasets(root)]
    built += [(name, "built in; generated at first use") for name in BUILT_IN if name not in dict(built)]
    for kind, built_in in {"model": MODELS, "encoding": REGISTRY}.items():
        own = [(name, _docstring(place)) for name, place in built_in.items()]
        others = plugins.listed(kind).items()
        hidden = " — not used: the name is built in"
        _section(f"{kind}s", [*own, *((name, place + hidden * (name in built_in)) for name, place in others)])
    of_next_item = [(name, _docstring(place)) for name, place in NEXT_ITEM_MODELS.items()]
    _section("models of --task next-item", of_next_item)
    _section(f"data sets in {root}", built)
    _section("published data sets (ctr-pe data fetch NAME)", [(name, SETS[name].title) for name in SETS])
    suites = packaged_yaml("benchmark").items()
    _section("suites (ctr-pe benchmark --suite NAME)", [(name, _first_comment(text)) for name, text in suites])
    recipes = packaged_yaml("recipe").items()
    _section("recipes (ctr-pe data build --recipe NAME)", [(name, _first_comment(text)) for name, text in recipes])
    return 0


def _section(title: str, entries: Iterable[tuple[str, str]]) -> None:
    print(f"{title}:")
    for name, text in entries:
        print(f"  {name:<23} {text}".rstrip())
    print()


def _rows(rows: dict[str, int]) -> str:
    return " · ".join(f"{split} {count:,}" for split, count in rows.items()) + " rows"


def _docstring(import_path: str) -> str:
    """First line of a module's docstring, without importing the module: that takes seconds of torch and FuxiCTR."""
    spec = find_spec(import_path.partition(":")[0])
    if spec is None or spec.origin is None:
        return ""
    text = ast.get_docstring(ast.parse(Path(spec.origin).read_text(encoding="utf-8"))) or ""
    return text.partition("\n")[0]


def _first_comment(text: str) -> str:
    """A recipe's leading comment up to its first full stop, colon or semicolon."""
    lines = text.splitlines()
    first = next((n for n, line in enumerate(lines) if not line.startswith("#")), len(lines))
    return re.split(r"[.:;](?:\s|$)", " ".join(line.removeprefix("#").strip() for line in lines[:first]))[0]
