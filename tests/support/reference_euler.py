"""EulerFormer, in complex numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tests.support.reference import Method, Score, row


class Euler(Method):
    def pairs(self, size: int) -> list[tuple[int, int]]:
        """Places of real and imaginary parts."""
        if self.options.get("euler_layout") == "interleaved":
            return [(2 * c, 2 * c + 1) for c in range(size // 2)]
        return [(c, c + size // 2) for c in range(size // 2)]

    def mapped(self, x: Tensor, moduli_and_phases: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        out = x.clone()
        for (real, imaginary), (modulus, phase) in zip(self.pairs(len(x)), moduli_and_phases, strict=True):
            out[real], out[imaginary] = modulus * torch.cos(phase), modulus * torch.sin(phase)
        return out

    def polar(self, x: Tensor) -> list[tuple[Tensor, Tensor]]:
        return [(torch.sqrt(x[a] ** 2 + x[b] ** 2), torch.atan2(x[b], x[a])) for a, b in self.pairs(len(x))]

    def placed(self, x: Tensor, index: int) -> Tensor:
        x = x + row(self.weights["table"], index)
        if "psi" not in self.weights:
            return x
        psi = row(self.weights["psi"], index)
        return self.mapped(x, [(modulus, phase + psi[c]) for c, (modulus, phase) in enumerate(self.polar(x))])

    def embed(self, target: Tensor | None, history: Sequence[Tensor]) -> tuple[Tensor | None, Sequence[Tensor]]:
        n, by_rank = len(history), self.options.get("position_index") == "rank"
        moved = [self.placed(h, j if by_rank else n - j) for j, h in enumerate(history)]
        return None if target is None else self.placed(target, n if by_rank else 0), moved

    def adapted(self, x: Tensor, shifted: bool, position: int, head: int, heads: int) -> Tensor:
        """Equations 7 to 12 for one head. With full planes its planes are those from ``head`` · d/2 on, if interleaved
        (in halves they lie in two heads, which this does not do)."""
        full = self.options.get("euler_planes") == "full"
        first, width = (head * len(x) // 2, heads * len(x)) if full else (0, len(x))
        out = []
        for c, (modulus, phase) in enumerate(self.polar(x), start=first):
            if "scale" in self.weights:
                scale, shift = self.weights["scale"], self.weights["shift"]
                phase = scale[c % len(scale)] * phase + (shift[c % len(shift)] if shifted else 0)
            frequency = self.weights.get("frequencies", [10000 ** (-2 * k / width) for k in range(width // 2)])[c]
            if self.options.get("euler_frequencies") == "none":
                frequency = 0.0
            out.append((modulus, phase + position * frequency))
        return self.mapped(x, out)

    def of_target(self, score: Score, target: Tensor, history: Sequence[Tensor]) -> list[Tensor]:
        n, query = len(history), self.adapted(target, True, 0, 0, 1)
        return [score(query, self.adapted(h, False, -(n - j), 0, 1)) for j, h in enumerate(history)]

    def of_item(self, i: int, head: int, query: Tensor, keys: Sequence[Tensor], n: int) -> list[Tensor]:
        heads = self.weights["table"].shape[1] // len(query)
        turned = self.adapted(query, True, i + 1, head, heads)
        return [
            turned @ self.adapted(key, False, j + 1, head, heads) / math.sqrt(len(query)) for j, key in enumerate(keys)
        ]


METHODS: dict[str, type[Method]] = {"euler": Euler}
