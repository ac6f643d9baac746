"""DIF-SR, decoupled side information fusion (Xie et al. 2022, arXiv 2204.11046).

B batch, N real items of the batch, R rows of a block, L its slots, Q queries, H heads, D item dim,
A dims of all attributes, S sources, P dim of the position source, K columns of a fusion.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from ctr_pe.config.schema import Weight
from ctr_pe.ops import native
from ctr_pe.pe.base import About, PositionEncoding, PositionLinear, check_fields
from ctr_pe.pe.contextual import widen
from ctr_pe.pe.tables import look_up, places, split_heads, vector_table
from ctr_pe.pe.vectors import Attended, Vectors
from ctr_pe.sequence.positions import Pairs


class DIF(PositionEncoding):
    """Each attribute of the items, and their position, has attention scores of its own; all are fused with the item's.

    Equations 8 to 10: att_s = (E_s WQ_s)(E_s WK_s)ᵀ per head for every source s, softmax(F(att) / sqrt(d)), d that of
    the item's heads. The item's source is the unit's own logit, whatever its score, and brings its own scale. E_s of an
    attribute is its field in the items as they were looked up, in every layer; the target's in target attention. E_s
    of positions is a table by distance. Values are the items'.

    What the paper leaves open or its code does otherwise:

    - The paper's item is its id alone. Here the item's own source and the values see the item as the model has it, as
      a rule with all its fields, and the attributes have scores of their own beside it. With dim that of the id alone
      it is the paper's (:class:`~ctr_pe.model_zoo.next_item.dif_sr.DIFSR`).
    - In target attention attributes are scored by products too, also beside a DIN or bilinear score.
    - ``concat`` and ``gate`` act on whole rows of scores. Forbidden scores are zero in them, and columns count items
      from the query (from the newest item where attention is bidirectional), so neither sees the future or padding.
      They have ``max_len`` columns; keys further back are summed over the sources by ``concat``, weighted like the rest
      of their row by ``gate``.

    Args:
        field_dims: width of each field of an item, side by side, the id first; None for no attribute.
        field_sizes: ids of each field, 0 for a field of vectors, which is not predicted.
        dif_fusion: F. ``sum``; ``concat``, a linear map from the columns of all sources to those of one; ``gate``, a
            weighted mean with weights softmax over s of w · ReLU(W att_s + b), per head and query.
        dif_source_dim: dims of an attribute's projections, all heads together: one for all attributes or one each; by
            default the field's own, rounded up to a multiple of the heads.
        dif_positions: whether position is a source.
        dif_position_dim: P, of table and projections; by default 16 per head, at most D, which the authors' code has.
        dif_predict: λ, weight of the attribute predictors (equations 14 to 17); 0 for none. In training, what the layer
            pools predicts the attributes of the clicked target, in causal self-attention those of the next item if it
            was chosen, by binary cross-entropies, mean over rows and ids. Id 0 is neither predicted nor an answer.
            Stacked layers each have predictors and their losses add up. Bidirectional self-attention has none: it
            would see the answer.
        position_index: of the table, ``distance`` from the target or ``rank``, places from the oldest item on.

    Parameters: per attribute f = 1, 2, … ``sources.f.query.weight``, ``sources.f.key.weight (source dim, field dim)``;
    ``table (max_len + 1, P)``, N(0, 0.02), ``position.query.weight``, ``position.key.weight (P, P)``; ``concat (K, S,
    K)``: to which column from which of which source (the item, attributes, position), identities; ``gate.0 (K, K)``,
    with bias, ``gate.1 (1, K)``; ``predictors.f (ids, D)``, with bias. Query projections start at zero: sum and concat
    start exactly as without positions, gate with a share of the item's logits, about 1 / S. Without any source nothing
    is added.

    Raises:
        ValueError: field_dims of which neither all nor the first are dim wide, field_sizes of another length, an
            unknown dif_fusion, dims that are no multiple of the heads, a negative dif_predict.
    """

    about = About(
        paper="Xie 2022",
        equation="s_j + (sum over fields f of (Q_f t_f) · (K_f h_j,f) + (Q p_0) · (K p_{D_j})) / sqrt(d)",
        cost="L per dim of the fields' projections; P² + L P for positions, once for all rows",
        extrapolates="last row",
    )

    def __init__(
        self,
        dim: int,
        max_len: int,
        num_heads: int = 1,
        *,
        field_dims: Sequence[int] | None = None,
        field_sizes: Sequence[int] | None = None,
        dif_fusion: Literal["sum", "concat", "gate"] = "sum",
        dif_source_dim: int | Sequence[int] | None = None,
        dif_positions: bool = True,
        dif_position_dim: int | None = None,
        dif_predict: Weight = 0.0,
        position_index: Literal["distance", "rank"] = "distance",
    ) -> None:
        super().__init__(dim, max_len, num_heads)
        self.from_oldest = position_index == "rank"
        fields = check_fields(field_dims, dim)
        if field_sizes is not None and len(field_sizes) != len(fields):
            raise ValueError(f"field_sizes={list(field_sizes)} are not as many as field_dims={fields}")
        self.widths, self.attributes = fields[1:], slice(fields[0], sum(fields))  # of items as looked up
        self.scale = self.head_dim**-0.5

        dims = self._source_dims(dif_source_dim)
        sizes = zip(self.widths, dims, strict=True)
        self.sources = nn.ModuleDict(
            {str(f): AttributeSource(*size, num_heads) for f, size in enumerate(sizes, start=1)}
        )
        self.position: AttributeSource | None = None
        if dif_positions:
            default = num_heads * min(16, self.head_dim)
            wide = default if dif_position_dim is None else self._checked("dif_position_dim", dif_position_dim)
            self.table = vector_table(max_len + 1, wide)
            self.position = AttributeSource(wide, wide, num_heads)

        count = 1 + len(self.sources) + bool(dif_positions)
        self.fusion = dif_fusion if count > 1 else "sum"
        if self.fusion == "concat":
            self.concat = nn.Parameter(torch.eye(max_len).unsqueeze(1).repeat(1, count, 1))
        if self.fusion == "gate":
            # A bias after the last layer would cancel in the softmax over the sources.
            self.gate = nn.ModuleList([PositionLinear(max_len, max_len), PositionLinear(max_len, 1, bias=False)])

        self.predict = float(dif_predict)
        ids = {} if field_sizes is None or not dif_predict else dict(enumerate(field_sizes[1:], start=1))
        self.predictors = nn.ModuleDict({str(f): PositionLinear(dim, count) for f, count in ids.items() if count > 1})
        if self.predictors:
            self.loss_names = ("attribute predictors",)

    def _source_dims(self, given: int | Sequence[int] | None) -> list[int]:
        """Dims of each attribute's projections."""
        if given is None:
            return [-(-width // self.num_heads) * self.num_heads for width in self.widths]
        dims = list(given) if isinstance(given, Sequence) else [given] * len(self.widths)
        if len(dims) != len(self.widths):
            raise ValueError(f"dif_source_dim={dims} is not one for each of {len(self.widths)} attributes")
        return [self._checked("dif_source_dim", size) for size in dims]

    def _checked(self, name: str, size: int) -> int:
        if not isinstance(size, int) or size < 1 or size % self.num_heads:
            raise ValueError(f"{name} must be a positive multiple of num_heads={self.num_heads}, got {size!r}")
        return size

    def bias(self, logits: Tensor, vectors: Vectors, pairs: Pairs) -> Tensor:
        split = self.fusion != "sum"
        scores = [logits]
        if self.widths:
            attributes = self._among_items if pairs.self_attention else self._of_target
            scores += attributes(pairs, split)
        if self.position is not None:
            rows = (look_up(self.table, places(at, pairs, self.from_oldest)) for at in (pairs.query, pairs.key))
            queried, keyed = self.position(*rows)  # by distance the same in every row
            scores.append((queried @ keyed.transpose(-1, -2) * self.scale).expand_as(logits))
        if self.fusion == "concat":
            return self._concatenated(scores, pairs)
        if self.fusion == "gate":
            return self._gated(scores, pairs)
        return sum(scores[1:], logits)

    def _of_target(self, pairs: Pairs, split: bool) -> list[Tensor]:
        """Scores (B, 1, K, L) of the targets' attributes and the items', one for each or their sum."""
        assert pairs.target is not None
        targets = torch.split(pairs.target.embedding[..., self.attributes], self.widths, -1)
        # q · (WK e) = (WKᵀ q) · e: nothing is projected per item.
        sought = [source.in_keys(target) for source, target in zip(self._sources, targets, strict=True)]
        if pairs.target.several:
            keys = pairs.embedding(self.attributes)
            apiece = (
                zip(sought, torch.split(keys, self.widths, -1), strict=True)
                if split
                else [(torch.cat(sought, -1), keys)]
            )
            return [(query * self.scale @ key.mT).unsqueeze(1) for query, key in apiece]
        rows = pairs.positions.item_rows
        products = torch.cat(sought, -1).index_select(0, rows) * pairs.items.embedding[:, self.attributes]  # (N, A)
        parts = torch.split(products, self.widths, -1) if split else (products,)
        return [pairs.block.pad(part.sum(-1) * self.scale)[:, None, None] for part in parts]

    def _among_items(self, pairs: Pairs, split: bool) -> list[Tensor]:
        """Scores (R, H, Q, L) of the items' attributes, one for each or their sum."""
        fields = torch.split(pairs.embedding(self.attributes), self.widths, -1)
        newest = pairs.query.distance.shape[-1]  # queries are the last items, or all
        projected = [source(field[:, -newest:], field) for source, field in zip(self._sources, fields, strict=True)]
        if len(projected) > 1 and not split:  # a sum of products is a product of vectors side by side
            queries, keys = zip(*projected, strict=True)
            projected = [(torch.cat(queries, -1), torch.cat(keys, -1))]
        return [queried * self.scale @ keyed.transpose(-1, -2) for queried, keyed in projected]

    @property
    def _sources(self) -> list[AttributeSource]:
        return [source for source in self.sources.values() if isinstance(source, AttributeSource)]

    def _concatenated(self, scores: list[Tensor], pairs: Pairs) -> Tensor:
        column, rows = self._columns(scores, pairs)
        width = min(self.max_len, rows[0].shape[-1])
        weight = self.concat[:width, :, :width]
        fused = torch.stack([row[..., :width] @ weight[:, s].T for s, row in enumerate(rows)]).sum(0)
        if rows[0].shape[-1] > width:
            fused = torch.cat([fused, torch.stack([row[..., width:] for row in rows]).sum(0)], -1)
        return fused.take_along_dim(column, -1)

    def _gated(self, scores: list[Tensor], pairs: Pairs) -> Tensor:
        inner, outer = self.gate
        assert isinstance(inner, nn.Linear)
        columns = self._columns(scores, pairs)[1]
        width = min(self.max_len, columns[0].shape[-1])
        rows = torch.stack([row[..., :width] for row in columns])  # (S, R, H, Q, columns)
        hidden = nn.functional.linear(rows, inner.weight[:, :width], inner.bias).relu()
        share = outer(hidden).softmax(0)
        return torch.stack([part * score for part, score in zip(share, scores, strict=True)]).sum(0)

    def _columns(self, scores: list[Tensor], pairs: Pairs) -> tuple[Tensor, list[Tensor]]:
        """:func:`_by_column`; in a graph with ``max_len`` columns of zeros more, so that all weights are read whatever
        the length of a history."""
        column, rows = _by_column(scores, pairs)
        return column, [nn.functional.pad(row, (0, self.max_len)) for row in rows] if native.traced() else rows

    def losses(self, attended: Sequence[Attended]) -> dict[str, Tensor]:
        """Of the attributes of what was chosen: the target, or in self-attention the item after each."""
        if not self.predictors or not attended or not attended[0].pairs.causal:
            return {}
        pairs = attended[0].pairs
        answers_of = pairs.items if pairs.self_attention else pairs.target
        if answers_of is None or answers_of.chosen is None or not answers_of.ids:
            return {}
        chosen, ids = answers_of.chosen, answers_of.ids
        if pairs.self_attention:  # the packed item after this one, if it is of the same row
            rows = pairs.positions.item_rows
            same_row = torch.cat([rows[1:] == rows[:-1], chosen.new_zeros(1)])
            chosen, ids = chosen.roll(-1) & same_row, tuple(field.roll(-1) for field in ids)
        found = []
        for one in attended:
            block, pooled = one.pairs.block, one.pooled.transpose(1, 2).flatten(2)  # (R, Q, D)
            states, index = (block.pack(pooled), block.items) if pairs.self_attention else (pooled[:, 0], block.rows)
            for field, predictor in self.predictors.items():
                answers = ids[int(field)]
                known = chosen & (answers > 0)
                here = known[index]
                loss = _cross_entropies(widen(predictor(states[here]))[:, 1:], answers[index][here] - 1)
                found.append(loss.sum() / known.sum().clamp(min=1))  # a mean over all blocks of the batch
        return {"attribute predictors": self.predict * torch.stack(found).sum()}


class AttributeSource(nn.Module):
    """What attends by one source: its query and key projections, (source dim, input dim), without bias."""

    def __init__(self, input_dim: int, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.query, self.key = (PositionLinear(input_dim, dim, bias=False) for _ in range(2))
        nn.init.zeros_(self.query.weight)

    def forward(self, queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        """queries (..., Q, input dim), keys (..., L, input dim) -> (..., H, Q, d), (..., H, L, d)."""
        return split_heads(self.query(queries), self.num_heads), split_heads(self.key(keys), self.num_heads)

    def in_keys(self, queries: Tensor) -> Tensor:
        """(..., input dim) -> WKᵀ WQ x (..., input dim): its product with a key's vector is the score of one head."""
        sought: Tensor = self.query(queries) @ self.key.weight
        return sought


def _by_column(scores: list[Tensor], pairs: Pairs) -> tuple[Tensor, list[Tensor]]:
    """The column of a fusion that each key has, (1, 1, Q, L), which is also the key that each column has; and scores
    (R, H, Q, L) with keys in the order of their columns, zero where forbidden."""
    if pairs.self_attention and pairs.causal:
        column = pairs.offset % pairs.offset.shape[-1]  # later keys, which are forbidden, come last
    else:
        column = (pairs.key.distance - 1).unsqueeze(-2).expand_as(pairs.offset)
    return column, [score.masked_fill(~pairs.allowed, 0.0).take_along_dim(column, -1) for score in scores]


def _cross_entropies(logits: Tensor, answer: Tensor) -> Tensor:
    """logits (M, C), answer (M,) -> (M,): binary cross-entropy of one hot labels, mean over the C ids."""
    right = logits.take_along_dim(answer.unsqueeze(-1), -1).squeeze(-1)
    return (nn.functional.softplus(logits).sum(-1) - right) / logits.shape[-1]
