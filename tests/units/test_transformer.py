"""The state at the target alone is that of the whole transformer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ctr_pe.pe import available_pes, build_pe
from ctr_pe.sequence.positions import Positions
from ctr_pe.units.transformer import Transformer
from ctr_pe.utils.random_generators import RandomGenerators
from tests.support.encoding_cases import known

D, L, HEADS = 8, 6, 2
COUNTS = [3, 0, 9, 1, 12, 6, 40, 35]  # several blocks, past the table


def stack(name: str, depth: int = 2, causal: bool = True, norm: str | None = "pre", **options: object) -> Transformer:
    torch.manual_seed(0)
    encodings = [build_pe(name, D, L + 1, HEADS, **options)]
    while len(encodings) < depth:
        encodings.append(encodings[-1].next_layer(lambda: build_pe(name, D, L + 1, HEADS, **options)))
    unit = Transformer(encodings, causal=causal, norm=norm, hidden_dim=5, residual=norm is not None).double()
    for parameter in unit.parameters():
        nn.init.normal_(parameter, std=0.4)
    return unit


def rows(counts: Sequence[int]) -> tuple[Tensor, Tensor, Positions]:
    """Targets, packed items, and positions with ages."""
    draw = torch.Generator().manual_seed(1)
    mask = torch.arange(max(counts)) < torch.tensor(counts).unsqueeze(1)
    age = torch.randint(1, 10_000, mask.shape, generator=draw).flip(1).cumsum(1).flip(1)
    target, items = (torch.randn(n, D, generator=draw, dtype=torch.float64) for n in (len(counts), sum(counts)))
    return target.requires_grad_(), items.requires_grad_(), Positions.from_mask(mask, age * mask)


def both(unit: Transformer, counts: Sequence[int]) -> list[list[Tensor]]:
    """States at the targets and all gradients, those alone first, then those of the whole."""
    results = []
    for alone in (True, False):
        target, items, positions = rows(counts)
        looked_up = known(items.detach()), known(target.detach())
        unit.zero_grad()
        if alone:
            states, _ = unit.of_target(target, items, positions, looked_up)
        else:
            every, whole, _ = unit(target, items, positions, looked_up)
            states = every[whole.newest]
        states.square().sum().backward()
        results.append([states, *(x.grad for x in (target, items, *unit.parameters()) if x.grad is not None)])
    return results


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", available_pes())
def test_every_encoding(name: str, causal: bool) -> None:
    norm = ("pre", "post")[(available_pes().index(name) + causal) % 2]  # every two of name, causal and norm
    for got, want in zip(*both(stack(name, causal=causal, norm=norm).eval(), COUNTS), strict=True):
        assert torch.allclose(got, want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("name", available_pes())
def test_the_newest_states_of_histories_without_a_target(name: str, depth: int, causal: bool) -> None:
    unit = stack(name, depth, causal, ("pre", "post")[available_pes().index(name) % 2]).eval()
    _, items, positions = rows([count or 2 for count in COUNTS])
    assert positions.no_row_is_empty
    assert not rows(COUNTS)[2].no_row_is_empty
    every, _ = unit.of_history(items, positions, known(items.detach()))
    got = unit.newest_of_history(items, positions, known(items.detach()))
    assert torch.allclose(got, every[positions.newest], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("norm", ["pre", "post", None])
@pytest.mark.parametrize("counts", [[0], [0, 0], [1], [L + 40]])
def test_shapes(depth: int, norm: str | None, counts: list[int]) -> None:
    for got, want in zip(*both(stack("cape", depth, norm=norm), counts), strict=True):
        assert torch.allclose(got, want, rtol=1e-9, atol=1e-9)


def test_no_rows() -> None:
    unit, positions = stack("cape"), Positions.from_mask(torch.zeros(0, 4, dtype=torch.bool))
    target, items = torch.zeros(2, 0, D, dtype=torch.float64)
    assert unit.of_target(target, items, positions)[0].shape == (0, D)


def test_the_last_block_computes_the_target_alone() -> None:
    unit, (target, items, positions) = stack("rope"), rows(COUNTS)
    fed: list[int] = []
    for block in unit.blocks:
        block.ffn.register_forward_hook(lambda module, args, out: fed.append(len(out)))  # type: ignore[union-attr]
    unit.of_target(target, items, positions)
    assert fed == [sum(COUNTS) + len(COUNTS), len(COUNTS)]


@pytest.mark.parametrize(("name", "options"), [("pdm", {"pdm_contrast": 0.1}), ("euler", {"euler_contrast": 0.1})])
def test_an_auxiliary_loss_sees_all_queries(
    name: str, options: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    unit, (target, items, positions) = stack(name, **options).train(), rows(COUNTS)
    losses = []
    for alone in (True, False):
        for layer, block in enumerate(unit.blocks):
            block.attention.pe.generators = RandomGenerators(layer)  # type: ignore[assignment, union-attr]
        found: list[Tensor] = []
        for block in unit.blocks:
            pe = block.attention.pe  # type: ignore[union-attr]
            monkeypatch.setattr(pe, "losses", partial(noted, found, partial(type(pe).losses, pe)))
        *_, summed = unit.of_target(target, items, positions) if alone else unit(target, items, positions)
        assert len(found) == len(unit.blocks)
        losses.append([loss.item() for loss in found])
        (total,) = summed.values()
        assert total.item() == pytest.approx(sum(losses[-1]))
    assert losses[0] == pytest.approx(losses[1])
    assert min(losses[0]) > 0


def noted(found: list[Tensor], losses: Callable[[Any], dict[str, Tensor]], attended: Any) -> dict[str, Tensor]:
    given = losses(attended)
    found.extend(given.values())
    return given
