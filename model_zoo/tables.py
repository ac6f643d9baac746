"""Embedding tables: what a training step spends on them besides the rows of its batch.

V rows of a table, D their width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from fuxictr.pytorch.torch_utils import get_regularizer
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


def look_up(embedding_layer: Any, ids: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What FuxiCTR's FeatureEmbeddingDict gives for the ids. Fields that share a table are looked up together, so that
    there is one gradient (V, D) of it and not one per field."""
    tables: dict[nn.Embedding, list[str]] = {}
    for field in ids:
        table = embedding_layer.embedding_layers[field]
        if type(table) is nn.Embedding and field not in embedding_layer.feature_encoders:
            tables.setdefault(table, []).append(field)
    embedded = {}
    for table, fields in tables.items():
        if len(fields) > 1:
            vectors = table(torch.cat([ids[field].flatten() for field in fields]).long())
            parts = vectors.split([ids[field].numel() for field in fields])
            embedded |= {
                field: part.view(*ids[field].shape, table.embedding_dim)
                for field, part in zip(fields, parts, strict=True)
            }
    alone: dict[str, Tensor] = embedding_layer(
        {field: values for field, values in ids.items() if field not in embedded}
    )
    return alone | embedded


def regularization(parameters: Sequence[Tensor], regularizer: Any) -> Tensor | float:
    """λ / p Σ |x|^p over parameters, as FuxiCTR's, with one pass over each in either direction; frozen ones left out.

    ``regularizer``: λ of p = 2, or FuxiCTR's texts.
    """
    terms: list[Tensor] = [
        weight * _Power.apply(parameter, power)  # type: ignore[no-untyped-call]
        for power, weight in get_regularizer(regularizer)
        for parameter in parameters
        if parameter.requires_grad
    ]
    return sum(terms)


class _Power(torch.autograd.Function):
    """Σ |x|^p / p for p = 1 or 2. By hand, because the gradient of a norm is a quotient, which takes four passes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, power: int) -> Tensor:
        ctx.save_for_backward(x)
        ctx.power = power
        flat = x.flatten()
        return torch.dot(flat, flat) / 2 if power == 2 else flat.abs().sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return (x if ctx.power == 2 else x.sign()) * grad, None
