"""The kernel and PDM, from their equations: for tests/support/reference.py, which says what a method is."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from tests.support.reference import Method, Score, row, softmax


def add(terms: Iterable[Tensor]) -> Tensor:
    return torch.stack(list(terms)).sum(0)


class Kernel(Method):
    """softmax(s U) L V: logit j becomes the sum over m <= j of s_m u_mj, value j the sum over m <= j of l_jm v_m."""

    def full(self, matrix: Tensor, j: int, m: int, n: int) -> Tensor:
        """Entry (j, m) for a sequence of n: its newest item has the last row, or its oldest the first."""
        rows = len(matrix)
        first = 0 if self.options.get("kernel_anchor") == "start" else rows - n
        if all(0 <= first + item < rows for item in (j, m)):
            return matrix[first + j, first + m]
        return torch.tensor(float(j == m), dtype=matrix.dtype)

    def u(self, m: int, j: int, n: int, head: int) -> Tensor:
        zero = torch.zeros((), dtype=torch.float64)
        kind = self.options.get("kernel_u", "toeplitz")
        if kind == "none":
            return zero + float(m == j)
        weights = self.weights["toeplitz" if kind == "toeplitz" else "upper"]
        weights = weights[head] if self.options.get("kernel_per_head") else weights
        if kind == "toeplitz":
            return weights[j - m] if j - m < len(weights) else zero
        return self.full(weights, m, j, n) if j - m < self.options.get("kernel_band", n) else zero

    def ell(self, j: int, m: int, n: int) -> Tensor:
        kind = self.options.get("kernel_l", "full")
        if kind == "toeplitz":
            weights = self.weights["lower_toeplitz"]
            return weights[j - m] if j - m < len(weights) else torch.zeros((), dtype=weights.dtype)
        return self.full(self.weights["lower"], j, m, n)

    def summed(self, logits: Sequence[Tensor], n: int, head: int) -> list[Tensor]:
        return [add(logits[m] * self.u(m, j, n, head) for m in range(j + 1)) for j in range(len(logits))]

    def of_target(self, score: Score, target: Tensor, history: Sequence[Tensor]) -> list[Tensor]:
        return self.summed(super().of_target(score, target, history), len(history), 0)

    def of_item(self, i: int, head: int, query: Tensor, keys: Sequence[Tensor], n: int) -> list[Tensor]:
        return self.summed(super().of_item(i, head, query, keys, n), n, head)

    def pooling(self, attention: Tensor, i: int, n: int, head: int) -> Tensor:
        if self.options.get("kernel_l") == "none":
            return attention
        seen = len(attention)
        return torch.stack([add(attention[j] * self.ell(j, m, n) for j in range(m, seen)) for m in range(seen)])


class PDM(Method):
    """a + softmax over the same items of (W_Q P[D_i]) · (W_K P[D_j]) / sqrt(d)."""

    def of_target(self, score: Score, target: Tensor, history: Sequence[Tensor]) -> list[Tensor]:
        self.head_dim = len(target)
        return super().of_target(score, target, history)

    def of_item(self, i: int, head: int, query: Tensor, keys: Sequence[Tensor], n: int) -> list[Tensor]:
        self.head_dim = len(query)
        return super().of_item(i, head, query, keys, n)

    def pooling(self, attention: Tensor, i: int, n: int, head: int) -> Tensor:
        def projected(name: str, j: int) -> Tensor:
            whole = self.weights[name] @ row(self.weights["table"], n - j)
            return whole[head * self.head_dim : (head + 1) * self.head_dim]

        query = projected("query.weight", i)
        logits = [query @ projected("key.weight", j) / math.sqrt(self.head_dim) for j in range(len(attention))]
        return attention + softmax(logits)


METHODS: dict[str, type[Method]] = {"kernel": Kernel, "pdm": PDM}
