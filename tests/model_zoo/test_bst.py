"""BST: its own position vectors, its poolings, and FuxiCTR's switch of positions. (Golden values: tests/golden.)"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ctr_pe.model_zoo.bst import POOLINGS, ConcatenatedPositions
from ctr_pe.sequence.positions import Positions
from ctr_pe.testing import check_pe
from ctr_pe.utils.errors import UserError
from tests.support.models import SLOTS, batch, build


def randomised(model: Any) -> Any:
    draw = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3, generator=draw)
    return model.double().eval()


class TestConcatenatedPositions:
    def test_passes_the_battery(self) -> None:
        check_pe(lambda dim, max_len, num_heads: ConcatenatedPositions(dim, max_len, num_heads, position_dim=4))

    @pytest.mark.parametrize("width", [4, 5, 1])
    def test_starts_as_sines_and_cosines(self, width: int) -> None:
        table = ConcatenatedPositions(8, 7, position_dim=width).table.double()
        distance = torch.arange(7).double()
        for column in range(width):
            angle = distance * 10000.0 ** (-(column // 2) * 2 / width)
            assert torch.allclose(table[:, column], angle.cos() if column % 2 else angle.sin(), atol=1e-6)

    def test_starts_as_large_as_one_says(self, tmp_path: Path) -> None:
        tables = [
            build("BST", tmp_path, position_encoding="native", native_scale=scale).transformers[0].encodings[0].table
            for scale in (1.0, 0.25)
        ]
        assert torch.equal(tables[0] / 4, tables[1])
        with pytest.raises(UserError, match="native_scale must be a positive number, got 0"):
            build("BST", tmp_path, position_encoding="native", native_scale=0)

    def test_is_of_the_embedding_s_width_beside_every_item(self, tmp_path: Path) -> None:
        model = build("BST", tmp_path, position_encoding="native")
        encoding = model.transformers[0].encodings[0]
        assert tuple(encoding.table.shape) == (SLOTS + 1, 4)  # as FuxiCTR's: history and target
        assert model.transformers[0].dim == 12
        assert sum(isinstance(module, ConcatenatedPositions) for module in model.modules()) == 1

    def test_heads_split_item_and_position_together(self, tmp_path: Path) -> None:
        """Item dim 8 and position dim 4: three heads with it, none without."""
        assert build("BST", tmp_path, position_encoding="native", num_heads=3)(batch([3, 0]))["y_pred"].isfinite().all()
        with pytest.raises(UserError, match=r"BST: num_heads=3 does not divide 8, .*: take one of 1, 2, 4, 8"):
            build("BST", tmp_path, position_encoding="none", num_heads=3)
        with pytest.raises(UserError, match=r"BST: num_heads=8 does not divide 12, .*: take one of 1, 2, 3, 4, 6, 12"):
            build("BST", tmp_path, position_encoding="native", num_heads=8)

    def test_order_matters_with_it_and_not_without(self, tmp_path: Path) -> None:
        rows = batch([5, 6])
        flipped = {key: value.flip(1) if "history" in key else value for key, value in rows.items()}
        flipped["item_history"][0], flipped["cate_history"][0] = (
            flipped["item_history"][0].roll(-1),
            flipped["cate_history"][0].roll(-1),
        )
        for encoding, equal in (("native", False), ("none", True)):
            model = randomised(build("BST", tmp_path, position_encoding=encoding))
            assert torch.allclose(model(rows)["y_pred"], model(flipped)["y_pred"], atol=1e-9) is equal


class TestPooling:
    @pytest.mark.parametrize("pooling", POOLINGS)
    @pytest.mark.parametrize("encoding", ["native", "cape"])
    def test_padding_changes_nothing(self, pooling: str, encoding: str, tmp_path: Path) -> None:
        model = randomised(build("BST", tmp_path, seq_pooling_type=pooling, position_encoding=encoding))
        want = model(batch([3, 0, 6, 1]))["y_pred"]
        for layout in ({"slots": 11}, {"left": True}, {"left": True, "slots": 9}):
            assert torch.allclose(model(batch([3, 0, 6, 1], **layout))["y_pred"], want, atol=1e-12)  # type: ignore[arg-type]

    @pytest.mark.parametrize("pooling", POOLINGS)
    def test_empty_and_longer_histories(self, pooling: str, tmp_path: Path) -> None:
        for counts in ([0], [0, 0], [1], [SLOTS + 5, 2]):
            model = build("BST", tmp_path, seq_pooling_type=pooling, position_encoding="native").train()
            model._max_gradient_norm = 10.0
            assert model.train_step(batch(counts)).isfinite()
            assert all(parameter.isfinite().all() for parameter in model.parameters())

    def test_each_pools_real_states(self, tmp_path: Path) -> None:
        states = torch.tensor([[1.0, 10.0], [2.0, 20.0], [3.0, 30.0], [4.0, 40.0]])  # 3 items, then 1
        mask = torch.tensor([[False, True, True, True], [True, False, False, False]])
        pooled = {name: pool(states, Positions.from_mask(mask), 2).tolist() for name, pool in POOLINGS.items() if pool}
        assert pooled == {
            "sum": [[6, 60], [4, 40]],
            "mean": [[2, 20], [4, 40]],
            "concat": [[2, 20, 3, 30], [0, 0, 4, 40]],  # the oldest of three has no place in two slots
        }


def test_causal_items_do_not_see_the_target(tmp_path: Path) -> None:
    rows = batch([4, 6])
    other = rows | {"item_id": rows["item_id"] % 30 + 1}
    for causal in (True, False):
        model = randomised(build("BST", tmp_path, use_causal_mask=causal, position_encoding="native"))
        outputs: list[Any] = []
        model.transformers[0].register_forward_hook(lambda module, args, output, to=outputs: to.append(output))
        model(rows), model(other)
        (first, whole, _), (second, *_) = outputs
        history = whole.pack(whole.distance) > 1
        assert torch.equal(first[history], second[history]) is causal
        assert not torch.allclose(first[~history], second[~history])


class TestFuxiCTRsSwitch:
    @pytest.mark.parametrize(("switch", "encoding"), [(True, "native"), (False, "none")])
    def test_means_native_or_none(self, switch: bool, encoding: str, tmp_path: Path) -> None:
        rows = batch([3, 0, 6])
        ours = build("BST", tmp_path, position_encoding=encoding)
        for params in ({}, {"position_encoding": encoding}):
            theirs = build("BST", tmp_path, use_position_emb=switch, **params)
            assert torch.equal(ours(rows)["y_pred"], theirs(rows)["y_pred"])

    @pytest.mark.parametrize(("switch", "encoding"), [(True, "cape"), (False, "native"), (True, ["none"])])
    def test_position_encoding_decides(self, switch: bool, encoding: Any, tmp_path: Path) -> None:
        rows = batch([3, 0, 6])
        ours = build("BST", tmp_path, position_encoding=encoding)
        theirs = build("BST", tmp_path, use_position_emb=switch, position_encoding=encoding)
        assert torch.equal(ours(rows)["y_pred"], theirs(rows)["y_pred"])


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"seq_pooling_type": "max"}, r"BST: seq_pooling_type 'max' is unknown: .*\(concat, mean, sum, target\)"),
        ({"stacked_transformer_layers": 0}, "stacked_transformer_layers must be a positive integer, got 0"),
        ({"position_encoding": "native+cape"}, "BST: 'native\\+cape': native is the model's own and stands alone"),
    ],
)
def test_mistakes_are_one_line(params: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message) as error:
        build("BST", tmp_path, **params)
    assert "\n" not in str(error.value)
