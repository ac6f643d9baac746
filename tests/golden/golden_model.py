"""A small model, its weights by formula and its batches: what golden values are made of and compared on."""

from __future__ import annotations

import json
import zlib
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


@torch.no_grad()
def set_weights(model: nn.Module, rename: dict[str, str] | None = None) -> None:
    """Fill every parameter and buffer by a formula of its name (after ``rename`` of its beginning) and its index."""
    for name, tensor in model.state_dict().items():
        if not tensor.is_floating_point():
            continue
        for old, new in (rename or {}).items():
            name = name.replace(old, new)
        phase = zlib.crc32(name.encode()) % 1000
        values = torch.sin(torch.arange(tensor.numel(), dtype=torch.float64) * 0.7 + phase).view(tensor.shape)
        if "running_var" in name:
            values = 1 + values.abs()
        if "embedding_layers" in name:
            values[0] = 0.0
        tensor.copy_((values * 0.5).to(tensor.dtype))
