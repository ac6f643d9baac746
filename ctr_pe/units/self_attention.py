"""Multi-head self-attention over a sequence of items (BST, SASRec, DMIN).

B batch, L slots, N real items of the batch, R rows of a block, W its slots, Q queries, H heads, D item dim,
d = D / H head dim.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ctr_pe.ops import attention, contextual
from ctr_pe.pe.base import Losses, PositionEncoding, check_width
from ctr_pe.pe.tables import split_heads
from ctr_pe.pe.vectors import Attended, ItemVectors
from ctr_pe.sequence.jagged import gather_rows
from ctr_pe.sequence.positions import Items, Pairs, Positions
from ctr_pe.units.dropout import Dropout
from ctr_pe.units.rotated import Both, each, rotated


class SelfAttention(nn.Module):
    """softmax(q_i · k_j / sqrt(d) and position) v_j per head, then the output projection. No residual, no norm.

    Args:
        dim: item dim D, or ``pe.out_dim`` if the encoding widens the items.
        num_heads: H.
        pe: the encoding, built for the same dim and heads; none by default.
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
        if (self.pe.out_dim, self.pe.num_heads) != (dim, num_heads):
            raise ValueError(
                f"self-attention of dim={dim}, num_heads={num_heads} needs an encoding with out_dim={dim}, "
                f"num_heads={num_heads}; got out_dim={self.pe.out_dim}, num_heads={self.pe.num_heads}"
            )
        if dim % num_heads:
            raise ValueError(f"dim={dim} is not divisible by num_heads={num_heads}")
        self.dim, self.num_heads, self.causal = dim, num_heads, causal
        self.scale = (dim // num_heads) ** -0.5
        self.query, self.key, self.value, self.output = (nn.Linear(dim, dim) for _ in range(4))
        self.dropout = Dropout(dropout)

    def forward(self, items: Tensor, positions: Positions, pairs: list[Pairs] | None = None) -> Tensor:
        """items (B, L, D) or packed (N, D) after ``pe.embed`` -> states in the same layout, zero at padding.

        What padded slots of ``items`` hold does not matter; projections are computed on real items only.
        ``pairs``: ``positions.item_pairs(causal, items as looked up)``; without, the items are their own.
        """
        if items.dim() == 2:
            return self.attend(items, positions, pairs)[0]
        return positions.unpack(self.attend(positions.pack(items), positions, pairs)[0])

    def attend(
        self,
        packed: Tensor,
        positions: Positions,
        pairs: list[Pairs] | None = None,
        projected: Sequence[Tensor] | None = None,
    ) -> tuple[Tensor, Losses]:
        """:meth:`forward` of packed items (N, D), and in training the encoding's losses.

        ``projected``: query, key and value (N, D) of the items, if the caller has them.
        """
        heads, losses = self.heads(packed, positions, pairs, projected)
        return self.output(heads.flatten(-2)), losses

    def project(self, packed: Tensor) -> list[Tensor]:
        """packed items (N, D) -> query, key and value (N, D), before any rotation."""
        return [project(packed) for project in (self.query, self.key, self.value)]

    def heads(
        self,
        packed: Tensor,
        positions: Positions,
        pairs: list[Pairs] | None = None,
        projected: Sequence[Tensor] | None = None,
    ) -> tuple[Tensor, Losses]:
        """packed items (N, D) -> what each head pools, before the output projection, (N, H, d), and losses."""
        check_width(packed, self.dim, self.pe)
        pairs = positions.item_pairs(self.causal, Items(packed)) if pairs is None else pairs
        projected = projected or self.project(packed)
        if not pairs:
            return projected[2].view(0, self.num_heads, self.dim // self.num_heads), {}
        (query, key, value), blocks = projected, pairs[0].blocks
        sides = rotated(self.pe, query, key, lambda: (positions.at_sequence, positions.at_sequence))
        queries, keys = (each(blocks.pad, both) for both in sides)
        pooled, losses = self._attend(pairs, queries, keys, blocks.pad(value), with_losses=True)
        return blocks.pack(pooled), losses

    def newest(self, packed: Tensor, positions: Positions, pairs: list[Pairs] | None = None) -> Tensor:
        """packed items (N, D) -> the state (B, D) of each row's newest item alone, at a fraction of the cost.

        Every row has an item. An encoding with losses wants to see all queries. ``pairs``: of ``newest_pairs``.
        """
        check_width(packed, self.dim, self.pe)
        pairs = positions.newest_pairs(self.causal, Items(packed)) if pairs is None else pairs
        query: Tensor = self.query(gather_rows(packed, positions.newest))
        if not pairs:
            return query
        key, value = self.keys_values(packed)
        blocks = pairs[0].blocks
        queries, keys = rotated(self.pe, query, key, lambda: (positions.at_newest, positions.at_sequence))
        of_rows = each(lambda x: blocks.split_rows(x.unsqueeze(1)), queries)
        pooled, _ = self._attend(pairs, of_rows, each(blocks.pad, keys), blocks.pad(value))
        states: Tensor = self.output(blocks.join_rows(pooled).flatten(1))
        return states

    def keys_values(self, packed: Tensor) -> tuple[Tensor, Tensor]:
        """packed items (N, D) -> their keys and values (N, D), before any rotation: what later queries see of them."""
        return self.key(packed), self.value(packed)

    def candidates(self, target: Tensor, keys: Tensor, values: Tensor, pairs: Pairs) -> Tensor:
        """The states (B, K, D) of K targets (B, K, D) that each come after the same history.

        ``keys``, ``values`` (N, D): :meth:`keys_values` of the histories. ``pairs``:
        :meth:`~ctr_pe.sequence.positions.Positions.candidate_pairs` of their positions.
        """
        histories, (rows, count, dim) = pairs.histories, target.shape
        assert histories is not None
        (block,) = histories.whole

        def with_target(of_both: Tensor) -> Tensor:
            """Of the histories' items, then of the targets, (N + B K, D) -> (B K, L + 1, D)"""
            of_history, of_target = torch.split(of_both, [of_both.shape[0] - rows * count, rows * count])
            shared = block.pad(of_history).unsqueeze(1).expand(-1, count, -1, -1)
            return torch.cat([shared, of_target.view(rows, count, 1, dim)], 2).flatten(0, 1)

        own = target.flatten(0, 1)
        query, key, value = self.query(own), torch.cat([keys, self.key(own)]), torch.cat([values, self.value(own)])
        queries, both_keys = rotated(self.pe, query, key, lambda: histories.at_candidates(count))
        of_rows = each(lambda x: x.unsqueeze(1), queries)
        pooled, _ = self._block(pairs, of_rows, each(with_target, both_keys), with_target(value))
        states: Tensor = self.output(pooled.flatten(1))
        return states.view(rows, count, dim)

    def _attend(
        self,
        pairs: list[Pairs],
        queries: Both[list[Tensor]],
        keys: Both[list[Tensor]],
        values: list[Tensor],
        with_losses: bool = False,
    ) -> tuple[list[Tensor], Losses]:
        """Block by block: queries (R, Q, D), keys and values (R, W, D) -> what is pooled (R, Q, H, d); and losses."""
        sides = (zip(*both, strict=True) for both in (queries, keys))
        attended = [self._block(*block) for block in zip(pairs, *sides, values, strict=True)]
        learned = [one for _, one in attended if one is not None]
        losses = self.pe.losses(learned) if with_losses and self._learns else {}
        return [pooled for pooled, _ in attended], losses

    @property
    def _learns(self) -> bool:
        return self.training and bool(self.pe.loss_names)

    def _block(
        self, pairs: Pairs, queries: Both[Tensor], keys: Both[Tensor], values: Tensor
    ) -> tuple[Tensor, Attended | None]:
        query, key, value = (x.view(*x.shape[:2], self.num_heads, -1) for x in (queries[0], keys[0], values))
        operands = None if self._learns or not contextual.takes(query, key, value) else self.pe.contextual(pairs)
        if operands is not None:  # one operator for all that follows
            dropout = (self.dropout.seed(), self.dropout.p) if self.dropout.is_active else None
            given = operands._asdict() | {"allowed": pairs.allowed, "product": self.scale, "dropout": dropout}
            return contextual.contextual_attention(query, key, value, **given), None
        query, rotated_query = each(self._split, queries)
        key, rotated_key = each(self._split, keys)
        value = self._split(values)
        vectors = ItemVectors(query, self.scale, key, value)
        in_one_call = not self._learns and attention.takes(query, lambda: self.num_heads * pairs.of_all_blocks)
        added = self.pe.plain_bias(vectors, pairs) if in_one_call else None
        if added is not None:
            rate = self.dropout.p if self.dropout.is_active else 0.0
            seed = self.dropout.seed() if rate and query.is_cpu else None
            sides_and_mask = rotated_query, rotated_key, value, pairs.additive_mask
            pooled = attention.attention(*sides_and_mask, added, self.scale, (seed, rate))
            return pooled.transpose(1, 2), None
        logits = rotated_query * self.scale @ rotated_key.transpose(-1, -2)  # scaled before: the products are more
        logits = self.pe.bias(logits, vectors, pairs)
        weights, mixed = self.pe.mix(self.dropout(pairs.softmax(logits)), vectors, pairs)
        pooled = weights.to(mixed.values.dtype) @ mixed.values  # (R, H, Q, d)
        return pooled.transpose(1, 2), Attended(logits, pooled, vectors, pairs)

    def _split(self, x: Tensor) -> Tensor:
        """(R, W, D) -> (R, H, W, d)"""
        return split_heads(x, self.num_heads).contiguous()
