"""EulerFormer, positions as rotations of phases (Tian et al. 2024, arXiv 2403.17729).

B batch, L history slots, N real items of the batch, H heads, D item dim, d = D / H head dim, R rows of a block, W its
slots, P planes: pairs of coordinates, each a complex number λ e^(iθ) with modulus λ and phase θ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from ctr_pe.config.schema import Chance, Positive, Weight
from ctr_pe.pe.base import About, PositionEncoding, Target
from ctr_pe.pe.contextual import widen
from ctr_pe.pe.rotation import Turn, phases, planes, rotate_planes, rotated
from ctr_pe.pe.vectors import Attended, TargetVectors
from ctr_pe.sequence.jagged import per_target
from ctr_pe.sequence.positions import Positions, Where
from ctr_pe.utils.random_generators import RandomGenerators


class Euler(PositionEncoding):
    """Phases of queries and keys are scaled, shifted and rotated by the position (equations 3 to 13).

    Input: h'_j = (h_j + p[D_j]) rotated by ψ[D_j], the target likewise with row 0, once for queries, keys and values
    (equations 5, 6). Each layer: λ_q e^(i(δ θ_q + b)) for queries and λ_k e^(i δ θ_k) for keys, both rotated by
    -distance · g with g_c = 10000^(-2c/d) (equations 7 to 12), so that a dot product is the sum over planes of
    λ_q λ_k cos(δ (θ_q - θ_k) + b + offset · g). The target lies at distance 0, so the same rule serves any score
    function (one-sided form). With δ = 1 and b = 0 it is RoPE. The last coordinate of an odd d stays as it is. Where δ
    is no integer, logits jump where a phase goes from π to -π.

    Phase contrast (equations 14, 15), with a weight above 0 and in training: each item's phases, before positions, are
    to be nearer to a randomly masked copy of themselves than to those of the row's other items; of queries and of keys,
    summed over items and averaged over the rows of the batch. Masked phases are 0. Layers add theirs up. The phases of
    all heads form one vector. One target has no other to differ from: target attention contrasts its keys alone.

    Args:
        position_index: of p and ψ, see :class:`~ctr_pe.pe.naive.Naive`.
        euler_adaptation: δ and b per plane (``vector``), one for all planes (``scalar``, as in the authors' code), or
            ``none``, fixed at 1 and 0: the paper's "w/o adaptation function".
        euler_frequencies: g ``fixed``; ``learned`` from there (with euler_adaptation ``none``: "w learnable positional
            encoding"); or ``none``, no rotation by position: "w/o differential rotation".
        euler_rotary_embedding: rotate the input by ψ; False is "w/o rotary embedding".
        euler_planes: pairs of coordinates and their g ``per_head``; or of the ``full`` item, before it is split into
            heads, as in the authors' code.
        euler_layout: ``half`` pairs coordinate c with c + d/2; ``interleaved``, as in their code, 2c with 2c + 1.
        euler_contrast: weight of the phase contrast (paper: 1e-4 to 1e-6); 0, "w/o phase-contrastive learning".
        euler_temperature: divides the sums of cosines (paper: 0.5 to 10).
        euler_mask_rate: share of the phases that is masked.

    Parameters: of the lowest layer ``table (max_len + 1, D)``, p, N(0, 0.02), and ``psi (max_len + 1, D/2)``, zeros;
    older items use the last row. Of each layer ``scale``, δ, ones, ``shift``, b, zeros, and ``frequencies`` where
    learned, each (d/2,), with ``full`` planes (D/2,), scalars (1,); with phase contrast ``phase_weight (H · d/2,)``,
    w, ones.

    Raises:
        ValueError: an unknown choice, or a number out of range.
    """

    about = About(
        paper="Tian 2024",
        equation="after h_j ← (h_j + p[D_j]) e^(i ψ[D_j]): score(λ_t e^(i (δ θ_t + b)), λ_j e^(i (δ θ_j - D_j g)))",
        cost="2 L d, and an arctangent, a sine and a cosine per pair of coordinates; 3 D per item, once",
        extrapolates="last row of p and ψ; the rotation yes",
    )

    def __init__(
        self,
        dim: int,
        max_len: int,
        num_heads: int = 1,
        *,
        position_index: Literal["distance", "rank"] = "distance",
        euler_adaptation: Literal["vector", "scalar", "none"] = "vector",
        euler_frequencies: Literal["fixed", "learned", "none"] = "fixed",
        euler_rotary_embedding: bool = True,
        euler_planes: Literal["per_head", "full"] = "per_head",
        euler_layout: Literal["half", "interleaved"] = "half",
        euler_contrast: Weight = 0.0,
        euler_temperature: Positive = 1.0,
        euler_mask_rate: Chance = 0.5,
    ) -> None:
        super().__init__(dim, max_len, num_heads)
        self.from_oldest = position_index == "rank"
        self.rotates = euler_frequencies != "none"
        self.full, self.interleaved = euler_planes == "full", euler_layout == "interleaved"
        self.contrast, self.temperature, self.mask_rate = euler_contrast, euler_temperature, euler_mask_rate
        self.width = dim if self.full else self.head_dim  # of the vectors that planes are taken from
        planes = self.width // 2

        self.table: nn.Parameter | None = nn.Parameter(torch.empty(max_len + 1, dim))
        nn.init.normal_(self.table, std=0.02)
        self.psi = nn.Parameter(torch.zeros(max_len + 1, dim // 2)) if euler_rotary_embedding else None
        self.scale: nn.Parameter | None = None
        self.shift: nn.Parameter | None = None
        if euler_adaptation != "none":
            size = planes if euler_adaptation == "vector" else 1
            self.scale, self.shift = nn.Parameter(torch.ones(size)), nn.Parameter(torch.zeros(size))
        learned = euler_frequencies == "learned"
        self.frequencies = (
            nn.Parameter(self._fixed_frequencies(torch.get_default_dtype(), torch.device("cpu"))) if learned else None
        )
        if euler_contrast > 0:
            self.loss_names = ("phase contrast",)
            self.phase_weight = nn.Parameter(torch.ones(planes if self.full else num_heads * planes))
            self.generators = RandomGenerators(int(torch.randint(2**62, ())))

    def embed(self, target: Target, history: Tensor, positions: Positions) -> tuple[Target, Tensor]:
        if self.table is None:
            return target, history
        index = positions.like(history, positions.rank - 1 if self.from_oldest else positions.distance)
        if target is None:
            moved = self._at_input(history, index)
        else:  # in one go
            own = positions.lengths if self.from_oldest else positions.lengths.new_zeros(1)
            indices = per_target(own, target).expand(target.shape[:-1]), index
            both = torch.cat([target.flatten(0, -2), history.flatten(0, -2)])
            parts = [one.numel() for one in indices]
            of_both = self._at_input(both, torch.cat([one.flatten() for one in indices]))
            own_moved, moved = torch.split(of_both, parts)
            target, moved = own_moved.view_as(target), moved.view_as(history)
        if history.dim() == 3:  # padding keeps what it holds
            moved = torch.where(positions.mask.unsqueeze(-1), moved, history)
        return target, moved

    def rotate(self, query: Tensor, keys: Tensor, query_at: Where, keys_at: Where) -> tuple[Tensor, Tensor]:
        if self.scale is None and not self.rotates:
            return query, keys
        turn = self._turn(keys)
        of_keys = keys_at.distance.unsqueeze(-1) * turn
        of_query = of_keys if query_at is keys_at else query_at.distance.unsqueeze(-1) * turn
        if self.shift is not None:
            of_query = of_query + self.shift
        more = None if self.scale is None else self.scale.to(turn.dtype) - 1  # than the phase that there is
        return self._rotated(query, of_query, more), self._rotated(keys, of_keys, more)

    def losses(self, attended: Sequence[Attended]) -> dict[str, Tensor]:
        if not self.contrast or not attended:
            return {}
        losses = []
        for one in attended:
            query, block = one.vectors.query, one.pairs.block
            with torch.autocast(query.device.type, enabled=False):
                if isinstance(one.vectors, TargetVectors):  # rows of like length together: the cost is length squared
                    for part in one.pairs.positions.blocks:
                        keys = part.pad(one.vectors.packed).unsqueeze(1)
                        losses.append(self._phase_loss(keys, None, part.mask))
                else:
                    losses.append(self._phase_loss(query, self.shift, block.mask))
                    losses.append(self._phase_loss(one.vectors.keys, None, block.mask))
        rows = len(attended[0].pairs.positions.mask)
        total = torch.stack(losses).sum() if losses else self.phase_weight.new_zeros(())
        return {"phase contrast": self.contrast * total / max(rows, 1)}

    def next_layer(self, fresh: Callable[[], PositionEncoding]) -> PositionEncoding:
        above = fresh()
        assert isinstance(above, Euler)
        above.table = above.psi = None  # they act once, at the input
        return above

    def _at_input(self, items: Tensor, index: Tensor) -> Tensor:
        """items (..., D) with position added and their phases rotated by ψ; index (...) of the rows."""
        rows = index.clamp(0, self.max_len)
        assert self.table is not None
        moved = items + nn.functional.embedding(rows, self.table)
        if self.psi is None:
            return moved
        return rotate_planes(moved, Turn.of(nn.functional.embedding(rows, self.psi)), interleaved=self.interleaved)

    def _rotated(self, vectors: Tensor, angle: Tensor, more: Tensor | None) -> Tensor:
        """vectors (..., d) rotated by angle (..., P) and, with ``more``, δ - 1, by (δ - 1) θ."""
        parts = self._planes(vectors)
        if more is not None:
            angle = torch.addcmul(angle, phases(*parts[:2]), more)
        moved = rotated(parts, Turn.of(angle), self.interleaved).to(vectors.dtype)
        if self._merges:
            moved = moved.squeeze(-3).view(*moved.shape[:-3], -1, self.num_heads, self.head_dim).transpose(-3, -2)
        return moved

    @property
    def _merges(self) -> bool:
        return self.full and self.num_heads > 1

    def _merged(self, vectors: Tensor) -> Tensor:
        """vectors of which planes are taken: those of the heads (B, H, L, d), or of the whole item (B, 1, L, D)."""
        return vectors.transpose(-3, -2).flatten(-2).unsqueeze(-3) if self._merges else vectors

    def _planes(self, vectors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of vectors (..., d): real parts, imaginary parts and the rest, without -0."""
        return planes(widen(self._merged(vectors)) + 0.0, self.interleaved)

    def _turn(self, like: Tensor) -> Tensor:
        """-g (P,), or one zero, in float32 at least: in half precision fast planes are soon off."""
        dtype = torch.promote_types(like.dtype, torch.float32)
        if not self.rotates:
            return like.new_zeros(1, dtype=dtype)
        if self.frequencies is None:
            return -self._fixed_frequencies(dtype, like.device)
        return -self.frequencies.to(dtype)

    def _fixed_frequencies(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        count = self.width // 2
        return 10000.0 ** torch.linspace(0.0, -2.0 * (count - 1) / self.width, count, dtype=dtype, device=device)

    def _phase_loss(self, vectors: Tensor, shift: Tensor | None, real: Tensor) -> Tensor:
        """Phase contrast of vectors (R, H, W, d), summed over the real ones (R, W)."""
        phase = phases(*self._planes(vectors)[:2])
        if self.scale is not None:
            phase = phase * self.scale
        if shift is not None:
            phase = phase + shift
        phase = phase.transpose(1, 2).flatten(2)  # (R, W, P)
        kept = self._draw(phase.shape).to(phase.device)
        return phase_contrast(phase, kept, real, self.phase_weight / self.temperature)

    def _draw(self, shape: torch.Size) -> Tensor:
        """Which phases stay, bool."""
        draw = self.generators.next()
        # Four numbers of 16 bits from each of 64: a fifth of the time.
        drawn = torch.empty(-(-shape.numel() // 4), dtype=torch.int64).random_(-(2**63), None, generator=draw)
        numbers = drawn.view(torch.int16)[: shape.numel()].view(shape).int()
        return numbers >= round(self.mask_rate * 2**16) - 2**15


def phase_contrast(phase: Tensor, kept: Tensor, real: Tensor, weight: Tensor) -> Tensor:
    """Equation 14, summed over rows: -log softmax over j' of w · cos(θ_j - θ̄_j') at j' = j.

    Args:
        phase: θ (R, W, P).
        kept: (R, W, P) bool; elsewhere θ̄ is 0.
        real: (R, W) bool, the items; no other is an anchor or a negative.
        weight: w (P,), over the temperature.
    """
    one = torch.cat([torch.ones_like(weight), torch.zeros_like(weight)])
    phasors = rotate_planes(one.expand(*phase.shape[:-1], -1), Turn.of(phase))  # cosines, then sines
    masked = torch.lerp(one, phasors, torch.cat([kept, kept], -1).to(phase.dtype))
    logits = weight.repeat(2) * phasors @ masked.transpose(-1, -2)  # cos(a - b) = cos a cos b + sin a sin b
    logits = logits.masked_fill(~real.unsqueeze(1), torch.finfo(logits.dtype).min)
    return -logits.log_softmax(-1).diagonal(dim1=-2, dim2=-1)[real].sum()
