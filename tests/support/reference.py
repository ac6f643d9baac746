"""Every method once more, written from its equations with loops, in float64. The specification of the fast code.

A history is a list of item vectors, oldest first; no padding exists here. n items, target at distance 0, item j
(from 0) at distance n - j. A method is a subclass of Method; METHODS lists them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Score = Callable[[Tensor, Tensor], Tensor]


def softmax(logits: Sequence[Tensor]) -> Tensor:
    powers = torch.stack([torch.exp(x) for x in logits])
    return powers / powers.sum()


def row(table: Tensor, index: int) -> Tensor:
    return table[min(index, len(table) - 1)]


def turn(x: Tensor, position: int, base: float = 10000.0) -> Tensor:
    """Rotate the planes (c, c + d/2) of x by position · base^(-2c/d)."""
    half, out = len(x) // 2, x.clone()
    for c in range(half):
        angle = position * base ** (-2 * c / len(x))
        out[c] = x[c] * math.cos(angle) - x[c + half] * math.sin(angle)
        out[c + half] = x[c] * math.sin(angle) + x[c + half] * math.cos(angle)
    return out


def between_rows(table: Tensor, position: Tensor) -> Tensor:
    """e[p], interpolated; p past the table takes the last row."""
    last = len(table) - 1
    if position >= last:
        return table[last]
    low = int(torch.floor(position))
    share = position - low
    return (1 - share) * table[low] + share * table[low + 1]


class Method:
    """No encoding. A method overrides what it changes.

    ``weights``: parameters by name. ``options``: keyword arguments of the encoding. ``ages``: seconds per item.
    ``ids``: of the items and, last, of the target. ``causal``: of the attention.
    """

    causal = True

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        options: Mapping[str, Any],
        ages: Sequence[int] = (),
        ids: Sequence[int] = (),
    ) -> None:
        self.weights, self.options, self.ages, self.ids = weights, options, ages, ids

    def embed(self, target: Tensor | None, history: Sequence[Tensor]) -> tuple[Tensor | None, Sequence[Tensor]]:
        """Target and items before the network."""
        return target, history

    def of_target(self, score: Score, target: Tensor, history: Sequence[Tensor]) -> list[Tensor]:
        """Logits of target attention, one per item."""
        return [score(target, h) for h in history]

    def of_item(self, i: int, head: int, query: Tensor, keys: Sequence[Tensor], n: int) -> list[Tensor]:
        """Logits of self-attention: item i of n looks at ``keys``, those of items 0, 1, ... (up to i, if causal)."""
        return [query @ key / math.sqrt(len(query)) for key in keys]

    def of_heads(
        self, i: int, queries: Sequence[Tensor], keys: Sequence[Sequence[Tensor]], n: int
    ) -> list[list[Tensor]]:
        """The same of all heads."""
        return [self.of_item(i, head, *of_head, n) for head, of_head in enumerate(zip(queries, keys, strict=True))]

    def pooling(self, attention: Tensor, i: int, n: int, head: int) -> Tensor:
        """Weights with which values are pooled, from those of the softmax; i = n for the target."""
        return attention


class Naive(Method):
    def embed(self, target: Tensor | None, history: Sequence[Tensor]) -> tuple[Tensor | None, Sequence[Tensor]]:
        table, n = self.weights["table"], len(history)
        moved = [h + row(table, n - j) for j, h in enumerate(history)]
        return None if target is None else target + table[0], moved


class RoPE(Method):
    def of_target(self, score: Score, target: Tensor, history: Sequence[Tensor]) -> list[Tensor]:
        n = len(history)
        return [score(target, turn(h, -(n - j))) for j, h in enumerate(history)]

    def of_item(self, i: int, head: int, query: Tensor, keys: Sequence[Tensor], n: int) -> list[Tensor]:
        turned = turn(query, i + 1)
        return [turned @ turn(key, j + 1) / math.sqrt(len(query)) for j, key in enumerate(keys)]


class CoPE(Method):
    @staticmethod
    def positions(logits: Sequence[Tensor], sign: int) -> list[Tensor]:
        gates = [torch.sigmoid(sign * s) for s in logits]
        return [sum(gates[j:], torch.zeros_like(logits[0])) for j in range(len(gates))]

    def biased(self, query: Tensor, logits: Sequence[Tensor]) -> list[Tensor]:
        places = self.positions(logits, 1)
        return [s + query @ between_rows(self.weights["table"], p) for s, p in zip(logits, places, strict=True)]

    def of_target(self, score: Score, target: Tensor, history: Sequence[Tensor]) -> list[Tensor]:
        return self.biased(target, super().of_target(score, target, history))

    def of_item(self, i: int, head: int, query: Tensor, keys: Sequence[Tensor], n: int) -> list[Tensor]:
        return self.biased(query, super().of_item(i, head, query, keys, n))


class CAPE(CoPE):
    def biased(self, query: Tensor, logits: Sequence[Tensor]) -> list[Tensor]:
        hidden = self.weights["gate.weight"] @ query + self.weights["gate.bias"]
        gated, places = hidden * torch.sigmoid(hidden), self.positions(logits, -1)
        return [s + gated @ between_rows(self.weights["table"], p) for s, p in zip(logits, places, strict=True)]


class AdditiveCAPE(CoPE):
    def moved(self, keys: Sequence[Tensor], logits: Sequence[Tensor]) -> list[Tensor]:
        places = self.positions(logits, -1)
        return [key + between_rows(self.weights["table"], p) for key, p in zip(keys, places, strict=True)]

    def of_target(self, score: Score, target: Tensor, history: Sequence[Tensor]) -> list[Tensor]:
        logits = Method.of_target(self, score, target, history)
        return [score(target, h) for h in self.moved(history, logits)]

    def of_item(self, i: int, head: int, query: Tensor, keys: Sequence[Tensor], n: int) -> list[Tensor]:
        logits = Method.of_item(self, i, head, query, keys, n)
        return Method.of_item(self, i, head, query, self.moved(keys, logits), n)


METHODS: dict[str, type[Method]] = {
    "none": Method,
    "naive": Naive,
    "rope": RoPE,
    "cope": CoPE,
    "cape": CAPE,
    "cape_additive": AdditiveCAPE,
}


def target_attention(method: Method, score: Score, target: Tensor, history: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Interest (D,) and weights (n,) of one row."""
    n = len(history)
    if n == 0:
        return torch.zeros_like(target), torch.zeros(0, dtype=target.dtype)
    embedded, history = method.embed(target, history)
    assert embedded is not None
    attention = softmax(method.of_target(score, embedded, history))
    pooling = method.pooling(attention, n, n, 0)
    return sum((a * h for a, h in zip(pooling, history, strict=True)), torch.zeros_like(target)), attention


