"""Losses of next-item models against their definitions, in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from ctr_pe.models.item_losses import (
    binary_loss,
    draw_items,
    gbce_beta,
    sampled_softmax_loss,
    sampling_weights,
)
from ctr_pe.ops.linear_cross_entropy import linear_cross_entropy

P, V, D = 23, 17, 5


def operands(dtype: torch.dtype = torch.float64, scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    states, items = (torch.randn(n, D, generator=draw, dtype=torch.float64) * scale for n in (P, V))
    states, items = (x.to(dtype).requires_grad_() for x in (states, items))
    return states, items, torch.randint(V, (P,), generator=draw)


@pytest.mark.parametrize("rows", [1, 4, 23, 100])
@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_linear_cross_entropy_is_the_plain_one(rows: int, scale: float) -> None:
    states, items, answers = operands(scale=scale)
    plain = cross_entropy(states @ items.T, answers)
    wanted = torch.autograd.grad(3 * plain, (states, items))
    loss = linear_cross_entropy(states, items, answers, rows)
    torch.testing.assert_close(loss, plain, rtol=1e-12, atol=0)
    for _ in range(2):  # a second backward gives the same
        found = torch.autograd.grad(3 * loss, (states, items), retain_graph=True)
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-13)


def test_linear_cross_entropy_of_part() -> None:
    states, items, answers = operands()
    (of_states,) = torch.autograd.grad(linear_cross_entropy(states, items.detach(), answers, 4), states)
    (of_items,) = torch.autograd.grad(linear_cross_entropy(states.detach(), items, answers, 4), items)
    wanted = torch.autograd.grad(cross_entropy(states @ items.T, answers), (states, items))
    torch.testing.assert_close((of_states, of_items), wanted)
    with torch.no_grad():
        torch.testing.assert_close(
            linear_cross_entropy(states, items, answers), cross_entropy(states @ items.T, answers)
        )
    assert linear_cross_entropy(states[:0], items, answers[:0]) == 0


def test_linear_cross_entropy_in_half_precision_is_computed_in_float32() -> None:
    states, items, answers = operands(torch.bfloat16)
    loss = linear_cross_entropy(states, items, answers)
    loss.backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(loss, cross_entropy(states.float() @ items.float().T, answers))
    assert states.grad is not None
    assert states.grad.dtype == torch.bfloat16


def test_logits_of_all_items_are_never_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    plain = torch.mm

    def counting(*given: Any, **named: Any) -> Tensor:
        found = plain(*given, **named)
        made.append(found.numel())
        return found

    monkeypatch.setattr(torch, "mm", counting)
    states, items, answers = operands()
    linear_cross_entropy(states, items, answers, 4).backward()  # type: ignore[no-untyped-call]
    assert max(made) <= max(4 * V, P * D)


@pytest.mark.parametrize("negatives", ["uniform", "popularity"])
def test_sampled_softmax_is_the_full_one_in_the_mean(negatives: Any) -> None:
    states, items, answers = operands()
    weights = sampling_weights(negatives, torch.arange(V))
    drawn = draw_items((200_000,), V, weights, torch.Generator().manual_seed(1))
    loss = sampled_softmax_loss(states, lambda numbers: items[numbers], answers, drawn, weights, V)
    torch.testing.assert_close(loss, cross_entropy(states @ items.T, answers), rtol=0.01, atol=0)


def test_a_drawn_item_that_is_the_answer_does_not_count() -> None:
    states, items, answers = operands()
    drawn = torch.randint(V, (30,), generator=torch.Generator().manual_seed(3))
    losses = []
    for state, answer in zip(states, answers, strict=True):
        kept = torch.cat([answer.view(1), drawn[drawn != answer]])
        logits = items[kept] @ state - torch.cat([torch.zeros(1), torch.full((len(kept) - 1,), math.log(30 / V))])
        losses.append(logits.logsumexp(0) - logits[0])
    found = sampled_softmax_loss(states, lambda numbers: items[numbers], answers, drawn, None, V)
    torch.testing.assert_close(found, torch.stack(losses).mean())
    assert (drawn == answers.unsqueeze(1)).any()


def test_popular_items_are_drawn_as_often_as_they_are_answers() -> None:
    weights = sampling_weights("popularity", torch.tensor([0.0, 9.0, 89.0]))
    drawn = draw_items((50_000,), 3, weights, torch.Generator().manual_seed(0))
    share = drawn.bincount(minlength=3) / len(drawn)
    torch.testing.assert_close(share, torch.tensor([0.01, 0.1, 0.9]) / 1.01, rtol=0.05, atol=0.002)


@pytest.mark.parametrize("beta", [1.0, 0.3])
def test_binary_losses(beta: float) -> None:
    """gBCE raises the probability of the answer to the power β; a drawn answer does not count."""
    states, items, answers = operands()
    drawn = torch.randint(V, (P, 6), generator=torch.Generator().manual_seed(2))
    scores = (states.unsqueeze(1) * items[drawn]).sum(-1)
    others = binary_cross_entropy_with_logits(scores, torch.zeros_like(scores), reduction="none")
    right = -(torch.sigmoid((states * items[answers]).sum(-1)) ** beta).log()
    wanted = (right + (others * (drawn != answers.unsqueeze(1))).sum(1)).mean() / 7
    found = binary_loss(states, lambda numbers: items[numbers], answers, drawn, beta)
    torch.testing.assert_close(found, wanted)


def test_beta_of_gbce() -> None:
    """Equation 10 of the paper: t = 0 is binary cross-entropy, t = 1 takes the share of drawn items."""
    assert gbce_beta(16, 101, 0.0) == pytest.approx(1)
    assert gbce_beta(16, 101, 1.0) == pytest.approx(0.16)
    assert gbce_beta(16, 101, 0.75) == pytest.approx(0.16 * (0.75 * (1 - 1 / 0.16) + 1 / 0.16))
