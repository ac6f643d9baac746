"""Model folders that are broken in one place.

At every place of each JSON file the value is gone, of another type, out of range, a path or a canary's text; tables and
weights are cut, of another kind, or hold ids that are not there.
"""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import polars as pl
from safetensors.torch import load, save

from ctr_pe import CTRRanker
from ctr_pe import load as load_model
from ctr_pe.data.dataset import hash_of_file
from ctr_pe.serving.model_folder import vocabulary_hash
from ctr_pe.utils.errors import UserError
from tests.support.fuzz.attempts import files
from tests.support.fuzz.small_log import SMALL, random_log

CANARY = "__import__('pathlib').Path('CANARY').touch()"
WRONG: list[Any] = [None, -1, 2**70, 1.5, "x", CANARY, "../../outside", "os:system", [], {}, [[[]]]]
GONE = object()
FIRST = 2
"""Of a list or a mapping of alike values."""
REQUESTS = pl.DataFrame({"user_id": [100, 101, 7], "item_id": ["item 1", "item 2", "item 44"]})
LONGEST = 300


class Changed(NamedTuple):
    """``change`` gets the content of ``file`` and gives another."""

    kind: str
    file: str
    change: Callable[[bytes], bytes]


def made(folder: Path) -> Path:
    """A sound model folder."""
    items = pl.DataFrame({"item_id": [f"item {i}" for i in range(45)], "cate_id": [f"c{i % 6}" for i in range(45)]})
    CTRRanker("DIN", "cape", **SMALL).fit(random_log().drop("label"), items=items).save(folder)
    return folder


def changed_folders(sound: Path) -> Iterator[Changed]:
    """Every one of them."""
    for file in ("model.json", "columns.json", "feature_map.json", "feature_vocab.json"):
        content = json.loads((sound / file).read_text())
        for place in _places(content):
            for value in [GONE, *WRONG]:
                yield Changed(f"a value of {file}", file, with_value(place, value))
        for text in (b"", b"{", b"[]", b"5", b"null", b"\xff\xfe", b"[" * 100_000 + b"]" * 100_000):
            yield Changed(f"{file} is no such file", file, partial(_replaced, text))
    for file in ("items.parquet", "histories.parquet", "model.safetensors"):
        for keep in (0, 4, 40, -1):
            yield Changed("a file that is cut", file, partial(_cut, keep))
        yield Changed("a file of another kind", file, partial(_after, b"PK\3\4"))
    for file in ("items.parquet", "histories.parquet"):
        for name in pl.read_parquet(sound / file).columns:
            for change in (_drop, _empty, _floats, _far):
                yield Changed("a column of another content", file, partial(_table, partial(change, name=name)))
    for weights in (_without_one, _of_other_shape, _of_other_type, _with_one_more):
        yield Changed("other weights", "model.safetensors", weights)


def placed(case: Changed, sound: Path, folder: Path, hash_again: bool = False) -> Path:
    """The changed folder; ``hash_again``: model.json has the hash of the changed file."""
    shutil.copytree(sound, folder)
    (folder / case.file).write_bytes(case.change((folder / case.file).read_bytes()))
    if hash_again:
        _hash_again(folder, case.file)
    return folder


def outcomes(sound: Path, here: Path, every: int = 1) -> tuple[dict[str, Counter[str]], list[str]]:
    """Per kind how many folders were ``refused`` in one line, or gave ``the same scores``; and what went wrong."""
    found: dict[str, Counter[str]] = {}
    wrong = []
    right = load_model(sound).predict_proba(REQUESTS)
    before = files(here.parent)
    for case in list(changed_folders(sound))[::every]:
        folder = placed(case, sound, here / "model")
        try:
            same = np.array_equal(load_model(folder).predict_proba(REQUESTS), right)
            outcome = "read, same scores" if same else "read, other scores"
        except UserError as error:
            fits = "\n" not in str(error) and len(str(error).replace(str(folder), "")) <= LONGEST
            outcome = "refused" if fits else f"too long: {error}"
        except Exception as error:
            outcome = f"{type(error).__name__}: {error}"
        if outcome in ("refused", "read, same scores", "read, other scores"):
            found.setdefault(case.kind, Counter())[outcome] += 1
        else:
            wrong.append(f"{case.kind}, {case.file}, {getattr(case.change, 'args', '')}: {outcome[:300]}")
        shutil.rmtree(folder)
        if Path("CANARY").exists() or files(here.parent) != before:
            wrong.append(f"{case}: ran, or left something behind")
    return found, wrong


def _places(content: Any) -> Iterator[tuple[Any, ...]]:
    if isinstance(content, dict | list):
        steps = list(content.items()) if isinstance(content, dict) else list(enumerate(content))
        for step, value in steps if len(steps) < 40 else steps[:FIRST]:
            yield (step,)
            yield from ((step, *rest) for rest in _places(value))


def with_value(place: tuple[Any, ...], value: Any) -> Callable[[bytes], bytes]:
    """A JSON file with another value at one place, ``GONE`` for none."""
    return partial(_with, place, value)


def _with(place: tuple[Any, ...], value: Any, content: bytes) -> bytes:
    read = json.loads(content)
    at = read
    for step in place[:-1]:
        at = at[step]
    if value is GONE:
        del at[place[-1]]
    else:
        at[place[-1]] = deepcopy(value)
    return json.dumps(read).encode()


def _replaced(text: bytes, content: bytes) -> bytes:
    return text


def _cut(keep: int, content: bytes) -> bytes:
    return content[:keep]


def _after(start: bytes, content: bytes) -> bytes:
    return start + content


def _hash_again(folder: Path, changed: str) -> None:
    """Make the manifest say what is there."""
    file = folder / "model.json"
    if changed == "model.json":
        return
    config = json.loads(file.read_text())
    there = folder / changed
    config["files"][changed] = {"bytes": there.stat().st_size, "blake2b": hash_of_file(there)}
    if changed == "feature_vocab.json":
        with contextlib.suppress(Exception):  # nothing that could be hashed
            config["vocabulary"] = vocabulary_hash(json.loads(there.read_text()))
    file.write_text(json.dumps(config))


def _table(change: Callable[[pl.DataFrame], pl.DataFrame], content: bytes) -> bytes:
    stream = io.BytesIO()
    change(pl.read_parquet(io.BytesIO(content))).write_parquet(stream)
    return stream.getvalue()


def _drop(table: pl.DataFrame, name: str) -> pl.DataFrame:
    return table.drop(name)


def _empty(table: pl.DataFrame, name: str) -> pl.DataFrame:
    return table.with_columns(pl.when(pl.int_range(pl.len()) != 1).then(name).alias(name))


def _floats(table: pl.DataFrame, name: str) -> pl.DataFrame:
    return table.with_columns(pl.lit(0.5).alias(name))


def _far(table: pl.DataFrame, name: str) -> pl.DataFrame:
    return table.with_columns(pl.lit(2**60).alias(name))


def _without_one(content: bytes) -> bytes:
    weights = load(content)
    del weights[min(weights)]
    return save(weights)


def _with_one_more(content: bytes) -> bytes:
    weights = load(content)
    return save(weights | {"another": weights[min(weights)].clone()})


def _of_other_shape(content: bytes) -> bytes:
    weights = load(content)
    return save(weights | {min(weights): weights[min(weights)].flatten()[:1].clone()})


def _of_other_type(content: bytes) -> bytes:
    return save({name: weight.bool() for name, weight in load(content).items()})
