"""What every CTR backbone shares: interests, tower, forward. Training is :mod:`ctr_pe.training`.

B batch, L history slots, N real items of the batch, D item dim (the fields of an item, concatenated).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ctr_pe.config.schema import Activation, Rate, Widths
from ctr_pe.fuxictr.adapter import MLP
from ctr_pe.models import candidates
from ctr_pe.models.candidates import Encoded
from ctr_pe.models.groups import field_dim, other_fields
from ctr_pe.models.history_model import HistoryModel
from ctr_pe.pe.base import Losses, sum_losses
from ctr_pe.sequence.positions import Items, Positions
from ctr_pe.utils import distributed


class RankModel(HistoryModel):
    """A FuxiCTR model that scores a target item against one or several histories.

    A subclass builds its units (``build_encoding`` gives each its encoding), calls ``build_tower`` last, and defines
    ``interest``.

    Args:
        feature_map: FuxiCTR's. Histories are right- or left-padded ids with padding 0.
        dnn_hidden_units, dnn_activations, net_dropout, batch_norm: the tower; ``bn_only_once`` norms its input alone.
        kwargs: the keys of :class:`~ctr_pe.models.history_model.HistoryModel`.

    Raises:
        UserError: as HistoryModel.
    """

    pairs_at_once: ClassVar[int] = candidates.PAIRS
    fillable: ClassVar[bool] = False
    """Whether rows and items that follow those of a batch change nothing in training (:mod:`ctr_pe.sequence.filled`).
    A class says so for itself, not for those derived from it."""

    def __init__(
        self,
        feature_map: Any,
        model_id: str = "RankModel",
        dnn_hidden_units: Widths = (512, 128, 64),
        dnn_activations: Activation = "ReLU",
        net_dropout: Rate = 0.0,
        batch_norm: bool = False,
        bn_only_once: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(feature_map, model_id, **kwargs)
        self.other_fields = other_fields(self.feature_map.features, self.encoders, self._history_columns)
        self._tower: dict[str, Any] = {
            "hidden_units": dnn_hidden_units,
            "hidden_activations": dnn_activations,
            "dropout_rates": net_dropout,
            "batch_norm": batch_norm,
            "bn_only_once": bn_only_once,
        }

    def build_tower(self, interest_dims: Iterable[int]) -> None:
        """The MLP over all other fields and the interests; then optimiser, initial weights and device."""
        specs = self.feature_map.features
        width = sum(field_dim(specs[name], self.embedding_dim) for name in self.other_fields) + sum(interest_dims)
        self.dnn = MLP(width, **self._tower, output_dim=1, output_activation=self.output_activation)
        self.finish()

    def interest(self, index: int, target: Items, history: Items, positions: Positions) -> tuple[Tensor, Losses]:
        """Group ``index``: targets (B, D) and packed history (N, D) as looked up -> interest (B, any width), and in
        training what else is to be minimised, by name."""
        raise TypeError(f"{type(self).__name__} does not define interest()")

    def forward(self, inputs: Mapping[str, Tensor]) -> dict[str, Any]:
        """A JaggedBatch, or a batch of FuxiCTR's form -> {"y_pred": click probability (B, 1)}; in training also
        "penalties", the regularisation of embedding tables by their weights, and "losses", what else is to be
        minimised, by name."""
        plan = self.planned(inputs).plan
        ids = plan.ids()
        embedded, penalties = self.look_up(ids)
        features, losses = [embedded[name] for name in self.other_fields], Losses()
        clicked = plan.label > 0 if self.training and plan.label is not None else None
        if clicked is not None and plan.rows is not None:
            clicked = nn.functional.pad(clicked, (0, len(next(iter(plan.fields.values()))) - plan.rows))
        of_groups = zip(self.groups, plan.histories, plan.items(embedded), strict=True)
        for index, (group, given, vectors) in enumerate(of_groups):
            target = torch.cat([embedded[field] for field in group.target], dim=-1)
            chosen = None if clicked is None else clicked.new_full((len(vectors),), group.chosen)
            history = Items(vectors, tuple(given.ids.values()), chosen, given.all_ids)
            targets = Items(target, tuple(ids[field] for field in group.target), clicked)
            with self.precision():
                interest, more = self.interest(index, targets, history, given.positions)
            features.append(interest.to(target.dtype))
            losses = sum_losses(losses, more)
        rows = len(target) if plan.rows is None else plan.rows
        if self.training and rows * distributed.processes() == 1:  # no variance: batch norm and Dice use running ones
            self.dnn.eval()
        y_pred = self.dnn(torch.cat(features, dim=-1)[:rows])
        self.dnn.train(self.training)
        if not self.training:
            return {"y_pred": y_pred}
        return {"y_pred": y_pred, "penalties": penalties, "losses": losses, "weight": plan.weight}

    # One user, many candidates.

    def encode(self, inputs: Mapping[str, Tensor]) -> Encoded:
        """What :meth:`score_candidates` needs of the histories, of which ``inputs`` has the fields and ages."""
        return candidates.encode(self, inputs)

    def score_candidates(self, encoded: Encoded, inputs: Mapping[str, Tensor]) -> Tensor:
        """The scores (B, K) that K targets of each history have in ``forward``; in evaluation mode.

        ``inputs``: all other fields, ids of targets (B, K); a field of the user or the request may have (B,).
        """
        return candidates.score(self, encoded, inputs)

    def encode_history(self, index: int, history: Items, positions: Positions) -> Any:
        """Group ``index``: what of packed history (N, D) does not depend on the target. See
        :meth:`of_candidates`."""
        return None

    def of_candidates(self, index: int, target: Items, history: Items, states: Any, positions: Positions) -> Tensor:
        """Group ``index``: ``interest`` (B, K, any width) of K targets (B, K, D), with ``states`` by
        ``encode_history``. By default each target gets a copy of its history."""
        return candidates.row_by_row(self, index, target, history, positions)
