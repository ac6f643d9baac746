"""DIF-SR: scores per source, written with loops, and their fusion (equations 8 to 10)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tests.support.reference import Method, Score, row, softmax


class DIF(Method):
    def embed(self, target: Tensor | None, history: Sequence[Tensor]) -> tuple[Tensor | None, Sequence[Tensor]]:
        self.target, self.items = target, history  # sources are the items as looked up
        return target, history

    def product(self, name: str, at_query: Tensor, at_key: Tensor, head: int, heads: int) -> Tensor:
        """(E WQ) (E WK) of one head and pair, scaled as the item's dot product is."""
        queried, keyed = (
            self.weights[f"{name}.{side}.weight"] @ e for side, e in (("query", at_query), ("key", at_key))
        )
        size = len(queried) // heads
        mine = range(head * size, (head + 1) * size)
        product = sum((queried[c] * keyed[c] for c in mine), torch.zeros_like(queried[0]))
        return product / math.sqrt(len(self.items[0]) // heads)

    def added(self, at_query: Tensor, place: int, keys: Sequence[int], head: int, heads: int) -> list[list[Tensor]]:
        """Per added source a row of scores; the query is at distance ``place``."""
        n, start, rows = len(self.items), 0, []
        for f, width in enumerate(self.options.get("field_dims", [len(at_query)])):
            field, start = slice(start, start + width), start + width
            if f > 0:
                name = f"sources.{f}"
                rows.append([self.product(name, at_query[field], self.items[j][field], head, heads) for j in keys])
        if "table" in self.weights:
            table = self.weights["table"]
            rows.append([self.product("position", row(table, place), row(table, n - j), head, heads) for j in keys])
        return rows

    def fused(self, rows: Sequence[Sequence[Tensor]], columns: Sequence[int]) -> list[Tensor]:
        """Rows of scores, the item's first, to one; the key at j stands in column ``columns[j]``."""
        zero, keys = torch.zeros_like(rows[0][0]), range(len(columns))
        fusion = self.options.get("dif_fusion", "sum") if len(rows) > 1 else "sum"
        total = [sum((scores[j] for scores in rows), zero) for j in keys]
        if fusion == "concat":
            weight = self.weights["concat"]
            seen = [k for k in keys if columns[k] < len(weight)]
            for j in seen:
                pairs = ((s, k) for s in range(len(rows)) for k in seen)
                total[j] = sum((weight[columns[j], s, columns[k]] * rows[s][k] for s, k in pairs), zero)
        if fusion == "gate":
            inner, shift, outer = (self.weights[f"gate.{name}"] for name in ("0.weight", "0.bias", "1.weight"))
            seen, energies = [k for k in keys if columns[k] < len(inner)], []
            for scores in rows:
                hidden = [b + sum(w[columns[k]] * scores[k] for k in seen) for w, b in zip(inner, shift, strict=True)]
                energies.append(sum(w * max(h, zero) for w, h in zip(outer[0], hidden, strict=True)))
            share = softmax(energies)
            total = [sum((share[s] * scores[j] for s, scores in enumerate(rows)), zero) for j in keys]
        return total

    def of_target(self, score: Score, target: Tensor, history: Sequence[Tensor]) -> list[Tensor]:
        n, item = len(history), super().of_target(score, target, history)
        return self.fused([item, *self.added(target, 0, range(n), 0, 1)], [n - j - 1 for j in range(n)])

    def of_item(self, i: int, head: int, query: Tensor, keys: Sequence[Tensor], n: int) -> list[Tensor]:
        seen, heads = range(len(keys)), len(self.items[0]) // len(query)
        rows = [super().of_item(i, head, query, keys, n), *self.added(self.items[i], n - i, seen, head, heads)]
        return self.fused(rows, [i - j if self.causal else n - j - 1 for j in seen])


METHODS: dict[str, type[Method]] = {"dif": DIF}
