"""Dice and dropout in one compiled pass give what torch gives, at every edge."""

from __future__ import annotations

import ctypes

import pytest
import torch
from comparing import needs_code
from fenced import Fenced
from torch import Tensor, nn

from ctr_pe import compiled
from ctr_pe.units import pieces
from ctr_pe.units.activations import Dice
from ctr_pe.units.dropout import Dropout
from ctr_pe.units.gate import Gate


def through(kind: type[pieces.Gated], dtype: torch.dtype, pairs: int, width: int, rate: float) -> list[Tensor]:
    """Values of two pieces, and their gradients of everything."""
    torch.manual_seed(pairs)
    x, of_y = (3 * torch.randn(2, pairs, width)).to(dtype)
    factor, shift, alpha, bias = torch.randn(4, width).to(dtype)
    dice = Dice(width).to(dtype).requires_grad_(False)
    dice.alpha += alpha
    source = kind(x, bias, dice, Dropout(rate), factor, shift)
    source.start_backward(source.tensors)
    values = []
    for piece in (slice(0, pairs // 3), slice(pairs // 3, pairs)):
        values.append(source.forward(piece)[0].clone())
        source.backward(piece, of_y[piece].clone(), torch.ones(len(of_y[piece]), width, dtype=dtype))
    return [torch.cat(values), *source.gradients]


@needs_code
@pytest.mark.parametrize("rate", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("width", [1, 5, 16, 27, 64])
@pytest.mark.parametrize("pairs", [0, 1, 3, 70])
def test_equals_torch(pairs: int, width: int, rate: float) -> None:
    ours = through(pieces.CompiledGated, torch.float32, pairs, width, rate)
    wanted = through(pieces.Gated, torch.float64, pairs, width, rate)
    for got, want in zip(ours, wanted, strict=True):
        assert (got - want).abs().amax().item() <= 1e-5 * max(1.0, want.abs().max().item()) if want.numel() else True


@needs_code
def test_a_score_uses_it_where_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    run = compiled.run
    monkeypatch.setattr(compiled, "run", lambda name, *given: asked.append(name) or run(name, *given))
    for dtype, wanted in ((torch.float64, set()), (torch.float32, {"gate_forward", "gate_backward"})):
        x = torch.randn(20, 6, dtype=dtype, requires_grad=True)
        source = pieces.OwnTargets(x, x, torch.zeros(8, dtype=dtype))
        layers = nn.Sequential(Dice(8), nn.Linear(8, 1)).to(dtype)
        pieces.mlp(source, torch.randn(8, 18, dtype=dtype), list(layers)).sum().backward()
        assert set(asked) == wanted


@needs_code
@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("rows", [1, 4])
def test_threads_share_the_work(rows: int, threads: int) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        test_equals_torch(rows, 27, 0.4)
    finally:
        torch.set_num_threads(before)


@needs_code
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf, 1e30, -1e30])
def test_numbers_without_bounds(wrong: float) -> None:
    """What is no number stays none; no other entry is touched."""
    x, one, zero = torch.randn(2, 20), torch.ones(20), torch.zeros(20)
    x[0, 3] = wrong
    y, wanted = torch.empty(2, 20), x * torch.sigmoid(x)
    if wrong == -torch.inf:
        wanted[0, 3] = wrong  # where torch has -inf times 0; the sigmoid here is never 0
    call = ctypes.byref(Gate.of(x, one, zero, zero, None, 1.0))
    compiled.run("gate_forward", call, y.data_ptr())
    assert torch.allclose(y, wanted, atol=1e-5, equal_nan=True)


@needs_code
@pytest.mark.parametrize("at_end", [True, False])
@pytest.mark.parametrize("width", [1, 5, 16, 27])
def test_no_memory_of_others_is_touched(width: int, at_end: bool) -> None:
    fences: list[Fenced] = []

    def fenced(given: Tensor) -> Tensor:
        fences.append(Fenced(given, at_end))
        return fences[-1].held

    x, of_y, per_column = torch.randn(3, width), torch.randn(3, width), torch.randn(3, width)
    kept = (torch.rand(3, width) < 0.8).short()
    results = []
    for hold in (torch.clone, fenced):
        given = [hold(part) for part in (x, *per_column, kept)]
        call = ctypes.byref(Gate.of(*given, 1.25))
        y, grad, of_x = hold(torch.empty_like(x)), hold(of_y), hold(torch.empty_like(x))
        sums = [hold(torch.zeros(width)) for _ in range(3)]
        compiled.run("gate_forward", call, y.data_ptr())
        compiled.run("gate_backward", call, *map(compiled.address, (grad, of_x, *sums)))
        results.append([part.clone() for part in (y, of_x, *sums)])
    assert not any(part.isnan().any() for part in results[0])
    for got, want in zip(results[1], results[0], strict=True):
        assert torch.equal(got, want)
    for fence in fences:
        fence.protect()


@needs_code
@pytest.mark.parametrize("at_end", [True, False])
@pytest.mark.parametrize("count", [0, 1, 3, 4, 31, 32, 33, 63, 64, 65, 1003])
def test_dropout_keeps_what_torch_would_keep(count: int, at_end: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    dropout, before = Dropout(0.3), torch.get_num_threads()
    seed, least = torch.tensor([-(2**62) - 5]), dropout._dropped - 2**15
    fence = Fenced(torch.zeros(count + 1, dtype=torch.int16), at_end)
    kept = fence.held[1:] if at_end else fence.held[:-1]
    compiled.run("keep", seed.item() % 2**64, count, least, kept.data_ptr())
    drawn = []
    for threads, suits in ((1, True), (3, True), (1, False)):
        torch.set_num_threads(threads)
        monkeypatch.setattr(compiled, "suits", lambda *_, suits=suits: suits)
        torch.manual_seed(7)
        drawn.append(dropout.draw(torch.Size([count])))
        drawn.append(dropout.draw(torch.Size([count])))
    torch.set_num_threads(before)
    assert all(torch.equal(mask, drawn[at % 2]) for at, mask in enumerate(drawn))
    assert count < 30 or not torch.equal(*drawn[:2])
    assert all(mask.dtype == torch.int16 and set(mask.tolist()) <= {0, 1} for mask in drawn)
    fence.protect()


@needs_code
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("width", [1, 5, 16, 27])
@pytest.mark.parametrize("rows", [0, 1, 2, 70])
def test_dice_alone_equals_torch(monkeypatch: pytest.MonkeyPatch, rows: int, width: int, training: bool) -> None:
    """Values, all gradients, and what evaluation will norm with; also of every other column."""
    asked: list[str] = []
    run = compiled.run
    monkeypatch.setattr(compiled, "run", lambda name, *given: asked.append(name) or run(name, *given))
    torch.manual_seed(rows)
    drawn, slope, alpha = 2 + 3 * torch.randn(rows, 2 * width), torch.randn(rows, width), torch.randn(width)
    found = []
    for dtype, asks in ((torch.float32, 2), (torch.float64, 0)):
        asked.clear()
        dice = Dice(width).train(training)
        dice.alpha.data = alpha.clone()
        dice.to(dtype)
        x = drawn.to(dtype).requires_grad_()
        y = dice(x[:, ::2])
        gradients = torch.autograd.grad((y * slope.to(dtype)).sum(), [x, dice.alpha])
        assert len(asked) == asks
        found.append([y.detach(), *gradients, *dice.bn.buffers()])
    for got, want in zip(*found, strict=True):
        assert not want.numel() or (got - want).abs().max() <= 1e-5 * max(1.0, float(want.abs().max()))
