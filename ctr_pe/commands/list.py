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
from importlib.util import find_spec
from pathlib import Path

from ctr_pe.commands.options import Parser, data_root_option, json_option
from ctr_pe.utils import plugins

_Section = tuple[str, str, list[tuple[str, str]]]
"""Its name in JSON, its title, and what it lists."""


def add_options(parser: Parser) -> None:
    json_option(parser)
    data_root_option(parser)


def run(args: argparse.Namespace) -> int:
    from ctr_pe.config.yaml import packaged_yaml
    from ctr_pe.data.published.sets import SETS
    from ctr_pe.data.root import data_root, list_datasets
    from ctr_pe.data.synthetic.built_in import BUILT_IN
    from ctr_pe.model_zoo import MODELS
    from ctr_pe.model_zoo.next_item import NEXT_ITEM_MODELS
    from ctr_pe.pe import REGISTRY
    from ctr_pe.utils.files import json_text

    root, sections = data_root(args.data_root), list[_Section]()
    built = [(name, _rows(rows)) for name, rows in list_datasets(root)]
    built += [(name, "built in; generated at first use") for name in BUILT_IN if name not in dict(built)]
    for kind, built_in in {"model": MODELS, "encoding": REGISTRY}.items():
        own = [(name, _docstring(place)) for name, place in built_in.items()]
        others = plugins.listed(kind).items()
        hidden = " — not used: the name is built in"
        sections.append(
            (f"{kind}s", f"{kind}s", [*own, *((name, place + hidden * (name in built_in)) for name, place in others)])
        )
    of_next_item = [(name, _docstring(place)) for name, place in NEXT_ITEM_MODELS.items()]
    sections.append(("next_item_models", "models of --task next-item", of_next_item))
    sections.append(("data_sets", f"data sets in {root}", built))
    titles = [(name, SETS[name].title) for name in SETS]
    sections.append(("published_data_sets", "published data sets (ctr-pe data fetch NAME)", titles))
    files = {"suites": ("benchmark", "ctr-pe benchmark --suite"), "recipes": ("recipe", "ctr-pe data build --recipe")}
    for name, (folder, command) in files.items():
        texts = packaged_yaml(folder).items()
        sections.append((name, f"{name} ({command} NAME)", [(one, _first_comment(text)) for one, text in texts]))
    if args.json:
        print(json_text({name: dict(entries) for name, _, entries in sections}), end="")
        return 0
    for _, title, entries in sections:
        print(f"{title}:")
        for name, text in entries:
            print(f"  {name:<23} {text}".rstrip())
        print()
    return 0


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
