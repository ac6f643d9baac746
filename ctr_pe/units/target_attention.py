"""Target attention: one target looks at its user's history (DIN, DIEN, DMIN, TIN).

B batch, L history slots, N real items of the batch, D item dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn

from ctr_pe.ops import step_seeds
from ctr_pe.pe.base import Losses, PositionEncoding, check_width
from ctr_pe.pe.vectors import Attended, TargetVectors
from ctr_pe.sequence.positions import Items, Pairs, Positions
from ctr_pe.units.scores import SCORES, candidate_scores
from ctr_pe.utils.errors import nearest


class TargetAttention(nn.Module):
    """interest = sum of a_j h_j with a = softmax over the real items of score(t, h_j) and position.

    Args:
        dim: item dim D, or ``pe.out_dim`` if the encoding widens the items.
        score: ``dot`` (t · h / sqrt(D)), ``bilinear``, ``din``, or a module with the signature of
            :class:`~ctr_pe.units.scores.DotScore`.
        pe: the encoding, with one head; none by default.
        softmax: False takes the masked logits themselves as weights, as the DIN paper does.

    Raises:
        ValueError: an unknown score, or an encoding of another dim or with several heads.
    """

    def __init__(
        self, dim: int, score: str | nn.Module = "dot", pe: PositionEncoding | None = None, softmax: bool = True
    ) -> None:
        super().__init__()
        if isinstance(score, str) and score not in SCORES:
            raise ValueError(f"score '{score}' is unknown: {nearest(score, SCORES)}")
        self.score: nn.Module = SCORES[score](dim) if isinstance(score, str) else score
        self.pe = pe if pe is not None else PositionEncoding(dim, max_len=1)
        if (self.pe.out_dim, self.pe.num_heads) != (dim, 1):
            raise ValueError(
                f"target attention of dim={dim} needs an encoding with out_dim={dim}, num_heads=1; "
                f"got out_dim={self.pe.out_dim}, num_heads={self.pe.num_heads}"
            )
        self.dim, self.softmax = dim, softmax

    def forward(
        self, target: Tensor, history: Tensor, positions: Positions, pairs: Pairs | None = None
    ) -> tuple[Tensor, Tensor]:
        """target (B, D), history (B, L, D) or packed (N, D), after ``pe.embed`` -> interest (B, D), weights (B, L).

        Weights are 0 at padding and, with softmax, sum to 1 over the real items; an empty history gives zeros. They
        are those of the softmax: an encoding may pool with others (``mix``).
        What padded slots of ``history`` hold does not matter.
        ``pairs``: ``positions.target_pairs(history and target as looked up)``; without, these two are their own.

        In evaluation a history may have K targets (B, K, D), which gives interests (B, K, D) and weights (B, K, L).
        """
        interest, weights, _ = self.attend(target, history, positions, pairs)
        return interest, weights

    def attend(
        self, target: Tensor, history: Tensor, positions: Positions, pairs: Pairs | None = None
    ) -> tuple[Tensor, Tensor, Losses]:
        """:meth:`forward`, and in training the encoding's losses."""
        check_width(target, self.dim, self.pe)
        check_width(history, self.dim, self.pe)
        items = positions.pack(history) if history.dim() == 3 else history
        pairs = positions.target_pairs(Items(items), Items(target)) if pairs is None else pairs
        rows = positions.item_rows
        real = [positions.real] if positions.real is not None and getattr(self.score, "masked", False) else []
        several = target.dim() == 3
        queries = target.flatten(0, -2)  # (B K, D)
        block = pairs.block
        query, keys = self.pe.rotate(queries, items, positions.at_target, positions.at_items)

        def scored(rotated: Tensor) -> Tensor:
            if several:
                return candidate_scores(self.score, query.view_as(target), block.pad(rotated)).unsqueeze(1)
            return block.pad(self.score(query, rotated, rows, *real))[:, None, None, :]

        def rescored(shift: Tensor) -> Tensor:
            if several:  # as one pair after the other
                places = row, one, slot = block.real_pairs(target.shape[1])
                own: Tensor = self.score(query, block.pad(keys)[row, slot] + shift, row * target.shape[1] + one)
                padded = own.new_zeros(*target.shape[:2], block.mask.shape[1])
                return padded.index_put(places, own).unsqueeze(1)
            drawn_here = self.training and step_seeds.active() is None
            with _side_stream(shift.device) if drawn_here else nullcontext():
                return scored(keys + shift)

        scale, project = getattr(self.score, "scale", 1.0), getattr(self.score, "project", None)
        vectors = TargetVectors(
            target.view(target.shape[0], 1, -1, target.shape[-1]), scale, items, block, rescored, project
        )
        logits = self.pe.bias(scored(keys), vectors, pairs)  # (B, 1, K, L)
        weights = pairs.softmax(logits) if self.softmax else logits * pairs.float_mask
        mixed, _ = self.pe.mix(weights, vectors, pairs)
        if several:
            of_items = positions.unpack(block.pack(weights[:, 0].mT)).mT
            return mixed[:, 0].to(items.dtype) @ block.pad(items), of_items, {}
        pooling = block.pack(mixed.flatten(1)).to(items.dtype).unsqueeze(-1)
        interest = positions.total(pooling * items)
        losses: Losses = {}
        if self.training and self.pe.loss_names:
            losses = self.pe.losses([Attended(logits, interest[:, None, None, :], vectors, pairs)])
        return interest, positions.unpack(block.pack(weights.flatten(1))), losses


@contextmanager
def _side_stream(device: torch.device) -> Iterator[None]:
    """Random numbers of the block come from a stream of their own, so that what follows draws what it would without:
    runs of one seed stay paired."""
    own = {} if device.type == "cpu" else {"device_type": device.type}
    with torch.random.fork_rng([device] if own else [], **own):
        with torch._C._DisableFuncTorch():  # a number, not one per module of vmap
            seed = int(torch.randint(2**62, ()))
        torch.manual_seed(seed)
        yield
