from __future__ import annotations

import pytest
import torch
from fuxictr.pytorch.layers import DIN_Attention
from fuxictr.pytorch.layers.activations import Dice as FuxiCTRDice
from torch import Tensor, nn

from ctr_pe import Positions, build_pe
from ctr_pe.pe.base import PositionEncoding, Target
from ctr_pe.testing import Batch
from ctr_pe.units import BilinearScore, Dice, DINScore, DotScore, SelfAttention, TargetAttention, mlp_chunks
from tests.support import hooks


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_softmax_is_zero_where_not_allowed_and_finite_where_nothing_is(dtype: torch.dtype) -> None:
    pairs = hooks.target_pairs(Positions.from_mask(torch.tensor([[False, True], [False, False]])))
    logits = torch.tensor([[[[1.0]]], [[[-4e4]]]], dtype=dtype).requires_grad_()
    weights = pairs.softmax(logits)
    assert weights.dtype == torch.promote_types(dtype, torch.float32)
    assert weights.flatten().tolist() == [1.0, 1.0]
    wide = hooks.item_pairs(Positions.from_mask(torch.tensor([[True, True], [False, True], [False, False]])), True)
    logits = torch.full((3, 1, 2, 2), -4e4, dtype=dtype).requires_grad_()
    weights = wide.softmax(logits)
    assert weights[0, 0].tolist() == [[1.0, 0.0], [0.5, 0.5]]
    assert weights[1, 0, 1].tolist() == [0.0, 1.0]
    assert weights.isfinite().all()
    weights.square().sum().backward()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()


def test_dot_and_bilinear_scores() -> None:
    target, items, rows = torch.randn(2, 4), torch.randn(3, 4), torch.tensor([0, 0, 1])
    assert torch.allclose(DotScore(4)(target, items, rows), (target[rows] * items).sum(1) / 2)
    assert torch.allclose(DotScore(4, scaled=False)(target, items, rows), (target[rows] * items).sum(1))
    bilinear = BilinearScore(4)
    assert torch.allclose(bilinear(target, items, rows), (target[rows] * items).sum(1))  # starts as the identity
    nn.init.normal_(bilinear.weight)
    want = torch.stack([items[i] @ bilinear.weight @ target[r] for i, r in enumerate(rows)])
    assert torch.allclose(bilinear(target, items, rows), want, atol=1e-5)


@pytest.mark.parametrize("softmax", [True, False])
@pytest.mark.parametrize("activation", ["Dice", "ReLU", "prelu"])
def test_din_equals_fuxictr_s_attention_on_unpadded_batches_also_in_training(activation: str, softmax: bool) -> None:
    torch.manual_seed(0)
    theirs = DIN_Attention(8, [6, 5], "dice" if activation == "Dice" else "ReLU", use_softmax=softmax).double()
    if activation == "prelu":
        theirs.attention_layer.mlp[1], theirs.attention_layer.mlp[3] = nn.PReLU(6).double(), nn.PReLU(5).double()
    ours = TargetAttention(8, DINScore(8, [6, 5], activation), softmax=softmax).double()
    ours.score.mlp.load_state_dict(theirs.attention_layer.mlp.state_dict())
    target, history = torch.randn(5, 8).double(), torch.randn(5, 7, 8).double()
    mask = torch.ones(5, 7, dtype=torch.bool)
    for training in (True, False):
        ours.train(training), theirs.train(training)
        interest, _ = ours(target, history, Positions.from_mask(mask))
        assert torch.allclose(interest, theirs(target, history, mask), atol=1e-12)
    for name, value in theirs.attention_layer.mlp.state_dict().items():  # running statistics too
        assert torch.allclose(ours.score.mlp.state_dict()[name], value)


def test_dice_statistics_see_real_items_only() -> None:
    torch.manual_seed(0)
    batch = Batch.random([3, 0, 6, 1, 5])
    runs = []
    for laid in (batch, batch.laid_out("left"), batch.laid_out("doubled")):
        torch.manual_seed(1)
        unit = TargetAttention(8, DINScore(8, [6], "Dice")).double().train()
        unit(laid.target, laid.history, Positions.from_mask(laid.mask))
        dice = unit.score.mlp[1]
        runs.append((dice.bn.running_mean, dice.bn.running_var))
    for mean, variance in runs[1:]:
        assert torch.allclose(mean, runs[0][0], atol=1e-12)
        assert torch.allclose(variance, runs[0][1], atol=1e-12)


