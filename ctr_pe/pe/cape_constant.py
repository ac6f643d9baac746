"""CAPE whose gates are all one half: a control that knows distance and no context (no paper; after CAPE)."""

from __future__ import annotations

from ctr_pe.pe.base import About
from ctr_pe.pe.cape import CAPE


class ConstantCAPE(CAPE):
    """CAPE with gates g = 1/2 in place of 1 - σ(s): p_j is half the number of items from j on, like the query or not.

    All else is CAPE's: what CAPE gains over it, it gains from context. A learned constant would move along the same
    table and could express nothing more.

    Args:
        position_dim, position_span: CAPE's.

    Parameters: CAPE's.
    """

    about = About(
        paper="–",
        equation="s_j + SiLU(W t + b) · e[p_j], p_j = D_j / 2",
        cost="as cape",
        extrapolates="last row, from distance 2 K on",
    )
    sign = 0
