"""TIN against its paper's equations, and its position code replaced by others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ctr_pe.sequence.positions import Items, Positions
from ctr_pe.units import TargetAttention
from tests.support.models import SLOTS, batch, build


def randomised(model: Any) -> Any:
    draw = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5, generator=draw)
    return model.double().eval()


def interest_by_loops(table: Tensor, target: Tensor, items: list[Tensor]) -> Tensor:
    """The paper's equations: temporal encoding of target and behaviours, their attention, their product."""
    dim = len(target)
    table, target = table.detach(), target.detach()
    encoded_target = [float(target[c] + table[0, c]) for c in range(dim)]
    encoded, scores = [], []
    for index, item in enumerate(items):
        distance = len(items) - index  # the target's is 0, the most recent behaviour's 1
        encoded.append([float(item[c] + table[distance, c]) for c in range(dim)])
        scores.append(sum(encoded_target[c] * encoded[-1][c] for c in range(dim)) / dim**0.5)
    shares = [float(torch.tensor(score).double().exp()) for score in scores]
    interest = torch.zeros(dim, dtype=torch.float64)
    for share, behaviour in zip(shares, encoded, strict=True):
        for c in range(dim):
            interest[c] += share / sum(shares) * behaviour[c] * encoded_target[c]
    return interest


@pytest.mark.parametrize("layout", [{}, {"left": True, "slots": 9}])
def test_equals_the_paper_s_equations(layout: dict[str, Any], tmp_path: Path) -> None:
    model = randomised(build("TIN", tmp_path, position_encoding="native"))
    table, rows = model.attentions[0].pe.table, batch([3, 0, 6, 1, 5], **layout)
    assert tuple(table.shape) == (SLOTS + 1, 8)
    tables = [model.embedding_layer.embedding_layers[field].weight for field in ("item_id", "cate_id")]

    def item(fields: tuple[str, str], *at: int) -> Tensor:
        return torch.cat([embedding[rows[field][at]] for embedding, field in zip(tables, fields, strict=True)])

    features = []
    for row in range(5):
        target, real = item(("item_id", "cate_id"), row), rows["item_history"][row].nonzero().squeeze(1).tolist()
        items = [item(("item_history", "cate_history"), row, slot).detach() for slot in real]
        features.append(torch.cat([target, interest_by_loops(table, target, items)]))
    want = model.dnn(torch.stack(features))
    assert torch.allclose(model(rows)["y_pred"], want, atol=1e-9)


def test_without_positions_it_is_target_attention_times_the_target(tmp_path: Path) -> None:
    native, none = (randomised(build("TIN", tmp_path, position_encoding=name)) for name in ("native", "none"))
    nn.init.zeros_(native.attentions[0].pe.table)
    none.load_state_dict({key: value for key, value in native.state_dict().items() if "pe.table" not in key})
    rows = batch([3, 0, 6])
    assert torch.equal(native(rows)["y_pred"], none(rows)["y_pred"])
    target, history = torch.randn(3, 8).double(), torch.randn(9, 8).double()
    positions = Positions.from_mask(rows["item_history"] > 0)
    pooled, _ = TargetAttention(8)(target, history, positions)
    assert torch.allclose(none.interest(0, Items(target), Items(history), positions)[0], pooled * target)


@pytest.mark.parametrize("encoding", ["rope", "cope", "cape"])
def test_other_encodings_replace_its_table_and_keep_the_product(encoding: str, tmp_path: Path) -> None:
    model = randomised(build("TIN", tmp_path, position_encoding=encoding))
    unit, positions = model.attentions[0], Positions.from_mask(batch([3, 0, 6])["item_history"] > 0)
    target, history = torch.randn(3, 8).double(), torch.randn(9, 8).double()
    pooled, _ = unit(target, history, positions)
    assert torch.allclose(model.interest(0, Items(target), Items(history), positions)[0], pooled * target)
    assert not [
        name for name, _ in model.named_parameters() if name.endswith("table") and "attentions.0.pe" not in name
    ]


def test_native_is_naive_and_joins_others(tmp_path: Path) -> None:
    native, naive = (build("TIN", tmp_path, position_encoding=name).state_dict() for name in ("native", "naive"))
    assert all(torch.equal(native[key], naive[key]) for key in naive)
    chain = build("TIN", tmp_path, position_encoding="native+cape").attentions[0].pe
    assert [type(link).__name__ for link in chain.encodings] == ["Naive", "CAPE"]
