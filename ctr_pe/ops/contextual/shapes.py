"""Whether the operands of contextual positions fit each other: a kernel reads memory by their shapes.

B batch, H heads, Q queries, L keys, D width of the queries, T rows of the table, P its width.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

TYPES = {"allowed": (torch.bool,), "kept": (torch.int16,), "seed": (torch.int64,), "made": (torch.float32,)}
"""Of what is not of the type of the vectors."""


def checked(
    floats: Collection[torch.dtype],
    sizes: tuple[int, ...],
    others: Mapping[str, tuple[Tensor | None, tuple[int, ...]]],
    weight: Tensor | None,
    bias: Tensor | None,
    table: Tensor,
    gate_weights: Tensor | None,
    allowed: Tensor,
) -> tuple[int, ...]:
    """Sizes (B, H, Q, L, D, P, T), if all shapes and types match.

    Args:
        floats: the types that numbers may have.
        sizes: (B, H, Q, L, D).
        others: what there is beside the operands of both operators, and the shape it must have.
    """
    (B, H, Q, L, D), (rows, P) = sizes, table.shape
    given = {
        "table": (table if weight is None else None, (rows, D)),
        "weight": (weight, (P, D)),
        "bias": (bias, (P,)),
        "gate_weights": (gate_weights, (B, H, L)),
        "allowed": (allowed, (B, 1, Q, L)),
        **others,
    }
    for name, (x, shape) in given.items():
        types = TYPES.get(name, floats)
        if x is not None and (x.shape != shape or x.dtype not in types):
            wanted = f"{tuple(shape)} {' or '.join(map(str, types))}"
            raise ValueError(f"{name} {tuple(x.shape)} {x.dtype} does not match the others: {wanted}")
    if rows == 0:
        raise ValueError("a table without rows")
    return *sizes, P, rows
