"""A small model, its weights by formula and its batches: what golden values are made of and compared on."""

from __future__ import annotations

import importlib.util
import json
import math
import subprocess
import zlib
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from fuxictr.features import FeatureMap
from torch import Tensor, nn

SLOTS = 6
TARGET, HISTORY = ("item_id", "cate_id"), ("item_history", "cate_history")
PARAMS = {
    "model_root": "./",
    "metrics": ["AUC"],
    "optimizer": "adam",
    "loss": "binary_crossentropy",
    "verbose": 0,
    "embedding_dim": 4,
    "dnn_hidden_units": [8, 5],
    "dnn_activations": "relu",
    "attention_hidden_units": [7, 3],
}


def feature_map(folder: Path) -> FeatureMap:
    features: list[dict[str, Any]] = []
    for name, size in (("item_id", 30), ("cate_id", 9)):
        features.append({name: {"source": "", "type": "categorical", "padding_idx": 0, "vocab_size": size}})
    for name, of, size in (("item_history", "item_id", 30), ("cate_history", "cate_id", 9)):
        spec = {"source": "", "type": "sequence", "padding_idx": 0, "vocab_size": size, "max_len": SLOTS}
        features.append({name: spec | {"share_embedding": of, "feature_encoder": None}})
    file = folder / "feature_map.json"
    file.write_text(json.dumps({"dataset_id": "golden", "labels": ["label"], "features": features}))
    loaded = FeatureMap("golden", str(folder))
    loaded.load(str(file), {"embedding_dim": 4})
    return loaded


def batch(padded: bool) -> dict[str, Tensor]:
    """Five rows; with ``padded``, histories of 6, 1, 4, 2 and 3 items at the right end of the slots."""
    rows, slots = torch.arange(5).unsqueeze(1), torch.arange(SLOTS)
    items = 1 + (7 * rows + 11 * slots + rows * slots) % 29
    real = slots >= SLOTS - torch.tensor([6, 1, 4, 2, 3]).unsqueeze(1) if padded else torch.ones(5, SLOTS).bool()
    target = (5 * rows.squeeze(1) + 3) % 29 + 1
    return {
        "item_id": target,
        "cate_id": target % 8 + 1,
        "item_history": items * real,
        "cate_history": (items % 8 + 1) * real,
        "label": rows.squeeze(1) % 2,
    }


def right_padded(rows: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same items at the left end of the slots."""
    moved = dict(rows)
    for name in HISTORY:
        order = (rows[name] == 0).byte().argsort(dim=1, stable=True)
        moved[name] = rows[name].gather(1, order)
    return moved


def formula(name: str, shape: Sequence[int], power: int = 1) -> Tensor:
    """Values (float64) of a parameter or buffer of this name and shape. With ``power=2`` matrices have full rank."""
    phase = zlib.crc32(name.encode()) % 1000
    values = torch.sin(torch.arange(math.prod(shape), dtype=torch.float64) ** power * 0.7 + phase).view(tuple(shape))
    if "running_var" in name:
        values = 1 + values.abs()
    if "embedding_layers" in name:
        values[0] = 0.0
    return values * 0.5


@torch.no_grad()
def set_weights(model: nn.Module, rename: dict[str, str] | None = None, power: int = 1) -> None:
    """Fill every parameter and buffer by a formula of its name (after ``rename`` of its beginning) and its index."""
    for name, tensor in model.state_dict().items():
        if not tensor.is_floating_point():
            continue
        for old, new in (rename or {}).items():
            name = name.replace(old, new)
        tensor.copy_(formula(name, tensor.shape, power).to(tensor.dtype))


def reference(checkout: str, model: str, folder: Path) -> tuple[Any, dict[str, Any]]:
    """FuxiCTR's own class of a model, from a git checkout (or bare repository), and where it comes from."""

    def git(*args: str) -> str:
        return subprocess.run(["git", "-C", checkout, *args], check=True, capture_output=True, text=True).stdout

    path = f"model_zoo/{model}/src/{model}.py"
    source = folder / f"fuxictr_{model.lower()}.py"
    source.write_text(git("show", f"HEAD:{path}"))
    spec = importlib.util.spec_from_file_location(source.stem, source)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    about = {
        "reference": f"{path} of reczoo/FuxiCTR",
        "commit": git("rev-parse", "HEAD").strip(),
        "fuxictr": version("fuxictr"),
        "torch": version("torch"),
    }
    return getattr(module, model), about
