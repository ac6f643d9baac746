"""Units and encodings under ``torch.func``: ``grad``, ``vmap`` over requests, their composition and ``jacrev``."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev, vmap

from ctr_pe import Positions, build_pe
from ctr_pe.units import DINScore, SelfAttention, TargetAttention

B, L, D = 3, 5, 8
ENCODINGS: tuple[str, ...] = (
    "none",
    "naive",
    "rope",
    "cape",
    "cope",
    "cape_additive",
    "cape_cosine",
    "cape_constant",
    "cape_time",
    "likeness",
    "euler",
    "time_rope",
    "time_bias",
)
ENCODINGS += ("dape", "kernel", "xlnet", "fox", "t5")
Call = Callable[[dict[str, Tensor], Tensor, Tensor], Tensor]


def made(name: str, unit: str) -> tuple[nn.Module, Call]:
    """A unit, and what it makes of its parameters, targets (R, D) and histories (R, L, D), one number each (R,)."""
    torch.manual_seed(0)
    heads = 2 if unit == "self" else 1
    pe = build_pe(name, D, L, heads)
    score = DINScore(D, (6,)) if unit == "din" else "dot"
    built = SelfAttention(D, heads, pe, causal=True) if unit == "self" else TargetAttention(D, score, pe)
    for parameter in built.eval().parameters():
        nn.init.normal_(parameter, std=0.3)
    age = torch.tensor([[90000, 4000, 700, 60, 5]])

    def call(parameters: dict[str, Tensor], target: Tensor, history: Tensor) -> Tensor:
        rows = len(history)
        positions = Positions.from_mask(torch.ones(rows, L, dtype=torch.bool), age.expand(rows, -1))
        given = (history, positions) if unit == "self" else (target, history, positions)
        found = functional_call(built, parameters, given)
        return (found if unit == "self" else found[0]).tanh().flatten(1).sum(1)

    return built, call


@pytest.mark.parametrize("unit", ["target", "din", "self"])
@pytest.mark.parametrize("name", ENCODINGS)
def test_transforms_equal_autograd_and_loops(name: str, unit: str) -> None:
    built, call = made(name, unit)
    parameters = {key: value.detach() for key, value in built.named_parameters()}
    target, history = torch.randn(B, D), torch.randn(B, L, D)

    leaves = {key: value.clone().requires_grad_() for key, value in parameters.items()}
    x, y = target.clone().requires_grad_(), history.clone().requires_grad_()
    inputs = [*leaves.values(), x, y]
    gradients = torch.autograd.grad(call(leaves, x, y).sum(), inputs, allow_unused=True)
    wanted = [torch.zeros_like(leaf) if own is None else own for own, leaf in zip(gradients, inputs, strict=True)]
    of_parameters, *of_inputs = grad(lambda *given: call(*given).sum(), (0, 1, 2))(parameters, target, history)
    torch.testing.assert_close([*of_parameters.values(), *of_inputs], wanted, rtol=1e-4, atol=1e-5)

    def one(parameters: dict[str, Tensor], target: Tensor, history: Tensor) -> Tensor:
        return call(parameters, target[None], history[None])[0]

    values = torch.stack([one(parameters, *row) for row in zip(target, history, strict=True)])
    torch.testing.assert_close(vmap(one, (None, 0, 0))(parameters, target, history), values, rtol=1e-4, atol=1e-5)
    per_row = vmap(grad(one), (None, 0, 0))(parameters, target, history)
    torch.testing.assert_close([own.sum(0) for own in per_row.values()], wanted[:-2], rtol=1e-4, atol=1e-5)
    jacobian = jacrev(call, 2)(parameters, target, history)
    torch.testing.assert_close(jacobian.sum(0), wanted[-1], rtol=1e-4, atol=1e-5)
