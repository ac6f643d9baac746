"""Encodings of language models that adapt to items or to the length of the row: FoX, FIRE, DAPE."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tests.support.reference import Method, Score
from tests.support.reference_relative import ALiBi, KerpleLog


class FoX(Method):
    def forgotten(self, head: int, keys: Sequence[Tensor], j: int, i: int) -> Tensor:
        """Between key j and query i (the target: the number of keys), whose gates ``keys`` decide."""
        between = range(j + 1, min(i, len(keys) - 1) + 1) if j <= i else range(i, j)
        weight, bias = self.weights["forget.weight"][head], self.weights["forget.bias"][head]
        total = torch.zeros_like(bias)
        for item in between:
            total = total + torch.log(1 / (1 + torch.exp(-(weight @ keys[item] + bias))))
        return total

    def of_target(self, score: Score, target: Tensor, history: Sequence[Tensor]) -> list[Tensor]:
        n = len(history)
        return [score(target, h) + self.forgotten(0, history, j, n) for j, h in enumerate(history)]

    def of_item(self, i: int, head: int, query: Tensor, keys: Sequence[Tensor], n: int) -> list[Tensor]:
        logits = super().of_item(i, head, query, keys, n)
        return [s + self.forgotten(head, keys, j, i) for j, s in enumerate(logits)]


class FIRE(Method):
    def beta(self, head: int, i: int, j: int, prefix: str = "") -> Tensor:
        """i, j from 1, the oldest item."""
        weight = {name.removeprefix(prefix): value for name, value in self.weights.items() if name.startswith(prefix)}
        c, threshold = (torch.log(1 + torch.exp(weight[name])) for name in ("rate", "threshold"))
        whole = torch.maximum(threshold, torch.tensor(float(max(i, j))).double())
        x = torch.log(c * abs(i - j) + 1) / torch.log(c * whole + 1)
        hidden = [max(w * x + b, 0 * x) for (w,), b in zip(weight["mlp.0.weight"], weight["mlp.0.bias"], strict=True)]
        out = weight["mlp.2.bias"][head]
        for w, h in zip(weight["mlp.2.weight"][head], hidden, strict=True):
            out = out + w * h
        return out

    def of_target(self, score: Score, target: Tensor, history: Sequence[Tensor]) -> list[Tensor]:
        n = len(history)
        return [score(target, h) + self.beta(0, n + 1, j + 1) for j, h in enumerate(history)]

    def of_item(self, i: int, head: int, query: Tensor, keys: Sequence[Tensor], n: int) -> list[Tensor]:
        logits = super().of_item(i, head, query, keys, n)
        return [s + self.beta(head, i + 1, j + 1) for j, s in enumerate(logits)]


class DAPE(Method):
    def base(self, head: int, i: int, j: int) -> Tensor:
        """B at query i and key j, from 1."""
        name = self.options.get("dape_base", "fire")
        own = {key.removeprefix("base."): value for key, value in self.weights.items() if key.startswith("base.")}
        if name == "fire":
            return FIRE(own, {}, self.ages).beta(head, i, j)
        return {"kerple_log": KerpleLog, "alibi": ALiBi}[name](own, {}, self.ages).beta(head, i - j)

    def adapted(self, scores: Sequence[Tensor], i: int, j: int) -> list[Tensor]:
        """Logits of all heads at one pair, from its scores s."""
        static = [self.base(head, i, j) for head in range(len(scores))]
        x = torch.stack([*scores, *static])
        hidden = self.weights["mlp.0.weight"] @ x + self.weights["mlp.0.bias"]
        hidden = torch.stack([h if h > 0 else 0.01 * h for h in hidden])
        out = self.weights["mlp.2.weight"] @ hidden + self.weights["mlp.2.bias"]
        return [s + b + g for s, b, g in zip(scores, static, out, strict=True)]

    def of_target(self, score: Score, target: Tensor, history: Sequence[Tensor]) -> list[Tensor]:
        n = len(history)
        return [self.adapted([score(target, h)], n + 1, j + 1)[0] for j, h in enumerate(history)]

    def of_heads(
        self, i: int, queries: Sequence[Tensor], keys: Sequence[Sequence[Tensor]], n: int
    ) -> list[list[Tensor]]:
        found: list[list[Tensor]] = [[] for _ in queries]
        for j, of_pair in enumerate(zip(*keys, strict=True)):
            scores = [q @ k / math.sqrt(len(q)) for q, k in zip(queries, of_pair, strict=True)]
            for logits, value in zip(found, self.adapted(scores, i + 1, j + 1), strict=True):
                logits.append(value)
        return found


METHODS: dict[str, type[Method]] = {"fox": FoX, "fire": FIRE, "dape": DAPE}
