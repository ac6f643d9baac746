"""Units on padded positions: one graph for torch.compile, and torch.func with masks of their own for each request."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle, product

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, vmap

from ctr_pe.sequence.dense import Dense
from ctr_pe.sequence.positions import Items, Positions
from ctr_pe.units import SelfAttention, TargetAttention
from ctr_pe.units.gru import GATES, GRU, AttentionGRU, last_state
from tests.support.encoding_cases import CASES, NAMES, VARIANTS, factory

B, L, D, K = 3, 7, 8, 4
MASK = torch.arange(L) >= L - torch.tensor([7, 2, 0]).unsqueeze(1)
AGE = torch.arange(L, 0, -1).mul(86_399).add(7).expand(B, L)
IDS = torch.arange(L) % 3 + 1
Call = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def made(case: str, unit: str) -> Call:
    """targets (R, D), histories (R, L, D), masks and ages (R, L) -> (R, any)."""
    torch.manual_seed(0)
    pe = factory(case)(D, 6, 2 if unit == "self" else 1)
    built = SelfAttention(D, 2, pe, causal=True) if unit == "self" else TargetAttention(pe.out_dim, "din", pe)
    for parameter in built.eval().parameters():
        nn.init.normal_(parameter, std=0.3)

    def call(target: Tensor, history: Tensor, mask: Tensor, age: Tensor) -> Tensor:
        at = Dense.from_mask(mask, age)
        ids = IDS.expand(len(mask), L)
        items = Items(at.pack(history), (at.pack(ids),))
        if isinstance(built, SelfAttention):
            found = built(pe.embed(None, items.embedding, at)[1], at, at.item_pairs(True, items))
        else:
            pairs = at.target_pairs(items, Items(target, (ids[:, 0],)))
            found = built(*pe.embed(target, items.embedding, at), at, pairs)[0]
        return found.view(len(mask), -1)

    return call


def drawn() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return torch.randn(B, D), torch.randn(B, L, D) * MASK.unsqueeze(-1), MASK, AGE


def compiled_in_one_graph(case: str, unit: str, backend: str) -> None:
    torch._dynamo.reset()
    call, given = made(case, unit), drawn()
    found = torch.compile(call, backend=backend, fullgraph=True)(*given)
    real = MASK.unsqueeze(-1).expand(B, L, D).flatten(1) if unit == "self" else torch.ones_like(found)
    torch.testing.assert_close(found * real, call(*given) * real, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("unit", ["target", pytest.param("self", marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", ["cape"])
def test_compiles_to_one_graph(case: str, unit: str) -> None:
    compiled_in_one_graph(case, unit, "aot_eager")


UNITS = ("target", "self")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "unit"),
    [*product(NAMES, UNITS), *zip(VARIANTS, cycle(UNITS), strict=False)],  # options in one unit: compiling takes long
)
def test_every_encoding_compiles_to_one_graph(case: str, unit: str) -> None:
    compiled_in_one_graph(case, unit, "eager")  # what may break a graph is found before a backend sees it


@pytest.mark.parametrize("unit", ["target", "self"])
@pytest.mark.parametrize("case", CASES)
def test_transforms_with_a_mask_per_request(case: str, unit: str) -> None:
    call, (target, history, mask, age) = made(case, unit), drawn()

    def one(target: Tensor, history: Tensor, mask: Tensor, age: Tensor) -> Tensor:
        return call(target[None], history[None], mask[None], age[None])[0]

    real = MASK.unsqueeze(-1).expand(B, L, D).flatten(1) if unit == "self" else torch.ones(1)
    found, wanted = vmap(one)(target, history, mask, age), call(target, history, mask, age)
    torch.testing.assert_close(found * real, wanted * real, rtol=1e-4, atol=1e-5)

    def loss(history: Tensor, target: Tensor, mask: Tensor, age: Tensor) -> Tensor:
        return (one(target, history, mask, age).tanh() * mask_of(mask)).sum()

    def mask_of(mask: Tensor) -> Tensor:
        return mask.unsqueeze(-1).expand(L, D).flatten() if unit == "self" else torch.ones(1)

    leaf = history.clone().requires_grad_()
    (wanted,) = torch.autograd.grad((call(target, leaf, mask, age).tanh() * real).sum(), leaf)
    per_row = vmap(grad(loss))(history, target, mask, age)
    real = MASK.unsqueeze(-1)
    torch.testing.assert_close(per_row * real, wanted * real, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("gate", [None, *GATES])
def test_recurrent_units(gate: str | None) -> None:
    """The states of real items, and the last one; K targets of one history."""
    torch.manual_seed(0)
    unit = (GRU(D, D) if gate is None else AttentionGRU(D, D, gate)).eval()
    history = torch.randn(B, L, D) * MASK.unsqueeze(-1)
    for shape in ((B, L), (B, L, K)):
        weights = torch.rand(shape)
        states = []
        for form in (Positions, Dense):
            at = form.from_mask(MASK)
            given = (at.pack(history), at) if gate is None else (at.pack(history), at.pack(weights), at)
            found = unit(*given)
            states.append((at.unpack(found), last_state(found, at)))
        for ragged, padded in zip(*states, strict=True):
            torch.testing.assert_close(padded, ragged, rtol=1e-5, atol=1e-6)
