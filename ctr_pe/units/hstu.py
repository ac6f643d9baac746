"""HSTU, hierarchical sequential transduction unit (Zhai et al. 2024, arXiv 2402.17152): pointwise attention and a gate.

N real items of the batch, R rows of a block, W its slots, H heads, D item dim, d = D / H head dim.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import silu

from ctr_pe.pe.base import Losses, PositionEncoding, check_width
from ctr_pe.pe.tables import split_heads
from ctr_pe.pe.vectors import Attended, ItemVectors
from ctr_pe.sequence.positions import Pairs, Positions
from ctr_pe.units.dropout import Dropout
from ctr_pe.units.rotated import each, rotated


class HSTU(nn.Module):
    """X + W (Norm(A V) ⊙ U), with U, V, Q, K = SiLU(P Norm(X)) and A = SiLU(Q Kᵀ and position) / T (equations 1 to 3).

    There is no softmax: how many items of the history are alike shows in the sum. The item sees itself and those before
    it. As in the authors' code the input is normed, and A is divided by a length T that is the same for all rows.

    Args:
        pe: the encoding, for the ``out_dim`` and the heads that the unit has.
        max_len: T.
        dropout: rate before W.

    Parameters: ``project (4 D, D)``, without bias, for U, V, Q and K; ``output (D, D)``, W, with bias; two layer norms.
    """

    def __init__(self, pe: PositionEncoding, max_len: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.pe, self.dim, self.num_heads, self.max_len = pe, pe.out_dim, pe.num_heads, max_len
        self.project, self.output = nn.Linear(self.dim, 4 * self.dim, bias=False), nn.Linear(self.dim, self.dim)
        self.layer_norm1, self.layer_norm2 = nn.LayerNorm(self.dim), nn.LayerNorm(self.dim)
        self.dropout = Dropout(dropout)

    def attend(self, items: Tensor, positions: Positions, pairs: list[Pairs]) -> tuple[Tensor, Losses]:
        """packed items (N, D) after ``pe.embed`` -> states (N, D), and in training the encoding's losses. ``pairs``:
        ``positions.item_pairs(True, items as looked up)``."""
        check_width(items, self.dim, self.pe)
        if not pairs:
            return items, {}
        gate, *projected = silu(self.project(self.layer_norm1(items))).chunk(4, -1)
        blocks, (value, query, key) = pairs[0].blocks, projected
        sides = rotated(self.pe, query, key, lambda: (positions.at_sequence, positions.at_sequence))
        padded = (part for both in sides for part in each(blocks.pad, both))
        attended = [self._block(*block) for block in zip(pairs, blocks.pad(value), *padded, strict=True)]
        pooled = blocks.pack([one.pooled.transpose(1, 2).flatten(2) for one in attended])
        losses = self.pe.losses(attended) if self.training and self.pe.loss_names else {}
        return items + self.output(self.dropout(self.layer_norm2(pooled) * gate)), losses

    def _block(self, pairs: Pairs, *given: Tensor) -> Attended:
        """Value, query, the same rotated, key, the same rotated, (R, W, D) each."""
        value, query, rotated_query, key, rotated_key = (split_heads(x, self.num_heads) for x in given)
        vectors = ItemVectors(query, 1.0, key, value)
        logits = self.pe.bias(rotated_query @ rotated_key.mT, vectors, pairs)
        weights = silu(logits) * pairs.float_mask.to(logits.dtype) / self.max_len
        weights, mixed = self.pe.mix(weights, vectors, pairs)
        pooled = weights.to(mixed.values.dtype) @ mixed.values  # (R, H, W, d)
        return Attended(logits, pooled, vectors, pairs)
