"""CAPE with gates that are not made of the logits: constant, by category, and by a cosine of their own; and that cosine
without CAPE."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tests.support.reference import Method, Score, between_rows


class ConstantCAPE(Method):
    def embed(self, target: Tensor | None, history: Sequence[Tensor]) -> tuple[Tensor | None, Sequence[Tensor]]:
        self.items = [*history] if target is None else [*history, target]  # as looked up
        return target, history

    def gate(self, i: int, j: int) -> Tensor:
        """Of item j, where item i asks; the target is the last of ``items``."""
        return torch.tensor(0.5).double()

    def biased(self, i: int, query: Tensor, logits: Sequence[Tensor], between: bool) -> list[Tensor]:
        hidden = self.weights["gate.weight"] @ query + self.weights["gate.bias"]
        gated, found = hidden * torch.sigmoid(hidden), []
        for j, s in enumerate(logits):
            counted = range(min(i, j), max(i, j) + 1) if between else range(j, len(logits))
            place = torch.stack([self.gate(i, k) for k in counted]).sum()
            found.append(s + gated @ between_rows(self.weights["table"], place))
        return found

    def of_target(self, score: Score, target: Tensor, history: Sequence[Tensor]) -> list[Tensor]:
        return self.biased(len(history), target, super().of_target(score, target, history), False)

    def of_item(self, i: int, head: int, query: Tensor, keys: Sequence[Tensor], n: int) -> list[Tensor]:
        between = self.options.get("position_span") == "between"
        return self.biased(i, query, super().of_item(i, head, query, keys, n), between)


class OracleCAPE(ConstantCAPE):
    def gate(self, i: int, j: int) -> Tensor:
        return torch.tensor(float(self.ids[i] != self.ids[j])).double()


class CosineCAPE(ConstantCAPE):
    def gate(self, i: int, j: int) -> Tensor:
        return 1 - torch.sigmoid(self.weights["steepness"] * (self.cosine(i, j) - self.weights["middle"]))

    def cosine(self, i: int, j: int) -> Tensor:
        """Of whole items, or the weighted mean over their fields."""
        apart = self.options.get("likeness_of") != "item" and "field_dims" in self.options
        widths = self.options["field_dims"] if apart else [len(self.items[0])]
        share = torch.softmax(self.weights["field_weights"], 0) if apart else torch.ones(1).double()
        mean, start = torch.zeros(()).double(), 0
        for width, weight in zip(widths, share, strict=True):
            field, start = slice(start, start + width), start + width
            x, h = (self.weights["projection"][:, field] @ self.items[k][field] for k in (i, j))
            mean = mean + weight * (x @ h) / torch.sqrt((x @ x + 1e-10) * (h @ h + 1e-10))
        return mean


class Likeness(CosineCAPE):
    """Each item at its own gate; no other item counts."""

    def biased(self, i: int, query: Tensor, logits: Sequence[Tensor], between: bool) -> list[Tensor]:
        hidden = self.weights["gate.weight"] @ query + self.weights["gate.bias"]
        closed, opened = self.weights["table"] @ (hidden * torch.sigmoid(hidden))
        gates = [self.gate(i, j) for j in range(len(logits))]
        return [s + (1 - gate) * closed + gate * opened for s, gate in zip(logits, gates, strict=True)]


METHODS: dict[str, type[Method]] = {
    "cape_constant": ConstantCAPE,
    "cape_oracle": OracleCAPE,
    "cape_cosine": CosineCAPE,
    "likeness": Likeness,
}
