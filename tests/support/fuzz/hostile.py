"""Files that want code to run, or files outside their folder.

Each gets the text of a canary: Python that makes a file named CANARY in the working directory.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from tests.support.fuzz.configs import DATASET, MODEL, RECIPE, SUITE

CANARY = "__import__('pathlib').Path('CANARY').touch()"
TEXTS = [CANARY, f"x if {CANARY} else x", f"ReLU({CANARY})", f"nn.Linear({CANARY}, 1)", f"l2({CANARY})"]
TAGS = [
    "!!python/object/apply:pathlib.Path.touch [CANARY]",
    "!!python/object/apply:os.system ['touch CANARY']",
    "!!python/object/new:subprocess.Popen [[touch, CANARY]]",
    "!!python/name:os.system ''",
    "!!python/module:antigravity ''",
]
OUTSIDE = ["../../outside", "/tmp/outside", "..", "a/../../../outside", "..\\outside"]


class Hostile(NamedTuple):
    """What a file wants, the file, its text, and the command that reads it."""

    wants: str
    file: str
    text: str
    command: tuple[str, ...]


def hostile() -> Iterator[Hostile]:
    """Every one of them."""
    yield from _code()
    yield from _paths()


def _code() -> Iterator[Hostile]:
    for tag in TAGS:
        for base in ({"X": MODEL}, {"mine": DATASET}, SUITE, RECIPE):
            yield _validated("code: a tag of YAML", _text(base).replace("mine", tag, 1) + f"\nx: {tag}\n")
    for key in ("loss", "optimizer", "dnn_activations", "learning_rate_schedule", "position_encoding", "model"):
        for text in TEXTS[:2]:
            yield _validated("code: a name", _text({"X": {**MODEL, key: text}}))
    for key in ("embedding_regularizer", "net_regularizer"):
        yield _validated("code: a regularizer", _text({"X": {**MODEL, key: TEXTS[4]}}))
    for key in ("metrics", "monitor"):
        yield _validated("code: a metric", _text({"X": {**MODEL, key: [CANARY]}}))
    for text in TEXTS:
        changes = [{"name": "item_id", "feature_encoder": text}]
        yield _validated("code: a feature encoder", _text({"X": {**MODEL, "feature_specs": changes}}))
        yield _mapped("code: a feature encoder", partial(_first, feature_encoder=text))


def _paths() -> Iterator[Hostile]:
    for path in OUTSIDE:
        yield _validated("a path outside: model_id", _text({"X": {**MODEL, "model_id": path}}))
        yield _validated("a path outside: dataset_id", _text({"X": {**MODEL, "dataset_id": path}}))
        yield _validated("a path outside: a section", _text({path: MODEL}))
        yield _validated("a path outside: a data set", _text({path: DATASET}))
        yield _mapped("a path outside: dataset_id", partial(_with, dataset_id=path))
        yield _mapped("a path outside: vectors", partial(_first, pretrained_emb=path))


def _validated(wants: str, text: str) -> Hostile:
    return Hostile(wants, "given.yaml", text, ("validate", "given.yaml"))


def _mapped(wants: str, changed: Callable[[dict[str, Any]], dict[str, Any]]) -> Hostile:
    text = json.dumps(changed(deepcopy(FEATURE_MAP)))
    return Hostile(wants, "data/theirs/feature_map.json", text, ("validate", "theirs.yaml"))


def _with(content: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return content | changes


def _first(content: dict[str, Any], **changes: Any) -> dict[str, Any]:
    content["features"][0]["item_id"] |= changes
    return content


def _text(content: Any) -> str:
    return str(yaml.safe_dump(content, sort_keys=False))


_ID = {"source": "item", "padding_idx": 0, "oov_idx": 3, "vocab_size": 4}
_LIST = {"type": "sequence", "max_len": 5, "feature_encoder": None}
FEATURE_MAP: dict[str, Any] = {
    "dataset_id": "theirs",
    "features": [
        {"item_id": {**_ID, "type": "categorical"}},
        {"clicks": {**_ID, **_LIST, "share_embedding": "item_id"}},
    ],
    "labels": ["label"],
}
FIELDS = {"target_field": "item_id", "sequence_field": "clicks"}


def placed(folder: Path) -> None:
    """A data set that FuxiCTR has built, and a config that uses it."""
    (folder / "data" / "theirs").mkdir(parents=True, exist_ok=True)
    (folder / "data" / "theirs" / "feature_map.json").write_text(json.dumps(FEATURE_MAP))
    theirs = {"X": {**MODEL, **FIELDS, "dataset_id": "theirs"}}
    (folder / "theirs.yaml").write_text(yaml.safe_dump(theirs))


def with_texts(content: Any) -> Iterator[Any]:
    """Copies in which one text is a canary's."""
    for path in places(content):
        for text in TEXTS:
            copy = deepcopy(content)
            at = copy
            for step in path[:-1]:
                at = at[step]
            at[path[-1]] = text
            yield copy


def places(content: Any) -> Iterator[tuple[Any, ...]]:
    """Where the texts of a file are."""
    steps = content.items() if isinstance(content, dict) else enumerate(content)
    for step, value in steps:
        if isinstance(value, str):
            yield (step,)
        elif isinstance(value, dict | list):
            yield from ((step, *path) for path in places(value))
