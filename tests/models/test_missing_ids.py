"""An item without an id is an item: it has a distance and an age, takes part in attention, and its vector is zero.

Random batches go from files through the loader to the models. Where no id is missing, FuxiCTR's padded batch gives the
same; where some are, so does the same batch with an id in their place whose vector is zero, and DIN by hand.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest
import torch
from torch import Tensor, nn

from ctr_pe.config.field_groups import Group
from ctr_pe.data.dataset import Dataset
from ctr_pe.data.loader import BatchLoader
from ctr_pe.data.writer import Content, DatasetWriter
from ctr_pe.model_zoo import DIN
from ctr_pe.sequence.batch import JaggedBatch
from ctr_pe.training import train_step
from tests.support.models import PARAMS, SMALL, build, feature_map, randomised

ITEMS, CATEGORIES, SLOTS = 40, 9, 6
EMPTY_ITEM, EMPTY_CATEGORY = ITEMS - 1, CATEGORIES - 1
"""Ids that stand for a missing one in FuxiCTR's form; their vectors are zero."""
OTHER = {"type": "sequence", "source": "", "padding_idx": 0, "max_len": 4, "feature_encoder": None}
EXTRA = {
    "cart": OTHER | {"vocab_size": ITEMS, "share_embedding": "item_id"},
    "vector": {"type": "embedding", "source": "", "pretrain_dim": 3, "embedding_dim": 4},
}
GROUPS = {
    "target_field": [["item_id", "cate_id"], ["item_id"]],
    "sequence_field": [["item_history", "cate_history"], ["cart"]],
    "age_field": ["age_history", None],
}


