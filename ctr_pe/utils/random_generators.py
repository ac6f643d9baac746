"""Random numbers that are no part of torch's stream, so that other draws of training stay the same without them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn


class RandomGenerators:
    """Generators of the CPU one after another, whatever the device, so that all draw the same."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def next(self) -> torch.Generator:
        self.seed = (self.seed + 1) % 2**63
        return torch.Generator().manual_seed(self.seed)

    def state_dict(self) -> dict[str, int]:
        return {"seed": self.seed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.seed = int(state["seed"])


def generators_of(model: nn.Module) -> Iterator[tuple[str, RandomGenerators]]:
    """Those that modules keep as ``generators``, by the name of the module."""
    for name, module in model.named_modules():
        if isinstance(found := getattr(module, "generators", None), RandomGenerators):
            yield name, found
