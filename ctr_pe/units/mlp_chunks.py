"""The MLP of a score in pieces of a few hundred pairs, so that what is between its matrix products stays in the cache.

Layer by layer over all pairs, every activation, its batch norm, its dropout and their gradients pass over tensors of
hundreds of megabytes, which takes four times as long as the products. Here each layer computes one piece from start to
end before the next. Only its output is kept; what precedes it is computed again in the backward, which is written by
hand except for the products.

N pairs, n of a piece, B rows, D item dim, W input and V output width of a layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ctr_pe.ops import native
from ctr_pe.ops.dice import dice, dice_backward
from ctr_pe.units.activations import Dice
from ctr_pe.units.dropout import Dropout

SIZE = 2**18
"""Elements of a piece: 1 MB in float32."""
ACTIVATIONS = (nn.ReLU, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Sigmoid, nn.Tanh, nn.Softplus, nn.Identity)


class Source:
    """The input of a layer's matrix product and what is added to its output. ``of_pairs`` and ``others``: the tensors
    that they depend on, with a row per pair and without."""

    def __init__(self, of_pairs: tuple[Tensor, ...], others: tuple[Tensor, ...]) -> None:
        self.pairs, self.count = len(of_pairs[0]), len(of_pairs)
        self.tensors = of_pairs + others

    def forward(self, piece: slice) -> tuple[Tensor, Tensor]:
        """The input (n, W) and what is added, (n, V) or (V,)."""
        raise NotImplementedError

    def start_backward(self, tensors: tuple[Tensor, ...]) -> None:
        """``gradients``, one per tensor: those of pairs are written, the others added up."""
        self.tensors = tensors
        self.gradients = [torch.empty_like(tensor) for tensor in tensors[: self.count]]
        self.gradients += [torch.zeros_like(tensor) for tensor in tensors[self.count :]]

    def backward(self, piece: slice, of_input: Tensor, of_added: Tensor) -> None:
        """From the gradients of the input, which may be overwritten, and of the output. ``forward`` of the same piece
        was the last call."""
        raise NotImplementedError


class SharedTargets(Source):
    """[h; t ⊙ h] and a vector per row. items (N, D), target (B, D), of_row (B, V), rows (N,): the row of each item."""

    def __init__(self, items: Tensor, target: Tensor, of_row: Tensor, rows: Tensor) -> None:
        super().__init__((items,), (target, of_row))
        self.rows = rows

    def forward(self, piece: slice) -> tuple[Tensor, Tensor]:
        items, target, of_row = self.tensors
        rows = self.rows[piece]
        self.item, self.target = items[piece], target.index_select(0, rows)
        return torch.cat([self.item, self.target * self.item], 1), of_row.index_select(0, rows)

    def backward(self, piece: slice, of_input: Tensor, of_added: Tensor) -> None:
        for_items, for_target, for_rows = self.gradients
        rows, (of_item, of_product) = self.rows[piece], of_input.chunk(2, 1)
        torch.addcmul(of_item, of_product, self.target, out=for_items[piece])
        for_target.index_add_(0, rows, of_product * self.item)
        for_rows.index_add_(0, rows, of_added)


class OwnTargets(Source):
    """[t; h; t ⊙ h] and a bias, every item with a target of its own. items, target (N, D), bias (V,)."""

    def __init__(self, items: Tensor, target: Tensor, bias: Tensor) -> None:
        super().__init__((items, target), (bias,))

    def forward(self, piece: slice) -> tuple[Tensor, Tensor]:
        items, target, bias = self.tensors
        self.item, self.target = items[piece], target[piece]
        return torch.cat([self.target, self.item, self.target * self.item], 1), bias

    def backward(self, piece: slice, of_input: Tensor, of_added: Tensor) -> None:
        for_items, for_target, for_bias = self.gradients
        of_target, of_item, of_product = of_input.chunk(3, 1)
        torch.addcmul(of_item, of_product, self.target, out=for_items[piece])
        torch.addcmul(of_target, of_product, self.item, out=for_target[piece])
        for_bias += of_added.sum(0)


class Activated(Source):
    """dropout(f(x)) and a bias, f an activation without parameters. x (N, W), bias (V,)."""

    def __init__(self, x: Tensor, bias: Tensor, activation: nn.Module, dropout: Dropout, *others: Tensor) -> None:
        super().__init__((x,), (bias, *others))
        self.activation, self.dropout = activation, dropout
        self.kept = dropout.draw(x.shape) if dropout.is_active else None

    def forward(self, piece: slice) -> tuple[Tensor, Tensor]:
        x, bias = self.tensors[:2]
        self.x = x[piece]
        return self.activate(None if self.kept is None else self.kept[piece]), bias

    def backward(self, piece: slice, of_input: Tensor, of_added: Tensor) -> None:
        for_x, for_bias = self.gradients[:2]
        for_bias += of_added.sum(0)
        self.activate_backward(of_input, for_x[piece])

    def activate(self, kept: Tensor | None) -> Tensor:
        """dropout(f(x)), ``kept`` where there is some (n, W) int16."""
        y: Tensor = self.activation(self.x)
        self.share = None if kept is None else kept.to(y.dtype).mul_(self.dropout.factor)
        return y if self.share is None else y * self.share

    def activate_backward(self, of_y: Tensor, for_x: Tensor) -> None:
        if self.share is not None:
            of_y.mul_(self.share)
        with torch.enable_grad():
            x = self.x.detach().requires_grad_()
            (of_x,) = torch.autograd.grad(self.activation(x), x, of_y)
        for_x.copy_(of_x)


class DiceActivated(Activated):
    """dropout(Dice(x)) and a bias. ``norm``: factor and shift (W,)."""

    def __init__(self, x: Tensor, bias: Tensor, activation: Dice, dropout: Dropout, *norm: Tensor) -> None:
        super().__init__(x, bias, activation, dropout, *norm, activation.alpha)

    def activate(self, kept: Tensor | None) -> Tensor:
        self.kept_here = kept
        factor, shift, alpha = self.tensors[2:]
        return dice(self.x, factor, shift, alpha, kept=kept, kept_factor=self.dropout.factor)

    def activate_backward(self, of_y: Tensor, for_x: Tensor) -> None:
        factor, shift, alpha = self.tensors[2:]
        of_x, *others = dice_backward(of_y, self.x, factor, shift, alpha, self.kept_here, self.dropout.factor)
        for_x.copy_(of_x)
        for total, own in zip(self.gradients[2:], others, strict=True):
            total += own


def supports(layers: Sequence[nn.Module], items: Tensor) -> bool:
    """Whether ``mlp`` can take the layers after the first: on a CPU, in one precision, outside of graphs and
    ``torch.func``, with Dice or an activation of single numbers without parameters or randomness."""
    supported = (nn.Linear, Dropout, Dice, *ACTIVATIONS)
    plain = items.device.type == "cpu" and not torch.is_autocast_enabled("cpu") and not native.traced()
    return plain and all(isinstance(layer, supported) for layer in layers)


def mlp(source: Source, weight: Tensor, layers: Sequence[nn.Module]) -> Tensor:
    """(N, V) of the last layer: the first one's product of ``source`` with ``weight``, then ``layers``: an activation,
    perhaps Dropout, and a linear layer, again and again; perhaps an activation at the end."""
    activation, dropout = nn.Module(), Dropout(0.0)
    for layer in layers:
        if isinstance(layer, Dropout):
            dropout = layer
        elif not isinstance(layer, nn.Linear):
            activation = layer
        else:
            own = activation if isinstance(activation, Dice) else None
            moments = own is not None and own.uses_own_statistics(source.pairs)
            x, mean, variance = _product(source, weight, moments)
            if own is None:
                source = Activated(x, layer.bias, activation, dropout)
            else:
                source = DiceActivated(x, layer.bias, own, dropout, *own.norm(source.pairs, mean, variance))
            weight, activation, dropout = layer.weight, nn.Identity(), Dropout(0.0)
    out: Tensor = activation(_product(source, weight, moments=False)[0])
    return out


def _product(source: Source, weight: Tensor, moments: bool) -> tuple[Tensor, Tensor, Tensor]:
    """input Wᵀ + what is added (N, V), and with ``moments`` mean and variance of its columns (V,). weight (V, W)."""
    found: tuple[Tensor, Tensor, Tensor] = _Product.apply(source, moments, weight, *source.tensors)  # type: ignore[no-untyped-call]
    return found


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, source: Source, moments: bool, weight: Tensor, *tensors: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        out = weight.new_empty(source.pairs, len(weight))
        mean, variance = weight.new_zeros(2, len(weight)).unbind() if moments else weight.new_empty(2, 0).unbind()
        for piece in _pieces(source.pairs, weight):
            x, added = source.forward(piece)
            part = torch.addmm(added, x, weight.T, out=out[piece])
            if moments:
                _merge(mean, variance, piece.start, part)
        if moments:
            variance /= max(source.pairs, 1)
        ctx.source, ctx.moments = source, moments
        ctx.save_for_backward(out if moments else None, mean, weight, *tensors)
        return out, mean, variance

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_out: Tensor, of_mean: Tensor, of_variance: Tensor) -> tuple[Any, ...]:
        out, mean, weight, *tensors = ctx.saved_tensors
        source: Source = ctx.source
        source.start_backward(tuple(tensors))
        for_weight = torch.zeros_like(weight)
        if ctx.moments:  # they depend on every pair: d mean / d x = 1 / N, d variance / d x = 2 (x - mean) / N
            slope = of_variance * (2 / max(source.pairs, 1))
            constant = of_mean / max(source.pairs, 1) - slope * mean
        for piece in _pieces(source.pairs, weight):
            of_part = of_out[piece]
            if ctx.moments:
                of_part = torch.addcmul(of_part, out[piece], slope).add_(constant)
            x, _ = source.forward(piece)
            torch.addmm(for_weight, of_part.T, x, out=for_weight)
            source.backward(piece, of_part @ weight, of_part)
        return None, None, for_weight, *source.gradients


def _pieces(pairs: int, weight: Tensor) -> Iterator[slice]:
    size = max(SIZE // max(weight.shape), 64)
    return (slice(first, min(first + size, pairs)) for first in range(0, pairs, size))


def _merge(mean: Tensor, squares: Tensor, before: int, part: Tensor) -> None:
    """Take the rows of ``part`` into mean and sum of squared deviations of the ``before`` rows (Chan et al. 1979)."""
    count = len(part)
    own = part.mean(0)
    squares += (part - own).square_().sum(0)
    away = own - mean
    squares += away.square() * (before * count / (before + count))
    mean += away * (count / (before + count))