def self_attention(method: Method, layer: Any, items: Sequence[Tensor]) -> list[Tensor]:
    """States of one row, one per item, with the projections of ``layer``."""
    n, heads, method.causal = len(items), layer.num_heads, layer.causal
    _, items = method.embed(None, items)

    def project(linear: Any, x: Tensor, head: int) -> Tensor:
        size = len(x) // heads
        full: Tensor = linear.weight @ x + linear.bias
        return full[head * size : (head + 1) * size]

    states = []
    for i in range(n):
        parts, seen = [], range(i + 1) if layer.causal else range(n)
        queries = [project(layer.query, items[i], head) for head in range(heads)]
        keys = [[project(layer.key, items[j], head) for j in seen] for head in range(heads)]
        for head, logits in enumerate(method.of_heads(i, queries, keys, n)):
            pooling = method.pooling(softmax(logits), i, n, head)
            parts.append(torch.stack([pooling[j] * project(layer.value, items[j], head) for j in seen]).sum(0))
        states.append(layer.output.weight @ torch.cat(parts) + layer.output.bias)
    return states


def dot(target: Tensor, key: Tensor) -> Tensor:
    return target @ key / math.sqrt(len(target))


class Bilinear:
    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def project(self, target: Tensor) -> Tensor:
        return self.weight @ target

    def __call__(self, target: Tensor, key: Tensor) -> Tensor:
        return key @ self.project(target)


def din(mlp: Any) -> Score:
    """The MLP of a DIN score in evaluation mode, on the concatenated input that the fast code never builds."""
    return lambda target, key: mlp(torch.cat([target, key, target - key, target * key]).unsqueeze(0)).squeeze()


from tests.support import (  # noqa: E402
    reference_adaptive,
    reference_cape,
    reference_dif,
    reference_euler,
    reference_kernel,
    reference_relative,
    reference_time,
)

METHODS |= reference_adaptive.METHODS
METHODS |= reference_cape.METHODS
METHODS |= reference_dif.METHODS
METHODS |= reference_euler.METHODS
METHODS |= reference_kernel.METHODS
METHODS |= reference_relative.METHODS
METHODS |= reference_time.METHODS
