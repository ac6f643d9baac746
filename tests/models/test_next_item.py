"""The auxiliary loss of DIEN and DMIN, in a model whose states are the items themselves."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from ctr_pe.config.schema import WeightText
from ctr_pe.models.next_item import NextItemModel
from ctr_pe.pe.base import Losses
from ctr_pe.sequence.positions import Items, Positions
from ctr_pe.utils.errors import UserError
from tests.support.models import NEGATIVES, PARAMS, batch, feature_map, with_negatives


class Last(NextItemModel):
    """The interest is the sum of the history."""

    def __init__(self, *args: Any, weight: WeightText = 0.5, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.build_next_item_losses(weight, [group.dim for group in self.groups], [5], "ReLU", dropout_rates=0)
        self.build_tower([group.dim for group in self.groups])

    def interest(self, index: int, target: Items, history: Items, positions: Positions) -> tuple[Tensor, Losses]:
        losses = self.next_item_loss(index, history.embedding, history, positions)
        return positions.unpack(history.embedding).sum(1), losses


def build(folder: Path, negatives: bool = False, **params: Any) -> Last:
    torch.manual_seed(0)
    if negatives:
        params["neg_seq_field"] = [["item_neg", "cate_neg"]]
    model = Last(feature_map(folder, **NEGATIVES if negatives else {}), model_root=str(folder), **PARAMS | params)
    for table in model.embedding_layer.parameters():
        torch.nn.init.normal_(table)
    return model.train()


def loss_of(outputs: dict[str, Any]) -> Tensor:
    loss: Tensor = outputs["losses"]["next item"]
    return loss


def embed(model: Last, item: Tensor, category: Tensor) -> Tensor:
    tables = model.embedding_layer.embedding_layers
    return torch.cat([tables["item_id"].weight[item], tables["cate_id"].weight[category]])


@pytest.mark.parametrize("left", [False, True])
def test_equals_a_loop_over_pairs(left: bool, tmp_path: Path) -> None:
    model = build(tmp_path, negatives=True).double()
    rows = with_negatives(batch([3, 0, 6, 1, 5], left=left))
    rows["item_neg"][2, 3] = rows["cate_neg"][2, 3] = 0  # a place without a negative is left out
    total, pairs = torch.zeros((), dtype=torch.float64), 0
    for row in range(5):
        real = rows["item_history"][row].nonzero().squeeze(1).tolist()
        for now, following in pairwise(real):
            if rows["item_neg"][row, following] == 0:
                continue
            state, *after = (
                embed(model, rows[item][row, slot], rows[category][row, slot])
                for item, category, slot in (
                    ("item_history", "cate_history", now),
                    ("item_history", "cate_history", following),
                    ("item_neg", "cate_neg", following),
                )
            )
            positive, negative = (model.aux_net[0].mlp(torch.cat([state, other])) for other in after)
            total, pairs = total - logsigmoid(positive)[0] - logsigmoid(-negative)[0], pairs + 1
    assert pairs == 2 + 5 + 4 - 1
    got = loss_of(model(rows))
    assert got.shape == ()
    assert torch.allclose(got, 0.5 * total / pairs, atol=1e-12)


def test_padding_and_truncation_change_nothing(tmp_path: Path) -> None:
    counts = [3, 0, 6, 1, 5]
    for negatives in (False, True):
        losses = []
        for layout in ({}, {"slots": 11}, {"left": True, "slots": 9}):
            rows = batch(counts, **layout)  # type: ignore[arg-type]
            losses.append(loss_of(build(tmp_path, negatives).double()(with_negatives(rows) if negatives else rows)))
        assert torch.allclose(torch.stack(losses), losses[0], atol=1e-12)


@pytest.mark.parametrize("left", [False, True])
def test_histories_cut_to_max_len(left: bool, tmp_path: Path) -> None:
    """The loss of the most recent items, each with the item of its own place that was not chosen."""
    rows = with_negatives(batch([3, 0, 6, 1, 5], left=left))
    short, real = dict(rows), rows["item_history"] > 0
    for field in ("item_history", "cate_history", "age_history", "item_neg", "cate_neg"):
        newest = [rows[field][row][real[row]][-4:] for row in range(5)]
        short[field] = torch.nn.utils.rnn.pad_sequence(newest, batch_first=True)
    cut, whole = build(tmp_path, negatives=True, max_len=4)(rows), build(tmp_path, negatives=True)(short)
    assert torch.allclose(cut["y_pred"], whole["y_pred"])
    assert torch.allclose(loss_of(cut), loss_of(whole))


def test_other_items_are_others(tmp_path: Path) -> None:
    model, seen = build(tmp_path), []
    model.aux_net[0].register_forward_hook(lambda module, inputs, output: seen.append(inputs))
    for seed in range(20):
        model(batch([3, 6], seed=seed))
    for _, following, others in seen:
        assert not (following == others).all(1).any()
        items = torch.cat(
            [following, *(embed(model, torch.tensor(i), torch.tensor(i % 8 + 1))[None] for i in range(40))]
        )
        assert (others[:, None] == items).all(2).any(1).all()  # whole items, each with its own category
    assert len({tuple(others.flatten().tolist()) for _, _, others in seen}) == 20


def test_draws_repeat_and_leave_the_random_stream_alone(tmp_path: Path) -> None:
    first, second = build(tmp_path), build(tmp_path)
    rows = batch([3, 6, 5])
    losses = [[loss_of(model(rows)).item() for _ in range(3)] for model in (first, second)]
    assert losses[0] == losses[1]
    assert len(set(losses[0])) == 3
    torch.manual_seed(3)
    first(rows)
    after = torch.rand(3)
    torch.manual_seed(3)
    assert torch.equal(after, torch.rand(3))


def test_one_step_lowers_it_and_reaches_both_classes(tmp_path: Path) -> None:
    model, rows = build(tmp_path, negatives=True, learning_rate=0.05), with_negatives(batch([3, 0, 6, 1, 5]))
    model._max_gradient_norm = 10.0
    before = loss_of(model(rows)).item()
    for _ in range(30):
        assert model.train_step(rows).isfinite()
    assert loss_of(model(rows)).item() < before / 2
    logits: list[Tensor] = []
    model.aux_net[0].mlp[-1].register_forward_hook(lambda module, inputs, output: logits.append(output.squeeze(-1)))
    model(rows)
    followed, not_followed = logits[0].chunk(2)
    assert followed.mean() > 0.5 > -0.5 > not_followed.mean()


def test_it_is_added_in_training_only(tmp_path: Path) -> None:
    model, rows = build(tmp_path), batch([3, 6])
    output, labels = model(rows), model.get_labels(rows)
    plain = {"y_pred": output["y_pred"]}
    assert torch.allclose(model.add_loss(output, labels), model.add_loss(plain, labels) + loss_of(output))
    assert model.eval()(rows).keys() == {"y_pred"}
    off = build(tmp_path, weight=0)
    assert not off(rows)["losses"]
    assert not hasattr(off, "aux_net")


@pytest.mark.parametrize("counts", [[0], [0, 0], [1], [2], [1, 1]])
@pytest.mark.parametrize("negatives", [False, True])
def test_few_or_no_pairs(counts: list[int], negatives: bool, tmp_path: Path) -> None:
    model, rows = build(tmp_path, negatives), batch(counts)
    model._max_gradient_norm = 10.0
    assert model.train_step(with_negatives(rows) if negatives else rows).isfinite()
    assert all(parameter.isfinite().all() for parameter in model.parameters())


def test_one_kind_of_item_has_no_other(tmp_path: Path) -> None:
    rows = batch([3, 2])
    for field in ("item_history", "cate_history"):
        rows[field] = (rows[field] > 0).long() * 5
    assert loss_of(build(tmp_path)(rows)).item() == 0


def test_negative_fields_stay_out_of_the_tower(tmp_path: Path) -> None:
    model, plain = build(tmp_path, negatives=True), build(tmp_path)
    assert model.dnn.mlp[0].weight.shape == plain.dnn.mlp[0].weight.shape
    rows = batch([3, 6])
    assert torch.allclose(model.eval()(with_negatives(rows))["y_pred"], plain.eval()(rows)["y_pred"])


def test_mistakes_are_one_line(tmp_path: Path) -> None:
    rows = with_negatives(batch([3, 6]))
    rows["item_neg"] = rows["item_neg"][:, :4]
    with pytest.raises(UserError, match="'item_neg' has 4 slots, 'item_history' has 6"):
        build(tmp_path, negatives=True)(rows)
    with pytest.raises(UserError, match="no field 'item_negs'"):
        build(tmp_path, neg_seq_field=[["item_negs", "cate_neg"]])
    with pytest.raises(UserError, match="target_field has 1 groups, neg_seq_field has 2"):
        build(tmp_path, neg_seq_field=[["item_history"], ["cate_history"]])
    with pytest.raises(UserError, match="weight must be a weight of 0 or more, got 'much'"):
        build(tmp_path, weight="much")