def test_din_computes_its_mlp_on_real_pairs_only(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    product = mlp_chunks._product

    def watched(source: mlp_chunks.Source, weight: Tensor, moments: bool) -> tuple[Tensor, Tensor, Tensor]:
        seen.append(source.pairs)
        return product(source, weight, moments)

    monkeypatch.setattr(mlp_chunks, "_product", watched)
    unit = TargetAttention(8, "din").double()
    batch = Batch.random([3, 0, 6, 1, 5]).laid_out("doubled")
    unit(batch.target, batch.history, Positions.from_mask(batch.mask))
    assert seen == [15, 15, 15]  # of each layer


class TestDice:
    def test_alpha_one_is_the_identity(self) -> None:
        dice = Dice(4)
        nn.init.ones_(dice.alpha)
        x = torch.randn(9, 4)
        assert torch.allclose(dice(x), x)

    def test_equals_fuxictr_s(self) -> None:
        ours, theirs, x = Dice(4).double(), FuxiCTRDice(4).double(), torch.randn(9, 4).double()
        nn.init.normal_(ours.alpha)
        theirs.load_state_dict(ours.state_dict())
        for training in (True, False):
            assert torch.allclose(ours.train(training)(x), theirs.train(training)(x), atol=1e-12)

    @pytest.mark.parametrize("rows", [0, 1])
    def test_one_row_or_none_uses_running_statistics(self, rows: int) -> None:
        dice = Dice(4).train()
        before = dice.bn.running_mean.clone()
        assert dice(torch.randn(rows, 4)).isfinite().all()
        assert torch.equal(dice.bn.running_mean, before)


def test_without_softmax_padding_has_zero_weight_under_any_bias() -> None:
    class Shift(PositionEncoding):
        def bias(self, logits: Tensor, vectors: object, pairs: object) -> Tensor:
            return logits + 5

    batch = Batch.random([2, 0]).laid_out("left")
    unit = TargetAttention(8, pe=Shift(8, 6), softmax=False).double()
    interest, weights = unit(batch.target, batch.history, Positions.from_mask(batch.mask))
    assert weights[~batch.mask].abs().max() == 0
    assert interest[1].abs().max() == 0


def test_interest_lies_in_the_hull_of_the_history() -> None:
    batch = Batch.random([3, 6])
    interest, weights = TargetAttention(8, "din").double()(batch.target, batch.history, Positions.from_mask(batch.mask))
    assert torch.allclose(interest, (weights.unsqueeze(-1) * batch.history).sum(1))
    assert (weights >= 0).all()
    assert torch.allclose(weights.sum(1), torch.ones(2).double())


def test_nan_in_padding_does_not_reach_the_interest() -> None:
    batch = Batch.random([3, 5]).laid_out("left")
    batch.history[~batch.mask] = float("nan")
    interest, _ = TargetAttention(8, pe=build_pe("cape", 8, 6))(
        batch.target.float(), batch.history.float(), Positions.from_mask(batch.mask)
    )
    assert interest.isfinite().all()


def test_encoding_that_widens_items() -> None:
    """The pattern of concatenated positions: embed appends dims, units are built for its out_dim."""

    class Concatenated(PositionEncoding):
        def __init__(self, dim: int, max_len: int, num_heads: int = 1) -> None:
            super().__init__(dim, max_len, num_heads)
            self.out_dim = dim + 3

        def embed(self, target: Target, history: Tensor, positions: Positions) -> tuple[Target, Tensor]:
            extra = positions.distance.unsqueeze(-1).expand(-1, -1, 3).to(history.dtype)
            wider = None if target is None else torch.cat([target, target.new_zeros(len(target), 3)], -1)
            return wider, torch.cat([history, extra], -1)

    pe, batch = Concatenated(8, 6), Batch.random([3, 5])
    positions = Positions.from_mask(batch.mask)
    unit = TargetAttention(11, "din", pe).double()
    interest, _ = unit(*pe.embed(batch.target, batch.history, positions), positions)
    assert interest.shape == (2, 11)
    with pytest.raises(ValueError, match=r"needs an encoding with out_dim=8.*got out_dim=11"):
        TargetAttention(8, "din", pe)


@pytest.mark.parametrize("causal", [True, False])
def test_self_attention_equals_torch_s(causal: bool) -> None:
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(8, 2, batch_first=True).double()
    ours = SelfAttention(8, 2, causal=causal).double()
    weight, bias = theirs.in_proj_weight.chunk(3), theirs.in_proj_bias.chunk(3)
    with torch.no_grad():
        for linear, w, b in zip((ours.query, ours.key, ours.value), weight, bias, strict=True):
            linear.weight.copy_(w), linear.bias.copy_(b)
    ours.output.load_state_dict(theirs.out_proj.state_dict())
    batch = Batch.random([4, 7])
    future = torch.ones(7, 7, dtype=torch.bool).triu(1) if causal else None
    want, _ = theirs(batch.history, batch.history, batch.history, key_padding_mask=~batch.mask, attn_mask=future)
    got = ours(batch.history, Positions.from_mask(batch.mask))
    assert torch.allclose(got[batch.mask], want[batch.mask], atol=1e-12)
    assert got[~batch.mask].abs().max() == 0


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: TargetAttention(8, "dott"), "did you mean 'dot'"),
        (lambda: TargetAttention(8, pe=build_pe("cape", 16, 5)), r"needs an encoding with out_dim=8.*got out_dim=16"),
        (lambda: TargetAttention(8, pe=build_pe("cape", 8, 5, num_heads=2)), "num_heads=1"),
        (lambda: SelfAttention(8, 3), "not divisible by num_heads=3"),
        (lambda: SelfAttention(8, 2, build_pe("cape", 8, 5)), "num_heads=2"),
        (lambda: DINScore(8, []), "at least one hidden layer"),
        (lambda: DINScore(8, [4], "Dicee"), "unknown"),
    ],
)
def test_mistakes(build: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()  # type: ignore[operator]
