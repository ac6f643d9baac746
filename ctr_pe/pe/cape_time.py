"""CAPE whose gates grow with the pause between items, so that a session counts as one item (no paper; after CAPE).

B batch, L history slots, Q queries, H heads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ctr_pe.config.schema import Positive
from ctr_pe.pe.base import About
from ctr_pe.pe.cape import CAPE
from ctr_pe.pe.contextual import widen
from ctr_pe.pe.time_bias import ages
from ctr_pe.sequence.positions import Pairs


class TimeCAPE(CAPE):
    """CAPE with gates g_ij (1 - exp(-Δ_j / τ_h)), Δ_j the seconds between item j and the next one towards the query.

    Items of one session are seconds or minutes apart and add next to nothing, a pause of days adds a whole gate: a
    session counts as one item. In target attention the next item after the newest is the target, at age 0. Where no
    item follows, as after the query itself under a causal mask, the gate counts in full. If all pauses are long
    against τ, this is CAPE exactly. An event that seems to follow the next one has Δ = 0.

    Args:
        session_gap: τ at the start, in seconds.
        position_dim, position_span: CAPE's.

    Parameters: those of CAPE, and ``stretch (H,)``, zeros: τ_h is session_gap times its exponential.

    Raises:
        ValueError: session_gap is not a positive number, or what CAPE refuses; when called, positions without ages.
    """

    about = About(
        paper="–",
        equation="s_j + SiLU(W t + b) · e[p_j], p_j = Σ_{k=j..n} (1 - σ(s_k)) (1 - exp(-(age_k - age_{k+1}) / τ))",
        cost="d P + T P + 2 L",
        extrapolates="last row of e",
        needs_age=True,
    )

    def __init__(
        self, dim: int, max_len: int, num_heads: int = 1, *, session_gap: Positive = 3600.0, **options: Any
    ) -> None:
        super().__init__(dim, max_len, num_heads, **options)
        self.session_gap = session_gap
        self.stretch = nn.Parameter(torch.zeros(num_heads))

    def gate_weights(self, pairs: Pairs) -> Tensor:
        """(B, H, L) in [0, 1]: the part of a gate that counts between each key and the next newer one."""
        gap = widen(self.stretch).exp().view(-1, 1) * -self.session_gap
        return -torch.expm1(pairs.once("pauses", pauses) / gap)


def pauses(pairs: Pairs) -> Tensor:
    """(B, 1, L) int64: seconds between each key and the next newer one."""
    age = ages(pairs.key, "cape_time")
    return (age - nn.functional.pad(age[..., 1:], (0, 1))).clamp(min=0)
