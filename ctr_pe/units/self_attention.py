"""Multi-head self-attention over a sequence of items (BST, SASRec, DMIN).

B batch, L slots, N real items of the batch, R rows of a block, W its slots, Q queries, H heads, D item dim,
d = D / H head dim.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn

from ctr_pe.pe.base import PositionEncoding
from ctr_pe.positions import Blocks, Items, Pairs, Positions
from ctr_pe.units.dropout import Dropout


class SelfAttention(nn.Module):
    """softmax(q_i · k_j / sqrt(d) and position) v_j per head, then the output projection. No residual, no norm.

    Args:
        dim: item dim D (plus ``pe.added_dim``, if the encoding widens the items).
        num_heads: H.
        pe: the encoding, built for the same dim and heads; none by default. ``embed`` is the caller's to apply.
        causal: item i sees itself and the items before it.
        dropout: rate on the attention weights.

    Projections: ``query``, ``key``, ``value``, ``output``, each (D, D) with bias.

    Raises:
        ValueError: heads do not divide dim, or an encoding of another dim or number of heads.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int = 1,
        pe: PositionEncoding | None = None,
        causal: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.pe = pe if pe is not None else PositionEncoding(dim, max_len=1, num_heads=num_heads)
        if (self.pe.dim + self.pe.added_dim, self.pe.num_heads) != (dim, num_heads):
            raise ValueError(
                f"self-attention of dim={dim}, num_heads={num_heads} needs an encoding with "
                f"dim={dim - self.pe.added_dim}, num_heads={num_heads}; "
                f"got dim={self.pe.dim}, num_heads={self.pe.num_heads}"
            )
        if dim % num_heads:
            raise ValueError(f"dim={dim} is not divisible by num_heads={num_heads}")
        self.num_heads, self.causal = num_heads, causal
        self.scale = (dim // num_heads) ** -0.5
        self.query, self.key, self.value, self.output = (nn.Linear(dim, dim) for _ in range(4))
        self.dropout = Dropout(dropout)

    def forward(self, items: Tensor, positions: Positions) -> Tensor:
        """items (B, L, D) or packed (N, D) -> states in the same layout, zero at padding.

        What padded slots of ``items`` hold does not matter; projections are computed on real items only.
        """
        packed = positions.pack(items) if items.dim() == 3 else items
        states: Tensor = self.output(self.heads(packed, positions).flatten(-2))
        return positions.spread(states) if items.dim() == 3 else states

    def heads(self, packed: Tensor, positions: Positions) -> Tensor:
        """packed items (N, D) -> what each head pools, before the output projection: (N, H, d)."""
        positions = self._carrying(packed, positions)
        projected: list[Tensor] = [project(packed) for project in (self.query, self.key, self.value)]
        blocks = positions.blocks
        if not blocks:
            return projected[2].view(0, self.num_heads, packed.shape[-1] // self.num_heads)
        sides = self._sides(positions, blocks)
        pooled = [
            block.take(self._attend(block.from_items(self.causal, self.scale), side, *map(block.place, parts)))
            for block, side, *parts in zip(blocks, sides, *map(blocks.split, projected), strict=True)
        ]
        return blocks.join(pooled)

    def newest(self, packed: Tensor, positions: Positions) -> Tensor:
        """packed items (N, D) -> the state (B, D) of each row's newest item alone, at a fraction of the cost.

        Every row has an item. An encoding with an auxiliary loss wants to see all queries.
        """
        positions = self._carrying(packed, positions)
        query: Tensor = self.query(packed.index_select(0, positions.newest))
        blocks = positions.newest_blocks
        if not blocks:
            return query
        sides, queries = self._sides(positions, blocks), blocks.split_rows(query.unsqueeze(1))
        keys, values = blocks.split(self.key(packed)), blocks.split(self.value(packed))
        pooled = [
            self._attend(block.from_newest(self.causal, self.scale), side, own, *map(block.place, parts))
            for block, side, own, *parts in zip(blocks, sides, queries, keys, values, strict=True)
        ]
        states: Tensor = self.output(blocks.join_rows(pooled).flatten(1))
        return states

    @staticmethod
    def _carrying(packed: Tensor, positions: Positions) -> Positions:
        return positions if positions.items is not None else positions.carrying(Items(packed))

    def _sides(self, positions: Positions, blocks: Blocks) -> list[dict[PositionEncoding, Tensor]]:
        """What the encoding wants to know of the items of each block."""
        assert positions.items is not None
        wanted = self.pe.side(positions.items.embedding)
        parts = {pe: blocks.split(of_items) for pe, of_items in wanted.items()}
        return [{pe: block.place(own[k]) for pe, own in parts.items()} for k, block in enumerate(blocks)]

    def _attend(
        self, pairs: Pairs, side: dict[PositionEncoding, Tensor], query: Tensor, key: Tensor, value: Tensor
    ) -> Tensor:
        """query (R, Q, D), key and value (R, W, D) -> (R, Q, H, d)."""
        pairs = replace(pairs, side=side) if side else pairs
        query, key, value = (x.view(*x.shape[:2], self.num_heads, -1) for x in (query, key, value))
        return self.pe.attend(query, key, value, pairs, self.dropout)
