"""One more encoding for a trained model, trained alone: the kernel on top of CAPE and RoPE."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ctr_pe import Chain, PositionEncoding, Positions
from ctr_pe.pe import build_pe
from ctr_pe.pe.attach import attach
from ctr_pe.pe.cape import CAPE
from ctr_pe.pe.kernel import Kernel
from ctr_pe.units import SelfAttention, TargetAttention
from ctr_pe.utils.errors import UserError
from tests.support.models import batch, build


def trained(name: str, folder: Path, encoding: str, steps: int = 3) -> Any:
    model = build(name, folder, position_encoding=encoding, learning_rate=0.01).train()
    model._max_gradient_norm = 10.0
    for step in range(steps):
        model.train_step(batch([3, 0, 6, 1, 5, 4], seed=step))
    return model


@pytest.mark.parametrize("encoding", ["cape", "rope", "none", "rope+cape"])
@pytest.mark.parametrize("name", ["DIN", "DIEN", "BST", "DMIN", "SASRec"])
def test_changes_nothing_before_training(name: str, encoding: str, tmp_path: Path) -> None:
    model, rows = trained(name, tmp_path, encoding).eval(), batch([3, 0, 6, 1])
    before = model(rows)["y_pred"]
    attach(model, "kernel")
    if "cape" in encoding:  # alone it does its softmax itself, with other last digits
        assert torch.allclose(model(rows)["y_pred"], before, rtol=1e-6)
        before = model(rows)["y_pred"]
    assert torch.equal(model(rows)["y_pred"], before)
    built = build(name, tmp_path, position_encoding=encoding + "+kernel" if encoding != "none" else "kernel")
    built.load_state_dict(model.state_dict())  # the same names, the same sharing between layers
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in built.parameters())
    assert torch.equal(built.eval()(rows)["y_pred"], before)


@pytest.mark.parametrize("encoding", ["cape", "rope"])
@pytest.mark.parametrize("name", ["SASRec", "BST", "DIN"])
def test_the_kernel_is_trained_alone(name: str, encoding: str, tmp_path: Path) -> None:
    model = trained(name, tmp_path, encoding)
    added = attach(model, "kernel")
    model.requires_grad_(False)
    for pe in added:
        pe.requires_grad_(True)
    model.compile("adam", "binary_crossentropy", 0.01)
    model.eval()  # DIN's Dice has running statistics
    own = {parameter for pe in added for parameter in pe.parameters()}
    start = {key: value.clone() for key, value in model.state_dict().items()}
    losses = [model.train_step(batch([3, 0, 6, 1, 5, 4])).item() for _ in range(10)]
    assert losses[-1] < losses[0]
    for key, value in model.state_dict(keep_vars=True).items():
        assert torch.equal(value, start[key]) != (value in own), key


def test_layers_of_a_stack_share_l_and_keep_their_u(tmp_path: Path) -> None:
    model = trained("SASRec", tmp_path, "cape", steps=0)
    first, *others = attach(model, "kernel")
    assert len(others) == 2
    assert all(pe.lower is first.lower and pe.toeplitz is not first.toeplitz for pe in others)
    chains = [block.attention.pe for block in model.transformers[0].blocks]
    assert [[type(link) for link in chain.encodings] for chain in chains] == [[CAPE, Kernel]] * 3


def test_options_sizes_and_mode_of_a_unit() -> None:
    unit = SelfAttention(8, 2, build_pe("rope", 8, 5, 2)).double().eval()
    (pe,) = attach(unit, "kernel", kernel_l="none")
    assert isinstance(unit.pe, Chain)
    assert (pe.max_len, pe.num_heads, pe.training, pe.toeplitz.dtype) == (5, 2, False, torch.float64)
    assert not hasattr(pe, "lower")
    bare = TargetAttention(8)
    (pe,) = attach(bare, "kernel", max_len=7)
    assert bare.pe is pe
    assert pe.toeplitz.shape == (7,)
    history, positions = torch.randn(2, 7, 8), Positions.from_mask(torch.ones(2, 7, dtype=torch.bool))
    nn.init.normal_(pe.toeplitz)
    assert not torch.equal(
        bare(history[:, 0], history, positions)[0], TargetAttention(8)(history[:, 0], history, positions)[0]
    )


def test_a_second_one_joins_the_chain() -> None:
    unit = TargetAttention(8, pe=build_pe("rope", 8, 5))
    attach(unit, "cape")
    attach(unit, "kernel")
    assert [type(link).__name__ for link in unit.pe.encodings] == ["RoPE", "CAPE", "Kernel"]  # type: ignore[union-attr]


def test_errors_leave_the_model_as_it_was() -> None:
    unit = TargetAttention(8, pe=build_pe("rope", 8, 5))
    with pytest.raises(UserError, match="'kernle' is unknown: did you mean 'kernel'"):
        attach(unit, "kernle")
    with pytest.raises(ValueError, match="one \\(dim, max_len, num_heads\\)"):
        attach(unit, "kernel", max_len=9)
    with pytest.raises(ValueError, match="Linear has no attention unit"):
        attach(nn.Linear(2, 2), "kernel")
    assert isinstance(unit.pe, PositionEncoding)
    assert not isinstance(unit.pe, Chain)
