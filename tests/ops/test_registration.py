"""torch sees operators: opcheck, torch.compile, torch.export, vmap; and no derivative of a derivative."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from ctr_pe.ops.contextual import contextual_attention, contextual_bias
from ctr_pe.ops.contextual import cpu as contextual
from ctr_pe.ops.dice import dice, dice_cpu
from ctr_pe.ops.dropout import keep_mask, keep_mask_cpu
from ctr_pe.ops.time_decay import time_decay_bias, time_decay_cpu
from tests.support.comparing import needs_kernels, outcome

pytestmark = needs_kernels
B, H, Q, L, D, P, T = 2, 3, 4, 6, 5, 4, 7
AGES = torch.randint(0, 10**6, (B, 1, Q)), torch.randint(0, 10**6, (B, 1, L))
KEPT, ALLOWED = (torch.rand(B, H, Q, L) < 0.7).short(), torch.ones(B, 1, Q, L).bool().tril(2)
BACKWARD, SEED = torch.ops.ctr_pe, torch.tensor([3])


@pytest.fixture(autouse=True)
def _vectors() -> None:
    """Whatever the vectors of this processor: registration is the same."""
    torch.manual_seed(0)


def leaf(*shape: int) -> Tensor:
    return torch.randn(shape, requires_grad=True)


def check(operator: Callable[..., object], *given: object) -> None:
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(operator, given, test_utils=tests)


@pytest.mark.slow
@pytest.mark.parametrize("stepped", [False, True])
@pytest.mark.parametrize("gated", [False, True])
def test_contextual(gated: bool, stepped: bool) -> None:
    dim, steps = D if gated else P, leaf(B, H, L) if stepped else None
    learned = *((leaf(P, D), leaf(P)) if gated else (None, None)), leaf(T, P), steps, ALLOWED
    given = leaf(B, H, Q, L), leaf(B, H, Q, dim), *learned, True, -1.0, 0.5
    check(contextual.contextual_bias, *given)
    check(BACKWARD.contextual_bias_backward.default, torch.randn(B, H, Q, L), *detached(given))
    given = leaf(B, Q, H, dim), leaf(B, L, H, dim), leaf(B, L, H, dim), *learned, KEPT, -1.0, 0.5, 0.7, 1.4
    check(contextual.contextual_attention, *given)
    grad, norms = torch.randn(B, Q, H, dim), contextual.contextual_attention(*detached(given))[1]
    check(BACKWARD.contextual_attention_backward.default, grad, norms, *detached(given))


def detached(given: Sequence[object]) -> list[object]:
    return [x.detach() if isinstance(x, Tensor) else x for x in given]


def test_dice() -> None:
    x, factor, shift, alpha = leaf(6, 5), leaf(5), leaf(5), leaf(5)
    kept = (torch.rand(6, 5) < 0.7).short()
    check(dice_cpu, x, factor, shift, alpha, None, None, 1.0)
    check(dice_cpu, x, factor, shift, alpha, None, kept, 1.5)
    check(dice_cpu, x, factor.detach(), shift.detach(), alpha, x.mean(0).detach(), None, 1.0)
    for mean in (None, x.mean(0).detach()):
        given = torch.randn(6, 5), *detached([x, factor, shift, alpha]), mean, kept, 1.5
        check(BACKWARD.dice_backward.default, *given)


def test_dropout() -> None:
    check(keep_mask_cpu, torch.tensor([5]), [3, 7], 100)


def test_time_decay() -> None:
    given = leaf(H), leaf(H), leaf(32, H), *AGES, 60.0
    check(time_decay_cpu, *given)
    check(BACKWARD.time_decay_backward.default, torch.randn(B, H, Q, L), *detached(given))


CALLS: dict[str, tuple[Callable[..., Tensor], tuple[tuple[int, ...], ...]]] = {
    "contextual_bias": (
        lambda s, q, e, w, b: contextual_bias(s, q, e, ALLOWED, (w, b), sign=-1.0) * ALLOWED,
        ((B, H, Q, L), (B, H, Q, D), (T, P), (P, D), (P,)),
    ),
    "contextual_attention": (
        lambda q, k, v, e: contextual_attention(q, k, v, e, ALLOWED, sign=1.0, product=0.5, dropout=(SEED, 0.3)),
        ((B, Q, H, P), (B, L, H, P), (B, L, H, P), (T, P)),
    ),
    "dice": (dice, ((6, 5), (5,), (5,), (5,))),
    "time_decay": (
        lambda s, a, b, e: time_decay_bias(s, a, b, e, *AGES, 60.0),
        ((B, H, Q, L), (H,), (H,), (32, H)),
    ),
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
