"""Score functions of target attention: how well does each history item match the target?

All of them see real (target, item) pairs only, packed one after the other, so their cost follows the real lengths of
the histories and their batch statistics see no padding.

B batch, N real pairs of the batch, D item dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from ctr_pe.units import pieces
from ctr_pe.units.activations import make_activation
from ctr_pe.units.dropout import Dropout


class DotScore(nn.Module):
    """t · h / sqrt(D), or t · h with ``scaled=False`` (as DIEN has it)."""

    def __init__(self, dim: int, scaled: bool = True) -> None:
        super().__init__()
        self.scale = dim**-0.5 if scaled else 1.0

    def forward(self, target: Tensor, items: Tensor, rows: Tensor) -> Tensor:
        """target (B, D), items (N, D), rows (N,) the row of each item -> logits (N,)."""
        return _dot(target, items, rows) * self.scale


class BilinearScore(nn.Module):
    """hᵀ W t. Parameter ``weight (D, D)``, the identity at the start."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(dim))

    def forward(self, target: Tensor, items: Tensor, rows: Tensor) -> Tensor:
        """target (B, D), items (N, D), rows (N,) -> logits (N,)."""
        return _dot(self.project(target), items, rows)

    def project(self, target: Tensor) -> Tensor:
        """(..., D) -> W t (..., D), which items are multiplied with."""
        return target @ self.weight.T


class DINScore(nn.Module):
    """MLP on [t; h; t - h; t ⊙ h] (DIN, Zhou et al. 2018, with the input of FuxiCTR's implementation).

    Args:
        dim: item dim D.
        hidden_units: widths of the hidden layers.
        activation: ``dice``, ``prelu``, or the name of an activation of ``torch.nn`` such as ``ReLU``.
        dropout: rate after each hidden layer.
        output_activation: the same names, after the last layer; None for none.

    ``mlp`` has FuxiCTR's layers and parameter names, so weights move between the two. On a CPU it is computed in pieces
    (:mod:`ctr_pe.units.pieces`), and forward hooks of its layers are not called.

    Raises:
        ValueError: no hidden layer.
        UserError: an unknown activation.
    """

    def __init__(
        self,
        dim: int,
        hidden_units: Sequence[int] = (64, 32),
        activation: str = "dice",
        dropout: float = 0.0,
        output_activation: str | None = None,
    ) -> None:
        super().__init__()
        if not hidden_units:
            raise ValueError("the DIN score needs at least one hidden layer")
        layers: list[nn.Module] = []
        width = 4 * dim
        for units in hidden_units:
            layers += [nn.Linear(width, units), make_activation(activation, units)]
            if dropout > 0:
                layers.append(Dropout(dropout))
            width = units
        layers.append(nn.Linear(width, 1))
        if output_activation is not None:
            layers.append(make_activation(output_activation, 1))
        self.mlp = nn.Sequential(*layers)

    def forward(self, target: Tensor, items: Tensor, rows: Tensor | None) -> Tensor:
        """target (B, D), items (N, D), rows (N,) -> logits (N,). Without rows there is a target per item, (N, D)."""
        first, *rest = self.mlp
        assert isinstance(first, nn.Linear)
        # The first layer, split by term: what depends on the target alone is computed per row, not per pair.
        of_target, of_item, of_difference, of_product = first.weight.chunk(4, dim=1)
        of_target, of_item = of_target + of_difference, of_item - of_difference
        if pieces.supports(rest, items):
            if rows is None:
                own = pieces.OwnTargets(items, target, first.bias)
                return pieces.mlp(own, torch.cat([of_target, of_item, of_product], 1), rest).squeeze(-1)
            per_row = nn.functional.linear(target, of_target, first.bias)
            shared = pieces.SharedTargets(items, target, per_row, rows)
            return pieces.mlp(shared, torch.cat([of_item, of_product], 1), rest).squeeze(-1)
        per_pair = nn.functional.linear(target, of_target, first.bias)
        if rows is not None:
            target, per_pair = target[rows], per_pair[rows]
        hidden = torch.addmm(per_pair, items, of_item.T)
        hidden = torch.addmm(hidden, target * items, of_product.T)
        for layer in rest:
            hidden = layer(hidden)
        return hidden.squeeze(-1)


SCORES: dict[str, Callable[[int], nn.Module]] = {"dot": DotScore, "bilinear": BilinearScore, "din": DINScore}


def _dot(target: Tensor, items: Tensor, rows: Tensor) -> Tensor:
    # As a look-up: the gradient of target[rows] adds up one row after the other.
    return (nn.functional.embedding(rows, target) * items).sum(-1)
