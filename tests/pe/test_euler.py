"""EulerFormer: rotations of phases, and the contrast between them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ctr_pe import Chain, PositionEncoding, Positions
from ctr_pe.model_zoo import MODELS
from ctr_pe.pe import build_pe
from ctr_pe.pe.euler import Euler, phase_contrast
from ctr_pe.pe.naive import Naive
from ctr_pe.pe.rope import RoPE
from ctr_pe.pe.rotation import Turn, phases, rotate_planes
from ctr_pe.sequence.positions import Where
from ctr_pe.testing import Batch
from ctr_pe.units import SelfAttention, TargetAttention
from ctr_pe.utils.errors import UserError
from tests.support import models

D, L = 8, 6
CONTRAST: dict[str, Any] = {"euler_contrast": 1.0}


def full(rows: int = 2, slots: int = L) -> Positions:
    return Positions.from_mask(torch.ones(rows, slots, dtype=torch.bool))


def vectors(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def drawn(dim: int = D, heads: int = 1, **options: Any) -> Euler:
    pe = Euler(dim, L, heads, **options).double()
    torch.manual_seed(1)
    for parameter in pe.parameters():
        nn.init.normal_(parameter)
    return pe


def phases_of(x: Tensor) -> Tensor:
    return phases(*Euler(x.shape[-1], 1)._planes(x)[:2])


def turn(x: Tensor, angle: Tensor, scale: Tensor | None = None) -> Tensor:
    return rotate_planes(x, Turn.of(angle if scale is None else angle + (scale - 1) * phases_of(x)))


def rotated(pe: PositionEncoding, query: Tensor, key: Tensor, query_at: int, key_at: int) -> tuple[Tensor, Tensor]:
    return pe.rotate(query, key, Where(torch.tensor(query_at)), Where(torch.tensor(key_at)))


def as_complex(x: Tensor) -> Tensor:
    return torch.complex(*x.chunk(2, dim=-1))


def loss_of(unit: TargetAttention | SelfAttention, *given: Any) -> Tensor:
    return unit.attend(*given)[-1]["phase contrast"]


def frequencies(dim: int) -> Tensor:
    return 10000.0 ** (torch.arange(dim // 2, dtype=torch.float64) * -2 / dim)


class TestRotation:
    @pytest.mark.parametrize("layout", ["half", "interleaved"])
    @pytest.mark.parametrize("adaptation", ["vector", "scalar", "none"])
    @pytest.mark.parametrize("dim", [1, 2, 7, 8])
    def test_starts_as_rope(self, dim: int, adaptation: str, layout: str) -> None:
        euler = Euler(dim, L, euler_adaptation=adaptation, euler_layout=layout).double()
        rope = RoPE(dim, L, rope_layout=layout)
        query, keys = vectors(3, dim), vectors(5, dim, seed=1)
        at = Where(torch.zeros(3, dtype=torch.int64)), Where(torch.tensor([9, 4, 2, 2, 1]))
        for ours, theirs in zip(euler.rotate(query, keys, *at), rope.rotate(query, keys, *at), strict=True):
            assert torch.allclose(ours, theirs, rtol=0, atol=1e-12)
        heads, place = vectors(3, 1, 4, dim), Where(torch.tensor([[[4, 3, 2, 1]]]))
        for ours, theirs in zip(
            euler.rotate(heads, heads, place, place), rope.rotate(heads, heads, place, place), strict=True
        ):
            assert torch.allclose(ours, theirs, rtol=0, atol=1e-12)

    @pytest.mark.parametrize(("query_at", "key_at"), [(0, 3), (2, 2), (1, 6), (5, 1)])
    def test_dot_products_are_equation_13(self, query_at: int, key_at: int) -> None:
        pe, query, key = drawn(), vectors(D), vectors(D, seed=1)
        assert pe.scale is not None
        assert pe.shift is not None
        a, b = rotated(pe, query, key, query_at, key_at)
        q, k = as_complex(query), as_complex(key)
        angle = pe.scale * (q.angle() - k.angle()) + pe.shift + (key_at - query_at) * frequencies(D)
        assert torch.allclose(a @ b, (q.abs() * k.abs() * angle.cos()).sum(), rtol=0, atol=1e-12)

    def test_dot_products_depend_on_the_offset_only(self) -> None:
        pe, query, key = drawn(), vectors(D), vectors(D, seed=1)
        products = [a @ b for a, b in (rotated(pe, query, key, i, i + 3) for i in (0, 1, 7, 50))]
        assert torch.allclose(torch.stack(products), products[0])
        a, b = rotated(pe, query, key, 0, 4)
        assert (a @ b - products[0]).abs() > 1e-3

    @pytest.mark.parametrize("layout", ["half", "interleaved"])
    @pytest.mark.parametrize("dim", [7, 8])
    def test_keeps_norms_and_the_last_of_odd_coordinates(self, dim: int, layout: str) -> None:
        query, key = vectors(dim), vectors(dim, seed=1)
        for x, y in zip((query, key), rotated(drawn(dim, euler_layout=layout), query, key, 2, 5), strict=True):
            assert torch.allclose(y.norm(), x.norm())
            assert (y[: 2 * (dim // 2)] != x[: 2 * (dim // 2)]).all()
            assert dim == 8 or y[-1] == x[-1]

    def test_layouts_are_a_permutation_of_each_other(self) -> None:
        order = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])  # interleaved coordinate c is half's coordinate order[c]
        halves, interleaved = drawn(), drawn(euler_layout="interleaved")
        x, y = vectors(D), vectors(D, seed=1)
        for ours, theirs in zip(
            rotated(interleaved, x[order], y[order], 1, 4), rotated(halves, x, y, 1, 4), strict=True
        ):
            assert torch.allclose(ours, theirs[order])

    def test_scale_zero_leaves_the_moduli(self) -> None:
        pe = drawn()
        nn.init.zeros_(pe.scale)  # type: ignore[arg-type]
        query, key = vectors(D), vectors(D, seed=1)
        moved = turn(key, vectors(D // 2, seed=2))
        assert torch.allclose(rotated(pe, query, key, 0, 3)[1], rotated(pe, query, moved, 0, 3)[1])

    def test_scale_doubles_phases(self) -> None:
        pe = Euler(2, L).double()
        nn.init.constant_(pe.scale, 2.0)  # type: ignore[arg-type]
        third = torch.tensor([math.cos(math.pi / 3), math.sin(math.pi / 3)], dtype=torch.float64)
        got, _ = rotated(pe, 5 * third, third, 0, 0)
        assert torch.allclose(got, 5 * torch.tensor([math.cos(2 * math.pi / 3), math.sin(2 * math.pi / 3)]).double())

    def test_only_queries_are_shifted(self) -> None:
        pe = Euler(2, L).double()
        nn.init.constant_(pe.shift, math.pi / 2)  # type: ignore[arg-type]
        one = torch.tensor([1.0, 0.0], dtype=torch.float64)
        query, key = rotated(pe, one, one, 0, 0)
        assert torch.allclose(query, torch.tensor([0.0, 1.0]).double())
        assert torch.equal(key, one)

    def test_full_planes_reach_across_heads(self) -> None:
        pe, heads = drawn(heads=2, euler_planes="full"), 2
        assert pe.scale is not None
        assert pe.shift is not None
        query, keys = vectors(3, L, D), vectors(3, L, D, seed=1)
        at = Where(torch.arange(L, 0, -1)[None, None])
        split = [x.view(3, L, heads, D // heads).transpose(1, 2) for x in (query, keys)]
        a, b = pe.rotate(split[0], split[1], at, at)
        logits = (a @ b.transpose(-1, -2)).sum(1)
        q, k = as_complex(query).unsqueeze(2), as_complex(keys).unsqueeze(1)
        offset = (at.distance[0, 0][None, :] - at.distance[0, 0][:, None]).unsqueeze(-1)
        angle = pe.scale * (q.angle() - k.angle()) + pe.shift + offset * frequencies(D)
        assert torch.allclose(logits, (q.abs() * k.abs() * angle.cos()).sum(-1), rtol=0, atol=1e-12)
        one = drawn(euler_planes="full")
        for ours, theirs in zip(rotated(one, query, keys, 1, 4), rotated(drawn(), query, keys, 1, 4), strict=True):
            assert torch.equal(ours, theirs)

    def test_values_are_not_rotated(self) -> None:
        unit, positions = TargetAttention(D, pe=drawn()).double(), full()
        target, history = unit.pe.embed(vectors(2, D), vectors(2, L, D, seed=1), positions)
        assert target is not None
        interest, weights = unit(target, history, positions)
        assert torch.allclose(interest, (weights.unsqueeze(-1) * history).sum(1))

    def test_half_precision_keeps_its_angles(self) -> None:
        x = torch.ones(1, D)
        far, exact = Where(torch.tensor([997])), rotated(Euler(D, L).double(), x.double(), x.double(), 997, 997)[1]
        for half in (torch.float16, torch.bfloat16):
            got = Euler(D, L).to(half).rotate(x.to(half), x.to(half), far, far)[1]
            assert got.dtype == half
            assert (got.double() - exact).abs().max() < 1e-2

    @pytest.mark.parametrize("size", [1.0, 10.0, 1e3, 1e5, 1e7])
    def test_angles_of_any_size(self, size: float) -> None:
        angle = torch.linspace(-size, size, 4001).unsqueeze(-1)
        found = turn(torch.tensor([1.0, 0.0]).expand(4001, 2), angle)
        assert (found - torch.cat((angle.double().cos(), angle.double().sin()), -1)).abs().max() < 2e-7

    def test_phases_all_around(self) -> None:
        """Doubled, and those of the axes and of zero."""
        phase = torch.linspace(-math.pi, math.pi, 8001, dtype=torch.float64)[1:-1].unsqueeze(-1)
        for size in (1e-30, 1e-3, 1.0, 1e18):
            x = size * torch.cat((phase.cos(), phase.sin()), -1).float()
            doubled = turn(x, torch.zeros(1), torch.full((1,), 2.0)).double() / size
            assert (doubled - torch.cat(((2 * phase).cos(), (2 * phase).sin()), -1)).abs().max() < 1e-6
        axes = torch.tensor([[2.0, 0.0], [0.0, 2.0], [-2.0, 0.0], [0.0, -2.0], [0.0, 0.0], [-0.0, -0.0], [-3.0, 3.0]])
        wanted = [0, math.pi / 2, math.pi, -math.pi / 2, 0, 0, 3 * math.pi / 4]
        assert torch.allclose(phases_of(axes).squeeze(-1), torch.tensor(wanted))


class TestGradients:
    @pytest.mark.parametrize("shape", [(1, 4), (3, 4), (4,)])
    def test_of_turn(self, shape: tuple[int, ...]) -> None:
        inputs = [x.requires_grad_() for x in (vectors(3, 9), vectors(*shape, seed=1), vectors(4, seed=2))]
        assert torch.autograd.gradcheck(turn, inputs)
        assert torch.autograd.gradcheck(turn, inputs[:2])
        assert torch.autograd.gradcheck(lambda x, scale: turn(x, inputs[1].detach(), scale), inputs[::2])
        assert torch.autograd.gradcheck(lambda x: turn(x, inputs[1].detach()), inputs[:1])
        assert torch.autograd.gradgradcheck(turn, inputs)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    @pytest.mark.parametrize("size", [0.0, 1e-40, 1e-25, 1e-20, 1e-15])
    def test_are_finite_at_and_near_zero(self, size: float, dtype: torch.dtype) -> None:
        pe = drawn(**CONTRAST).to(dtype)
        x = torch.full((1, L, D), size, dtype=dtype, requires_grad=True)
        query, keys = rotated(pe, x, x, 2, 3)
        assert query.abs().max() <= 2 * size
        (query.sum() + keys.sum()).backward()
        found = [x.grad, pe.scale.grad, pe.shift.grad]  # type: ignore[union-attr]
        phases_of(x).sum().backward()
        assert all(grad is not None and grad.isfinite().all() for grad in [*found, x.grad])

    def test_at_zero_are_those_of_rope(self) -> None:
        x, y = (torch.zeros(1, D, dtype=torch.float64, requires_grad=True) for _ in range(2))
        weight = vectors(1, D)
        (rotated(Euler(D, L).double(), x, x, 0, 3)[1] * weight).sum().backward()
        (rotated(RoPE(D, L), y, y, 0, 3)[1] * weight).sum().backward()
        assert x.grad is not None
        assert y.grad is not None
        assert torch.allclose(x.grad, y.grad)

    def test_backward_can_be_repeated(self) -> None:
        pe, x = drawn(), vectors(4, D).requires_grad_()
        loss = rotated(pe, x, x, 1, 2)[0].square().sum() + rotated(pe, x, x, 1, 2)[1][:, 0].sum()
        (first,) = torch.autograd.grad(loss, x, retain_graph=True)
        (second,) = torch.autograd.grad(loss, x)
        assert torch.equal(first, second)


class TestInput:
    def test_without_psi_is_naive(self) -> None:
        pe, naive = Euler(D, L), Naive(D, L)
        naive.table = pe.table  # type: ignore[assignment]
        batch = torch.randn(2, D), torch.randn(2, L, D), full()
        for ours, theirs in zip(pe.embed(*batch), naive.embed(*batch), strict=True):
            assert ours is not None
            assert theirs is not None
            assert torch.allclose(ours, theirs)

    @pytest.mark.parametrize("index", ["distance", "rank"])
    def test_is_turned_by_psi_of_its_place(self, index: str) -> None:
        pe, positions = drawn(position_index=index), Positions.from_mask(torch.tensor([[False, True, True, True]]))
        target, history = pe.embed(vectors(1, D), vectors(1, 4, D, seed=1), positions)
        assert pe.table is not None
        assert pe.psi is not None
        rows = torch.tensor([3, 2, 1, 0] if index == "distance" else [0, 1, 2, 3])  # three items, then the target
        before = torch.cat([vectors(1, 4, D, seed=1)[0, 1:], vectors(1, D)]) + pe.table[rows]
        want = as_complex(before) * torch.polar(torch.ones(4, D // 2).double(), pe.psi[rows])
        assert torch.allclose(as_complex(history[0, 1:]), want[:3])
        assert target is not None
        assert torch.allclose(as_complex(target), want[3:])

    def test_padding_keeps_what_it_holds(self) -> None:
        mask = torch.tensor([[True, False, True]])
        _, history = drawn().embed(None, torch.full((1, 3, D), math.inf).double(), Positions.from_mask(mask))
        assert (history[0, 1] == math.inf).all()

    def test_old_items_share_the_last_row(self) -> None:
        pe = Euler(D, 3)
        nn.init.normal_(pe.psi)  # type: ignore[arg-type]
        _, history = pe.embed(None, torch.ones(1, L, D), full(1))
        assert torch.equal(history[0, :4], history[0, 3:4].expand(4, D))
        assert not torch.equal(history[0, 4], history[0, 3])

    def test_only_the_lowest_layer_has_one(self) -> None:
        pe = drawn(heads=2)
        above = pe.next_layer(lambda: Euler(2 * D, 3, 4))
        assert {name: tuple(p.shape) for name, p in above.named_parameters()} == {"scale": (2,), "shift": (2,)}
        history = vectors(2, L, 2 * D)
        assert above.embed(None, history, full())[1] is history
        chain = Chain([pe, RoPE(D, L, 2)]).next_layer(lambda: Chain([Euler(D, L, 2), RoPE(D, L, 2)]))
        assert [name for name, _ in chain.named_parameters()] == ["encodings.0.scale", "encodings.0.shift"]


class TestOptions:
    @pytest.mark.parametrize(
        ("options", "shapes"),
        [
            ({}, {"scale": (2,), "shift": (2,)}),
            ({"euler_adaptation": "scalar"}, {"scale": (1,), "shift": (1,)}),
            ({"euler_adaptation": "none"}, {}),
            ({"euler_adaptation": "none", "euler_frequencies": "learned"}, {"frequencies": (2,)}),
            ({"euler_frequencies": "none"}, {"scale": (2,), "shift": (2,)}),
            ({"euler_planes": "full"}, {"scale": (4,), "shift": (4,)}),
            (CONTRAST, {"scale": (2,), "shift": (2,), "phase_weight": (4,)}),
            ({**CONTRAST, "euler_planes": "full"}, {"scale": (4,), "shift": (4,), "phase_weight": (4,)}),
        ],
    )
    def test_parameters(self, options: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> None:
        found = {name: tuple(p.shape) for name, p in build_pe("euler", D, L, 2, **options).named_parameters()}
        assert found == {"table": (L + 1, D), "psi": (L + 1, D // 2)} | shapes
        without = build_pe("euler", D, L, 2, **options, euler_rotary_embedding=False)
        assert found.keys() - dict(without.named_parameters()).keys() == {"psi"}

    def test_learned_frequencies_start_as_the_fixed_ones_and_learn(self) -> None:
        learned, fixed = Euler(D, L, euler_frequencies="learned"), Euler(D, L)
        x = torch.randn(D)
        turned = rotated(learned, x, x, 2, 3)
        for ours, theirs in zip(turned, rotated(fixed, x, x, 2, 3), strict=True):
            assert torch.allclose(ours, theirs, atol=1e-6)
        (turned[0] @ turned[1].flip(0)).backward()
        assert learned.frequencies is not None
        assert learned.frequencies.grad is not None
        assert (learned.frequencies.grad != 0).all()

    def test_no_rotation_by_position(self) -> None:
        pe, x, y = drawn(euler_frequencies="none"), vectors(D), vectors(D, seed=1)
        assert torch.equal(rotated(pe, x, y, 0, 5)[1], rotated(pe, x, y, 0, 1)[1])
        assert not torch.allclose(rotated(pe, x, y, 0, 5)[1], y)
        both = rotated(drawn(euler_frequencies="none", euler_adaptation="none"), x, y, 0, 5)
        assert both[0] is x
        assert both[1] is y

    @pytest.mark.parametrize(
        ("option", "value"),
        [
            ("position_index", "index"),
            ("euler_adaptation", "matrix"),
            ("euler_frequencies", True),
            ("euler_planes", "half"),
            ("euler_layout", "full"),
            ("euler_contrast", -1.0),
            ("euler_contrast", math.nan),
            ("euler_temperature", 0.0),
            ("euler_mask_rate", 1.5),
        ],
    )
    def test_bad_values(self, option: str, value: Any) -> None:
        with pytest.raises(UserError, match=f"'euler': {option} must be"):
            build_pe("euler", D, L, **{option: value})


def loop_contrast(phase: Tensor, masked: Tensor, weight: Tensor) -> Tensor:
    """Equation 14 for one row: phases and masked phases (N, P)."""
    total = torch.zeros((), dtype=phase.dtype)
    for j in range(len(phase)):
        powers = [torch.exp((weight * torch.cos(phase[j] - other)).sum()) for other in masked]
        total = total - torch.log(powers[j] / sum(powers))
    return total


class TestPhaseContrast:
    def test_is_equation_14(self) -> None:
        phase, kept, weight = 3 * vectors(3, 5, 4), vectors(3, 5, 4, seed=1) > 0, vectors(4, seed=2)
        real = torch.tensor([[False, True, True, False, True], [True] * 5, [False] * 5])
        want = sum(
            loop_contrast(phase[row][real[row]], (phase * kept)[row][real[row]], weight) for row in range(len(real))
        )
        assert torch.allclose(phase_contrast(phase, kept, real, weight), want)  # type: ignore[arg-type]

    def test_of_one_item_is_zero_and_of_equal_ones_n_log_n(self) -> None:
        real, one = torch.ones(1, 7, dtype=torch.bool), torch.ones(1, 7, 4, dtype=torch.bool)
        phase, zero, weight = vectors(1, 7, 4), torch.zeros(4).double(), vectors(4, seed=1)
        alone = torch.zeros_like(real).index_fill(1, torch.tensor(3), True)
        for got, want in (
            (phase_contrast(phase, one, alone, weight), 0.0),
            (phase_contrast(phase, one, real, zero), 7 * math.log(7)),
            (phase_contrast(phase, ~one, real, weight), 7 * math.log(7)),
            (phase_contrast(phase[:, :1].expand(1, 7, 4), one, real, weight), 7 * math.log(7)),
        ):
            assert got.item() == pytest.approx(want, abs=1e-12)

    def test_has_no_cut(self) -> None:
        phase, kept = vectors(2, 5, 4), vectors(2, 5, 4, seed=1) > 0
        real, weight = torch.ones(2, 5, dtype=torch.bool), vectors(4, seed=2)
        around = phase + 2 * math.pi * torch.randint(-2, 3, phase.shape)
        assert torch.allclose(phase_contrast(around, kept, real, weight), phase_contrast(phase, kept, real, weight))

    def test_does_not_overflow(self) -> None:
        phase = torch.randn(1, 20, 256).requires_grad_()
        real = torch.arange(20)[None] < 15
        loss = phase_contrast(phase, torch.rand(1, 20, 256) > 0.5, real, torch.full((256,), 2.0))
        loss.backward()
        assert loss.isfinite()
        assert phase.grad is not None
        assert phase.grad.isfinite().all()
        assert (phase.grad[0, 15:] == 0).all()

    @pytest.mark.parametrize("planes", ["per_head", "full"])
    @pytest.mark.parametrize("causal", [True, False])
    def test_of_self_attention(self, causal: bool, planes: str) -> None:
        """Queries and keys, all heads in one vector, averaged over the rows of the batch whatever their blocks."""
        heads, counts = 2, [3, 0, 30, 1, 30]
        pe = drawn(heads=heads, euler_planes=planes, euler_temperature=0.7, euler_mask_rate=0.0, euler_contrast=0.25)
        layer = SelfAttention(D, heads, pe, causal).double().train()
        batch = Batch.random(counts).laid_out("mixed")
        positions = Positions.from_mask(batch.mask)
        assert len(positions.blocks) > 1
        _, moved = pe.embed(None, batch.history, positions)
        found = loss_of(layer, positions.pack(moved), positions)
        assert pe.scale is not None
        assert pe.shift is not None
        want = torch.zeros(()).double()
        for history, mask in zip(moved, batch.mask, strict=True):
            for project, shift in ((layer.query, pe.shift), (layer.key, 0.0)):
                parts = project(history[mask])
                parts = parts.unflatten(1, (heads, -1)) if planes == "per_head" else parts.unsqueeze(1)
                phase = (as_complex(parts).angle() * pe.scale + shift).flatten(1)
                want = want + loop_contrast(phase, phase, pe.phase_weight / 0.7)
        assert torch.allclose(found, 0.25 * want / len(counts))

    def test_of_target_attention(self) -> None:
        counts = [3, 0, 30, 1, 30]
        pe = drawn(**CONTRAST, euler_mask_rate=0.0)
        unit = TargetAttention(D, "bilinear", pe).double().train()
        batch = Batch.random(counts).laid_out("left")
        positions = Positions.from_mask(batch.mask)
        target, moved = pe.embed(batch.target, batch.history, positions)
        found = loss_of(unit, target, moved, positions)
        want = torch.zeros(()).double()
        for history, mask in zip(moved, batch.mask, strict=True):
            phase = as_complex(history[mask]).angle() * pe.scale
            want = want + loop_contrast(phase, phase, pe.phase_weight)
        assert torch.allclose(found, want / len(counts))

    @pytest.mark.parametrize("unit", ["dot", "self"])
    def test_padding_changes_nothing_and_masks_do_not_disturb(self, unit: str) -> None:
        found = []
        for layout in ("left", "right", "mixed", "doubled"):
            torch.manual_seed(3)
            pe = Euler(D, L, **CONTRAST)
            module = (TargetAttention(D, unit, pe) if unit == "dot" else SelfAttention(D, 1, pe)).double().train()
            batch = Batch.random([3, 0, 6, 1, 9]).laid_out(layout)
            before = torch.get_rng_state()
            positions = Positions.from_mask(batch.mask)
            inputs = *([batch.target] if unit == "dot" else []), positions.pack(batch.history)
            found.append(loss_of(module, *inputs, positions))
            assert torch.equal(torch.get_rng_state(), before)
        assert found[0] > 0
        assert torch.allclose(torch.stack(found), found[0], rtol=0, atol=1e-9)

    def test_masks_differ_from_step_to_step_and_from_seed_to_seed(self) -> None:
        def losses(seed: int) -> list[float]:
            torch.manual_seed(seed)
            pe = Euler(D, L, **CONTRAST)
            unit = TargetAttention(D, pe=pe).train()
            batch = Batch.random([6, 6], torch.float32)
            given = unit, batch.target, batch.history, Positions.from_mask(batch.mask)
            return [loss_of(*given).item() for _ in range(2)]

        first = losses(0)
        assert first == losses(0)
        assert len({*first, *losses(1)}) == 4

    @pytest.mark.parametrize("rate", [0.0, 0.2, 1.0])
    def test_masks_the_given_share(self, rate: float) -> None:
        kept = Euler(D, L, **CONTRAST, euler_mask_rate=rate)._draw(torch.Size([999, 41])).double()
        assert kept.mean() == pytest.approx(1 - rate, abs=0.01 if rate == 0.2 else 0)
        assert rate != 0.2 or max(kept.mean(0).std(), kept[:, 1:].mean(1).std()) < 0.08

    def test_is_of_training_only_and_off_by_default(self) -> None:
        batch = Batch.random([6, 6], torch.float32)
        for options, training in ((CONTRAST, False), ({}, True)):
            pe = Euler(D, L, **options)
            unit = TargetAttention(D, pe=pe).train(training)
            assert not unit.attend(batch.target, batch.history, Positions.from_mask(batch.mask))[-1]
            assert pe.loss_names == (("phase contrast",) if options else ())

    def test_all_that_it_depends_on_learns(self) -> None:
        pe = drawn(heads=2, **CONTRAST)
        layer = SelfAttention(D, 2, pe).double().train()
        batch = Batch.random([3, 0, 6])
        positions = Positions.from_mask(batch.mask)
        loss_of(layer, pe.embed(None, positions.pack(batch.history), positions)[1], positions).backward()
        learning = {name for name, p in layer.named_parameters() if p.grad is not None and p.grad.abs().max() > 0}
        names = {"table", "psi", "scale", "shift", "phase_weight"}
        assert learning == {f"pe.{name}" for name in names} | {
            f"{part}.{name}" for part in ("query", "key") for name in ("weight", "bias")
        }

    @pytest.mark.parametrize("unit", ["dot", "self"])
    def test_empty_histories(self, unit: str) -> None:
        for counts in ([0, 0], [0, 2], [1]):
            pe = Euler(D, L, **CONTRAST).double()
            module: Any = TargetAttention(D, unit, pe) if unit == "dot" else SelfAttention(D, 1, pe)
            module.double().train()
            batch = Batch.random(counts)
            batch.history.requires_grad_()
            positions = Positions.from_mask(batch.mask)
            inputs = *([batch.target] if unit == "dot" else []), positions.pack(batch.history)
            output, *_, losses = module.attend(*inputs, positions)
            loss = sum(losses.values())
            (output.sum() + loss).backward()
            assert (loss > 0) == (2 in counts)
            assert batch.history.grad is not None
            assert batch.history.grad.isfinite().all()

    def test_is_reckoned_in_float32_under_autocast(self) -> None:
        batch, found = Batch.random([6, 6], torch.float32), []
        for amp in (False, True):
            torch.manual_seed(0)
            pe = Euler(D, L, **CONTRAST, euler_temperature=0.1)
            unit = TargetAttention(D, pe=pe).train()
            with torch.autocast("cpu", torch.bfloat16, enabled=amp):
                found.append(loss_of(unit, batch.target, batch.history, Positions.from_mask(batch.mask)))
        assert found[1].dtype == torch.float32
        assert torch.allclose(found[1], found[0], rtol=1e-6)

    @pytest.mark.parametrize("name", MODELS)
    def test_of_models(self, name: str, tmp_path: Path) -> None:
        """Part of the loss, the same whatever the padding, and without it the same scores."""
        found, options = [], {"position_encoding": "euler", "embedding_dim": 4}
        plain = models.build(name, tmp_path, **options).train()
        for layout in ({}, {"slots": 11}, {"left": True}):
            rows = models.batch([3, 0, 6, 1, 5, 2], **layout)  # type: ignore[arg-type]
            model = models.build(name, tmp_path, **options, euler_contrast=0.1).train()
            outputs = model(rows)
            assert torch.allclose(outputs["y_pred"], plain(rows)["y_pred"])
            loss = model.add_loss(outputs, model.get_labels(rows))
            loss.backward()
            weights = [p.grad for key, p in model.named_parameters() if key.endswith("phase_weight")]
            assert weights
            assert all(grad is not None and grad.abs().max() > 0 for grad in weights)
            found.append(loss)
        assert torch.allclose(torch.stack(found), found[0])
        assert found[0] > plain.add_loss(plain(rows), plain.get_labels(rows)) + 0.01
