"""DIF-SR, decoupled side information fusion for sequential recommendation (Xie et al. 2022, arXiv 2204.11046).

P questions, M values of an attribute, C ids of it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ctr_pe.config.schema import Weight
from ctr_pe.models.sequential_transformer import SequentialTransformer
from ctr_pe.pe.base import Losses, sum_losses
from ctr_pe.sequence.positions import Items, Positions


class DIFSR(SequentialTransformer):
    """Causal transformer blocks over the ids of items, whose attributes have attention scores of their own in every
    block; in training the state predicts the attributes of the next item, too.

    The scores are those of the encoding ``dif`` (equations 8 to 10) with the keys ``dif_fusion`` and
    ``dif_source_dim``. Position is one more source of them (``native``, or ``dif``); with ``none`` it is none, and any
    other encoding takes its place in the score of the ids. States predict items by their ids (equation 13).

    Other keys are those of :class:`~ctr_pe.models.sequential_transformer.SequentialTransformer`.

    Args:
        attribute_weight: λ (equation 17), of the attribute predictors σ(W h + b) (equation 14); 0 for none. The loss
            of each is a binary cross-entropy (equation 16), mean over ids, as in the authors' code, whose λ this is,
            and over questions; the paper has the sum over ids. An item has an attribute once, however often it is
            listed; no value is no id.

    Parameters: those of blocks and encoding; ``predictors.f (C - 1, id dim)`` with bias, for attributes f = 1, 2, …
    with ids.
    """

    native = "dif"
    predicts_by_id = True

    def __init__(
        self, feature_map: Any, model_id: str = "DIFSR", attribute_weight: Weight = 10.0, **kwargs: Any
    ) -> None:
        super().__init__(feature_map, model_id, **kwargs)
        others = [link for link in self.group.encoding.split("+") if link not in ("none", "native", "dif")]
        of_position = {"native", "dif"} & {*self.group.encoding.split("+")}
        self.encoding_options.setdefault("dif_positions", bool(of_position))
        specs = [self.feature_map.features[field] for field in self.group.target]
        predicted = {
            str(f): int(spec["vocab_size"])
            for f, spec in enumerate(specs)
            if f and attribute_weight and (self.group.sizes[f] or "values" in spec)
        }
        self.attribute_weight = attribute_weight
        self.predictors = nn.ModuleDict({f: nn.Linear(self.item_dim, ids - 1) for f, ids in predicted.items()})
        self.encoder = self.build_encoder(self.item_dim, encoding="+".join(["dif", *others]))
        self.build_items(self.encoder.dim)

    def states(self, items: Items, positions: Positions) -> tuple[Tensor, Losses]:
        return self.encoder.encode(items.embedding[:, : self.item_dim], items, positions)

    def newest_states(self, items: Items, positions: Positions) -> Tensor:
        return self.encoder.newest(items.embedding[:, : self.item_dim], items, positions)

    def questions(self, items: Items, positions: Positions, following: Tensor) -> tuple[Tensor, Tensor, Losses]:
        states, losses = self.states(items, positions)
        wanted, answers = states[following >= 0].float(), following[following >= 0]
        found = [
            attribute_loss(predictor(wanted), self.get_buffer(f"attribute_{f}")[answers])
            for f, predictor in self.predictors.items()
        ]
        if found:
            losses = sum_losses(losses, {"attribute predictors": self.attribute_weight * torch.stack(found).sum()})
        return states, following, losses


def attribute_loss(logits: Tensor, values: Tensor) -> Tensor:
    """logits (P, C - 1) of ids 1, 2, … and the ids (P,) or (P, M) that an item has, 0 for none -> the mean binary
    cross-entropy, 0 without questions."""
    has = torch.zeros(len(logits), logits.shape[1] + 1, device=logits.device, dtype=logits.dtype)
    has.scatter_(1, values if values.dim() == 2 else values.unsqueeze(1), 1.0)
    every = nn.functional.binary_cross_entropy_with_logits(logits, has[:, 1:], reduction="sum")
    return every / max(1, logits.numel())
