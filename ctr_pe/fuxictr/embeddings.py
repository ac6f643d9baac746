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


class ByField(nn.ModuleDict):
    """``nn.ModuleDict`` that also takes fields called like its own attributes: ``type``, ``items``. Their modules and
    parameters have names that end with :data:`FIELD_SUFFIX`."""

    def __setitem__(self, key: str, module: nn.Module) -> None:
        super().__setitem__(self._name(key), module)

    def __getitem__(self, key: str) -> nn.Module:
        return super().__getitem__(self._name(key))

    def __contains__(self, key: str) -> bool:
        return super().__contains__(self._name(key))

    def items(self) -> Any:
        return {name.removesuffix(FIELD_SUFFIX): module for name, module in self._modules.items()}.items()

    def _name(self, key: str) -> str:
        return key + FIELD_SUFFIX if hasattr(_EMPTY, str(key)) else key


FIELD_SUFFIX, _EMPTY = " (field)", nn.ModuleDict()


def look_up(
    embedding_layer: Any, ids: Mapping[str, Tensor], regularizer: Any = None
) -> tuple[dict[str, Tensor], dict[Tensor, Tensor]]:
    """What FuxiCTR's FeatureEmbeddingDict gives for the ids, and the :func:`regularization` of each table that learns
    from it with a dense gradient, by its weight.

    A table has one gradient (V, D) for all its fields and its regularisation, made in one pass.
    """
    tables: dict[nn.Embedding, list[str]] = {}
    for field in ids:
        table = embedding_layer.embedding_layers[field]
        if type(table) is nn.Embedding and field not in embedding_layer.feature_encoders:
            tables.setdefault(table, []).append(field)
    embedded: dict[str, Tensor] = {}
    penalties: dict[Tensor, Tensor] = {}
    terms = get_regularizer(regularizer)
    for table, fields in tables.items():
        rows = torch.cat([ids[field].flatten() for field in fields]).long()
        if torch.is_grad_enabled() and table.weight.requires_grad and not table.sparse:
            vectors, penalties[table.weight] = _LookUp.apply(table.weight, rows, table.padding_idx, terms)  # type: ignore[no-untyped-call]
        else:
            vectors = table(rows)
        for field, part in zip(fields, vectors.split([ids[field].numel() for field in fields]), strict=True):
            embedded[field] = part.view(*ids[field].shape, table.embedding_dim)
    others = {field: values for field, values in ids.items() if field not in embedded}
    return embedded | embedding_layer(others), penalties


def regularization(parameters: Sequence[Tensor], regularizer: Any) -> Tensor | float:
    """λ / p Σ |x|^p over parameters, as FuxiCTR's, with one pass over each in either direction; frozen ones left out.

    ``regularizer``: λ of p = 2, or FuxiCTR's texts.
    """
    terms = get_regularizer(regularizer)
    learning = [parameter for parameter in parameters if parameter.requires_grad] if terms else []
    return sum(_Penalty.apply(parameter, terms) for parameter in learning)  # type: ignore[no-untyped-call]


class _Penalty(torch.autograd.Function):
    """Σ λ / p Σ |x|^p over terms (p, λ), p 1 or 2, by hand: torch's gradient of a norm takes four passes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, terms: Sequence[tuple[int, float]]) -> Tensor:
        ctx.save_for_backward(x)
        ctx.terms = terms
        return _penalty(x, terms)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _slope(ctx.saved_tensors[0], ctx.terms, grad), None


class _LookUp(torch.autograd.Function):
    """Rows (n,) of a table (V, D) as vectors (n, D), and its penalty; vectors of row ``padding`` give no gradient."""

    @staticmethod
    def forward(
        ctx: Any, table: Tensor, rows: Tensor, padding: int | None, terms: Sequence[tuple[int, float]]
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(table, rows)
        ctx.padding, ctx.terms = padding, terms
        return nn.functional.embedding(rows, table), _penalty(table, terms)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_vectors: Tensor, of_penalty: Tensor) -> tuple[Tensor | None, ...]:
        table, rows = ctx.saved_tensors
        grad = _slope(table, ctx.terms, of_penalty)
        if _in_order(grad):
            alone = slice(0) if ctx.padding is None else slice(ctx.padding, ctx.padding + 1)
            kept = grad[alone].clone()
            grad.index_add_(0, rows, of_vectors)
            grad[alone] = kept
        else:
            padding = -1 if ctx.padding is None else ctx.padding
            grad += torch.ops.aten.embedding_dense_backward(of_vectors, rows, len(table), padding, False)
        return grad, None, None, None


def _in_order(x: Tensor) -> bool:
    """Whether ``index_add_`` sums in the same order every time: not on a GPU."""
    return x.device.type == "cpu"


def _penalty(x: Tensor, terms: Sequence[tuple[int, float]]) -> Tensor:
    flat = x.flatten()
    parts = [
        torch.dot(flat, flat) * (weight / 2) if power == 2 else flat.abs().sum() * weight for power, weight in terms
    ]
    return sum(parts[1:], parts[0]) if parts else x.new_zeros(())


def _slope(x: Tensor, terms: Sequence[tuple[int, float]], grad: Tensor) -> Tensor:
    """The penalty's gradient, times ``grad``."""
    parts = [(x if power == 2 else x.sign()) * (weight * grad) for power, weight in terms]
    return sum(parts[1:], parts[0]) if parts else torch.zeros_like(x)
