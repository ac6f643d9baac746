"""DMIN: its interests, its own positions, where encodings act, its auxiliary loss. (Golden values: tests/golden.)"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ctr_pe.model_zoo.dmin import QueryPositions, QueryScore
from ctr_pe.pe.base import PositionEncoding
from ctr_pe.sequence.positions import Items, Positions
from ctr_pe.testing import Batch
from ctr_pe.units import SelfAttention, TargetAttention
from ctr_pe.utils.errors import UserError
from tests.support.models import SLOTS, batch, build


def randomised(model: Any) -> Any:
    draw = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3, generator=draw)
    return model.double().eval()


class TestQueryPositions:
    @pytest.mark.parametrize("layout", ["plain", "mixed"])
    def test_equals_a_loop(self, layout: str) -> None:
        """Logit j is the DIN score of the query W [t; p_j] + c, where p_j belongs to the distance of item j."""
        pe = QueryPositions(8, 4, position_dim=3)  # two items of the longest history lie past its table
        unit = randomised(TargetAttention(8, QueryScore(8, [5], "ReLU"), pe))
        rows = Batch.random([3, 0, 6, 1, 5])
        rows = rows if layout == "plain" else rows.laid_out(layout)
        interest, weights = unit(rows.target, rows.history, Positions.from_mask(rows.mask))
        for row, (target, history, mask) in enumerate(zip(rows.target, rows.history, rows.mask, strict=True)):
            items, logits = history[mask], []
            for index, item in enumerate(items):
                distance = len(items) - index
                query = pe.project(torch.cat([target, pe.table[min(distance, 4) - 1]]))
                logits.append(unit.score.mlp(torch.cat([query, item, query - item, query * item])))
            share = torch.cat(logits).softmax(0) if logits else torch.zeros(0).double()
            assert torch.allclose(weights[row][mask], share, atol=1e-12)
            assert torch.allclose(interest[row], (share.unsqueeze(1) * items).sum(0), atol=1e-12)

    def test_starts_without_positions(self, tmp_path: Path) -> None:
        """Zeros: at the start every item meets the same query."""
        model = build("DMIN", tmp_path, position_encoding="native", pos_emb_dim=3)
        for unit in model.interests[0].units:
            assert tuple(unit.pe.table.shape) == (SLOTS, 3)
            assert not unit.pe.table.any()

    def test_one_per_interest_and_none_in_the_self_attentions(self, tmp_path: Path) -> None:
        interests = build("DMIN", tmp_path, position_encoding="native").interests[0]
        assert [type(unit.pe) for unit in interests.units] == [QueryPositions] * 2
        assert type(interests.refiner.pe) is type(interests.extractor.pe) is PositionEncoding

    @pytest.mark.parametrize(("switch", "encoding"), [(True, "native"), (False, "none")])
    def test_fuxictr_s_switch(self, switch: bool, encoding: str, tmp_path: Path) -> None:
        ours, theirs = (
            build("DMIN", tmp_path, **key) for key in ({"position_encoding": encoding}, {"use_pos_emb": switch})
        )
        assert ours.state_dict().keys() == theirs.state_dict().keys()
        assert ours.groups == theirs.groups
        assert build("DMIN", tmp_path, use_pos_emb=not switch, position_encoding=encoding).groups == ours.groups


class TestEncodings:
    def test_act_in_both_self_attentions_and_every_unit(self, tmp_path: Path) -> None:
        interests = build("DMIN", tmp_path, position_encoding="cape").interests[0]
        encodings = [interests.refiner.pe, interests.extractor.pe, *(unit.pe for unit in interests.units)]
        assert [pe.num_heads for pe in encodings] == [2, 2, 1, 1]
        assert len({pe.table.data_ptr() for pe in encodings}) == 4

    @pytest.mark.parametrize("refiner", [True, False])
    def test_naive_is_added_once_before_all(self, refiner: bool, tmp_path: Path) -> None:
        model = build("DMIN", tmp_path, position_encoding="naive", use_behavior_refiner=refiner)
        assert sum("table" in name for name, _ in model.named_parameters()) == 1
        rows = batch([5, 3])
        before = randomised(model)(rows)["y_pred"]
        nn.init.zeros_(next(p for name, p in model.named_parameters() if name.endswith("pe.table")))
        assert (model(rows)["y_pred"] - before).abs().min() > 1e-6


class TestInterests:
    @pytest.mark.parametrize("heads", [1, 2, 4])
    def test_as_many_as_heads(self, heads: int, tmp_path: Path) -> None:
        model = build("DMIN", tmp_path, num_heads=heads)
        assert len(model.interests[0].units) == heads
        assert model.dnn.mlp[0].in_features == 8 + heads * 8  # item dim 8

    def test_each_depends_on_its_head_alone(self, tmp_path: Path) -> None:
        model = randomised(build("DMIN", tmp_path, aux_loss_lambda=0))
        rows = Batch.random([3, 6])
        positions = Positions.from_mask(rows.mask)
        packed, unit = positions.pack(rows.history), model.interests[0]
        before, *_ = unit(Items(rows.target), Items(packed), positions)
        with torch.no_grad():
            unit.extractor.value.weight[:4] += 1.0  # of the first head
        after, *_ = unit(Items(rows.target), Items(packed), positions)
        first, second = (after - before).abs().split(8, dim=1)
        assert first.max() > 1e-3
        assert second.max() == 0

    def test_no_state_sees_a_later_item(self, tmp_path: Path) -> None:
        """The refined history that the auxiliary loss reads does not know the item it is to tell."""
        for encoding in ("none", "cape", "naive", "rope"):
            model = randomised(build("DMIN", tmp_path, position_encoding=encoding))
            rows, positions = Batch.random([6, 6]), Positions.from_mask(torch.ones(2, 6, dtype=torch.bool))
            unit = model.interests[0]
            _, before, _ = unit(Items(rows.target), Items(positions.pack(rows.history)), positions)
            rows.history[:, 4:] = 3.0
            _, after, _ = unit(Items(-rows.target), Items(positions.pack(rows.history)), positions)
            changed = (after - before).view(2, 6, 8).abs().amax((0, 2))
            assert changed[:4].max() == 0
            assert changed[4:].min() > 1e-3

    def test_two_field_groups(self, tmp_path: Path) -> None:
        spec = {"source": "", "type": "sequence", "padding_idx": 0, "vocab_size": 40, "max_len": 9}
        model = build(
            "DMIN",
            tmp_path,
            {"other_history": spec | {"feature_encoder": None, "share_embedding": "item_id"}},
            target_field=[["item_id", "cate_id"], ["item_id"]],
            sequence_field=[["item_history", "cate_history"], ["other_history"]],
            age_field=["age_history", None],
            position_encoding=["cape", "native"],
        )
        model._max_gradient_norm = 10.0
        rows = batch([3, 0, 6])
        rows["other_history"] = torch.tensor([[0, 0, 5, 1], [1, 0, 0, 0], [2, 3, 4, 5]])
        assert model.train_step(rows).isfinite()
        assert [net.mlp[0].in_features for net in model.aux_net] == [16, 8]

    def test_heads_that_do_not_divide(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match=r"DMIN: num_heads=3 does not divide 8, .*: take one of 1, 2, 4, 8"):
            build("DMIN", tmp_path, num_heads=3)


def test_auxiliary_loss_trains_the_refiner(tmp_path: Path) -> None:
    """Its gradient alone reaches the refiner, and items, but not the extractor."""
    model, rows = build("DMIN", tmp_path).train(), batch([3, 0, 6, 1, 5])
    model(rows)["losses"]["next item"].backward()
    interests = model.interests[0]
    assert all(parameter.grad is not None for parameter in interests.refiner.parameters())
    assert all(parameter.grad is None for parameter in interests.extractor.parameters())
    plain = build("DMIN", tmp_path, aux_loss_lambda=0).train()
    assert not plain(rows)["losses"]


def test_heads_are_what_self_attention_sums() -> None:
    layer, rows = SelfAttention(8, 2, causal=True).double(), Batch.random([3, 0, 6]).laid_out("mixed")
    positions = Positions.from_mask(rows.mask)
    heads, _ = layer.heads(positions.pack(rows.history), positions)
    assert heads.shape == (9, 2, 4)
    columns = layer.output.weight.chunk(2, dim=1)
    total: Tensor = sum((heads[:, h] @ columns[h].T for h in range(2)), start=layer.output.bias)
    assert torch.allclose(positions.unpack(total), layer(rows.history, positions), atol=1e-12)
