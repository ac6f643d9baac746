"""A small feature map, batches and data sets for tests of models."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from fuxictr.features import FeatureMap
from torch import Tensor, nn

from ctr_pe import model_zoo
from ctr_pe.pe import available_pes
from ctr_pe.sequence.batch import JaggedBatch
from ctr_pe.serving.request_graph import histories_in, random_request

ITEMS, CATEGORIES, SLOTS = 40, 9, 6
PARAMS: dict[str, Any] = {
    "target_field": [["item_id", "cate_id"]],
    "sequence_field": [["item_history", "cate_history"]],
    "age_field": "age_history",
    "embedding_dim": 4,
    "dnn_hidden_units": [8],
    "monitor": "AUC",
    "metrics": ["AUC", "logloss"],
}
SMALL: dict[str, dict[str, Any]] = {  # what each model needs on top
    "DIN": {"attention_hidden_units": [6], "attention_hidden_activations": "Dice"},
    "DIEN": {"batch_norm": False, "attention_type": "din_attention", "attention_hidden_units": [6]},
    "BST": {"num_heads": 2, "stacked_transformer_layers": 2},
    "DMIN": {
        "num_heads": 2,
        "dnn_activations": "ReLU",
        "batch_norm": False,
        "attention_hidden_units": [6],
        "attention_activation": "Dice",
        "aux_hidden_units": [5],
        "aux_loss_lambda": 0.5,
    },
    "TIN": {},
    "SASRec": {"num_heads": 2, "num_blocks": 3},
}
NEGATIVE = {"source": "", "type": "sequence", "padding_idx": 0, "max_len": 6, "feature_encoder": None}
NEGATIVES = {  # fields that ``with_negatives`` adds
    "item_neg": NEGATIVE | {"vocab_size": 40, "share_embedding": "item_id"},
    "cate_neg": NEGATIVE | {"vocab_size": 9, "share_embedding": "cate_id"},
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "DIN with softmax": ("DIN", {"din_use_softmax": True, "attention_dropout": 0.3}),
    "DIEN AGRU": ("DIEN", {"gru_type": "AGRU", "enable_sum_pooling": True, "use_attention_softmax": False}),
    "DIEN AIGRU": ("DIEN", {"gru_type": "AIGRU", "attention_type": "dot_attention"}),
    "BST causal, last block": ("BST", {"use_causal_mask": True, "seq_pooling_type": "target"}),
    "BST last block": ("BST", {"seq_pooling_type": "target"}),
    "BST all states": ("BST", {"seq_pooling_type": "concat"}),
    "DMIN unrefined": ("DMIN", {"use_behavior_refiner": False, "enable_sum_pooling": True}),
    "SASRec post": ("SASRec", {"layer_norm": "post", "num_blocks": 1}),
    "BST short": ("BST", {"max_len": 3}),
    "SASRec short": ("SASRec", {"max_len": 3}),
    "DIN short": ("DIN", {"max_len": 3, "max_position": 2}),
}
ENCODINGS = [*available_pes(), "native", "rope+cape", "kernel+cape"]


def some_pairs(names: Iterable[str], encodings: Sequence[str], first: int, of: int = 2) -> pytest.MarkDecorator:
    """Parametrise by all pairs of model and encoding, by default one in ``of``: each model and encoding is met, and
    tests of other ``first`` have other pairs. The others are slow, because they are many."""
    cells = [
        pytest.param(name, encoding, marks=[pytest.mark.slow] * ((row + column) % of != first))
        for row, name in enumerate(names)
        for column, encoding in enumerate(encodings)
    ]
    return pytest.mark.parametrize(("name", "encoding"), cells)


def feature_map(folder: Path, **changes: dict[str, Any]) -> FeatureMap:
    """user_id (group), item_id, cate_id, their histories, and an age; ``changes`` patch or add specs."""
    features: dict[str, dict[str, Any]] = {"user_id": {"type": "meta"}}
    for name, size in (("item_id", ITEMS), ("cate_id", CATEGORIES)):
        features[name] = {"source": "item", "type": "categorical", "padding_idx": 0, "vocab_size": size}
    for name, of, size in (("item_history", "item_id", ITEMS), ("cate_history", "cate_id", CATEGORIES)):
        spec = {"source": "history", "type": "sequence", "padding_idx": 0, "vocab_size": size, "max_len": SLOTS}
        features[name] = spec | {"share_embedding": of, "feature_encoder": None}
    features["age_history"] = {"type": "meta", "max_len": SLOTS}
    for name, change in changes.items():
        features[name] = features.get(name, {}) | change
    file = folder / "feature_map.json"
    specs = [{name: spec} for name, spec in features.items()]
    file.write_text(json.dumps({"dataset_id": "small", "labels": ["label"], "features": specs}))
    loaded = FeatureMap("small", str(folder))
    loaded.load(str(file), {"embedding_dim": 4, "group_id": "user_id"})
    return loaded


def batch(counts: Sequence[int], seed: int = 0, slots: int | None = None, left: bool = False) -> dict[str, Tensor]:
    """Random rows with histories of ``counts`` items in ``slots`` slots, padded on one side."""
    draw = torch.Generator().manual_seed(seed)
    rows, longest = len(counts), max(*counts, 1)
    width = slots or longest
    items = torch.randint(1, ITEMS, (rows, longest), generator=draw)
    ages = torch.randint(1, 10**6, (rows, longest), generator=draw).sort(1, descending=True)[0]
    history, age = torch.zeros(rows, width, dtype=torch.int64), torch.zeros(rows, width, dtype=torch.int64)
    for row, count in enumerate(counts):
        where = slice(width - count, width) if left else slice(0, count)
        history[row, where], age[row, where] = items[row, :count], ages[row, :count]
    target = torch.randint(1, ITEMS, (rows,), generator=draw)
    return {
        "user_id": torch.arange(rows) // 3,
        "item_id": target,
        "cate_id": target % (CATEGORIES - 1) + 1,
        "item_history": history,
        "cate_history": (history % (CATEGORIES - 1) + 1) * (history > 0),
        "age_history": age,
        "label": (torch.arange(rows) % 2).float(),
    }


def with_negatives(rows: dict[str, Tensor]) -> dict[str, Tensor]:
    items = (rows["item_history"] * 7 % 37 + 1) * (rows["item_history"] > 0)
    return rows | {"item_neg": items, "cate_neg": (items % 8 + 1) * (items > 0)}


def build(name: str, folder: Path, changes: dict[str, dict[str, Any]] | None = None, **params: Any) -> Any:
    """A small model; ``changes`` patch the feature map, ``seed`` draws the weights."""
    torch.manual_seed(params.pop("seed", 0))
    params = PARAMS | SMALL[name] | {"model_root": str(folder)} | params
    return getattr(model_zoo, name)(feature_map(folder, **changes or {}), **params)


def randomised(module: Any) -> Any:
    """In evaluation, with parameters that make every part count."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            nn.init.normal_(parameter, std=0.3)
    return module.eval()


def requested(model: Any, rows: int, slots: int, targets: int, seed: int) -> tuple[JaggedBatch, dict[str, Tensor]]:
    """Histories, and the other fields of K targets of each; one history is empty if there are several."""
    given = random_request(model, rows, slots, targets, seed)
    others = {name: given[name] for name in model.other_fields}
    others = {name: x if x.dim() > 1 else x.unsqueeze(1).expand(-1, targets) for name, x in others.items()}
    return histories_in(model, given), others


class Rows:
    """A data generator of a few fixed batches."""

    def __init__(self, *batches: dict[str, Tensor]) -> None:
        self.batches = batches or (batch([3, 0, 6, 1]), batch([2, 5, 4, 6], seed=1))

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return iter(self.batches)


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in model.state_dict().items()}
