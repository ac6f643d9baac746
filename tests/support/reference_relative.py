"""Sinusoidal positions, and the encodings that depend on offsets alone: T5, ALiBi, KERPLE, XLNet."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tests.support.reference import Method, Score, dot


def wave(position: int, c: int, dim: int) -> float:
    return position * float(10000.0 ** (-2 * c / dim))


class Sinusoidal(Method):
    def row(self, position: int, like: Tensor) -> Tensor:
        out = torch.zeros_like(like)
        for column in range(len(like)):
            angle = wave(position, column // 2, len(like))
            out[column] = math.sin(angle) if column % 2 == 0 else math.cos(angle)
        return out

    def embed(self, target: Tensor | None, history: Sequence[Tensor]) -> tuple[Tensor | None, Sequence[Tensor]]:
        n, by_rank = len(history), self.options.get("position_index") == "rank"
        moved = [h + self.row(j if by_rank else n - j, h) for j, h in enumerate(history)]
        if target is not None and self.options.get("on_target", True):
            target = target + self.row(n if by_rank else 0, target)
        return target, moved


class Relative(Method):
    """Adds ``beta`` of head and offset, which is that of the query minus that of the key."""

    def beta(self, head: int, offset: int) -> Tensor:
        raise NotImplementedError

    def of_target(self, score: Score, target: Tensor, history: Sequence[Tensor]) -> list[Tensor]:
        n = len(history)
        return [score(target, h) + self.beta(0, n - j) for j, h in enumerate(history)]

    def of_item(self, i: int, head: int, query: Tensor, keys: Sequence[Tensor], n: int) -> list[Tensor]:
        logits = super().of_item(i, head, query, keys, n)
        return [s + self.beta(head, i - j) for j, s in enumerate(logits)]


class T5(Relative):
    def beta(self, head: int, offset: int) -> Tensor:
        buckets = 32 if self.causal else 16
        distance, bucket = abs(offset), 16 if offset < 0 else 0
        if distance < buckets // 2:
            bucket += distance
        else:
            share = math.log2(distance / (buckets // 2)) / math.log2(128 / (buckets // 2))
            bucket += min(buckets // 2 + math.floor(share * (buckets // 2)), buckets - 1)
        return self.weights["table"][bucket, head]


class ALiBi(Relative):
    def beta(self, head: int, offset: int) -> Tensor:
        last, heads = self.options.get("alibi_slope", 2**-8), len(self.weights["slopes"])
        below = 2 ** math.floor(math.log2(heads))
        exponents = [h / below for h in range(1, below + 1)]
        exponents += [h / (2 * below) for h in range(1, 2 * below + 1)][::2][: heads - below]
        return torch.tensor(-(last ** exponents[head]) * abs(offset), dtype=torch.float64)


class KerpleLog(Relative):
    def beta(self, head: int, offset: int) -> Tensor:
        a, b = (torch.log(1 + torch.exp(self.weights[name][head])) for name in ("r1", "r2"))
        return -a * torch.log(1 + b * abs(offset))


class KerplePower(Relative):
    def beta(self, head: int, offset: int) -> Tensor:
        a = torch.log(1 + torch.exp(self.weights["r1"][head]))
        b = 2 / (1 + torch.exp(-self.weights["r2"][head]))
        return -a * abs(offset) ** b


class XLNet(Method):
    def position(self, offset: int, head: int, size: int) -> Tensor:
        weight = self.weights["projection.weight"]
        dim = weight.shape[1]
        sines = [math.sin(wave(offset, c, dim)) for c in range(math.ceil(dim / 2))]
        cosines = [math.cos(wave(offset, c, dim)) for c in range(dim // 2)]
        projected: Tensor = weight @ torch.tensor(sines + cosines, dtype=torch.float64)
        return projected[head * size : (head + 1) * size]

    def added(self, query: Tensor, key: Tensor, offset: int, head: int) -> Tensor:
        u, v = self.weights["content_bias"][head], self.weights["position_bias"][head]
        return u @ key + (query + v) @ self.position(offset, head, len(key))

    def of_target(self, score: Score, target: Tensor, history: Sequence[Tensor]) -> list[Tensor]:
        n, query = len(history), getattr(score, "project", lambda x: x)(target)
        scale = 1 / math.sqrt(len(target)) if score is dot else 1.0
        return [score(target, h) + self.added(query, h, n - j, 0) * scale for j, h in enumerate(history)]

    def of_item(self, i: int, head: int, query: Tensor, keys: Sequence[Tensor], n: int) -> list[Tensor]:
        return [(query @ k + self.added(query, k, i - j, head)) / math.sqrt(len(k)) for j, k in enumerate(keys)]


METHODS: dict[str, type[Method]] = {
    "sinusoidal": Sinusoidal,
    "t5": T5,
    "alibi": ALiBi,
    "kerple_log": KerpleLog,
    "kerple_power": KerplePower,
    "xlnet": XLNet,
}
