"""Planes turned by the compiled code are turned as torch turns them, gradients too, at every edge."""

from __future__ import annotations

import ctypes
import math

import pytest
import torch
from comparing import compare, needs_code
from fenced import Fenced
from torch import Tensor

from ctr_pe import Positions, build_pe, compiled
from ctr_pe.pe import turning
from ctr_pe.units import SelfAttention

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


@needs_code
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("width", [2, 3, 8, 32, 33, 71])
@pytest.mark.parametrize(("leading", "of_angles"), SHAPES)
def test_equals_torch(
    monkeypatch: pytest.MonkeyPatch, leading: tuple[int, ...], of_angles: tuple[int, ...], width: int, scaled: bool
) -> None:
    torch.manual_seed(width)
    vectors, angle, scale = torch.randn(*leading, width), torch.randn(*of_angles, width // 2), torch.randn(width // 2)
    if not leading:
        vectors, angle = torch.randn(width), torch.randn(width // 2)
    compare(monkeypatch, "turn", 1, turning.turn, vectors, angle, *([scale] if scaled else []))


@needs_code
def test_one_scale_and_one_angle_for_all_planes(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    compare(monkeypatch, "turn", 1, turning.turn, torch.randn(3, 4, 9), torch.randn(1, 1, 1), torch.randn(1))


@needs_code
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("width", [2, 7, 32, 72])
@pytest.mark.parametrize("rows", [(4, 6), (6,), (1,)])
def test_rows_of_tables(monkeypatch: pytest.MonkeyPatch, rows: tuple[int, ...], width: int, interleaved: bool) -> None:
    """The last row is nobody's."""
    torch.manual_seed(width)
    vectors, added, angles = torch.randn(4, 6, width), torch.randn(9, width), torch.randn(9, width // 2)
    index = torch.randint(0, 8, rows)

    def call(*given: Tensor) -> Tensor:
        return turning.turned_rows(given[0], index, *given[1:], interleaved)

    compare(monkeypatch, "turn", 1, call, vectors, added, angles)


@needs_code
@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("rows", [1, 3])
def test_threads_share_the_work(monkeypatch: pytest.MonkeyPatch, rows: int, threads: int) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        with monkeypatch.context() as patch:
            test_equals_torch(patch, (rows, 2, 5), (rows, 1, 5), 9, scaled=True)
        with monkeypatch.context() as patch:
            test_equals_torch(patch, (rows, 2, 5), (rows, 1, 5), 9, scaled=False)
        test_rows_of_tables(monkeypatch, (6,), 7, interleaved=False)
    finally:
        torch.set_num_threads(before)


@needs_code
@pytest.mark.parametrize("size", [1.0, 10.0, 1e3, 1e5, 1e7])
def test_angles_of_any_size(size: float) -> None:
    angle = torch.linspace(-size, size, 4001).unsqueeze(-1)
    moved = turning.turn(torch.tensor([1.0, 0.0]).expand(4001, 2), angle)
    assert (moved - torch.cat((angle.double().cos(), angle.double().sin()), -1)).abs().max() < 2e-7


@needs_code
def test_phases_all_around() -> None:
    """Doubled, and those of the axes and of nothing."""
    phase = torch.linspace(-math.pi, math.pi, 8001, dtype=torch.float64)[1:-1].unsqueeze(-1)
    for size in (1e-30, 1e-3, 1.0, 1e18):
        vectors = size * torch.cat((phase.cos(), phase.sin()), -1).float()
        doubled = turning.turn(vectors, torch.zeros(1), torch.full((1,), 2.0)).double() / size
        assert (doubled - torch.cat(((2 * phase).cos(), (2 * phase).sin()), -1)).abs().max() < 1e-6
    axes = torch.tensor([[2.0, 0.0], [0.0, 2.0], [-2.0, 0.0], [-2.0, -0.0], [0.0, -2.0], [0.0, 0.0], [-3.0, 3.0]])
    wanted = turning.turn(axes.double(), torch.zeros(1).double(), torch.full((1,), 0.5).double())
    assert torch.allclose(turning.turn(axes, torch.zeros(1), torch.full((1,), 0.5)).double(), wanted, atol=1e-6)


@needs_code
@pytest.mark.parametrize("size", [0.0, 1e-40, 1e-20])
def test_gradients_at_nothing_are_finite(size: float) -> None:
    x, scale = torch.full((3, 8), size, requires_grad=True), torch.full((4,), 1.5, requires_grad=True)
    gradients = torch.autograd.grad(turning.turn(x, torch.ones(4), scale).sum(), [x, scale])
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert gradients[0].norm() > 1


@needs_code
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_what_is_no_number_stays_none_and_stays_alone(wrong: float) -> None:
    x = torch.randn(4, 32)
    x[1, 3] = wrong
    moved = turning.turn(x, torch.ones(4, 16), torch.full((16,), 1.5))
    bad = ~moved.isfinite()
    assert bad.nonzero().tolist() in ([[1, 3], [1, 19]], [[1, 3]], [[1, 19]])


@needs_code
def test_only_float32_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "run", lambda *_: pytest.fail("asked"))
    assert turning.turn(torch.randn(2, 8).double(), torch.randn(2, 4).double()).dtype == torch.float64
    assert turning.turn(torch.randn(2, 1), torch.randn(2, 0)).shape == (2, 1)


@needs_code
@pytest.mark.parametrize("at_end", [True, False])
@pytest.mark.parametrize("indexed", [True, False])
@pytest.mark.parametrize("width", [2, 9, 32, 41])
def test_no_memory_of_others_is_touched(width: int, indexed: bool, at_end: bool) -> None:
    fences: list[Fenced] = []

    def fenced(given: Tensor) -> Tensor:
        fences.append(Fenced(given, at_end))
        return fences[-1].held

    torch.manual_seed(0)
    planes, axes = width // 2, (6, 1, 1) if indexed else (2, 3, 4)
    count = math.prod(axes)
    x, grads, angle = torch.randn(count, width), torch.randn(count, width), torch.randn(8, planes)
    added, index = torch.randn(8, width), torch.randint(0, 8, (6,))
    for scale in (None, torch.randn(planes)):
        results = []
        for hold in (torch.clone, fenced):
            others = (added, index) if indexed else (None, None)
            given = [None if part is None else hold(part) for part in (x, angle, scale, *others)]
            call = turning._Given(*axes, width, *map(compiled.address, given))
            y, grad, of_x, of_angle = (hold(part) for part in (x * torch.nan, grads, x * torch.nan, angle * 0))
            of_scale, of_added = hold(torch.zeros(turning._padded(planes))), hold(added * 0)
            room = hold(torch.zeros(2 * axes[2] * turning._padded(planes)))
            before = torch.get_num_threads()
            torch.set_num_threads(1)
            compiled.run("turn_forward", ctypes.byref(call), y.data_ptr(), room.data_ptr())
            sums = [of_angle, of_scale if scale is not None else None, of_added if indexed else None]
            into = turning._Gradients(*map(compiled.address, (of_x, *sums)))
            compiled.run("turn_backward", ctypes.byref(call), grad.data_ptr(), ctypes.byref(into), room.data_ptr())
            torch.set_num_threads(before)
            results.append([part.clone() for part in (y, of_x, of_angle, of_scale, of_added)])
        assert not any(part.isnan().any() for part in results[0])
        assert all(torch.equal(got, want) for got, want in zip(*results, strict=True))
    for fence in fences:
        fence.protect()


@needs_code
@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("name", ["rope", "time_rope", "euler"])
def test_attention_asks_it(monkeypatch: pytest.MonkeyPatch, name: str, layout: str) -> None:
    """Each of its blocks: histories of all lengths, one of them empty."""
    lengths = [7, 0, 1, 30, 2, 11, 3]
    torch.manual_seed(0)
    mask = torch.arange(33) < torch.tensor(lengths)[:, None]
    positions = Positions.from_mask(mask, torch.randint(0, 10**6, mask.shape).sort(1, descending=True)[0])
    unit = SelfAttention(12, 2, build_pe(name, 12, 8, 2, **{f"{name.removeprefix('time_')}_layout": layout}))
    asked: list[str] = []
    run = compiled.run
    monkeypatch.setattr(compiled, "run", lambda what, *rest: asked.append(what) or run(what, *rest))
    found = []
    items = torch.randn(7, 33, 12, dtype=torch.float64)
    for dtype in (torch.float32, torch.float64):
        unit.to(dtype)
        given = items.to(dtype).requires_grad_()
        _, embedded = unit.pe.embed(None, given, positions)
        states = unit(embedded, positions)
        learned = [parameter for parameter in unit.parameters() if parameter.requires_grad]
        found.append([states.detach(), *torch.autograd.grad(states.square().sum(), [given, *learned])])
    blocks = len(positions.blocks)
    assert blocks > 1
    assert asked.count("turn_forward") == asked.count("turn_backward") == 2 * blocks + (name == "euler")
    for got, want in zip(*found, strict=True):
        assert (got - want).abs().max() <= 1e-5 * max(1.0, float(want.abs().max()))


def test_which_axes_share_angles() -> None:
    assert turning._axes((3, 4, 5), (3, 1, 5)) == (3, 4, 5)
    assert turning._axes((3, 4, 5), (1, 1, 5)) == (1, 12, 5)
    assert turning._axes((3, 4, 5), (3, 4, 5)) == (60, 1, 1)
    assert turning._axes((3, 4, 5), (1, 1, 1)) == (1, 60, 1)
    assert turning._axes((3, 1, 5), (3, 1, 1)) == (3, 5, 1)
    assert turning._axes((3, 4, 5), (1, 4, 1)) is None
    assert turning._axes((), ()) == (1, 1, 1)
