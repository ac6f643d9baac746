"""RoPE, rotary position embedding (Su et al. 2021, arXiv 2104.09864; CAPE paper, section 3.1)."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Literal

import torch
from torch import Tensor

from ctr_pe.config.schema import Positive
from ctr_pe.pe.base import About, PositionEncoding
from ctr_pe.pe.rotation import Turn, rotate_planes
from ctr_pe.sequence.positions import Where


class RoPE(PositionEncoding):
    """Rotates each pair of coordinates by -distance · base^(-2c/d), so that a dot product depends on offsets only.

    The target is at distance 0 and is not rotated, so the same rule serves self-attention and any score function of
    target attention (one-sided form). The last coordinate of an odd head dim stays as it is.

    Args:
        rope_base: base of the frequencies.
        rope_layout: ``half`` pairs coordinate c with c + d/2, ``interleaved`` pairs 2c with 2c + 1.

    Raises:
        ValueError: an unknown rope_layout.
    """

    about = About(
        paper="Su 2021",
        equation="score(t, R(-D_j) h_j), R(m) rotates plane c by m · base^(-2c/d)",
        cost="2 L d",
        extrapolates="yes",
    )

    def __init__(
        self,
        dim: int,
        max_len: int,
        num_heads: int = 1,
        *,
        rope_base: Positive = 10000.0,
        rope_layout: Literal["half", "interleaved"] = "half",
    ) -> None:
        super().__init__(dim, max_len, num_heads)
        self.interleaved = rope_layout == "interleaved"
        self.base = float(rope_base)

    def rotate(self, query: Tensor, keys: Tensor, query_at: Where, keys_at: Where) -> tuple[Tensor, Tensor]:
        return self._turned(query, query_at), self._turned(keys, keys_at)

    def _turned(self, vectors: Tensor, at: Where) -> Tensor:
        """Angles do not depend on the vectors, so layers share them."""
        # Angles in float32 at least: in half precision the fastest planes would be off after a few positions.
        dtype = torch.promote_types(vectors.dtype, torch.float32)
        turn = at.once(
            (self.angle_name, dtype, self.num_heads), lambda: Turn.of(self.angles(at, dtype)).of_heads(vectors)
        )
        return rotate_planes(vectors, turn, interleaved=self.interleaved)

    @property
    def angle_name(self) -> Hashable:
        """What encodings with the same angles have in common."""
        return RoPE, self.base, self.head_dim

    def angles(self, at: Where, dtype: torch.dtype) -> Tensor:
        """(..., d / 2), of the planes of vectors that stand there."""
        return self.by_order(at, dtype, self.head_dim)

    def by_order(self, at: Where, dtype: torch.dtype, width: int) -> Tensor:
        """Angles (..., width / 2) of vectors that are ``width`` wide."""
        plane = torch.arange(width // 2, device=at.distance.device, dtype=dtype)
        return -at.distance.unsqueeze(-1) * self.base ** (plane * (-2.0 / max(width, 1)))
