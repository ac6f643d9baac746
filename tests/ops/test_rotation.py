"""Planes are rotated by the kernel as the reference rotates them, gradients too, at every edge."""

from __future__ import annotations

import math

import pytest
import torch
from comparing import calls, compare, needs_kernels, threads
from fenced import Fenced
from torch import Tensor

from ctr_pe.ops import native
from ctr_pe.ops.rotation import cpu, rotate_planes, rotate_rows

SHAPES = [  # leading axes of vectors, and of their angles
    ((5,), (5,)),  # packed items
    ((5,), (1,)),  # targets
    ((3, 4, 5), (1, 1, 5)),  # heads of items, by distance
    ((3, 4, 5), (3, 1, 5)),  # by time
    ((3, 4, 5), (5,)),
    ((2, 3, 4, 5), (1, 3, 1, 5)),  # shared, own, shared, own
    ((0, 4, 5), (1, 1, 5)),
    ((1,), (1,)),
    ((), ()),
]


@needs_kernels
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("width", [2, 3, 8, 32, 33, 71])
@pytest.mark.parametrize(("leading", "of_angles"), SHAPES)
def test_scaled_phases_equal_the_reference(
    leading: tuple[int, ...], of_angles: tuple[int, ...], width: int, interleaved: bool
) -> None:
    torch.manual_seed(width)
    given = torch.randn(*leading, width), torch.randn(*of_angles, width // 2), torch.randn(width // 2)
    compare("rotate", lambda *x: rotate_planes(*x, interleaved=interleaved), *given)


@needs_kernels
def test_one_scale_and_one_angle_for_all_planes() -> None:
    torch.manual_seed(0)
    compare("rotate", rotate_planes, torch.randn(3, 4, 9), torch.randn(1, 1, 1), torch.randn(1))


@needs_kernels
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("width", [2, 7, 32, 72])
@pytest.mark.parametrize("rows", [(4, 6), (6,), (1,)])
def test_rows_of_tables_equal_the_reference(rows: tuple[int, ...], width: int, interleaved: bool) -> None:
    """The last row is nobody's."""
    torch.manual_seed(width)
    index = torch.randint(0, 8, rows)
    given = torch.randn(4, 6, width), torch.randn(9, width), torch.randn(9, width // 2)
    compare("rotate", lambda x, *tables: rotate_rows(x, index, *tables, interleaved=interleaved), *given)


@needs_kernels
@pytest.mark.parametrize("number", [1, 2, 5])
@pytest.mark.parametrize("rows", [1, 3])
def test_threads_share_the_work(rows: int, number: int) -> None:
    with threads(number):
        test_scaled_phases_equal_the_reference((rows, 2, 5), (rows, 1, 5), 9, interleaved=False)
        test_rows_of_tables_equal_the_reference((6,), 7, interleaved=False)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("size", [1.0, 10.0, 1e3, 1e5, 1e7])
def test_angles_of_any_size(size: float, scaled: bool) -> None:
    angle = torch.linspace(-size, size, 4001).unsqueeze(-1)
    scale = torch.ones(1) if scaled else None
    rotated = rotate_planes(torch.tensor([1.0, 0.0]).expand(4001, 2), angle, scale)
    assert (rotated - torch.cat((angle.double().cos(), angle.double().sin()), -1)).abs().max() < 2e-7


def test_phases_all_around() -> None:
    """Doubled, and those of the axes and of zero."""
    phase = torch.linspace(-math.pi, math.pi, 8001, dtype=torch.float64)[1:-1].unsqueeze(-1)
    for size in (1e-30, 1e-3, 1.0, 1e18):
        vectors = size * torch.cat((phase.cos(), phase.sin()), -1).float()
        doubled = rotate_planes(vectors, torch.zeros(1), torch.full((1,), 2.0)).double() / size
        assert (doubled - torch.cat(((2 * phase).cos(), (2 * phase).sin()), -1)).abs().max() < 1e-6
    axes = torch.tensor([[2.0, 0.0], [0.0, 2.0], [-2.0, 0.0], [-2.0, -0.0], [0.0, -2.0], [0.0, 0.0], [-3.0, 3.0]])
    wanted = rotate_planes(axes.double(), torch.zeros(1).double(), torch.full((1,), 0.5).double())
    assert torch.allclose(rotate_planes(axes, torch.zeros(1), torch.full((1,), 0.5)).double(), wanted, atol=1e-6)


@pytest.mark.parametrize("size", [0.0, 1e-40, 1e-20])
def test_gradients_at_zero_are_finite(size: float) -> None:
    x, scale = torch.full((3, 8), size, requires_grad=True), torch.full((4,), 1.5, requires_grad=True)
    gradients = torch.autograd.grad(rotate_planes(x, torch.ones(4), scale).sum(), [x, scale])
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert gradients[0].norm() > 1


@needs_kernels
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_nan_stays_nan_and_stays_alone(wrong: float) -> None:
    x = torch.randn(4, 32)
    x[1, 3] = wrong
    rotated = rotate_planes(x, torch.ones(4, 16), torch.full((16,), 1.5))
    bad = ~rotated.isfinite()
    assert bad.nonzero().tolist() in ([[1, 3], [1, 19]], [[1, 3]], [[1, 19]])


def test_what_the_kernel_does_not_take() -> None:
    with calls() as seen:
        assert rotate_planes(torch.randn(2, 8), torch.randn(2, 4)).shape == (2, 8)  # torch is as fast
        assert rotate_planes(torch.randn(2, 8).double(), torch.randn(2, 4).double()).dtype == torch.float64
        assert rotate_planes(torch.randn(2, 1), torch.randn(2, 0), torch.randn(0)).shape == (2, 1)
    assert not seen
    half = rotate_planes(torch.ones(2, 8).bfloat16(), torch.zeros(2, 4), torch.ones(4))
    assert half.dtype == torch.bfloat16


@needs_kernels
@pytest.mark.parametrize("row", [-1, 9])
def test_rows_that_are_not_there_are_refused(row: int) -> None:
    with pytest.raises(IndexError, match=f"{row}.* of a table of 9"):
        rotate_rows(torch.randn(2, 4), torch.tensor([3, row]), torch.randn(9, 4), torch.randn(9, 2))


@needs_kernels
@pytest.mark.parametrize("at_end", [True, False])
@pytest.mark.parametrize("indexed", [True, False])
@pytest.mark.parametrize("width", [2, 9, 32, 41])
def test_no_memory_of_others_is_touched(width: int, indexed: bool, at_end: bool) -> None:
    fences: list[Fenced] = []

    def fenced(given: Tensor) -> Tensor:
        fences.append(Fenced(given, at_end))
        return fences[-1].held

    torch.manual_seed(0)
    axes, planes, results = (6, 1, 1) if indexed else (2, 3, 4), width // 2, []
    x, grads = torch.randn(2, math.prod(axes), width)
    tables: list[Tensor | None] = [torch.randn(8, planes), None if indexed else torch.randn(planes)]
    tables += [torch.randn(8, width), torch.randint(0, 8, (6,))] if indexed else [None, None]
    for hold in (torch.clone, fenced):
        vectors, *given = (None if part is None else hold(part) for part in (x, *tables))
        y, grad, of_x = map(hold, (x * torch.nan, grads, x * torch.nan))
        into = [None if part is None else hold(part * torch.nan) for part in tables[:3]]
        native.call("rotate", *axes, width, vectors, *given, y)
        native.call("rotate_backward", *axes, width, 8, grad, vectors, *given, of_x, *into)
        results.append([part.clone() for part in (y, of_x, *into) if part is not None])
    assert not any(part.isnan().any() for part in results[0])
    assert all(torch.equal(got, want) for got, want in zip(*results, strict=True))
    for fence in fences:
        fence.protect()


def test_which_axes_share_angles() -> None:
    def sizes(leading: tuple[int, ...], of_angles: tuple[int, ...]) -> list[int]:
        axes = cpu.shared_axes(torch.empty(*leading, 2), torch.empty(*of_angles, 1))
        assert axes is not None
        return axes.sizes

    assert sizes((3, 4, 5), (3, 1, 5)) == [3, 4, 5]
    assert sizes((3, 4, 5), (1, 1, 5)) == [1, 12, 5]
    assert sizes((3, 4, 5), (3, 4, 5)) == [60, 1, 1]
    assert sizes((3, 4, 5), (1, 1, 1)) == [1, 60, 1]
    assert sizes((3, 1, 5), (3, 1, 1)) == [3, 5, 1]
    assert sizes((3, 4, 5), (1, 4, 1)) == [60, 1, 1]  # they lie apart: each vector gets its own
    assert sizes((), ()) == [1, 1, 1]
    assert cpu.shared_axes(torch.empty(3, 1), torch.empty(3, 0)) is None
    assert cpu.shared_axes(torch.empty(1, 4), torch.empty(3, 2)) is None
