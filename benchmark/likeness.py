"""Likeness to the target without order: a control for what ``cape_cosine`` brings.

Its gates are made of a likeness that a model may lack, and what they add to the logits tells of it twice: by the unlike
items between an item and the target, which is context, and by the item's own gate, which is a match and no position.
Here there is the own gate alone. In a chain with ``cape_constant``, which has the distance, all that ``cape_cosine``
has above it is what it counts between.

example:
  PYTHONPATH=benchmark ctr-pe benchmark --model TIN --dataset amazon_sports --repeats 10 \\
      --pe none,cape_constant,cape_cosine,cape_constant+likeness:OwnGate
"""

from __future__ import annotations

import torch
from torch import Tensor

from ctr_pe.pe.cape_cosine import CosineCAPE
from ctr_pe.pe.vectors import Vectors
from ctr_pe.sequence.positions import Pairs


class OwnGate(CosineCAPE):
    """``cape_cosine`` with p_j = g_j: every item at its own gate, whatever lies between it and the target."""

    def bias(self, logits: Tensor, vectors: Vectors, pairs: Pairs) -> Tensor:
        assert self.gate is not None
        gates = torch.sigmoid(-self.gate_logits(pairs))
        of_rows: Tensor = torch.nn.functional.silu(self.gate(vectors.query)) @ self.table[:2].T  # (B, H, Q, 2)
        closed, opened = of_rows[..., :1], of_rows[..., 1:]
        return logits + closed + gates * (opened - closed)
