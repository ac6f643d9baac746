"""Positional kernel, learned sums along the sequence (Nabiev & Frolov 2026, arXiv 2602.21052).

B batch, L history slots, Q queries, H heads, K rows of the kernel: max_len.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor, nn

from ctr_pe.config.schema import Length
from ctr_pe.ops import native
from ctr_pe.pe.base import About, PositionEncoding
from ctr_pe.pe.contextual import widen
from ctr_pe.pe.vectors import ItemVectors, Vectors
from ctr_pe.sequence.positions import Pairs

SHARED = {"none": (), "u": ("U",), "l": ("L",), "both": ("U", "L")}


class Kernel(PositionEncoding):
    """softmax(mask(S U)) L V (equation 9) with S the logits, U upper and L lower triangular.

    U makes logit j a sum over this and earlier items, s~_j = sum of s_m u_mj for m <= j, those that are not allowed
    left out; L does so with values, a (L V), for the one query of target attention computed as (a L) V. So no item sees
    a later one. U acts on the logits of any score, and as last link of a chain on logits that have positions in them
    already: ``cape+kernel``. U and L start as the identity, so training starts exactly as without positions. Without a
    causal mask they stay triangular.

    Args:
        kernel_u: ``toeplitz``, u_mj = c_{j-m}; ``full``; ``none`` leaves the logits alone.
        kernel_l: ``full``, ``toeplitz``, or ``none`` for the values.
        kernel_shared: what the layers of a stack share: ``l``, as in the paper, ``u``, ``both`` or ``none``.
        kernel_band: items back that U reaches, the item itself counted; None for all K.
        kernel_anchor: for full U and L: row K is the newest item (``end``), or row 1 is the oldest (``start``).
        kernel_per_head: each head has a U of its own. L is one for all.

    Histories longer than K: items outside the K rows of a full matrix, the oldest with ``end``, keep plain attention
    (the matrix goes on as the identity); a Toeplitz matrix reaches K items back, from everywhere.

    Parameters: ``toeplitz (K,)``, c, or (kernel_band,); ``lower (K, K)``, of which entries above the diagonal are never
    read. Instead of them ``upper (K, K)``, read on and above the diagonal, and ``lower_toeplitz (K,)``. Those of U have
    a leading axis H if per head.

    Raises:
        ValueError: an unknown choice, or a kernel_band that is not a positive integer.
    """

    about = About(
        paper="Nabiev 2026",
        equation="softmax(s U), Σ_m u_mj s_m with u_mj = c_{j-m}, m ≤ j; items Σ_m l_jm h_m, m ≤ j",
        cost="2 L²; in self-attention L² + L d",
        extrapolates="items beyond K keep plain attention",
    )

    def __init__(
        self,
        dim: int,
        max_len: int,
        num_heads: int = 1,
        *,
        kernel_u: Literal["toeplitz", "full", "none"] = "toeplitz",
        kernel_l: Literal["full", "toeplitz", "none"] = "full",
        kernel_shared: Literal["none", "u", "l", "both"] = "l",
        kernel_band: Length | None = None,
        kernel_anchor: Literal["end", "start"] = "end",
        kernel_per_head: bool = False,
    ) -> None:
        super().__init__(dim, max_len, num_heads)
        self.band = min(kernel_band or max_len, max_len)
        self.at_end = kernel_anchor == "end"
        self.names = {
            "U": NAMES["U"][kernel_u],
            "L": NAMES["L"][kernel_l],
        }
        self.shared = tuple(self.names[factor] for factor in SHARED[kernel_shared] if self.names[factor])
        for factor, name in self.names.items():
            if name:
                start = torch.eye(max_len)
                if "toeplitz" in name:
                    start = start[0, : self.band if factor == "U" else max_len]
                if factor == "U" and kernel_per_head:
                    start = start.expand(num_heads, *start.shape)
                self.register_parameter(name, nn.Parameter(start.clone()))

    def bias(self, logits: Tensor, vectors: Vectors, pairs: Pairs) -> Tensor:
        if not self.names["U"]:
            return logits
        # What is not allowed must not enter the sums. The unit masks afterwards.
        return self._times("U", widen(logits) * pairs.float_mask, pairs)

    def mix(self, weights: Tensor, vectors: Vectors, pairs: Pairs) -> tuple[Tensor, Vectors]:
        if not self.names["L"]:
            return weights, vectors
        aligned = self.at_end or "toeplitz" in self.names["L"]
        if isinstance(vectors, ItemVectors) and weights.shape[-2] > 1 and aligned:
            values = vectors.value
            with torch.autocast(values.device.type, enabled=False):  # a (L V): the fewest products
                moved = (self.matrix("L", values.shape[-2]) @ widen(values)).to(values.dtype)
            return weights, replace(vectors, value=moved)
        # (a L) V. Weights that L moves onto padding multiply values of zero.
        return self._times("L", widen(weights), pairs), vectors

    def matrix(self, factor: str, width: int) -> Tensor:
        """``U`` or ``L`` for the newest ``width`` items (with anchor ``start`` the oldest): (width, width), or
        (H, width, width)."""
        name = self.names[factor]
        if not name:
            return torch.eye(width)
        values: Tensor = widen(getattr(self, name))
        if name == "toeplitz":
            return _toeplitz(values, width)
        if name == "lower_toeplitz":
            return _toeplitz(values, width).mT
        corner = _corner(values, width, self.at_end)
        return corner.tril() if name == "lower" else corner.triu().tril(self.band - 1)

    def _times(self, factor: str, rows: Tensor, pairs: Pairs) -> Tensor:
        """rows (B, H, Q, L) @ matrix."""
        width = rows.shape[-1]
        matrix = self.matrix(factor, width)
        if matrix.dim() == 3 and matrix.shape[0] == 1:
            matrix = matrix[0]  # of an only head
        if self.at_end or "toeplitz" in self.names[factor]:
            return _product(rows, matrix, pairs.causal)
        slot = torch.arange(width, device=rows.device)
        padding = width - pairs.block.lengths[:, None, None, None]  # (B, 1, 1, 1), in front
        rows = rows.gather(-1, ((slot + padding) % width).expand_as(rows))
        product = _product(rows, matrix, pairs.causal)
        return product.gather(-1, ((slot - padding) % width).expand_as(product))


NAMES = {
    "U": {"toeplitz": "toeplitz", "full": "upper", "none": ""},
    "L": {"full": "lower", "toeplitz": "lower_toeplitz", "none": ""},
}
"""The parameter that holds a factor."""
PIECE = 32
"""Queries; pieces of 16 to 50 take a third less time at a hundred items, and smaller matrices none."""


def _product(rows: Tensor, matrix: Tensor, causal: bool) -> Tensor:
    """rows (B, H, Q, L) @ matrix (L, L) or (H, L, L), triangular. In causal self-attention, where rows end with the
    query and nothing after it is wanted, long ones are cut into pieces that leave out half of the products."""
    queries, width = rows.shape[-2:]
    with torch.autocast(rows.device.type, enabled=False):
        if native.traced() or not (causal and queries == width >= 2 * PIECE):
            return rows @ matrix
        seen = [min(first + PIECE, width) for first in range(0, width, PIECE)]
        parts = [
            nn.functional.pad(part[..., :last] @ matrix[..., :last, :last], (0, width - last))
            for part, last in zip(torch.split(rows, PIECE, -2), seen, strict=True)
        ]
        return torch.cat(parts, -2)


def _toeplitz(first: Tensor, width: int) -> Tensor:
    """(..., K) -> (..., width, width), upper triangular: entry (m, j) is first_{j-m}, 0 for j - m >= K."""
    index = torch.arange(width, device=first.device)
    back = index - index.unsqueeze(1)
    place = back.clamp(0, first.shape[-1] - 1).flatten()
    entries = torch.unflatten(first.index_select(-1, place), -1, (width, width))
    return entries.masked_fill((back < 0) | (back >= first.shape[-1]), 0)


def _corner(matrix: Tensor, width: int, at_end: bool) -> Tensor:
    """The last (or first) width rows and columns of (..., K, K), which goes on as the identity."""
    index = torch.arange(width, device=matrix.device)
    row = index - (width - matrix.shape[-1] if at_end else 0)
    within, row = (row >= 0) & (row < matrix.shape[-1]), row.clamp(0, matrix.shape[-1] - 1)
    entries = matrix.index_select(-2, row).index_select(-1, row)
    return torch.where(within & within.unsqueeze(1), entries, (index == index.unsqueeze(1)).to(entries.dtype))
