"""Dice and dropout in one pass give what torch gives, at every edge."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from ctr_pe.ops import native
from ctr_pe.ops.dice import dice, dice_backward
from ctr_pe.units import mlp_chunks
from ctr_pe.units.activations import Dice
from tests.support.comparing import calls, compare, needs_kernels, outcome, threads
from tests.support.fenced import Fenced


def drawn(rows: int, width: int, rate: float | None = None) -> tuple[list[Tensor], Tensor | None]:
    """x, factor, shift, alpha; and a mask of dropout."""
    torch.manual_seed(rows)
    kept = None if rate is None else (torch.rand(rows, width) >= rate).short()
    return [3 * torch.randn(rows, width), *torch.randn(3, width)], kept


@needs_kernels
@pytest.mark.parametrize("rate", [None, 0.4, 1.0])
@pytest.mark.parametrize("width", [1, 5, 16, 27, 64])
@pytest.mark.parametrize("rows", [0, 1, 3, 70])
def test_equals_the_reference(rows: int, width: int, rate: float | None) -> None:
    given, kept = drawn(rows, width, rate)

    def call(x: Tensor, factor: Tensor, shift: Tensor, alpha: Tensor) -> Tensor:
        return dice(x, factor, shift, alpha, kept=kept, kept_factor=1.25)

    compare("dice", call, *given)


@needs_kernels
@pytest.mark.parametrize("width", [1, 5, 27])
@pytest.mark.parametrize("rows", [2, 70])
def test_equals_the_reference_through_its_own_statistics(rows: int, width: int) -> None:
    (x, _, _, alpha), _ = drawn(rows, width)
    factor, mean = (x.var(0, unbiased=False) + 1e-9).rsqrt(), x.mean(0)
    shift = -mean * factor

    def call(x: Tensor, alpha: Tensor) -> Tensor:
        return dice(x, factor.to(x.dtype), shift.to(x.dtype), alpha, mean.to(x.dtype))

    compare("dice", call, x, alpha, tolerance=1e-4)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("width", [1, 5, 16, 27])
@pytest.mark.parametrize("rows", [0, 1, 2, 70])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equals_torch_s_batch_norm(dtype: torch.dtype, rows: int, width: int, training: bool) -> None:
    """Values, all gradients, and what evaluation will norm with; also of every other column."""
    torch.manual_seed(rows)
    x, alpha = 2 + 3 * torch.randn(rows, 2 * width, dtype=dtype), torch.randn(width, dtype=dtype)
    if rows == 2:
        x[0] = x[1] + 3  # two rows that are almost equal leave few digits
    ours, bn = Dice(width).to(dtype).train(training), nn.BatchNorm1d(width, 1e-9, 0.01, affine=False).double()

    def plain(x: Tensor, alpha: Tensor) -> Tensor:
        normed = bn.train(training and rows > 1)(x[:, ::2]) if rows else x[:, ::2]
        p = torch.sigmoid(normed)
        return p * x[:, ::2] + (1 - p) * alpha * x[:, ::2]

    def call(x: Tensor, alpha: Tensor) -> Tensor:
        return torch.func.functional_call(ours, {"alpha": alpha}, (x[:, ::2],))

    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    found, wanted = outcome(call, x, alpha), outcome(plain, x.double(), alpha.double())
    found, wanted = [*found, *ours.bn.buffers()], [*wanted, *bn.buffers()]
    for got, want in zip(found, wanted, strict=True):
        assert not want.numel() or (got - want).abs().max() <= tolerance * max(1.0, float(want.abs().max()))


def test_half_precision_is_computed_in_float32() -> None:
    given, _ = drawn(70, 5)
    unit = Dice(5)
    unit.alpha.data = given[3]
    y = unit(given[0].bfloat16())
    assert y.dtype == torch.bfloat16
    unit = Dice(5)
    unit.alpha.data = given[3]
    assert torch.equal(y, unit(given[0].bfloat16().float()).bfloat16())


@needs_kernels
@pytest.mark.parametrize("number", [1, 2, 5])
@pytest.mark.parametrize("rows", [1, 4])
def test_threads_share_the_work(rows: int, number: int) -> None:
    with threads(number):
        test_equals_the_reference(rows, 27, 0.4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_backward_by_itself_adds_up(dtype: torch.dtype) -> None:
    """Over two pieces of the rows."""
    given, kept = drawn(70, 5, 0.3)
    assert kept is not None
    x, factor, shift, alpha = (part.to(dtype) for part in given)
    grad = torch.randn(70, 5, dtype=dtype)
    first, second = (
        dice_backward(grad[piece], x[piece], factor, shift, alpha, kept[piece], 1.5)
        for piece in (slice(0, 20), slice(20, 70))
    )
    found = torch.cat([first[0], second[0]]), *(a + b for a, b in zip(first[1:], second[1:], strict=True))
    leaves = [part.requires_grad_() for part in (x, factor, shift, alpha)]
    wanted = torch.autograd.grad(dice(x, factor, shift, alpha, kept=kept, kept_factor=1.5), leaves, grad)
    for got, want in zip(found, wanted, strict=True):
        assert torch.allclose(got, want, atol=1e-4 if dtype == torch.float32 else 1e-12)


@needs_kernels
def test_a_score_in_pieces_uses_the_kernel() -> None:
    for dtype, wanted in ((torch.float64, set()), (torch.float32, {"dice", "dice_backward"})):
        x = torch.randn(20, 6, dtype=dtype, requires_grad=True)
        source = mlp_chunks.OwnTargets(x, x, torch.zeros(8, dtype=dtype))
        layers = nn.Sequential(Dice(8), nn.Linear(8, 1)).to(dtype)
        with calls() as seen:
            mlp_chunks.mlp(source, torch.randn(8, 18, dtype=dtype), list(layers)).sum().backward()
        assert set(seen) == wanted


@needs_kernels
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf, 1e30, -1e30])
def test_numbers_without_bounds(wrong: float) -> None:
    """NaN stays NaN; no other entry is touched."""
    x, one, zero = torch.randn(2, 20), torch.ones(20), torch.zeros(20)
    x[0, 3] = wrong
    wanted = x * torch.sigmoid(x)
    if wrong == -torch.inf:
        wanted[0, 3] = wrong  # where torch has -inf times 0; the sigmoid of the kernel is never 0
    assert torch.allclose(dice(x, one, zero, zero), wanted, atol=1e-5, equal_nan=True)


@needs_kernels
@pytest.mark.parametrize("at_end", [True, False])
@pytest.mark.parametrize("width", [1, 5, 16, 27])
def test_no_memory_of_others_is_touched(width: int, at_end: bool) -> None:
    fences: list[Fenced] = []

    def fenced(given: Tensor) -> Tensor:
        fences.append(Fenced(given, at_end))
        return fences[-1].held

    given, kept = drawn(3, width, 0.3)
    assert kept is not None
    of_y, results = torch.randn(3, width), []
    for hold in (torch.clone, fenced):
        x, *columns = map(hold, given)
        mask, y, grad, *into = map(hold, (kept, x * torch.nan, of_y, *(part * torch.nan for part in given)))
        native.call("dice", 3, width, x, *columns, mask, 1.25, y)
        native.call("dice_backward", 3, width, grad, x, *columns, mask, 1.25, *into)
        results.append([part.clone() for part in (y, *into)])
    assert not any(part.isnan().any() for part in results[0])
    for got, want in zip(results[1], results[0], strict=True):
        assert torch.equal(got, want)
    for fence in fences:
        fence.protect()


@needs_kernels
@pytest.mark.parametrize("which", range(4))
def test_shapes_that_do_not_match_are_refused(which: int) -> None:
    given, kept = drawn(6, 5, 0.3)
    if which < 3:
        given[which + 1] = torch.ones(4)
    else:
        kept = torch.ones(6, 5)
    x, factor, shift, alpha = given
    with pytest.raises(ValueError, match=r"does not match|kept .* int16"):
        dice(x, factor, shift, alpha, kept=kept)