def rows_of(seed: int, rows: int, missing: float) -> dict[str, list[Any]]:
    """Histories of two groups, empty ones and such of one item among them; without ids at either end, too."""
    draw = np.random.default_rng(seed)
    lengths = [0, 1, SLOTS, *draw.integers(0, SLOTS + 1, rows - 3)]
    found: dict[str, list[Any]] = {
        "label": draw.integers(0, 2, rows).tolist(),
        "user_id": (np.arange(rows) // 2).tolist(),
        "item_id": draw.integers(1, EMPTY_ITEM, rows).tolist(),
        "cate_id": draw.integers(1, EMPTY_CATEGORY, rows).tolist(),
        "vector": draw.random((rows, 3)).astype(np.float32).tolist(),
    }

    def ids(most: int, count: int) -> list[int]:
        return (draw.integers(1, most, count) * (draw.random(count) >= missing)).tolist()

    found["item_history"] = [ids(EMPTY_ITEM, n) for n in lengths]
    found["cate_history"] = [ids(EMPTY_CATEGORY, n) for n in lengths]
    found["age_history"] = [np.sort(draw.integers(1, 10**6, n))[::-1].tolist() for n in lengths]
    found["cart"] = [ids(EMPTY_ITEM, n) for n in draw.integers(0, 5, rows)]
    return found


def write(folder: Path, columns: dict[str, list[Any]]) -> Dataset:
    features = dict(feature_map(folder, **EXTRA).features)
    table = pa.table({name: pa.array(values) for name, values in columns.items()})
    groups = [
        Group(("item_id", "cate_id"), ("item_history", "cate_history"), "age_history"),
        Group(("item_id",), ("cart",)),
    ]
    with DatasetWriter(folder / "data") as writer:
        for split in ("train", "test"):
            writer.add(split, table)
        return writer.finish(Content("label", "user_id", features, groups, {}, {}))


def loaded(folder: Path, columns: dict[str, list[Any]]) -> JaggedBatch:
    dataset = write(folder, columns)
    (batch,) = BatchLoader(dataset.feature_map(4), dataset.split("test"), "test")
    return batch


def with_empty_vectors(model: Any) -> Any:
    """Of the ids that stand for a missing one, and of padding."""
    layers = model.embedding_layer.embedding_layers
    with torch.no_grad():
        for field, empty in (("item_id", EMPTY_ITEM), ("cate_id", EMPTY_CATEGORY)):
            layers[field].weight[[0, empty]] = 0
    return model


def filled(batch: JaggedBatch, left: bool) -> dict[str, Tensor]:
    """FuxiCTR's padded batch, with an id for every item."""
    found = dict(batch)
    for name, empty in (("item_history", EMPTY_ITEM), ("cate_history", EMPTY_CATEGORY), ("cart", EMPTY_ITEM)):
        real = torch.arange(found[name].shape[1]) < batch.lengths[name].unsqueeze(1)
        found[name] = torch.where(real & (found[name] == 0), empty, found[name])
    if left:
        for name in batch.histories:
            shift = found[name].shape[1] - batch.lengths[name]
            rolled = [row.roll(int(by)) for row, by in zip(found[name], shift, strict=True)]
            found[name] = torch.stack(rolled)
    return found


@pytest.mark.parametrize("missing", [pytest.param(0.0, marks=pytest.mark.slow), 0.4])
@pytest.mark.parametrize(("name", "encoding"), [
    ("DIN", "cape"), ("DIEN", "none"), ("BST", "kernel"), ("DMIN", "euler"), ("TIN", "dif"), ("SASRec", "time_bias"),
    ("DIN", "xlnet"), ("SASRec", "cope"), ("BST", "none"),
])  # fmt: skip
def test_the_loader_s_batch_gives_what_fuxictr_s_padded_one_gives(
    name: str, encoding: str, missing: float, tmp_path: Path
) -> None:
    params = GROUPS | {"position_encoding": [encoding, "none"], "max_len": 4}
    model = with_empty_vectors(randomised(build(name, tmp_path, EXTRA, **params)))
    for seed in range(3):
        (tmp_path / str(seed)).mkdir()
        batch = loaded(tmp_path / str(seed), rows_of(seed, 12, missing))
        ends = [(ids == 0).any() for ids in (batch["item_history"][2, :1], batch.histories["cart"])]
        assert bool(ends[1]) == (missing > 0)
        with torch.no_grad():
            found = model(batch)["y_pred"]
            for left in (False, True):
                torch.testing.assert_close(model(filled(batch, left))["y_pred"], found, rtol=1e-5, atol=1e-6)
            others = {field: batch[field].unsqueeze(1) for field in model.other_fields}
            shared = model.score_candidates(model.encode(batch), others)
        torch.testing.assert_close(shared, found, rtol=1e-4, atol=1e-5)


def by_hand(model: Any, columns: dict[str, list[Any]]) -> npt.NDArray[np.float64]:
    """Σ a_j h_j per row in float64, a_j by the MLP of DIN of [t, h_j, t - h_j, t ⊙ h_j]."""
    tables = model.embedding_layer.embedding_layers
    weights = {name: tables[name].weight.detach().double().numpy() for name in ("item_id", "cate_id")}
    layers = [layer for layer in model.attentions[0].score.modules() if isinstance(layer, nn.Linear)]
    found = []
    for item, kind, items, kinds in zip(
        *(columns[name] for name in ("item_id", "cate_id", "item_history", "cate_history")), strict=True
    ):
        target, total = np.concatenate([weights["item_id"][item], weights["cate_id"][kind]]), np.zeros(8)
        for j, k in zip(items, kinds, strict=True):
            h = np.concatenate(
                [weights["item_id"][j] if j else np.zeros(4), weights["cate_id"][k] if k else np.zeros(4)]
            )
            x = np.concatenate([target, h, target - h, target * h])
            for index, layer in enumerate(layers):
                x = layer.weight.detach().double().numpy() @ x + layer.bias.detach().double().numpy()
                x = np.maximum(x, 0) if index < len(layers) - 1 else x
            total += x * h
        found.append(total)
    return np.array(found)


def test_din_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    params = GROUPS | {"attention_hidden_activations": "ReLU"}
    model = randomised(build("DIN", tmp_path, EXTRA, **params))
    with_empty_vectors(model)
    columns, seen = rows_of(5, 40, 0.4), []
    interest = model.interest
    monkeypatch.setattr(model, "interest", lambda *given: (seen.append(interest(*given)[0]), interest(*given))[1])
    model(loaded(tmp_path, columns))
    np.testing.assert_allclose(seen[0].detach().numpy(), by_hand(model, columns), rtol=1e-4, atol=1e-5)
    assert any(ids and not any(ids) for ids in columns["item_history"])


@pytest.mark.parametrize("table_optimizer", [None, "lazy_adam", "rowwise_adagrad"])
def test_training_leaves_the_vector_of_no_id_zero(table_optimizer: str | None, tmp_path: Path) -> None:
    params = GROUPS | {"table_optimizer": table_optimizer, "embedding_regularizer": 0.1, "learning_rate": 0.1}
    model = build("DIN", tmp_path, EXTRA, **params)
    batch = loaded(tmp_path, rows_of(1, 30, 0.4))
    for _ in range(3):
        model.train()
        train_step(model, batch, 10.0)
    layers = model.embedding_layer.embedding_layers
    assert all(not layers[field].weight[0].any() for field in ("item_id", "cate_id"))
    assert layers["item_id"].weight[1:].any()


def test_a_feature_map_of_a_dataset_takes_it(tmp_path: Path) -> None:
    dataset = write(tmp_path, rows_of(2, 20, 0.3))
    model = DIN(dataset.feature_map(4), **(PARAMS | SMALL["DIN"] | GROUPS | {"model_root": str(tmp_path)}))
    loader = BatchLoader(model.feature_map, dataset.split("train"), batch_size=7)
    fitted = model.fit(loader, 1, BatchLoader(model.feature_map, dataset.split("test"), "test"))
    assert 0 <= fitted.best.metrics["AUC"] <= 1
    assert model.predict(loader).shape == (20,)
