"""Score functions of target attention: how well does each history item match the target?

All of them see real (target, item) pairs only, packed one after the other, so their cost follows the real lengths of
the histories and their batch statistics see no padding. In evaluation one history may have K targets: ``candidates``.

B batch, K targets of one history, L slots, N real pairs of the batch, D item dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import ClassVar

import torch
from torch import Tensor, nn

from ctr_pe.ops import native
from ctr_pe.units import mlp_chunks
from ctr_pe.units.activations import make_activation
from ctr_pe.units.batch_norm import through
from ctr_pe.units.dropout import Dropout


class DotScore(nn.Module):
    """t · h / sqrt(D), or t · h with ``scaled=False`` (as DIEN has it)."""

    def __init__(self, dim: int, scaled: bool = True) -> None:
        super().__init__()
        self.scale = dim**-0.5 if scaled else 1.0

    def forward(self, target: Tensor, items: Tensor, rows: Tensor) -> Tensor:
        """target (B, D), items (N, D), rows (N,) the row of each item -> logits (N,)."""
        return _dot(target, items, rows) * self.scale

    def candidates(self, target: Tensor, items: Tensor) -> Tensor:
        """target (B, K, D), padded items (B, L, D) -> logits (B, K, L)."""
        return target * self.scale @ items.mT


class BilinearScore(nn.Module):
    """hᵀ W t. Parameter ``weight (D, D)``, the identity at the start."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(dim))

    def forward(self, target: Tensor, items: Tensor, rows: Tensor) -> Tensor:
        """target (B, D), items (N, D), rows (N,) -> logits (N,)."""
        return _dot(self.project(target), items, rows)

    def candidates(self, target: Tensor, items: Tensor) -> Tensor:
        """target (B, K, D), padded items (B, L, D) -> logits (B, K, L)."""
        return self.project(target) @ items.mT

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
    (:mod:`ctr_pe.units.mlp_chunks`), and forward hooks of its layers are not called.

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

    masked: ClassVar[bool] = True
    """Whether the items that there are can be told, which statistics over items are of."""

    def forward(self, target: Tensor, items: Tensor, rows: Tensor | None, real: Tensor | None = None) -> Tensor:
        """target (B, D), items (N, D), rows (N,) -> logits (N,). Without rows there is a target per item, (N, D).
        ``real`` (N,) bool: the items that there are, None for all."""
        first, *rest = self.mlp
        assert isinstance(first, nn.Linear)
        # The first layer, split by term: what depends on the target alone is computed per row, not per pair.
        of_target, of_item, of_difference, of_product = first.weight.chunk(4, dim=1)
        of_target, of_item = of_target + of_difference, of_item - of_difference
        if real is None and mlp_chunks.supports(rest, items):
            if rows is None:
                own = mlp_chunks.OwnTargets(items, target, first.bias)
                return mlp_chunks.mlp(own, torch.cat([of_target, of_item, of_product], 1), rest).squeeze(-1)
            per_row = nn.functional.linear(target, of_target, first.bias)
            shared = mlp_chunks.SharedTargets(items, target, per_row, rows)
            return mlp_chunks.mlp(shared, torch.cat([of_item, of_product], 1), rest).squeeze(-1)
        per_pair = nn.functional.linear(target, of_target, first.bias)
        if rows is not None:
            target, per_pair = _of_rows(target, rows), _of_rows(per_pair, rows)
        hidden = torch.addmm(per_pair, items, of_item.T)
        hidden = torch.addmm(hidden, target * items, of_product.T)
        return through(rest, hidden, real).squeeze(-1)

    def candidates(self, target: Tensor, items: Tensor, shift: Tensor | None = None) -> Tensor:
        """target (B, K, D), padded items (B, L, D) -> logits (B, K, L).

        ``shift`` (B, L, D): what the targets get added where they meet an item.
        """
        first, *rest = self.mlp
        assert isinstance(first, nn.Linear)
        of_target, of_item, of_difference, of_product = first.weight.chunk(4, dim=1)
        of_target, of_item = of_target + of_difference, of_item - of_difference
        per_item = nn.functional.linear(items, of_item, first.bias)
        if shift is not None:
            per_item = per_item + shift @ of_target.T + (shift * items) @ of_product.T
        if native.traced() or not items.is_cpu:  # in one piece
            if native.traced():
                of_products = of_product.T.unsqueeze(1) * items.mT.unsqueeze(-1) + of_target.T.unsqueeze(1)
                hidden: Tensor = torch.unflatten(target @ of_products.flatten(2), 2, of_products.shape[2:])  # B K L U
                hidden = (hidden + per_item.unsqueeze(1)).flatten(0, 2)
            else:
                added = per_item.unsqueeze(1) + (target @ of_target.T).unsqueeze(2)
                products = target.unsqueeze(2) * items.unsqueeze(1)
                hidden = torch.addmm(added.flatten(0, 2), products.flatten(0, 2), of_product.T)
            for layer in rest:
                hidden = layer(hidden)
            return hidden.view(*target.shape[:2], items.shape[1])
        # The first layer is linear in one side, with a matrix and a bias per vector of the other: per item, or per
        # target where those are fewer.
        swap = shift is None and target.shape[1] < items.shape[1]
        by, others, of_other = (target, items, of_item) if swap else (items, target, of_target)
        columns = COLUMNS * (3 if swap else 1)  # of fewer rows
        biases = nn.functional.linear(target, of_target, first.bias) if swap else per_item
        logits = target.new_empty(len(target), others.shape[1], by.shape[1])
        for row, some in product(range(len(by)), _slices(by.shape[1], max(1, columns // len(of_product)))):
            own = by[row, some].T.unsqueeze(2)  # (D, vectors, 1)
            weight = torch.addcmul(of_other.T.unsqueeze(1), of_product.T.unsqueeze(1), own).flatten(1)
            bias = biases[row, some].flatten()
            for chosen in _slices(others.shape[1], TARGETS):
                hidden = torch.addmm(bias, others[row, chosen], weight).view(-1, len(of_product))
                for layer in rest:
                    hidden = _applied(layer, hidden)
                logits[row, chosen, some] = hidden.view(-1, own.shape[1])
        return logits.mT if swap else logits


def candidate_scores(score: nn.Module, target: Tensor, items: Tensor) -> Tensor:
    """target (B, K, D), padded items (B, L, any width that the score takes) -> logits (B, K, L).

    A score of one's own needs no method for it: its pairs are computed one by one.
    """
    together: Callable[[Tensor, Tensor], Tensor] | None = getattr(score, "candidates", None)
    if together is not None:
        return together(target, items)
    (rows, targets, _), slots = target.shape, items.shape[1]
    repeated = items.unsqueeze(1).expand(-1, targets, -1, -1).flatten(0, 2)
    of_pair = torch.arange(rows * targets, device=items.device).repeat_interleave(slots)
    logits: Tensor = score(target.flatten(0, 1), repeated, of_pair)
    return logits.view(rows, targets, slots)


def _applied(layer: nn.Module, x: Tensor) -> Tensor:
    """layer(x), (N, any). One unit is a product with a vector, which is several times faster."""
    if isinstance(layer, nn.Linear) and layer.out_features == 1:
        return torch.addmv(layer.bias, x, layer.weight[0]).unsqueeze(1)
    applied: Tensor = layer(x)
    return applied


COLUMNS, TARGETS = 512, 1024
"""So many columns of the first layer and vectors are computed at once: what they need fits the cache."""


def _slices(length: int, size: int) -> list[slice]:
    return [slice(start, start + size) for start in range(0, length, size)]


SCORES: dict[str, Callable[[int], nn.Module]] = {"dot": DotScore, "bilinear": BilinearScore, "din": DINScore}


def _dot(target: Tensor, items: Tensor, rows: Tensor) -> Tensor:
    return (_of_rows(target, rows) * items).sum(-1)


def _of_rows(x: Tensor, rows: Tensor) -> Tensor:
    """x[rows], as a look-up: the gradient of x[rows] adds up one row after the other."""
    return nn.functional.embedding(rows, x)
