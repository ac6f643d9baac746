"""A training step on a batch that is filled up is the step on the batch itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from ctr_pe.models import batch_plan
from ctr_pe.sequence import filled
from ctr_pe.sequence.filled import Filled, Parts, filling, like_length, rounded, rows_to_fill
from ctr_pe.sequence.positions import Positions
from tests.support.models import (
    ENCODINGS,
    NEGATIVES,
    SMALL,
    VARIANTS,
    batch,
    build,
    randomised,
    some_pairs,
    with_negatives,
)

COUNTS = [3, 0, 6, 1, 0, 5, 6, 2]


@pytest.mark.parametrize("size", [0, 1, 15, 16, 31, 33, 1000, 9_217, 102_400])
def test_a_size_is_rounded_up_by_a_sixteenth_at_most(size: int) -> None:
    assert size <= rounded(size) <= size * 17 / 16
    assert rounded(rounded(size)) == rounded(size)


@pytest.mark.parametrize(("size", "slots"), [(1, 1), (33, 5), (1000, 7), (9_217, 100), (1025, 1)])
def test_rows_that_fill_up_hold_what_is_missing(size: int, slots: int) -> None:
    most = rounded(size)
    lengths = filling(most - size, rows_to_fill(most, slots), slots)
    assert lengths.sum() == most - size
    assert lengths.max() <= slots


def coarse() -> Any:
    """As many items in vain as there are, so that the small batches of a test are filled."""
    return mock.patch.object(filled, "SHARE", 1)


@pytest.mark.parametrize("age", [False, True])
def test_positions_are_those_of_the_batch(age: bool) -> None:
    lengths = torch.tensor([3, 0, 4, 2, 3])  # the last only fills up
    ages = torch.arange(12) if age else None
    wanted, found = Positions.from_lengths(lengths, ages), Filled.of(lengths, 12, 4, ages, 4)
    x, target = torch.randn(12, 2), torch.randn(5, 2)

    def parts(at: Positions) -> list[Tensor]:
        joined = at.append(x, target)
        whole = at.with_target()
        same = [at.unpack(x), at.item_rows, at.newest_of(x), at.total(x), at.in_last(x, 3), at.in_last(x, 6), joined]
        same += [at.at_items.distance, at.pack(at.distance), *at.real_pairs(), whole.unpack(joined), whole.distance]
        same += [whole.newest, whole.drop_last(joined)]
        return same + [x for x in (at.age, whole.age) if x is not None]

    for one, other in zip(parts(found), parts(wanted), strict=True):
        assert torch.equal(one, other)
    assert found.real is not None
    assert found.real.tolist() == [True] * 9 + [False] * 3
    with pytest.raises(TypeError, match="on its device alone"):
        _ = found.lengths_cpu


def test_batches_of_one_size_are_alike_in_all_that_is_in_no_tensor(tmp_path: Path) -> None:
    model = build("DIN", tmp_path).train()
    model.fills = True
    plans = [model.planned(batch(counts, slots=6)) for counts in ([4, 4, 4, 4], [6, 5, 3, 2], [6, 6, 0, 4])]
    assert len({plan.transfer.sizes for plan in plans}) == 1  # the number of items, and rows that fill up
    assert plans[0].plan.sizes != plans[1].plan.sizes == plans[2].plan.sizes


class TestLikeLength:
    LENGTHS = torch.tensor([5] * 500 + [12] * 300 + [40] * 150 + [100] * 74)

    def test_blocks_hold_their_rows_and_take_a_fraction_of_the_pairs(self) -> None:
        parts = like_length(self.LENGTHS[torch.randperm(1024)], 100, [])
        counts, sizes = zip(*parts, strict=True)
        assert sum(counts) == 1024
        for rows, size in zip(self.LENGTHS.split(counts), sizes, strict=True):
            assert rows.max() <= size <= 100
        assert sum(count * size**2 for count, size in parts) < 1024 * 100**2 / 5

    def test_batches_of_like_lengths_share_them(self) -> None:
        before: list[Parts] = []
        found = {like_length((self.LENGTHS + noise).clamp(max=100), 100, before) for noise in (1, 0, 1, -1)}
        assert len(found) == len(before) == 1

    @pytest.mark.parametrize("lengths", [[100] * 64, [3], []])
    def test_there_are_none_where_they_save_little(self, lengths: list[int]) -> None:
        assert like_length(torch.tensor(lengths, dtype=torch.int64), 100, []) == ()

    def test_attention_in_them_is_that_of_positions(self) -> None:
        lengths, ages = torch.tensor([3, 0, 4, 2, 3]), torch.arange(12)
        parts = like_length(lengths, 4, []) or ((3, 3), (2, 4))
        found, x, rows = Filled.of(lengths, 12, 4, ages, 4, parts), torch.randn(12, 2), torch.randn(5, 2)
        for at, items in ((found, x), (found.with_target(), found.append(x, rows))):
            assert len(at.blocks) > 1
            padded = at.blocks.pad(items)
            for block, part in zip(at.blocks, padded, strict=True):
                assert torch.equal(part, at.unpack(items)[block.rows][:, -block.mask.shape[1] :])
                assert torch.equal(block.mask, at.mask[block.rows][:, -block.mask.shape[1] :])
            assert torch.equal(at.blocks.pack(padded), items)
            assert torch.equal(at.blocks.join_rows(at.blocks.split_rows(rows)), rows)


def step(model: Any, rows: dict[str, Tensor], fills: bool) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss, and by name gradients and running statistics."""
    model.fills = fills
    model.zero_grad()
    loss = model.compute_loss(model.forward(rows), model.get_labels(model.planned(rows)).double())
    loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), found | dict(model.named_buffers())


