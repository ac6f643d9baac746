"""torch sees operators: opcheck, torch.compile, torch.export, vmap; and no derivative of a derivative."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from comparing import needs_kernels, outcome
from torch import Tensor

from ctr_pe.ops.contextual import contextual_attention, contextual_bias
from ctr_pe.ops.contextual import cpu as contextual
from ctr_pe.ops.dice import cpu as of_dice
from ctr_pe.ops.dice import dice
from ctr_pe.ops.dropout import cpu as of_dropout
from ctr_pe.ops.dropout import keep_mask
from ctr_pe.ops.rotation import cpu as rotation
from ctr_pe.ops.rotation import rotate_planes, rotate_rows
from ctr_pe.ops.time_decay import cpu as time_decay
from ctr_pe.ops.time_decay import time_decay_bias

pytestmark = needs_kernels
B, H, Q, L, D, P, T = 2, 3, 4, 6, 5, 4, 7
AGES = torch.randint(0, 10**6, (B, 1, Q)), torch.randint(0, 10**6, (B, 1, L))
KEPT, ALLOWED = (torch.rand(B, H, Q, L) < 0.7).short(), torch.ones(B, 1, Q, L).bool().tril(2)
ROWS = torch.tensor([3, 0, 3, 6])


@pytest.fixture(autouse=True)
def _vectors() -> None:
    """Whatever the vectors of this processor: registration is the same."""
    torch.manual_seed(0)


def leaf(*shape: int) -> Tensor:
    return torch.randn(shape, requires_grad=True)


def check(operator: Callable[..., object], *given: object) -> None:
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(operator, given, test_utils=tests)


@pytest.mark.parametrize("stepped", [False, True])
@pytest.mark.parametrize("gated", [False, True])
def test_contextual(gated: bool, stepped: bool) -> None:
    dim, steps = D if gated else P, leaf(B, H, L) if stepped else None
    learned = leaf(T, P), ALLOWED, *((leaf(P, D), leaf(P)) if gated else (None, None)), steps
    given = leaf(B, H, Q, L), leaf(B, H, Q, dim), *learned, -1.0, 0.5, True
    check(contextual.contextual_bias, *given)
    check(contextual._contextual_bias_backward, torch.randn(B, H, Q, L), *detached(given))
    given = leaf(B, Q, H, dim), leaf(B, L, H, dim), leaf(B, L, H, dim), *learned, KEPT, -1.0, 0.5, 0.7, 1.4
    check(contextual.contextual_attention, *given)
    grad, norms = torch.randn(B, Q, H, dim), contextual.contextual_attention(*detached(given))[1]
    check(contextual._contextual_attention_backward, grad, norms, *detached(given))


def detached(given: Sequence[object]) -> list[object]:
    return [x.detach() if isinstance(x, Tensor) else x for x in given]


def test_dice() -> None:
    x, factor, shift, alpha = leaf(6, 5), leaf(5), leaf(5), leaf(5)
    kept = (torch.rand(6, 5) < 0.7).short()
    check(of_dice.dice, x, factor, shift, alpha, None, None, 1.0)
    check(of_dice.dice, x, factor, shift, alpha, None, kept, 1.5)
    check(of_dice.dice, x, factor.detach(), shift.detach(), alpha, x.mean(0).detach(), None, 1.0)
    given = torch.randn(6, 5), *detached([x, factor, shift, alpha]), kept, 1.5
    check(of_dice._dice_gradients, *given)
    check(of_dice.dice_backward, *given, torch.zeros(6, 5), torch.zeros(3, 5))


def test_dropout() -> None:
    check(of_dropout.keep_mask, torch.tensor([5]), [3, 7], 100)


def test_rotation() -> None:
    for learns_angle in (False, True):
        scaled = leaf(2, 3, 4, 9), leaf(2, 1, 4, 4).detach().requires_grad_(learns_angle), leaf(4), [2, 3, 4]
        check(rotation.rotate_scaled, *scaled)
        check(rotation._rotate_scaled_backward, torch.randn(2, 3, 4, 9), *detached(scaled), learns_angle)
    rows = leaf(4, 9), ROWS, leaf(T, 9), leaf(T, 4)
    check(rotation.rotate_rows, *rows)
    check(rotation._rotate_rows_backward, torch.randn(4, 9), *detached(rows))


def test_time_decay() -> None:
    given = leaf(B, H, Q, L), leaf(H), leaf(H), leaf(32, H), *AGES, 60.0
    check(time_decay.time_decay, *given)
    check(time_decay._time_decay_backward, *detached([*given[:3], *AGES]), 60.0)


CALLS: dict[str, tuple[Callable[..., Tensor], tuple[tuple[int, ...], ...]]] = {
    "contextual_bias": (
        lambda s, q, e, w, b: contextual_bias(s, q, e, ALLOWED, (w, b), sign=-1.0),
        ((B, H, Q, L), (B, H, Q, D), (T, P), (P, D), (P,)),
    ),
    "contextual_attention": (
        lambda q, k, v, e: contextual_attention(q, k, v, e, ALLOWED, sign=1.0, product=0.5, dropout=(KEPT, 1.4)),
        ((B, Q, H, P), (B, L, H, P), (B, L, H, P), (T, P)),
    ),
    "dice": (dice, ((6, 5), (5,), (5,), (5,))),
    "time_decay": (
        lambda s, a, b, e: time_decay_bias(s, a, b, e, *AGES, 60.0),
        ((B, H, Q, L), (H,), (H,), (32, H)),
    ),
    "rotate_scaled": (rotate_planes, ((2, 3, 4, 9), (2, 1, 4, 4), (4,))),
    "rotate_rows": (lambda x, added, angles: rotate_rows(x, ROWS, added, angles), ((4, 9), (T, 9), (T, 4))),
}


@pytest.mark.parametrize("name", CALLS)
def test_is_one_operator_in_compiled_and_exported_graphs(name: str) -> None:
    call, shapes = CALLS[name]
    given = [torch.randn(shape) for shape in shapes]
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    for got, want in zip(outcome(compiled, *given), outcome(call, *given), strict=True):
        assert torch.allclose(got, want, atol=1e-5)

    class Serve(torch.nn.Module):
        def forward(self, *given: Tensor) -> Tensor:
            return call(*given)

    program = torch.export.export(Serve(), tuple(given))
    assert str(program.graph).count(f"torch.ops.ctr_pe.{name}.default") == 1
    assert torch.equal(program.module()(*given), call(*given))


def test_dropout_in_a_compiled_graph() -> None:
    compiled = torch.compile(lambda seed: keep_mask(seed, torch.Size([3, 7]), 0.3), backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(torch.tensor([5])), keep_mask(torch.tensor([5]), torch.Size([3, 7]), 0.3))


@pytest.mark.parametrize("name", CALLS)
def test_vmap(name: str) -> None:
    call, shapes = CALLS[name]
    given = [torch.randn(2, *shapes[0]), *(torch.randn(shape) for shape in shapes[1:])]
    mapped = torch.func.vmap(call, (0, *(None,) * (len(given) - 1)))(*given)
    for k in range(2):
        assert torch.allclose(mapped[k], call(given[0][k], *given[1:]), atol=1e-5)


@pytest.mark.parametrize("name", CALLS)
def test_a_second_derivative_is_refused(name: str) -> None:
    call, shapes = CALLS[name]
    given = [leaf(*shape) for shape in shapes]
    gradients = torch.autograd.grad(call(*given).square().sum(), given, create_graph=True)
    with pytest.raises(NotImplementedError, match="no derivative"):
        sum(gradient.square().sum() for gradient in gradients).backward()
