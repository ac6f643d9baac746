"""What a data set has, in words, for readers of results."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ctr_pe.config.columns import Behaviours
from ctr_pe.config.yaml import load_json
from ctr_pe.data.dataset import WEIGHT, Dataset
from ctr_pe.data.root import REPORT
from ctr_pe.fuxictr.feature_specs import FEATURES, read_feature_map


def description(dataset: Dataset) -> dict[str, Any]:
    """``facts``: name -> words; ``columns``: per column that a model reads its ``name``, whose it is (``of``), its
    ``type`` with what was declared, where it is read (``in``), its ``ids``, and the rows ``without`` a value, if any.

    What a set that is of no log lacks is left out.
    """
    report = load_json(dataset.path / REPORT)
    recipe: Mapping[str, Any] = report.get("recipe", {})
    features = read_feature_map(dataset.path / FEATURES).features
    listed = [name for group in dataset.groups for name in (*group.history, group.age)]
    targets = {name for group in dataset.groups for name in group.target}
    missing = {**report.get("missing", {}), **report.get("items_without", {})}
    facts = {
        "rows": ", ".join(f"{split} {count:,}" for split, count in dataset.rows.items()),
        "histories": f"the newest {dataset.max_len:,} items: {', '.join(group.history[0] for group in dataset.groups)}",
        "label": recipe.get("label") or dataset.label,
    }
    if recipe:
        facts["protocol"] = str(recipe["protocol"])
        facts["weights of rows"] = str(recipe.get("weight") or "none, all count alike")
    elif WEIGHT in features:
        facts["weights of rows"] = WEIGHT
    if recipe.get("behaviours"):
        behaviours = Behaviours.model_validate(recipe["behaviours"])
        facts["behaviours"] = f"{behaviours.column}: {', '.join(behaviours.texts)}, each with a history of its own"
    columns = []
    for name, spec in features.items():
        if spec["type"] == "meta" or name in listed:
            continue
        given: Mapping[str, Any] = recipe.get("columns", {}).get(name, {})
        words = [given.get("type", spec["type"])]
        words += [f"{key} {value}" for key, value in given.items() if key not in ("source", "type", "known")]
        if "share_embedding" in spec and "share_embedding" not in given:
            words.append(f"share_embedding {spec['share_embedding']}")
        places = "target and histories" if name in targets else "target"
        columns.append({
            "name": name,
            "of": "event" if spec.get("source") == "context" else spec.get("source") or None,
            "type": ", ".join(words),
            "in": "histories alone: known afterwards" if spec.get("known") == "afterwards" else places,
            "ids": spec.get("vocab_size"),
            "without": missing.get(name),
        })  # fmt: skip
    return {"facts": facts, "columns": columns}
