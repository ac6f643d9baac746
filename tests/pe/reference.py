"""Every method once more, written from its equations with loops, in float64. The specification of the fast code.

A history is a list of item vectors, oldest first; no padding exists here. n items, target at distance 0, item j
(from 0) at distance n - j. Weights of the encoding come in by name.
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


def contextual_bias(name: str, query: Tensor, logits: Sequence[Tensor], weights: Mapping[str, Tensor]) -> list[Tensor]:
    """CoPE's or CAPE's bias for one query over the keys it may see, oldest first; the newest is the last."""
    if name == "cape":
        gates = [1 - torch.sigmoid(s) for s in logits]
        hidden = weights["gate.weight"] @ query + weights["gate.bias"]
        query = hidden * torch.sigmoid(hidden)
    else:
        gates = [torch.sigmoid(s) for s in logits]
    positions = [sum(gates[j:], torch.zeros((), dtype=query.dtype)) for j in range(len(gates))]
    return [query @ between_rows(weights["table"], p) for p in positions]


def placed(logits: Sequence[Tensor], table: Tensor) -> list[Tensor]:
    """e[p_j] with the positions of CAPE."""
    gates = [1 - torch.sigmoid(s) for s in logits]
    return [between_rows(table, sum(gates[j:], torch.zeros((), dtype=table.dtype))) for j in range(len(gates))]


def target_attention(
    name: str, score: Score, target: Tensor, history: Sequence[Tensor], weights: Mapping[str, Tensor]
) -> tuple[Tensor, Tensor]:
    """Interest (D,) and weights (n,) of one row."""
    n = len(history)
    if n == 0:
        return torch.zeros_like(target), torch.zeros(0, dtype=target.dtype)
    if name == "naive":
        target = target + weights["table"][0]
        history = [h + row(weights["table"], n - j) for j, h in enumerate(history)]
    keys = [turn(h, -(n - j)) for j, h in enumerate(history)] if name == "rope" else history
    logits = [score(target, key) for key in keys]
    if name in ("cope", "cape"):
        logits = [s + b for s, b in zip(logits, contextual_bias(name, target, logits, weights), strict=True)]
    if name == "cape_additive":
        logits = [score(target, h + e) for h, e in zip(keys, placed(logits, weights["table"]), strict=True)]
    attention = softmax(logits)
    return sum((a * h for a, h in zip(attention, history, strict=True)), torch.zeros_like(target)), attention


def self_attention(name: str, layer: Any, items: Sequence[Tensor], weights: Mapping[str, Tensor]) -> list[Tensor]:
    """States of one row, one per item, with the projections of ``layer``."""
    n, heads = len(items), layer.num_heads
    if name == "naive":
        items = [x + row(weights["table"], n - j) for j, x in enumerate(items)]

    def project(linear: Any, x: Tensor, head: int) -> Tensor:
        size = len(x) // heads
        full: Tensor = linear.weight @ x + linear.bias
        return full[head * size : (head + 1) * size]

    states = []
    for i in range(n):
        parts = []
        for head in range(heads):
            query = project(layer.query, items[i], head)
            seen = range(i + 1) if layer.causal else range(n)
            logits = []
            for j in seen:
                key = project(layer.key, items[j], head)
                pair = (turn(query, i + 1), turn(key, j + 1)) if name == "rope" else (query, key)
                logits.append(pair[0] @ pair[1] / math.sqrt(len(query)))
            if name in ("cope", "cape"):
                logits = [s + b for s, b in zip(logits, contextual_bias(name, query, logits, weights), strict=True)]
            if name == "cape_additive":
                moved = placed(logits, weights["table"])
                keys = [project(layer.key, items[j], head) for j in seen]
                logits = [query @ (k + e) / math.sqrt(len(query)) for k, e in zip(keys, moved, strict=True)]
            attention = softmax(logits)
            parts.append(sum(attention[k] * project(layer.value, items[j], head) for k, j in enumerate(seen)))
        states.append(layer.output.weight @ torch.cat(parts) + layer.output.bias)
    return states


def dot(target: Tensor, key: Tensor) -> Tensor:
    return target @ key / math.sqrt(len(target))


def bilinear(weight: Tensor) -> Score:
    return lambda target, key: key @ (weight @ target)


def din(mlp: Any) -> Score:
    """The MLP of a DIN score in evaluation mode, on the concatenated input that the fast code never builds."""
    return lambda target, key: mlp(torch.cat([target, key, target - key, target * key]).unsqueeze(0)).squeeze()
