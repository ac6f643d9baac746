"""PDM, positions decoupled from items (Yu et al. 2022, "Improving Micro-video Recommendation": PDMRec).

B batch, L history slots, Q queries, H heads, D item dim, d = D / H head dim, R rows of a block, W its slots,
M rows that have items.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from ctr_pe.config.schema import Positive, Share, Weight
from ctr_pe.pe.base import About, PositionEncoding, PositionLinear
from ctr_pe.pe.contextual import widen
from ctr_pe.pe.tables import look_up, places, split_heads, vector_table
from ctr_pe.pe.vectors import Attended, Vectors
from ctr_pe.sequence.positions import Pairs
from ctr_pe.utils.random_generators import RandomGenerators

Augmentation = Literal["reorder", "mask", "crop"]
Contrasted = Literal["hidden", "last", "norm"]
AUGMENTATIONS, CONTRASTED = get_args(Augmentation), get_args(Contrasted)
Views = tuple[Tensor, Tensor]


class PDM(PositionEncoding):
    """A second attention, between positions: values are pooled with a + a^p (equations 1 to 4).

    a^p = softmax over the same allowed items of W_Q P[D_i] · W_K P[D_j] / sqrt(d), per head, whatever the score of a.
    It does not depend on items, so its logits are computed once for all rows. The weights sum to 2.

    Contrastive loss (equation 6), with a weight above 0 and in training: two augmented views of each row go through the
    layer's attention without positions; z, all their hidden vectors one after the other (zero where there is no item),
    are compared by dot products: a view's positive is the other view of its row, its negatives those of other rows.
    The loss is the mean over views, and layers add theirs up. Logits are those of the layer's softmax. In target
    attention, where items have no hidden vectors, a_j v_j is taken instead; the target is in z only where it is one of
    the sequence.

    Args:
        pdm_contrast: weight of the contrastive loss (paper: 0.1); 0 for none.
        pdm_augment: ``reorder`` shuffles consecutive items, ``crop`` drops them, ``mask`` drops items anywhere, whose
            slots stay empty.
        pdm_ratio: share of a row's items that it concerns, rounded down.
        pdm_contrast_on: ``hidden``, all hidden vectors; ``last``, that of the newest slot; ``norm``, all after add and
            norm: layer norm, without weights, of hidden vector + value, which stands for the residual that an encoding
            does not see.
        pdm_temperature: divides the dot products.
        position_index: of P, ``distance`` from the target or ``rank``, places from the oldest item on.

    Parameters: ``table (max_len + 1, D)``, P, N(0, 0.02), shared by the layers of a stack, the last row by all older
    items; ``query.weight``, ``key.weight`` (D, D) of each layer.

    Raises:
        ValueError: an unknown choice, or a number out of range.
    """

    about = About(
        paper="Yu 2022",
        equation="items pooled with a_j + a^p_j, a^p = softmax_j(W_Q P[0] · W_K P[D_j] / sqrt(d))",
        cost="L; L d and, per key, D d once for all rows",
        extrapolates="last row of P",
    )
    shared = ("table",)

    def __init__(
        self,
        dim: int,
        max_len: int,
        num_heads: int = 1,
        *,
        pdm_contrast: Weight = 0.0,
        pdm_augment: Augmentation = "reorder",
        pdm_ratio: Share = 0.2,
        pdm_contrast_on: Contrasted = "hidden",
        pdm_temperature: Positive = 1.0,
        position_index: Literal["distance", "rank"] = "distance",
    ) -> None:
        super().__init__(dim, max_len, num_heads)
        self.from_oldest = position_index == "rank"
        self.contrast, self.ratio = pdm_contrast, pdm_ratio
        self.augment = pdm_augment
        self.contrast_on = pdm_contrast_on
        self.temperature = pdm_temperature
        if pdm_contrast > 0:
            self.loss_names = (f"PDM {pdm_augment} contrast",)
        self.table = vector_table(max_len + 1, dim)
        self.query = PositionLinear(dim, dim, bias=False)
        self.key = PositionLinear(dim, dim, bias=False)
        self.generators = RandomGenerators(int(torch.randint(2**62, ())))

    def mix(self, weights: Tensor, vectors: Vectors, pairs: Pairs) -> tuple[Tensor, Vectors]:
        return weights + self.position_weights(pairs), vectors

    def losses(self, attended: Sequence[Attended]) -> dict[str, Tensor]:
        if not self.contrast or not attended:
            return {}
        views = [pair for one in attended for pair in self._views(one)]
        if not views:
            return {}
        return {self.loss_names[0]: self.contrast * contrast(views, self.temperature).mean()}

    def position_weights(self, pairs: Pairs) -> Tensor:
        """a^p (B, H, Q, L), zero where not allowed."""
        with torch.autocast(self.table.device.type, enabled=False):
            query, key = (
                split_heads(look_up(project(self.table), places(at, pairs, self.from_oldest)), self.num_heads)
                for project, at in ((self.query, pairs.query), (self.key, pairs.key))
            )
            return _softmax(widen(query @ key.mT * self.head_dim**-0.5), pairs)  # of logits (H, Q, L) or (R, H, Q, L)

    def _views(self, one: Attended) -> list[Views]:
        """Two views of each row, in groups of rows of like length."""
        logits, values, pairs = widen(one.logits), widen(one.vectors.values), one.pairs
        with torch.autocast(logits.device.type, enabled=False):
            first, second = (self._encode(logits, values, pairs, *self._augmented(pairs.block.mask)) for _ in range(2))
        if pairs.self_attention:
            return [(first, second)]
        blocks = pairs.positions.blocks  # target attention has all rows in one block, most of it padding
        parts = zip(blocks, *map(blocks.split_rows, (first, second)), strict=True) if blocks else ()
        return [(x[:, -block.mask.shape[1] :], y[:, -block.mask.shape[1] :]) for block, x, y in parts]

    def _augmented(self, mask: Tensor) -> tuple[Tensor, Tensor]:
        """A view of each row: the item (its slot) in each slot (R, W) int64, and which items are still there (R, W)."""
        draw = self.generators.next()
        count, width = mask.sum(1, keepdim=True), mask.shape[1]
        start, noise = (
            torch.rand(len(mask), n, generator=draw, dtype=torch.float64).to(mask.device) for n in (1, width)
        )
        size = (self.ratio * count.double() + 1e-9).long()  # 0.29 · 100 is a little less than 29
        slot = torch.arange(width, device=mask.device)
        if self.augment == "mask":
            lost = noise.masked_fill(~mask, 1.0).argsort(1).argsort(1) < size
            return slot.expand_as(mask), mask & ~lost
        first = width - count + (start * (count - size + 1)).long()
        piece = (slot >= first) & (slot < first + size)
        if self.augment == "reorder":
            return torch.where(piece, first + size * noise, slot.double()).argsort(1), mask
        return torch.where(piece, slot - width, slot).argsort(1), mask & ~piece  # the rest moves up to the newest

    def _encode(self, logits: Tensor, values: Tensor, pairs: Pairs, order: Tensor, there: Tensor) -> Tensor:
        """Vectors (R, W, D) of each row's view, in its order; the newest alone (R, 1, D) for ``last``."""
        slot = order.argsort(1)  # of each item, in the view
        allowed = pairs.allowed.gather(-1, slot[:, None, None].expand_as(pairs.allowed)) & there[:, None, None]
        if pairs.self_attention:  # items see what is before them in the new order, so none has to be moved
            allowed = allowed.gather(-2, slot[:, None, :, None].expand_as(allowed)) & there[:, None, :, None]
        weights = _softmax(logits, replace(pairs, allowed=allowed))
        hidden = weights @ values if pairs.self_attention else weights.mT * values
        if self.contrast_on == "norm":
            hidden = hidden + values
        hidden = hidden.transpose(1, 2).flatten(2)  # (R, W, D)
        if self.contrast_on == "norm":
            hidden = nn.functional.layer_norm(hidden, hidden.shape[2:]) * there.unsqueeze(-1)
        z = hidden.gather(1, order.unsqueeze(-1).expand_as(hidden))
        return z[:, -1:] if self.contrast_on == "last" else z


