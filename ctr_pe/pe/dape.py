"""DAPE, data-adaptive positional encoding (Zheng et al. 2024, arXiv 2405.14722).

B batch, L keys, Q queries, H heads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

from ctr_pe.pe.alibi import ALiBi
from ctr_pe.pe.base import About, PositionEncoding, PositionLinear
from ctr_pe.pe.contextual import widen
from ctr_pe.pe.fire import FIRE
from ctr_pe.pe.kerple import KerpleLog
from ctr_pe.pe.vectors import Vectors
from ctr_pe.sequence.positions import Pairs

BASES: dict[str, type[PositionEncoding]] = {"fire": FIRE, "kerple_log": KerpleLog, "alibi": ALiBi}
HIDDEN = 32


class DAPE(PositionEncoding):
    """Logits s + B + g([s_1 … s_H; B_1 … B_H]): a bias B by position, corrected by what the logits of all heads are.

    g is an MLP from 2 H to 32 to H with LeakyReLU, at each (query, key) pair alone.

    Args:
        dape_base: whose bias B is: ``fire``, ``kerple_log`` or ``alibi``.

    Parameters: ``base``, those of B; ``mlp.0 (32, 2 H)``, ``mlp.2 (H, 32)``, with bias, the last layer zeros: training
    starts exactly as with the base alone.

    Raises:
        ValueError: an unknown dape_base.
    """

    about = About(
        paper="Zheng 2024",
        equation="s_j + B_j + g(s_j, B_j), B of fire, kerple_log or alibi",
        cost="96 L, and the base's",
        extrapolates="as its base",
    )

    def __init__(
        self, dim: int, max_len: int, num_heads: int = 1, *, dape_base: Literal["fire", "kerple_log", "alibi"] = "fire"
    ) -> None:
        super().__init__(dim, max_len, num_heads)
        self.base: PositionEncoding = BASES[dape_base](dim, max_len, num_heads)
        last = PositionLinear(HIDDEN, num_heads)
        nn.init.zeros_(last.weight)
        self.mlp = nn.Sequential(PositionLinear(2 * num_heads, HIDDEN), nn.LeakyReLU(), last)

    def bias(self, logits: Tensor, vectors: Vectors, pairs: Pairs) -> Tensor:
        wide = widen(logits)
        static = self.base.plain_bias(vectors, pairs)
        assert isinstance(static, torch.Tensor)
        static = static.expand_as(wide)
        both = torch.cat([wide, static], 1).movedim(1, -1)  # (B, Q, L, 2 H)
        adapted: Tensor = self.mlp(both)
        return wide + static + adapted.movedim(-1, 1)

    def next_layer(self, fresh: Callable[[], PositionEncoding]) -> PositionEncoding:
        above = fresh()
        assert isinstance(above, DAPE)
        base = above.base
        above.base = self.base.next_layer(lambda: base)
        return above