def assert_same_step(name: str, folder: Path, rows: dict[str, Tensor], saved: int = 100, **params: Any) -> None:
    """``saved``: 0 for self-attention in blocks of like length, 100 for one block."""
    torch.set_default_dtype(torch.float64)
    try:
        models = [randomised(build(name, folder, **params)).double().train() for _ in range(2)]
        models[1].load_state_dict(models[0].state_dict())
        with coarse(), mock.patch.object(filled, "SAVED", saved):
            (histories,) = batch_plan.fill(models[0], rows)[1]
            assert histories.lengths[len(COUNTS) :].sum() > 0
            assert bool(histories.parts) == (models[0].attends_to_itself and not saved)
            found, wanted = (step(model, rows, fills) for model, fills in zip(models, (True, False), strict=True))
    finally:
        torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(found[0], wanted[0], rtol=1e-10, atol=1e-10)
    assert found[1].keys() == wanted[1].keys()
    for key, value in wanted[1].items():
        torch.testing.assert_close(found[1][key], value, rtol=1e-10, atol=1e-10, msg=key)


@some_pairs(SMALL, ENCODINGS, 0, 8)
def test_loss_gradients_and_statistics_are_those_of_the_batch(name: str, encoding: str, tmp_path: Path) -> None:
    assert_same_step(name, tmp_path, batch(COUNTS), position_encoding=encoding, **others(name))


@pytest.mark.parametrize("variant", VARIANTS)
def test_so_they_are_of_variants(variant: str, tmp_path: Path) -> None:
    name, params = VARIANTS[variant]
    no_dropout = {key: 0.0 for key in params if key.endswith("dropout")}
    assert_same_step(name, tmp_path, batch(COUNTS), position_encoding="rope", **others(name), **params | no_dropout)


@some_pairs(["BST", "DMIN", "SASRec"], ENCODINGS, 0, 12)
def test_so_they_are_in_blocks_of_like_length(name: str, encoding: str, tmp_path: Path) -> None:
    assert_same_step(name, tmp_path, batch(COUNTS), 0, position_encoding=encoding, **others(name))


NETWORK = {"aux_hidden_units": [5], "aux_activation": "Dice", "batch_norm": True}


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("DMIN", {"aux_loss_lambda": 0.5, **NETWORK}),
        ("DIEN", {"aux_loss_alpha": 0.5, **NETWORK}),
        ("DIEN", {"aux_loss_alpha": 0.5, "aux_hidden_units": [5], "attention_hidden_units": [6, 5]}),
    ],
)
def test_so_is_the_loss_of_the_next_item(name: str, params: dict[str, Any], tmp_path: Path) -> None:
    rows = with_negatives(batch(COUNTS))
    rows["item_neg"][2, 1] = 0  # none there
    negatives = {"changes": NEGATIVES, "neg_seq_field": [["item_neg", "cate_neg"]]}
    assert_same_step(name, tmp_path, rows, **negatives, **params)


class TestDraws:
    """Items that did not come next, of a filled batch."""

    def draws(self, folder: Path, fields: list[Tensor], real: Tensor) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = build("DMIN", folder)._drawn_filled(fields, real)
        return found

    def test_are_other_items_of_the_batch_each_as_often(self, tmp_path: Path) -> None:
        kinds = torch.tensor([[5, 1], [5, 2], [7, 1], [9, 9]])  # the last only fills up
        which = torch.tensor([0, 1, 2] * 1000 + [3] * 100)
        fields, real = list(kinds[which].T), which < 3
        drawn, several = self.draws(tmp_path, fields, real)
        assert several
        pairs = which[drawn][real] * 3 + which[real]
        counts = pairs.bincount(minlength=9).view(3, 3)
        assert counts.diagonal().tolist() == [0, 0, 0]
        assert (counts[~torch.eye(3, dtype=torch.bool)] - 500).abs().max() < 100

    @pytest.mark.parametrize("real", [0, 3])
    def test_are_none_where_all_items_are_the_same(self, real: int, tmp_path: Path) -> None:
        ids = torch.tensor([4, 4, 4, 0, 0])
        drawn, several = self.draws(tmp_path, [ids], torch.arange(5) < real)
        assert not several
        assert drawn.min() >= 0


def others(name: str) -> dict[str, Any]:
    """Without draws, which are others for other sizes."""
    return {"aux_loss_lambda": 0.0} if name == "DMIN" else {}
