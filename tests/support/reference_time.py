"""The encodings by event times, written from their equations with loops. ``ages`` are in seconds, the target's is 0."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tests.support.reference import Method, Score, between_rows


class TimeBias(Method):
    def added(self, seconds: int, head: int) -> Tensor:
        bucket = 0
        while bucket < 31 and seconds >= 2**bucket:
            bucket += 1
        b = torch.log(1 + torch.exp(self.weights["decay"][head]))
        fading: Tensor = (1 + seconds / self.options.get("time_unit", 3600)) ** -b
        return self.weights["amount"][head] * fading + self.weights["table"][bucket, head]

    def of_target(self, score: Score, target: Tensor, history: Sequence[Tensor]) -> list[Tensor]:
        logits = super().of_target(score, target, history)
        return [s + self.added(abs(age), 0) for s, age in zip(logits, self.ages, strict=True)]

    def of_item(self, i: int, head: int, query: Tensor, keys: Sequence[Tensor], n: int) -> list[Tensor]:
        logits = super().of_item(i, head, query, keys, n)
        return [s + self.added(abs(self.ages[j] - self.ages[i]), head) for j, s in enumerate(logits)]


class TimeRoPE(Method):
    def turned(self, x: Tensor, place: int, seconds: int) -> Tensor:
        """x with its planes turned by ``place`` steps forward and ``seconds`` of clock."""
        planes, summed = len(x) // 2, self.options.get("rope_time", "split") == "sum"
        base, interleaved = self.options.get("rope_base", 1e4), self.options.get("rope_layout") == "interleaved"
        short, long = self.options.get("shortest_period", 60), self.options.get("longest_period", 365 * 24 * 3600)
        ordered = planes if summed else planes // 2
        timed = planes if summed else planes - ordered
        out = x.clone()
        for c in range(planes):
            angle = 0.0
            if c < ordered:
                angle += place * base ** (-2 * c / (len(x) if summed else 2 * ordered))
            if summed or c >= ordered:
                which = c if summed else c - ordered
                angle += (
                    2
                    * math.pi
                    * seconds
                    / math.exp(math.log(short) + (which + 0.5) / timed * (math.log(long) - math.log(short)))
                )
            a, b = (2 * c, 2 * c + 1) if interleaved else (c, c + planes)
            out[a] = x[a] * math.cos(angle) - x[b] * math.sin(angle)
            out[b] = x[a] * math.sin(angle) + x[b] * math.cos(angle)
        return out

    def of_target(self, score: Score, target: Tensor, history: Sequence[Tensor]) -> list[Tensor]:
        n = len(history)
        return [score(target, self.turned(h, j - n, -self.ages[j])) for j, h in enumerate(history)]

    def of_item(self, i: int, head: int, query: Tensor, keys: Sequence[Tensor], n: int) -> list[Tensor]:
        query = self.turned(query, i, -self.ages[i])
        turned = [self.turned(key, j, -self.ages[j]) for j, key in enumerate(keys)]
        return [query @ key / math.sqrt(len(query)) for key in turned]


class TimeCAPE(Method):
    def share(self, seconds: int, head: int) -> Tensor:
        tau = self.options.get("session_gap", 3600) * torch.exp(self.weights["stretch"][head])
        return 1 - torch.exp(-max(seconds, 0) / tau)

    def biased(
        self, query: Tensor, logits: Sequence[Tensor], position: Callable[[int, list[Tensor]], Tensor]
    ) -> list[Tensor]:
        hidden = self.weights["gate.weight"] @ query + self.weights["gate.bias"]
        gated, gates = hidden * torch.sigmoid(hidden), [1 - torch.sigmoid(s) for s in logits]
        return [s + gated @ between_rows(self.weights["table"], position(j, gates)) for j, s in enumerate(logits)]

    def of_target(self, score: Score, target: Tensor, history: Sequence[Tensor]) -> list[Tensor]:
        ages = [*self.ages, 0]

        def position(j: int, gates: list[Tensor]) -> Tensor:
            return sum((gates[k] * self.share(ages[k] - ages[k + 1], 0) for k in range(j, len(gates))), torch.zeros(()))

        return self.biased(target, super().of_target(score, target, history), position)

    def of_item(self, i: int, head: int, query: Tensor, keys: Sequence[Tensor], n: int) -> list[Tensor]:
        newest = len(keys) - 1

        def step(k: int) -> Tensor:
            """From item k to item k + 1."""
            return self.share(self.ages[k] - self.ages[k + 1], head)

        def to_newest(j: int, gates: list[Tensor]) -> Tensor:
            return sum((gates[k] * step(k) for k in range(j, newest)), gates[newest])

        def to_query(j: int, gates: list[Tensor]) -> Tensor:
            older = sum((gates[k] * step(k) for k in range(j, i)), gates[i])
            return sum((gates[k] * step(k - 1) for k in range(i + 1, j + 1)), older)

        between = self.options.get("position_span") == "between"
        return self.biased(query, super().of_item(i, head, query, keys, n), to_query if between else to_newest)


METHODS: dict[str, type[Method]] = {"time_bias": TimeBias, "time_rope": TimeRoPE, "cape_time": TimeCAPE}