def contrast(views: Sequence[Views], temperature: float = 1.0) -> Tensor:
    """-log of the twin's share in exp(z · z' / temperature) among the other 2 M - 1 views (equation 6).

    Args:
        views: groups of rows, each with two views (R, W, D): vectors in W slots, the newest last. Groups may differ in
            W, what is missing is zero.

    Returns:
        (2 M,), one per view of the M rows of all groups.
    """
    groups: list[list[Views]] = []
    for pair in sorted(views, key=lambda pair: pair[0].shape[1]):
        if not groups or pair[0].shape[1] > 1.5 * groups[-1][0][0].shape[1]:
            groups.append([])  # groups of like width are put together
        groups[-1].append(pair)
    flat, twins, rows = [], [], 0
    for group in groups:
        width = group[-1][0].shape[1]
        sides = [view for side in zip(*group, strict=True) for view in side]  # first views, then second
        z = torch.cat([nn.functional.pad(view, (0, 0, width - view.shape[1], 0)) for view in sides])
        flat.append(z.flip(1).flatten(1))  # the newest first
        twins.append(rows + torch.arange(len(z), device=z.device).roll(len(z) // 2))
        rows += len(z)
    # Products with wider groups need the newest slots alone.
    upper, done = [], 0
    for index, z in enumerate(flat):
        others = torch.cat([other[:, : z.shape[1]] for other in flat[index:]])
        upper.append(nn.functional.pad(z @ others.T, (done, 0)))
        done += len(z)
    products = torch.cat(upper).triu(1)
    products = ((products + products.T) / temperature).fill_diagonal_(-torch.inf)
    return nn.functional.cross_entropy(products, torch.cat(twins), reduction="none")


def _softmax(logits: Tensor, pairs: Pairs) -> Tensor:
    """Zero where nothing is allowed, too."""
    return pairs.softmax(logits) * pairs.allowed.any(-1, keepdim=True).to(logits.dtype)
